"""Prompts a second: `Seq2SeqTask.sample` with ids and all gold, beside a plain Python loop that makes only the strings.

Both draw m = 8, c = 4, k = 15 with new automata for every prompt, on one thread. Run: python benchmarks/sampling.py
"""

import itertools
import random
import string

import torch
from contest import command_line, in_turn

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.seq2seq import Seq2SeqTask

X_LEN, PHRASE_LEN, N_EXAMPLES = 8, 4, 15


def plain_automaton(rng: random.Random) -> list[list[tuple[str, int]]]:
    """The edges of each state: letter and next state."""
    alphabet = rng.sample(string.ascii_lowercase, rng.randint(4, 18))
    states = range(1, rng.randint(4, 12) + 1)
    automaton = []
    for _ in range(len(states) + 1):
        n_edges = rng.randint(1, 4)
        automaton.append(list(zip(rng.sample(alphabet, n_edges), rng.sample(states, n_edges), strict=True)))
    return automaton


def plain_prompt(rng: random.Random) -> str:
    """One prompt as a string, one thing after the other."""
    symbols = rng.sample(string.ascii_uppercase, X_LEN)
    automata = {symbol: plain_automaton(rng) for symbol in symbols}
    half = (X_LEN + 1) // 2
    examples = []
    for _ in range(N_EXAMPLES + 1):
        parts = [rng.sample(symbols[:half], half), rng.sample(symbols[half:], X_LEN - half)]
        rng.shuffle(parts)
        x = parts[0] + parts[1]
        y = []
        for symbol in x:
            state = 0
            for _ in range(PHRASE_LEN):
                letter, state = rng.choice(automata[symbol][state])
                y.append(letter)
        examples.append("".join(x) + ":" + "".join(y))
    return "\n".join(examples)


def main() -> None:
    """Prints both rates and their ratio."""
    parser = command_line(__doc__)
    parser.add_argument("--n", type=int, default=512, help="prompts a run")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    task, tokenizer = Seq2SeqTask(x_len=X_LEN, phrase_len=PHRASE_LEN, n_examples=N_EXAMPLES), char_tokenizer()
    rng, seeds = random.Random(0), itertools.count()
    contestants = {
        "plain": lambda: [plain_prompt(rng) for _ in range(arguments.n)],
        "ours": lambda: task.sample(arguments.n, tokenizer, next(seeds), references=False),
    }
    # the best of each counts
    peer, own = (arguments.n / min(times) for times in in_turn(contestants, arguments.repeats).values())
    print(f"plain Python, strings only:         {peer:9.0f} prompts/s")
    print(f"Seq2SeqTask.sample, ids and gold:   {own:9.0f} prompts/s")
    print(f"ratio:                              {own / peer:9.1f}")


if __name__ == "__main__":
    main()
