"""Methods that find heads, under one signature: from a model and a pair of prompts to a score of every head.

`benchmarked_head_methods` has those of the literature and ours, `benchmarked_edge_methods` those that find edges;
`registry` finds them by name, with those that other packages install; `comparison` compares scores with the heads that
are known to matter.
"""
