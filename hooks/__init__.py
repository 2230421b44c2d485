"""The only code that touches a live activation: names, probes and edits."""
