"""Edges and paths beside runs that freeze everything else by hooks, one head at a time."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import align_circuits as ac
from align_circuits.graph import Graph
from align_circuits.paths import patch_edges, patch_paths
from align_circuits.prompts import Prompts

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)
ARCHITECTURES = ("llama", "qwen3", "gpt2", "gpt_neox")


@pytest.fixture(scope="module")
def clean(char_tokenizer) -> Prompts:
    return TASK.sample(3, char_tokenizer, seed=0)


@pytest.fixture(scope="module")
def corrupted(clean) -> Prompts:
    return TASK.corrupt(clean, "query", seed=1)


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    return {name: ac.load(random_hf_model(name), tokenizer=char_tokenizer) for name in ARCHITECTURES}


def of_lengths(lengths: tuple[int, ...], seed: int) -> Prompts:
    """Random prompts; those of any two seeds make a pair, since all ask for the same last token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
    prompts = Prompts.from_tokens([[*row, 7] for row in rows])
    last = prompts.targets.groupby("prompt").tail(1).reset_index(drop=True)
    return replace(prompts, targets=last, relations={})


@pytest.fixture
def exact_arithmetic(monkeypatch):
    """Lifts Hugging Face's softmax and RMSNorm to the weights' own precision: they are float32 whatever the weights."""
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return plain(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    def norm(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


class Twin:
    """Runs a model with hooks by hand: whatever is named is frozen, whatever is watched is kept."""

    def __init__(self, model: Any, run: Prompts, other: Prompts):
        self.model, self.run, self.cfg = model, run, model.cfg
        self.inputs: dict[str, Any] = {}
        if not run.mask.all():
            self.inputs = {"attention_mask": run.mask.long(), "position_ids": (run.mask.cumsum(1) - 1).clamp(min=0)}
        self.base, self.other = self.cache(run), self.cache(other)
        self.before = self.outcome({})

    def names(self) -> list[str]:
        return [
            f"blocks.{layer}.{name}"
            for layer in range(self.cfg.n_layers)
            for name in ("hook_resid_pre", "attn.hook_z", "attn.hook_q", "attn.hook_k", "attn.hook_v", "hook_mlp_out")
        ]

    def cache(self, prompts: Prompts) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        hooks = [(name, lambda x, hook, name=name: kept.update({name: x.clone()})) for name in self.names()]  # noqa: ARG005
        with torch.no_grad():
            self.model.run_with_hooks(prompts.tokens, fwd_hooks=hooks, **self.inputs)
        return kept

    def outcome(
        self, frozen: dict[str, Callable[[Tensor], Tensor]], watched: dict[str, Tensor] | None = None
    ) -> Tensor:
        """The gold tokens' log-probabilities; `watched` is filled before anything is frozen there."""

        def hook_at(name: str) -> Any:
            def hook(x: Tensor, hook: Any) -> Tensor | None:  # noqa: ARG001
                if watched is not None and name in watched:
                    watched[name] = x.clone()
                return frozen[name](x) if name in frozen else None

            return hook

        names = [*frozen, *(name for name in watched or {} if name not in frozen)]
        with torch.no_grad():
            logits = self.model.run_with_hooks(
                self.run.tokens, fwd_hooks=[(name, hook_at(name)) for name in names], **self.inputs
            )
        columns = (self.run.column(name) for name in ("prompt", "query_pos", "token"))
        prompt, query, token = columns
        return logits[prompt, query].log_softmax(-1).gather(1, token[:, None])[:, 0]

    def effect(self, sender: str, receiver: str, *, freeze_mlps: bool) -> float:
        """What the sender does through the receiver: freeze, watch, then let go."""
        frozen: dict[str, Any] = {}
        for layer in range(self.cfg.n_layers):
            for name in ("attn.hook_z", *(["hook_mlp_out"] if freeze_mlps else [])):
                name = f"blocks.{layer}.{name}"
                frozen[name] = lambda x, name=name: self.base[name]  # noqa: ARG005
        if sender == "input":
            frozen["blocks.0.hook_resid_pre"] = lambda _: self.other["blocks.0.hook_resid_pre"]
        elif sender.startswith("M"):
            name = f"blocks.{sender[1:]}.hook_mlp_out"
            frozen[name] = lambda _: self.other[name]
        else:
            layer, head = map(int, sender[1:].split("H"))
            name = f"blocks.{layer}.attn.hook_z"
            mixed = self.base[name].clone()
            mixed[:, :, head] = self.other[name][:, :, head]
            frozen[name] = lambda _: mixed
        if receiver == "logits":
            return float((self.outcome(frozen) - self.before).mean())
        if receiver.startswith("M"):
            at, column = f"blocks.{receiver[1:]}.hook_mlp_out", None
        else:
            where, site = receiver.split(".")
            layer, column = map(int, where[1:].replace("KV", "H").split("H"))
            at = f"blocks.{layer}.attn.hook_{site}"
        watched = {at: torch.empty(0)}
        self.outcome(frozen, watched)
        made = watched[at]

        def give(x: Tensor) -> Tensor:
            if column is None:
                return made
            x = x.clone()
            x[:, :, column] = made[:, :, column]
            return x

        return float((self.outcome({at: give}) - self.before).mean())


def values_of(table: ac.Table) -> dict[tuple[str, str], float]:
    frame: Any = table.frame
    return frame.set_index(["sender", "receiver"])["value"].to_dict()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_edges_equal_runs_with_everything_frozen(models, name, clean, corrupted):
    model, graph = models[name], Graph.of(models[name].cfg)
    found = values_of(patch_edges(model, clean=clean, corrupted=corrupted))
    twin = Twin(model, clean, corrupted)
    some = list(found)[:: 1 if name == "llama" else 5]
    expected = {edge: twin.effect(*edge, freeze_mlps=True) for edge in some}
    assert {edge: found[edge] for edge in some} == pytest.approx(expected, abs=1e-5)
    assert len(found) == int(graph.edges.sum())
    assert len({edge[1] for edge in found if edge[1].endswith(".k")}) == 2 * (2 if name in ("llama", "qwen3") else 4)
    assert sum(abs(value) > 1e-3 for value in found.values()) > 0.5 * len(found)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_paths_equal_runs_with_heads_frozen(models, name, clean, corrupted):
    model, senders = models[name], ["input", "L0H1", "M0"]
    shared = "KV" if name in ("llama", "qwen3") else "H"
    receivers = ["L1H0.q", "L1H3.q", f"L1{shared}1.k", f"L1{shared}0.v", "M1", "logits"]
    found = values_of(patch_paths(model, clean=clean, corrupted=corrupted, senders=senders, receivers=receivers))
    twin = Twin(model, clean, corrupted)
    expected = {pair: twin.effect(*pair, freeze_mlps=False) for pair in found}
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(found) == len(senders) * len(receivers)
    direct = values_of(patch_edges(model, clean=clean, corrupted=corrupted, edges=found))
    if name != "gpt_neox":  # whose heads and MLP read side by side
        assert found["L0H1", "logits"] != pytest.approx(direct["L0H1", "logits"], abs=1e-3), "an MLP lies between"
    assert found["M0", "L1H0.q"] == pytest.approx(direct["M0", "L1H0.q"], abs=1e-5), "none lies between"


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("lengths", [(9, 6, 11), (8, 8, 8)], ids=["padded", "double"])
def test_on_padded_prompts_and_in_double_precision(random_hf_model, lengths):
    """Apart: on padded prompts in double precision the bridge's own attention is NaN."""
    double = len(set(lengths)) == 1
    model = ac.load(random_hf_model("llama", seed=3).to(torch.float64 if double else torch.float32))
    run, other = of_lengths(lengths, 0), of_lengths(lengths, 1)
    exact = {"abs": 1e-10 if double else 1e-5}
    some = [("input", "L0KV1.v"), ("M0", "L1H3.q"), ("L0H2", "L1KV0.k"), ("L1H1", "M1"), ("L0H0", "logits")]
    edges = values_of(patch_edges(model, clean=run, corrupted=other, edges=some, batch_size=2))
    twin = Twin(model, run, other)
    assert edges == pytest.approx({edge: twin.effect(*edge, freeze_mlps=True) for edge in edges}, **exact)
    receivers = ["L1H3.q", "L1KV0.k", "L1KV1.v", "M1", "logits"]
    paths = values_of(patch_paths(model, clean=run, corrupted=other, receivers=receivers, batch_size=2))
    expected = {pair: twin.effect(*pair, freeze_mlps=False) for pair in paths}
    assert paths == pytest.approx(expected, **exact)
    assert {sender for sender, _ in paths} == {f"L{layer}H{head}" for layer in range(2) for head in range(4)}
    assert ("L1H0", "L1H3.q") not in paths and ("L1H0", "M1") in paths


def test_directions_engines_and_batches(models, clean, corrupted):
    model, edges = models["llama"], [("L0H1", "L1H2.q"), ("input", "L1KV1.v"), ("M0", "logits")]
    for verb, options in ((patch_edges, {"edges": edges}), (patch_paths, {"receivers": ["L1H2.q", "logits"]})):
        table = verb(model, clean=clean, corrupted=corrupted, direction="denoise", **options)  # pyright: ignore[reportArgumentType]
        assert table.provenance.engine == "fast" and table.provenance.settings["direction"] == "denoise"
        twin = Twin(model, corrupted, clean)
        for edge, value in values_of(table).items():
            assert value == pytest.approx(twin.effect(*edge, freeze_mlps=verb is patch_edges), abs=1e-5)
        others: list[dict[str, Any]] = [{"engine": "reference"}, {"batch_size": 1}, {"batch_size": 100}]
        for other in others:
            again = verb(model, clean=clean, corrupted=corrupted, direction="denoise", **options, **other)
            assert values_of(again) == pytest.approx(values_of(table), abs=1e-5)


def test_refusals(models, random_hf_model, clean, corrupted):
    model, pair = models["llama"], {"clean": clean, "corrupted": corrupted}
    with pytest.raises(KeyError, match="no sender 'L0H9' in this model: it has input, L0H0"):
        patch_edges(model, **pair, edges=[("L0H9", "logits")])
    with pytest.raises(KeyError, match=r"no receiver 'L1H0\.k'"):
        patch_edges(model, **pair, edges=[("L0H1", "L1H0.k")])
    with pytest.raises(ValueError, match=r"no edge from L1H0 to L1H2\.q: L1H2\.q reads before"):
        patch_edges(model, **pair, edges=[("L1H0", "L1H2.q")])
    with pytest.raises(ValueError, match="none of the receivers comes after"):
        patch_paths(model, **pair, senders=["M1"], receivers=["L1H2.q"])
    for wrong, message in (
        ({"metric": "loss"}, "metric='loss': choose one of 'log_prob', 'logit'"),
        ({"direction": "up"}, "direction='up': choose 'noise'"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(patch_edges)(model, **pair, **wrong)  # annotations unchecked
    with pytest.raises(ValueError, match="no targets of kind 'later': these prompts have 'all', 'first'"):
        patch_edges(model, **pair, kind="later")
    with pytest.raises(ValueError, match="do not match"):
        patch_paths(model, clean=clean, corrupted=corrupted[:2])
    normed = ac.load(random_hf_model("gemma2"), tokenizer=None)
    with pytest.raises(ValueError, match="is not what the model's weights make of its parts"):
        patch_edges(normed, clean=of_lengths((8, 8), 0), corrupted=of_lengths((8, 8), 1))
