"""Tasks of the user's own, which `--task package.module:Class` or `--task path/file.py:Class` names."""

from typing import TypeGuard

from align_circuits.jobs.identity import Unidentified, identity_of
from align_circuits.jobs.own_code import load_own, names_in
from align_circuits.tasks.task import Task


def load_task(name: str) -> Task:
    """Imports a task by name: `package.module:Class` or `path/file.py:Class` (`load_own`).

    In place of a class the name may lead to an object, `file.py:task` with `task = Class(length=5)`.

    Raises:
        ValueError: The name has another form, cannot be imported, or does not lead to a `Task`.
    """
    found, kind = load_own("--task", name)
    if isinstance(kind, Task):
        return kind
    module, _, attribute = name.rpartition(":")
    if not _is_task(kind):
        what = f"has no {attribute}" if kind is None else f"has {attribute}, which is no Task"
        tasks = names_in(found, lambda value: _is_task(value) or isinstance(value, Task))
        if not module:
            module, what = name, f"is a file: name one of its tasks, as {name}:Name"
        known = f"it has {tasks}" if tasks else "write one, a subclass of align_circuits.Task"
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
