"""Types of arguments, checked at the public functions: what came, what is allowed, and what to do."""

import numbers
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

T = TypeVar("T", bound=Callable[..., Any])

if TYPE_CHECKING:
    Tokenizer = Any
else:

    class _WithMethods(type):
        """The type of what has a tokenizer's methods, also those that it delegates, which a protocol would not see."""

        def __instancecheck__(cls, instance: object) -> bool:
            return all(hasattr(instance, name) for name in ("decode", "convert_ids_to_tokens", "all_special_ids"))

    class Tokenizer(metaclass=_WithMethods):
        """A Hugging Face tokenizer, or what has its methods."""


MOST_TOKENS = 2**23
"""The most tokens in prompts that are made at once: they take some ten seconds and gigabytes."""

BYTES_A_TOKEN = 110
"""About how many bytes prompts take for each token, and beside it for each target: more with a task's references."""
BYTES_A_TARGET = 280
BYTES_A_REFERENCE = 700

_REMEDIES = {
    "HookedModel": "load it with align_circuits.load",
    "Prompts": "make them with a task, Prompts.from_texts or Prompts.from_tokens",
    "Pair": "make one with Pair(clean, corrupted)",
    "Task": "give a task such as Seq2SeqTask(), or Prompts of your own",
    "Table": "give what a function such as score_heads returned",
    "Tokenizer": "give model.tokenizer, or what transformers.AutoTokenizer.from_pretrained returns",
    "RunOptions": "give RunOptions(engine=..., batch_size=...)",
}
"""What to do where an object of the package is missing."""

_OF_THE_PAIR = {"metric": "metric", "metrics": "metric", "kind": "kind", "direction": "direction"}
"""Arguments that people give to functions of pairs, and what they are of the pair."""


class WrongArgument(TypeError):
    """An argument of a public function that is of a type it cannot take; the command line shows it as one line."""


def checked(function: T) -> T:
    """Makes a public function, or the constructor of a class, refuse arguments of wrong types in a sentence.

    Raises:
        WrongArgument: When called: an argument that does not fit its annotation.
    """
    if isinstance(function, type):
        # Not a wrapper around the class, which would break isinstance and subclasses.
        function.__init__ = checked(function.__init__)  # pyright: ignore[reportAttributeAccessIssue]
        return function  # pyright: ignore[reportReturnType]

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # At the call and not at the definition, where annotations may name classes that do not exist yet.
        known, hints = _annotations(function)
        try:
            given = known.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(name for name in known.parameters if name not in ("self", "cls"))
            meant = next((hint for name in kwargs if (hint := _meant(name, known.parameters))), "")
            kinds = [type(value).__name__ for value in (*args, *kwargs.values())]
            if "pair" in known.parameters and kinds.count("Prompts") > 1:
                meant = f", since clean and corrupted prompts are one argument: {_REMEDIES['Pair']}"
            raise WrongArgument(f"{_name(function)}: {error}{meant}; it takes {names}") from None
        for name, value in given.arguments.items():
            if isinstance(value, np.generic):  # a number from an array or a table
                given.arguments[name] = value.item()
            if name in hints:
                several, arguments = known.parameters[name].kind, given.arguments[name]
                named: Mapping[str, Any] = {name: arguments}
                if several is Parameter.VAR_KEYWORD:
                    named = arguments
                elif several is Parameter.VAR_POSITIONAL:
                    named = {f"{name}[{index}]": item for index, item in enumerate(arguments)}
                for argument, item in named.items():
                    check_argument(_name(function), argument, item, hints[name])
        return function(*given.args, **given.kwargs)

    return wrapper  # pyright: ignore[reportReturnType]


def _meant(name: str, known: Mapping[str, Any]) -> str:
    """What a person means by the name of an argument that a function does not have, as far as one can tell."""
    if name in known:
        return ""
    if close := get_close_matches(name, known, n=1, cutoff=0.75):
        return f", did you mean {close[0]}=?"
    if "pair" in known and name in _OF_THE_PAIR:
        return f", since it belongs to the pair: Pair(clean, corrupted, {_OF_THE_PAIR[name]}=...)"
    return ", did you mean panels=?" if "panels" in known and name in ("metric", "metrics") else ""


