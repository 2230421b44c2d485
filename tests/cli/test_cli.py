"""The command line: what it writes, what it prints, and what it refuses."""

import html
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import fields, replace
from math import comb
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
from legs import slow_but
from measured import table_of
from plotly.offline import get_plotlyjs

import align_circuits as ac
from align_circuits.cli import benchmark_command, effect_command_base, main, score_command, tune_command
from align_circuits.cli.command_base import PromptVerb
from align_circuits.cli.entry import GROUPS, VERBS, parse_verb, verb_class
from align_circuits.cli.localize_command import Localize
from align_circuits.hooks.compat.stored_weights import has_fast_bfloat16
from align_circuits.papers.localizer_zoo import auroc_figure
from align_circuits.report.page import MAX_BYTES, packed
from align_circuits.report.plots.figure_parts import UNITS
from align_circuits.run.target_metrics import MetricName
from align_circuits.tables.calls import Call
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import SHARES, VALUES, Table
from align_circuits.tasks.own_prompts import OwnPrompts
from align_circuits.training.tuning import TuneConfig

SMALL = ["--n", "6", "--x-len", "3", "--n-examples", "4"]


def test_every_metric_is_a_share_or_has_a_unit_and_commands_tell_in_words_what_it_measures():
    assert {*get_args(MetricName)} - {*SHARES} == {*get_args(MetricName)} & {*UNITS}
    assert {*get_args(get_args(effect_command_base.EffectMetric)[0])} == {*effect_command_base.IN_WORDS}


def test_score_writes_a_table_a_self_contained_report_and_its_provenance(tmp_path, capsys):
    assert main(["score", *SMALL, "--out", str(tmp_path)]) == 0
    names = {"table.csv", "values.safetensors", "report.html", "provenance.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    printed = capsys.readouterr().out
    assert str(tmp_path / "report.html") in printed
    table = Table.load(tmp_path)
    best = table.top("align_query", 1).frame.iloc[0]
    assert f"L{best['layer']}H{best['head']}" in printed
    chance = "A head that attends to all candidates alike scores 0.33 (align_query), 0.33 (align_key), 0.33 (lookup)."
    assert chance in printed and chance in (tmp_path / "report.html").read_text(encoding="utf-8"), (
        "one of three symbols"
    )
    assert (table.provenance.verb, table.provenance.settings["task"]["x_len"]) == ("score", 3)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page), "the report loads something"
    assert page.count(packed(get_plotlyjs())) == 1, "plotly's script stands in the page once"
    assert "align_query" in page and len(page) < MAX_BYTES


def test_a_high_share_of_little_attention_does_not_come_first(tmp_path, capsys):
    """Heads that tell the aligned symbols apart, but hardly look at them, stand behind those that do look."""
    assert main(["score", *SMALL, "--metrics", "align_query", "entropy", "--out", str(tmp_path)]) == 0
    printed, table = capsys.readouterr().out, Table.load(tmp_path)
    assert {*table.frame["metric"]} == {"align_query", "entropy", "align_query_attention"}
    line = next(line for line in printed.splitlines() if line.startswith("  align_query"))
    shares = table.to_array("align_query_attention")
    shown = re.findall(r"L(\d)H(\d) [^(]*\((\d\.\d\d) of its attention", line)
    assert [f"{shares[int(layer), int(head)]:.2f}" for layer, head, _ in shown] == [share for *_, share in shown]
    assert "of its attention" not in printed.split("  entropy")[1]
    frame: Any = table.frame
    reached = float(table.top("align_query", 1).frame["value"].iloc[0])
    low = (frame["metric"] == "align_query_attention") & (frame["value"] < 0.1)
    heads = frame[low][["layer", "head"]].merge(frame.assign(row=range(len(frame))))
    row = int(heads[heads["metric"] == "align_query"]["row"].iloc[0])
    raised = replace(table, frame=frame.assign(value=frame["value"].where(np.arange(len(frame)) != row, reached + 1)))
    ranked = score_command.ranked(raised, "align_query")
    assert ranked.index[0] == 1 and ranked["attention"].iloc[0] > 0.1, "the first by score alone is not the first"
    assert (ranked["attention"] >= 0.1).tolist() == sorted(ranked["attention"] >= 0.1, reverse=True)
    kept: Any = score_command._attending(raised, {"align_query": ranked}).top("align_query", 99).frame
    assert len(kept) == (ranked["attention"] >= 0.1).sum()
    assert "less than 0.1 of all their attention come last" in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "come last" in page and "at least 0.1 of all their attention, where there are such." in page


def test_rerun_says_whether_the_numbers_are_the_same(tmp_path, capsys):
    def again() -> tuple[int, str]:
        status = main(["rerun", str(tmp_path / "first"), "--overwrite", "--out", str(tmp_path / "second")])
        return status, "".join(capsys.readouterr())

    main(["score", *SMALL, "--seed", "3", "--out", str(tmp_path / "first")])
    status, printed = again()
    assert status == 0 and "same: all" in printed
    frame, second = (Table.load(tmp_path / name).frame for name in ("first", "second"))
    np.testing.assert_array_equal(frame["value"], second["value"])
    frame[::-1].to_csv(tmp_path / "first" / "table.csv", index=False)
    assert "same: all" in again()[1], "rows are found by their keys"
    frame.assign(value=frame["value"] + 0.5).to_csv(tmp_path / "first" / "table.csv", index=False)
    status, printed = again()
    assert status == 0 and f"differs: {np.isfinite(frame['value'].to_numpy(float)).sum()} of " in printed
    assert "by 0.5 at most" in printed
    frame[1:].to_csv(tmp_path / "first" / "table.csv", index=False)
    (tmp_path / "first" / "values.safetensors").unlink()
    status, printed = again()
    assert status == 2 and "the rows differ" in printed


@pytest.mark.parametrize(
    "edits",
    [{"n": "many"}, {"site": "z"}, {"task": 3}, {"task": {"x_len": "a"}}, {"task": {"nonesuch": 1}}, {"model": None}],
)
def test_settings_that_were_edited_are_refused_with_the_name_of_their_file(tmp_path, edits, declined):
    table = table_of([{"level": "model", "metric": "prob", "value": 1.0}])
    settings = {"model": "planted"} | edits
    replace(table, provenance=Provenance("score", settings)).save(tmp_path)
    assert "provenance.json' cannot be used (" in declined(["rerun", str(tmp_path), "--out", str(tmp_path / "again")])


def test_evaluate_writes_accuracies(tmp_path, ran):
    assert "history" in ran(["evaluate", *SMALL, "--out", str(tmp_path)])
    assert set(Table.load(tmp_path).frame["predictor"]) == {"model", "chance", "memoryless", "history", "oracle"}
    assert main(["evaluate", *SMALL, "--metrics", "prob", "logit", "--out", str(tmp_path), "--overwrite"]) == 0
    assert set(Table.load(tmp_path).frame["metric"]) == {"accuracy", "prob", "logit"}


