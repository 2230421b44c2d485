"""A Llama of our own: what it reads, how it is trained, and what it must be able to do."""
