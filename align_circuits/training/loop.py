"""The training loop for any model and any sampler of batches; a killed run goes on from its last checkpoint."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from tqdm import tqdm

from align_circuits.hooks.compat import bridges, model_state
from align_circuits.hooks.left_as_found import one_thread_at_a_time
from align_circuits.jobs.checkpoint_files import Checkpoint, load_checkpoint, run_folder, save_checkpoint
from align_circuits.jobs.identity import identity_of
from align_circuits.training.bfloat16 import fast_bfloat16
from align_circuits.training.muon import Muon

Precision = Literal["fp32", "bf16"]
Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "sgd", "muon", "muon-fp32"]


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Raises:
        ValueError: A number outside its range; of `betas`, `momentum`, `weight_decay` and `rest_lr` PyTorch judges.
    """

    steps: int
    """The number of updates, at least 1."""
    lr: float = 1e-3
    """The highest learning rate."""
    schedule: Schedule = "constant"
    """The shape of the decay; see `learning_rate`."""
    warmup: int = 0
    """The number of first steps over which the learning rate rises."""
    decay: int | None = None
    """The number of last steps over which it falls; None: all after the warmup. Shorter, it makes a trapezoid."""
    final: float = 0.0
    """Where the decay ends, as a fraction of `lr`, in [0, 1]."""
    optimizer: OptimizerName = "adamw"
    """AdamW and SGD in PyTorch's fused form; Muon (Jordan et al., 2024) for the matrices inside the network, which on
    small transformers brings induction heads several times sooner, with AdamW for embeddings and vectors. `"muon"` is
    PyTorch's, in bfloat16; `"muon-fp32"` (`training/muon.py`) is faster on a CPU without bfloat16."""
    rest_lr: float | None = None
    """With Muon, the highest learning rate of what AdamW trains; it follows the same schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    momentum: float = 0.0
    """SGD's momentum."""
    weight_decay: float = 0.0
    """Decay of the weights, times the learning rate; of matrices only, not of biases, gains and other vectors. A model
    names others that are not to decay with a method `no_weight_decay()`."""
    clip: float | None = 1.0
    """The largest norm of the gradient over all parameters; a longer one is scaled down to it. None: no limit."""
    precision: Precision = "fp32"
    """`"bf16"` runs the forward pass under autocast; pays on a GPU, and on CPUs that multiply bfloat16. Others compute
    the same products in float32 (`training/bfloat16.py`); a step takes somewhat longer than in `"fp32"`."""
    compile: bool = False
    """Whether `torch.compile` runs the model; pays on a GPU when all batches have one shape."""
    log_every: int = 100
    """A row of the log is written at step 0, every so many steps, and at the end."""
    checkpoint_every: int | None = None
    """A checkpoint is written with every row of the log and, where given, every so many steps."""

    def __post_init__(self):
        for name in ("steps", "log_every", "checkpoint_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        if self.warmup < 0 or self.decay_steps < 0 or self.warmup + self.decay_steps > self.steps:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay} do not fit into steps={self.steps}")
        for name, allowed in (("schedule", Schedule), ("optimizer", OptimizerName), ("precision", Precision)):
            if (value := getattr(self, name)) not in get_args(allowed):
                raise ValueError(f"{name}={value!r}: choose {' or '.join(map(repr, get_args(allowed)))}")
        if self.has_muon != (self.rest_lr is not None):
            raise ValueError(
                f"rest_lr={self.rest_lr}, optimizer={self.optimizer!r}: Muon needs rest_lr, no other has it"
            )
        if not 0 <= self.final <= 1:
            raise ValueError(f"final={self.final}: give a fraction of lr, 0 to 1")
        if not (0 < self.lr < math.inf and (self.clip is None or 0 < self.clip < math.inf)):
            raise ValueError(f"lr={self.lr} and clip={self.clip} must be finite and above 0; clip=None does not clip")

    @property
    def has_muon(self) -> bool:
        """Whether Muon trains the matrices."""
        return self.optimizer in ("muon", "muon-fp32")

    @property
    def decay_steps(self) -> int:
        """The number of steps that the decay takes."""
        return self.steps - self.warmup if self.decay is None else self.decay


