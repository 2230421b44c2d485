"""How many small faults would the tests notice? `make mutants` plants them one by one, in a copy of the tree.

cosmic-ray says what to change (a number, an operator, a comparison, a condition, a decorator, a loop). Places are drawn
at random, from each module in proportion to its lines of code, and one change at each. A run of the suite under
coverage says which tests execute which line, and how long they take; a mutant meets those, fastest first (those of its
own room count as several times as fast), until one fails. All are forked from one process: where the body of a function
changes, every module and test is imported there already; else the mutated copy is imported afresh.

    python tests/mutants.py map [MODULES]    # which test executes which line; of some modules, tests that import one
    python tests/mutants.py run --seed 1     # resumes where it stopped
    python tests/mutants.py show --seed 1    # the share that died, and the survivors

Annotations, what is raised or warned, progress bars and assertions are left alone. Survivors that no test can tell from
the code are named in `mutants_equivalent.toml`.
"""

# ruff: noqa: F401 - `warm` imports for those who are forked from it
# pyright: reportMissingImports=false
# cosmic-ray and coverage are in an environment of their own, .venv-mutants.
import argparse
import ast
import difflib
import gc
import importlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import parso
from cosmic_ray.operators.provider import OperatorProvider

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "mutants"
CORE = [
    "hooks/**/*.py",
    "align_circuits/heads/*.py",
    "align_circuits/circuits/*.py",
    "align_circuits/prompts/*.py",
    "align_circuits/tables/intervals.py",
    "align_circuits/tables/p_values.py",
    "align_circuits/run/*.py",
]
TESTS = [
    *(
        f"tests/{room}/test_*.py"
        for room in ("prompts", "tables", "jobs", "run", "hooks", "circuits", "heads", "tasks")
    ),
    "tests/test_doors.py",
    "tests/test_left_as_found.py",
    "tests/models/test_gguf_files.py",
    "tests/papers/recall/test_pretraining_of_recall.py",  # of task vectors
]
OF_ALL_MODULES = [  # these look at signatures and decorators, and execute no line
    "tests/test_doors.py::test_a_kind_of_edit_says_what_it_changes",
    "tests/test_doors.py::test_as_many_controls_are_drawn_as_a_verdict_asks_for",
    "tests/test_doors.py::test_dataclasses_are_frozen",
    "tests/test_doors.py::test_edits_of_every_kind_show_themselves_alike",
    "tests/test_doors.py::test_every_argument_may_be_given_by_name",
    "tests/test_doors.py::test_every_public_function_checks_its_arguments",
    "tests/test_doors.py::test_every_seed_is_0_by_default",
    "tests/test_doors.py::test_thresholds_are_shares_or_small_losses",
    "tests/test_doors.py::test_what_holds_arrays_or_functions_compares_by_identity",
    "tests/test_left_as_found.py::test_every_public_function_of_a_model_makes_the_promise",
]
SLOWEST = 30.0  # seconds: a test that takes longer meets no mutant
ENOUGH = 60.0  # seconds of tests, as they take on the sound code: what survives these meets `run --wider`
OWN_ROOM = 5  # so many times as fast the tests count that are of the mutant's own room: they know best what it does
UNTOLD = 98  # what a fork exits with that could not plant its fault in place: `--again` will tell
QUIET = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported before pytest starts


# Like for like: others of cosmic-ray's replacements raise wherever they are executed, and any test notices.
KINDS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitAnd", "BitOr", "BitXor"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)


def of_one_kind(name):
    """Whether this operator puts like for like."""
    _, *ends = name.split("_")
    return (
        not name.startswith("Variable")
        and not name.endswith("_Not")
        and ("Operator_" not in name or "Unary" in name or any(kind >= set(ends) for kind in KINDS))
    )


OPERATORS = {name: OperatorProvider()[name] for name in OperatorProvider() if of_one_kind(name)}
PROSE = ("warnings.warn", "TypeVar", "cast", "progress_bar", "bar.update")


def modules(patterns):
    return sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})


