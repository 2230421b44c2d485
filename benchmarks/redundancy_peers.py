"""Which redundant heads other people's packages find, on the models of `localizers/redundancy`.

causal head gating (Nam et al., 2025: `nam-causal-head-gating`) and node attribution of circuitkit, as functions from a
model and a pair of prompts to scores, as methods by the entry point are. Both get the trained weights exactly: one as
a module of PyTorch with the hook that it needs, the other as a `HookedTransformer`. Thresholds are chosen on the models
of `localizers/redundancy-tuning`, as those of this package's methods.

    python benchmarks/redundancy_peers.py TUNING HELD_OUT OUT

TUNING and HELD_OUT are the folders given as `--out` to `reproduce localizers/redundancy-tuning` and
`localizers/redundancy`. It needs an environment of its own, with `transformer-lens==3.8.0`, `circuitkit==0.2.0` (which
wants that version) and `nam-causal-head-gating==0.1.0`.
"""

import argparse
import time
from collections import deque
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

with suppress(ImportError):
    import_module("circuitkit")  # changes TransformerLens, and must come before it

import numpy as np
import pandas as pd
import torch
import transformer_lens as tl
from safetensors.torch import load_file
from torch import Tensor, nn

from align_circuits.localizers.registry import scores_by_role
from align_circuits.models.planted.hand_built_transformer import HandBuilt
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES
from align_circuits.papers.lab import training_folder
from align_circuits.papers.localizer_zoo import seconds_of
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import config_of
from align_circuits.tasks.task import exchanged
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.redundancy import (
    REDUNDANCY,
    REDUNDANCY_TUNING,
    Models,
    measured_by_model,
    rows_of,
    thresholds_on,
)
from align_circuits.validation.redundant_circuits import RedundantCircuit, add_noise, noise_of, train_redundant_circuit

UPDATES = 100
"""Of causal head gating in each of its first two stages; its default of 500 takes five times as long."""

PACKAGES = ("transformer-lens", "circuitkit", "nam-causal-head-gating")


