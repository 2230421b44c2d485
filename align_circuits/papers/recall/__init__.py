"""Understanding contextual recall in transformers (Vasudeva et al., 2026).

- `task`: the synthetic world, its pretraining and in-context sequences, and the exact posterior of the type;
- `models`: a small GPT-2, the attention-only model, and their training;
- `theory`: the constructions of Propositions 1 to 4, and the first steps of finetuning (Theorems 1 and 2);
- `metrics`: what is right about a predicted attribute, and how representations cluster;
- `figures`: the studies behind the paper's figures, propositions and theorems;
- `experiments`: all of them, as `align-circuits reproduce` lists them.
"""
