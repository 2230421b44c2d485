"""What the verbs cost at the shapes of Llama 3: random weights in bf16, prompts of m = 8, c = 4, k = 15, real tokens.

A bare forward pass; `score_heads` with all its metrics; `patch_heads` on z of some heads, evenly spread over layers,
with the query corrupted; TransformerLens's `patching` on fewer of them, for each of which it runs the whole prompt,
after the cache that it patches from; nnsight, if it is installed, does the same on Hugging Face's model with its fused
attention. Nothing is scaled up. Memory is the peak above the weights: of the GPU, or on a
CPU, with Linux, by how much the process grows. On a CPU a small `--heads` and `--layers` keep it to minutes.

    python benchmarks/real_shapes.py [--shape 1b] [--device cuda] [--out FOLDER]
"""

import ctypes
import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from contest import Row, command_line, in_turn, keep, ratios, rows_of, timed
from probe_rows import resident
from transformer_lens import patching
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

import align_circuits as ac
from align_circuits.hooks.attention import raw_attention

TASK = ac.Seq2SeqTask(x_len=8, phrase_len=4, n_examples=15)
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
}
"""Llama 3.2 1B and Llama 3.1 8B: 32 heads with 8 key heads, 128,256 tokens."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns Llama 3's, which the package `llama-models` carries."""
    found = importlib.util.find_spec("llama_models")
    if found is None or found.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps llama-models: Llama 3's tokenizer is in it")
    path = Path(found.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    fast = TikTokenConverter(vocab_file=str(path), extra_special_tokens=special).converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[1],
        clean_up_tokenization_spaces=False,
    )


def network(shape: str, layers: int | None, device: str) -> LlamaForCausalLM:
    """Returns the random Llama."""
    size: dict[str, Any] = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(
        **size, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=4096
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def measured(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Returns how long a call takes, in seconds, and how far memory rises, in GB."""
    gc.collect()
    if device == "cpu":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what earlier calls left would be used again, and not be seen
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
        before = resident("VmRSS")
        seconds, _ = timed(run)
        return seconds, (resident("VmHWM") - before) * 2**20 / 1e9
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds, _ = timed(run, device)
    return seconds, (torch.cuda.max_memory_allocated() - before) / 1e9


def with_nnsight(hf: LlamaForCausalLM, clean: Any, corrupted: Any, log_prob: Any) -> Callable[[list[Any]], None]:
    """Returns what patches z of heads from the clean prompts into the corrupted ones, a run for each, by nnsight."""
    from nnsight import NNsight

    model: Any = NNsight(hf)
    d_head = hf.config.hidden_size // hf.config.num_attention_heads

    def patch(heads: list[Any]) -> None:
        with model.trace(clean):
            found: Any = list()  # noqa: C408 - nnsight gives objects, not literals, a method
            values = found.save()
            for layer in model.model.layers:
                values.append(layer.self_attn.o_proj.input.clone())
        for layer, head in heads:
            where, value = slice(head * d_head, (head + 1) * d_head), values[layer]
            with model.trace(corrupted):
                model.model.layers[layer].self_attn.o_proj.input[:, :, where] = value[:, :, where]
                logits = model.output.logits.save()
            log_prob(logits)

    return patch


def compare(
    model: Any, peer: LlamaForCausalLM | None, prompts: int, heads: int, theirs: int, rounds: int, device: str
) -> list[Row]:
    """Prints and returns what each contestant costs."""
    clean = TASK.sample(prompts, model.tokenizer, references=False)
    corrupted = TASK.corrupt(clean, "query")
    every = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    step = max(1, len(every) // heads)
    some = every[min(5, step - 1) :: step][:heads]  # of each layer not always the first
    few = pd.DataFrame(some[:: max(1, len(some) // max(1, theirs))][:theirs], columns=["layer", "head"])
    rows, queries, gold = clean.column("prompt"), clean.column("query_pos"), clean.column("token")
    plain = model.original_model

    def log_prob(logits: torch.Tensor) -> torch.Tensor:
        return logits[rows, queries].float().log_softmax(-1).cpu().gather(1, gold[:, None]).mean()

    def bare() -> None:
        with raw_attention(model):
            plain(clean.tokens.to(device), logits_to_keep=queries.unique().to(device), use_cache=False)

    cached: list[Any] = []

    def cache() -> None:
        tokens = clean.tokens.to(device)
        cached[:] = [model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_z"))[1]]

    def patch() -> None:
        options: Any = {"index_axis_names": None, "index_df": few}
        patching.get_act_patch_attn_head_out_all_pos(model, corrupted.tokens.to(device), cached[0], log_prob, **options)

    contestants: dict[str, Callable[[], object]] = {
        "bare forward (SDPA)": bare,
        "score_heads": lambda: ac.score_heads(model, clean),
        f"patch_heads ({len(some)} of {len(every)} heads)": lambda: ac.patch_heads(
            model, ac.Pair(clean, corrupted), heads=some
        ),
    }
    if theirs:
        contestants |= {
            "TransformerLens, the cache": cache,
            f"TransformerLens ({len(few)} of {len(every)} heads)": patch,
        }
    if theirs and peer is not None:
        inputs = [each.tokens.to(device) for each in (clean, corrupted)]
        run_peer, heads_of_peer = with_nnsight(peer, *inputs, log_prob), few.to_numpy().tolist()
        contestants[f"nnsight ({len(few)} of {len(every)} heads)"] = lambda: run_peer(heads_of_peer)
    with torch.no_grad():
        bare()  # warms up
        found = in_turn(contestants, rounds, partial(measured, device=device))
    length = int(clean.mask.sum(1).max())
    about = f"{model.cfg.n_layers} layers of width {model.cfg.d_model}, {prompts} prompts of {length} tokens"
    base = [seconds for seconds, _ in found["bare forward (SDPA)"]]
    values: dict[tuple[str, str], list[float]] = {}
    for name, both in found.items():
        values[name, "seconds"], values[name, "peak memory above the weights, GB"] = map(list, zip(*both, strict=True))
        if name == "score_heads":
            values[name, "times a bare forward"] = ratios(values[name, "seconds"], base)
    return rows_of(about, values)


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5, out=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1024, help="whose z is patched, all if there are no more")
    parser.add_argument("--theirs", type=int, default=8, help="heads that TransformerLens patches; 0 leaves it out")
    parser.add_argument("--memory", type=float, help="of a GPU, this many GB alone: the rest is taken at the start")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        taken = torch.cuda.mem_get_info()[0] - round(arguments.memory * 1e9)
        ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")
    bridge = ac.load(network(arguments.shape, arguments.layers, arguments.device), tokenizer=tokenizer())
    weights = sum(weight.numel() * weight.element_size() for weight in bridge.original_model.parameters()) / 1e9
    print(f"{arguments.shape}: {weights:.2f} GB of weights")
    peer = None
    if importlib.util.find_spec("nnsight") is None:
        print("nnsight: not run, since it is not installed")
    elif arguments.theirs:
        peer = network(arguments.shape, arguments.layers, arguments.device)  # the bridge has changed the other one
    given = arguments.prompts, arguments.heads, arguments.theirs, arguments.rounds, arguments.device
    keep(compare(bridge, peer, *given), arguments, **{"width": bridge.cfg.d_model, "weights, GB": weights})
