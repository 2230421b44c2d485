"""What is checked about the folder of a model, which may come from anywhere, before anything in it is built."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

PATIENCE_S = 5
"""How long the patterns of an adapter may take; sane ones take milliseconds."""

MOST_PACKED = 64
"""How many times the bytes of a file its model may take: float64 made of 2-bit weights takes half as many."""

UNSTORED = 10**9
"""How many bytes more it may take for what no file holds, such as the masks of GPT-2."""

MOST_SETTINGS = 2**24
"""The bytes of the largest file of settings that is read; sane ones have some thousands."""

MOST_HEADER = 2**22
"""The bytes of names in a file of few weights; the thousands of experts of large models have more, and more weights."""

MOST_LABELS = 10_000
"""How many labels a configuration may have, which a decoder does not use."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count")
COUNTS = {*LAYERS, "num_layers_per_stack", "H_cycles", "L_cycles", "attention_types", "num_labels"}
"""The settings of all architectures that say how many parts of a model are built one by one."""

MOST_GROWN = 1000
"""Into how many characters the normalizer of a tokenizer may turn one; Unicode's forms need 18."""

MOST_PADDED = 2**20
"""To how many tokens a tokenizer may pad every text."""

_PATTERNS = {
    "target_modules": r"(?:{})\Z",
    "exclude_modules": r"(?:{})\Z",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
}
"""The settings of an adapter that PEFT takes as regular expressions, and what it makes of each."""

_MATCH = (
    "import json, re, sys\npatterns, names = json.load(sys.stdin)\n[re.match(p, n) for p in patterns for n in names]"
)


def settings_in(folder: Path, name: str) -> dict[str, Any]:
    """Returns the settings in one of a folder's JSON files.

    Raises:
        ValueError: The file is huge, no JSON, or no object.
    """
    if (size := (folder / name).stat().st_size) > MOST_SETTINGS:
        raise ValueError(f"{name} in {str(folder)!r} has {readable_size(size)}, which are no settings: correct it")
    try:
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} in {str(folder)!r} is no JSON ({error}): download the folder again") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} in {str(folder)!r} is not a JSON object: download the folder again")
    return settings


def check_safetensors(folder: Path, name: str = "*.safetensors") -> None:
    """Raises a ValueError unless the weights lie in safetensors files of the folder, with names that they need."""
    if not (files := [*folder.glob(name)]):
        raise ValueError(
            f"no safetensors weights in {str(folder)!r}, and pickled ones (.bin, .pt) are not opened, since they can "
            "run code. If you trust them, convert them once: AutoModelForCausalLM.from_pretrained(folder, "
            "use_safetensors=False).save_pretrained(new_folder)"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} in {str(folder)!r} is no file, or a link to none: download the folder again")
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        # A header longer than its file is broken, and told by whoever reads the tensors.
        if MOST_HEADER < header <= file.stat().st_size < 100 * header:
            raise ValueError(
                f"{file.name} in {str(folder)!r} is {readable_size(header)} of names with hardly any weights: download "
                "the folder again"
            )


def check_index(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the weights that a folder's index names are safetensors files of the folder.

    transformers would open others with `torch.load`, and wherever they are.

    Args:
        folder: Of the model.
        settings: What its config.json holds.
    """
    named = settings.get("transformers_weights")
    if named is not None and named != "model.safetensors":
        raise ValueError(
            f"config.json in {str(folder)!r} has transformers_weights={named!r}, another name for the file of the "
            "weights: call that model.safetensors, and take the setting out"
        )
    name = "model.safetensors.index.json"
    if not (folder / name).is_file():
        return
    names = settings_in(folder, name).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(
            f"{name} in {str(folder)!r} has no weight_map from tensors to files: download the folder again"
        )
    folders = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # of the hub's cache, whose files are links
        folders.append(folder.resolve().parents[1] / "blobs")
    for file in sorted({*names.values()}):
        if not file.endswith(".safetensors"):
            raise ValueError(
                f"{name} in {str(folder)!r} names {file!r}: weights are read from safetensors, and pickled ones are "
                "not opened, since they can run code; download the folder again"
            )
        # Resolved too, since a plain name may be a link to anywhere.
        if Path(file).name != file or (folder / file).resolve().parent not in folders or "\0" in file:
            raise ValueError(f"{name} in {str(folder)!r} names {file!r}, which lies outside: put it into the folder")
        if not (folder / file).is_file():
            raise ValueError(f"{name} in {str(folder)!r} names {file!r}, which is missing: download the folder again")


def rows_of(folder: Path, module: str) -> int | None:
    """Returns how many rows a folder's weights have for a module, whatever stands before its name; None without it."""
    suffix = f".{module}.weight"
    return next((tensor.get_shape()[0] for name, tensor in _tensors_in(folder) if name.endswith(suffix)), None)


def shapes_in(folder: Path) -> Iterator[list[int]]:
    """Yields the shapes of the tensors in a folder's safetensors files, whose data is not read.

    Raises:
        ValueError: A file is truncated or no safetensors file.
    """
    yield from (tensor.get_shape() for _, tensor in _tensors_in(folder))


def stored_dtype(folder: Path, config: Any) -> torch.dtype:
    """Returns the dtype of a folder's weights, as transformers reads it: of the configuration, else of the files.

    Raises:
        ValueError: As `shapes_in`.
    """
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    names = (tensor.get_dtype() for _, tensor in _tensors_in(folder))
    return next((_FLOATS[name] for name in names if name in _FLOATS), torch.float32)


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _tensors_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors in a folder's safetensors files with their names; their data is not read."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ValueError(
                f"the weights in {str(folder)!r} cannot be read ({error}): a file is missing, truncated, or no "
                "safetensors file; download the folder again"
            ) from error


