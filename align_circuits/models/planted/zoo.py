"""A zoo of planted circuits that differ in all that can hide a head from a method: one circuit for every seed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from align_circuits.checks import checked
from align_circuits.models.planted.planted_model import (
    CIRCUIT_ROLES,
    DECOYS,
    OTHER_DECOYS,
    STAGES,
    PlantedModel,
    planted_circuit,
)
from align_circuits.tasks.seq2seq import Seq2SeqTask

PUBLIC = range(140)
"""The seeds on which methods may be developed."""

HELD_OUT = range(10_000, 10_060)
"""The seeds on which a finished method is measured once."""

_DECOYS = tuple(kind for kind in (*DECOYS, *OTHER_DECOYS) if kind != "backup")


@dataclass(frozen=True)
class ZooCircuit:
    """What one circuit of the zoo is like."""

    seed: int
    task: Mapping[str, Any]
    """The arguments of its `Seq2SeqTask`."""
    circuit: Mapping[str, Any]
    """The arguments of its `planted_circuit`, without the task and the seed."""

    def build(self) -> PlantedModel:
        """Returns the model, with its task and the true kinds of its heads."""
        return planted_circuit(Seq2SeqTask(**self.task), self.seed, **self.circuit)

    @property
    def traits(self) -> dict[str, Any]:
        """What varies, a number or a flag each: the columns by which results are read."""
        circuit, copies = self.circuit, self.circuit["copies"]
        return {
            "n_layers": circuit["n_layers"],
            "n_heads": circuit["n_heads"],
            "grouped": circuit["n_key_value_heads"] < circuit["n_heads"],
            "strength": circuit["strength"],
            "noise": circuit["noise"],
            "positional_bias": circuit["positional_bias"],
            "self_repair": circuit["self_repair"],
            "decoys": len(circuit["decoys"]),
            "x_len": self.task["x_len"],
            **{f"copies of {role}": copies[role] for role in CIRCUIT_ROLES},
        }


@checked
def zoo_circuit(seed: int) -> ZooCircuit:
    """Draws what one circuit of the zoo is like.

    Uniformly drawn are the depth (5 to 7 layers), the width (6, 8 or 12 heads), grouped queries (half of the circuits:
    two heads a key head), the strength (.5, .7 or 1), noise (none, or .05 over the root of the number of heads; none
    at strength .5, where it would break the circuit), positional bias (none or .05 nats a token), self-repair (half),
    the decoys (each of twelve kinds in three circuits of five, `diffuse` in two), the number of heads over which each
    role is split (1 to 6, as far as the layer has room), and the task: 4 or 5 symbols, phrases of one or two letters, 3
    or 4 examples, a permuted alignment that no fixed distance follows at most phrases.

    Args:
        seed: Of the draw, and of the circuit's places and weights; see `PUBLIC` and `HELD_OUT`.

    Raises:
        ValueError: A negative seed.

    >>> zoo_circuit(0).traits["n_layers"]
    6
    """
    if seed < 0:
        raise ValueError(f"seed={seed}: give 0 or more")
    draw = np.random.default_rng([seed, STAGES])
    n_heads, strength = int(draw.choice([6, 8, 12])), float(draw.choice([0.5, 0.7, 1.0]))
    # A layer holds both kinds of aligners; the layers of the others keep a place for a decoy.
    most = {"previous": n_heads - 2, "align_query": n_heads // 2, "align_key": n_heads // 2, "lookup": n_heads - 2}
    copies = {role: int(draw.integers(1, min(6, most[role]) + 1)) for role in CIRCUIT_ROLES}
    n_layers = int(draw.integers(5, 8))
    noise = float(draw.choice([0.0, 0.05])) * (strength > 0.5)
    decoys = [kind for kind in _DECOYS if draw.random() < 0.6]
    circuit: dict[str, Any] = {
        "strength": strength,
        # The diffuse head multiplies what it reads by thousands, noise too.
        "decoys": [kind for kind in decoys if not (noise and kind == "diffuse")],
        "n_layers": n_layers,
        "n_ctx": 128,
        "n_heads": n_heads,
        "n_key_value_heads": n_heads // int(draw.integers(1, 3)),
        "copies": copies,
        "self_repair": bool(draw.random() < 0.5),
        "positional_bias": float(draw.choice([0.0, 0.05])),
        "noise": noise / (n_layers * n_heads) ** 0.5,
    }
    task: dict[str, Any] = {
        "x_len": int(draw.integers(4, 6)),
        "phrase_len": int(draw.integers(1, 3)),
        "n_examples": int(draw.integers(3, 5)),
        "alignment": "permutation",
        # Few, so that heads are narrow and 200 circuits run in minutes.
        "alphabet": "ABCDEFGHIJKL",
        "letters": "abcdefghijkl",
        "alphabet_range": (4, 10),
    }
    return ZooCircuit(seed, task | {"task_seed": alignment_seed(Seq2SeqTask(**task), seed)}, circuit)


def alignment_seed(task: Seq2SeqTask, seed: int) -> int:
    """Returns the first `task_seed` from a seed on under which no fixed distance aligns most phrases of the task."""
    return next(task_seed for task_seed in count(seed) if not _at_one_distance(replace(task, task_seed=task_seed)))


def _at_one_distance(task: Seq2SeqTask) -> bool:
    """Whether most aligned symbols lie as far before their phrases: a head could follow the distance."""
    distances = Counter(task.phrase_len * phrase - symbol for phrase, symbol in enumerate(task.aligned))
    return max(distances.values()) > task.x_len / 2
