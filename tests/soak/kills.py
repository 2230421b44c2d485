"""Kills runs at random moments, starts them again until they finish, and compares what they leave.

    python tests/soak/kills.py --kills 100           # make soak: all verbs, some forty minutes on two cores
    python tests/soak/kills.py --kills 20 --verbs score tune --seed 1

Runs are forked from this process, which has imported everything, so that a kill seldom hits an import. Each signal is
KILL, TERM or INT. A result is *lost* if a kill leaves neither the earlier nor the new one, *half* if a folder with a
provenance lacks a file, or if something unfinished stays behind in the end, and *different* if the run that was killed
ends with other bytes than one that was not: in tables, reports, weights, checkpoints, cells. Exits with 1 if any is.
"""

# ruff: noqa: T201
import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import align_circuits as ac
from align_circuits.cli import main
from align_circuits.cli.entry import VERBS
from align_circuits.jobs.folders import finish_moves, replacing_in

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

SMALL = ["--n", "8", "--x-len", "2", "--n-examples", "2"]
TUNING = ["--steps", "6", "--batch", "2", "--probe-every", "2", "--probe-prompts", "2", "--layers", "1"]

COMMANDS: dict[str, list[str]] = {
    "score": ["score", *SMALL],
    "localize": [
        "localize",
        "--model",
        "planted",
        "--n",
        "12",
        "--x-len",
        "3",
        "--n-examples",
        "3",
        "--n-controls",
        "1",
    ],
    "tune": ["tune", *SMALL, *TUNING, "--automata", "task", "--no-heads"],
    "pretrain": ["pretrain", "--recipe", "smoke"],
    "reproduce": ["reproduce", "recall/lemmas", "--scale", "smoke", "--jobs", "2"],
}

OVERWRITING = {name: [*COMMANDS[name], "--overwrite", "--seed"] for name in ("score", "localize")}
"""Verbs that are also killed while they replace the results of an earlier run, of another seed."""


def sweep(out: Path) -> int:
    """A sweep of Python that keeps its parts, and its table."""
    torch.set_num_threads(1)
    task = ac.Seq2SeqTask(x_len=3, n_examples=4)
    model = ac.load("toy-llama")
    pair = ac.Pair(*task.pairs(task.sample(6, model.tokenizer, seed=0), 0))
    ac.patch_heads(model, pair, sites=("z", "q"), options=ac.RunOptions(cache_dir=out / "parts")).save(out / "table")
    return 0


@dataclass(frozen=True)
class Run:
    """What is run again and again: a function of the folder for its results."""

    call: Callable[[Path], int]
    results: str
    """The folder of the provenance, below the folder for the results."""
    earlier: Callable[[Path], int] | None = None
    """Writes the results that are there before, if it replaces any."""


def command(arguments: list[str]) -> Callable[[Path], int]:
    return lambda out: main([*arguments, "--out", str(out)])


RUNS: dict[str, Run] = {
    **{name: Run(command(arguments), ".") for name, arguments in COMMANDS.items()},
    "sweep": Run(sweep, "table"),
    **{
        f"{name} --overwrite": Run(command([*arguments, "0"]), ".", command([*arguments, "1"]))
        for name, arguments in OVERWRITING.items()
    },
}


def start(run: Callable[[Path], int], out: Path, log: Path) -> int:
    """Forks a process that runs into `out`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *[os.open(log, LOG)] * 2)):
            os.dup2(descriptor, number)
        code = run(out)
    finally:
        os._exit(code)


LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def finished(pid: int, within: float | None = None) -> int | None:
    """The exit status of a process, negative for a signal; None if it still runs after so many seconds."""
    end = None if within is None else time.monotonic() + within
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(0.001)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder but locks, without what differs between any two runs.

    That is the order of the entries in the header of safetensors, and the lists of jobs and of a sweep's parts, which
    say when a run began.
    """

    def same_each_time(path: Path) -> bytes:
        read = path.read_bytes()
        if path.suffix == ".safetensors" and len(read) >= 8:
            end = 8 + int.from_bytes(read[:8], "little")
            return json.dumps(json.loads(read[8:end]), sort_keys=True).encode() + read[end:]
        return read

    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: same_each_time(path)
        for name, path in sorted(files.items())
        if not path.name.startswith((".lock", ".plan"))
    }


def is_half(folder: Path, whole: Sequence[Mapping[str, bytes]]) -> bool:
    """Whether a folder claims to be complete and is not, as it stands."""
    present = contents(folder)
    return "provenance.json" in present and not any(set(one) <= set(present) for one in whole if one)