@pytest.mark.slow
def test_score_works_on_a_llama_folder_with_the_real_vocabulary(tmp_path, llama_tokenizer, random_hf_model, ran):
    """In the hub's format: grouped-query attention, bf16, the real vocabulary of 128k tokens."""
    random_hf_model("llama", vocab_size=len(llama_tokenizer)).bfloat16().save_pretrained(tmp_path / "llama")
    llama_tokenizer.save_pretrained(tmp_path / "llama")
    assert "fast engine" in ran(["score", "--model", str(tmp_path / "llama"), *SMALL, "--out", str(tmp_path / "run")])
    model = Table.load(tmp_path / "run").provenance.model
    own = "bfloat16" if has_fast_bfloat16(torch.device("cpu")) else "float32"  # as is loaded here
    assert model["dtype"] == own and model["d_vocab"] > 128_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "--model", "/no/such/folder"], "no folder '/no/such/folder'"),
        (["score", "--n", "0"], "0 prompts"),
        (["score", "--dtype", "bfloat16"], "leave out --dtype"),
        (["score", "--threads", "0"], "--threads 0: give 1 to 1024"),
        (["score", "--threads", "99999"], "--threads 99999: give 1 to 1024"),
        (["score", "--style", "marked"], "marked"),
        (["score", "--batch-size", "0"], "--batch-size 0: give a positive number"),
        (["score", "--model", "toy-llama", "--prompts", "no.jsonl"], "no file 'no.jsonl'"),
        (["score", "--tokenizer", "folder"], "leave out --tokenizer"),
        (["localize", "--style", "marked"], "standard style only"),
        (["tune", "--n", "4"], "at least 8 prompts"),
        (["tune", "--method", "standard"], "give the task --automata task"),
        (["ablate", "--model", "/no/such/folder", "--screen", "2"], "--screen 2.0: give the share of heads"),
        (["patch", "--model", "/no/such/folder", "--screen", "2"], "--screen 2.0: give the share of heads"),
        (["patch", *SMALL, "--metric", "logit_diff"], "--metric logit_diff compares with a wrong answer, and these"),
        (["evaluate", *SMALL, "--metrics", "logit_diff"], "--metrics logit_diff compares with a wrong answer"),
        (["patch", "--targets", "first"], "--targets first is about the answers of a file"),
        (["tune", "--method", "standard", "--prompts", "a.jsonl"], "--method standard is for the translation task"),
        (["tune", "--loss-on", "last", "--prompts", "a.jsonl"], "--loss-on last is for the translation task"),
        (["patch", "--jobs", "0"], "--jobs 0: give at least 1"),
        (["patch", "--slurm-gpus", "1"], "are options of --on slurm"),
        (["reproduce", "localize/ground-truth", "--on", "ray"], "give 'dask://HOST:PORT' or 'slurm'"),
        (["reproduce", "localize/power", "--on", "slurm", "--jobs", "2"], "give one of them"),
        (["reproduce", "icatune/fig3", "--model", "a", "b"], "measures one model, but 2 were given: a, b"),
        (["reproduce", "icatune/fig2", "--scale", "smollm2"], "no scale 'smollm2': give --scale smoke, cpu, paper"),
        (["reproduce", "icatune/fg3"], "did you mean 'icatune/fig3'?"),
        (["benchmark", "--methods", "atention"], "no method 'atention': did you mean 'attention'? choose among"),
        (["score", *SMALL, "--metrics", "lokup"], "no metric 'lokup' for these prompts: did you mean 'lookup'? they"),
        (["patch", *SMALL, "--heads", "2.3"], "--heads 2.3: write layer 2, head 3 as L2H3"),
        (["ablate", *SMALL, "--heads", "2.3"], "--heads 2.3: write layer 2, head 3 as L2H3"),
        (["ablate", *SMALL, "--n-controls", "5"], "--n-controls is for --together: give both, or neither"),
        (["ablate", *SMALL, "--together"], "--together: name the heads that are ablated together"),
        (
            ["ablate", *SMALL, "--together", "--heads", "L0H0", "--jobs", "2"],
            "--together is no sweep that processes share",
        ),
        (
            ["ablate", *SMALL, "--together", "--heads", "L0H0", "--how", "zero"],
            "--together takes means, and accuracy: leave out",
        ),
        (["benchmark", "--circuits", "1000"], "--circuits 1000: give 1 to 140"),
        (["scroe"], "did you mean 'score'?"),
        (["explain"], "no verb 'explain': choose one of score, evaluate"),
    ],
)
def test_bad_input_ends_in_one_line_and_leaves_nothing(tmp_path, capsys, arguments, message):
    out = tmp_path / "deep" / "run"
    assert main([*arguments, "--out", str(out)]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line and "Loading weights" not in line)
    assert line.startswith("align-circuits: ") and message in line
    assert not out.parent.exists(), "something half-written was left"


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path, declined):
    (tmp_path / "file").write_text("not a folder")
    assert "cannot write results" in declined(["score", "--model", "/no/such/folder", "--out", str(tmp_path / "file")])


def test_small_models_run_on_one_thread_if_not_told_otherwise(tmp_path, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for options in ([], ["--threads", "2"]):
        assert main(["score", *SMALL, *options, "--overwrite", "--out", str(tmp_path)]) == 0
    assert threads == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--x-len", "30"], "align-circuits: --x-len is 30, but the alphabet has 26 symbols"),
        (["--n-examples", "-1"], "align-circuits: --n-examples is -1: give at least"),
        (["--alignment", "prior", "--decay", "-1"], "decay"),
        (["--engine", "referenze"], "--engine referenze: did you mean 'reference'? choose one of auto, fast, ref"),
        (["--engine", "slow"], "--engine slow: choose one of auto, fast, reference ("),
        (["--n", "some"], "--n some: give a whole number ("),
        (["--decay", "some"], "--decay some: give a number ("),
        (["--state-range", "3", "b"], "--state-range 3 b: give whole numbers ("),
        (["--state-range", "3"], "--state-range: give 2 values ("),
        (["--n"], "--n: give a value ("),
        (["--modle", "toy-llama"], "no option --modle of score: did you mean '--model'? "),
        (["--roles", "a"], "no option --roles of score: --help all lists the options"),
        (["--by", "position"], "no option --by of score: --help all lists the options"),
        (["--direction=noise"], "no option --direction of score: an option of patch and attribute; --help all"),
    ],
)
def test_an_impossible_task_or_option_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["score", *arguments])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert ("did you mean" in printed) == ("did you mean" in message) and printed.count("\n") == 1


def test_rerun_repeats_a_reproduction(tmp_path, ran):
    first = ["reproduce", "icatune/table1", "--scale", "smoke", "--out", str(tmp_path / "first")]
    assert main(first) == 0
    assert "same: all" in ran(["rerun", str(tmp_path / "first"), "--out", str(tmp_path / "second")])


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        (["icatune/fig3", "--model", "smollm2"], "smollm2"),
        (["icatune/fig3", "--model", "smollm2", "--scale", "cpu"], "cpu"),
        (["icatune/lexicon", "--model", "smollm2"], "cpu"),
        (["icatune/fig3"], "cpu"),
    ],
)
def test_a_model_with_a_scale_of_its_own_is_measured_at_it_where_there_is_one(options, scale):
    assert parse_verb("reproduce", *options).scale == scale


