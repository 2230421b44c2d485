"""Every experiment by its name, such as `icatune/fig3`: of this package, of the checkout, and of other packages.

What validates the package itself stands in `benchmarks/validation` of a checkout, where `align_circuits.validation`
leads; an installed wheel has no such module. Another package registers an experiment (`study.Experiment`) by its name
under the entry-point group `align_circuits.experiments`, in its `pyproject.toml`:

    [project.entry-points."align_circuits.experiments"]
    "my-paper/fig1" = "my_package.module:FIG1"
"""

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from align_circuits.papers.abrupt.figures import ABRUPT
from align_circuits.papers.icatune.figures import ICATUNE
from align_circuits.papers.localizer_zoo import HELD_OUT_ZOO, PUBLIC_ZOO
from align_circuits.papers.onset_of_alignment import ONSET
from align_circuits.papers.recall.experiments import RECALL
from align_circuits.papers.study import Experiment

GROUP = "align_circuits.experiments"
"""The entry-point group of other packages' experiments."""


def of_the_checkout() -> Sequence[Experiment]:
    """Returns what validates this package; nothing where it was installed from a wheel."""
    room = "align_circuits.validation"
    return import_module(f"{room}.experiments").VALIDATION if find_spec(room) else ()


def of_other_packages() -> Iterator[Experiment]:
    """Yields what other packages register; what cannot be loaded is warned of, and stops no other."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            experiment = entry.load()
        except Exception as error:
            experiment = error
        if isinstance(experiment, Experiment) and experiment.name == entry.name:
            yield experiment
        else:
            warnings.warn(
                f"{entry.name!r} ({entry.value}) of the group {GROUP} is left out, since it is no Experiment of that "
                f"name: {experiment}",
                stacklevel=2,
            )


_OWN = {each.name: each for each in (*of_the_checkout(), PUBLIC_ZOO, HELD_OUT_ZOO, *ICATUNE, *ABRUPT, ONSET, *RECALL)}

EXPERIMENTS: dict[str, Experiment] = _OWN | {each.name: each for each in of_other_packages() if each.name not in _OWN}
"""All of them: the figures and tables of the papers, what validates this package, then those of other packages."""
