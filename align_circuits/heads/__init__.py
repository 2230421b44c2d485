"""Questions about single heads: scores, ablation, patching, permutation tests, task vectors, and `localize`.

In: a model and prompts that know their relations. Out: tables keyed by level, layer and head.
"""
