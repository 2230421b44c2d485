"""Abrupt learning in an in-context classification task (Reddy, 2024).

What comes in is an `ExemplarTask` (`task`); networks trained as one (`ensembles`, `models`, `grid`) give curves of
`progress_measures` (read by `curves`), also under `interventions`; what goes out are the paper's `figures`, beside its
`theory`. What goes beyond the paper: `interventions_while_training`, and forecasts of the onset of alignment.
"""
