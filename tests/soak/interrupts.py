"""Interrupts verbs at random moments, and compares what a caller finds afterwards with what was there before.

    python tests/soak/interrupts.py --tries 180           # make soak
    python tests/soak/interrupts.py --unguarded           # without `@leaves_as_found`: must find changes

Every second try is a SIGINT as of Ctrl-C, every other a timer whose handler raises, as test frameworks and notebooks
use them. Exits with 1 if anything changed or failed; unguarded, if nothing did.
"""

# ruff: noqa: T201
import argparse
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from found import VERBS, changed, found, pair_of, with_a_callers_things
from transformers import LlamaConfig, LlamaForCausalLM

import align_circuits as ac
from align_circuits.hooks import left_as_found
from align_circuits.hooks.compat import model_state
from align_circuits.models.tokenizer import char_tokenizer

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def raises(*_: int | FrameType | None) -> None:
    raise KeyboardInterrupt


def take_the_guard_away() -> None:
    """Makes `@leaves_as_found` do nothing, so that the code's own clean-up is all that is left."""
    model_state.remembered = lambda _: lambda generator: None  # noqa: ARG005
    left_as_found._Signals.hold = lambda self: None  # noqa: ARG005


def soak(tries: int, seed: int) -> int:
    draw, tokenizer = random.Random(seed), char_tokenizer()
    torch.manual_seed(0)
    network = LlamaForCausalLM(CONFIG)
    model = {False: ac.load(network, tokenizer=tokenizer)}
    model[True] = ac.load(LlamaForCausalLM(CONFIG), tokenizer=tokenizer)
    for hooks, each in model.items():
        with_a_callers_things(each, hooks=hooks)
    pair = pair_of(tokenizer)
    signal.signal(signal.SIGALRM, raises)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    seconds: dict[tuple[str, bool], float] = {}
    counts: Counter[str] = Counter()
    while counts["interrupted"] < tries:
        name, hooks = draw.choice(list(VERBS)), draw.random() < 0.5

        def run(name: str = name, hooks: bool = hooks) -> None:
            VERBS[name](model[hooks], pair, ac.RunOptions())

        if (name, hooks) not in seconds:
            run()  # the first time may import and compile
            began = time.perf_counter()
            run()
            seconds[name, hooks] = time.perf_counter() - began
        before = found(model[hooks])
        moment = draw.uniform(1e-5, seconds[name, hooks])
        by_timer = counts["interrupted"] % 2
        counts["runs"] += 1
        timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, moment) if by_timer else timer.start()
                run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                timer.cancel()
        except KeyboardInterrupt:
            counts["interrupted"] += 1
            counts["by a timer"] += by_timer
        except Exception as error:  # of what an earlier interrupt left behind
            counts["failed"] += 1
            print(f"{name}: {error!r}", flush=True)
        if found_changed := changed(before, found(model[hooks])):
            counts["changed"] += 1
            print(f"{name}, {'with' if hooks else 'without'} TransformerLens's hooks: {found_changed[:5]}", flush=True)
    print(f"{len(seconds)} of {2 * len(VERBS)} verbs and engines: {dict(counts)}")
    return counts["changed"] + counts["failed"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--tries", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unguarded", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.unguarded:
        take_the_guard_away()
    raise SystemExit((soak(options.tries, options.seed) > 0) != options.unguarded)
