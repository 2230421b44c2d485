"""Fine-tuning in context (ICA-Tune) or without context (standard), with probes while alignment emerges."""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from align_circuits.checks import checked
from align_circuits.hooks.attention import AttentionParts, take_parts, why_not_fast
from align_circuits.hooks.compat import architectures, bridges, lora_merging
from align_circuits.hooks.decoders import rotates_by_length
from align_circuits.hooks.edits import BatchContext, Clamp, changes_of, edits_provenance
from align_circuits.hooks.hooked_model import HookedModel, token_positions
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.jobs.checkpoint_files import NAME
from align_circuits.jobs.code_versions import code_version
from align_circuits.jobs.files import inside, writable_folder
from align_circuits.jobs.folders import replacing_in
from align_circuits.jobs.identity import Unidentified, identity_of, told
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.models.loading import wrapped_in_place
from align_circuits.models.lora import (
    PROJECTIONS,
    follow,
    is_fused,
    quantise,
    recompute,
    save_adapter,
    sharing,
    unwrapped,
    with_adapter,
)
from align_circuits.models.parameters import model_provenance, parameters_of
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.report import plots
from align_circuits.run.memory_checks import check_memory, of_training
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.finite_dataset import in_context, sample_finite_dataset
from align_circuits.tasks.own_prompts import OwnPrompts, as_task
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import Task, sampled
from align_circuits.training.loop import TrainConfig, train
from align_circuits.training.probe import PROBED, Probe

IGNORED = -100
"""The label of a position that is no target."""

