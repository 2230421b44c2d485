"""The papers that this package implements: every figure and table, reproducible by name."""
