"""Permutation tests of scores: null distributions that keep a head's positional bias.

A head that always attends to the first symbol, or some tokens back, scores above chance on many tasks without knowing
anything. So under the null its attention stays as it is, and the keys of the relation are redrawn such that all
positions are equally often keys. The p-value is the share of redraws that score at least as high as the true keys,
these included.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.redrawn_keys import ALIGNMENTS, REDRAWS, RedrawnKeys, redraws_of
from align_circuits.heads.renamed_tokens import redraws_tokens, renamed_p_values, smallest_by_renaming
from align_circuits.hooks.edits import Edit
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.alike_prompts import Reader, Rows, forward_alike
from align_circuits.run.options import RunOptions


def p_values(
    model: HookedModel,
    prompts: Prompts,
    relations: Sequence[str],
    *,
    seed: int = 0,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> dict[str, Float[ndarray, "layer head"]]:
    """Returns the p-value of every head for each relation: how often redrawn keys score as high as the true ones.

    - `align_query`, `align_key`: the score is the hit rate. All prompts of a task share the positions of their keys, so
      alignments are redrawn: every order of the m input places, or 9,999 of them, the same for all prompts. The
      smallest possible value is 1/m!, but at least 1/10,000; up to three places (1/6) nothing can be established.
    - `previous`: the score is how far the attention one token back exceeds that to the query itself and two tokens
      back, as a share of both (`Distances`), redrawn among all distances that every row has (half of the rows, if some
      have under 20), without tokens that the layout repeats. A head that prefers late tokens gives the query more.
    - `duplicate` and `induction`: tokens are renamed (`renamed_tokens`), unless fewer than seven can be and keys move.
    - Other relations with the same keys in all prompts, as the subjects of recall (`in_one_place`): the score is the
      attention to keys, redrawn at each target among 9,999 sets of as many positions, without those of separators and
      other tokens that the layout repeats; a single key of a single target needs some 30 tokens to be established. This
      null keeps no positional bias: a head that attends to these positions whatever they hold passes as well.
    - Relations whose candidates are named (`Relation.exchangeable`): the score is the attention to keys, redrawn among
      prompts by rank: a prompt's keys become those candidates, counted from the first, that are keys in another prompt.
      So a head that always attends to the first of two names passes only if the first is always right, where nothing
      can be established (`fixed_rank`): the smallest value is then one over the number of candidates.
    - Others (`lookup`, the rest of recall): the score is the share of the candidates' attention that is on
      keys, at each target. The keys of a prompt are redrawn among the keys of all prompts of its length, at the same
      targets: 9,999 permutations of prompts. A relation whose queries are no targets needs them at the same positions
      in all prompts. Where every candidate could be a key by its label, as each letter translates some symbol
      (`lookup`), the labels of a prompt's candidates are put in place of each other as well, in each prompt on its
      own, and the larger p-value counts: the first null keeps what a head prefers of places, the second what it prefers
      of tokens, of which all keys of a symbol hold the same. Where a prompt has the same keys at all targets, these may
      hold tokens that other prompts' keys hold, too, which a head may prefer. Then the larger p-value counts again: the
      other is that of prompts whose keys have no token in common (the first of each), or, where four keys or more hold
      the same token on average, as relation and grammar tokens (`relation`, `grammar`), that of what log attention
      exceeds a sum of preferences for tokens and places by.

    Of related prompts (`Prompts.group`) the first of each group tests, except for alignments, distances and renamed
    tokens, which are redrawn for all prompts at once.

    A permutation test (Fisher, 1935; Phipson and Smyth, 2010, "Permutation P-values Should Never Be Zero": hence the
    true keys count as a redraw). Misleads for the last kind where attention depends on tokens that the keys depend on
    as well: a head that attends to copies of its own token may pass for others (compare with `duplicate`).

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts of one task, alike in layout.
        relations: Their names.
        seed: Of the redraws.
        edits: What is changed while the model runs; not for relations that are tested by renaming, but for `induction`
            where its keys move and its queries are seven tokens or more: then it is tested as `lookup` is.
        options: Engine and batch size.

    Raises:
        KeyError: A relation that the prompts do not have.
        ValueError: Fewer than two prompts, queries at different positions in a relation whose keys are redrawn among
            prompts, or edits of a model whose tokens are to be renamed.
    """
    tests = PermutationTests(model, prompts, relations, seed=seed, edits=edits, options=options)
    if tests.readers:
        forward_alike(model, [Rows.joined(prompts, tests.readers)], edits=edits, options=options)
    return tests.p_values()


class PermutationTests:
    """What `p_values` returns, once every reader was given the attention at its rows.

    Tokens are renamed, in prompts that are run for it alone, when this is made.
    """

    readers: Sequence[Reader]

    def __init__(
        self,
        model: HookedModel,
        prompts: Prompts,
        relations: Sequence[str],
        *,
        seed: int,
        edits: Sequence[Edit] = (),
        options: RunOptions = RunOptions(),
    ):
        if unknown := [name for name in relations if name not in prompts.relations]:
            raise KeyError(f"no relation {unknown[0]!r} in these prompts; they have {', '.join(prompts.relations)}")
        if len(prompts) < 2:
            raise ValueError(f"{len(prompts)} prompt: a permutation test takes at least two")
        shape = model.cfg.n_layers, model.cfg.n_heads
        chosen = {name: _independent(name, prompts, edited=bool(edits)) for name in relations}
        tested = [name for name in relations if _can_be_tested(name, prompts[chosen[name]])]
        self._untested = {name: np.ones(shape) for name in relations if name not in tested}
        renamed = [name for name in tested if redraws_tokens(prompts, name, edited=bool(edits))]
        if renamed and edits:
            raise ValueError(f"{renamed[0]!r} is tested by renaming tokens, in prompts that edits were not made for")
        self._relations, self._seed = relations, seed
        self._tests = {name: redraws_of(name, prompts[chosen[name]], *shape) for name in tested if name not in renamed}
        self._renamed = renamed_p_values(model, prompts, renamed, seed=seed, options=options) if renamed else {}
        self.readers = [
            (chosen[name][test.prompt], test.query, partial(_add, test)) for name, test in self._tests.items()
        ]

    def p_values(self) -> dict[str, Float[ndarray, "layer head"]]:
        """Returns the p-value of every head for each relation."""
        redrawn = {name: test.p_values(np.random.default_rng(self._seed)) for name, test in self._tests.items()}
        return {name: (redrawn | self._renamed | self._untested)[name] for name in self._relations}


def _add(test: RedrawnKeys, rows: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
    test.add(rows, layer, pattern.cpu())


def smallest_p_values(prompts: Prompts, relations: Sequence[str]) -> dict[str, float]:
    """Returns the smallest p-value that the prompts allow for each relation, known before any model is run.

    A head is named only if its p-value, corrected over all candidates, is at most `Thresholds.fdr`. With 1/120, as of
    five input symbols, a single head among more than six candidates is never named.

    Raises:
        KeyError: A relation that the prompts do not have.
        ValueError: As `p_values`.
    """
    smallest = {}
    for name in relations:
        independent = prompts[_independent(name, prompts)]
        if not _can_be_tested(name, independent):
            smallest[name] = 1.0
        elif redraws_tokens(prompts, name):
            smallest[name] = smallest_by_renaming(prompts)
        else:
            smallest[name] = max(1 / (REDRAWS + 1), redraws_of(name, independent, 0, 0).smallest)
    return smallest


def _independent(name: str, prompts: Prompts, *, edited: bool = False) -> Int[Tensor, " prompt"]:
    """The prompts that test a relation: the first of each group, where what is redrawn differs by prompt.

    Related prompts share tokens and keys, so that redrawing those of each alone makes small p-values of what a head
    happens to make of them. Alignments, distances and names of tokens are redrawn for all prompts at once.
    """
    at_once = name in ALIGNMENTS or name == "previous" or redraws_tokens(prompts, name, edited=edited)
    if prompts.group is None or at_once:
        return torch.arange(len(prompts))
    _, first = np.unique(prompts.group.numpy(), return_index=True)
    return torch.from_numpy(np.sort(first))


def _can_be_tested(name: str, prompts: Prompts) -> bool:
    """Whether anything can be established of a relation: not without a row of it, as in one half, or by one prompt."""
    return len(prompts) > 1 and len(prompts.relations[name]) > 0
