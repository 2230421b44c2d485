"""The verdicts of every kept result, and which thresholds stood in the code before it was kept, by the history of git.

For every table in `docs/results` the commit is found that brought its values, and in the tree just before it the
claims of all experiments. A threshold is *before* if a claim in the same words, or nearly the same, had it there;
*changed* if a claim in the same words had another one; *new* if there was no such claim. History shows when a result
was committed, not when it was first seen; a claim that was worded anew counts as new.

    python benchmarks/preregistered.py

`align-circuits reproduce --list` tells the verdicts, the pages of results the rest.
"""

import ast
import io
import lzma
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from align_circuits.cli.experiments_list import KEPT
from align_circuits.papers.claims import Verdict
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.tables.tables import Table

RESULTS = Path("docs/results")

CODE = ("align_circuits", "benchmarks/beyond", "benchmarks/validation")
"""Where claims stand."""

LIKE = 0.75
"""How alike two wordings of a claim are, from 0 to 1 (`difflib`)."""

FEWEST = 12
"""Letters of its own that a claim must have to be told by them."""

SLOT = "\0"
"""What stands in a claim for a value that is filled in."""

LEVEL = re.compile(r"\{[^{}]*\}")
"""A level of the table that a claim's text names, such as `{div.high:g}`."""


def git(*arguments: str) -> bytes:
    """Returns what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def versions(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the commits that touched a kept table, the earliest first, with the table that each left."""
    for commit in git("log", "--reverse", "--format=%H", "--", str(folder)).decode().split():
        for name, read in (("table.csv.xz", lzma.decompress), ("table.csv", bytes)):
            try:
                text = read(git("show", f"{commit}:{folder}/{name}"))
            except subprocess.CalledProcessError:
                continue
            yield commit, pd.read_csv(io.BytesIO(text), low_memory=False)
            break


def commit_of(folder: Path) -> str:
    """Returns the first commit whose table has today's values, in any order."""
    now = np.sort(Table.load(folder).frame["value"].to_numpy(float))
    for commit, table in versions(folder):
        then = np.sort(table["value"].to_numpy(float)) if "value" in table else np.empty(0)
        if then.shape == now.shape and np.allclose(then, now, atol=1e-9, equal_nan=True):
            return commit
    raise ValueError(f"{folder} differs from what is committed: commit it first")


Written = tuple[str, float, bool]
"""The words of a claim in the code, a threshold, and whether they stand together there."""


def claims_in(commit: str) -> list[Written]:
    """Returns the claims in a commit's code; `SLOT` stands where a value is filled in."""
    folders = git("ls-tree", "--name-only", commit, *CODE).decode().split()  # those that it had
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, *folders))) as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith(".py")]
        trees = [ast.parse(file.read()) for file in files if file is not None]
    imported = {name: value for tree in trees for name, value in _assigned(tree.body)}
    return [claim for tree in trees for claim in _claims_of(tree, imported)]


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names that nodes assign to, with what they assign."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _claims_of(tree: ast.Module, imported: Mapping[str, ast.expr]) -> Iterator[Written]:
    """Yields the claims of a file. Words that stand apart from a threshold, as in a list, have each such threshold.

    Args:
        tree: The file.
        imported: What names of other files stand for, where they are not assigned here.
    """
    constants = {**imported, **dict(_assigned(tree.body))}
    named = [(name, value) for name, value in _assigned(ast.walk(tree)) if isinstance(value, ast.Call)]
    apart: set[float] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (claim := _claim_of(node, constants, named)) is not None:
            words, threshold = claim
            if len(words.replace(SLOT, "")) >= FEWEST:
                yield words, threshold, True
            else:
                apart.add(threshold)
    for node in ast.walk(tree) if apart else ():
        if isinstance(node, ast.expr) and len((words := _text(node) or "").replace(SLOT, "")) >= FEWEST:
            yield from ((words, threshold, False) for threshold in apart)


