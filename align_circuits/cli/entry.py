"""The entry point: reads the arguments, runs the verb, and turns errors into one line."""

import gc
import logging
import os
import re
import sys
import warnings
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, TextIO, cast

from align_circuits.cli.folders import results_folder
from align_circuits.jobs.control_characters import printable
from align_circuits.jobs.similar_names import did_you_mean

PROGRAM = "align-circuits"

GROUPS = {
    "Measure a model": {
        "score": "Score every attention head: how far it attends where your relations, or the task's, say it should.",
        "evaluate": "Evaluate a model on prompts: accuracy and other metrics, for a task beside reference accuracies.",
        "ablate": "Ablate heads, each alone or some together: what the model loses without them.",
        "patch": "Patch every head from clean into corrupted prompts: what it restores.",
        "attribute": "Estimate what patching every head would do, from gradients.",
        "localize": "Name the heads that attend as your relations, or the task's, say; test if the model needs them.",
    },
    "Compare methods": {"benchmark": "Compare methods that find heads, on circuits whose heads are known."},
    "Train a model": {
        "tune": "Tune a model with LoRA and follow how alignment emerges; a stopped run resumes (same --out).",
        "pretrain": "Train a small model from scratch by a recipe of the package; a stopped run resumes (same --out).",
    },
    "Repeat results": {
        "reproduce": "Reproduce a figure or table of a paper and test its claims.",
        "each": "Run a verb for several models, seeds and settings, as jobs; with means over seeds.",
        "collect": "Write the rows of the jobs that are done, while others run.",
        "rerun": "Repeat a run from its provenance and say whether the numbers are the same.",
        "compare": "Put two runs side by side: settings, claims and numbers that differ.",
    },
}

VERBS = {name: description for group in GROUPS.values() for name, description in group.items()}
"""The verbs that write results, by name."""

NOTHING = "(?!)"
PROGRESS = r"\A\r|\r\Z|\A(?:\x1b\[A)+\Z"
"""How a progress bar moves, as an expression: to the start of its line, and up by lines."""

MACHINE = "model and machine options"
LEFT_OUT = (MACHINE, "task options", "workers options")
"""The sections of the help of a verb that `--help` leaves out and `--help all` prints."""

OTHERS = {
    "status": "Say how far a run of jobs or a shared sweep is: done, running, failed, time left.",
    "open": "Open the report of a run in the browser, or print its path where there is no display.",
    "completion": "Print the completions for a shell: bash, zsh or tcsh.",
}
"""The verbs that write nothing."""

RESUMED = ("tune", "pretrain", "reproduce", "benchmark", "each")
"""The verbs that go on from where they were interrupted; sweeps do so if they keep parts."""

ANEW = "nothing is kept, and the same command begins anew"
"""What an interrupt leaves of all other verbs."""


def verb_class(name: str) -> type[Any]:
    """Returns the class of a verb, a subclass of `Verb`."""
    return getattr(import_module(f"align_circuits.cli.{name}_command"), name.capitalize())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `align-circuits VERB ...` and returns the exit status.

    Bad input, a full disk and an interrupt end in one line on stderr and status 2 (an interrupt: 130). Results are
    moved to their folder together, once they are complete; also if whoever reads the output stops reading.
    """
    if arguments is None:
        with uncollected():
            return main(sys.argv[1:])
    out, err = Output(sys.stdout, NOTHING), Output(sys.stderr, PROGRESS)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)), warnings_as_lines():
        try:
            return _main(arguments)
        except KeyboardInterrupt:  # also while libraries are imported
            return _interrupted(ANEW)
        finally:
            out.flush()  # here, where a closed pipe is no error, and not when the interpreter ends
            err.flush()


@contextmanager
def uncollected() -> Iterator[None]:
    """Spares what a process imports the garbage collector, which would look through a million objects many times.

    They all live until the process ends. For a process that runs one verb: whatever there is when the verb begins, and
    when it ends, is never collected. What it makes between is.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "--version":
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        return 0
    if not arguments or arguments[0] not in VERBS | OTHERS:
        return _help(arguments)
    name, *options = arguments
    if name in OTHERS:
        return _other(name, options)
    own = options[: options.index("--")] if "--" in options else options  # behind it the options of another verb
    if {"-h", "--help"} & {*own}:
        print(_help_of(name, everything=[*own, ""][own.index("-h" if "-h" in own else "--help") + 1] == "all"), end="")
        return 0
    verb = parse_verb(name, *options)
    if not gc.isenabled():  # see `uncollected`
        gc.freeze()
        gc.enable()
    from safetensors import SafetensorError

    from align_circuits.checks import WrongArgument  # after the verb, since both import torch

    folder = None
    try:
        with results_folder(verb.folder, Path("runs") / name, overwrite=verb.overwrite, renews=verb.renews) as results:
            folder = results.folder
            complaint = verb(results)
    except KeyboardInterrupt:
        workers, parts = (getattr(verb, option, None) for option in ("workers", "parts"))
        if name in RESUMED and folder is not None:
            return _interrupted(f"--out {folder} goes on from here")
        shared = parts is not None or (workers is not None and workers != type(workers)())
        return _interrupted("the same command goes on from the parts that are kept" if shared else ANEW)
    except (ValueError, KeyError, FloatingPointError, ImportError, WrongArgument) as error:
        # The first argument of an error of Unicode is the name of an encoding.
        said = error.args[0] if error.args and not isinstance(error, UnicodeError) else error
        return _refuse(in_options(str(said), type(verb)))
    except (OSError, SafetensorError) as error:  # such as a full disk; both write files
        return _refuse(f"cannot read or write a file, earlier results are as they were: {' '.join(str(error).split())}")
    return 0 if complaint is None else _refuse(complaint)


