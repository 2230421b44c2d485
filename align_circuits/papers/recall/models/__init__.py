"""The models, and the loop that pretrains and finetunes them on the sequences of `task`."""
