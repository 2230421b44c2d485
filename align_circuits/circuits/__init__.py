"""Circuits: which edges of a model matter, and whether those that were chosen do the work.

In: a model whose residual stream is the sum of its parts, and a `Pair` of clean and corrupted prompts.
Out: tables of edges and heads (`attribute_edges`, `patch_edges`,
`direct_logit_attribution`) and of circuits (`faithfulness`).
"""
