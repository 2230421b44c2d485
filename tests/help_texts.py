"""The help of the verbs, kept in `align_circuits/cli/help/` as text: what it is made from takes seconds to import.

After options have changed, `python tests/help_texts.py` writes it anew.
"""

import os
import re
import textwrap
from collections.abc import Collection
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from align_circuits.cli.entry import MACHINE, VERBS, parse_verb

FOLDER = Path(__file__).parents[1] / "align_circuits/cli/help"

WIDTH = 80
"""Columns."""

_REFUSED = {"tune": ("--quantization ",)}
"""Options that a verb inherits and refuses, with a line that says why."""

_FIRST = ("-h,", "--model", "--prompts", "--task", "--n", "--targets", "--seed")
"""The options of a verb that come first: those of the verb itself stand between them and `_LAST`."""
_LAST = ("--out", "--overwrite,")
_OF_THE_MACHINE = (
    *("--tokenizer", "--revision", "--device", "--dtype", "--device-map", "--quantization"),
    *("--engine", "--batch-size", "--threads", "--parts"),
)
"""How a model is read and run: a section of their own, which `--help` leaves out and `--help all` shows."""

_COLUMN = 25
"""Where the text of an option starts."""

_OPTION = re.compile(r"  (-\S+(?:,? \S+)*|\S+(?: \S+)*(?=  ))(?: {2,}(.*))?")
"""The first line of an option or an argument: its name and values, and its text, which may start on the next line."""


def parser_help(verb: str) -> str:
    """Returns the help as the parser of a verb prints it."""
    columns = patch.dict(os.environ, COLUMNS=str(WIDTH))
    with columns, redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        parse_verb(verb, "--help")
    return _tidied(printed.getvalue(), verb)


def _tidied(printed: str, verb: str) -> str:
    """Help in which every text is wrapped once, in words of the command line rather than of Python."""
    lines: list[str] = []
    option: list[str] | None = None  # its name, and the lines of its text
    names = {*re.findall(r"--([\w-]+)", printed)}
    for line in [*printed.replace("runs/VERB/", f"runs/{verb}/").rstrip().splitlines(), ""]:
        # Values that go on in the next line.
        if option and any(option[0].count(begin) > option[0].count(end) for begin, end in ("[]", "{}")):
            option[0] += f"{' ' * (not option[0].endswith(','))}{line.strip()}"
            continue
        if option and line.startswith(" " * 10) and not _OPTION.fullmatch(line):
            option.append(line.strip())
            continue
        if option and not option[0].startswith(_REFUSED.get(verb, ())):
            lines += _wrapped(*_with_choices(option[0], " ".join(filter(None, option[1:]))), names)
        start = _OPTION.fullmatch(line)
        option = [start[1], start[2] or ""] if start else None
        if option is None:
            line = _metavars(line).replace("[--out PATH] [--overwrite | --no-overwrite]", "[OPTIONS]")
            lines += textwrap.wrap(line, WIDTH) if line.startswith(VERBS[verb][: WIDTH // 2]) else [line]
    return "\n".join(_in_order(lines))


def _in_order(lines: list[str]) -> list[str]:
    """The lines of a verb with what most people set first, and what they rarely set last."""
    start = lines.index(" options") + 2 if " options" in lines else len(lines)
    end = next((index for index in range(start, len(lines)) if not lines[index].startswith("  ")), len(lines))
    blocks: list[list[str]] = []
    for line in lines[start:end]:
        if line.startswith("  -"):
            blocks.append([])
        blocks[-1].append(line)
    by_name = {block[0].split()[0]: block for block in blocks}
    runs_a_model = "--engine" in by_name
    first, last = (_FIRST, (*_LAST, *_OF_THE_MACHINE)) if runs_a_model else (_FIRST[:1], _LAST)
    own = [name for name in by_name if name not in (*first, *last)]
    shown, machine = (
        [line for name in names if name in by_name for line in by_name[name]]
        for names in ((*first, *own, *_LAST), _OF_THE_MACHINE * runs_a_model)
    )
    heading = ["", f" {MACHINE}", lines[start - 1]] if runs_a_model else []
    return [*lines[:start], *shown, *heading, *machine, *lines[end:]]


def _metavars(name: str) -> str:
    """The name of an option and of its values, without what Python's types add."""
    name = name.replace("{None}|", "").replace("{None,", "{").replace("|{auto}", "|auto")
    return re.sub(r"(?:(?:STR|INT)\|)?\{?\[(STR|INT) \[\1 \.\.\.\]\]\}?", r"\1 [\1 ...]", name)


def _with_choices(name: str, text: str) -> tuple[str, str]:
    """The name of an option and its text, which lists the values if several may be given or no line holds them."""
    name = _metavars(name)
    several = re.fullmatch(r"(\S+) \{?\[\{(\S+)\} \[\.\.\.\]\]\}?", name)
    found = several or (re.fullmatch(r"(\S+) \{(\S+)\}", name) if len(name) > WIDTH - 2 else None)
    if found is None:
        return name, text
    said, default = re.fullmatch(r"(.*?)( \(default: .*\))?", text, flags=re.DOTALL).groups("")  # type: ignore
    names = f"{said} Names: {found[2].replace(',', ', ')}.{default}"
    return f"{found[1]} NAME{' [NAME ...]' if several else ''}", names


def _wrapped(name: str, text: str, names: Collection[str]) -> list[str]:
    """The lines of an option; fields in its text that have the name of an option are written as that."""
    if flag := re.fullmatch(r"(--[\w-]+), (--no-[\w-]+)", name):
        text = text.replace("(default: True)", f"(default: {flag[1]})")
        text = text.replace("(default: False)", f"(default: {flag[2]})")
    text = re.sub(r"\(default: '\s+'\)", "(default: a line break)", text)
    text = re.sub(r" \(default: (None|''|)\)", "", text)
    text = re.sub(r'`(\w+)="(\w+)"`', lambda option: f"--{option[1].replace('_', '-')} {option[2]}", text)
    text = re.sub(r'`"([\w-]+)"`', r"\1", text)
    text = re.sub(r"`([\w-]+)`", lambda field: f"--{field[1]}" if field[1] in names else field[0], text)
    wrapped = textwrap.wrap(text, WIDTH - _COLUMN, break_long_words=False, break_on_hyphens=False)
    beside = wrapped[:1] if len(name) + 4 <= _COLUMN else []
    first = f"  {name:<{_COLUMN - 2}}{''.join(beside)}".rstrip()
    return [first, *(" " * _COLUMN + line for line in wrapped[len(beside) :])]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in VERBS:
        (FOLDER / f"{name}.txt").write_text(parser_help(name), encoding="utf-8")
