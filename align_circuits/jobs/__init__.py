"""Jobs: files that are whole or absent, locks, and work that goes on where a killed process left it.

In: a function of a module with a config and a seed, or batches of a sweep, and a folder.
Out: rows and arrays, each kept in one file; `run_jobs`, `replacing`, `claimed`, executors of processes and clusters.
"""
