"""What patching all heads costs: `patch_heads` beside TransformerLens's own `patching`.

A random Llama of 4 layers, width 128, 4 heads (2 key heads), 8 prompts of about 150 tokens, float32 on the CPU. Both
patch z of every head at all positions from the clean prompts into the corrupted ones and measure the mean
log-probability of the gold tokens; both make their own clean activations. `patch_heads` also measures accuracy and
computes intervals. The contestants take turns on one thread, and processor time is counted, so that a busy machine
disturbs little; the ratio is the median over rounds of the ratio within a round.

    python benchmarks/patching.py [--rounds 5]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformer_lens import patching
from transformers import LlamaConfig, LlamaForCausalLM

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=8)


def network() -> LlamaForCausalLM:
    """Returns the random Llama, its weights large enough that heads differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def compare(rounds: int) -> None:
    """Prints what each contestant costs, and how far their results lie apart."""
    model = ac.load(network(), tokenizer=char_tokenizer())
    clean = TASK.sample(8, model.tokenizer, references=False)
    corrupted = TASK.corrupt(clean, "query")
    targets, gold = (clean.column("prompt"), clean.column("query_pos")), clean.column("token")[:, None]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[targets].log_softmax(-1).gather(1, gold).mean()

    def theirs() -> torch.Tensor:
        _, cache = model.run_with_cache(clean.tokens, names_filter=lambda name: name.endswith("hook_z"))
        before = metric(model(corrupted.tokens))
        return patching.get_act_patch_attn_head_out_all_pos(model, corrupted.tokens, cache, metric) - before

    def mine(engine: str) -> torch.Tensor:
        frame = ac.patch_heads(model, clean=clean, corrupted=corrupted, engine=engine).frame
        values = frame[(frame["kind"] == "all") & (frame["metric"] == "log_prob")].sort_values(["layer", "head"])
        return torch.tensor(values["value"].to_numpy()).view(4, 4)

    contestants: dict[str, Callable[[], torch.Tensor]] = {
        "TransformerLens, all heads out": theirs,
        "patch_heads, auto": lambda: mine("auto"),
        "patch_heads, reference engine": lambda: mine("reference"),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(rounds + 1):  # the first warms up
            for name, run in contestants.items():
                started = time.process_time()
                results[name] = run().double()
                times[name].append(time.process_time() - started)
    first = next(iter(contestants))
    print(f"8 prompts of {clean.tokens.shape[1]} tokens, 16 heads, one thread, median of {rounds} rounds")
    for name, seconds in times.items():
        ratio = median(own / base for own, base in zip(seconds[1:], times[first][1:], strict=True))
        apart = float((results[name] - results[first]).abs().max())
        print(f"  {name:32s} {1000 * median(seconds[1:]):8.0f} ms   {ratio:5.2f}x   apart {apart:.0e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compare(arguments.rounds)
