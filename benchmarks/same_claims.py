"""Whether a change of the code left every kept claim as it was: text, threshold, measured value, control and verdict.

    python benchmarks/same_claims.py --write before.json      # before the change
    python benchmarks/same_claims.py --compare before.json    # after it; status 1 where anything differs

Claims are judged anew on all tables of `docs/results`, to the last digit. Where a rule of verdicts was changed on
purpose, `--changes FILE` keeps those that differ as a table, the claims of each result in their order.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from align_circuits.papers.claims import kept_checks
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.statistics import Measured
from align_circuits.tables.tables import Table

RESULTS = Path(__file__).parents[1] / "docs/results"

NUMBERS = ("measured", "control")
"""What a check holds beside words and a threshold."""


def claims() -> dict[str, list[str]]:
    """Returns the checks of every experiment on every kept table of its study, and those archived, as lines of JSON."""
    lines = {}
    for name, experiment in EXPERIMENTS.items():
        for folder in sorted(RESULTS.glob(f"{experiment.study.name.replace('/', '-')}/*")):
            lines[f"{name} {folder.name}"] = experiment.check(Table.load(folder))
    for file in sorted(RESULTS.glob("archive/*/*/claims.csv")):
        lines[f"{file.parts[-3].replace('-', '/', 1)} {file.parts[-2]}"] = kept_checks(file)
    return {
        name: [json.dumps(asdict(each) | {"verdict": each.verdict}) for each in checks]
        for name, checks in lines.items()
    }


def changes(before: dict[str, list[str]], now: dict[str, list[str]]) -> pd.DataFrame:
    """Returns the claims with another verdict or threshold than before: what is asked, and what came of it."""
    rows = []
    for name in before:
        for old, new in zip(map(json.loads, before[name]), map(json.loads, now[name]), strict=True):
            (then, asked), (verdict, needed) = (
                (each["verdict"], f"{each['relation']} {each['threshold']:g}") for each in (old, new)
            )
            if (then, asked) == (verdict, needed):
                continue
            measured, control = (Measured(*(new[of][end] for end in ("value", "low", "high"))) for of in NUMBERS)
            experiment, _, scale = name.rpartition(" ")
            told = {"experiment": experiment, "scale": scale, "claim": new["claim"], "measured": measured}
            told |= {"seeds": len(new["measured"]["seeds"]) or "", "needed": needed}
            told |= {"needed before": "" if asked == needed else asked, "control": f"{new['control_is']}: {control}"}
            rows.append(told | {"before": then, "now": verdict})
    return pd.DataFrame(rows)


def main() -> int:
    """Writes the claims, or compares them and returns 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a file to keep the claims in")
    parser.add_argument("--compare", type=Path, help="a file that an earlier --write made")
    parser.add_argument("--changes", type=Path, help="a CSV file for the claims with another verdict, of --compare")
    options, now = parser.parse_args(), claims()
    count = sum(map(len, now.values()))
    if options.write:
        options.write.write_text(json.dumps(now, indent=1), encoding="utf-8")
    if not options.compare:
        print(f"{count} claims of {len(now)} kept tables")
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    if options.changes:
        changes(before, now).to_csv(options.changes, index=False)
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
