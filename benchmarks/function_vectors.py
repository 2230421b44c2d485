"""What function-vector scores cost: `function_vectors` beside a loop over heads with TransformerLens's own hooks.

The bundled Llama in float32 on one CPU thread. Both take the mean z of each head where clean prompts predict, put it
where prompts with shuffled labels predict, one head at a time, and measure the probability of the gold tokens;
`function_vectors` also computes intervals. They take turns; time is the processor's, and the ratio is the median over
rounds of the ratio within a round.

    python benchmarks/function_vectors.py [--rounds 5] [--prompts 16]
"""

from statistics import median
from typing import Any

import torch
from contest import command_line, in_turn, ratios, spread, timed

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
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = ac.load("toy-llama", dtype=torch.float32)
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=8)
    clean = task.sample(arguments.prompts, model.tokenizer, references=False)
    corrupted = task.corrupt(clean, "labels")
    contestants = {
        "a loop with hooks": lambda: loop(model, clean, corrupted),
        "function_vectors": lambda: function_vectors(model, [ac.Pair(clean, corrupted)]),
    }
    with torch.no_grad():
        turns = in_turn(contestants, arguments.rounds, timed)
    theirs, ours = ([seconds for seconds, _ in turn] for turn in turns.values())
    scores, table = (turn[-1][1] for turn in turns.values())
    apart = (torch.tensor(table.to_array("function_vector")) - scores).abs().max()
    print(f"a loop with hooks  {median(theirs):.2f} s")
    print(f"function_vectors   {median(ours):.2f} s")
    print(f"times as fast      {spread(ratios(theirs, ours), 1)}, {arguments.rounds} rounds")
    print(f"furthest apart     {apart:.1e}")