def test_all_verbs_that_measure_have_the_same_defaults():
    verbs = {name: verb_class(name)() for name in GROUPS["Measure a model"]}
    shared = [option.name for option in fields(PromptVerb)]
    assert len(verbs) == 6 and {"model", "n", "seed", "task"} <= {*shared}
    for name in shared:
        assert len({repr(getattr(verb, name)) for verb in verbs.values()}) == 1, name


def test_rerun_repeats_what_was_saved_from_python(tmp_path, capsys, tiny, ran):
    """Prompts, pairs, edits and options are kept; of a table that was cut the rows that were left are compared."""
    model, options = ac.load(tiny), ac.RunOptions(batch_size=2, cache_dir=tmp_path / "parts")
    texts, others = ["ab:a", "cd:c", "ef:e"], ["ba:a", "dc:c", "fe:e"]
    clean, corrupted = ac.Prompts.from_pairs(
        texts, others, model.tokenizer, answer=["b", "d", "f"], wrong=["x", "y", "z"]
    )
    patched = ac.patch_heads(
        model, ac.Pair(clean, corrupted, metric="logit_diff"), heads=[(0, 1), (1, 0)], options=options
    )
    ablated = ac.evaluate(model, clean, edits=[ac.Ablate([(0, 0)], how="zero")])
    for name, table in {"whole": patched, "cut": patched.where(layer=1), "edited": ablated}.items():
        table.save(tmp_path / name)
        capsys.readouterr()
        assert f"same: all {len(table)} numbers" in ran(["rerun", str(tmp_path / name)]), name
    next(model.parameters()).data.mul_(2)  # another model under the same name
    ac.patch_heads(model, ac.Pair(clean, corrupted), heads=[(0, 1)]).save(tmp_path / "whole")
    printed = ran(["rerun", str(tmp_path / "whole"), "--overwrite"])
    assert "differs: " in printed and "changed since then: weights" in printed


def test_rerun_loads_the_commit_that_was_measured(tmp_path, monkeypatch, tiny, ran):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shutil.copytree(tiny, tmp_path / "models--an--llm" / "snapshots" / (commit := "b" * 40))
    model = ac.load("an/llm", revision=commit)
    ac.evaluate(model, ac.Prompts.from_texts(["ab:a"], model.tokenizer, answer=["b"])).save(tmp_path / "run")
    assert "same: all" in ran(["rerun", str(tmp_path / "run")]), "the hub's cache has no branch, so no other commit"


def test_rerun_refuses_what_it_cannot_repeat_and_says_why(tmp_path, declined):
    assert "no table in" in declined(["rerun", str(tmp_path)])
    task = ac.Seq2SeqTask(x_len=3, n_examples=2)
    planted = ac.planted_circuit(task)
    pair = ac.Pair(*task.pairs(task.sample(3, planted.tokenizer), 0), metric=lambda logits, _: logits[:, 0])
    table = ac.evaluate(planted, pair.clean)
    for saved, message in (
        (table, "cannot be loaded by its name"),
        (table - table, "or from Python, without the settings to repeat it"),
        (ac.patch_heads(planted, pair, heads=[(0, 0)]), "since pair.metric is of type function, which no file keeps"),
        (replace(table, call=Call("load", {})), "'load' is no function of align_circuits that runs a model"),
    ):
        saved.save(tmp_path)
        assert message in declined(["rerun", str(tmp_path)])
        assert not (tmp_path / "rerun").exists()
    (tmp_path / "call" / "call.json").write_text('{"function": "evaluate", "arguments": {"a": {"class": "Nonesuch"}}}')
    assert "holds no call that Table.save wrote" in declined(["rerun", str(tmp_path)])


def test_heads_of_score_0_are_not_among_the_best(tmp_path, ran):
    printed = ran(["score", "--n", "4", "--metrics", "sink", "previous", "--out", str(tmp_path)])
    assert Table.load(tmp_path).top("sink", 1).frame["value"].iloc[0] < 0.005
    assert re.search(r"\n  sink +no head scores above 0\n", printed) and re.search(r"\n  previous +L\dH\d", printed)
    assert "candidates alike" not in printed, "all tokens are candidates"
    assert "Highest scores: previous" in re.sub("<[^>]*>", "", (tmp_path / "report.html").read_text())


def test_scores_without_examples_have_no_lookup(tmp_path, ran):
    assert "\n  lookup " not in ran(["score", "--n", "4", "--x-len", "3", "--n-examples", "0", "--out", str(tmp_path)])


