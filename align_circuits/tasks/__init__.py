"""Tasks: samplers of prompts whose targets, relations and corrupted partners are known.

A configuration, a tokenizer and a seed come in; `Prompts` go out. `Task` is the base class for tasks of your own.
"""

from align_circuits.tasks.finite_dataset import in_context, sample_finite_dataset
from align_circuits.tasks.lexicon import LexiconTask
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import Task

__all__ = ["LexiconTask", "RepeatedTokensTask", "Seq2SeqTask", "Task", "in_context", "sample_finite_dataset"]
