"""The identity of what a result rests on: a hash of values and code, the same in every process.

Numbers, tensors, tables and objects count with all that they hold; functions and classes of the user's with their code
and all that it refers to. What is installed counts with its version, this package with its files.
"""

import dis
import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

PACKAGE = "align_circuits"

NUMERICAL = ("torch", "transformers", "transformer_lens", "numpy", "pandas")
"""The packages that compute what is kept, beside this one."""


class Unidentified(ValueError):
    """Something whose identity cannot be told."""


def identity_of(value: Any) -> str:
    """Returns a hash of a value, of all that it holds: equal hashes stand for equal results.

    What cannot be told apart, such as a generator, an open file or a module of the user's as a whole, may have an
    attribute `identity`: a text, its name and version, that its user changes whenever its results change.

    Raises:
        Unidentified: There is something of that kind without a text of its own.
    """
    return _Hashes().of(value).hex()[:16]


def told(what: str, value: Any, *, otherwise: str = "") -> str:
    """Returns the identity of what something rests on that is kept and read again.

    Raises:
        ValueError: It cannot be told; the message begins with `what` and ends with `otherwise`.
    """
    try:
        return identity_of(value)
    except Unidentified as error:
        raise ValueError(
            f"{what} could not be told from those of another run, since {error} cannot: give the function or object "
            "that it belongs to an attribute identity, a text with its name and version, which you change with it"
            + otherwise
        ) from error


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute, by name."""
    return {name: _version(name) for name in ("python", *NUMERICAL)}


@cache
def release() -> str:
    """Returns a hash of the code that computes results: of this package's files, and `versions`."""
    sha = hashlib.sha256(repr([*versions().items()]).encode())
    # Some rooms of a checkout are links.
    for folder, rooms, files in os.walk(Path(__file__).parents[1], followlinks=True):
        # In place, which tells `os.walk` the order: that of the disk differs between machines.
        rooms.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                sha.update(name.encode() + (Path(folder) / name).read_bytes())
    return sha.hexdigest()[:16]