def untested(tree):
    """Spans of source in which a change tests nothing: annotations, type aliases, what is raised or warned."""
    spans = []
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom):
            parts.append(node)
        if isinstance(node, ast.Assert):
            parts.append(node.msg)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PROSE:
            parts += node.args
        if isinstance(node, ast.keyword) and node.arg == "strict" and ast.unparse(node.value) == "True":
            parts.append(node)  # an assertion
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            parts.append(node.args[1])
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Float", "Int", "Bool"):
            parts.append(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):  # Kind = A | B
            leaves = [leaf for leaf in ast.walk(node.value) if isinstance(leaf, ast.expr)]
            if all(isinstance(leaf, ast.BinOp | ast.Name | ast.Attribute | ast.Subscript) for leaf in leaves) and (
                isinstance(node.targets[0], ast.Name) and node.targets[0].id.istitle()
            ):
                parts.append(node)
        spans += [
            ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
            for part in parts
            if part is not None
        ]
    return spans


def lines_of_code(source):
    """Lines that hold code: no blanks, comments or docstrings."""
    code = {line for line, text in enumerate(source.splitlines(), 1) if text.strip() and text.strip()[0] != "#"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def function_at(tree, line):
    """The name of the innermost function or class that holds a line; None outside of all."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else None


def nodes(node):
    yield node
    for child in getattr(node, "children", []):
        yield from nodes(child)


def places(source):
    """`{(line, column): [(operator, which occurrence of it), ...]}` of one module."""
    counts, found, spans = Counter(), defaultdict(list), untested(ast.parse(source))
    operators = {name: operator() for name, operator in OPERATORS.items()}
    for node in nodes(parso.parse(source)):
        if node.type in ("name", "string", "newline"):  # most nodes, and none that an operator changes
            continue
        for name, operator in operators.items():
            for start, _ in operator.mutation_positions(node):
                names = node.type == "comparison" and any(child.type == "string" for child in node.children)
                if names and not name.endswith(("_Eq_NotEq", "_NotEq_Eq")):  # the order of names means nothing
                    counts[name] += 1
                    continue
                if not any(first <= start < last for first, last in spans):
                    found[start].append((name, counts[name]))
                counts[name] += 1
    return found


def mutated(source, name, occurrence):
    """The source with that one change."""
    operator, count = OPERATORS[name](), 0

    def walk(node):
        nonlocal count
        for index, _ in enumerate(operator.mutation_positions(node)):
            if count == occurrence:
                count += 1
                return operator.mutate(node, index)
            count += 1
        if hasattr(node, "children"):
            node.children = [new for new in map(walk, node.children) if new is not None]
        return node

    return walk(parso.parse(source)).get_code()


def broken(source):
    """Whether it is no Python: the `*` of a signature is an operator to cosmic-ray."""
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return True
    return False


def sample(patterns, number, seed):
    """Mutants as dictionaries: module, line, operator, occurrence, and the lines before and after."""
    draw = random.Random(seed)
    sources = {module: (ROOT / module).read_text() for module in modules(patterns)}
    sizes = {module: lines_of_code(source) for module, source in sources.items()}
    chosen = []
    for module, source in sources.items():
        share = number * sizes[module] / sum(sizes.values())
        wanted = int(share) + (draw.random() < share % 1)
        where = places(source)
        for line, column in draw.sample(sorted(where), min(wanted, len(where))):
            for name, occurrence in draw.sample(where[line, column], len(where[line, column])):
                after = mutated(source, name, occurrence)
                if not broken(after):
                    break
            else:
                continue
            changed = [
                text
                for text in difflib.ndiff(source.splitlines(), after.splitlines())
                if text[0] in "+-" and text[1] == " "
            ]
            old, new = ("\n".join(text[2:].strip() for text in changed if text[0] == sign) for sign in "-+")
            key = f"{module}:{line}:{column} {name} {occurrence}"
            chosen.append({"key": key, "module": module, "line": line, "name": name, "occurrence": occurrence})
            chosen[-1] |= {"old": old, "new": new, "function": function_at(ast.parse(source), line)}
    draw.shuffle(chosen)
    return chosen


def copy_of_the_tree(folder):
    """Replaces `folder` by a copy of all that the tests read."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT,
        folder,
        symlinks=True,
        ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "docs", ".hypothesis", "build", "dist"),
    )


