"""`localize` on models made to deceive it: the benchmark runs, names nothing false, and reads its rows again."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/adversaries.py"


def test_the_last_letter_of_known_pairs_asks_for_the_letter_behind_its_copy():
    prompts = runpy.run_path(str(SCRIPT))["known_pairs"](0, n=8)
    relation = prompts.relations["answer"]
    assert relation.query.tolist() == prompts.positions["END"].tolist()
    for row, (prompt, token) in enumerate(zip(relation.prompt.tolist(), prompts.targets["token"], strict=True)):
        assert prompts.tokens[prompt, relation.keys_of(row)].tolist() == [token]


@pytest.mark.slow
def test_adversaries_are_not_named_and_circuits_are(tmp_path):
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), "--quick", "--rows", str(tmp_path / "rows"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    printed = run("--out", str(tmp_path / "table.csv"))
    values: Any = pd.read_csv(tmp_path / "table.csv").set_index(["metric", "family"])["value"]
    false, recall = values["models with a false name, named"], values["true heads, named"]
    assert len(false) >= 12 and (false == 0).all()
    assert recall["planted, full strength"] == 1
    rows = tmp_path / "rows/silenced circuits.json"
    rows.write_text(rows.read_text().replace('"false, named": []', '"false, named": ["L0H0"]'))
    again = run("--families", "silenced circuits")
    assert "silenced circuits" in printed and again not in printed, "rows that are there are read, not made again"
