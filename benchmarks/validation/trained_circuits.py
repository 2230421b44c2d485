"""Circuits in trained models: interchange training makes chosen heads do the jobs of a planted circuit's heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.checks import checked
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import Probes
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig, check_fits
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, STAGES, PlantedModel, planted_circuit
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import Seq2SeqTask, config_of
from align_circuits.training.loop import TrainConfig, train

BATCH = 32
"""Prompts in a batch, each with another one from which heads are exchanged."""

EXCHANGED = 0.25
"""The chance that the head of a role is exchanged in a prompt."""

HINTED = 0.6
"""The share of the steps in which the heads' outputs are trained, too, with a weight that falls from 1 to 0."""

SURE = 1.0
"""By how much the logit of the best letter exceeds that of the next where a most likely letter counts, in nats."""

TRAINING: Mapping[str, Any] = MappingProxyType(
    {"lr": 0.003, "betas": (0.9, 0.98), "schedule": "linear", "warmup": 50, "weight_decay": 0.01}
)


class TrainedCircuit(PlantedModel):
    """A model of random weights that was trained so that chosen heads do what a planted circuit's heads do.

    `kinds` calls all others `"other"`. All weights are dense. Its edges are not known: it has no `edges`.
    """

    reached: Mapping[str, float]
    """What the training reached, on prompts of its own; see `what_was_reached`."""


@checked
def train_circuit(
    task: Seq2SeqTask,
    seed: int = 0,
    *,
    steps: int = 800,
    n_layers: int = 4,
    n_heads: int = 4,
    d_model: int = 64,
    out: str | Path | None = None,
) -> TrainedCircuit:
    """Trains a transformer in which one random head has each role of the planted circuit, and all others have none.

    The planted circuit of the task is the causal model. In every prompt of a batch the head of each role is exchanged
    with probability 1/4, that is, its output at all positions is what it is on another prompt, which is about the same
    symbols; and so is each other
    head, with a probability that is drawn for the prompt uniformly from [0, 1]. In the planted circuit only the heads
    with those roles are exchanged. The loss is the cross-entropy of the model's next token with the letters that the
    planted circuit predicts (the softmax of their logits), at the letters of all examples but the first. It is least
    where each head with a role carries what the planted one carries, and where all others together change nothing.

    That alone stays on a plateau, so that in the first `HINTED` share of the steps the outputs of the heads before the
    lookup are trained as well: a linear map of each, learned beside the model and then dropped, is to give the output
    of the planted head (mean square, over its variance).

    Weights are random at the start; nothing of the planted circuit's weights or places is copied.

    Source: Gupta et al. (2024), "InterpBench", strict interchange intervention training; Geiger et al. (2022),
    "Inducing Causal Structure for Interpretable Neural Networks", interchange intervention training; hints after
    Romero et al. (2015), "FitNets".

    Args:
        task: In the standard style, with at least one example and phrases of two letters, so that the previous token's
            letter matters. With more symbols in its alphabet than in an input, those beside a symbol do not tell it.
        seed: Of the places of the heads, of the weights and of the prompts.
        steps: Updates, each of `BATCH` pairs of prompts; 0 leaves the weights random.
        n_layers: At least 2, with room for three heads before the lookup.
        n_heads: Heads in a layer.
        d_model: The width of the residual stream and of the MLPs, a multiple of `n_heads`.
        out: The folder of the training, from which a killed one goes on and a finished one is read (`train`).

    Raises:
        ValueError: The task does not fit; too few layers or heads; a width that the heads do not divide; or a model
            that does not fit into memory.
    """
    _check(task, steps, n_layers, n_heads, d_model)
    streams = Rng(seed, "interchange training")
    planted = planted_circuit(task, seed, decoys=(), n_layers=STAGES, n_ctx=prompt_length(task))
    shape = HandBuiltConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=d_model,
        d_head=d_model // n_heads,
        d_mlp=d_model,
        d_vocab=planted.cfg.d_vocab,
        n_ctx=planted.cfg.n_ctx,
        model_name=f"trained-circuit-{seed}",
    )
    check_fits(shape)
    model = TrainedCircuit(shape, planted.tokenizer)
    randomize(model, streams)
    roles = _places(model.cfg, streams)
    model.task, model.strength = task, 1.0
    model.kinds = MappingProxyType({head: roles.get(head, "other") for head in heads_of(model.cfg)})
    if steps:
        student = _Student(model, planted, streams)

        def sample(step: int, batch_seed: int) -> tuple[Tensor, ...]:
            rng = Rng(batch_seed, "interchange pairs")
            base, source = _pairs(task, model, BATCH, batch_seed)
            with_roles = rng.uniform("roles", BATCH, len(CIRCUIT_ROLES)) < EXCHANGED
            others = rng.uniform("others", BATCH, n_layers, n_heads) < rng.uniform("rate", BATCH, 1, 1)
            hint = torch.tensor(max(0.0, 1 - step / (HINTED * steps)))
            return base, source, with_roles, others, hint

        config = TrainConfig(steps=steps, log_every=steps, **{**TRAINING, "warmup": min(TRAINING["warmup"], steps)})
        recipe = {"task": config_of(task), "kinds": {str(head): role for head, role in roles.items()}}
        train(
            student,
            sample,
            lambda network, batch: cast(_Student, network).loss(*batch),
            config,
            seed=seed,
            out=out,
            recipe=recipe,
            progress=False,
        )
    model.eval()
    model.reached = MappingProxyType(what_was_reached(model, planted, seed=seed))
    return model


