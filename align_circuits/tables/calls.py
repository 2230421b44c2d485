"""The call that made a table, so that a table that was saved from Python can be made again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from align_circuits.jobs.files import inside
from align_circuits.prompts.prompts import Prompts

FOLDER = "call"
"""The folder within that of a table that holds its call."""

_FILE = "call.json"

_CLASS = "class"
"""The key of an object of a class of this package, beside its fields."""


@dataclass(frozen=True)
class Call:
    """A call of a public function."""

    function: str
    """Its name, as `align_circuits` exports it."""
    arguments: Mapping[str, Any]
    """Its arguments by name, but for the model, which the provenance names."""

    def save(self, folder: Path) -> None:
        """Writes the call, or that it cannot be repeated from a file, and its prompts in files of their own."""
        folder.mkdir()
        call: dict[str, Any] = {"function": self.function}
        try:
            call["arguments"] = {name: _written(name, value, folder) for name, value in self.arguments.items()}
        except TypeError as error:
            call["refused"] = str(error)
        (folder / _FILE).write_text(json.dumps(call, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, classes: Mapping[str, type]) -> "Call":
        """Reads what `save` wrote, with the classes that it may be made of, by name.

        Raises:
            ValueError: A call that could not be written, or another file.
        """
        try:
            call = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            if (refused := call.get("refused")) is None:
                arguments = {name: _read(value, folder, classes) for name, value in call["arguments"].items()}
                return cls(str(call["function"]), arguments)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(folder)!r} holds no call that Table.save wrote ({error})") from error
        raise ValueError(f"the call in {str(folder)!r} cannot be repeated, since {refused}: make it in Python again")


def _written(name: str, value: Any, folder: Path) -> Any:
    """A value as JSON; prompts go to a file. What is not of this package, as a function or a tensor, is refused."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):  # where parts of a sweep are kept: a repetition computes them anew
        return None
    if isinstance(value, Prompts):
        value.save(folder / f"{name}.safetensors")
        return {_CLASS: "Prompts", "file": f"{name}.safetensors"}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("align_circuits."):
        known = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return {_CLASS: type(value).__name__} | {
            key: _written(f"{name}.{key}", entry, folder) for key, entry in known.items() if key != "cache_dir"
        }
    if isinstance(value, Mapping) and all(isinstance(key, str) and key != _CLASS for key in value):
        return {key: _written(f"{name}.{key}", entry, folder) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_written(f"{name}.{index}", entry, folder) for index, entry in enumerate(value)]
    raise TypeError(f"{name} is of type {type(value).__name__}, which no file keeps")


def _read(value: Any, folder: Path, classes: Mapping[str, type]) -> Any:
    """The value of what `_written` returned; lists of numbers are tuples, as heads are."""
    if isinstance(value, list):
        entries = [_read(entry_json, folder, classes) for entry_json in value]
        return tuple(entries) if entries and all(isinstance(entry, int) for entry in entries) else entries
    if not isinstance(value, dict):
        return value
    if value.get(_CLASS) == "Prompts":
        return Prompts.load(inside(folder, value["file"]))
    entries = {name: _read(entry_json, folder, classes) for name, entry_json in value.items() if name != _CLASS}
    # Only classes that the caller lists: no file chooses what code runs.
    return classes[value[_CLASS]](**entries) if _CLASS in value else entries
