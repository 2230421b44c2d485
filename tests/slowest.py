"""Prints how long the legs of `make check` took, and which tests took longest.

    python tests/slowest.py runs/check

The folder holds `legs.txt` (a line a leg: its name and seconds) and what pytest's `--junitxml` wrote in each leg.
"""

# ruff: noqa: S314, T201 - the XML is that of our own run
import sys
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 15


def tests_of(folder: Path) -> list[tuple[float, str, str]]:
    """Returns the seconds (set-up and tear-down included), leg and name of every test, the slowest first."""
    tests = [
        (float(case.attrib["time"]), file.stem, f"{case.attrib['classname']}::{case.attrib['name']}")
        for file in folder.glob("*.xml")
        for case in ElementTree.parse(file).iter("testcase")
    ]
    return sorted(tests, reverse=True)


def main(folder: Path) -> None:
    """Prints both lists."""
    legs = [line.rsplit(" ", 1) for line in (folder / "legs.txt").read_text().splitlines()]
    print("Seconds of each leg:")
    for name, seconds in sorted(legs, key=lambda leg: -int(leg[1])):
        print(f"{int(seconds):7d}  {name}")
    print(f"Seconds of the {SHOWN} slowest tests:")
    for seconds, leg, name in tests_of(folder)[:SHOWN]:
        print(f"{seconds:7.1f}  {leg}  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
