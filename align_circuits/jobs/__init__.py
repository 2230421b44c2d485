"""Jobs: files that are whole or absent, locks, and work that goes on where a killed process left it.

In: a function of a module with a config and a seed, the parts of a sweep, or the state of a training run, and a folder.
Out: rows, arrays and checkpoints, each kept in one file; `replacing`, `claimed`, executors of processes and clusters.
"""
