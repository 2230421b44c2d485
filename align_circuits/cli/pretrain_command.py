"""`align-circuits pretrain`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from align_circuits.cli.verb import Verb
from align_circuits.training.toy_llama import RECIPES, pretrain


@dataclass(frozen=True)
class Pretrain(Verb):
    """Trains a model with `pretrain`."""

    recipe: Literal["toy-llama", "smoke"] = "toy-llama"
    """"toy-llama" made the bundled model; "smoke" takes seconds and teaches nothing."""
    seed: int = 0
    """Of the weights and the documents."""

    def __call__(self, folder: Path) -> None:
        """Runs the verb."""
        run = pretrain(RECIPES[self.recipe], seed=self.seed, out=folder)
        print(run.log.to_string(index=False, float_format="{:.3f}".format))
        print(f"\nmodel: {folder / 'model'}")