class Chosen:
    """Runs these tests and no others, in this order."""

    def __init__(self, tests):
        self.order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


class Stopwatch:
    """Seconds, outcome and executed lines of every test."""

    def __init__(self, coverage):
        self.coverage, self.seconds, self.failed = coverage, Counter(), set()

    def pytest_runtest_logstart(self, nodeid):
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def warm():
    """Imports once what every test needs and no mutant touches."""

    import beartype.claw
    import circuitsvis
    import datasets
    import hypothesis
    import peft
    import plotly.graph_objects
    import pytest
    import scipy.stats
    import sklearn.linear_model
    import torch
    import transformer_lens
    import transformers.convert_slow_tokenizer
    import transformers.models.llama.modeling_llama

    torch.set_num_threads(1)


def pytest_in(folder, arguments, *plugins):
    """pytest's exit status, in this process."""
    import pytest

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    return pytest.main(
        ["-q", "-x", "-m", "", "-p", "no:cacheprovider", "--tb=line", *QUIET, *arguments], plugins=plugins
    )


def watched(folder, files, out):
    """Runs these test files in this process, and writes what each test executed."""
    import coverage

    coverage = coverage.Coverage(data_file=None, include=[f"{folder}/align_circuits/*", f"{folder}/hooks/*"])
    watch = Stopwatch(coverage)
    coverage.start()
    pytest_in(folder, ["--maxfail=1000", *files], watch)
    coverage.stop()
    data, lines = coverage.get_data(), {}
    for file in data.measured_files():
        tests = data.contexts_by_lineno(file).items()
        lines[str(Path(file).relative_to(folder))] = {line: [test for test in of if test] for line, of in tests}
    out.write_text(json.dumps({"seconds": watch.seconds, "failed": sorted(watch.failed), "lines": lines}))


def imports(test, module):
    """Whether a test file names a module in one of its imports."""
    name = "align_circuits." + module.removeprefix("align_circuits/").removesuffix(".py").replace("/", ".")
    found = [node for node in ast.walk(ast.parse((ROOT / test).read_text())) if isinstance(node, ast.ImportFrom)]
    return any(name in (node.module, f"{node.module}.{alias.name}") for node in found for alias in node.names)


def draw_map(arguments):
    folder = arguments.scratch.resolve() / "tree"
    copy_of_the_tree(folder)
    warm()
    wanted = arguments.files or modules(CORE)
    files = [test for test in modules(TESTS) if not arguments.files or any(imports(test, name) for name in wanted)]
    for chunk in [[file] for file in (*files, *wanted)]:  # the modules' own examples are tests too
        out = OUT / "map" / (chunk[0].replace("/", ".") + ".json")
        out.parent.mkdir(exist_ok=True)
        if out.exists():
            continue
        forked(lambda chunk=chunk, out=out: watched(folder, chunk, out), 1200.0, arguments.scratch)
        found = json.loads(out.read_text())
        print(chunk[0], len(found["seconds"]), "tests;", "failed or skipped:", found["failed"], flush=True)


def read_map():
    """Seconds of each sound test, and `{module: {line: its tests}}`."""
    seconds, lines = {}, defaultdict(lambda: defaultdict(set))
    for path in (OUT / "map").glob("*.json"):
        found = json.loads(path.read_text())
        seconds |= {test: took for test, took in found["seconds"].items() if test not in found["failed"]}
        for module, of in found["lines"].items():
            module = module.replace("align_circuits/hooks/", "hooks/")  # seen through the symlink
            for line, tests in of.items():
                lines[module][int(line)].update(tests)
    return seconds, lines


def lines_with(source, line) -> range:
    """The lines whose execution executes this place: its statement; for a signature or a decorator, its function.

    None for what is executed as the module is imported."""
    best, inside = None, False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if first <= line <= node.end_lineno:
                inside |= isinstance(node, ast.FunctionDef)
                best = (first, node) if best is None or first >= best[0] else best
    if best is None or not inside:
        return range(0)
    first, node = best
    body = getattr(node, "body", None)
    if body is None or isinstance(node, ast.FunctionDef):
        return range(first, (node.end_lineno or first) + 1)
    return range(first, body[0].lineno)


