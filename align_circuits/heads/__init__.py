"""Questions about single heads: scores, ablation, patching, permutation tests, task vectors, and `localize`.

`localize` goes through `candidates`, `evidence`, `head_sets` and `verdicts`; `control_sets` draws sets to compare with.

In: a model and prompts that know their relations. Out: tables keyed by level, layer and head.
"""