def parse_verb(name: str, *options: str) -> Any:
    """Returns a verb with its options; wrong ones end the process, as `--help` does."""
    import tyro

    kind, out, err = verb_class(name), StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            read = tyro.cli(kind, args=options, prog=f"{PROGRAM} {name}", description=VERBS[name])
    except SystemExit:
        print(_unboxed(out.getvalue()), end="")
        if error := err.getvalue():
            _refuse(f"{_in_a_sentence(kind, _unboxed(error))} ({PROGRAM} {name} --help)")
        raise
    return read.with_defaults(options)  # may warn, such as of a broken experiment of another package


def _help_of(verb: str, *, everything: bool) -> str:
    """The help of a verb, by default without the sections that few need."""
    text = (Path(__file__).parent / "help" / f"{verb}.txt").read_text(encoding="utf-8")
    first, *sections = re.split(r"\n(?= [\w ]+ options\n -)", text)
    if everything or f" {MACHINE}" not in text:
        return text
    shown = [first, *(section for section in sections if section.split("\n")[0].strip() not in LEFT_OUT)]
    more = {"the model and the machine": "--device", "the translation task": "--x-len", "workers": "--jobs"}
    parts = "".join(f"\n  of {of} ({option} ...)" for of, option in more.items() if f"  {option} " in text)
    return "\n".join(shown).rstrip() + f"\n\n{PROGRAM} {verb} --help all also lists the options{parts}\n"