def learning_rate(config: TrainConfig, step: int) -> float:
    """Returns the learning rate of update `step`, counted from 1: a function of the step alone.

    It rises linearly to `lr` at step `warmup`, stays there, and over the last D = `decay` steps falls towards
    `final * lr`: with t = (step - 1 - (steps - D)) / D, as 1 - t (linear) or (1 + cos(pi t)) / 2 (cosine).

    >>> trapezoid = TrainConfig(steps=8, lr=1.0, schedule="linear", warmup=2, decay=4)
    >>> [learning_rate(trapezoid, step) for step in range(1, 9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant" or config.decay_steps == 0:
        return config.lr
    t = max(0.0, (step - 1 - (config.steps - config.decay_steps)) / config.decay_steps)
    left = 1 - t if config.schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    return config.lr * (config.final + (1 - config.final) * left)


@dataclass(frozen=True, eq=False)
class TrainRun:
    """A finished training."""

    model: nn.Module
    """The model that was given, trained."""
    log: pd.DataFrame
    """Columns step, loss (the mean over the steps since the row before), lr, grad_norm (before clipping, of that step
    alone), then the metrics. At step 0, loss and grad_norm are NaN."""
    folder: Path | None
    """Where `log.csv` and `checkpoint.safetensors` are."""


def train(
    model: nn.Module,
    sample: Callable[[int, int], Any],
    loss: Callable[[nn.Module, Any], Float[Tensor, ""]],
    config: TrainConfig,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    metrics: Callable[[nn.Module, int], Mapping[str, float]] | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: bool = True,
    graph: bool = False,
    ahead: int = 0,
) -> TrainRun:
    """Trains a model in place; with `out`, goes on from the checkpoint in that folder.

    A run that is killed at any moment and started again by the same call goes on from its last checkpoint. It ends with
    the same weights, optimiser state and log, bit for bit, as a run that was never killed: on the same machine,
    versions and number of threads, with kernels that are deterministic, and under `compile` only where all batches have
    one shape. Trainings in several threads wait for each other, since dropout draws from a generator of the process.

    Args:
        model: Its parameters that require a gradient are trained, on the device where they are.
        sample: `(step, seed) -> batch`, a function of its two arguments alone; each step has its own seed. Tensors in
            the batch, also in tuples, lists and dicts, are moved to the model's device.
        loss: `(model, batch) -> scalar`.
        config: The optimiser, the schedule, the length.
        seed: Fixes the seeds of the batches, and of what the model draws from the global generators (dropout), which
            are left as they were.
        out: The folder for `log.csv` and the checkpoint; None keeps nothing.
        metrics: `(model, step) -> {name: number}`, called for each row of the log, in evaluation mode and without
            gradients. A run that is started again may call it a second time for the same step.
        recipe: Whatever else defines the run (data, loss, the model's seed), as JSON; a folder of another recipe is
            refused.
        progress: Whether to draw a progress bar.
        graph: Whether a CUDA graph replays the forward and backward pass; pays for small models, which a GPU runs in
            less time than Python asks for it. The model must be on a GPU, all batches of one shape, and `loss` may
            neither wait for the GPU nor change anything but the gradients.
        ahead: How many batches threads draw while the model trains, where `sample` may run in several threads.

    Raises:
        ValueError: Nothing to train; `graph` without a GPU; or `out` cannot be written, is in use, holds a broken
            checkpoint, or one of another config, seed, recipe or model.
        FloatingPointError: A loss or gradient that is not finite; the model stays as the step before left it.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    device = next(iter(trained.values())).device
    if graph and device.type != "cuda":
        raise ValueError(f"graph=True, but the model is on {str(device)!r}: a CUDA graph needs an NVIDIA GPU")
    optimizers = _optimizers(model, trained, config)
    network = cast(nn.Module, torch.compile(model)) if config.compile else model
    narrow = config.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=narrow)

    def backward(batch: Any) -> Float[Tensor, ""]:
        with fast_bfloat16(narrow, device):
            with autocast:
                value = loss(network, batch)
            for parameter in trained.values():
                # Not zeros: the optimiser leaves a parameter that the loss does not reach alone, its decay included.
                parameter.grad = None
            value.backward()
        return value.detach()

    run = _Graph(backward, device) if graph else backward
    alone = one_thread_at_a_time(lambda: [*bridges.parts_of(model), torch.default_generator])
    # With gradients, also where the caller has switched them off, as at the top of many notebooks.
    with alone, torch.enable_grad(), ExitStack() as stack:
        first_step, log = 0, []
        loss_sum = grad_norm = math.nan  # at step 0 there is neither
        folder, settings = None, {}
        if out is not None:
            folder = stack.enter_context(run_folder(out))
            settings = asdict(config) | {"seed": seed, "recipe": recipe or {}} | _model_settings(model)
            if checkpoint := load_checkpoint(folder, settings):
                first_step, loss_sum, log = checkpoint.step + 1, checkpoint.loss_sum, checkpoint.log
                _restore(checkpoint.tensors, model, trained, optimizers)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.callback(model.train, model.training)
        model.train()
        bar = stack.enter_context(
            # None: drawn on a terminal alone.
            tqdm(total=config.steps, initial=max(0, first_step - 1), disable=None if progress else True, unit="step")
        )

        steps = range(max(1, first_step), config.steps + 1)
        # Closed also after an error, or its threads would draw on.
        batches = stack.enter_context(closing(_batches(sample, seed, steps, ahead)))
        for step in range(first_step, config.steps + 1):
            _, model_seed, metrics_seed = _seeds(seed, step)
            if step > 0:
                batch = _to(device, next(batches))
                _reseed(device, model_seed)
                value = run(batch)
                gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
                total = nn.utils.get_total_norm(gradients)
                if config.clip is not None:
                    nn.utils.clip_grads_with_norm_(trained.values(), config.clip, total)
                # Both in one transfer: on a GPU every one waits for all work before it.
                loss_value, grad_norm = torch.stack([value.double(), total.double()]).tolist()
                # Before the optimiser's step, which would write NaN into every weight and moment.
                if not math.isfinite(loss_value + grad_norm):
                    raise FloatingPointError(
                        f"step {step}: the loss is {loss_value}, its gradient has the norm {grad_norm}. The model is "
                        f"as step {step - 1} left it: lower lr={config.lr}, warm up longer, or look at that batch"
                    )
                # Parameters share optimisers, and each takes its step once.
                for optimizer in dict.fromkeys(optimizers.values()):
                    for group in optimizer.param_groups:
                        # Set from the step alone, not by a scheduler: there is no state to save, and `rest_lr` follows
                        # the same course.
                        group["lr"] = optimizer.defaults["lr"] * (learning_rate(config, step) / config.lr)
                    with fast_bfloat16(config.optimizer == "muon", device):
                        optimizer.step()
                loss_sum += loss_value
                bar.set_postfix(loss=f"{loss_value:.4f}", refresh=False)
                bar.update()

            has_row = step % config.log_every == 0 or step == config.steps
            if has_row:
                # Counted from the step: a run that goes on has the sum, and needs no counter beside it.
                since_row = (step - 1) % config.log_every + 1
                row = {"loss": loss_sum / since_row, "lr": learning_rate(config, step), "grad_norm": grad_norm}
                if metrics is not None:
                    _reseed(device, metrics_seed)
                    model.eval()
                    with torch.no_grad():
                        row |= {name: float(number) for name, number in metrics(model, step).items()}
                    model.train()
                row = {"step": step, **row}
                if log and list(row) != list(log[0]):
                    raise ValueError(f"the log has the columns {list(log[0])}, step {step} gives {list(row)}")
                log.append(row)
                loss_sum = 0.0
            if folder is not None and (has_row or (config.checkpoint_every and step % config.checkpoint_every == 0)):
                state = _state(model, trained, optimizers)
                save_checkpoint(folder, settings, Checkpoint(step, loss_sum, log, state))
    return TrainRun(model, pd.DataFrame(log), folder)


