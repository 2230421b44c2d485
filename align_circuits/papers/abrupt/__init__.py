"""Abrupt learning in an in-context classification task (Reddy, 2024): task, networks, theory, figures."""
