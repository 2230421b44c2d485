"""Attention of chosen heads on one prompt: a widget that needs no network, and the prompt shaded by one row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal
from uuid import uuid4

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.hooks.heads import Head, describe
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import Html, Mark, draw_tokens, readable
from align_circuits.run.forward_pass import forward

EARLIER = "…"
"""The first column of a cropped pattern: all attention to the tokens that were cropped away."""


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of some heads on one prompt, row by row; draws itself in notebooks.

    Drawn are the tokens from the first row on, or from the start of the test example if that is earlier. Attention to
    what stands before them is summed in a column of its own, so that every row adds up to 1.
    """

    prompt: Prompts
    """One prompt."""
    positions: Sequence[int]
    """The positions whose attention was measured, ascending."""
    rows: Mapping[Head, Float[Tensor, "row pos"]]
    """For each head its attention from each of the `positions` to all positions of the prompt."""

    def __post_init__(self):
        if len(self.prompt) != 1:
            raise ValueError(f"{len(self.prompt)} prompts, but attention is drawn on one: give such as prompts[0]")
        if not self.rows:
            raise ValueError("no heads to draw: give at least one (layer, head), such as heads=[(2, 3)]")
        wanted = (len(self.positions), self.prompt.mask.shape[1])
        for head, rows in self.rows.items():
            if tuple(rows.shape) != wanted:
                raise ValueError(
                    f"{describe([head])} has attention of shape {tuple(rows.shape)}; "
                    f"{wanted[0]} positions of a prompt of {wanted[1]} need {wanted}"
                )
        if not self.positions or not self.prompt.mask[0, list(self.positions)].all():
            raise ValueError(
                f"positions {list(self.positions)} are not all real tokens of the prompt: leave out padding"
            )

    def __repr__(self) -> str:
        shown = f"{len(self.positions)} of {int(self.prompt.mask.sum())} tokens"
        return f"Attention({describe(list(self.rows))}; from {shown})"

    @property
    def start(self) -> int:
        """The first position that is drawn."""
        return min(self.positions[0], first_of(self.prompt, examples=1))

    @property
    def cropped(self) -> bool:
        """Whether tokens stand before the first that is drawn."""
        return bool(self.prompt.mask[0, : self.start].any())

    @property
    def tokens(self) -> list[str]:
        """The tokens that are drawn, as people read them; `EARLIER` first, where some were cropped away."""
        ids = self.prompt.tokens[0, self.start :].tolist()
        shown = [readable(self.prompt.token_strings.get(token, f"<{token}>")) for token in ids]
        return [EARLIER, *shown] if self.cropped else shown

    @property
    def pattern(self) -> Float[Tensor, "head query key"]:
        """The attention among `tokens`; NaN in rows that were not measured."""
        start, extra = self.start, int(self.cropped)
        size = len(self.tokens)
        square = torch.full((len(self.rows), size, size), torch.nan, dtype=torch.float64)
        at = torch.tensor(self.positions) - start + extra
        for index, rows in enumerate(self.rows.values()):
            earlier = rows[:, :start].sum(1, keepdim=True)[:, :extra]
            square[index, at] = torch.cat([earlier, rows[:, start:]], 1).double().cpu()
        return square

    def gold(self, relation: str) -> Bool[Tensor, "query key"]:
        """Returns which of `tokens` each should look at, by one of the prompt's relations."""
        asked, extra = self._relation(relation), int(self.cropped)
        gold = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for row, query in enumerate(asked.query.tolist()):
            if query >= self.start:
                for key in asked.keys_of(row):
                    gold[query - self.start + extra, max(0, key - self.start + extra)] = True
        return gold

    def html(self, *, script: bool = True) -> str:
        """Returns the CircuitsVis widget, on a light card that reads on dark pages too.

        Args:
            script: Whether CircuitsVis's script comes with it: once on a page is enough.
        """
        name = f"attention-{uuid4().hex}"
        settings = {
            "attention": ((self.pattern.nan_to_num() * 1000).round() / 1000).tolist(),
            "tokens": self.tokens,
            "attentionHeadNames": [describe([head]) for head in self.rows],
            "positiveColor": "#0072B2",
        }
        code = f'CircuitsVis.render("{name}", CircuitsVis.AttentionHeads, {_for_script(settings)});'
        card = "max-width:42rem;overflow:hidden;padding:1px 8px;border-radius:6px;"
        card += "background:#fff;color:#222;color-scheme:light"
        return (
            f'<div class="attention" style="{card}"><div id="{name}" style="position:relative"></div></div>'
            f"{f'<script>{circuitsvis_script()}</script>' if script else ''}<script>{code}</script>"
        )

    def _repr_html_(self) -> str:
        return self.html()

    def drawing(self, head: Head, relation: str, *, row: int | None = None) -> Html:
        """Returns the prompt shaded by a head's attention from one position, the gold keys of a relation framed.

        Examples that hold no gold and get less than one hundredth of the attention on each token are left out.

        Args:
            head: One of the heads of `rows`.
            relation: Whose keys to frame, one of the prompt's relations.
            row: Which of the relation's rows asks; by default the middle one of those whose attention is known.

        Raises:
            KeyError: A head or a relation that is not there.
            ValueError: The attention of that row was not measured.
        """
        if head not in self.rows:
            raise KeyError(f"no attention of {describe([head])}; there is {describe(list(self.rows))}")
        asked = self._relation(relation)
        known = [index for index, query in enumerate(asked.query.tolist()) if query in set(self.positions)]
        if not known or (row is not None and row not in known):
            raise ValueError(f"the attention at {relation} {'rows' if row is None else f'row {row}'} was not measured")
        row = known[len(known) // 2] if row is None else row
        query, keys = int(asked.query[row]), asked.keys_of(row)
        weights = self.rows[head][list(self.positions).index(query)].tolist()
        lines: dict[int, list[Mark]] = {}
        for pos in self.prompt.mask[0].nonzero()[:, 0].tolist():
            token = int(self.prompt.tokens[0, pos])
            text = self.prompt.token_strings.get(token, f"<{token}>")
            mark = Mark(text, strong=pos in keys, weight=weights[pos], asks=pos == query)
            lines.setdefault(max(0, int(self.prompt.example[0, pos])), []).append(mark)
        shown = [line for line in lines.values() if any(mark.strong or mark.asks or mark.seen for mark in line)]
        share = sum(weights[key] for key in keys)
        said = f"{describe([head])} from the underlined token: {share:.2f} of its attention is on gold (framed)."
        if left := len(lines) - len(shown):
            said += f" Left out: {left} examples without attention and gold."
        return draw_tokens(shown, said)

    def _relation(self, name: str) -> Any:
        if name not in self.prompt.relations:
            raise KeyError(f"no relation {name!r} in this prompt; it has {', '.join(self.prompt.relations)}")
        return self.prompt.relations[name]


def attention(
    model: Any,
    prompt: Prompts,
    heads: Sequence[Head],
    *,
    examples: int = 1,
    last: int | None = None,
    engine: Literal["auto", "fast", "reference"] = "auto",
) -> Attention:
    """Runs a model on one prompt and returns the attention of some heads, to be shown in a notebook or a report.

    A notebook gets CircuitsVis's script (1.3 MB) with each widget, so show many heads in one.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompt: One prompt, such as `prompts[0]`.
        heads: Pairs (layer, head).
        examples: How many of the last examples to show; only the test example by default.
        last: How many of the last tokens to show, in place of `examples`.
        engine: How attention is computed.

    Raises:
        ValueError: Not one prompt, no heads, a head that the model does not have, or no tokens to show.
    """
    if len(prompt) != 1:
        raise ValueError(f"{len(prompt)} prompts, but attention is drawn on one: give such as prompts[0]")
    layers, width = model.cfg.n_layers, model.cfg.n_heads
    for layer, head in heads:
        if not (0 <= layer < layers and 0 <= head < width):
            raise ValueError(f"no head L{layer}H{head}: the model has layers 0 to {layers - 1}, heads 0 to {width - 1}")
    if last is not None and last < 1:
        raise ValueError(f"last={last}: show at least one token, last=1")
    length = prompt.mask.shape[1]
    real = int(prompt.mask[0].int().argmax())
    start = max(real, length - last) if last is not None else first_of(prompt, examples)
    positions = torch.arange(start, length)
    found: dict[Head, Tensor] = {}

    def keep(_: Tensor, layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        found.update({(at, head): pattern[:, head].cpu() for at, head in heads if at == layer})

    forward(model, prompt, prompt=torch.zeros_like(positions), query=positions, on_pattern=keep, engine=engine)
    return Attention(prompt, positions.tolist(), {(layer, head): found[layer, head] for layer, head in heads})


def first_of(prompt: Prompts, examples: int) -> int:
    """Returns the position where the last `examples` examples of a prompt begin."""
    if examples < 1:
        raise ValueError(f"examples={examples}: show at least the test example, examples=1")
    shown = prompt.mask[0] & (prompt.example[0] > int(prompt.example.max()) - examples)
    return int(shown.int().argmax())


@cache
def circuitsvis_script() -> str:
    """Returns CircuitsVis's whole script, from its package; as text inside `<script>`, it asks no network."""
    script = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    return script.replace("</script", "<\\/script").rsplit("//# sourceMappingURL=", 1)[0]


def _for_script(value: Any) -> str:
    """JSON that cannot end the script it stands in, whatever the tokens say."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
