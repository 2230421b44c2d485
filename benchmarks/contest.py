"""What the scripts that measure speed share: options, clock, turns, a random Llama, and the table that is kept."""

import argparse
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

Row = tuple[str, str, str, float, float, float, int]
"""Sweep, contestant, measure; median, least and most of the rounds, and their number."""

COLUMNS = ["sweep", "contestant", "measure", "value", "low", "high", "n"]


def command_line(doc: str | None, rounds: int | None = None, *, out: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a script, with `--rounds` if their default number is given, and with `--out` if asked."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if out:
        parser.add_argument("--out", help="a folder for the table; low and high are its least and most")
    return parser


def processor() -> str:
    """Returns what the machine calls its processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def now(device: str = "cpu") -> float:
    """Returns seconds: of the process if it has one thread, else of the clock, on a GPU once that is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Callable[[], Any], device: str = "cpu") -> tuple[float, Any]:
    """Returns how long a call took, in seconds, and what it returned."""
    started = now(device)
    result = run()
    return now(device) - started, result


def seconds(run: Callable[[], Any], device: str = "cpu") -> float:
    """Returns how long a call took."""
    return timed(run, device)[0]


def in_turn(
    runs: Mapping[str, Callable[[], Any]], rounds: int, measure: Callable[..., Any] = seconds
) -> dict[str, list[Any]]:
    """Returns what `measure` says of each contestant in each round, within which all take turns."""
    turns = [{name: measure(run) for name, run in runs.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in runs}


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Returns one contestant's times over another's, round by round."""
    return [one / other for one, other in zip(of, to, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median with the least and the most."""
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} [{least}, {most}]"


def rows_of(sweep: str, measured: Mapping[tuple[str, str], Sequence[float]]) -> list[Row]:
    """Prints and returns a row for each contestant and measure."""
    return show((sweep, *key, median(v), min(v), max(v), len(v)) for key, v in measured.items())


def show(rows: Iterable[Row]) -> list[Row]:
    """Prints and returns rows."""
    found = list(rows)
    for row in found:
        print("{:56s} {:36s} {:36s} {:10.3g} [{:.3g}, {:.3g}], n = {}".format(*row), flush=True)
    return found


def keep(rows: Sequence[Row], arguments: argparse.Namespace, **settings: Any) -> None:
    """Writes the table to the folder `--out`, if one is given; `settings` come before those of the command line."""
    if arguments.out:
        given = {name: value for name, value in vars(arguments).items() if name != "out"}
        device = given.get("device", "cpu")
        machine = processor() if device == "cpu" else torch.cuda.get_device_name()
        about = {**given, "threads": torch.get_num_threads(), "processor": machine, **settings}
        Table(pd.DataFrame(rows, columns=COLUMNS), Provenance("benchmark", about)).save(arguments.out)


def random_llama(layers: int, width: int, heads: int = 8, key_heads: int = 4, vocabulary: int = 64, **more: Any) -> Any:
    """Returns a random Llama of Hugging Face, its weights large enough that heads differ.

    Args:
        layers: How many.
        width: Of the residual stream.
        heads: Of a layer.
        key_heads: Of a layer.
        vocabulary: Its tokens.
        **more: What else its configuration says.
    """
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "initializer_range": width**-0.5,
    }
    return LlamaForCausalLM(LlamaConfig(**shape | more)).eval()