def check_counts(path: Path, settings: Mapping[str, Any], tensors: int) -> None:
    """Raises a ValueError if settings count more layers than there are tensors, or more labels than any model has.

    Those are built one by one: 10^9 would take all memory before they are compared with the weights. Other sizes only
    give tensors a shape, which costs nothing.
    """
    for name, value in _numbers_in(settings):
        last = name.rpartition(".")[2]
        if last in COUNTS and value > (MOST_LABELS if last == "num_labels" else tensors):
            raise ValueError(
                f"the configuration in {str(path)!r} says {name}={value:,}, but the weights are {tensors:,} tensors: "
                "download it again, or correct config.json"
            )


def _numbers_in(settings: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers in settings, with the names that they stand under, such as `text_config.num_layers`."""
    if isinstance(settings, int) and not isinstance(settings, bool):
        yield name, settings
    elif isinstance(settings, dict):
        for key, value in settings.items():
            yield from _numbers_in(value, f"{name}.{key}".removeprefix("."))
    elif isinstance(settings, list):
        for value in settings:
            yield from _numbers_in(value, name)


def outline_of(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of a configuration, whose number of layers is plausible, with shapes in place of weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )


def memory_of(outline: PreTrainedModel) -> int:
    """Returns the bytes that a model takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*outline.parameters(), *outline.buffers()))


