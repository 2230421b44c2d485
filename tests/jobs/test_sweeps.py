"""Sweeps that are stopped and go on, in a folder that other sweeps may share."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from legs import slow_but

import align_circuits as ac
from align_circuits.jobs import locks, sweeps
from align_circuits.jobs.jobs import Progress
from align_circuits.jobs.sweeps import SweepParts, read_sweeps
from align_circuits.run import edited_runs
from align_circuits.run.options import progress_bar

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)

EDGES = [("L0H0", "logits"), ("L0H1", "logits"), ("L0H1", "L1H0.q"), ("input", "L1KV0.v")]

Verb = Callable[[Any, ac.Pair, ac.RunOptions], ac.Table]


@pytest.fixture(scope="module")
def model(random_hf_model, char_tokenizer):
    return ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)


@pytest.fixture(scope="module")
def pair(char_tokenizer) -> ac.Pair:
    clean = TASK.sample(3, char_tokenizer, seed=0)
    return ac.Pair(clean, TASK.corrupt(clean, "query", seed=1), direction="noise")


def circuits(model: Any, pair: ac.Pair, options: ac.RunOptions) -> ac.Table:
    edges = ac.attribute_edges(model, pair, method="eap")
    return ac.faithfulness(model, pair, edges, fractions=(0.1, 0.5), options=options)


VERBS: dict[str, Verb] = {
    "patch_heads": lambda model, pair, options: ac.patch_heads(model, pair, options=options),
    "ablate_heads": lambda model, pair, options: ac.ablate_heads(model, pair.clean, "zero", options=options),
    "patch_edges": lambda model, pair, options: ac.patch_edges(model, pair, edges=EDGES, options=options),
    "patch_paths": lambda model, pair, options: ac.patch_paths(model, pair, options=options),
    "attribute_heads": lambda model, pair, options: ac.attribute_heads(model, pair, options=options),
    "attribute_edges": lambda model, pair, options: ac.attribute_edges(model, pair, options=options),
    "faithfulness": circuits,
}


every_verb = pytest.mark.parametrize("name", slow_but(["patch_heads", "faithfulness"], VERBS))


@pytest.fixture
def small_parts(monkeypatch):
    for size in ("run.target_metrics.EDIT_SETS", "run.target_metrics.PROMPTS", "circuits.faithful.EDIT_SETS"):
        monkeypatch.setattr(f"align_circuits.{size}_A_PART", 2)


@pytest.mark.usefixtures("small_parts")
@every_verb
def test_a_stopped_sweep_goes_on(model, pair, name, tmp_path, monkeypatch):
    whole = VERBS[name](model, pair, ac.RunOptions(batch_size=2)).frame
    options = ac.RunOptions(batch_size=2, cache_dir=tmp_path)
    write, written = sweeps.save_file, []

    def stop_at_the_second(values: Any, path: Path, metadata: dict[str, str]) -> None:
        if len(written) == 1:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        write(values, path, metadata)

    monkeypatch.setattr(sweeps, "save_file", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        VERBS[name](model, pair, options)
    assert len(parts_in(tmp_path)) == 1

    monkeypatch.setattr(sweeps, "save_file", write)
    first = parts_in(tmp_path)[0].stat().st_mtime_ns
    assert np.allclose(VERBS[name](model, pair, options).frame["value"], whole["value"], atol=1e-5, equal_nan=True)
    assert min(path.stat().st_mtime_ns for path in parts_in(tmp_path)) == first  # it was not computed again
    assert len(parts_in(tmp_path)) > 1


@pytest.mark.parametrize("site", ["z", "pattern"])
def test_few_heads_on_many_prompts_are_parts_of_some_prompts_each(model, site, tmp_path, monkeypatch):
    """Also where prompts have different numbers of targets, or none."""
    monkeypatch.setattr("align_circuits.run.target_metrics.PROMPTS_A_PART", 3)
    clean = TASK.sample(11, model.tokenizer, seed=0)
    corrupted = TASK.corrupt(clean, "query", seed=1)
    kept = torch.from_numpy((clean.targets["prompt"] % 5 != 2).to_numpy(copy=True))
    kept[1::4] = False
    pair = ac.Pair(clean.select_targets(kept), corrupted.select_targets(kept))
    captured = []
    capture = edited_runs.capture

    def counting(*arguments: Any, **options: Any) -> Any:
        captured.append(options["prompt"].unique().tolist())
        return capture(*arguments, **options)

    monkeypatch.setattr(edited_runs, "capture", counting)
    settings: dict[str, Any] = {"sites": [site], "heads": [(1, 1)]}
    whole = ac.patch_heads(model, pair, options=ac.RunOptions(batch_size=2), **settings)
    prompts = sorted({*pair.clean.targets["prompt"]})
    assert captured == ([prompts] if site == "pattern" else [])
    captured.clear()
    shared = ac.patch_heads(model, pair, options=ac.RunOptions(batch_size=2, cache_dir=tmp_path), **settings)
    assert [path.stem for path in parts_in(tmp_path)] == [f"edit-sets-00000-prompts-{p:05d}" for p in prompts[::4]]
    assert captured == ([prompts[:4], prompts[4:8], prompts[8:]] if site == "pattern" else [])
    pd.testing.assert_frame_equal(shared.frame, whole.frame, check_exact=False, rtol=0, atol=1e-6)
    assert shared.values is not None and whole.values is not None
    assert np.allclose(shared.values, whole.values, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["patch_paths", "attribute_heads", "attribute_edges"])
def test_the_numbers_of_a_finished_sweep_are_read(model, pair, name, tmp_path):
    options = ac.RunOptions(cache_dir=tmp_path)
    first = VERBS[name](model, pair, options).frame
    changed = {path: sweeps.safe_open(path, "np").get_tensor("values") + 1 for path in parts_in(tmp_path)}
    for path, values in changed.items():
        sweeps.save_file({"values": values}, path, {"engine": "fast"})
    assert np.allclose(VERBS[name](model, pair, options).frame["value"], first["value"] + 1)


@pytest.mark.slow
def test_another_sweep_is_not_read(model, pair, tmp_path):
    options = ac.RunOptions(cache_dir=tmp_path)
    ac.attribute_edges(model, pair, options=options)
    others: list[tuple[Any, ac.Pair, dict[str, Any]]] = [
        (ac.attribute_edges, pair, {"steps": 3}),
        (ac.attribute_edges, pair, {"method": "eap"}),
        (ac.attribute_edges, ac.Pair(pair.clean, pair.corrupted), {}),
        (ac.attribute_edges, ac.Pair(pair.clean, pair.corrupted, metric="prob"), {}),
        (ac.attribute_heads, replace(pair, metric=lambda logits, _: logits[:, 0]), {}),
        (ac.attribute_heads, replace(pair, metric=lambda logits, _: logits[:, 1]), {}),
        (ac.patch_heads, pair, {"heads": [(0, 0)]}),
        (ac.patch_heads, pair, {"heads": [(0, 1)]}),
        (ac.patch_edges, pair, {"edges": EDGES[:1]}),
        (ac.patch_edges, pair, {"edges": EDGES[1:2]}),
    ]
    for count, (verb, of, settings) in enumerate(others, start=2):
        verb(model, of, **settings, options=options)
        assert len(list(tmp_path.iterdir())) == count


@pytest.mark.usefixtures("small_parts")
@every_verb
def test_a_shared_sweep_is_that_of_one_process(model, pair, name, tmp_path, monkeypatch):
    """Another process is at every other part when this one comes to it, and finishes while this one waits."""
    monkeypatch.setattr("align_circuits.circuits.faithful.EDIT_SETS_A_PART", 1)
    alone = VERBS[name](model, pair, ac.RunOptions(batch_size=2, cache_dir=tmp_path / "alone"))
    shared = tmp_path / "shared"
    theirs, claims = parts_in(tmp_path / "alone")[::2], []
    for part in theirs:
        there = shared / part.relative_to(tmp_path / "alone")
        there.parent.mkdir(parents=True, exist_ok=True)
        claims.append(locks.claimed(there))
        assert claims[-1].__enter__()

    def others_finish(_: float) -> None:
        for part in theirs:
            shutil.copy(part, shared / part.relative_to(tmp_path / "alone"))
        while claims:
            claims.pop().__exit__(None, None, None)

    monkeypatch.setattr(locks.time, "sleep", others_finish)
    written = []
    write = sweeps.save_file
    monkeypatch.setattr(sweeps, "save_file", lambda *part: (written.append(part[1]), write(*part)))
    table = VERBS[name](model, pair, ac.RunOptions(batch_size=2, cache_dir=shared))
    assert len(written) == len(parts_in(shared)) - len(theirs), "a part of the other process was computed again"
    pd.testing.assert_frame_equal(table.frame, alone.frame, check_exact=True)
    if alone.values is not None and table.values is not None:
        assert np.array_equal(table.values, alone.values, equal_nan=True)
    assert table.provenance == alone.provenance


def test_no_part_is_computed_twice_in_twenty_races(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.001)
    computed = []

    def part(number: int) -> tuple[np.ndarray, str]:
        computed.append(number)
        time.sleep(1e-4)
        return np.full(2, float(number)), "fast"

    def race(number: int) -> dict[str, float]:
        parts = SweepParts(tmp_path, "numbers", {"race": number})
        return {name: values[0] for name, values, _ in parts.measure({f"{n}": partial(part, n) for n in range(6)})}

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(race, [number for number in range(20) for _ in range(3)]))
    assert all(result == {f"{n}": n for n in range(6)} for result in results)
    assert sorted(computed) == sorted([*range(6)] * 20)


def test_how_far_a_sweep_is_can_be_read_while_it_runs(tmp_path):
    def look(_: int) -> sweeps.Part:
        found.extend(read_sweeps(tmp_path))
        return np.zeros(2), "fast"

    found: list[Progress] = []
    assert read_sweeps(tmp_path) == []
    started = time.time()
    parts = SweepParts(tmp_path, "numbers", {"of": "this"})
    list(parts.measure({f"{n}": partial(look, n) for n in range(3)}))
    assert [(each.done, each.running, each.waiting) for each in found] == [(0, 1, 2), (1, 1, 1), (2, 1, 0)]
    assert all(started <= each.started <= time.time() and each.failures == () for each in found)
    assert found[0].seconds_left is None, "nothing is done yet"
    assert found[1].seconds_left is not None and 0 < found[1].seconds_left <= 2 * (time.time() - started)
    another = SweepParts(tmp_path, "others", {"of": "another"})
    list(another.measure({"a": lambda: (np.zeros(2), "fast")}))
    read = read_sweeps(tmp_path)
    assert [(each.what, each.done, each.running, each.waiting) for each in read] == [
        ("others", 1, 0, 0),
        ("numbers", 3, 0, 0),
    ]


def test_a_sweep_is_known_by_what_its_identity_says_in_any_order(tmp_path):
    for identity in ({"prompts": "a", "edits": [1, 2]}, {"edits": [1, 2], "prompts": "a"}, {"prompts": "b"}):
        list(SweepParts(tmp_path, "numbers", identity).measure({"a": lambda: (np.zeros(2), "fast")}))
    assert len(parts_in(tmp_path)) == 2


def test_a_file_that_is_no_part_is_refused(tmp_path):
    parts = SweepParts(tmp_path, "numbers", {"of": "this"})
    assert [name for name, _, _ in parts.measure({"a": lambda: (np.zeros(2), "fast")})] == ["a"]
    [path] = parts_in(tmp_path)
    assert path.parent.parent == tmp_path and path.name == "a.safetensors"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"is no part of a sweep .* give other --parts \(cache_dir=\)"):
        list(parts.measure({"a": lambda: (np.zeros(2), "fast")}))


@pytest.mark.parametrize(("progress", "shown"), [("auto", False), (False, False), (True, True)])
def test_a_bar_is_silent_in_logs(progress, shown):
    with progress_bar(ac.RunOptions(progress=progress), 2, "prompt") as bar:
        assert bar.disable is not shown
        assert not shown or bar.delay == 1, "sweeps of less than a second draw none"
        assert not shown or not bar.leave, "and a finished one takes its bar away"


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))
