"""Whether a change of the code left every kept claim as it was: text, threshold, measured value, control and verdict.

    python benchmarks/same_claims.py --write before.json      # before the change
    python benchmarks/same_claims.py --compare before.json    # after it; status 1 where anything differs

Claims are judged anew on all tables of `docs/results`, to the last digit.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.tables.tables import Table

RESULTS = Path(__file__).parents[1] / "docs/results"


def claims() -> dict[str, list[str]]:
    """Returns the checks of every experiment on every kept table of its study, each as a line of JSON."""
    lines = {}
    for name, experiment in EXPERIMENTS.items():
        for folder in sorted(RESULTS.glob(f"{experiment.study.name.replace('/', '-')}/*")):
            checks = experiment.check(Table.load(folder))
            lines[f"{name} {folder.name}"] = [json.dumps(asdict(each) | {"verdict": each.verdict}) for each in checks]
    return lines


def main() -> int:
    """Writes the claims, or compares them and returns 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a file to keep the claims in")
    parser.add_argument("--compare", type=Path, help="a file that an earlier --write made")
    options, now = parser.parse_args(), claims()
    count = sum(map(len, now.values()))
    if options.write:
        options.write.write_text(json.dumps(now, indent=1), encoding="utf-8")
    if not options.compare:
        print(f"{count} claims of {len(now)} kept tables")
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    different = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    for name in different:
        old, new = before.get(name, []), now.get(name, [])
        print(f"DIFFERENT {name}")
        print(*(f"  - {line}" for line in old if line not in new), sep="\n")
        print(*(f"  + {line}" for line in new if line not in old), sep="\n")
    print(f"{count} claims of {len(now)} kept tables, {len(different)} tables with a difference")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