def what_was_reached(model: PlantedModel, planted: PlantedModel, n: int = 128, seed: int = 0) -> dict[str, float]:
    """Returns how well a model with known heads does what the planted circuit does, intact and with heads exchanged.

    Each head is exchanged at all positions, between two prompts about the same symbols. An answer is the most likely
    token; counted are the letters of all examples but the first where the planted circuit's best letter exceeds the
    next by `SURE`.

    - `accuracy`: the share of answers that are the planted circuit's.
    - `interchange accuracy, <role>`: with the head of that role exchanged in both, the share of answers that are the
      planted circuit's, among those that the exchange changes there.
    - `another head, <role>`: the same answers with a random other head exchanged in place of the role's.
    - `invariance`: the share of answers that stay with all other heads exchanged together.
    - `roles exchanged`: the share that stay with the heads of all roles exchanged.

    Args:
        model: One head for each role, all others of no role.
        planted: A planted circuit of the same task, one head for each role.
        n: Pairs of prompts.
        seed: Of the prompts and of the random other heads.

    Source: interchange intervention accuracy, Geiger et al. (2022), §3.
    """
    base, source = _pairs(planted.task, planted, n, seed)
    letters = planted.task.sample(1, planted.tokenizer, references=False).answer_tokens
    queries = answer_queries(planted.task, base[0], letters)
    own, theirs = _heads_by_role(model), _heads_by_role(planted)
    others = [head for head in heads_of(model.cfg) if head not in own.values()]
    order = Rng(seed, "other heads").order("others", 1, len(others))[0].tolist()

    with torch.no_grad():
        sources = {each: run_exchanged(each, source)[1] for each in (model, planted)}

    def logits(of: PlantedModel, heads: Sequence[Head]) -> Float[Tensor, "prompt query d_vocab"]:
        return run_exchanged(of, base, sources[of], _chosen(of, n, heads))[0][:, queries]

    def answers(heads: Sequence[Head]) -> Int[Tensor, "prompt query"]:
        return logits(model, heads).argmax(-1)

    def right(heads: Sequence[Head]) -> tuple[Int[Tensor, "prompt query"], Bool[Tensor, "prompt query"]]:
        best = logits(planted, heads)[..., letters].topk(2)
        return letters[best.indices[..., 0]], best.values[..., 0] - best.values[..., 1] >= SURE

    def share(of: Bool[Tensor, "prompt query"], among: Bool[Tensor, "prompt query"]) -> float:
        return float(of[among].double().mean())

    with torch.no_grad():
        intact, (truth, sure) = answers([]), right([])
        reached = {"accuracy": share(intact == truth, sure)}
        for place, role in enumerate(CIRCUIT_ROLES):
            moved, still_sure = right([theirs[role]])
            changed = sure & still_sure & (moved != truth)
            other = others[order[place % len(others)]]
            reached[f"interchange accuracy, {role}"] = share(answers([own[role]]) == moved, changed)
            reached[f"another head, {role}"] = share(answers([other]) == moved, changed)
        reached["invariance"] = share(answers(others) == intact, sure)
        reached["roles exchanged"] = share(answers(list(own.values())) == intact, sure)
    return reached