def of_results(files: Mapping[str, bytes], run: Run) -> dict[str, bytes]:
    """The results among files: not the state that killed runs go on from."""
    place = "" if run.results == "." else f"{run.results}/"
    state = ("training/", "probes/", "jobs/", "trained/", ".")
    inside = {name.removeprefix(place): text for name, text in files.items() if name.startswith(place)}
    return {name: text for name, text in inside.items() if not name.startswith(state)}


def soak(name: str, kills: int, draw: random.Random, folder: Path) -> Counter[str]:
    """Kills one run so many times."""
    run, out, log = RUNS[name], folder / "out", folder / "log.txt"
    counts: Counter[str] = Counter()

    def whole(call: Callable[[Path], int]) -> tuple[dict[str, bytes], float]:
        shutil.rmtree(out, ignore_errors=True)
        began = time.monotonic()
        if (code := finished(start(call, out, log))) != 0:
            raise SystemExit(f"{name}: exit {code} without any kill\n{log.read_text()[-2000:]}")
        return contents(out), time.monotonic() - began

    earlier = whole(run.earlier)[0] if run.earlier is not None else {}
    if run.earlier is not None:
        shutil.copytree(out, folder / "earlier")
    expected, seconds = whole(run.call)
    marked = "provenance.json" in of_results(expected, run)
    versions = [of_results(expected, run), of_results(earlier, run)]
    while counts["kills"] < kills:
        shutil.rmtree(out, ignore_errors=True)
        if run.earlier is not None:
            shutil.copytree(folder / "earlier", out)
        for _ in range(draw.randint(1, 3)):
            pid = start(run.call, out, log)
            # A third of the kills fall on the last tenth, where results are written.
            moment = draw.uniform(0.85, 1.1) if draw.random() < 1 / 3 else draw.uniform(0, 1)
            if (code := finished(pid, moment * seconds)) is None:
                number = draw.choice(SIGNALS)
                os.kill(pid, number)
                if (code := finished(pid, 60)) is None:
                    raise SystemExit(f"{name}: {number.name} did not end it")
                counts["kills"] += code != 0
                counts[number.name] += code != 0
                counts["while it wrote"] += code != 0 and any(out.parent.rglob(".*.partial"))
            elif code != 0 and "holds the results of an earlier run" not in log.read_text()[-300:]:
                raise SystemExit(f"{name}: exit {code}\n{log.read_text()[-2000:]}")
            place = out / run.results
            counts["half"] += marked and is_half(place, versions)
            finish_moves(place)
            now = of_results(contents(out), run)
            if marked and (run.earlier is not None or "provenance.json" in now):
                counts["lost"] += now not in versions
        for _ in range(5):
            code = finished(start(run.call, out, log))
            if code == 0 or (out / run.results / "provenance.json").exists():
                break
        with replacing_in(out / run.results):
            pass  # clears what was killed last, as the next run would
        final = contents(out)
        counts["half"] += bool(set(final) - set(expected)) or any(
            path.name.startswith(".") for path in folder.iterdir()
        )
        if final != expected:
            counts["different"] += 1
            for each in sorted(set(final) | set(expected)):
                if final.get(each) != expected.get(each):
                    print(f"  {name}: {each}: {len(expected.get(each, b''))} -> {len(final.get(each, b''))} bytes")
                    for kind, files in (("expected", expected), ("found", final)):
                        (folder.parent / f"{kind}-{Path(each).name}").write_bytes(files.get(each, b""))
        counts["rounds"] += 1
    return counts


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100, help="over all verbs")
    parser.add_argument("--verbs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the signals")
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    for verb in VERBS:  # before any fork
        importlib.import_module(f"align_circuits.cli.{verb}_command")
    importlib.import_module("align_circuits.papers.experiments")
    columns = ("rounds", "kills", "KILL", "TERM", "INT", "while it wrote", "lost", "half", "different")
    print(f"{'verb':<22}" + "".join(f"{column:>{len(column) + 2}}" for column in columns), flush=True)
    total: Counter[str] = Counter()
    for place, name in enumerate(options.verbs):
        share = options.kills // len(options.verbs) + (place < options.kills % len(options.verbs))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "run").mkdir()
            counts = soak(name, share, random.Random(f"{options.seed} {name}"), Path(folder) / "run")
        counts = Counter({key.removeprefix("SIG"): count for key, count in counts.items()})
        total += counts
        print(f"{name:<22}" + "".join(f"{counts[column]:>{len(column) + 2}}" for column in columns), flush=True)
    print(f"{'all':<22}" + "".join(f"{total[column]:>{len(column) + 2}}" for column in columns))
    raise SystemExit(bool(total["lost"] or total["half"] or total["different"]))
