"""Unedited runs that several sweeps over the same prompts share, as many as memory should hold."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jaxtyping import Int
from torch import Tensor

from align_circuits.hooks.compat import lora_merging
from align_circuits.hooks.decoders import Decoder
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import modules_in
from align_circuits.hooks.names import Site, name_of, site_of
from align_circuits.hooks.replay import Replay, first_difference
from align_circuits.models.parameters import model_provenance
from align_circuits.run.batch_sizes import NUMBERS_CACHED, key_width


class KeptRuns:
    """Unedited runs by model and tokens, as many as memory should hold, the last used ones."""

    def __init__(self) -> None:
        self.runs: dict[tuple[Hashable, ...], Replay] = {}
        """The last part of a key are the tokens."""

    def run(
        self, model: HookedModel, decoder: Decoder, inputs: Mapping[str, Any], keep: set[str], starts: list[int]
    ) -> Replay:
        """Returns a kept run with all that edited runs start from, or a new one, which is kept if it is small enough.

        Arguments as of `Replay.run`, whose `tokens`, `mask` and `queries` are `inputs`.
        """
        tokens, *others = inputs.values()
        # `shared_runs` lets no weight change, so the object stands for its weights: to hash them would cost a run.
        alike = (id(model), tokens.shape, *((tensor.shape, tensor.cpu().numpy().tobytes()) for tensor in others))
        key = (*alike, tokens.cpu().numpy().tobytes())
        # Taken out and put back: the runs stand in the order of their last use.
        kept = self.runs.pop(key, None)
        if kept is not None and kept.serves(keep, starts):
            self.runs[key] = kept
            return kept
        # The next sweep edits other layers, from other columns on: it finds what it starts from, too.
        sites: set[Site] = {layer_and_site[1] for name in keep if (layer_and_site := site_of(name)) is not None}
        every = {name_of(site, layer) for site in sites for layer in range(model.cfg.n_layers)}
        every |= kept.kept.keys() if kept is not None else set()
        # `Replay.size` before it is known: an activation for each name, keys and values of each layer.
        numbers = len(every) * model.cfg.d_model + 2 * model.cfg.n_layers * key_width(model.cfg)
        room = NUMBERS_CACHED - numbers * tokens.numel()
        if room < 0:
            return Replay.run(decoder, **inputs, keep=keep, starts=starts)
        near = self._beginning_alike(alike, every, tokens)
        # Control sets go through the same prompts again and again: what was used last is used next.
        while sum(run.size for run in self.runs.values()) > room:
            del self.runs[next(iter(self.runs))]
        self.runs[key] = (
            Replay.run(decoder, **inputs, keep=every, starts=[0, tokens.shape[1] - 1])
            if near is None
            else near.beside(tokens)
        )
        return self.runs[key]

    def _beginning_alike(
        self, alike: tuple[Hashable, ...], every: set[str], tokens: Int[Tensor, "prompt pos"]
    ) -> Replay | None:
        """A kept run of prompts that begin with the same tokens, as clean and corrupted ones often do."""
        for other, run in self.runs.items():
            is_alike = other[:-1] == alike and every <= run.kept.keys()
            if is_alike and 2 * first_difference(run.tokens, tokens) > tokens.shape[1]:
                return run
        return None


_KEPT: ContextVar[KeptRuns | None] = ContextVar("kept_runs", default=None)


def kept_runs() -> KeptRuns | None:
    """Returns what `shared_runs` keeps; None outside of it."""
    return _KEPT.get()


@contextmanager
def shared_runs(model: HookedModel) -> Iterator[None]:
    """Lets all sweeps in a `with` share the unedited runs of the same prompts, and merges adapters for its length.

    Neither weights nor hooks of the model may change meanwhile; provenance names the weights as they are before.
    """
    model_provenance(model)
    # A `with` within another one shares the runs of the outer one.
    token = _KEPT.set(_KEPT.get() or KeptRuns())
    try:
        with lora_merging.merged_adapters(modules_in(model)):
            yield
    finally:
        _KEPT.reset(token)