class _Student(nn.Module):
    """The model, the linear maps of its hints, and the planted circuit, which is not trained."""

    def __init__(self, model: PlantedModel, planted: PlantedModel, streams: Rng):
        super().__init__()
        self.model = model
        self.own, self.theirs = _heads_by_role(model), _heads_by_role(planted)
        example = planted.task.sample(1, planted.tokenizer, references=False)
        self.letters = example.answer_tokens
        self.queries = answer_queries(planted.task, example.inputs[0], example.answer_tokens)
        self.hints = nn.ModuleDict()
        weights = streams.generator("hints")
        for role in CIRCUIT_ROLES[:-1]:
            # The global random generator stays as it is.
            linear = cast(nn.Linear, nn.utils.skip_init(nn.Linear, model.cfg.d_head, planted.cfg.d_head))
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.copy_(normal(weights, *parameter.shape) * model.cfg.d_head**-0.5)
            self.hints[role] = linear
        self._planted = [planted.requires_grad_(False)]  # in a list: no module of this one, so that it is not saved

    def loss(
        self,
        base: Int[Tensor, "prompt pos"],
        source: Int[Tensor, "prompt pos"],
        with_roles: Bool[Tensor, "prompt role"],
        others: Bool[Tensor, "prompt layer head"],
        hint: Float[Tensor, ""],
    ) -> Float[Tensor, ""]:
        """The loss of one batch: what is exchanged in each prompt, and the weight of the hints."""
        (planted,) = self._planted
        of_model = others.clone()
        of_planted = torch.zeros(len(base), planted.cfg.n_layers, planted.cfg.n_heads, dtype=torch.bool)
        for place, role in enumerate(CIRCUIT_ROLES):
            (layer, head), (layer_there, head_there) = self.own[role], self.theirs[role]
            of_model[:, layer, head] = of_planted[:, layer_there, head_there] = with_roles[:, place]
        with torch.no_grad():
            planted_outputs = run_exchanged(planted, torch.cat([base, source]))[1]
            elsewhere = {layer: z[len(base) :] for layer, z in planted_outputs.items()}
            target = run_exchanged(planted, base, elsewhere, of_planted)[0][:, self.queries][..., self.letters].softmax(
                -1
            )
            outputs = run_exchanged(self.model, source)[1]
        logits, changed = run_exchanged(self.model, base, outputs, of_model)
        log_probs = logits[:, self.queries].log_softmax(-1)[..., self.letters]
        loss = -(target * log_probs).sum(-1).mean()
        if not hint:
            return loss
        for place, role in enumerate(self.hints):
            (layer, head), (layer_there, head_there) = self.own[role], self.theirs[role]
            wanted = planted_outputs[layer_there][: len(base), :, head_there]
            error = (self.hints[role](changed[layer][:, :, head]) - wanted).square().sum(-1).mean(1)
            spread = (wanted - wanted.mean(0)).square().sum(-1).mean()
            loss = loss + hint * (error * ~with_roles[:, place]).mean() / spread
        return loss


def run_exchanged(
    model: HandBuilt,
    tokens: Int[Tensor, "prompt pos"],
    source: Mapping[int, Float[Tensor, "prompt pos head d_head"]] = MappingProxyType({}),
    chosen: Bool[Tensor, "prompt layer head"] | None = None,
) -> tuple[Float[Tensor, "prompt pos d_vocab"], dict[int, Float[Tensor, "prompt pos head d_head"]]]:
    """Returns the logits, and every layer's heads' outputs, of which the chosen ones come from another run."""
    outputs: dict[int, Tensor] = {}

    def exchange(layer: int) -> Any:
        def change(z: Tensor) -> Tensor:
            if chosen is not None:
                z = torch.where(chosen[:, None, layer, :, None], source[layer], z)
            outputs[layer] = z
            return z

        return change

    probes = Probes(model, {name_of("z", layer): exchange(layer) for layer in range(model.cfg.n_layers)})
    hooks: Any = probes.fwd_hooks
    return model.run_with_hooks(tokens, fwd_hooks=hooks), outputs


def _chosen(model: HandBuilt, n: int, heads: Sequence[Head]) -> Bool[Tensor, "prompt layer head"]:
    """The same heads in all of `n` prompts."""
    chosen = torch.zeros(n, model.cfg.n_layers, model.cfg.n_heads, dtype=torch.bool)
    for layer, head in heads:
        chosen[:, layer, head] = True
    return chosen


