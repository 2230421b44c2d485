"""Paths and gradients by hand: runs in which hooks freeze whatever should not change."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align_circuits.prompts.prompts import Prompts


def of_lengths(lengths: tuple[int, ...], seed: int) -> Prompts:
    """Random prompts; those of any two seeds make a pair, since all ask for the same last token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
    prompts = Prompts.from_tokens([[*row, 7] for row in rows])
    last = prompts.targets.groupby("prompt").tail(1).reset_index(drop=True)
    return replace(prompts, targets=last, relations={})


class Twin:
    """Runs a model with hooks by hand: some hook points frozen, others captured."""

    def __init__(self, model: Any, run: Prompts, other: Prompts, start: Tensor | None = None):
        """With `start`, the run begins with these embeddings."""
        self.start = {} if start is None else {"blocks.0.hook_resid_pre": lambda _: start}
        self.model, self.run, self.cfg = model, run, model.cfg
        self.inputs: dict[str, Any] = {}
        if not run.mask.all():
            self.inputs = {"attention_mask": run.mask.long(), "position_ids": (run.mask.cumsum(1) - 1).clamp(min=0)}
        self.base, self.other = self.cache(run), self.cache(other)
        self.before = self.outcome({})

    def names(self) -> list[str]:
        sites = [
            "hook_resid_pre",
            *(f"attn.hook_{site}" for site in ("z", "q", "k", "v", "pattern")),
            "hook_mlp_out",
            "hook_resid_post",
        ]
        return [f"blocks.{layer}.{site}" for layer in range(self.cfg.n_layers) for site in sites]

    def cache(self, prompts: Prompts) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        starts = [(name, lambda x, start=start, **_: start(x)) for name, start in self.start.items()]
        hooks = [*starts] + [(name, lambda x, name=name, **_: kept.update({name: x.clone()})) for name in self.names()]
        with torch.no_grad():
            self.model.run_with_hooks(prompts.tokens, fwd_hooks=hooks, **self.inputs)
        return kept

    def outcome(
        self, frozen: dict[str, Callable[[Tensor], Tensor]], captured: dict[str, Tensor] | None = None
    ) -> Tensor:
        """A number for each target; `captured` is filled before anything is frozen there."""

        def hook_at(name: str) -> Any:
            def hook(x: Tensor, **_: Any) -> Tensor | None:
                if captured is not None and name in captured:
                    captured[name] = x.clone()
                return frozen[name](x) if name in frozen else None

            return hook

        frozen = {**self.start, **frozen}
        names = [*frozen, *(name for name in captured or {} if name not in frozen)]
        with torch.no_grad():
            logits = self.model.run_with_hooks(
                self.run.tokens, fwd_hooks=[(name, hook_at(name)) for name in names], **self.inputs
            )
        return self.numbers(logits[self.run.column("prompt"), self.run.column("query_pos")])

    def numbers(self, logits: Tensor) -> Tensor:
        """What the logits at the targets are measured by: their gold tokens' log-probabilities."""
        return logits.log_softmax(-1).gather(1, self.run.column("token")[:, None])[:, 0]

    def moved(self, name: str, share: float, column: int | None = None) -> Tensor:
        """An activation, or one head of it, so far on the way to the other run."""
        new = self.base[name].clone()
        at = slice(None) if column is None else (slice(None), slice(None), column)
        new[at] += share * (self.other[name] - self.base[name])[at]
        return new

    def patched(self, name: str, share: float = 1.0, column: int | None = None, still: Sequence[str] = ()) -> float:
        """What moving an activation does, while others stand still."""
        new = self.moved(name, share, column)
        frozen = {other: lambda _, other=other: self.base[other] for other in still}

        def give(x: Tensor) -> Tensor:
            return new if column is None else x.index_copy(2, torch.tensor([column]), new[:, :, [column]])

        return float((self.outcome({**frozen, name: give}) - self.before).mean())

    def effect(self, sender: str, receiver: str, *, freeze_mlps: bool, share: float = 1.0) -> float:
        """What the sender does through the receiver: freeze, capture, then let go."""
        frozen: dict[str, Any] = {}
        for layer in range(self.cfg.n_layers):
            for name in ("attn.hook_z", *(["hook_mlp_out"] if freeze_mlps else [])):
                name = f"blocks.{layer}.{name}"
                frozen[name] = lambda _, name=name: self.base[name]
        if sender == "input":
            sending, column = "blocks.0.hook_resid_pre", None
        elif sender.startswith("M"):
            sending, column = f"blocks.{sender[1:]}.hook_mlp_out", None
        else:
            layer, column = map(int, sender[1:].split("H"))
            sending = f"blocks.{layer}.attn.hook_z"
        moved_output = self.moved(sending, share, column)
        frozen[sending] = lambda _: moved_output
        if receiver == "logits":
            return float((self.outcome(frozen) - self.before).mean())
        if receiver.startswith("M"):
            at, column = f"blocks.{receiver[1:]}.hook_mlp_out", None
        else:
            where, site = receiver.split(".")
            layer, column = map(int, where[1:].replace("KV", "H").split("H"))
            at = f"blocks.{layer}.attn.hook_{site}"
        captured = {at: torch.empty(0)}
        self.outcome(frozen, captured)
        made = captured[at]

        def give(x: Tensor) -> Tensor:
            if column is None:
                return made
            x = x.clone()
            x[:, :, column] = made[:, :, column]
            return x

        return float((self.outcome({at: give}) - self.before).mean())


def unchecked(cls: type, **values: Any) -> Any:
    """An instance whose annotations are unchecked, as users make it; fields that are not given have their defaults."""
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(instance, field.name, values.get(field.name, field.default))
    instance.__post_init__()
    return instance
