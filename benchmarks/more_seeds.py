"""Measures what a kept table lacks of its registered scale, such as seeds that were added later, and joins both.

    python benchmarks/more_seeds.py recall/heads paper-long --out runs/more
    python benchmarks/more_seeds.py icatune/fig4 smollm2 --model smollm2 --anew arm="larger steps" --out runs/more

The config is the one that stands in the code, so that nothing is measured that was not registered. Rows of other jobs
stay as they were kept, to the last digit; of rows over several seeds all seeds are measured, and rows of jobs that the
config no longer has are left out. The joined table goes to OUT/joined; the provenance of the kept one, and how many
jobs are still lacking, stand there under `data`. Repeat the command to resume.
"""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from numpy import ndarray

from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.lab import Inputs, Measurement
from align_circuits.tables.tables import Table

RESULTS = Path(__file__).parents[1] / "docs/results"

Keys = tuple[tuple[str, Any], ...]
"""The key columns of a job and its seed, with their values, by name."""


def keys_of(each: Measurement) -> Keys:
    """Returns what tells the rows of a job from others."""
    return tuple(sorted({**each.keys, **each.job.seeded}.items()))


def rows_of(frame: Any, keys: Mapping[str, Any]) -> Bool[ndarray, " row"]:
    """Returns which rows have the values of some key columns, as far as there are such columns."""
    have = [frame[name].eq(value).fillna(value=False) for name, value in keys.items() if name in frame]
    return np.logical_and.reduce([each.to_numpy(bool) for each in have], initial=True)


def has_one(keys: Keys, named: Collection[str]) -> bool:
    """Returns whether a job has one of several values, each as `"COLUMN=VALUE"`, or such pairs joined by `&`."""
    pairs = {f"{name}={value}" for name, value in keys}
    return any(pairs.issuperset(each.split("&")) for each in named)


def of_all_seeds(keys: Keys) -> Keys:
    """Returns the keys without the seed."""
    return tuple(pair for pair in keys if pair[0] != "seed")


def are_over_seeds(frame: Any, keys: Keys) -> Bool[ndarray, " row"]:
    """Returns which rows are over the seeds of a job's keys, such as the means of a course."""
    over_seeds = frame["seed"].isna().to_numpy(bool) if "seed" in frame else False
    return rows_of(frame, dict(of_all_seeds(keys))) & over_seeds


def lacking(jobs: Collection[Keys], kept: Any, anew: Collection[str] = ()) -> set[Keys]:
    """Returns the keys of the jobs that are to be measured.

    These are the jobs of which a table has no row, those that have one of the values of `anew`, and those that have
    rows with one of these over their seeds. So are those whose rows have the keys of such a job and more, such as what
    is measured after a training that is done anew: `joined` takes the former out with the latter.

    Args:
        jobs: The keys of all jobs of a config.
        kept: The rows that there are.
        anew: As for `has_one`.
    """
    found = {keys for keys in jobs if has_one(keys, anew) or not rows_of(kept, dict(keys)).any()}
    beside = {of_all_seeds(keys) for keys in found if are_over_seeds(kept, keys).any()}
    found |= {keys for keys in jobs if of_all_seeds(keys) in beside}
    return found | {keys for keys in jobs if any(set(other) < set(keys) for other in found)}


def only(jobs: Callable[[Any, Inputs], Sequence[Measurement]], wanted: set[Keys]) -> Any:
    """Returns a function as `Study.jobs` that leaves out the others."""
    return lambda config, inputs: [each for each in jobs(config, inputs) if keys_of(each) in wanted]


def without_others(table: Table, jobs: Collection[Keys]) -> Table:
    """Returns a table without the rows of jobs that are not among some, such as those of an arm that was renamed."""
    frame: Any = table.frame
    known = np.logical_or.reduce([rows_of(frame, dict(of_all_seeds(keys))) for keys in jobs])
    return Table(frame[known], table.provenance)


def joined(kept: Table, more: Table, measured: set[Keys]) -> Table:
    """Returns the rows of two tables of a study; of the kept ones without those of jobs that were measured since.

    Raises:
        ValueError: The models differ, or a row that is over seeds rests on seeds of both tables.
    """
    if kept.provenance.model != more.provenance.model:
        raise ValueError(f"other models: {kept.provenance.model} in the kept table, {more.provenance.model} here")
    frame: Any = kept.frame
    stale = np.logical_or.reduce([rows_of(frame, dict(keys)) for keys in measured])
    for keys in measured:
        over_seeds = are_over_seeds(frame, keys)
        if over_seeds.any() and (rows_of(frame, dict(of_all_seeds(keys))) & ~over_seeds & ~stale).any():
            raise ValueError(f"{dict(keys)}: there are rows over its seed and others; leave them together in --only")
        stale |= over_seeds
    before = {"settings": kept.provenance.settings, "versions": kept.provenance.versions}
    provenance = replace(more.provenance, data={"joined to": before})
    return Table(pd.concat([frame[~stale], more.frame], ignore_index=True), provenance)


def main() -> None:
    """Runs the jobs that are lacking, and writes the joined table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="an experiment, such as recall/heads")
    parser.add_argument("scale", help="one that is kept in docs/results")
    parser.add_argument("--model", nargs="*", default=[], help="what `reproduce` is given")
    parser.add_argument("--anew", nargs="*", default=[], help="COLUMN=VALUE&COLUMN=VALUE...: measure these again")
    parser.add_argument("--only", nargs="*", default=[], help="COLUMN=VALUE: measure no others now")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    experiment = EXPERIMENTS[options.name]
    config, study = experiment.scales[options.scale], experiment.study
    kept = Table.load(RESULTS / study.name.replace("/", "-") / options.scale)
    known = Inputs({model: {"weights": ""} for model in options.model}, "")  # only the keys of jobs are read
    jobs = {keys_of(each) for each in (*study.train(config, known), *study.jobs(config, known))}
    kept = without_others(kept, jobs)
    asked = lacking(jobs, kept.frame, options.anew)
    wanted = {keys for keys in asked if not options.only or has_one(keys, options.only)}
    print(f"{options.name} {options.scale}: {len(wanted)} jobs to measure of {len(asked)} that are lacking")
    if not wanted:
        return
    rest = replace(study, jobs=only(study.jobs, wanted), train=only(study.train, wanted))
    more = rest.run(config, models=options.model, jobs=options.jobs, folder=options.out)
    table = joined(kept, more, wanted)
    settings = {"name": options.name, "scale": options.scale, "models": options.model, **more.provenance.settings}
    data = {**table.provenance.data, "jobs still lacking": len(asked) - len(wanted)}
    provenance = replace(table.provenance, verb="reproduce", settings=settings, data=data)
    replace(table, provenance=provenance).save(options.out / "joined", compress=True)
    for check in experiment.check(table):
        print(f"{check.verdict:14} {check.claim}: {check.measured}, needed {check.relation} {check.threshold:g}")


if __name__ == "__main__":
    main()