def listed(one_or_several: Any) -> list[Any]:
    """Returns several metrics as a list; one alone, a name or a function, may come without."""
    if isinstance(one_or_several, str) or callable(one_or_several):
        return [one_or_several]
    return list(one_or_several)


@cache
def _annotations(function: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """The signature of a function and the resolved types of its parameters."""
    hints = get_type_hints(function)
    return signature(function), {name: hint for name, hint in hints.items() if name != "return" and hint is not Any}


def check_argument(function: str, name: str, value: Any, hint: Any) -> None:
    """Raises a WrongArgument unless a value, such as an argument of a function, is of a type."""
    kinds = _alternatives(hint)
    if any(_fits(value, kind) for kind in kinds):
        return None
    lists = [kind for kind in kinds if _is_list(kind)]
    dicts = [kind for kind in kinds if _is_mapping(kind)]
    if dicts and isinstance(value, Mapping):
        of_keys, of_values = get_args(dicts[0])
        for key, item in value.items():
            if _item_fits(key, of_keys) and not _item_fits(item, of_values):
                return check_argument(function, f"{name}[{key!r}]", item, of_values)
    if lists and isinstance(value, list | tuple):  # the first item that does not fit says more than the whole
        index = next(index for index, item in enumerate(value) if not _item_fits(item, get_args(lists[0])[0]))
        name, value, hint = f"{name}[{index}]", value[index], get_args(lists[0])[0]
        kinds = _alternatives(hint)
        lists = [kind for kind in kinds if _is_list(kind)]
    names = [getattr(kind, "__name__", "") for kind in kinds]
    remedy = next((f"; {_REMEDIES[kind]}" for kind in names if kind in _REMEDIES), "")
    if lists:
        remedy = f"; give a list, [{value!r}]" if isinstance(value, str) else remedy
        if isinstance(value, types.FunctionType) and _item_fits(value, get_args(lists[0])[0]):
            remedy = f"; give a list, [{value.__name__}]"
        remedy = "; give a list, by .tolist()" if hasattr(value, "tolist") else remedy
    if isinstance(value, list | tuple) and len(value) == 1 and any(_fits(value[0], kind) for kind in kinds):
        remedy = f"; give it alone, {getattr(value[0], '__name__', repr(value[0]))}"
    if isinstance(value, str) and {int, float} & {*kinds} and re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", value):
        remedy = f"; give the number, {value.strip()}"
    if name.startswith("positions[") and any(hasattr(kind, "array_type") for kind in kinds):
        remedy = "; give a mask, prompts.mask_of(name), of a position that was named when the prompts were made"
    elif name.partition("[")[0] == "positions" and isinstance(value, int) and str in kinds and int not in kinds:
        remedy = "; name it when the prompts are made, positions={'P': 3}, and give its name, or give masks by name"
    if name.startswith("keys[") and kinds == [str] and isinstance(value, list | tuple):
        remedy = f"; give the names one by one: from_positions(query, {', '.join(map(repr, value))})"
    raise WrongArgument(f"{function}: {name} is {described(value)}, not {_in_words(hint)}{remedy}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; what lies deeper than the items of a list is left to the function."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Literal:  # which texts are allowed is for the function to say
        return any(isinstance(value, type(choice)) for choice in inner)
    if hint in (int, float, complex):
        number = numbers.Integral if hint is int else numbers.Real
        # To Python True is an integer; as a number of heads or steps it is a mistake.
        return isinstance(value, number) and not isinstance(value, bool | np.bool_)
    if hasattr(hint, "array_type"):  # of jaxtyping: shape and dtype are for the function to judge
        return _fits(value, hint.array_type)
    if _is_list(hint):
        if isinstance(value, np.ndarray | torch.Tensor):
            return bool(inner) and inner[0] in (int, float, bool)
        if not isinstance(value, Iterable if origin is Iterable else Sequence) or isinstance(value, str | bytes):
            return False
        return not isinstance(value, Sequence) or all(_item_fits(item, inner[0]) for item in _to_check(value, inner[0]))
    if origin is tuple and Ellipsis not in inner:
        numeric = all(kind in (int, float) for kind in inner)
        return (
            isinstance(value, tuple | list)
            and len(value) == len(inner)
            and (not numeric or all(_fits(item, kind) for item, kind in zip(value, inner, strict=True)))
        )
    if _is_mapping(hint):
        return isinstance(value, Mapping) and all(
            _item_fits(key, inner[0]) and _item_fits(item, inner[1]) for key, item in value.items()
        )
    if isinstance(origin, type):
        return callable(value) if origin is Callable else isinstance(value, origin)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _to_check(items: Sequence[Any], hint: Any) -> Iterable[Any]:
    """One item of each type where the type alone decides, so that long lists of numbers or texts take no time."""
    by_type = all(kind in (int, float, str) for kind in _alternatives(hint))
    return {type(item): item for item in items}.values() if by_type else items


def _item_fits(item: Any, hint: Any) -> bool:
    kinds = _alternatives(hint)
    if str in kinds and any(get_origin(kind) is tuple for kind in kinds):
        return True  # a head, which `heads_of` reads in all the ways that people write it
    return any(_fits(item, kind) for kind in kinds)


def described(value: Any) -> str:
    """Returns what a value is, in a few words."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}" + ("..." if len(value) > 40 else "")
    kind = type(value).__name__
    kind = f"{'an' if kind[0].lower() in 'aeio' else 'a'} {kind}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{kind} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, list | tuple | set | dict):
        return f"{kind} of {len(value)}" + (f" ({described(next(iter(value)))}, ...)" if value else "")
    return kind


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the hint alone."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _is_list(hint: Any) -> bool:
    return get_origin(hint) in (Sequence, Iterable, list)


def _is_mapping(hint: Any) -> bool:
    return isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping)


def _in_words(hint: Any) -> str:
    """The type that is allowed, as a person says it."""
    if len(kinds := _alternatives(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_in_words, kinds)))
    origin, inner = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if _is_list(hint):
        if inner and {get_origin(kind) or kind for kind in _alternatives(inner[0])} == {tuple, str}:
            return "a list of heads"  # or of edges' ends, which are heads too
        return f"a list ({_in_words(inner[0])})" if inner else "a list"
    if hasattr(hint, "array_type"):
        return f"a tensor [{hint.dim_str}]"
    if origin is tuple:
        return f"a tuple ({', '.join(_in_words(kind) for kind in inner)})"
    if _is_mapping(hint):
        return f"a dict ({' -> '.join(_in_words(kind) for kind in inner)})"
    if origin is Callable:
        return "a function"
    names = {"int": "an int", "float": "a number", "str": "a text", "bool": "True or False"}
    names |= {"HookedModel": "a model", "Any": "anything"}
    name = getattr(hint, "__name__", str(hint))
    return names.get(name, name)


def size_of(tokens: int, targets: int, *, references: bool) -> int:
    """Returns about how many bytes prompts take, in all: within a third, from some ten thousand tokens up."""
    return tokens * BYTES_A_TOKEN + targets * (BYTES_A_TARGET + references * BYTES_A_REFERENCE)


def check_size(tokens: int, targets: int, what: str, *, references: bool = False) -> None:
    """Raises a ValueError if prompts are too many, or too long, to be made at once.

    Args:
        tokens: In all prompts together.
        targets: In all prompts together.
        what: What was asked for.
        references: Whether targets have the references of a task.
    """
    if tokens > MOST_TOKENS:
        needed = size_of(tokens, targets, references=references)
        raise ValueError(
            f"{what} are {tokens:,} tokens, some {needed / 1e9:.1f} GB: give fewer or shorter prompts, "
            f"at most {MOST_TOKENS:,} tokens at a time, in parts with several seeds"
        )


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")
