"""Contextual recall (Vasudeva et al., 2026): world, tasks, models, theory, figures."""
