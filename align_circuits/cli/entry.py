"""The entry point: reads the arguments, runs the verb, and turns errors into one line."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from align_circuits.cli.folders import results_folder

PROGRAM = "align-circuits"

VERBS = {
    "score": "Score every attention head: how well it follows the alignment, looks phrases up, and more.",
    "evaluate": "Evaluate a model: its accuracy by kind of target and offset, with reference accuracies.",
    "ablate": "Ablate every head alone: what the model loses without it.",
    "patch": "Patch every head from clean into corrupted prompts: what it restores.",
    "attribute": "Estimate what patching every head would do, from gradients.",
    "localize": "Find the heads that align and those that look up, and test whether the model needs them.",
    "tune": "Tune a model with LoRA and follow how alignment emerges; a run that was stopped resumes.",
    "pretrain": "Train a small Llama from scratch by a recipe of the package; a run that was stopped resumes.",
    "reproduce": "Reproduce a figure or table of a paper and test its claims.",
    "rerun": "Repeat a run from its provenance and compare the numbers.",
}


def verb_class(name: str) -> type[Any]:
    """Returns the class of a verb, a subclass of `Verb`."""
    return getattr(import_module(f"align_circuits.cli.{name}_command"), name.capitalize())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `align-circuits VERB ...` and returns the exit status.

    Bad input, a full disk and an interrupt end in one line on stderr and status 2 (an interrupt: 130). Results are
    moved to their folder together, once they are complete.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in VERBS:
        return _help(arguments)
    name, *options = arguments
    import tyro
    from safetensors import SafetensorError

    from align_circuits.checks import WrongArgument  # after the verb, since both import torch

    verb = tyro.cli(verb_class(name), args=options, prog=f"{PROGRAM} {name}", description=VERBS[name])
    verb = verb.with_defaults(options)
    try:
        with results_folder(verb.folder, Path("runs") / name, overwrite=verb.overwrite, renews=verb.renews) as results:
            complaint = verb(results)
    except (ValueError, KeyError, FloatingPointError, ImportError, WrongArgument) as error:
        return _refuse(error.args[0] if error.args else str(error))
    except (OSError, SafetensorError) as error:  # such as a full disk; both write files
        return _refuse(f"cannot read or write a file, earlier results are as they were: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        _refuse("interrupted: nothing was written but what the same command goes on from")
        return 130
    return 0 if complaint is None else _refuse(complaint)


def _help(arguments: Sequence[str]) -> int:
    """Prints the verbs, unless the arguments name one that does not exist."""
    if arguments and arguments[0] not in ("-h", "--help"):
        return _refuse(f"no verb {arguments[0]!r}: choose one of {', '.join(VERBS)}")
    print(f"usage: {PROGRAM} VERB [OPTIONS]\n")
    for name, description in VERBS.items():
        print(f"  {name:<10} {description}")
    print(f"\n{PROGRAM} VERB --help lists the options of a verb.")
    return 0 if arguments else 2


def _refuse(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 2
