"""Processes for tests that kill: one server forks them all, with what they need imported already.

The list of modules belongs to the interpreter, and the last one to set it wins: a list in each file would leave others
to import PyTorch in every process.
"""

import multiprocessing

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "align_circuits.jobs.jobs",
        "align_circuits.training.loop",
        "hypothesis",
        "pytest",
        "transformers.models.llama.modeling_llama",
    ]
)