def tests_of(mutant, seconds, lines):
    """Tests that execute the mutant's place, those of its room and the fastest first."""
    lines = lines[mutant["module"]]
    near = lines_with((ROOT / mutant["module"]).read_text(), mutant["line"])
    tests = {test for line in near for test in lines[line]}
    if not tests:  # executed as the module is imported: a constant, a class
        tests = {test for tests in lines.values() for test in tests}
    if not mutant["in_place"]:
        tests = tests.union(OF_ALL_MODULES)
    room = Path(mutant["module"]).parent.name
    mirrors = (f"tests/{room}/", f"tests/test_{Path(mutant['module']).stem}.py")
    return sorted(
        (test for test in tests if seconds.get(test, SLOWEST) < SLOWEST),
        key=lambda test: (seconds[test] / (OWN_ROOM if test.startswith(mirrors) else 1), test),
    )


def forked(work, limit, scratch):
    """`work()` in a fork of this process: its exit status, None after `limit` seconds; and the seconds it took."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 99
        try:
            status = int(work() or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    while time.monotonic() - began < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, time.monotonic() - began
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, limit


def parts(code):
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def meaning(code, deep=True):
    """What code does, without its lines and columns; of the functions in it only that they are there, unless `deep`."""
    consts = [(deep and meaning(part)) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags, consts


def changed_function(before, after):
    """Code before and after of the function whose body was changed; None where importing the module would tell."""
    if meaning(before, deep=False) != meaning(after, deep=False):
        return None
    pairs = [pair for pair in zip(parts(before), parts(after), strict=True) if meaning(pair[0]) != meaning(pair[1])]
    if len(pairs) != 1 or pairs[0][0].co_name.startswith("<"):
        return None
    return pairs[0] if pairs[0][0].co_flags & inspect.CO_OPTIMIZED else changed_function(*pairs[0])


def in_a_function(mutant):
    source = (ROOT / mutant["module"]).read_text()
    codes = (compile(text, "", "exec") for text in (source, mutated(source, mutant["name"], mutant["occurrence"])))
    return changed_function(*codes) is not None


def swap(sound, path, before, after):
    """Changes one function of a module where it lives. Whether that was possible."""
    # What `align_circuits` imports lazily no collection of tests has imported.
    module = importlib.import_module(".".join(path.relative_to(sound).with_suffix("").parts).removesuffix(".__init__"))
    loader: Any = module.__loader__
    pair = changed_function(*(loader.source_to_code(source.encode(), str(path)) for source in (before, after)))
    if pair is None:
        return False
    name = (pair[0].co_qualname, pair[0].co_firstlineno, pair[0].co_filename)
    found = 0
    for thing in gc.get_objects():
        if type(thing) is FunctionType:
            code = thing.__code__
            if (code.co_qualname, code.co_firstlineno, code.co_filename) == name:
                thing.__code__ = pair[1]
                found += 1
    return found > 0


def meet(mutant, tests, seconds, scratch, sound):
    """Whether a test fails on the mutant: `died`, `timeout` or `survived`; and the seconds it took.

    The mutant is a copy of the tree, imported afresh; or, where `sound`, a copy of the sound tree, is imported already,
    a function changed in place."""
    before = (ROOT / mutant["module"]).read_text()
    after = mutated(before, mutant["name"], mutant["occurrence"])
    files = sorted({test.split("::")[0] for test in tests})
    limit = 40 + 4 * sum(seconds[test] for test in tests)
    if sound is None:
        folder = scratch.resolve() / "tree"
        copy_of_the_tree(folder)
        path = folder / mutant["module"]
        path.write_text(after)
        for cached in (path.parent / "__pycache__").glob(path.stem + ".*"):
            cached.unlink()
        status, took = forked(lambda: pytest_in(folder, files, Chosen(tests)), limit, scratch)
    else:
        path = sound / ("align_circuits" if mutant["module"].startswith("hooks") else "") / mutant["module"]

        def changed_in_place():
            return pytest_in(sound, files, Chosen(tests)) if swap(sound, path, before, after) else UNTOLD

        status, took = forked(changed_in_place, limit, scratch)
    if status is None:
        return "timeout", took
    # pytest's status: 1, a test failed; 2, it could not be collected
    died = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) in (1, 2)
    return "died" if died else "survived" if status == 0 else "error", took


def read(path):
    """Results so far; of a mutant met twice the last."""
    if not path.exists():
        return {}
    return {result["key"]: result for result in map(json.loads, path.read_text().splitlines())}


def run(arguments):
    seconds, lines = read_map()
    path = OUT / f"seed-{arguments.seed}.jsonl"
    before = read(path)
    if arguments.again:  # survivors of this seed, after a test was sharpened
        todo = [result for result in before.values() if result["outcome"] in ("survived", "error")]
        todo = [result | {"in_place": False} for result in todo]
    else:
        seen = {key for other in OUT.glob("seed-*.jsonl") for key in read(other)}
        todo = sample(arguments.files or CORE, arguments.number, arguments.seed)
        todo = [mutant | {"in_place": in_a_function(mutant)} for mutant in todo if mutant["key"] not in seen]
        todo.sort(key=lambda mutant: mutant["in_place"])
    warm()
    sound = None
    for place, mutant in enumerate(todo, 1):
        tests, total = [], 0.0
        for test in tests_of(mutant, seconds, lines):
            total += seconds[test]
            if total > ENOUGH and tests and not arguments.wider:
                break
            tests.append(test)
        if mutant["in_place"] and sound is None:  # from here on the forks find every module and test imported
            sound = arguments.scratch.resolve() / "sound"
            copy_of_the_tree(sound)
            pytest_in(sound, ["--collect-only", "-qq", *sorted({test.split("::")[0] for test in seconds})])
        outcome, took = meet(mutant, tests, seconds, arguments.scratch, sound) if tests else ("survived", 0.0)
        last = (arguments.scratch / "log").read_text().strip().splitlines()[-3:] if tests else ["no test executes it"]
        result = mutant | {"outcome": outcome, "seconds": round(took, 1), "tests": len(tests), "last": last}
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{place}/{len(todo)} {outcome} {took:.0f} s {mutant['key']}", flush=True)
    show(arguments)


def names(entry, result):
    """Whether an entry of `mutants_equivalent.toml` is about this mutant: all that it says but the reason."""
    return all(result.get(key, value) == value for key, value in entry.items() if key != "reason")


def stands(entry):
    """Whether the line that an entry of `mutants_equivalent.toml` names is still in its module."""
    lines = {line.strip() for line in (ROOT / entry["module"]).read_text().splitlines()}
    return all(line in lines for line in entry["old"].split("\n"))


def show(arguments):
    entries = tomllib.loads((ROOT / "tests" / "mutants_equivalent.toml").read_text()).get("equivalent", [])
    for entry in entries:
        if not stands(entry):
            print(f"mutants_equivalent.toml: {entry['module']} has no line {entry['old']!r}: mend or remove the entry")
    results = read(OUT / f"seed-{arguments.seed}.jsonl").values()
    living = [result for result in results if result["outcome"] == "survived"]
    errors = sum(result["outcome"] == "error" for result in results)
    told = [result for result in living if not any(names(entry, result) for entry in entries)]
    for result in told:
        print(f"\n{result['key']} ({result['tests']} tests)\n- {result['old']}\n+ {result['new']}")
    died = len(results) - len(living) - errors
    print(f"\n{len(results)} mutants: {died} died, {len(living)} survived, {len(living) - len(told)} of them", end="")
    print(f" equivalent; of the others {died / max(died + len(told), 1):.1%} died")
    if errors:
        print(f"{errors} were not judged, since pytest broke off: run them with --again")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run", "show"])
    parser.add_argument("files", nargs="*", help="modules to mutate; the core without them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--again", action="store_true", help="only the survivors of this seed")
    parser.add_argument("--wider", action="store_true", help="all tests that execute the place, however long")
    parser.add_argument("--scratch", type=Path, default=OUT / "scratch", help="folder of the mutated copies")
    arguments = parser.parse_intermixed_args()
    OUT.mkdir(parents=True, exist_ok=True)
    arguments.scratch = arguments.scratch.resolve()  # pytest changes the working folder
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    {"map": draw_map, "run": run, "show": show}[arguments.what](arguments)


if __name__ == "__main__":
    main()
