"""What function-vector scores cost: `function_vectors` beside a loop over heads with TransformerLens's own hooks.

The bundled Llama in float32 on one CPU thread. Both take the mean z of each head where clean prompts predict, put it
where prompts with shuffled labels predict, one head at a time, and measure the probability of the gold tokens;
`function_vectors` also computes intervals. They take turns; time is the processor's, and the ratio is the median over
rounds of the ratio within a round.

    python benchmarks/function_vectors.py [--rounds 5] [--prompts 16]
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

import align_circuits as ac
from align_circuits.circuits.direct_effects import function_vectors


def loop(model: Any, clean: ac.Prompts, corrupted: ac.Prompts) -> torch.Tensor:
    """Returns the scores `[layer head]`, by one run for each head."""
    row, query, gold = (clean.column(name) for name in ("prompt", "query_pos", "token"))
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(clean.tokens, names_filter=names)

    def metric(hooks: list[Any]) -> torch.Tensor:
        logits = model.run_with_hooks(corrupted.tokens, fwd_hooks=hooks)
        return logits[row, query].softmax(-1).gather(1, gold[:, None]).mean()

    before, scores = metric([]), torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
    for layer, name in enumerate(names):
        for head in range(model.cfg.n_heads):
            mean = cache[name][row, query, head].mean(0)

            def put(z: torch.Tensor, head: int = head, mean: torch.Tensor = mean, **_: Any) -> torch.Tensor:
                z[row, query, head] = mean
                return z

            scores[layer, head] = metric([(name, put)]) - before
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = ac.load("toy-llama", dtype=torch.float32)
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=8)
    clean = task.sample(arguments.prompts, model.tokenizer, references=False)
    corrupted = task.corrupt(clean, "labels")
    rounds, apart = [], 0.0
    with torch.no_grad():
        for _ in range(arguments.rounds):
            started = time.process_time()
            theirs = loop(model, clean, corrupted)
            between = time.process_time()
            ours = function_vectors(model, [ac.Pair(clean, corrupted)])
            rounds.append((between - started, time.process_time() - between))
            apart = max(apart, float((torch.tensor(ours.to_array("function_vector")) - theirs).abs().max()))
    print(f"a loop with hooks  {median(one for one, _ in rounds):.2f} s")
    print(f"function_vectors   {median(two for _, two in rounds):.2f} s")
    ratios = sorted(one / two for one, two in rounds)
    print(f"times as fast      {median(ratios):.1f} [{ratios[0]:.1f}, {ratios[-1]:.1f}], {len(rounds)} rounds")
    print(f"furthest apart     {apart:.1e}")
