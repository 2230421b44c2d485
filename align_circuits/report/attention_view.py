"""The attention of chosen heads on one prompt: an offline widget, and the prompt shaded by one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from uuid import uuid4

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.heads.attention import attention_from
from align_circuits.hooks.head_names import Head, HeadLike, describe, head_of, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation
from align_circuits.prompts.token_html import Html, Mark, draw_tokens, readable, rendered, several
from align_circuits.run.options import RunOptions

EARLIER = "…"
"""The first column of a cropped pattern: all attention to the tokens that were cropped."""


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The attention of chosen heads on one prompt; a notebook shows it as a widget.

    It is drawn among the tokens from the first measured position on, or from the start of the test example if that is
    earlier. The attention to all tokens before is summed in a column of its own, so that every row adds up to 1.
    """

    prompt: Prompts
    """One prompt."""
    positions: Sequence[int]
    """The positions whose attention was measured, ascending."""
    rows: Mapping[Head, Float[Tensor, "row pos"]]
    """The attention of each head from each of the `positions` to all positions of the prompt."""

    def __post_init__(self):
        if len(self.prompt) != 1:
            raise ValueError(f"{len(self.prompt)} prompts, but attention is drawn on one: give one, such as prompts[0]")
        if not self.rows:
            raise ValueError("no heads to draw: give at least one (layer, head), such as heads=[(2, 3)]")
        shape = (len(self.positions), self.prompt.mask.shape[1])
        for head, rows in self.rows.items():
            if tuple(rows.shape) != shape:
                raise ValueError(
                    f"{describe([head])} has attention of shape {tuple(rows.shape)}; "
                    f"{shape[0]} positions of a prompt of {shape[1]} need {shape}"
                )
        if not self.positions or not self.prompt.mask[0, list(self.positions)].all():
            raise ValueError(
                f"positions {list(self.positions)} are not all real tokens of the prompt: leave out padding"
            )

    def __repr__(self) -> str:
        measured = f"{len(self.positions)} of {int(self.prompt.mask.sum())} tokens"
        return f"AttentionView({describe(list(self.rows))}; from {measured})"

    @property
    def start(self) -> int:
        """The first position that is drawn."""
        return min(self.positions[0], start_of(self.prompt, examples=1))

    @property
    def cropped(self) -> bool:
        """Whether the prompt has tokens before the first that is drawn."""
        return bool(self.prompt.mask[0, : self.start].any())

    @property
    def tokens(self) -> list[str]:
        """The texts of the tokens that are drawn; `EARLIER` first, if others were cropped."""
        texts = [readable(text) for text in self.prompt.texts_at(0)[self.start :]]
        return [EARLIER, *texts] if self.cropped else texts

    @property
    def pattern(self) -> Float[Tensor, "head query key"]:
        """The attention among `tokens`; NaN in rows that were not measured."""
        start, extra = self.start, int(self.cropped)
        size = len(self.tokens)
        # NaN, not 0: a row that was not measured is drawn blank.
        square = torch.full((len(self.rows), size, size), torch.nan, dtype=torch.float64)
        measured = torch.tensor(self.positions) - start + extra
        for index, rows in enumerate(self.rows.values()):
            earlier = rows[:, :start].sum(1, keepdim=True)[:, :extra]
            square[index, measured] = torch.cat([earlier, rows[:, start:]], 1).double().cpu()
        return square

    def key_mask(self, relation: str) -> Bool[Tensor, "query key"]:
        """Returns which of `tokens` are keys of which, by one of the prompt's relations."""
        shown, extra = self._relation(relation), int(self.cropped)
        mask = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for row, query in enumerate(shown.query.tolist()):
            if query >= self.start:
                # Keys before the first token that is drawn fall into the column that sums all earlier ones.
                for key in shown.keys_of(row):
                    mask[query - self.start + extra, max(0, key - self.start + extra)] = True
        return mask

    def html(self, *, script: bool = True, name: str | None = None) -> str:
        """Returns the CircuitsVis widget on a light card, which is legible on dark pages too.

        Args:
            script: Whether to include CircuitsVis's script: once on a page is enough.
            name: The id of the widget, which no other element of the page may have; by default one drawn at random.
        """
        settings = {
            # Three decimals, since every number is written out in the page.
            "attention": ((self.pattern.nan_to_num() * 1000).round() / 1000).tolist(),
            "tokens": self.tokens,
            "attentionHeadNames": [describe([head]) for head in self.rows],
            "positiveColor": "#0072B2",
        }
        name, library = name or f"attention-{uuid4().hex}", Html(circuitsvis_script() if script else "")
        return rendered("report/templates/attention.html", name=name, library=library, settings=settings)

    def _repr_html_(self) -> str:
        return self.html()

    def to_html(self, head: HeadLike, relation: str, *, row: int | None = None) -> Html:
        """Returns the prompt shaded by a head's attention from one position, the keys of a relation framed.

        Examples without keys in which every token gets less than one hundredth of the attention are left out.

        Args:
            head: One of the heads of `rows`.
            relation: The relation whose keys are framed, one of the prompt's.
            row: The relation's row whose query it is; by default the middle one of those that were measured.

        Raises:
            KeyError: A head or a relation that is missing.
            ValueError: The attention of that row was not measured, or what is no head.
        """
        head = head_of(head)
        if head not in self.rows:
            raise KeyError(f"no attention of {describe([head])}: choose from {describe(list(self.rows))}")
        shown = self._relation(relation)
        measured = [index for index, query in enumerate(shown.query.tolist()) if query in set(self.positions)]
        if not measured or (row is not None and row not in measured):
            raise ValueError(f"the attention at {relation} {'rows' if row is None else f'row {row}'} was not measured")
        row = measured[len(measured) // 2] if row is None else row
        query, keys = int(shown.query[row]), shown.keys_of(row)
        weights = self.rows[head][list(self.positions).index(query)].tolist()
        lines: dict[int, list[Mark]] = {}
        texts = self.prompt.texts_at(0)
        for pos in self.prompt.mask[0].nonzero()[:, 0].tolist():
            mark = Mark(texts[pos], framed=pos in keys, weight=weights[pos], query=pos == query)
            lines.setdefault(max(0, int(self.prompt.example[0, pos])), []).append(mark)
        kept = [line for line in lines.values() if any(mark.framed or mark.query or mark.shaded for mark in line)]
        share = sum(weights[key] for key in keys)
        caption = f"{describe([head])} from the underlined token: {share:.2f} of its attention is on the framed keys."
        if left_out := len(lines) - len(kept):
            caption += f" Left out: {several(left_out, 'example')} without keys and attention."
        return draw_tokens(kept, caption)

    def _relation(self, name: str) -> Relation:
        if name not in self.prompt.relations:
            raise KeyError(f"no relation {name!r} in this prompt; it has {', '.join(self.prompt.relations)}")
        return self.prompt.relations[name]


def attention(
    model: HookedModel,
    prompt: Prompts,
    heads: Sequence[HeadLike],
    *,
    examples: int = 1,
    last: int | None = None,
    options: RunOptions = RunOptions(),
) -> AttentionView:
    """Runs a model on one prompt and returns the attention of chosen heads, for a notebook or a report.

    Each widget in a notebook carries CircuitsVis's script (1.3 MB), so show many heads in one.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompt: One prompt, such as `prompts[0]`.
        heads: As `(2, 3)` or `"L2H3"`.
        examples: How many of the last examples to show; only the test example by default.
        last: How many of the last tokens to show, in place of `examples`.
        options: How the model is run.

    Raises:
        ValueError: Not one prompt, no heads, a head that the model does not have, or no tokens to show.
    """
    if len(prompt) != 1:
        raise ValueError(f"{len(prompt)} prompts, but attention is drawn on one: give one, such as prompts[0]")
    selected = heads_of(model.cfg, heads)
    if last is not None and last < 1:
        raise ValueError(f"last={last}: show at least one token, last=1")
    length = prompt.mask.shape[1]
    first_token = int(prompt.mask[0].int().argmax())
    start = max(first_token, length - last) if last is not None else start_of(prompt, examples)
    positions = torch.arange(start, length)
    return AttentionView(prompt, positions.tolist(), attention_from(model, prompt, selected, positions, options))


def start_of(prompt: Prompts, examples: int) -> int:
    """Returns the position where the last `examples` examples of a prompt begin."""
    if examples < 1:
        raise ValueError(f"examples={examples}: show at least the test example, examples=1")
    shown = prompt.mask[0] & (prompt.example[0] > int(prompt.example.max()) - examples)
    return int(shown.int().argmax())


@cache
def circuitsvis_script() -> str:
    """Returns CircuitsVis's script, from its package, so that the page loads nothing from the network."""
    script = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    # An end tag in one of the script's texts would end the script; its source map would be fetched from the network.
    return script.replace("</script", "<\\/script").rsplit("//# sourceMappingURL=", 1)[0]