@pytest.mark.parametrize("method", slow_but(["ica"], ["ica", "standard"]))
def test_tune_writes_a_report_and_an_adapter_and_is_repeated(tiny, tmp_path, method, ran):
    task = ["--x-len", "2", "--n-examples", "2", "--automata", "task", "--n", "8"]
    config = ["--method", method, "--steps", "2", "--batch", "2", "--probe-prompts", "2", "--layers", "1"]
    first = ["tune", "--model", tiny, *task, *config, "--out", str(tmp_path / "first")]
    printed = ran(first)
    assert "is correct in" in printed and str(tmp_path / "first" / "adapter") in printed
    assert (tmp_path / "first" / "heads" / "report.html").exists() == (method == "ica")
    assert (tmp_path / "first" / "report.html").exists()
    table = Table.load(tmp_path / "first")
    assert table.provenance.verb == "tune" and set(table.frame["step"]) == {0, 2}
    if method == "ica":
        assert "same: all" in ran(["rerun", str(tmp_path / "first"), "--out", str(tmp_path / "second")])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], TuneConfig.preset("small")),
        (["--steps", "7"], TuneConfig.preset("small", steps=7)),
        (["--steps", str(TuneConfig().steps)], TuneConfig.preset("small", steps=TuneConfig().steps)),
        (["--method", "standard"], TuneConfig.preset("small", method="standard")),
        (["--steps", "7", "--preset", "paper"], TuneConfig(steps=7)),
    ],
)
def test_a_small_model_is_tuned_by_settings_made_for_small_ones_where_none_is_given(
    tmp_path, capsys, monkeypatch, options, expected
):
    def stop(_model, _task, config, **_):
        assert config == expected
        raise ValueError("far enough")

    monkeypatch.setattr("align_circuits.cli.tune_command.tune", stop)
    assert main(["tune", *options, "--n", "8", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "far enough" in printed.err
    assert f"settings of preset {'paper' if 'paper' in options else 'small'}" in printed.out
    if "--steps" in options:
        assert f"steps {expected.steps}" in printed.out, "also where the paper has as many"
    words = shlex.split(parse_verb("tune", *options).facts["command"])[1:]
    assert parse_verb(*words).config == expected, "the command in the report repeats the run"


def test_localize_names_heads_and_is_repeated_from_its_provenance(tmp_path, monkeypatch, ran):
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    arguments = ["--model", "planted", "--style", "standard", "--n", "12", "--x-len", "4", "--n-examples", "2"]
    printed = ran(["localize", *arguments, "--n-controls", "1", "--out", str(tmp_path / "first")])
    assert re.search(r"align_query +L\dH\d 1\.00 \[0\.\d\d, 1\.00\] \(align_query\)", printed)
    assert "induction    none" in printed
    written = {path.name for path in (tmp_path / "first").iterdir()}
    tables = {"table.csv", "patching_effects", "ablation_effects", "set_ablations", "interchanges"}
    assert written == tables | {"report.html", "provenance.json"}
    assert "Redundant heads" not in (tmp_path / "first" / "report.html").read_text()
    assert "same: all " in ran(["rerun", str(tmp_path / "first"), "--out", str(tmp_path / "second")])


def test_the_smallest_p_values_before_the_run_are_those_of_the_prompts_that_test(tmp_path):
    """`localize` halves prompts in random order: a file sorted by where the right candidate stands allows names."""
    prompts = ac.Prompts.from_tokens([[1, 2, 3]] * 20)
    pairs: list[Any] = [(prompt, 2, [prompt // 10]) for prompt in range(20)]
    prompts = prompts.with_relations(own=ac.Relation.from_pairs(pairs, prompts=prompts, candidates=[0, 1]))
    tested, limits = Localize(prompts=tmp_path / "any.jsonl", seed=3)._smallest_p_values(prompts, None)
    own = tested.relations["own"].expand()[0].int().argmax(1).tolist()
    assert len(own) == 10 and 1 < sum(own) < 9
    assert limits["own"] == pytest.approx(1 / comb(10, sum(own)))


@pytest.mark.parametrize("verb", [["patch"], ["attribute"], ["ablate", "--screen", ".3"]], ids=lambda verb: verb[0])
def test_of_a_single_pair_no_interval_is_told(verb, tmp_path, capsys):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"text": "kAmnB", "corrupted": "kCmnB", "answer": "A"}))
    assert main([*verb, "--model", "toy-llama", "--prompts", str(file), "--out", str(tmp_path / "out")]) == 0
    told = [capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text(encoding="utf-8")]
    assert all("largest first; a single prompt tells no interval" in text for text in told)
    assert not any("leaves out 0" in text or "[nan" in text for text in told)


def test_that_no_head_can_be_named_is_printed_once_and_stands_in_the_report(tmp_path, ran):
    file = tmp_path / "short.jsonl"
    texts = ["kAmnB", "kCpqD", "jEmoF", "hGnlH", "iApkC", "oBmjE", "qDlhA", "nFkiG"]
    file.write_text("\n".join(json.dumps({"text": text, "answer": text[1]}) for text in texts))
    out = tmp_path / "out"
    options = ["--model", "toy-llama", "--prompts", str(file), "--n-controls", "0"]
    printed, note = ran(["localize", *options, "--out", str(out)]), "No head can be named for"
    assert printed.count(note) == 1 and printed.index(note) < printed.index("smallest p-values that these allow")
    assert "For previous take longer texts" in printed
    assert note in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_localize_reports_heads_that_stand_in_for_each_other(tmp_path):
    arguments = ["--n", "12", "--x-len", "3", "--n-examples", "2", "--n-controls", "0", "--redundant"]
    assert main(["localize", "--model", "planted", *arguments, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Redundant heads" in page and "named alone" in page


def test_benchmark_compares_methods_and_is_repeated_from_its_provenance(tmp_path, ran):
    arguments = ["--methods", "attention", "EAP", "--circuits", "1", "--out", str(tmp_path / "first")]
    printed = ran(["benchmark", *arguments])
    assert re.search(r"attention +0\.\d\d", printed) and "R-precision" in printed
    assert max(map(len, printed.split("report: ")[0].splitlines())) <= 120, "no table is wider than a terminal"
    page = (tmp_path / "first" / "report.html").read_text()
    saved = Table.load(tmp_path / "first")
    auroc: Any = saved.where(trait="circuits", role="all", metric="auroc").frame.set_index("method")["value"]
    best = auroc.idxmax()
    said = rf"No ranking: .*here 1, have no interval\. The highest mean AUROC is {auroc[best]:.2f}, of &#39;{best}&#39;"
    assert re.search(rf'<div class="summary">\s*<p>{said}', page) and "No ranking: " in printed
    assert '<h2 id="auroc-by-role">' in page and "AUROC, align query" in page and 'border="1"' not in page
    assert "attention of .5&#39; names each head" in page and "heads that follow no role; it should be .05" in page
    assert saved.frame[["low", "high"]].isna().to_numpy().all(), "no interval of fewer than five circuits"
    cells: Any
    (cells,) = auroc_figure(saved).data
    assert cells.texttemplate and not cells.showscale, "the cells have numbers: a bar as low as two rows says nothing"
    assert main(["rerun", str(tmp_path / "first"), "--out", str(tmp_path / "second")]) == 0


def test_methods_are_ranked_where_their_means_have_intervals():
    row = {"trait": "circuits", "at": "all", "role": "all", "metric": "auroc", "n": 5}
    values = {"b": (0.8, 0.7, 0.9), "a": (0.9, 0.8, 0.95), "c": (0.9, 0.7, 0.95)}
    rows = [row | {"method": name, **dict(zip(VALUES, of, strict=False))} for name, of in values.items()]
    frame = pd.DataFrame(rows)
    told = benchmark_command.answer(Table(frame, Provenance("benchmark")), 5)
    assert told.startswith("'a' tells the heads of a role from other heads best of 3 methods")
    assert "its mean AUROC is 0.90 [0.80, 0.95] over 5 circuits" in told
    few = benchmark_command.answer(Table(frame.assign(low=np.nan, high=np.nan), Provenance("benchmark")), 3)
    assert few.endswith("The highest mean AUROC is 0.90, of 'a' and 'c'.") and "here 3, have no interval" in few


OWN_METHODS = """
import numpy as np

LAYER = 0

def of_a_layer(model, pair):
    grid = np.zeros((model.cfg.n_layers, model.cfg.n_heads))
    grid[LAYER, ...] = 1
    return grid

def flat(model, pair):
    return np.zeros(7)

def broken(model, pair):
    return 1 / 0

def inside(model, pair):
    return np.reshape(np.zeros(3), 5)

def of_a_pair(pair):
    return np.zeros(7)
"""


def test_benchmark_takes_a_function_of_a_file(tmp_path, capsys, monkeypatch, declined):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, numbers = Path("own_methods.py"), []
    wanted = ["benchmark", "--circuits", "1", "--methods"]
    for layer in (0, 1):  # the file has changed: circuits are measured anew
        file.write_text(OWN_METHODS.replace("LAYER = 0", f"LAYER = {layer}") + "#" * layer)
        sys.modules.pop("own_methods", None)
        assert main([*wanted, "own_methods.py:of_a_layer", "attention"]) == 0
        assert re.search(r"own_methods.py:of_a_layer +0\.\d\d", capsys.readouterr().out)
        table = Table.load("runs/benchmark").where(method="own_methods.py:of_a_layer", metric="auroc")
        numbers.append(table.where(trait="circuits", role="all").frame["value"].item())
    assert numbers[0] != numbers[1]
    assert main(["rerun", "runs/benchmark"]) == 2, "a folder runs no code"
    assert "own_methods.py:of_a_layer is code, which is run only if you name it" in capsys.readouterr().err
    for name, message in {
        "flat": r"the method 'own_methods.py:flat' returned an array of shape \(7,\): give a number for",
        "broken": r"the method 'own_methods.py:broken' raised ZeroDivisionError: .*own_methods.py, line 15\)",
        "inside": r"'own_methods.py:inside' raised ValueError: .*own_methods.py, line 18\)",  # numpy raises it
        "": "name one of its functions, as own_methods.py:name; it has of_a_layer, flat, broken, inside, of_a_pair",
        "of_layer": "own_methods has no of_layer; it has of_a_layer, flat, broken, inside, of_a_pair",
        "of_a_pair": r"own_methods.py:of_a_pair takes \(pair\): write it to be called as method\(model, pair\)",
        "LAYER": "own_methods has LAYER, which is no function; it has of_a_layer",
    }.items():
        error = declined([*wanted, f"own_methods.py:{name}".removesuffix(":")])
        assert re.search(message, error) and error.count("\n") == 1
    sys.modules.pop("own_methods")


def test_help_lists_the_verbs(ran):
    printed = ran(["--help"])
    assert all(f"  {verb} " in printed for verb in VERBS)
    assert main([]) == 2


def test_results_are_numbered_and_never_overwritten_by_accident(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["score", *SMALL]) == 0
    runs = tmp_path / "runs" / "score"
    assert {path.name for path in runs.iterdir()} == {"0001", "0002", "latest"}
    assert (runs / "latest").resolve() == runs / "0002"
    assert main(["score", *SMALL, "--prompts", "no.jsonl"]) == 2
    assert (runs / "latest").resolve() == runs / "0002" and not (runs / "0003").exists()
    before = (runs / "0001" / "table.csv").read_bytes()
    capsys.readouterr()
    assert main(["score", *SMALL, "--seed", "1", "--out", "runs/score/0001"]) == 2
    assert "holds the results of an earlier run: give another --out, or add --overwrite" in capsys.readouterr().err
    assert (runs / "0001" / "table.csv").read_bytes() == before
    assert main(["score", *SMALL, "--seed", "1", "--out", "runs/score/0001", "--overwrite"]) == 0
    assert (runs / "0001" / "table.csv").read_bytes() != before


def test_effects_are_those_of_the_functions(tiny, tmp_path, capsys, ran):
    task, model = ac.Seq2SeqTask(x_len=3, n_examples=4), ac.load(tiny)
    pair = ac.Pair(*task.pairs(task.sample(6, model.tokenizer, seed=0), 0), metric="prob", direction="noise")
    common = ["--model", tiny, "--metric", "prob", *SMALL]
    expected = {
        ("patch", "--direction", "noise", "--sites", "v"): ac.patch_heads(model, pair, sites=("v",)),
        (
            *("patch", "--direction", "noise", "--sites", "z", "attn_out", "--heads", "L0H1,L1H2"),
            *("--positions", "groups"),
        ): ac.patch_heads(model, pair, sites=("z", "attn_out"), heads=["L0H1", "L1H2"], positions="groups"),
        ("patch", "--direction", "noise", "--sites", "resid_pre", "resid_mid"): ac.patch_sites(
            model, pair, ["resid_pre", "resid_mid"]
        ),
        ("attribute", "--direction", "noise", "--method", "ig_inputs"): ac.attribute_heads(
            model, pair, method="ig_inputs"
        ),
        ("ablate", "--how", "zero"): ac.ablate_heads(model, pair.clean, "zero", metrics=("prob", "accuracy")),
        ("ablate", "--how", "zero", "--heads", "L1H2"): ac.ablate_heads(
            model, pair.clean, "zero", heads=["L1H2"], metrics=("prob", "accuracy")
        ),
    }
    for (verb, *options), table in expected.items():
        out = tmp_path / verb
        assert main([verb, *options, *common, "--overwrite", "--out", str(out)]) == 0
        written = Table.load(out)
        np.testing.assert_array_equal(written.frame["value"], table.frame["value"])
        of_all = written.where(metric="prob", kind="all") if verb != "attribute" else written
        several = "--positions" in options
        of_all = of_all.where(site="z", positions="test input") if several else of_all
        if each := "position" in of_all.keys:
            of_all = of_all.where(site="resid_pre")
        row = of_all.top("prob", 1).frame.iloc[0]
        printed, page = capsys.readouterr().out, (out / "report.html").read_text(encoding="utf-8")
        place = "  z at test input: " if several else "  resid_pre: " if each else "  "
        head = f"at {row['position']}" if each else f"H{row['head']}"
        none = "no effect in the expected direction has an interval that leaves out 0"
        of_row = f"L{row['layer']}{' ' * each}{head}( \\(.*?\\))? {row['value']:.2f}"
        assert re.search(f"\n{place}(({none}; the largest is )?{of_row}|{none}[\n.])", printed)
        assert ("All positions, resid_mid" in page) == each
        assert ("\n  attn_out at examples: " in printed and "All heads, z at test input" in page) == several
        assert written.provenance.verb == verb
        assert any(line.startswith("prob without an edit: clean ") for line in table.remarks)
        text = html.unescape(re.sub("<[^>]+>", "", page))
        assert all(line in printed for line in table.remarks) and "Without an edit" in text
        assert all(f"{each[0].upper()}{each[1:]}." in text for each in table.where(metric="prob").warnings)
        if verb != "ablate":
            shares = written.normalized().frame["value"]
            np.testing.assert_array_equal(shares, table.normalized().frame["value"])
            assert ("In brackets, and below as normalised" in text) == bool(shares.notna().any())
    assert "same: all " in ran(["rerun", str(tmp_path / "patch")])


def test_heads_that_are_ablated_together_get_verdicts(tmp_path, capsys):
    heads, out = ["L0H1", "L1H2"], tmp_path / "set"
    assert main(["ablate", "--together", *SMALL, "--n-controls", "3", "--heads", *heads, "--out", str(out)]) == 0
    task = ac.Seq2SeqTask(x_len=3, n_examples=4)
    model = ac.planted_circuit(task, seed=0)
    prompts = task.sample(6, model.tokenizer, seed=0)
    table, verdicts = ac.ablate_together(model, prompts, heads, n_controls=3)
    np.testing.assert_array_equal(Table.load(out).frame["value"], table.frame["value"])
    printed, page = capsys.readouterr().out, (out / "report.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub("<[^>]+>", "", page))
    for verdict in verdicts:
        assert f"\n  {verdict.sentence}\n" in printed and verdict.sentence in text
    assert f"planted: 6 prompts; intact, accuracy is {verdicts[0].intact:.2f}\n" in printed
    assert "Accuracy without them" in text
    assert not {"metric", "how", "screen"} & Table.load(out).provenance.settings.keys()
    assert main(["rerun", str(out)]) == 0


@pytest.mark.parametrize("verb", slow_but(["ablate"], ["patch", "ablate"]))
def test_a_screen_marks_its_estimates(tmp_path, capsys, monkeypatch, verb, ran):
    drawn: list[Any] = []
    for name in ("head_map", "head_maps"):
        draw = getattr(ac.plots, name)
        monkeypatch.setattr(ac.plots, name, lambda *a, draw=draw, **k: drawn.append(draw(*a, **k)) or drawn[-1])
    assert main([verb, "--screen", ".25", *SMALL, "--out", str(tmp_path)]) == 0
    table = Table.load(tmp_path)
    assert 0.5 < np.mean(table.frame["estimated"]) <= 0.75
    best = table.where(metric="log_prob", kind="all", estimated=False).top("log_prob", 1).frame.iloc[0]
    printed = capsys.readouterr().out
    assert f"L{best['layer']}H{best['head']} {best['value']:.2f}" in printed
    measured: Any = table.where(estimated=False).frame
    told = f"{len(measured.drop_duplicates(['layer', 'head']))} of "
    assert f"  {told}" in printed and " heads were run; any others have an estimate alone." in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    estimates = page.partition('<h2 id="estimates">')[2].partition("<h2")[0]
    estimated = table.where(estimated=True, metric="log_prob", kind="all").frame["value"].abs().max()
    assert f"screened out and not run: at most {estimated:.2g} nats" in estimates
    assert (estimated > 0) == (verb == "ablate") == estimates.count("plotly-graph-div") == len(drawn) - 1
    assert len({(figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) for figure in drawn}) == 1, "one scale"
    assert "Grey: not run, see Estimates." in page
    told = table.frame["value"].notna().to_numpy().sum()
    assert told < len(table) and page.partition('<h2 id="all-numbers">')[2].count("<tr>") == told
    assert "same: all " in ran(["rerun", str(tmp_path)])


def test_numbers_stay_where_their_report_would_be_too_large(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("align_circuits.report.page.MAX_BYTES", 1000)
    assert main(["score", *SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "no report: the report has " in printed.err and "report:" not in printed.out
    assert len(Table.load(tmp_path)) and not (tmp_path / "report.html").exists()


def test_a_run_on_files_is_repeated_from_any_folder(pairs_file, tiny, tmp_path, monkeypatch, capsys, ran):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    model, prompts = os.path.relpath(tiny, tmp_path), str(pairs_file.relative_to(tmp_path))
    command = ["score", "--model", model, "--prompts", prompts, "--out", "first"]
    assert main(command) == 0
    note = "The keys of 搬运🙂 are at the same positions in every prompt"
    assert note in capsys.readouterr().out and note in Path("first/report.html").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    printed = ran(["rerun", "../first"])
    assert "same: all " in printed and "changed since then" not in printed


def test_groups_and_warnings_of_a_file_stand_in_what_is_printed_and_in_the_report(tmp_path, capsys):
    file, warned = tmp_path / "related.jsonl", "1 of 8 texts, such as line 3: the text ends with a space and the answer"
    lines = [{"text": f"k{a}mnop{a}", "answer": a, "group": index // 2} for index, a in enumerate("ABCDEFGH")]
    lines[2] |= {"text": "kCmnopC ", "answer": " C"}
    lines[7]["text"] = "kkHmnopH"  # texts of two lengths have their means over kinds
    file.write_text("\n".join(map(json.dumps, lines)))
    for verb, said in (
        ("evaluate", "toy-llama: 8 prompts in 4 groups; 95% intervals over groups"),
        ("score", "best heads (95% intervals over groups)"),
        (
            "ablate",
            "8 prompts in 4 groups, ablation to mean over all tokens that a prediction reads, BOS left out, change",
        ),
    ):
        out = tmp_path / verb
        with pytest.warns(UserWarning, match=warned):
            assert main([verb, "--model", "toy-llama", "--prompts", str(file), "--out", str(out)]) == 0
        assert said in capsys.readouterr().out
        if verb == "ablate":  # `compare` tells by it which of two means was taken
            assert Table.load(out).provenance.data["ablated to"] in ("mean over all tokens", "mean over one position")
        page, data = (out / "report.html").read_text(encoding="utf-8"), Table.load(out).provenance.data
        assert f"<dt>Warning</dt><dd>{warned}" in page and data["warnings"][0].startswith(warned)
        assert f"all 8 of {file}, in 4 groups</dd>" in page and data["groups"] == 4
        assert "95% intervals over groups" in page and "over prompts" not in page
        assert ("<td>&#x27;A&#x27;</td>" in page or "<td>'A'</td>" in page) == (verb == "evaluate"), "as it is printed"
    with pytest.warns(UserWarning, match=warned):
        assert (
            main(["score", "--model", "toy-llama", "--prompts", str(file), "--n", "4", "--out", str(tmp_path / "n")])
            == 0
        )
    assert f"4 of {file}, in 2 groups</dd>" in (tmp_path / "n" / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def pairs_file(tmp_path):
    """Eight lines: a symbol, and the same symbol again behind an arrow."""
    lines = [
        {
            "text": f"k{a}mn{b}op{a}",
            "answer": b,
            "wrong": a,
            "corrupted": f"k{b}mn{a}op{a}",
            "corrupted_answer": a,
            "positions": {"first": [a, 0], "second": [b, 0]},
            "relations": {"搬运🙂": {"query": "END", "keys": ["second"], "candidates": ["first", "second"]}},
        }
        for a, b in zip("ABCDEFGH", "BCDEFGHA", strict=True)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_model_is_tuned_on_a_file_of_prompts(tiny, tmp_path, ran, declined, monkeypatch):
    file = tmp_path / "pairs.jsonl"
    pairs = itertools.product("ABCDEFGH", "STUVWXYZ")
    lines = [{"text": f"k{a}mn{b}op{a}", "answer": b, "corrupted": f"k{b}mn{a}op{b}"} for a, b in pairs]
    file.write_text("\n".join(map(json.dumps, lines)))
    named, found = [], tune_command.localize
    monkeypatch.setattr(tune_command, "localize", lambda *of, **how: named.append(of[1].prompts) or found(*of, **how))
    common = ["--model", tiny, "--prompts", str(file), "--n", "40", "--seed", "1", "--out"]
    config = ["--steps", "1", "--batch", "2", "--probe-prompts", "2", "--layers", "1"]
    grouped = [line | {"group": line["text"][1]} for line in lines[:40]]  # eight lines each: one group is held out
    (tmp_path / "grouped.jsonl").write_text("\n".join(map(json.dumps, grouped)))
    of_groups = ["tune", "--model", tiny, "--prompts", str(tmp_path / "grouped.jsonl"), "--out", str(tmp_path / "no")]
    assert re.search("8 prompts in 1 group, of 40, are not learned from", declined(of_groups))
    printed = ran(["tune", *common, str(tmp_path / "tuned"), *config])
    assert re.search(r"is correct in .* after it, on the 8 prompts that it did not learn from\.", printed)
    model = ac.load(tiny)
    prompts, corrupted = ac.Prompts.from_jsonl(file, model.tokenizer, with_corrupted=True)
    assert corrupted is not None
    _, unseen = OwnPrompts(prompts[:40], corrupted[:40]).split(1)
    assert [each.digest for each in named] == [unseen.prompts.digest]


SCORED = ("induction", "previous", "duplicate", "搬运🙂", "sink", "entropy", "搬运🙂_attention")


@pytest.mark.slow
def test_verbs_take_a_file_of_prompts(tiny, pairs_file, tmp_path, capsys, ran, declined):
    model = ac.load(tiny)
    clean, corrupted = ac.Prompts.from_jsonl(pairs_file, model.tokenizer)
    assert corrupted is not None
    common = ["--model", tiny, "--prompts", str(pairs_file)]
    expected = {
        "patch": ac.patch_heads(model, ac.Pair(clean, corrupted, metric="logit_diff")),
        "ablate": ac.ablate_heads(model, clean, metrics=("logit_diff", "accuracy")),
        "score": ac.score_heads(model, clean, SCORED),
        "localize": ac.localize(model, clean, corrupted=corrupted, n_controls=1).table,
    }
    options, printed = {"localize": ["--n-controls", "1"], "score": []}, ""
    for verb, table in expected.items():
        out = tmp_path / verb
        printed += (said := ran([verb, *common, *options.get(verb, ["--metric", "logit_diff"]), "--out", str(out)]))
        if verb == "localize":
            assert "搬运🙂" in said and "搬运🙂" in (out / "report.html").read_text(encoding="utf-8")
        np.testing.assert_array_equal(Table.load(out).frame["value"], table.frame["value"])
    page = (tmp_path / "score" / "report.html").read_text(encoding="utf-8")
    shown = re.sub("<script.*?</script>|<[^>]*>", "", page, flags=re.DOTALL)
    assert re.search(r"搬运🙂 +L\dH\d", printed) and "Highest scores: 搬运🙂 L" in shown, "own relations come first"
    assert "The relation 搬运🙂: a query" in shown and "symbol" not in shown
    assert "not named, and the tests that failed" in printed and re.search(
        r"accuracy among all tokens \(4 test prompts\): clean 0\.\d\d .*corrupted", printed
    )
    capsys.readouterr()
    assert main(["evaluate", *common, "--n", "4", "--out", str(tmp_path / "evaluate")]) == 0
    evaluated = Table.load(tmp_path / "evaluate").where(kind="all", offset=None).frame["metric"].tolist()
    assert evaluated == ["accuracy", "log_prob", "choice_accuracy", "logit_diff"], "with wrong answers in the file"
    printed = capsys.readouterr().out
    assert re.search(r"\n +metric +value +95% interval +n\n +accuracy +0\.\d{3} +\[", printed) and "NA" not in printed
    assert "Between right and wrong answer it is right in " in printed.partition("metric")[0]
    assert len(re.findall(r"\[-?\d", printed.partition("metric")[2])) == 4, (
        "no row twice, though the first token is all"
    )
    page = (tmp_path / "evaluate" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"\n  '.+', not 'B': <bos>kAmnBopA", printed) and "Answers" in page and "kAm" in page
    pairs_file.write_text(pairs_file.read_text().replace("kAm", "jAm"))
    capsys.readouterr()
    assert "the prompts have changed since the first run" in declined(["rerun", str(tmp_path / "patch")])


def test_options_of_the_translation_task_do_not_go_with_a_file(pairs_file, declined):
    said = declined(["patch", "--model", "toy-llama", "--prompts", str(pairs_file), "--x-len", "3"])
    assert "--x-len is an option of the translation task: leave it out, or --prompts" in said


def test_answers_of_several_tokens_beside_wrong_ones_are_told(tiny, tmp_path, ran):
    lines = [{"text": f"k{a}m", "answer": answer, "wrong": a} for a, answer in (("A", "B"), ("C", "DE"), ("F", "G"))]
    lines[1]["wrong"] = "HI"
    (path := tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["ablate", "--model", tiny, "--prompts", str(path), "--metric", "logit_diff", "--heads", "L0H1", "--out"]
    said, first = ran([*words, str(tmp_path / "all")]), ran([*words, str(tmp_path / "first"), "--targets", "first"])
    assert "Note: 1 of 3 answers have several tokens, and effects are means over all of them." in said
    assert "several tokens" not in first


def test_larger_effects_in_the_other_direction_are_named():
    """But not those whose interval holds 0, and none that is smaller than the last of those that matter most."""
    values = [(5.0, 4), (4.0, 3), (3.0, 2), (2.0, 1), (1.0, 0.5), (-2.5, -3), (-9.0, -19), (-0.5, -0.6)]
    rows = [{"level": "head", "layer": 0, "head": head, "metric": "a"} for head in range(len(values))]
    frame = pd.DataFrame(rows).assign(n=4, **dict(zip(("value", "low"), zip(*values, strict=True), strict=True)))
    frame["high"] = 2 * frame["value"] - frame["low"]
    listed = effect_command_base.best_of(Table(frame, Provenance("patch")), "a")
    best, against = listed.split(". In the other direction: ")
    zeros = frame.assign(low=-1.0, high=1.0, value=[0.01] * 8)
    assert effect_command_base.best_of(Table(zeros, Provenance("patch")), "a").startswith(
        "no effect in the expected direction has an interval that leaves out 0; the largest is L0H0"
    )
    unclear = frame.mask(frame["head"] == 1, frame.assign(low=-1.0, high=9.0))
    said = effect_command_base.best_of(Table(unclear, Provenance("patch")), "a")
    listed, skipped = said.split(". Larger than some of ")
    assert "H1" not in listed and skipped == (
        "these, but with an interval that holds 0: L0H6 -9.00 [-19.00, 1.00], L0H1 4.00 [-1.00, 9.00]"
    )
    shared = pd.concat([frame, frame[frame["head"] == 0].assign(head=8)])
    assert effect_command_base.best_of(Table(shared, Provenance("patch")), "a").count("5.00 [") == 1, (
        "of heads with one key head"
    )
    # The six largest of both directions, L0H6 left out: so L0H4 (1.00) is the last, and L0H7 (-.50) is counted.
    assert re.findall("H.", best) == ["H0", "H1", "H2", "H3", "H4"]
    assert against.split(". Larger")[0] == "L0H5 -2.50 [-3.00, -2.00]. Smaller: 1 more"
    harmful = frame.assign(value=[-8.0, -7, -6, -5, -4, -3, -2, 0.5], low=-9.0, high=-1.0)
    harmful.loc[7, ["low", "high"]] = 0.4, 0.6
    of_one = effect_command_base.best_of(Table(harmful, Provenance("patch")), "a")
    assert of_one.startswith("L0H7 0.50 [0.40, 0.60]. In the other direction: L0H0 -8.00"), "though six are larger"
    assert of_one.count("[") == 7 and of_one.endswith(". Smaller: 1 more")
    many = pd.concat([frame.assign(layer=layer) for layer in range(5)])
    nothing = many.assign(layer=many["layer"] + 5, value=0.0, low=0.0, high=0.0)  # as before the first changed token
    of_many = effect_command_base.best_of(Table(pd.concat([many, nothing]), Provenance("patch")), "a")
    assert ". Smaller: 29 more (about 2 of 40 intervals would leave out 0 by chance alone)" in of_many


def test_evaluate_takes_texts_without_answers_and_tells_each_place_once(tmp_path, ran):
    """Every token is a target then, each at a place of its own, and none is a first one."""
    file = tmp_path / "texts.jsonl"
    common = ["evaluate", "--model", "toy-llama", "--prompts", str(file), "--overwrite", "--out", str(tmp_path / "out")]
    lines: list[dict[str, str]] = [{"text": text} for text in ("kAmnBopA", "kCmnDopC")]
    for answer, places in ((None, 8), ("AB", 0), ("ABC", 2)):
        written = [line | ({} if answer is None else {"answer": answer}) for line in lines]
        file.write_text("\n".join(map(json.dumps, written)))
        printed = ran(common)
        assert len({*re.findall(r" offset \d+", printed)}) == places, printed
        assert (" first " in printed) == (" later " in printed) == (answer is not None)


def test_effects_of_rounding_are_none():
    """Positions before the first token that differs: what float32 leaves there is no effect. A small one is."""
    rows = [{"level": "layer", "layer": layer, "n": 4} for layer in range(3)]
    frame = pd.DataFrame(rows).assign(value=[3e-6, -2e-6, 1e-6], low=[2e-6, -3e-6, -1e-6], high=[4e-6, -1e-6, 2e-6])
    small = frame.assign(value=[3e-4, -2e-6, 1e-6], low=[2e-4, -3e-6, -1e-6], high=[4e-4, -1e-6, 2e-6])
    for metric, clean, told in (("log_prob", -10.0, "1e-05"), ("prob", 0.5, "5e-06"), ("accuracy", 1e-9, None)):
        runs = pd.DataFrame({"run": ["clean"], "metric": metric, "value": clean, "low": clean, "high": clean, "n": 4})
        baselines = Table(runs, Provenance("made"))
        tables = [Table(of.assign(metric=metric), Provenance("patch"), baselines=baselines) for of in (frame, small)]
        of_rounding, of_one = (effect_command_base.best_of(table, metric) for table in tables)
        assert (of_rounding == f"no effect (all are below {told}, which rounding may make)") == (told is not None)
        assert of_one.startswith("L0 0.0003 [0.0002, 0.0004]") and "Smaller" not in of_one


def test_a_file_that_does_not_serve_is_refused(pairs_file, tmp_path, capsys, declined):
    common = ["--model", "toy-llama", "--prompts", str(pairs_file), "--out", str(tmp_path / "out")]
    assert "--prompts needs --model, such as smollm2" in declined(["ablate", *common[2:]])
    assert "--n 9: " in declined(["ablate", *common, "--n", "9"])
    assert main(["localize", *common, "--n", "4"]) == 2
    printed = capsys.readouterr()
    assert "align-circuits: 4 prompts: give at least 8, half to choose" in printed.err
    assert "No head" not in printed.out
    assert "2 prompts, of 8, are not learned from: to choose heads" in declined(["tune", *common])
    lines = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    uneven = [*lines[:2], lines[2] | {"answer": lines[2]["answer"] + "a"}, *lines[3:]]
    pairs_file.write_text("\n\n".join(map(json.dumps, uneven)))
    for verb, option in (("patch", "--metric"), ("evaluate", "--metrics")):
        printed = declined([verb, *common, option, "logit_diff"])
        assert "line 5: the answer has 2 tokens and the wrong one another number, or some of the same, so" in printed
        assert f"{option} logit_diff can compare their first tokens alone" in printed
        assert "add --targets first" in printed
    assert main(["evaluate", *common, "--metrics", "logit_diff", "--targets", "first"]) == 0
    assert {*Table.load(tmp_path / "out").frame["kind"]} == {"all", "first"}
    common.append("--overwrite")
    assert main(["patch", *common, "--sites", "resid_pre"]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    said = "The prompts differ in length and are padded on the left, and positions count the padding"
    assert f"Note: {said}" in printed and said in page
    longer = [line | {"corrupted": f"k{line['corrupted']}"} for line in lines]
    pairs_file.write_text("\n".join(map(json.dumps, longer)))
    assert main(["evaluate", *common]) == 0, "which reads no corrupted text"
    assert main(["patch", *common]) == 2
    assert "line 1: at token 2 the clean text has 'A' (1 token) and the corrupted one 'kB'" in capsys.readouterr().err
    lines = [{"text": line["text"]} for line in lines]
    pairs_file.write_text("\n".join(map(json.dumps, lines)))
    assert "--positions each patches whole layers: leave out" in declined(["patch", *common, "--positions", "each"])
    assert "has no corrupted texts to patch from" in declined(["attribute", *common])


def test_a_tokenizer_comes_from_another_folder(tmp_path, random_hf_model, char_tokenizer, declined):
    random_hf_model("llama", max_position_embeddings=256).save_pretrained(tmp_path / "model")
    char_tokenizer.save_pretrained(tmp_path / "tokenizer")
    common = ["score", "--model", str(tmp_path / "model"), *SMALL, "--out", str(tmp_path / "run")]
    assert "give --tokenizer, a folder that has it" in declined(common)
    assert main([*common, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert Table.load(tmp_path / "run").provenance.settings["tokenizer"] == str(tmp_path / "tokenizer")


def test_wrong_types_of_arguments_end_in_one_line_and_other_type_errors_do_not(tmp_path, monkeypatch, declined):
    wrong: Any = 1j
    monkeypatch.setattr("align_circuits.cli.score_command.Score.prepare", lambda _: ac.RunOptions(progress=wrong))
    (line,) = declined(["score", "--out", str(tmp_path / "a")]).splitlines()
    assert "RunOptions: progress is a complex, not True or False" in line
    monkeypatch.setattr("align_circuits.cli.score_command.Score.prepare", lambda _: len(wrong))
    with pytest.raises(TypeError, match="has no len"):
        main(["score", "--out", str(tmp_path / "b")])
