"""The help of the verbs, kept as text in `help/`: the options that it is made from take seconds to import.

After options have changed, `python -m align_circuits.cli.help_texts` writes it anew.
"""

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from align_circuits.cli.entry import VERBS, parse_verb

FOLDER = Path(__file__).parent / "help"

WIDTH = 80
"""Columns."""


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
    return printed.getvalue().rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in VERBS:
        (FOLDER / f"{name}.txt").write_text(parser_help(name), encoding="utf-8")
