"""Where a table of measurements came from."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TEXTS = "texts"
"""The entry of a saved provenance with the key columns that hold texts which look like numbers or like nothing."""


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
            # It tells how to read the file beside it, and is no field.
            given.pop(TEXTS, None)
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
