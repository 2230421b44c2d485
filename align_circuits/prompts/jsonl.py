"""Prompts as JSON lines: what a line may hold, and what is wrong with one that does not."""

import json
import re
from pathlib import Path
from typing import Any

from align_circuits.jobs.files import is_path
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.prompts.texts import is_place

SCHEMA = {
    "text": "the prompt, without its answer (required)",
    "answer": "what is to be predicted behind it, with its leading space",
    "wrong": "the answer that the metric logit_diff compares with",
    "corrupted": "a text of equally many tokens in which another answer is right",
    "corrupted_answer": "the right answer to the corrupted text",
    "positions": "places by name: a part of the text, [part, occurrence], or the index of a token",
    "relations": 'by name {"query": name, "keys": [name, ...], "candidates": [name, ...]}, all from `positions`',
    "group": "a string or a number, the same for related lines",
}
"""The keys of a line, each with what it holds. All lines have the same keys."""

_TYPES = dict.fromkeys(("positions", "relations"), (dict, "an object, by name"))
_TYPES |= {"group": (str | int | float, "a string or a number")}
"""The type of each value that is no string, and its name."""

_RELATION = {"query", "keys", "candidates"}


def read_jsonl(path: str | Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Returns the lines of a file as columns, by the keys of `SCHEMA`, and their numbers from 1.

    Empty lines are left out.

    Raises:
        ValueError: No such file, a line that is no JSON object, an unknown key, or a key that only some lines have.
    """
    if not is_path(path) or not Path(path).is_file():
        raise ValueError(f"no file {str(path)!r}: give one JSON object a line, with the keys {', '.join(SCHEMA)}")
    try:
        # not splitlines, which also splits at line separators inside of strings
        # Some editors begin a file with a byte order mark, which "utf-8-sig" drops.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8 ({error}): give one JSON object a line") from error
    records: dict[int, dict[str, Any]] = {}
    first: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        line_name = f"{str(path)!r}, line {number}"
        try:
            record = json.loads(line, object_pairs_hook=_without_repeats)
        except KeyError as error:
            raise ValueError(f"{line_name}: the key {error.args[0]!r} stands there twice; give it once") from None
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or an integer of thousands of digits
            raise ValueError(f"{line_name}: no JSON ({error}); give one object a line") from error
        if halves := re.findall("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
            raise ValueError(
                f"{line_name}: {halves[0]!r} is half a character (a lone surrogate): decode it from its file anew"
            )
        if isinstance(record, list):
            raise ValueError(f"{line_name}: a list; give one object a line, without brackets around them")
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f"{line_name}: give an object with a string 'text'")
        if unknown := sorted(record.keys() - SCHEMA.keys()):
            meant = did_you_mean(unknown[0], SCHEMA)
            raise ValueError(f"{line_name}: unknown key {unknown[0]!r}: {meant}a line may have {', '.join(SCHEMA)}")
        for key, value in record.items():
            kind, wanted = _TYPES.get(key, (str, "a string"))
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{line_name}: {key} is {json.dumps(value)[:60]}; give {wanted}")
        for name, place in record.get("positions", {}).items():
            if not is_place(_place(place)):
                shown = json.dumps(place, ensure_ascii=False)[:60]
                raise ValueError(
                    f"{line_name}: positions[{name!r}] is {shown}; give a part of the text, [part, occurrence], or the "
                    "index of a token"
                )
        _check_relations(line_name, record.get("relations", {}))
        first = first or record
        if uneven := sorted(record.keys() ^ first.keys()):
            raise ValueError(f"{line_name}: {uneven[0]!r} stands in some lines only; give it in all or in none")
        for key in ("positions", "relations"):
            if record.get(key, {}).keys() != first.get(key, {}).keys():
                raise ValueError(f"{line_name}: {key} has other names than the first line; give the same in all")
        records[number] = record
    if not first:
        raise ValueError(f"{str(path)!r} has no lines: give one JSON object a line, with a 'text'")
    for key, needed in (("wrong", "answer"), ("corrupted", "answer"), ("corrupted_answer", "corrupted")):
        if key in first and needed not in first:
            raise ValueError(f"{str(path)!r} has the key {key!r} without {needed!r}: give each line {needed!r} too")
    columns, numbers = {key: [record[key] for record in records.values()] for key in first}, [*records]
    return columns, numbers


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key that stands there twice is a KeyError."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return record


def _check_relations(place: str, relations: dict[str, Any]) -> None:
    """Raises unless each relation names its query, its keys and perhaps its candidates."""
    for name, relation in relations.items():
        shown = f"{place}: relation {name!r}"
        if not isinstance(relation, dict) or not {"query", "keys"} <= relation.keys() <= _RELATION:
            raise ValueError(f"{shown} needs 'query' and 'keys', may have 'candidates', and nothing else")
        lists = [relation[key] for key in ("keys", "candidates") if key in relation]
        if not all(isinstance(names, list) and names for names in lists):
            raise ValueError(f"{shown}: keys and candidates are lists of names of positions, with at least one")
        given = [relation["query"], *(name for names in lists for name in names)]
        # An index would count tokens of the text for some, and columns of the padded prompts for others.
        if wrong := [name for name in given if not isinstance(name, str)]:
            raise ValueError(f"{shown}: {wrong[0]!r} is no name; name places under 'positions' and give the names here")


def places(column: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the positions of all lines by name, as `Prompts.from_texts` takes them."""
    return {name: [_place(line[name]) for line in column] for name in column[0]}


def _place(place: Any) -> Any:
    return tuple(place) if isinstance(place, list) else place