PROBE_SEED, DATASET_SEED = 10**9, 2 * 10**9
"""Added to the seed for the probes' prompts and for the finite dataset, so that neither repeats a user's prompts."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "loss_on": "all",
        "steps": 200,
        "batch": 8,
        "lr": 3e-3,
        "r": 16,
        "alpha": 64.0,
        "dropout": 0.0,
        "projections": ("q", "k", "v", "o"),
        "probe_every": 5,
        "probe_prompts": 10,
    },
    "paper": {},
}
"""Arguments of `TuneConfig` by name. `"small"` was found on the bundled Llama, where it takes at most 5 minutes on two
cores; by `"paper"`, made for 8 billion parameters, that model does not learn to align in 1,000 updates."""

SMALL = 1_000_000_000
"""Models with fewer parameters are tuned by the preset `"small"` where no settings are given."""


@checked
@dataclass(frozen=True)
class TuneConfig:
    """How a model is tuned; the defaults are those of Agarwal and Sarawagi (2025), §4 and App. D, for 8B models.

    `TuneConfig.preset("small")` has those for small models.

    Raises:
        ValueError: A number outside its range, or a choice that does not fit the method.
    """

    method: Literal["ica", "standard"] = "ica"
    """`"ica"` (Eq. 3): in-context examples before the one that is predicted. `"standard"` (Eq. 4): single examples
    `x:y`, from which automata can be learned only in weights, so for tasks with `automata="task"`."""
    loss_on: Literal["last", "all"] = "last"
    """With `"ica"` and a `Seq2SeqTask`: the output of the last example (the text) or of all (the released code)."""
    steps: int = 1000
    """The number of updates."""
    batch: int | None = None
    """Prompts in an update; by default 1, with `"standard"` 16, so that both read 16 examples at k = 15."""
    dataset_size: int | None = None
    """N, the number of different examples to learn from, for tasks with `automata="task"`. Training prompts and the
    contexts of probes are drawn from these; the examples that probes ask for are none of them. By default fresh
    samples throughout."""
    lr: float = 2e-4
    """The highest learning rate, for AdamW without weight decay; it decays linearly to 0."""
    warmup: int = 0
    """Over how many steps at the start the learning rate rises."""
    clip: float | None = 1.0
    """The norm to which larger gradients are clipped."""
    r: int = 16
    """The rank of LoRA."""
    alpha: float = 8.0
    """LoRA's scale is alpha / r."""
    dropout: float = 0.05
    """The dropout probability at LoRA's input."""
    projections: tuple[str, ...] | None = None
    """Which matrices are tuned, of q, k, v, o, gate, up and down (an MLP without a gate has the last two). Default: q,
    k and v, or q and k if `layers` is given."""
    layers: int | tuple[int, ...] | None = None
    """Which layers are tuned, from 0; all by default. The paper tunes single layers such as 13."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`"bf16"` runs the forward pass under autocast; pays on a GPU, and on CPUs that multiply bfloat16."""
    four_bit: bool = False
    """Whether the frozen matrices are quantised to NF4 while training; probes and the result use them unquantised.
    Needs bitsandbytes."""
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass instead of stored: less memory, more time."""
    probe_every: int = 10
    """A probe at step 0, every so many steps, and at the end; with each, a checkpoint."""
    probe_prompts: int | None = None
    """Prompts in a probe, this many in distribution and as many out of it. Default: all held-out ones of own prompts;
    else as many as in an update, at most 10, so that probes every 10 steps take no more than a tenth of the time
    (`benchmarks/tuning.py`). For updates of one prompt 10 give less noisy curves, in four tenths of the time."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "TuneConfig":
        """Returns the settings that suit a size of models, changed where asked.

        Args:
            name: `"small"`, which `tune` takes by default below a billion parameters, or `"paper"`.
            changes: Settings in place of the preset's.

        Raises:
            ValueError: No such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}: choose {' or '.join(map(repr, PRESETS))}")
        settings = dict(PRESETS[name])
        if changes.get("method") == "standard":
            settings.pop("loss_on", None)  # a prompt of one example has one output to take the loss on
        return cls(**settings | changes)

    def __post_init__(self):
        for name, allowed in (("method", ("ica", "standard")), ("loss_on", ("last", "all"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose {' or '.join(map(repr, allowed))}")
        for name in ("batch", "dataset_size", "r", "probe_every", "probe_prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        if not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise ValueError(f"alpha={self.alpha} must be above 0 and finite, dropout={self.dropout} in [0, 1)")
        if self.projections == ():
            raise ValueError(f"projections=(): choose from {', '.join(PROJECTIONS)}, or leave it out")
        if unknown := {*(self.projections or ())} - {*PROJECTIONS}:
            meant = did_you_mean(min(unknown), PROJECTIONS)
            raise ValueError(f"no projection {min(unknown)!r}: {meant}choose from {', '.join(PROJECTIONS)}")
        if self.method == "standard" and self.loss_on == "all":
            raise ValueError("loss_on='all' with method='standard': a prompt holds a single example; leave it out")
        self.train_config()

    @property
    def prompts_per_step(self) -> int:
        """`batch`, or its default."""
        return self.batch or (16 if self.method == "standard" else 1)

    @property
    def prompts_per_probe(self) -> int:
        """`probe_prompts`, or its default."""
        return self.probe_prompts or min(self.prompts_per_step, 10)

    @property
    def chosen_layers(self) -> tuple[int, ...] | None:
        """`layers` as a tuple, or None for all."""
        return (self.layers,) if isinstance(self.layers, int) else self.layers

    @property
    def matrices(self) -> tuple[str, ...]:
        """`projections`, or its default."""
        return self.projections or (("q", "k", "v") if self.layers is None else ("q", "k"))

    def train_config(self) -> TrainConfig:
        """Returns the settings of the training loop."""
        return TrainConfig(
            self.steps,
            lr=self.lr,
            schedule="linear",
            warmup=self.warmup,
            clip=self.clip,
            precision=self.precision,
            log_every=self.probe_every,
        )


@dataclass(frozen=True, eq=False)
class TuneRun:
    """A finished tuning."""

    model: Any
    """A `TransformerBridge`: the given model's weights, shared with it and frozen, and the adapter. Where the model
    computes q, k and v by one matrix, the adapter is added to the weights that it adapts, in memory of their own."""
    table: Table
    """The probes, keyed by step, ood (whether the test inputs are random permutations), metric, kind, offset,
    level, layer and head. Metrics of the model (accuracy, log_prob, and the references) have the level "model"; those
    of heads and of a layer's mean attention (`PROBED`) have kind "all" and no offset."""
    log: pd.DataFrame
    """A row for each probe: step, loss (the mean since the row before), lr, grad_norm, and a summary of the probe."""
    config: TuneConfig
    """The settings."""
    folder: Path | None
    """Holds `adapter/`, in PEFT's format, which `load` and plain Hugging Face + PEFT read; `table.csv` and
    `provenance.json`; `training/` and `probes/`, from which a killed run goes on."""

    def __repr__(self) -> str:
        loss = self.log["loss"].dropna()
        last = f", loss {loss.iloc[-1]:.3g}" if len(loss) else ""
        folder = "" if self.folder is None else f", folder={str(self.folder)!r}"
        return f"TuneRun({self.config.method}, {self.config.steps} steps{last}, {len(self.log)} probes{folder})"

    def _repr_html_(self) -> str:
        log = self.log.to_html(max_rows=10, index=False, float_format="{:.3g}".format)
        return f"<div>{html.escape(repr(self))}</div>{log}"

    @property
    def figures(self) -> dict[str, go.Figure]:
        """Accuracy, and the best head of each metric that some head has, by step, in and out of distribution."""
        metrics = {"accuracy", "history"} & set(self.table.frame["metric"])
        model = self.table.where(metric=metrics).frame
        model = model[model["kind"] != "all"]
        heads = self.table.heads().frame.dropna(subset=["value"])
        best = heads.loc[heads.groupby(["step", "ood", "metric"])["value"].idxmax()]
        kind = np.where(model["metric"] == "accuracy", model["kind"], "history ceiling, " + model["kind"])
        figures = {}
        for name, frame in (("accuracy", model.assign(of=kind)), ("best heads", best.assign(of=best["metric"]))):
            if not len(frame):
                continue
            panels = {"in distribution": frame.loc[~frame["ood"]], "out of distribution": frame.loc[frame["ood"]]}
            panels = {title: panel for title, panel in panels.items() if len(panel)}
            figures[name] = plots.curves(panels, "step", "of", "step").update_xaxes(dtick=None)
            if name == "best heads":
                figures[name].update_yaxes(title="score", col=1)
        return figures


