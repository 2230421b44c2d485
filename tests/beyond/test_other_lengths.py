"""A tuned model at other lengths, beside the model before tuning or, alone, beside a memoryless predictor."""

from typing import Any

import pytest
from measured import table_of

from align_circuits.beyond.other_lengths import LENGTHS
from align_circuits.tables.tables import Table


def rows(accuracies: dict[str, dict[str, float]]) -> Table:
    """Accuracies by model and predictor, in both lengths, without spread."""
    made = [
        {
            "model": model,
            "predictor": predictor,
            "length": length,
            "value": value,
            "low": value - 0.01,
            "high": value + 0.01,
        }
        for length in ("as tuned", "other")
        for model, of_model in accuracies.items()
        for predictor, value in of_model.items()
    ]
    return table_of(made, metric="accuracy", kind="first", x_len=5)


ALONE = {"tuned": {"model": 0.9, "history": 0.7, "memoryless": 0.4}}
BOTH = {"before": {"model": 0.3, "history": 0.7, "memoryless": 0.4}, **ALONE}


@pytest.mark.parametrize(
    ("accuracies", "control", "value"),
    [(ALONE, "a memoryless predictor", -0.3), (BOTH, "the model before tuning", -0.4)],
)
def test_the_control_is_another_model_or_a_predictor_that_sees_less(accuracies, control, value):
    for check in LENGTHS.check(rows(accuracies)):
        assert check.measured.value == pytest.approx(0.2)
        assert (check.control_is, check.control.value) == (control, pytest.approx(value))
        assert check.verdict == "holds"
    drawn: Any = LENGTHS.draw(rows(accuracies))["lengths"].data
    assert len(drawn) == len(accuracies) + 1, "the models and the ceiling"
