"""Code of the user's own that an option names, as package.module:name or path/file.py:name."""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def load_own(option: str, name: str) -> tuple[ModuleType, Any]:
    """Returns the module that a name begins with, and what it holds under the rest of the name; None for nothing.

    Importing runs the code that the user names; no other part of the package imports code from a path. As Python does
    for a script, the folder of a file, or the working directory for a module, joins `sys.path`.

    Args:
        option: The option that the name was given for, such as `--task`.
        name: `package.module:name` or `path/file.py:name`; a file alone holds nothing under its name.

    Raises:
        ValueError: The name has another form, or its module cannot be imported.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon and name.endswith(".py"):
        return _imported(f"{option} {name}", name), None
    if not (module and colon and attribute.isidentifier()):
        raise ValueError(f"{option} {name}: give package.module:name or path/file.py:name")
    imported = _imported(f"{option} {name}", module)
    return imported, getattr(imported, attribute, None)


def names_in(module: ModuleType, wanted: Any) -> str:
    """Returns the names in a module of what it defines itself and is `wanted`, a function to a bool, in a list."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and wanted(value)}
    return ", ".join(key for key, value in own.items() if getattr(value, "__module__", None) == module.__name__)


def _imported(asked: str, module: str) -> ModuleType:
    """The module of this name or in this file, imported; errors begin with what was asked for."""
    path = Path(module).resolve() if module.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(f"{asked}: there is no file {module}")
    folder = str(Path.cwd() if path is None else path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = import_module(module if path is None else path.stem)
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            remedy = "run it from the folder that holds it, install it, or give path/file.py:name"
            raise ValueError(f"{asked}: no module {error.name!r} can be imported; {remedy}") from error
        raised_in = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({raised_in.filename}, line {raised_in.lineno})"
        raise ValueError(f"{asked}: importing it raised {type(error).__name__}: {error}{where}") from error
    if path is not None and Path(str(imported.__file__)).resolve() != path:
        raise ValueError(
            f"{asked}: Python already has a module {path.stem!r}, {imported.__file__ or 'a built-in one'}: rename "
            f"{path.name}"
        )
    return imported
