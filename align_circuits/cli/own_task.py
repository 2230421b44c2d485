"""Tasks of the user's own, which `--task package.module:Class` or `--task path/file.py:Class` names."""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from align_circuits.jobs.identity import Unidentified, identity_of
from align_circuits.tasks.task import Task


def load_task(name: str) -> Task:
    """Imports a task by name: `package.module:Class` or `path/file.py:Class`.

    Importing runs the code that the user names; no other part of the package imports code from a path. As Python does
    for a script, the folder of a file, or the working directory for a module, joins `sys.path`. In place of a class the
    name may lead to an object, `file.py:task` with `task = Class(length=5)`.

    Raises:
        ValueError: The name has another form, cannot be imported, or does not lead to a `Task`.
    """
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute.isidentifier()):
        raise ValueError(f"--task {name}: give package.module:Class or path/file.py:Class")
    found = _imported(name, module)
    kind = getattr(found, attribute, None)
    if isinstance(kind, Task):
        return kind
    tasks = [key for key, of in vars(found).items() if _is_task(of) and of.__module__ == found.__name__]
    if not _is_task(kind):
        what = f"has no {attribute!r}" if kind is None else f"has {attribute!r}, which is no Task"
        known = f"its tasks are {', '.join(tasks)}" if tasks else "write one, a subclass of align_circuits.Task"
        raise ValueError(f"--task {name}: {module} {what}; {known}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ValueError(f"--task {name}: {attribute} does not define {', '.join(missing)}")
    try:
        return kind()
    except TypeError as error:
        raise ValueError(
            f"--task {name}: {error}. A class is called without arguments: give them defaults, or write "
            f"`task = {attribute}(...)` in {module} and give --task {module}:task"
        ) from error


def identity_of_task(task: Task) -> str | None:
    """Returns what tells a task's code and settings from others; None if they cannot be told."""
    try:
        return identity_of(task)
    except Unidentified:
        return None


def _is_task(kind: object) -> TypeGuard[type[Task]]:
    return isinstance(kind, type) and issubclass(kind, Task)


def _imported(name: str, module: str) -> ModuleType:
    """The module that a name leads to, which is imported."""
    path = Path(module).resolve() if module.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(f"--task {name}: there is no file {module}")
    folder = str(Path.cwd() if path is None else path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = import_module(module if path is None else path.stem)
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            remedy = "run it from the folder that holds it, install it, or give path/file.py:Class"
            raise ValueError(f"--task {name}: no module {error.name!r} can be imported; {remedy}") from error
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({at.filename}, line {at.lineno})"
        raise ValueError(f"--task {name}: importing it raised {type(error).__name__}: {error}{where}") from error
    if path is not None and Path(str(found.__file__)).resolve() != path:
        raise ValueError(
            f"--task {name}: Python already has a module {path.stem!r}, {found.__file__ or 'a built-in one'}: rename "
            f"{path.name}"
        )
    return found
