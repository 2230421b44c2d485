"""Hooks: the only code that reads or replaces an activation while a model runs.

In: a `HookedModel`, the hook points of `names`, and prompts where an edit depends on them.
Out: edits (`Patch`, `Ablate`, `Clamp`, `Steer`), probes, gradients, and runs replayed from where an edit starts.
"""
