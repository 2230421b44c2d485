"""Which end of a metric matters most: the order of `Table.top`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from align_circuits.tables.provenance import Provenance

End = Literal["highest", "lowest"]
"""The end of a metric where what matters most lies."""

P_VALUES = ("p", "causal_p", "q")
"""What is best where it is small, whatever was measured."""

RISE_WITH_DAMAGE = ("kl", "rank", "loss")
"""Metrics that rise with what is taken away; all others fall."""

LOSSES = ("ablate_heads", "ablate", "minimality")
"""Verbs, also of the command line, that take something away: what is needed most changes the metric most below zero."""


def best_end(made: Sequence[Provenance], keys: Mapping[str, Any]) -> End:
    """Returns where the rows of a table that matter most lie.

    | rows | what matters most lies |
    |---|---|
    | p, causal_p, q | lowest |
    | `"rank"` and `"loss"` | lowest; where something is taken away highest: worst damage |
    | the step of `emergence` | lowest: it emerged first |
    | effects of `ablate_heads`, of `minimality`, and of direction `"noise"` | lowest: worst damage |
    | the same, measured as `"kl"` from the intact prediction | highest: worst damage |
    | `"kl"` of direction `"denoise"`, function vectors by `"kl"` | lowest: most of the clean prediction is back |
    | normalised effects, `"kl"` too | as the other metrics |
    | attribution without a sign (`grad_drop`) and `"interchange"`, in both directions | highest |
    | effects of direction `"denoise"`, scores, direct logits, all else | highest |

    A difference of tables is ranked as the left one is: by default a change for the better comes first where more is
    better, and the damage that grew most where less is worse.

    Args:
        made: What made the table, or each of those that it joins (`Provenance.joined`).
        keys: The keys that all rows have in common, such as the metric and the direction.

    Raises:
        ValueError: A table of several verbs (`Table.concat`) that are ranked in opposite ways.
    """
    ends: set[End] = {_best_end(each, keys) for each in made}
    if len(ends) > 1:
        raise ValueError(
            "tables in which opposite ends matter most: select one of them with .where(...), or give by='highest', "
            "'lowest' or 'absolute'"
        )
    return ends.pop()


def _best_end(made: Provenance, keys: Mapping[str, Any]) -> End:
    verb, settings = made.verb, made.settings
    if verb == "difference":
        return best_end(Provenance(**settings["left"]).joined(pd.DataFrame()), keys)
    metric, direction = keys.get("metric"), keys.get("direction", settings.get("direction"))
    if metric in P_VALUES or (verb == "emergence" and keys.get("measure") == "step"):
        return "lowest"
    if metric == "function_vector" and (tasks := settings.get("tasks")):
        metric, direction = tasks[0].get("metric"), "denoise"
    # What a head carries is a level, whichever run it is carried into.
    if settings.get("grad_drop") or (metric == "interchange" and not settings.get("normalized")):
        return "highest"
    takes_away = verb in LOSSES or direction == "noise"
    # Normalised, the clean prediction is 1, as of all metrics.
    if metric in RISE_WITH_DAMAGE and not settings.get("normalized"):
        if metric == "kl":  # of the intact prediction: only what brings it back makes it fall
            return "lowest" if direction == "denoise" else "highest"
        return "highest" if takes_away else "lowest"
    return "lowest" if takes_away else "highest"
