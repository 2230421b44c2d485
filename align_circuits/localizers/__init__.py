"""Methods that find heads, under one signature: from a model and a pair of prompts to a score of every head.

`methods` has those of the literature and ours; `registry` finds them by name, with those that other packages install;
`comparison` compares scores with the heads that are known to matter.
"""
