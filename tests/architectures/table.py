"""Writes which architectures run, and what each verb refuses, into the documentation and the README.

    python tests/architectures/table.py --write

All of it is what `test_conformance.py` and `test_tune.py` hold every architecture to: where a reason stands here, the
tests ask for a refusal with it, and where none stands, for the numbers of plain Hugging Face.
"""

# ruff: noqa: T201
import sys
from pathlib import Path

from verbs import REFUSED, REFUSED_AT_LOAD, TUNED, VERBS
from zoo import ARCHITECTURES, NOT_DECODERS

ROOT = Path(__file__).parents[2]
EQUAL = "equal"


def table() -> str:
    """A row for each architecture, a column for verbs that refuse the same."""
    columns: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for verb in (*VERBS, *TUNED):
        columns.setdefault(tuple(REFUSED.get(verb, {}).items()), []).append(verb)
    equal = columns.pop(())
    reasons = dict.fromkeys(REFUSED_AT_LOAD.values()) | dict.fromkeys(
        reason for refused in columns for _, reason in refused
    )
    number = {reason: f"refused ({place})" for place, reason in enumerate(reasons, 1)}
    lines = [
        "| architecture | class in transformers | "
        + " | ".join([", ".join(f"`{verb}`" for verb in verbs) for verbs in columns.values()])
        + " | all others |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, (stem, _) in (ARCHITECTURES | NOT_DECODERS).items():
        if reason := REFUSED_AT_LOAD.get(name):
            cells = [number[reason]] * (1 + len(columns))
        else:
            cells = [number.get(dict(refused).get(name, ""), EQUAL) for refused in columns] + [EQUAL]
        lines.append(f"| {name} | {stem} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"All others are {', '.join(f'`{verb}`' for verb in equal)}. The reasons, in the words of the errors:",
        "",
    ]
    return "\n".join([*lines, *(f"{place}. ... {reason} ..." for place, reason in enumerate(reasons, 1))])


def classes() -> str:
    """The classes of transformers that run."""
    stems = [stem for name, (stem, _) in ARCHITECTURES.items() if name not in REFUSED_AT_LOAD]
    *most, last = dict.fromkeys(stems)
    return f"{', '.join(most)} and {last}"


def pages() -> dict[Path, str]:
    """What the two pages should say."""
    written = {}
    for path, text in ((ROOT / "docs" / "architectures.md", f"\n{table()}\n"), (ROOT / "README.md", classes())):
        old = path.read_text(encoding="utf-8")
        before, _, rest = old.partition("<!-- architectures -->")
        _, _, after = rest.partition("<!-- end -->")
        written[path] = f"{before}<!-- architectures -->{text}<!-- end -->{after}"
    return written


def main() -> int:
    """Writes the pages; without `--write` returns 1 if they are old."""
    old = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if "--write" in sys.argv:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
        return 0
    print("\n".join(f"{path} is old: run it with --write" for path in old) or "both pages are as they should be")
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