@checked
@leaves_as_found
def tune(
    model: HookedModel,
    task: Task | Prompts,
    config: TuneConfig | None = None,
    *,
    roles: Mapping[str, str] | Sequence[str] | None = None,
    clamps: Sequence[Clamp] = (),
    seed: int = 0,
    out: str | Path | None = None,
    state: str | Path | None = None,
    progress: bool = True,
) -> TuneRun:
    """Tunes a model on a task with LoRA, and measures accuracy and heads at several steps.

    The given model is left as it was, bit for bit; its weights are shared, not copied. With `out`, the same call goes
    on from the last probe of a run that was killed, and ends as if it had not been, bit for bit.

    The loss is the mean over output tokens of -log p(token): of the last example, given the k examples before it
    (Eq. 3), or of single examples (Eq. 4). Training runs Hugging Face's own model, with fused attention where that is
    exact; logits (of Llama, Qwen2, Qwen3 and Mistral also the last MLP) are computed only where the loss reads them,
    and gradients flow no deeper than the lowest tuned layer.

    Args:
        model: What `load` returns. Of a mixture of experts attention alone is adapted. A matrix that computes several
            projections, as GPT-2's of q, k and v, is adapted as a whole: `projections` has all of them.
        task: What the model learns: a task, or prompts. Probes of a `Seq2SeqTask` are drawn in and out of
            distribution, with unseen test examples; for `"standard"` without in-context examples. Probes of other tasks
            are other prompts of the task; of prompts, a fifth of them is held out and never learned from (related
            ones, `Prompts.group`, stay together), and probes measure all of these, or `probe_prompts` of them. The
            loss of such tasks is the mean over all targets of an update.
        config: The settings; by default `TuneConfig.preset("small")` below a billion parameters and those of the paper
            above, which is printed and stands in the provenance. `method="standard"` and `dataset_size` are for
            `Seq2SeqTask`.
        roles: With prompts: the relations that probes score heads on, as in `localize`.
        clamps: Heads whose attention stays clamped in every update and every probe; what they attend to then teaches
            their queries and keys nothing. Relations of a task cover the test example alone.
        seed: Fixes the adapter, the training prompts, the finite dataset and the probes.
        out: The folder for results and checkpoints; None keeps nothing. The results are moved in together, at the end.
            The adapter names what `load` was given as its base, with the revision: save weights that you changed, or
            read from a revision by yourself, and load those.
        state: The folder for checkpoints and probes, from which a killed run goes on, if it is not `out`.
        progress: Whether to draw a progress bar.

    Raises:
        KeyError: Heads clamped by a relation that the prompts do not have.
        ValueError: The method does not fit the task, a task for `"ica"` has no examples, or prompts are too few. The
            model cannot be tuned: no TransformerLens bridge, hooks attached, an adapter already there or tuned before
            in this process, quantized or on several devices, no tokenizer. The settings do not fit the model: no such
            layer, matrix or head, some parts of a fused matrix without the others, a rank above the sizes of the
            matrices, clamps where the fast engine does not run it, `four_bit` without linear layers of PyTorch's; or
            more memory than there is. `out` cannot be written, or holds another run or one of other code.
        ImportError: `four_bit` without bitsandbytes.
        FloatingPointError: A loss or gradient that is not finite.
    """
    preset = None if config else preset_for(sum(weight.numel() for _, weight in parameters_of(model)))
    config = config or TuneConfig.preset(preset or "paper")
    if preset and progress:
        tqdm.write(f'settings of TuneConfig.preset("{preset}"): {described(config)}')
    task = as_task(task, None, roles)
    data = _TuningData.of(model, task, config, seed)
    for prompts in data.probes.values():
        changes_of(clamps, model, BatchContext.all_of(prompts))  # raises here, before anything is written
    reason = why_not_fast(model)
    if clamps and reason:
        raise ValueError(f"heads of this model cannot be clamped while it is tuned: {reason}")
    trained, matrices = unwrapped(model), bridges.matrices_of(model)
    _check_memory(model, data, config, seed)
    folder = None if out is None else writable_folder(out)
    kept = folder if state is None else writable_folder(state)
    if kept and not isinstance(task, Seq2SeqTask) and (inside(kept, "training") / NAME).exists():
        told(f"the checkpoints in {str(kept)!r}", task, otherwise=", or begin anew with another out=")
    weights = {id(weight): weight for weight in trained.parameters()}
    plain = sharing(trained, weights) if is_fused(matrices) else None
    adapted = with_adapter(
        trained,
        matrices,
        names=config.matrices,
        layers=config.chosen_layers,
        r=config.r,
        alpha=config.alpha,
        dropout=config.dropout,
        seed=seed,
    )
    # Probes run on a bridge around the same parameters, adapter included: what training changes, they see at once,
    # while training itself pays for no hooks. A bridge splits fused matrices, which then must be plain.
    if plain is None:
        renew, probed = None, sharing(trained, {id(weight): weight for weight in trained.parameters()})
    else:
        renew, probed = follow(plain, trained), plain
    bridge = wrapped_in_place(probed, data.tokenizer)
    # After the copy for probes was made, which keeps whole weights and stores its activations.
    if config.four_bit:
        quantise(trained)
    if config.checkpointing:
        recompute(trained)
    if clamps:
        take_parts(trained)
    # Dropout in the last MLP would be drawn for fewer positions.
    skips = not (config.dropout and {"gate", "up", "down"} & {*config.matrices}) and architectures.skip_unread(trained)
    lora_merging.fuse_adapters(trained)
    engine = "reference" if reason else "fast"
    options = RunOptions(engine=engine)
    probe = Probe(bridge, data.probes, kept and writable_folder(inside(kept, "probes")), data.scored, clamps, options)

    def measure(_: nn.Module, step: int) -> Mapping[str, float]:
        if renew is not None:
            renew(bridge)
        return probe.measure(step)

    run = train(
        trained,
        data.clamped_batch if clamps else data.batch,
        partial(_clamped_loss, bridge, clamps, skips=skips) if clamps else partial(_loss, skips=skips),
        config.train_config(),
        seed=seed,
        out=kept and inside(kept, "training"),
        metrics=measure,
        progress=progress,
        recipe=json.loads(json.dumps({"task": data.record, "config": asdict(config), **edits_provenance(clamps)}))
        # Changed code would go on to a result that no run from the start has.
        | {"code_version": code_version(f"{__name__}:tune")},
    )
    if renew is not None:  # a run that had ended before has measured nothing
        renew(bridge)
    provenance = Provenance(
        "tune",
        settings={
            "config": json.loads(json.dumps(asdict(config))),
            **({"preset": preset} if preset else {}),
            "seed": seed,
            **edits_provenance(clamps),
        },
        model=model_provenance(model),
        data={"task": dict(data.probes[False].task), "digest": [prompts.digest for prompts in data.probes.values()]},
        engine=engine,
    )
    table = probe.table(run.log["step"].tolist(), provenance)
    if folder is not None:
        with replacing_in(folder) as new:
            save_adapter(adapted, new / "adapter")
            table.save(new)
    return TuneRun(bridge, table, run.log, config, folder)