class _Graph:
    """A computation on a GPU: captured at its first call, replayed at all others on the inputs of the call.

    What it returns, and the gradients that it leaves, lie in the same memory after every call.
    """

    def __init__(self, compute: Callable[[Any], Tensor], device: torch.device):
        self._compute, self._device, self._graph = compute, device, None

    def __call__(self, batch: Any) -> Tensor:
        if self._graph is None:
            # A copy: later batches are written over it, and the first may be a part of the caller's data.
            self._inputs = _to(self._device, batch, copy=True)
            # Libraries allocate and choose kernels at the first calls, which a capture does not allow.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._compute(self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = self._compute(self._inputs)
        _copy(batch, self._inputs)
        self._graph.replay()
        return self._output


def _copy(source: Any, target: Any) -> None:
    """Writes the tensors of a batch into those of another of the same structure."""
    if isinstance(source, Tensor):
        if source.shape != target.shape:
            raise ValueError(
                f"a batch of shape {tuple(source.shape)} after {tuple(target.shape)}: graph=True needs one"
            )
        target.copy_(source)
    elif isinstance(source, dict):
        for key, value in source.items():
            _copy(value, target[key])
    elif isinstance(source, tuple | list):
        for one, other in zip(source, target, strict=True):
            _copy(one, other)