def settings_of_the_process() -> dict[str, Any]:
    """Returns the settings of PyTorch that change numbers beyond their last bits."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "dtype": torch.get_default_dtype(),
        "autocast": [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ],
    }


class _Hashes:
    """Hashes of values that may share parts, each of which is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # the value too, or its id could become that of another
        self._depth = 0

    def of(self, value: Any) -> bytes:
        # Exactly these: what is derived from them may hold more.
        if type(value) in (NoneType, bool, int, float, complex, str, bytes, EllipsisType):
            return _sha(type(value).__name__, repr(value))
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        # Found by a value that holds itself, while its parts are being hashed.
        self._known[id(value)] = value, _sha("the same, so many levels up", str(self._depth))
        self._depth += 1
        try:
            digest = self._told(value)
        finally:
            self._depth -= 1
        self._known[id(value)] = value, digest
        return digest

    def _told(self, value: Any) -> bytes:
        try:
            return _sha(*self._parts(value))
        except (Unidentified, TypeError, RecursionError) as error:
            # Asked last: what holds all that tells it apart needs no text that someone must remember to change.
            text = getattr(value, "identity", None)
            if isinstance(text, str):
                kind = value if isinstance(value, type | FunctionType) else type(value)
                return _sha("own", kind.__module__, kind.__qualname__, text)
            if isinstance(error, Unidentified):
                raise
            raise Unidentified(f"{type(value).__module__}.{type(value).__qualname__}") from error

    def _parts(self, value: Any) -> Iterator[str | bytes]:
        """What tells a value from all others."""
        if isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from ("method", value.__name__, self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | None):
            yield from ("method", value.__name__, self.of(value.__self__))
        elif isinstance(value, CodeType):
            yield from self._code(value)
        # Variables of the shell differ everywhere, and would make every result another one.
        elif value is os.environ:
            yield "environ"
        elif isinstance(value, ModuleType):
            if not _is_installed(value.__name__):
                raise Unidentified(f"the module {value.__name__} as a whole")
            yield from ("module", value.__name__, _version(value.__name__))
        elif isinstance(value, nn.Parameter | nn.Buffer):
            yield from ("parameter", str(value.requires_grad), *_tensor(value))
        elif isinstance(value, Tensor):
            yield from _tensor(value)
        elif isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):  # such as with a mask
            yield from ("array", self.of(type(value)), self.of(value.view(np.ndarray)))
            yield self.of(getattr(value, "__dict__", None))
        elif isinstance(value, np.ndarray):
            yield from ("array", str(value.dtype), str(value.shape))
            # The bytes of an array of objects are their addresses.
            yield self.of(value.tolist()) if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
        elif isinstance(value, pd.DataFrame | pd.Series | pd.Index):
            yield from self._pandas(value)
        elif isinstance(value, torch.dtype | torch.device | torch.layout | np.dtype | range | slice | os.PathLike):
            yield from (type(value).__name__, repr(value))
        elif isinstance(value, list | tuple) and type(value).__module__ == "builtins":
            yield from (type(value).__name__, *map(self.of, value))
        elif isinstance(value, set | frozenset):
            # The order of a set differs between processes.
            yield from (type(value).__name__, *sorted(map(self.of, value)))
        elif isinstance(value, Mapping) and type(value).__module__ in ("builtins", "types"):
            yield from ("mapping", *(self.of(entry) for item in value.items() for entry in item))
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str | bytes]:
        """The class of an object and its state, as a copy would be made of it."""
        kind = type(value)
        yield self.of(kind)
        if _is_of_attributes(value):
            members = (member for base in kind.__mro__ for member in vars(base).items())
            cached = {name for name, member in members if isinstance(member, cached_property)}
            yield self.of({name: state for name, state in vars(value).items() if name not in cached})
            return
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):  # found by its name, as what `functools.cache` makes of a function is
            module = getattr(value, "__module__", None) or ""
            if not _is_installed(module) and not hasattr(value, "__wrapped__"):
                raise Unidentified(f"{module}.{reduced}")
            yield from (module, reduced)
            yield _version(module) if _is_installed(module) else self.of(value.__wrapped__)
            return
        # What makes the copy tells nothing more, and is often a private part of a library.
        yield from map(self.of, ([*state] if isinstance(state, Iterator) else state for state in reduced[1:]))

    def _class(self, kind: type) -> Iterator[str | bytes]:
        """An installed class by its name and version, another one by what it and its bases define."""
        yield from ("class", kind.__module__, kind.__qualname__)
        if _is_installed(kind.__module__):
            yield _version(kind.__module__)
            return
        for base in kind.__bases__:
            yield self.of(base)
        for name, member in vars(kind).items():
            if name in _OF_NO_EFFECT or type(member).__name__ in ("getset_descriptor", "member_descriptor"):
                continue
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            elif isinstance(member, property):
                member = [member.fget, member.fset]
            elif isinstance(member, cached_property):
                member = member.func
            yield from (name, self.of(member))

    def _function(self, function: FunctionType) -> Iterator[str | bytes]:
        """An installed function by its name, if that leads to it; another one by its code and what that refers to."""
        yield from ("function", function.__module__ or "", function.__qualname__)
        # A closure or a lambda bears its module's name too, but the version does not tell what it holds.
        if _is_installed(function.__module__) and _at_its_name(function):
            yield _version(function.__module__)
            return
        yield self.of(function.__code__)
        attributes = {name: kept for name, kept in vars(function).items() if name not in ("__wrapped__", "identity")}
        for state in (function.__defaults__, function.__kwdefaults__, attributes, vars(function).get("__wrapped__")):
            yield self.of(state)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield from (name, self.of(cell.cell_contents))
            except ValueError as error:
                if isinstance(error, Unidentified):
                    raise
                yield from (name, "empty")
        for chain in sorted({*_globals(function.__code__)}):
            yield from (".".join(chain), self._reference(chain, function.__globals__))

    def _reference(self, chain: tuple[str, ...], names: Mapping[str, Any]) -> bytes:
        """What a name of the function's module leads to; of modules of the user's, what is taken from them."""
        builtins = names["__builtins__"]
        builtins = vars(builtins) if isinstance(builtins, ModuleType) else builtins
        if chain[0] not in names:
            if chain[0] in _READING:
                raise Unidentified(f"what {chain[0]}() finds")
            return _sha("builtin" if chain[0] in builtins else "unknown", chain[0])
        value, path, module = names[chain[0]], chain[1:], None
        while True:
            if any(value is each for each in _LOADING):
                raise Unidentified(f"what {'.'.join(chain)} finds")
            if module is not None and _is_installed(module.__name__):  # nor do its variables count: `os.environ`
                return _sha("installed", module.__name__, *path, _version(module.__name__))
            path = path if module is None else path[1:]
            if not (path and isinstance(value, ModuleType) and hasattr(value, path[0])):
                return self.of(value)
            module, value = value, getattr(value, path[0])

    def _code(self, code: CodeType) -> Iterator[str | bytes]:
        # What is imported within a function is in no `__globals__`: its code could change unseen.
        imports = [str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
        if imported := [name for name in imports if not (name and _is_installed(name))]:
            raise Unidentified(f"the module {imported[0] or 'beside it'}, imported within a function,")
        found = _FILES & {*code.co_names}
        if {"a", "ab", "w", "wb", "x"} & {*code.co_consts}:  # a method open that writes
            found -= {"open"}
        if found:
            raise Unidentified(f"what {min(found)}() finds")
        # Neither file name nor line numbers, which change with any line above.
        yield from ("code", code.co_code, code.co_exceptiontable, repr(code.co_names), repr(code.co_varnames))
        yield from (repr((code.co_freevars, code.co_cellvars, code.co_argcount, code.co_kwonlyargcount)),)
        yield from (str(code.co_flags), self.of(code.co_consts))

    def _pandas(self, value: pd.DataFrame | pd.Series | pd.Index) -> Iterator[str | bytes]:
        yield type(value).__name__
        if isinstance(value, pd.Index):
            yield from (str(value.dtype), self.of([*value.names]), self.of(value.to_numpy()))
        elif isinstance(value, pd.Series):
            yield from (str(value.dtype), self.of(value.name), self.of(value.index))
            yield self.of(value.to_numpy() if isinstance(value.dtype, np.dtype) else value.to_list())
        else:
            yield from (self.of(value.columns), *(self.of(value.iloc[:, i]) for i in range(value.shape[1])))


_READING = {"open", "globals", "eval", "exec", "__import__"}
"""Functions of Python that read what no name in the code tells."""

_LOADING = (np.load, torch.load, sys.modules)  # noqa: TID251 - not called
"""The same of others, whose names stand for other things too."""

_FILES = {
    *("open", "read_text", "read_bytes", "import_module", "load_file", "safe_open", "load_dataset", "from_jsonl"),
    *("loadtxt", "genfromtxt", "fromfile", "memmap", "loadmat"),
    *("read_csv", "read_table", "read_json", "read_parquet", "read_feather", "read_pickle", "read_excel", "read_hdf"),
}
"""Names of functions and methods that read files or modules, of whatever object they are taken."""

_OF_NO_EFFECT = {
    *("__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__parameters__"),
    *("__orig_bases__", "__match_args__", "__dataclass_params__", "__dataclass_fields__"),
    *("__abstractmethods__", "_abc_impl"),
}
"""Attributes of a class that no result rests on, or that follow from others."""


def _sha(*parts: str | bytes) -> bytes:
    sha = hashlib.sha256()
    for part in parts:
        # Names of files may hold half characters, which plain UTF-8 refuses.
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        # With its length, or ("ab", "c") would hash as ("a", "bc").
        sha.update(len(raw).to_bytes(8, "big") + raw)
    return sha.digest()


def _tensor(value: Tensor) -> Iterable[str | bytes]:
    """Its shape, type, device and bytes."""
    if value.is_meta or value.layout != torch.strided:
        raise Unidentified(f"a tensor on {value.device} of layout {value.layout}")
    # Conjugation and negation may be flags that leave the bytes as they are.
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # As bytes, since numpy has no bfloat16.
    raw = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return ("tensor", str(value.dtype), str(tuple(value.shape)), str(value.device), raw)


def _is_of_attributes(value: Any) -> bool:
    """Whether an object is nothing but its class and its attributes."""
    kind = type(value)
    usual = all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    held = isinstance(value, Mapping | list | tuple | set | int | float | complex | str | bytes)
    return usual and hasattr(value, "__dict__") and not slots and not held


def _globals(code: CodeType) -> Iterator[tuple[str, ...]]:
    """The names outside of it that code reads, each with the attributes that it takes of them at once."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if chain:
                yield tuple(chain)
            chain = [str(instruction.argval)]
        elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(str(instruction.argval))
        # Python 3.11 to 3.13 put these between a name and its attributes.
        elif chain and instruction.opname not in ("CACHE", "PUSH_NULL"):
            yield tuple(chain)
            chain = []
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _at_its_name(function: FunctionType) -> bool:
    at_name = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        at_name = getattr(at_name, name, None)
    return at_name is function


@cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is of Python, of this package or of an installed one: its version tells its code."""
    if not module or module == "__main__":
        return False
    top = module.partition(".")[0]
    if top == PACKAGE or top in sys.builtin_module_names or (top in sys.stdlib_module_names and _is_of_python(top)):
        return True
    package = sys.modules.get(top) or importlib.import_module(top)
    # A namespace package has no file, but several folders.
    file = getattr(package, "__file__", None)
    paths: list[str] = [file] if file else [*getattr(package, "__path__", ())]
    # Not only where this interpreter installs: an environment may read the packages of another one.
    return bool(paths) and all({"site-packages", "dist-packages"} & {*Path(path).parts} for path in paths)


def _is_of_python(top: str) -> bool:
    """Whether a module of a standard name is that of Python, and no file of the user's of the same name."""
    module = sys.modules.get(top)
    spec = find_spec(top) if module is None else module.__spec__
    # Python lacks some of its modules on some machines.
    origin = getattr(spec, "origin", None) if spec or module else "built-in"
    folders = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
    return origin in ("built-in", "frozen") or os.path.realpath(origin or "").startswith(folders)


@cache
def _version(module: str) -> str:
    """The version of the package that a module belongs to."""
    top = module.partition(".")[0]
    if top == PACKAGE:
        return release()
    if top == "python" or top in sys.stdlib_module_names:
        return sys.version
    version = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return ""
