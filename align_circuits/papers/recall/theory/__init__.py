"""The theory of attention-only models: weights written by hand, and closed forms of their gradient steps."""
