"""`align-circuits pretrain`."""

from dataclasses import dataclass
from typing import Literal

from align_circuits.cli.command_base import Verb
from align_circuits.cli.folders import Results
from align_circuits.training.sparse_gpt2 import SPARSE_GPT2, pretrain_sparse
from align_circuits.training.toy_llama import RECIPES, pretrain


@dataclass(frozen=True)
class Pretrain(Verb):
    """Trains a model with `pretrain`."""

    recipe: Literal["toy-llama", "sparse-gpt2", "unmarked", "smoke"] = "toy-llama"
    """"toy-llama" and "sparse-gpt2" made the bundled models of these names; "unmarked" is toy-llama without text that
    asks for an alignment; "smoke" takes seconds and teaches nothing."""
    seed: int = 0
    """Of the weights and the text."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        print(f"{self.recipe}: float32 on cpu", flush=True)
        if self.recipe == "sparse-gpt2":
            run = pretrain_sparse(SPARSE_GPT2, seed=self.seed, out=results.new, state=results.folder)
        else:
            run = pretrain(RECIPES[self.recipe], seed=self.seed, out=results.new, state=results.folder)
        print(run.log.to_string(index=False, float_format="{:.3g}".format, na_rep="–"))
        print(f"\nmodel: {results.folder / 'model'}")