def _check_memory(model: HookedModel, data: "_TuningData", config: TuneConfig, seed: int) -> None:
    """Raises a ValueError unless the activations of an update fit into memory."""
    (prompts, length), (positions,) = (tensor.shape for tensor in data.batch(1, seed)[:2])
    layers = model.cfg.n_layers - min(config.chosen_layers or (0,))
    sizes: dict[str, Any] = {
        "logits": prompts * positions * model.cfg.d_vocab,
        "layers": layers,
        "dropped": len(config.matrices) * (config.dropout > 0),
        "recomputed": config.checkpointing,
    }

    def needed(length: int) -> float:
        return of_training(model, prompts, length, **sizes)

    remedy = ", a smaller batch=" + ("" if config.checkpointing else ", checkpointing=True")
    check_memory("tune", model, needed, length, remedy)


def preset_for(parameters: int) -> Literal["small", "paper"]:
    """Returns the name of the preset for a model of so many parameters."""
    return "small" if parameters < SMALL else "paper"


def described(config: TuneConfig, preset: str | None = None) -> str:
    """Returns the settings that are not the paper's, or not those of a preset, in words."""
    settings, paper = asdict(config), asdict(TuneConfig(method=config.method))
    usual = asdict(TuneConfig.preset(preset or "paper", method=config.method))
    changed = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in settings.items()
        if name != "method" and (value != paper[name] or value != usual[name])
    ]
    return ", ".join(changed) or "as in the paper"


