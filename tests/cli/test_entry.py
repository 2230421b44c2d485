"""The entry point: what it imports, what it suggests, and output that is not read to its end."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from help_texts import parser_help
from tqdm import tqdm

import align_circuits as ac
from align_circuits.cli import main
from align_circuits.cli.entry import PROGRESS, VERBS, Output, in_options, parse_verb, verb_class, warnings_as_lines
from align_circuits.jobs.control_characters import printable
from align_circuits.prompts.jsonl import read_jsonl

PROGRAM = "import sys; from align_circuits.cli import main; status = main(); "


def run(*arguments: str, then: str = "sys.exit(status)") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + then, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["scroe"], ["score", "--n", "8", "--help"]])
def test_help_imports_no_library(arguments):
    libraries = {"distributed", "numpy", "pandas", "pebble", "submitit", "torch", "transformers", "tyro"}
    assert run(*arguments, then=f"print(*sorted({libraries} & {{*sys.modules}}))").stdout.splitlines()[-1] == ""


def test_a_warning_while_options_are_read_is_no_error_in_them(monkeypatch, capsys):
    def warned(verb, _):
        sys.stderr.write("UserWarning: 'mine/fig1' is left out\n")
        return verb

    monkeypatch.setattr(verb_class("score"), "with_defaults", warned)
    assert parse_verb("score", "--model", "toy-llama").model == "toy-llama"
    assert capsys.readouterr().err == "UserWarning: 'mine/fig1' is left out\n"


def test_a_warning_is_a_line_without_code():
    before = warnings.formatwarning
    with warnings_as_lines():
        line = warnings.formatwarning("no workers yet", UserWarning, "executors.py", 7)
    assert line == "align-circuits: no workers yet\n"
    assert warnings.formatwarning is before


@pytest.mark.parametrize("verb", VERBS)
def test_the_kept_help_is_that_of_the_parser(verb, ran):
    printed = ran([verb, "--help", "all"])
    assert VERBS[verb][:40] in printed
    assert not re.search(r"\{?\[\{|\{\[|None|[TF]alse|True|.{81}", printed), "words of Python, or too wide a line"
    assert printed == parser_help(verb), "options have changed: python tests/help_texts.py"


def test_the_line_of_a_file_of_prompts_in_the_help_can_be_read(tmp_path):
    example = re.search(r"such as (\{.*\}); all but", re.sub(r"\s+", " ", parser_help("localize")))
    assert example is not None
    (tmp_path / "prompts.jsonl").write_text(example[1])
    (line,) = (json.loads(text) for text in example[1].splitlines())
    columns, _ = read_jsonl(tmp_path / "prompts.jsonl")
    assert columns == {key: [value] for key, value in line.items()}
    assert {*line["relations"]["finds the name"]["candidates"]} == {*line["positions"]}


def test_help_is_short_and_begins_with_the_options_for_own_prompts(ran):
    printed = ran(["patch", "--positions", "all", "--help"])
    lines = printed.splitlines()
    options = [line.split()[0] for line in lines if line.startswith("  -")]
    assert options[1:6] == ["--model", "--prompts", "--task", "--n", "--targets"] and options[-2] == "--out"
    assert len(lines) < 90 and {"--sites", "--metric", "--positions"} < {*options}
    assert not {"--x-len", "--jobs", "--device"} & {*options}
    assert lines[-4:-2] == [
        "align-circuits patch --help all also lists the options",
        "  of the model and the machine (--device ...)",
    ]
    everything = re.findall(r"^  (-[-\w]*\w)", ran(["patch", "-h", "all"]), re.MULTILINE)
    assert {*options[1:-1], "--x-len", "--jobs", "--device"} < {*everything}
    of_tune = ran(["tune", "--help"])
    assert "--lr" in of_tune and "--quantization" not in ran(["tune", "-h", "all"]), "nothing that it refuses"


def test_errors_speak_of_options():
    verb = verb_class("patch")
    for message, shown in {
        "batch_size=0: give a number": "--batch-size 0: give a number",
        "metric='logit_diff' needs answers": "--metric logit_diff needs answers",
        "set spaced=False, or bos=True": "set --no-spaced, or --bos",
        "x_len is 30: give x_len up to 26": "--x-len is 30: give --x-len up to 26",
        "write f(self, seed=0), not seed=0": "write f(self, seed=0), not --seed 0",
        "leave screen out; see prompts.n and 'x_len'": "leave screen out; see prompts.n and 'x_len'",
    }.items():
        assert in_options(message, verb) == shown


def test_help_of_the_command_of_each_is_that_of_its_verb(capsys):
    with pytest.raises(SystemExit):
        main(["each", "--seeds", "0", "--", "score", "--help"])
    assert VERBS["score"][:40] in capsys.readouterr().out


def test_every_public_name_resolves_where_type_checkers_see_it():
    source = Path(ac.__file__).read_text(encoding="utf-8")
    for name, module in ac._MODULES.items():
        assert f"    from {module} import {name} as {name}\n" in source, name
    assert all(getattr(ac, name) is not None for name in ac.__all__)
    with pytest.raises(AttributeError, match="no attribute 'scores'"):
        ac.scores  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018
    for name, meant in (("patch_head", "patch_heads"), ("Localisation", "Localization"), ("report_", "report")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': did you mean '{meant}'[?]$"):
            getattr(ac, name)
    folders = {path.parent.name for path in Path(ac.__file__).parent.glob("*/__init__.py")}
    files = {path.stem for path in Path(ac.__file__).parent.glob("*.py")} - {"__init__", "__main__"}
    assert {*ac._ROOMS} == (folders | files) - {"beyond", "validation"}, "which a checkout alone has"


def test_completion_offers_public_names_alone():
    assert dir(ac) == sorted({*ac.__all__, *ac._ROOMS})


@pytest.mark.parametrize("then", ["", ">&-", "2>&-"])
def test_python_runs_the_package_as_the_command(then):
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m align_circuits --version {then}"], capture_output=True)
    assert done.stdout.startswith(b"align-circuits " if then != ">&-" else b"") and done.returncode == 0


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PROGRAM + "sys.exit(status)", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_piped_has_no_boxes_and_no_control_characters(capsys):
    main(["score", "--help", "all"])
    with pytest.raises(SystemExit):
        main(["score", "--hlep"])
    printed = capsys.readouterr()
    assert "--x-len" in printed.out
    assert "--hlep" in printed.err
    assert not {*(printed.out + printed.err)} & {*"─│╭╮╰╯├┤\x1b\r"}


SPITEFUL = "boom \x1b[31mRED\x1b]0;owned\x07 \x9b2J \u202egnp\r"
ESCAPED = r"boom \x1b[31mRED\x1b]0;owned\x07 \x9b2J \u202egnp\r"


def test_control_characters_are_printed_escaped(tmp_path, capsys):
    plan = {"started": 0, "jobs": {"a.json": {"function": "m:f", "config": {}, "seed": 0}}}
    (tmp_path / ".plan-0000000000000000.json").write_text(json.dumps(plan))
    (tmp_path / "a.error").write_text(SPITEFUL)
    assert main(["status", str(tmp_path)]) == 0
    for arguments in (["open", SPITEFUL], [SPITEFUL], ["score", "--prompts", SPITEFUL, "--out", str(tmp_path / "o")]):
        assert main(arguments) == 2
    with pytest.raises(SystemExit):
        main(["score", f"--{SPITEFUL}"])
    with warnings_as_lines():
        print(warnings.formatwarning(SPITEFUL, UserWarning, "", 0), file=Output(sys.stderr, PROGRESS))
    printed = capsys.readouterr()
    assert ESCAPED.removesuffix(r"\r") in printed.out and printed.err.count(ESCAPED) >= 4
    assert printable(printed.out + printed.err) == printed.out + printed.err


def test_a_progress_bar_moves(capsys):
    for _ in tqdm(range(2), file=Output(sys.stderr, PROGRESS), desc="\x1b[2J\udce9", mininterval=0):
        pass
    printed = capsys.readouterr().err
    assert "\r\\x1b[2J\\udce9: 100%" in printed and "\x1b" not in printed and "\\r" not in printed


def test_open_prints_the_path_where_there_is_no_display(tmp_path, monkeypatch, ran, declined):
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was opened"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "no report in" in declined(["open", str(tmp_path)])
    (tmp_path / "report.html").write_text("<p>", encoding="utf-8")
    assert ran(["open", str(tmp_path)]) == f"{(tmp_path / 'report.html').resolve()}\n"


@pytest.mark.parametrize("place", ["verb_class", "results_folder"])
def test_an_interrupt_is_told_in_a_line_also_while_libraries_are_imported(place, monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"align_circuits.cli.entry.{place}", interrupted)
    assert main(["score", "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err.startswith("align-circuits: interrupted: no results were written; ")


@pytest.mark.parametrize(("command", "kept"), [("score", "begins anew"), ("patch", "begins anew"), ("tune", "goes on")])
def test_an_interrupt_says_whether_the_command_goes_on(command, kept, monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb_class(command), "__call__", interrupted)
    assert main([command, "--out", str(tmp_path / "run")]) == 130
    told = capsys.readouterr().err
    assert kept in told and (f"--out {tmp_path / 'run'}" in told) == (command == "tune")
    if command == "patch":
        assert main([command, "--parts", str(tmp_path / "parts"), "--out", str(tmp_path / "run")]) == 130
        assert "goes on" in capsys.readouterr().err
