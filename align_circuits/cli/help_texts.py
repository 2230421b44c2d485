"""The help of the verbs, kept as text in `help/`: the options that it is made from take seconds to import.

After options have changed, `python -m align_circuits.cli.help_texts` writes it anew.
"""

import os
import re
import textwrap
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from align_circuits.cli.entry import VERBS, parse_verb

FOLDER = Path(__file__).parent / "help"

WIDTH = 80
"""Columns."""

_REFUSED = {"tune": ("--prompts ", "--quantization ")}
"""Options that a verb inherits and refuses, with a line that says why."""

_COLUMN = 25
"""Where the text of an option starts."""

_OPTION = re.compile(r"  (-\S+(?:,? \S+)*|\S+(?: \S+)*(?=  ))(?: {2,}(.*))?")
"""The first line of an option or an argument: its name and values, and its text, which may start on the next line."""


def parser_help(verb: str) -> str:
    """Returns the help as the parser of a verb prints it."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
            parse_verb(verb, "--help")
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return _tidied(printed.getvalue(), verb)


def _tidied(printed: str, verb: str) -> str:
    """Help in which every text is wrapped once, in words of the command line rather than of Python."""
    lines: list[str] = []
    texts: list[tuple[str, list[str]]] = []

    def close() -> None:
        for name, parts in texts:
            if name.startswith(_REFUSED.get(verb, ())):
                continue
            text = " ".join(part for part in parts if part)
            text = re.sub(r"\(default: '\s+'\)", "(default: a line break)", text)
            text = text.replace(" (default: None)", "").replace(" (default: '')", "").replace(" (default: )", "")
            text = re.sub(r'`(\w+)="(\w+)"`', lambda option: f"--{option[1].replace('_', '-')} {option[2]}", text)
            text = re.sub(r'`"([\w-]+)"`', r"\1", text)
            wrapped = textwrap.wrap(text, WIDTH - _COLUMN, break_long_words=False, break_on_hyphens=False)
            beside = wrapped[:1] if len(name) + 4 <= _COLUMN else []
            lines.append(f"  {name:<{_COLUMN - 2}}{''.join(beside)}".rstrip())
            lines.extend(" " * _COLUMN + line for line in wrapped[len(beside) :])
        texts.clear()

    for line in printed.replace("runs/VERB/", f"runs/{verb}/").rstrip().splitlines():
        if start := _OPTION.fullmatch(line):
            close()
            name = start[1].replace("{None}|", "").replace("{None,", "{")
            name = name.replace("|{[STR [STR ...]]}", " [STR ...]").replace("[STR [STR ...]]", "STR [STR ...]")
            texts.append((name, [start[2] or ""]))
        elif texts and line.startswith(" " * 10):
            texts[-1][1].append(line.strip())
        else:
            close()
            lines.append(re.sub(r"\{None\}\|", "", line))
    close()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in VERBS:
        (FOLDER / f"{name}.txt").write_text(parser_help(name), encoding="utf-8")