def _contents(prompts: Prompts) -> str:
    """Returns what tells prompts from others, not the code of their class: a run's `code` tells what it rests on."""

    def parts(whole: Any) -> dict[str, Any]:
        return {each.name: getattr(whole, each.name) for each in fields(whole)}

    relations = {name: parts(relation) for name, relation in prompts.relations.items()}
    return identity_of({**parts(prompts), "relations": relations})


@dataclass(frozen=True)
class _TuningData:
    """Draws the training prompts, and holds the prompts of the probes."""

    task: Task
    config: TuneConfig
    tokenizer: Any
    dataset: Prompts | None
    """The finite set of examples to learn from, if there is one."""
    probes: Mapping[bool, Prompts]
    """By whether the test inputs are out of distribution."""
    scored: Sequence[str] = PROBED
    """The relations that probes score heads on."""
    whole: bool = False
    """Whether batches keep what follows the last prediction, as where angles depend on the length of a prompt."""

    @property
    def record(self) -> Mapping[str, Any]:
        """What tells the task from others, as JSON: a run goes on only with the task that it began with."""
        probes = {str(ood): _contents(prompts) for ood, prompts in self.probes.items()}
        if isinstance(self.task, Seq2SeqTask):
            return asdict(self.task) | {"probes": probes}  # which tell the tokenizer
        source, n = self.task, self.config.prompts_per_step
        learned = source.prompts if isinstance(source, OwnPrompts) else source.sample(n, self.tokenizer, seed=0)
        try:
            task_identity = identity_of(self.task)  # a few prompts do not show all that it draws from
        except Unidentified:
            task_identity = None
        task = {"task": type(self.task).__name__, "identity": task_identity, "learned": _contents(learned)}
        return {**task, "probes": probes, "roles": [*self.scored]}

    @classmethod
    def of(cls, model: HookedModel, task: Task, config: TuneConfig, seed: int) -> "_TuningData":
        tokenizer = getattr(model, "tokenizer", None)
        if not isinstance(task, Seq2SeqTask):
            return cls._of_any_task(model, task, config, seed)
        if tokenizer is None:
            raise ValueError("the model has no tokenizer, but the task is written as text: give `load` a tokenizer")
        if config.method == "standard":
            if task.automata != "task":
                raise ValueError(
                    "method='standard' learns automata in weights, but automata='prompt' draws new ones for each "
                    "prompt: give the task automata='task', or tune with method='ica'"
                )
            task = replace(task, n_examples=0)
        elif task.n_examples == 0:
            raise ValueError("method='ica' needs in-context examples: n_examples is 0")
        n, dataset, probes = config.prompts_per_probe, None, {}
        if config.dataset_size is not None:
            dataset = sample_finite_dataset(task, config.dataset_size, tokenizer, DATASET_SEED + seed)
        for ood in (False, True):
            probed_task = replace(task, ood=ood)
            if dataset is None:
                probes[ood] = probed_task.sample(n, tokenizer, PROBE_SEED + seed)
            else:
                tests = sample_finite_dataset(probed_task, n, tokenizer, PROBE_SEED + seed, without=dataset)
                standard = config.method == "standard"
                probes[ood] = tests if standard else in_context(probed_task, dataset, tests, seed=PROBE_SEED + seed)
            check_fits(model, probes[ood])
        data = cls(task, config, tokenizer, dataset, probes, whole=rotates_by_length(model))
        data.batch(1, seed)  # raises here, before anything is written, if the dataset is too small
        return data

    @classmethod
    def _of_any_task(cls, model: HookedModel, task: Task, config: TuneConfig, seed: int) -> "_TuningData":
        if config.method == "standard" or config.dataset_size is not None:
            raise ValueError(
                f"method={config.method!r}, dataset_size={config.dataset_size}: both choices are for Seq2SeqTask; "
                "other tasks are tuned with method='ica' on the prompts that they give"
            )
        tokenizer = getattr(model, "tokenizer", None)
        if isinstance(task, OwnPrompts):
            _check_targets(task.prompts)
            task, held_out = task.split(seed)
            probed = held_out.sample(min(config.probe_prompts or len(held_out.prompts), len(held_out.prompts)))
        else:
            probed = sampled(task, config.prompts_per_probe, tokenizer, PROBE_SEED + seed)
        check_fits(model, probed)
        scored = [name for name in task.roles if len(probed.relations.get(name, ()))]
        whole = rotates_by_length(model)
        data = cls(task, config, tokenizer, None, {False: probed}, scored, whole)
        if isinstance(task, OwnPrompts) and config.prompts_per_step > len(task.prompts):
            n, most = len(task.prompts), 2 ** (len(task.prompts).bit_length() - 1)
            few = f"batch={config.prompts_per_step}: there are {n} prompts to learn from; give more, or a"
            raise ValueError(f"{few} smaller batch, such as batch={most}")
        data.batch(1, seed)  # raises here, before anything is written
        return data

    def batch(self, _step: int, seed: int) -> tuple[Tensor, ...]:
        """The tokens `[prompt pos]`, the positions `[target]` that predict, the labels `[prompt target]` there.

        A label is `IGNORED` where a prompt has no target and others have one; the mask follows if there is padding.
        """
        return self._tensors(self._drawn(seed))

    def clamped_batch(self, _step: int, seed: int) -> tuple[tuple[Tensor, ...], Prompts]:
        """The same beside its prompts, which say where clamped heads attend."""
        prompts = self._drawn(seed)
        return self._tensors(prompts), prompts

    def _drawn(self, seed: int) -> Prompts:
        n, task = self.config.prompts_per_step, self.task
        if not isinstance(task, Seq2SeqTask):
            return task.sample(n, self.tokenizer, seed=seed)
        if self.dataset is None:
            return task.sample(n, self.tokenizer, seed, references=False)
        return in_context(task, self.dataset, n=n, seed=seed)

    def _tensors(self, prompts: Prompts) -> tuple[Tensor, ...]:
        if not isinstance(self.task, Seq2SeqTask):
            prompt, query = prompts.column("prompt"), prompts.column("query_pos")
            _check_targets(prompts)
            positions, column = query.unique(return_inverse=True)
            labels = torch.full((len(prompts), len(positions)), IGNORED)
            labels[prompt, column] = prompts.column("token")
            end = prompts.tokens.shape[1] if self.whole else int(positions[-1]) + 1
            padded = () if prompts.mask.all() else (prompts.mask[:, :end],)
            return prompts.tokens[:, :end], positions, labels, *padded
        kinds, example = prompts.token_kinds[0], prompts.example[0]  # all prompts of a task have one layout
        in_loss = (kinds == TokenKind.OUTPUT) & ((example == example.max()) | (self.config.loss_on == "all"))
        target = in_loss.nonzero()[:, 0]
        # Nothing is predicted from the last target, nor from what follows it.
        end = prompts.tokens.shape[1] if self.whole else int(target[-1])
        return prompts.tokens[:, :end], target - 1, prompts.tokens[:, target]


