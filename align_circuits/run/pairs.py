"""Two runs of minimal pairs: the one that is measured, and the one whose activations are put into it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.patch import check_pair
from align_circuits.hooks.graph import Graph
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import CPU_TOKENS, capture, in_batches
from align_circuits.run.target_metrics import Outcome
from align_circuits.tables.tables import Provenance, Table

Direction = Literal["noise", "denoise"]


@dataclass(frozen=True, eq=False)
class CachedPair:
    """Activations of both runs on the same prompts, by hook point, 0 at padding."""

    base: Mapping[str, Float[Tensor, "prompt pos ..."]]
    source: Mapping[str, Float[Tensor, "prompt pos ..."]]

    def change(self, name: str) -> Float[Tensor, "prompt pos ..."]:
        """Returns what patching would add at a hook point."""
        return self.source[name] - self.base[name]

    def between(self, name: str, share: float) -> Float[Tensor, "prompt pos ..."]:
        """Returns the activation that lies so far on the way from the source to the base."""
        return torch.lerp(self.source[name], self.base[name], share)


@dataclass(frozen=True, eq=False)
class Pair:
    """The base run is measured; what the source run says is put into it. Targets are those of the clean prompts."""

    base: Prompts
    source: Prompts
    outcome: Outcome
    """Of the base run."""
    direction: Direction

    @classmethod
    def of(cls, clean: Prompts, corrupted: Prompts, direction: str, metric: str, kind: str) -> "Pair":
        """Returns the pair of a direction.

        Raises:
            ValueError: Prompts that do not match, or an unknown direction, metric or kind of targets.
        """
        if direction not in ("noise", "denoise"):
            raise ValueError(
                f"direction={direction!r}: choose 'noise' (corrupted into clean) or 'denoise' (clean into corrupted)"
            )
        check_pair(clean, corrupted)
        base, source = (clean, corrupted) if direction == "noise" else (corrupted, clean)
        return cls(base, source, Outcome.of(base, metric, kind), direction)  # pyright: ignore[reportArgumentType]

    def in_batches(
        self, measure: Callable[["Pair"], Float[Tensor, "... batch"]], size: int | Literal["auto"]
    ) -> Float[Tensor, "... prompt"]:
        """Returns what `measure` finds for all prompts, some of them at a time, fewer when memory runs out.

        Raises:
            ValueError: A size below 1.
        """
        count, length = self.base.mask.shape
        if size != "auto" and size < 1:
            raise ValueError(f"batch_size={size}: give a positive number of prompts, or 'auto'")
        found: list[Tensor] = []

        def run(prompts: Int[Tensor, " batch"], _: int) -> None:
            found.append(measure(self._part(slice(int(prompts[0]), int(prompts[-1]) + 1))))

        fitting = max(1, CPU_TOKENS // length) if size == "auto" else size
        tokens = min(fitting, max(1, count)) * length
        in_batches(run, torch.arange(count), length, tokens, halve_to=length if size == "auto" else None)
        return torch.cat(found, -1)

    def _part(self, rows: slice) -> "Pair":
        """Some of the prompts."""
        mine = (self.outcome.prompt >= rows.start) & (self.outcome.prompt < rows.stop)
        outcome = replace(
            self.outcome,
            prompts=self.base[rows],
            prompt=self.outcome.prompt[mine] - rows.start,
            query=self.outcome.query[mine],
            gold=self.outcome.gold[mine],
        )
        return replace(self, base=self.base[rows], source=self.source[rows], outcome=outcome)

    def held(self, model: Any, names: Sequence[str], engine: Any, device: torch.device | None = None) -> CachedPair:
        """Returns the activations of both runs at some hook points."""
        both = (capture(model, prompts, names, engine=engine) for prompts in (self.base, self.source))
        base, source = ({name: value.to(device) for name, value in values.items()} for values in both)
        return CachedPair(base, source)

    def inputs(self, device: torch.device) -> tuple[Int[Tensor, "prompt pos"], Bool[Tensor, "prompt pos"]]:
        """Returns the tokens of the base run and their mask."""
        return self.base.tokens.to(device), self.base.mask.to(device)

    def mean_outcome(self, logits: Float[Tensor, "prompt pos d_vocab"]) -> Float[Tensor, ""]:
        """Returns the sum over prompts of each one's mean over its targets."""
        prompt = self.outcome.prompt.to(logits.device)
        asked = logits[prompt, self.outcome.query.to(logits.device)]
        wide = asked.to(torch.promote_types(asked.dtype, torch.float32))  # a softmax in bfloat16 has no fine gradients
        said = self.outcome.says(wide, torch.arange(len(prompt)))
        return (said / prompt.bincount(minlength=len(logits))[prompt]).sum()

    def provenance(self, verb: str, model: Any, settings: Mapping[str, Any], engine: str) -> Provenance:
        """Returns where a measurement of the pair came from."""
        clean, corrupted = (self.base, self.source) if self.direction == "noise" else (self.source, self.base)
        return Provenance(
            verb,
            settings={
                **settings,
                "metric": self.outcome.metric,
                "direction": self.direction,
                "corrupted": dict(corrupted.task),
                "corrupted_digest": corrupted.digest,
            },
            model=model_provenance(model),
            data=clean.provenance,
            engine=engine,
        )

    def edges(
        self,
        graph: Graph,
        edges: Bool[Tensor, "receiver sender"],
        values: Float[ndarray, "edge prompt"],
        provenance: Provenance,
    ) -> Table:
        """Returns what was measured of edges as a table, keyed by sender, receiver and metric."""
        receiver, sender = edges.nonzero().T.tolist()
        keys = pd.DataFrame(
            {
                "sender": [graph.senders[place].name for place in sender],
                "receiver": [graph.receivers[place].name for place in receiver],
                "metric": self.outcome.metric,
            }
        )
        return self.outcome.table(keys, values, provenance)
