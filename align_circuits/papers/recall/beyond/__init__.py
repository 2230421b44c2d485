"""Experiments beyond the paper, on the models of its figures."""