def in_options(message: str, verb: type[Any]) -> str:
    """Returns an error in which the fields of a verb, which are arguments in Python, are written as its options.

    >>> from align_circuits.cli.entry import verb_class
    >>> in_options("batch_size=0: give a positive number", verb_class("score"))
    '--batch-size 0: give a positive number'
    """
    parts = [verb, *(field.default_factory for field in fields(verb))]
    names = "|".join(sorted({field.name for part in parts if is_dataclass(part) for field in fields(part)}))

    def option(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        name, value = match[1].replace("_", "-"), match[2].strip("'")
        return {"True": f"--{name}", "False": f"--no-{name}"}.get(value, f"--{name} {value}")

    def bare(match: re.Match[str]) -> str:  # a single word may be a word of the sentence
        return f"--{match[0].replace('_', '-')}" if "_" in match[0] else match[0]

    # Code that someone has to write, `sample(self, n, seed=0)`, stays as it is.
    message = re.sub(rf"\(self, .*?\)|(?<![-\w.])({names})=('[^']*'|-?[\w.]*\w)", option, message)
    return re.sub(rf"(?<![-\w.=/'\"])({names})(?![-\w.=/'\"])", bare, message)


def _help(arguments: Sequence[str]) -> int:
    """Prints the verbs, unless the arguments name one that does not exist."""
    if arguments and arguments[0] not in ("-h", "--help"):
        names = [*VERBS, *OTHERS]
        return _refuse(f"no verb {arguments[0]!r}: {did_you_mean(arguments[0], names)}choose one of {', '.join(names)}")
    print(f"usage: {PROGRAM} VERB [OPTIONS]")
    for group, verbs in (GROUPS | {"More": OTHERS}).items():
        print(f"\n{group}:")
        for name, description in verbs.items():
            print(f"  {name:<10} {description}")
    print(f"\n{PROGRAM} VERB --help lists the main options of a verb, VERB --help all every one.")
    print(f"{PROGRAM} --version prints the version.")
    return 0 if arguments else 2


def _other(name: str, options: Sequence[str]) -> int:
    """Runs a verb of one argument, or prints its help, and returns the exit status."""
    usage, run = {
        "status": ("FOLDER, an --out of `reproduce`, `each` or `benchmark`, a --parts, or runs", _status),
        "open": ("FOLDER, such as runs/score/latest", _open),
        "completion": ("bash|zsh|tcsh > FILE, where the shell looks for completions", _completion),
    }[name]
    usage = f"usage: {PROGRAM} {name} {usage}"
    if options in (["-h"], ["--help"]):
        print(f"{usage}\n\n{OTHERS[name]}")
        return 0
    if len(options) != 1 or (name == "completion" and options[0] not in ("bash", "zsh", "tcsh")):
        return _refuse(usage)
    try:
        run(options[0])
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot read {options[0]!r} ({error.strerror})")
    return 0


def _status(folder: str) -> None:
    """Prints how far the runs in a folder are."""
    from align_circuits.cli.collect_command import print_progress

    print_progress(Path(folder))


def _open(name: str) -> None:
    """Opens a report, or that of a folder."""
    path = Path(name)
    report = (path / "report.html" if path.is_dir() else path).resolve()
    if report.suffix != ".html" or not report.is_file():
        raise ValueError(f"no report in {name!r}: give a folder that a verb wrote, which has a report.html")
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(report.as_uri())
    print(report)


def _completion(shell: str) -> None:
    """Prints the completions of all verbs with their options."""
    import tyro

    verbs: dict[str, Any] = {name: verb_class(name) for name in VERBS}
    with suppress(SystemExit):  # how tyro ends once it has printed
        tyro.extras.subcommand_cli_from_dict(verbs, prog=PROGRAM, args=["--tyro-print-completion", shell])


class Output:
    """A stream that escapes control characters and what its encoding lacks, and drops what is no longer read.

    `align-circuits score | head -1` still writes its results.
    """

    def __init__(self, stream: Any, allowed: str):  # no TextIO: beartype refuses what pytest puts in its place
        self.raw = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # None where it is closed
        self._allowed = re.compile(f"({allowed})")

    def write(self, text: str) -> int:
        """Writes a text, or drops it if the pipe is closed."""
        pieces = self._allowed.split(text)  # every other part is what is allowed
        shown = "".join(piece if index % 2 else printable(piece) for index, piece in enumerate(pieces))
        encoding = getattr(self.raw, "encoding", None) or "utf-8"
        with self._or_dropped():
            self.raw.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or drops what waits if the pipe is closed."""
        with self._or_dropped():
            self.raw.flush()

    @contextmanager
    def _or_dropped(self) -> Iterator[None]:
        """Points the stream of a closed pipe to the null device, where what it still holds goes as well."""
        try:
            yield
        except BrokenPipeError:
            with Path(os.devnull).open("w") as null:
                os.dup2(null.fileno(), self.raw.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints the warnings of the block as a line each, like errors, without the code that they come from.

    What the package logs for whoever calls it from Python is left out.
    """
    logger, before = logging.getLogger("align_circuits"), warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{PROGRAM}: {message}\n"
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        warnings.formatwarning = before
        logger.setLevel(logging.NOTSET)


def _unboxed(text: str) -> str:
    """What the parser prints, without its boxes."""
    lines = []
    for line in text.splitlines():
        inner = line.strip("─│╭╮╰╯├┤").rstrip()
        if inner.strip() or not line.strip():
            lines.append(inner.removeprefix(" ") if inner != line.rstrip() else inner)
    return "".join(f"{line}\n" for line in lines)


def _in_a_sentence(verb: type[Any], error: str) -> str:
    """What the parser says of a wrong option, in a sentence with names of options, and with the choice meant."""
    body = [*re.split(r"\n\s*-{9,}\n", error), ""][1]
    said = " ".join(in_options(body, verb).split())
    if wrong := re.match(r"Error parsing (--\S+): .*?(base 10|to float): '(.*?)'", said):
        return f"{wrong[1]} {wrong[3]}: give a {'whole ' * (wrong[2] == 'base 10')}number"
    if wrong := re.match(r"Error parsing (--\S+): Could not .* arguments:? \[(.*?)\]", said):
        values = " ".join(re.findall("'(.*?)'", wrong[2]))
        return f"{wrong[1]} {values}: give whole numbers"
    if wrong := re.match(r"(?:Error parsing \S+: )?invalid choice '(.*?)' for argument '(.*?)'. .* \((.*)\)", said):
        names = sorted({*re.findall("'(.*?)'", wrong[3])} - {"None"})
        return f"{wrong[2]} {wrong[1]}: {did_you_mean(wrong[1], names)}choose one of {', '.join(names)}"
    if wrong := re.match(r"Missing value for argument '(.*?)'. Expected (\d+)", said):
        return f"{wrong[1]}: give {'a value' if wrong[2] == '1' else f'{wrong[2]} values'}"
    if wrong := re.match(r"Unrecognized options: ([^\s,=]+)", said):
        name = verb.__name__.lower()
        known = {each: re.findall(r"^  (--[\w-]+)", _help_of(each, everything=True), re.MULTILINE) for each in VERBS}
        others = [each for each in VERBS if wrong[1] in known[each]]
        meant = f"an option of {' and '.join(others)}; " if others else did_you_mean(wrong[1], known[name])
        return f"no option {wrong[1]} of {name}: {meant}--help all lists the options"
    said = re.sub(r"^Error parsing \w+: ", "", said)  # of options that begin with no dash
    said = re.sub(rf"^Missing from {PROGRAM} \w+: (\S+) (.*?)\. \(required\).*", r"missing \1: \2", said)
    usage = _help_of(verb.__name__.lower(), everything=True).partition("\n")[0]
    name, *paths = re.sub(r"\[.*?\]", "", usage).split()[2:]
    return f"{name} takes {' '.join(paths)}; {said}" if len(paths) > 1 else said


def _interrupted(left: str) -> int:
    """Says what an interrupt leaves, and returns its exit status."""
    _refuse(f"interrupted: no results were written; {left}")
    return 130


def _refuse(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 2
