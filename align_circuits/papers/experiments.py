"""Every experiment by its name, such as `icatune/fig3`: of this package, of the checkout, and of other packages.

What validates the package itself, and what goes beyond the papers, stands in `benchmarks/validation` and
`benchmarks/beyond` of a checkout, imported as `align_circuits.validation` and `align_circuits.beyond`; an installed
wheel has no such modules. Another package registers an experiment (`lab.Experiment`) by its name under the entry-point
group `align_circuits.experiments`, in its `pyproject.toml`:

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
from align_circuits.papers.lab import Experiment
from align_circuits.papers.localizer_zoo import HELD_OUT_ZOO, PUBLIC_ZOO
from align_circuits.papers.recall.experiments import RECALL

GROUP = "align_circuits.experiments"
"""The entry-point group of other packages' experiments."""


def of_the_checkout(room: str) -> Sequence[Experiment]:
    """Returns the experiments of `validation` or `beyond`; nothing where the package was installed from a wheel."""
    module = f"align_circuits.{room}"
    return import_module(f"{module}.experiments").EXPERIMENTS if find_spec(module) else ()


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


_OWN = {
    each.name: each
    for each in (
        *(*of_the_checkout("validation"), PUBLIC_ZOO, HELD_OUT_ZOO),
        *(*ICATUNE, *ABRUPT, *RECALL, *of_the_checkout("beyond")),
    )
}

EXPERIMENTS: dict[str, Experiment] = _OWN | {each.name: each for each in of_other_packages() if each.name not in _OWN}
"""All of them: the figures and tables of the papers, what validates this package, then those of other packages."""