def _claim_of(
    call: ast.Call, constants: Mapping[str, ast.expr], named: Sequence[tuple[str, ast.Call]]
) -> tuple[str, float] | None:
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("at_least", "at_most"):
        claim, threshold = call.func.value, call.args[0] if call.args else None
        if isinstance(claim, ast.Name):  # the last that was given this name above
            above = [made for name, made in named if name == claim.id and made.lineno <= call.lineno]
            claim = max(above, key=lambda made: made.lineno, default=None)
        text = claim.args[0] if isinstance(claim, ast.Call) and claim.args else None
    elif isinstance(call.func, ast.Name) and call.func.id == "learned" and len(call.args) > 2:  # recall's short form
        text, threshold = call.args[1:3] if isinstance(call.args[0], ast.Name) else call.args[:2]
    elif isinstance(call.func, ast.Name) and call.func.id == "Check":  # before `Claim` was there
        text, threshold = arguments.get("claim", call.args[0] if call.args else None), arguments.get("threshold")
    else:
        return None
    words = SLOT if isinstance(text, ast.Name) else _text(text)
    number = _number(threshold, constants)
    return None if words is None or number is None else (words, number)


def _number(node: ast.expr | None, constants: Mapping[str, ast.expr]) -> float | None:
    """Returns the number that code stands for, such as `1 / 6` or `-EARLIER`; None where it is a parameter."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name) if name in constants:
            return _number(constants[name], {other: of for other, of in constants.items() if other != name})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _number(operand, constants)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            over, under = _number(left, constants), _number(right, constants)
            return None if over is None or not under else over / under
    return None


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return LEVEL.sub(SLOT, node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else SLOT for part in node.values)
        return LEVEL.sub(SLOT, text)
    return None


def thresholds_of(words: str, claims: list[Written]) -> tuple[set[float], bool]:
    """Returns the thresholds of the claims in these words, or of the most alike one, and whether the words are these.

    Where several fit, such as one that is filled in almost whole, those with most letters of their own count.
    """
    fits: dict[int, set[tuple[float, bool]]] = {}
    for own in (words, words.partition(": ")[2]):  # of several arms, each names its claims first
        for text, threshold, together in claims:
            letters = len(text.replace(SLOT, ""))
            pattern = ".*".join(map(re.escape, text.split(SLOT)))
            if letters >= FEWEST and re.fullmatch(pattern, own, re.DOTALL):
                fits.setdefault(letters, set()).add((threshold, together))
    if fits:
        best = fits[max(fits)]
        these = max(fits) >= len(words) / 3  # of a claim that is filled in almost whole, the words are another's
        return {threshold for threshold, _ in best}, these and all(together for _, together in best)
    alike = [
        (SequenceMatcher(None, text.replace(SLOT, ""), words).ratio(), of) for text, of, together in claims if together
    ]
    likest = max(alike, default=(0.0, 0.0))
    return ({likest[1]} if likest[0] >= LIKE else set()), False


def rows() -> Iterator[dict[str, object]]:
    """Yields a row for each kept table whose experiment has claims."""
    known: dict[str, list[Written]] = {}
    for name, experiment in EXPERIMENTS.items():
        for folder in sorted(RESULTS.glob(f"{experiment.study.name.replace('/', '-')}/*")):
            checks = experiment.check(Table.load(folder))
            if not checks:
                continue
            commit = commit_of(folder)
            if commit not in known:
                known[commit] = claims_in(f"{commit}^")
            found = [thresholds_of(check.claim, known[commit]) for check in checks]
            before = sum(check.threshold in old for check, (old, _) in zip(checks, found, strict=True))
            changed = sum(same and check.threshold not in old for check, (old, same) in zip(checks, found, strict=True))
            day = git("show", "--no-patch", "--format=%as", commit).decode().strip()
            about = {"experiment": name, "scale": folder.name, "commit": commit[:7], "date": day}
            yield {
                **about,
                "claims": len(checks),
                **{each: sum(check.verdict == each for check in checks) for each in get_args(Verdict)},
                "before": before,
                "changed": changed,
                "new": len(checks) - before - changed,
            }


if __name__ == "__main__":
    frame = pd.DataFrame(rows())
    frame.to_csv(str(KEPT), index=False)
    print(frame.to_string(index=False))
    print(frame.sum(numeric_only=True).to_string())
