"""The synthetic world, sequences about it as prompts and training batches, and exact references."""