def memory_of_machine() -> int:
    """Returns the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
"""How accelerate spreads a model by itself."""


def check_device_map(device_map: str | Mapping[str, int | str], outline: PreTrainedModel) -> None:
    """Raises a ValueError unless a device map gives one place that exists to every parameter of a model."""
    remedy = f"give {', '.join(map(repr, PLANS))}, or for each module of the model a GPU's number, 'cpu' or 'disk'"
    if isinstance(device_map, str):
        if device_map not in PLANS:
            raise ValueError(f"device_map={device_map!r}: {remedy}")
        return
    modules, gpus = dict(outline.named_modules()), torch.cuda.device_count()
    for name, device in device_map.items():
        if name not in modules:
            raise ValueError(f"device_map names {name!r}, which is no module of a {type(outline).__name__}: {remedy}")
        number = device if isinstance(device, int) else device.removeprefix("cuda:")
        known = number in ("cpu", "disk") or (str(number).isdecimal() and int(number) < gpus)
        if not known:
            raise ValueError(f"device_map puts {name!r} on {device!r}, but PyTorch finds {gpus} GPUs: {remedy}")
    covered = tuple(f"{name}." if name else "" for name in device_map)
    if missing := [name for name, _ in outline.named_parameters() if not name.startswith(covered)]:
        raise ValueError(f"device_map has no place for {missing[0]!r} and {len(missing) - 1} other tensors: {remedy}")


def check_memory(path: Path, needed: int, stored: int) -> None:
    """Raises a ValueError if a model does not fit into this machine, or is not that of its weights.

    Args:
        path: The folder or file, for the message.
        needed: The bytes that the model takes, by its configuration.
        stored: The bytes of the weights' files.
    """
    memory = memory_of_machine()
    if needed > min(memory, MOST_PACKED * stored + UNSTORED):
        raise ValueError(
            f"a model of the sizes in {str(path)!r} takes {readable_size(needed)} of memory, but its weights' files "
            f"have {readable_size(stored)} and this machine has {readable_size(memory)} of memory: correct "
            "config.json, give a smaller dtype, or take a larger machine"
        )


def check_adapter(folder: Path, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises a ValueError if an adapter's patterns are wrong or take forever, or it counts more than its weights have.

    Args:
        folder: Of the adapter.
        settings: What its adapter_config.json holds.
        names: The modules of its base model.
    """
    largest = max((size for shape in shapes_in(folder) for size in shape), default=0)
    for name, value in _numbers_in(settings):  # such as ranks: matrices would be built before they are compared
        # These give no matrix its size: scales, seeds, names of keys, numbers of layers, and schedules.
        if value > largest and not re.search("alpha|seed|key|indic|layers_to|token|tinit|final|warm|delta|step", name):
            raise ValueError(
                f"the adapter in {str(folder)!r} says {name}={value:,}, but its weights have at most {largest} rows or "
                "columns: download the folder again, or correct adapter_config.json"
            )
    given = {name: setting for name in _PATTERNS if isinstance(setting := settings.get(name), str | list | dict)}
    patterns = {
        _PATTERNS[name].format(pattern): (name, pattern)
        for name in given
        for pattern in ([given[name]] if isinstance(given[name], str) else given[name])
        if isinstance(pattern, str) and not re.fullmatch(r"[\w.-]*", pattern)  # a plain name matches at once
    }
    if not patterns:
        return
    # In a process of its own: a match holds its whole process up, and nothing in that can end it.
    question = json.dumps([[*patterns], [*names]])
    # Isolated: neither the working directory nor variables of the shell choose what it imports.
    command = [sys.executable, "-I", "-c", _MATCH]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        reason = (done.stderr.strip().rpartition("\n")[2] or "it ended at once") if done.returncode else None
    except subprocess.TimeoutExpired:
        reason = f"matching them takes more than {PATIENCE_S} s"
    if reason is not None:
        shown = ", ".join(f"{name} {str(pattern)[:80]!r}" for name, pattern in patterns.values())
        raise ValueError(
            f"the adapter in {str(folder)!r} names modules by regular expressions that cannot be used ({reason}): "
            f"{shown}; name the modules in a list, as in ['q_proj', 'v_proj']"
        )


def check_tokenizer(folder: Path) -> None:
    """Raises a ValueError if a folder's tokenizer makes a short text huge: by its normalizer, or by padding."""
    name = "tokenizer.json"
    if not (folder / name).is_file():
        return
    try:
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # what reads it says what is wrong
    tokenizer = settings if isinstance(settings, dict) else {}
    for step in ("normalizer", "decoder"):
        if (grown := _growth(tokenizer.get(step))) > MOST_GROWN:
            raise ValueError(
                f"the {step} in {name} of {str(folder)!r} makes {grown:,} characters of one: give another tokenizer as "
                "tokenizer="
            )
    padded = max((value for _, value in _numbers_in([tokenizer.get("padding")])), default=0)
    if padded > MOST_PADDED:
        raise ValueError(
            f"{name} of {str(folder)!r} pads every text to {padded:,} tokens: give another tokenizer as tokenizer="
        )


def _growth(normalizer: Any) -> int:
    """Of how many characters, at the most, a normalizer writes one."""
    if not isinstance(normalizer, dict):
        return 1
    # Steps follow each other, so their factors multiply.
    inner = normalizer.get("normalizers") or normalizer.get("decoders") or []
    grown = prod(map(_growth, inner)) if isinstance(inner, list) else 1
    content, pattern = (normalizer.get(key) for key in ("content", "pattern"))
    if isinstance(content, str):
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match nothing, before every character.
        grown *= max(1, len(content) // len(replaced)) if replaced else 1 + len(content)
    return grown * max(1, len(str(normalizer.get("prepend", ""))))


def readable_size(count: int) -> str:
    """A number of bytes, as a person says it."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def one_line(error: Exception) -> str:
    """Returns what an error of another library says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def checked_reading(what: str, remedy: str) -> Iterator[None]:
    """Raises whatever a library raises within as a ValueError, which says what cannot be used, why, and what to do."""
    try:
        yield
    except Exception as error:  # each reader fails in its own way
        raise ValueError(f"{what} ({one_line(error)}): {remedy}") from error