class _Gateable(nn.Module):
    """A `HandBuilt` model with a linear layer after the heads of each layer, whose input causal head gating scales."""

    def __init__(self, model: HandBuilt):
        super().__init__()
        self.hand_built, cfg = model, model.cfg
        self.config = SimpleNamespace(
            num_hidden_layers=cfg.n_layers, num_attention_heads=cfg.n_heads, hidden_size=cfg.n_heads * cfg.d_head
        )
        self.projections = nn.ModuleList(nn.Identity() for _ in range(cfg.n_layers))

    def forward(self, tokens: Tensor) -> Any:
        def through(layer: int, z: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
            return self.projections[layer](z.flatten(2)).view_as(z)

        hooks: Any = [
            (f"blocks.{layer}.attn.hook_z", partial(through, layer)) for layer in range(len(self.projections))
        ]
        return SimpleNamespace(logits=self.hand_built.run_with_hooks(tokens, fwd_hooks=hooks))


def causal_head_gating(model: HandBuilt, pair: Pair) -> np.ndarray:
    """Scores heads by the gates that are left where a price pushes all of them to 0, after gates without a price."""
    names = ("core.trainer", "data.datasets", "models.adapters")
    trainers, datasets, adapters = (import_module(f"causal_head_gating.{name}") for name in names)

    class Adapter(adapters.ModelAdapter):
        def get_layers(self) -> nn.ModuleList:
            return self.model.projections

        def get_attention_output_proj(self, layer: nn.Module) -> nn.Module:
            return layer

    prompts = pair.clean
    wanted = torch.zeros_like(prompts.tokens, dtype=torch.bool)
    wanted[prompts.column("prompt"), prompts.column("query_pos") + 1] = True  # the tokens that are predicted
    dataset = datasets.MaskedSequenceDataset(-1, input_ids=prompts.tokens, loss_masks=wanted)
    gateable = _Gateable(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trainer = trainers.CHGTrainer(gateable, dataset, batch_size=8, adapter=Adapter(gateable))
        deque(trainer.fit_stage("none", UPDATES, show_progress=False), maxlen=0)
        trainer.mask_logits_neg.data.copy_(trainer.mask_logits.data)
        ((gates, _),) = deque(trainer.fit_stage("negative", UPDATES, show_progress=False), maxlen=1)
    return gates.double().numpy()


def node_attribution(method: str, model: HandBuilt, pair: Pair) -> np.ndarray:
    """Scores heads by circuitkit's attribution of nodes: its size, as its own choice of nodes takes it."""
    attribute, graph_of = (import_module(f"circuitkit.backends.eap.{name}") for name in ("attribute_node", "graph"))
    hooked = as_hooked_transformer(model)
    texts = [
        [model.tokenizer.decode(tokens[1:]) for tokens in prompts.tokens] for prompts in (pair.clean, pair.corrupted)
    ]
    assert torch.equal(hooked.to_tokens(texts[0], prepend_bos=True), pair.clean.tokens), "the peer reads other tokens"
    targets = TargetMetrics.of(pair.clean, ("log_prob",))

    def metric(logits: Tensor, *_: Any) -> Tensor:
        return logits[targets.prompt, targets.query].log_softmax(-1).gather(1, targets.token[:, None]).mean()

    graph = graph_of.Graph.from_model(hooked, node_scores=True)
    data = [(*texts, torch.zeros(len(pair.clean)))]
    attribute.attribute_node(hooked, graph, data, metric, method, quiet=True)
    scores = np.zeros((model.cfg.n_layers, model.cfg.n_heads))
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            scores[layer, head] = abs(float(graph.nodes[f"a{layer}.h{head}"].score))
    return scores


def as_hooked_transformer(model: HandBuilt) -> tl.HookedTransformer:
    """Returns the same model as TransformerLens's own class; its logits are the same up to rounding."""
    cfg = model.cfg
    config = tl.HookedTransformerConfig(
        n_layers=cfg.n_layers,
        d_model=cfg.d_model,
        n_ctx=cfg.n_ctx,
        d_head=cfg.d_head,
        n_heads=cfg.n_heads,
        d_mlp=cfg.d_mlp,
        d_vocab=cfg.d_vocab,
        act_fn="relu",
        normalization_type=None,
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
    )
    hooked = tl.HookedTransformer(config)
    renamed = {"W_E": "embed.W_E", "W_pos": "pos_embed.W_pos", "W_U": "unembed.W_U"}
    weights = {renamed.get(name, name): value.detach().clone() for name, value in model.named_parameters()}
    hooked.load_state_dict(weights, strict=False)
    hooked.set_tokenizer(model.tokenizer)
    return hooked.eval()


PEERS = {
    "causal head gating": causal_head_gating,
    "circuitkit, EAP": partial(node_attribution, "EAP"),
    "circuitkit, EAP-IG": partial(node_attribution, "EAP-IG-inputs"),
    "circuitkit, exact": partial(node_attribution, "exact"),
}


def trained_in(folder: Path, seed: int, steps: int) -> RedundantCircuit:
    """Returns a trained model from its weights: the check of a training's folder asks for the environment it had."""
    task = trained_task(seed)
    kept = training_folder(str(folder / "trained"), "redundant-circuit", config_of(task), steps, seed)
    model = train_redundant_circuit(task, seed, steps=0)
    stored = load_file(Path(kept) / "checkpoint.safetensors")
    prefix = "model.model."
    weights = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    model.load_state_dict(weights)
    add_noise(model, noise_of(seed), Rng(seed, "redundant circuit"))
    return model


def scored(folder: Path, config: Models, seeds: list[int]) -> pd.DataFrame:
    """Returns the rows of `score_one`, of the peers, on the models of some seeds."""
    rows = []
    for seed in seeds:
        model = trained_in(folder, seed, config.steps)
        prompts = model.task.sample(config.n, model.tokenizer, seed=seed)
        pair = Pair(*exchanged(prompts))
        hooked = as_hooked_transformer(model)
        assert torch.allclose(hooked(prompts.tokens), model(prompts.tokens), atol=1e-3), "the peer has another model"
        a_pass = seconds_of(lambda model=model, prompts=prompts: model(prompts.tokens))
        for name, method in PEERS.items():
            began = time.process_time()
            grids = scores_by_role(name, method(model, pair), model, CIRCUIT_ROLES)
            rows.append({"method": name, "seed": seed, "value": (time.process_time() - began) / a_pass})
            rows += [{"seed": seed, **row} for row in rows_of(model, name, grids)]
        print(seed, flush=True)
    return pd.DataFrame(rows)


def known(name: str, config: Models) -> list[int]:
    """Returns the seeds of the models that reached enough, by the kept table of an experiment."""
    kept: Any = Table.load(Path("docs/results") / name.replace("/", "-") / "cpu").frame
    seeds = set(kept.loc[kept["metric"] == "precision", "seed"])
    return [seed for seed in range(config.first, config.first + config.models) if seed in seeds]


def main(tuning: Path, held_out: Path, out: Path) -> None:
    """Chooses thresholds on the models of the tuning, measures the others once, and saves the table."""
    torch.set_num_threads(1)
    configs: list[Models] = [each.study.scales["cpu"] for each in (REDUNDANCY_TUNING, REDUNDANCY)]
    first, second = (
        scored(folder, config, known(each.name, config))
        for folder, config, each in zip((tuning, held_out), configs, (REDUNDANCY_TUNING, REDUNDANCY), strict=True)
    )
    chosen = thresholds_on(first[first["head"].notna()])
    of_heads, costs = second[second["head"].notna()], second[second["head"].isna()]
    parts = [measured_by_model(part, chosen) for _, part in of_heads.groupby("seed")]
    parts += [
        costs[["method", "seed", "value"]].assign(metric="cost", of="all", role="all"),
        chosen.assign(of="all", role="all", seed=-1),
    ]
    frame = pd.concat(parts).assign(low=np.nan, high=np.nan, n=1).reset_index(drop=True)
    settings = {"updates": UPDATES, "packages": {name: version(name) for name in PACKAGES}}
    Table(frame, Provenance("benchmark", settings)).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tuning", "held_out", "out"):
        parser.add_argument(name, type=Path)
    main(**vars(parser.parse_args()))
