"""Training: `loop.train` for any model and sampler of batches, `tuning.tune` for ICA-Tune and standard fine-tuning.

A model and a task go in; a trained model and a table of probes by step come out, and a folder from which a killed run
goes on. `toy_llama.pretrain` and `sparse_gpt2.pretrain_sparse` make the bundled models.
"""