def _batches(sample: Callable[[int, int], Any], seed: int, steps: range, ahead: int) -> Generator[Any, None, None]:
    """The batches of these steps in order, `ahead` of them drawn by threads before they are asked for."""
    if not ahead:
        yield from (sample(step, _seeds(seed, step)[0]) for step in steps)
        return
    pool = ThreadPoolExecutor(ahead)
    try:
        drawn: deque[Future[Any]] = deque()
        for step in steps:
            drawn.append(pool.submit(sample, step, _seeds(seed, step)[0]))
            if len(drawn) > ahead:
                yield drawn.popleft().result()
        while drawn:
            yield drawn.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _optimizers(model: nn.Module, trained: Mapping[str, nn.Parameter], config: TrainConfig) -> dict[str, Optimizer]:
    """The optimiser of each parameter, by its name."""
    inner, rest = {}, dict(trained)
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(f"PyTorch {torch.__version__} has no Muon: take 2.9 or later, or optimizer='muon-fp32'")
    if config.has_muon:
        outer = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        outer |= {weight for name, weight in trained.items() if name.startswith("lm_head.")}
        inner = {name: weight for name, weight in trained.items() if weight.ndim == 2 and weight not in outer}
        rest = {name: weight for name, weight in trained.items() if name not in inner}
    exempt: Collection[str] = getattr(model, "no_weight_decay", tuple)()
    decays = {name: weight.ndim >= 2 and name not in exempt for name, weight in rest.items()}
    groups = [
        {"params": [rest[name] for name in rest if decays[name]], "weight_decay": config.weight_decay},
        {"params": [rest[name] for name in rest if not decays[name]], "weight_decay": 0.0},
    ]
    optimizers: dict[str, Optimizer] = {}
    if inner:
        muon = torch.optim.Muon if config.optimizer == "muon" else Muon
        optimizers |= dict.fromkeys(inner, muon(inner.values(), lr=config.lr, weight_decay=config.weight_decay))
    if rest and config.optimizer == "sgd":
        optimizers |= dict.fromkeys(rest, SGD(groups, lr=config.lr, momentum=config.momentum, fused=True))
    elif rest:
        lr = config.lr if config.rest_lr is None else config.rest_lr
        optimizers |= dict.fromkeys(rest, AdamW(groups, lr=lr, betas=config.betas, fused=True))
    return optimizers


def _state(
    model: nn.Module, trained: Mapping[str, nn.Parameter], optimizers: Mapping[str, Optimizer]
) -> dict[str, Shaped[Tensor, "..."]]:
    """The tensors that the next step depends on and may change, by name; not copies."""
    # Buffers that are not persistent, such as rotary angles, are made anew with the model.
    persistent = model.state_dict(keep_vars=True).keys()
    changing = {**trained, **{name: buffer for name, buffer in model.named_buffers() if name in persistent}}
    state: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in changing.items()}
    for name, parameter in trained.items():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizers[name].state[parameter].items()}
    return state


def _restore(
    saved: Mapping[str, Shaped[Tensor, "..."]],
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, Optimizer],
) -> None:
    current = _state(model, trained, optimizers)  # before its first step an optimiser has none
    with torch.no_grad():
        for name, tensor in saved.items():
            if name in current:
                current[name].copy_(tensor)
            else:
                parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
                optimizers[parameter].state[trained[parameter]][key] = tensor.to(trained[parameter].device)


def _seeds(seed: int, step: int) -> list[int]:
    """Three independent seeds of a step: for its batch, for the model, for the metrics."""
    # Seeds of each step, so that a run that goes on needs no generator's state. 63 bits: torch takes signed numbers.
    return [int(word) >> 1 for word in np.random.SeedSequence((seed, step)).generate_state(3, np.uint64)]


def _reseed(device: torch.device, seed: int) -> None:
    # `torch.manual_seed` would move the generators of all GPUs, too.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _to(device: torch.device, batch: Any, *, copy: bool = False) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, copy=copy)
    if isinstance(batch, dict):
        return {key: _to(device, value, copy=copy) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_to(device, value, copy=copy) for value in batch)
    return batch


def _model_settings(model: nn.Module) -> dict[str, str]:
    """Hashes of shapes, settings and frozen weights (trained ones come from the checkpoint), and of the code."""
    kinds, settings = zip(*model_state.settings_of(model, persistent=False), strict=True)
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    digest = hashlib.sha256(identity_of([names, settings]).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}".encode())
        if not parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(values.numpy().data)
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"model": f"{size} parameters, {digest.hexdigest()[:12]}", "code_version": identity_of(kinds)}
