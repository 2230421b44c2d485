"""Prints how many lines each room of the package has, beside its budget; fails where one is over it by a tenth.

    python tests/rooms.py

Whoever needs more raises the budget in the same commit and says why there. A room that shrinks takes its budget along,
until it is at the goal. Lines are those of Python files, with docstrings and blank ones.
"""

# ruff: noqa: T201
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLACK = 1.1

ROOMS = {
    "align_circuits": (390, 300),
    "align_circuits/jobs": (1825, 1000),
    "align_circuits/prompts": (1830, 1300),
    "align_circuits/tables": (1830, 1100),
    "align_circuits/tasks": (2162, 2100),
    "align_circuits/models": (3130, 2400),
    "align_circuits/run": (2215, 1500),
    "align_circuits/heads": (4578, 2600),
    "align_circuits/circuits": (1271, 1100),
    "align_circuits/localizers": (560, 500),
    "align_circuits/report": (2060, 1700),
    "align_circuits/training": (2050, 1400),
    "align_circuits/cli": (3044, 1500),
    "align_circuits/papers": (10965, 8500),
    "hooks": (3920, 2600),
    "tests": (33800, 20000),
}
"""Of each room its budget and its goal, in lines. The files at the top of the package are a room."""


def lines_of(room: str) -> int:
    """Returns the lines of the Python files in a room; of `align_circuits` those of its own files alone."""
    files = (ROOT / room).glob("*.py" if room == "align_circuits" else "**/*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    """Prints the table, and returns 1 if a room is over its budget."""
    print(f"{'room':28s} {'lines':>7s} {'budget':>7s} {'goal':>7s}")
    lines = {room: lines_of(room) for room in ROOMS}
    for room, (budget, goal) in ROOMS.items():
        over = "  over its budget by more than a tenth" if lines[room] > SLACK * budget else ""
        print(f"{room:28s} {lines[room]:7,d} {budget:7,d} {goal:7,d}{over}")
    package = {room: lines[room] for room in ROOMS if room != "tests"}
    goal = sum(goal for room, (_, goal) in ROOMS.items() if room != "tests")
    print(f"{'package and hooks':28s} {sum(package.values()):7,d} {'':7s} {goal:7,d}")
    unknown = {path.name for path in (ROOT / "align_circuits").iterdir() if path.is_dir() and not path.is_symlink()}
    unknown -= {Path(room).name for room in ROOMS} | {"__pycache__"}
    if unknown:
        print(f"no budget for {', '.join(sorted(unknown))}: give each a line")
    return int(bool(unknown) or any(lines[room] > SLACK * budget for room, (budget, _) in ROOMS.items()))


if __name__ == "__main__":
    sys.exit(main())