def _check_targets(prompts: Prompts) -> None:
    """Raises unless each prompt has a target, and no two at one position: a softmax there learns one token."""
    without = sorted({*range(len(prompts))} - {*prompts.targets["prompt"]})
    if without:
        raise ValueError(
            f"{len(without)} of {len(prompts)} prompts have no target, from which nothing can be learned; the first is "
            f"prompt {without[0]}: leave them out"
        )
    if (double := prompts.targets.duplicated(["prompt", "query_pos"])).any():
        first = prompts.targets[double].iloc[0]
        raise ValueError(
            f"prompt {first['prompt']} has several targets at position {first['query_pos']}, where one token can be "
            "learned: choose one by prompts.select_targets(...)"
        )


def _loss(model: Callable[..., Any], batch: tuple[Tensor, ...], *, skips: bool = False) -> Float[Tensor, ""]:
    """The loss; with `skips` the model takes the keyword of `architectures.skip_unread`."""
    ids, positions, labels, *padded = batch
    options: dict[str, Any] = {"logits_to_keep": positions, "use_cache": False}
    if padded:
        options |= {"attention_mask": padded[0].long(), "position_ids": token_positions(padded[0])}
    options = architectures.accepted(model, options) | ({"read": positions} if skips else {})
    logits = model(ids, **options).logits
    if "logits_to_keep" not in options:
        logits = logits[:, positions]
    # In float32, since under autocast logits are rounded to bfloat16.
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _clamped_loss(
    bridge: Any,
    clamps: Sequence[Clamp],
    model: nn.Module,
    batch: tuple[tuple[Tensor, ...], Prompts],
    *,
    skips: bool = False,
) -> Float[Tensor, ""]:
    """The loss while heads are clamped; `bridge` knows the model's shape."""
    tensors, prompts = batch
    context = BatchContext(prompts, torch.arange(len(prompts)), slice(0, tensors[0].shape[1]))
    attention_parts = AttentionParts(changes_of(clamps, bridge, context))
    return _loss(partial(model, attention_parts=attention_parts), tensors, skips=skips)
