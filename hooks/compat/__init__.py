"""All that relies on the insides of transformers, TransformerLens and PyTorch; nothing else in the package does.

Tested with the versions in `TESTED`. `tests/hooks/test_compat.py` fails when a name used here disappears, and
`pyproject.toml` excludes the next major versions until that test has run with them.
"""

TESTED = {"transformers": "5.23.0", "transformer-lens": "4.3.0", "torch": "2.13.0"}
"""The versions that the whole suite ran with; `make test-tl3` also runs a `HookedTransformer` of TransformerLens 3."""
