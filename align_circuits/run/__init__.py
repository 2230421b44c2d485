"""Runs: the one way to run a model on prompts, in batches, with or without edits.

In: a `HookedModel`, `Prompts` or a `Pair` of clean and corrupted ones, edits, and `RunOptions`.
Out: logits, attention and activations batch by batch (`forward`), `TargetMetrics`, and the table of `evaluate`.
"""
