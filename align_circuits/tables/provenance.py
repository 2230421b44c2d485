"""Where a table of measurements came from."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pandas as pd

TEXTS = "texts"
"""The entry of a saved provenance with the key columns that hold texts which look like numbers or like nothing."""

EMPTY = "empty texts"
"""The entry with those in which an empty cell is an empty text; in others it is missing."""


@dataclass(frozen=True)
class Provenance:
    """Enough to repeat a measurement, and to distinguish two tables."""

    verb: str
    """The public function that made it, such as `"score_heads"`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments, as JSON."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Name, shape, dtype, device and a hash of the weights."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The task and its seed, and a hash of the tokens."""
    engine: str = ""
    """What ran: `"replay"`, `"fast"` or `"reference"`."""
    versions: Mapping[str, str] = field(default_factory=lambda: dict(_versions()))

    def joined(self, frame: pd.DataFrame) -> "list[Provenance]":
        """Returns where the tables came from that `Table.concat` or the command `each` made one of; else this alone.

        Args:
            frame: The rows, of which some may have been left out since: so are tables that were joined by name.
        """
        records, settings = self.data.get("tables", []) if self.verb == "each" else [], self.settings
        if self.verb == "concat":
            records, key = settings["tables"], settings["key"]
            there = {*frame[key]} if key in frame else set()
            left = [record for name, record in zip(settings["names"], records, strict=bool(there)) if name in there]
            records = left or records
        return [part for record in records for part in Provenance(**record).joined(frame)] or [self]

    def subtracted(self) -> "list[Provenance]":
        """Returns where both sides of a difference came from, and theirs if they are differences; else this alone."""
        if self.verb != "difference":
            return [self]
        return [run for side in ("left", "right") for run in Provenance(**self.settings[side]).subtracted()]

    def to_json(self) -> str:
        """Returns the provenance as indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Provenance":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: Another text.
        """
        try:
            given = json.loads(text)
            # They tell how to read the file beside it, and are no fields.
            for name in (TEXTS, EMPTY):
                given.pop(name, None)
            for name, value in given.items():
                if not isinstance(value, str if name in ("verb", "engine") else dict):
                    raise TypeError(f"{name} is {value!r}")
            return cls(**given)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"no provenance of a table ({error}): give what Table.save wrote") from error


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("align-circuits", "torch", "transformers", "transformer-lens", "peft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