def _pairs(
    task: Seq2SeqTask, model: PlantedModel, n: int, seed: int
) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, "prompt pos"]]:
    return paired(task, task.sample(2 * n, model.tokenizer, seed=seed, references=False))


def paired(task: Seq2SeqTask, prompts: Prompts) -> tuple[Int[Tensor, "pair pos"], Int[Tensor, "pair pos"]]:
    """Returns the first half of prompts, and the second half with the symbols of the first put in their place.

    A head that is exchanged between the two prompts of a pair then speaks of symbols that both have.
    """
    n = len(prompts) // 2
    base, source = prompts.inputs[:n], prompts.inputs[n:]
    symbols = prompts.inputs[prompts.token_kinds == TokenKind.INPUT].unique()
    of_base, of_source = (base[..., None] == symbols).any(1), source[..., None] == symbols
    theirs = symbols[of_base.nonzero()[:, 1]].view(n, task.x_len)
    rank = (of_source.any(1).cumsum(1) - 1).gather(1, of_source.int().argmax(2))  # of each token among its prompt's
    return base, torch.where(of_source.any(2), theirs.gather(1, rank.clamp(min=0)), source)


def answer_queries(
    task: Seq2SeqTask, tokens: Int[Tensor, " pos"], letters: Int[Tensor, " letter"]
) -> Int[Tensor, " query"]:
    """The positions that predict the letters of all examples but the first; the same in all prompts."""
    places = torch.nonzero(torch.isin(tokens, letters))[:, 0]
    return places[task.x_len * task.phrase_len :] - 1


def _heads_by_role(model: PlantedModel) -> dict[str, Head]:
    return {kind: head for head, kind in model.kinds.items() if kind in CIRCUIT_ROLES}


def _places(cfg: HandBuiltConfig, streams: Rng) -> dict[Head, str]:
    """Random heads for the roles: the lookup's in a layer after those of the others."""
    draw = streams.generator("places")
    first = -(-(len(CIRCUIT_ROLES) - 1) // cfg.n_heads)  # the layers that the others take at least
    lookup = (int(draw.integers(first, cfg.n_layers)), int(draw.integers(cfg.n_heads)))
    before = [head for head in heads_of(cfg) if head[0] < lookup[0]]
    chosen = draw.permutation(len(before))[: len(CIRCUIT_ROLES) - 1]
    return {**{before[place]: role for place, role in zip(chosen, CIRCUIT_ROLES[:-1], strict=True)}, lookup: "lookup"}


def randomize(model: HandBuilt, streams: Rng) -> None:
    """Random normal weights, those that write to the stream and the logits smaller; biases stay 0."""
    weights = streams.generator("weights")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            if not kind.startswith("b_"):
                scale = 0.5 if kind in ("W_E", "W_pos") else parameter.shape[-2] ** -0.5
                scale *= 0.35 if kind in ("W_O", "W_out", "W_U") else 1
                parameter.copy_(normal(weights, *parameter.shape) * scale)


def normal(generator: Any, *shape: int) -> Float[Tensor, "..."]:
    """Returns standard normal numbers of a NumPy generator."""
    return torch.from_numpy(generator.standard_normal(shape)).float()


def prompt_length(task: Seq2SeqTask) -> int:
    """The tokens of a prompt, with BOS."""
    example = task.x_len * (1 + task.phrase_len) + 2  # a colon, and a separator or BOS
    return (task.n_examples + 1) * example


def _check(task: Seq2SeqTask, steps: int, n_layers: int, n_heads: int, d_model: int) -> None:
    if task.phrase_len != 2 or task.n_examples < 1:
        raise ValueError(
            f"phrase_len={task.phrase_len}, n_examples={task.n_examples}: give phrases of 2 letters and an example"
        )
    if n_layers < 2 or n_heads < 1 or (n_layers - 1) * n_heads < len(CIRCUIT_ROLES) - 1:
        raise ValueError(
            f"{n_layers} layers of {n_heads} heads: give at least 2, with 3 heads or more before the last layer"
        )
    if d_model < 1 or d_model % n_heads:
        raise ValueError(f"d_model={d_model}: give a multiple of {n_heads}, the number of heads")
    if steps < 0:
        raise ValueError(f"steps={steps}: give 0 or more")
