"""Abrupt learning in an in-context classification task (Reddy, 2024).

What comes in is an `ExemplarTask` (`task`); networks trained together (`models`, `grid`) give courses of
`progress_measures`, also under `interventions`; what goes out are the paper's `figures`, beside its `theory`.
"""
