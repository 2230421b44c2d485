"""The widget that `explore` returns; its page is HTML from here, its controls are those of `templates/explorer.js`."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any
from uuid import uuid4

import pandas as pd
import traitlets
from anywidget import AnyWidget

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.attention import attention_from
from align_circuits.hooks.edits import Ablate, AblationBaseline, Edit
from align_circuits.hooks.head_names import Head, HeadLike, describe, head_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import Html, readable, rendered
from align_circuits.report.attention_view import AttentionView
from align_circuits.run.evaluation import answers
from align_circuits.run.options import RunOptions


class Explorer(AnyWidget):
    """What `explore` returns: a widget for Jupyter, VS Code and marimo, and static HTML where there is no kernel.

    All that the controls choose can be chosen from Python as well, such as `explorer.head = "L2H3"`.
    """

    _esm = files("align_circuits.report").joinpath("templates/explorer.js").read_text(encoding="utf-8")

    prompt = traitlets.Int(0).tag(sync=True)
    """The prompt, counted from 0."""
    relation = traitlets.Unicode().tag(sync=True)
    """The relation whose keys are framed."""
    row = traitlets.Int(0).tag(sync=True)
    """Which of the relation's queries the attention comes from, counted from 0; beyond the last: the last."""
    # Not Unicode, since it may be set as a pair of layer and head, too: `_check` turns that into a name.
    head = traitlets.Any("").tag(sync=True)
    """The head whose attention is drawn, such as `"L2H3"`."""
    ablated = traitlets.List().tag(sync=True)
    """The heads that are ablated together, to their mean over like tokens (`ablation_baseline`)."""
    choices = traitlets.Dict(read_only=True).tag(sync=True)
    """What can be chosen: the number of prompts, the relations, the rows of the chosen one, the heads."""
    shown = traitlets.Unicode(read_only=True).tag(sync=True)
    """The page as HTML."""
    stand_in = traitlets.Unicode(read_only=True).tag(sync=True)
    """The id of the same page beside the widget, which the widget hides where a kernel lets it run."""

    def __init__(
        self, model: HookedModel, prompts: Prompts, heads: Sequence[Head], relations: Sequence[str], options: RunOptions
    ):
        self._model, self._prompts, self._options = model, prompts, options
        self._baselines: dict[int, AblationBaseline] = {}
        self._names = [describe([head]) for head in heads]
        self._relations = list(relations)
        # Only now, since setting traits runs `_check`, which reads what stands above.
        super().__init__(relation=self._relations[0], head=self._names[0])
        self.set_trait("stand_in", f"explorer-{uuid4().hex}")
        self.observe(self._show, ["prompt", "relation", "row", "head", "ablated"])
        self._show()

    def __repr__(self) -> str:
        without = f", without {', '.join(self.ablated)}" if self.ablated else ""
        return f"Explorer(prompt {self.prompt} of {len(self._prompts)}, {self.head}, {self.relation}{without})"

    def _ipython_display_(self) -> None:
        """Shows the page and then the widget: of a single output nbconvert would take the widget, from a server."""
        from IPython.display import display

        view: Any = self._repr_mimebundle_()
        widget, about = view
        display({"text/plain": repr(self), "text/html": f'<div id="{self.stand_in}">{self.shown}</div>'}, raw=True)
        display({**widget, "text/plain": "", "text/html": ""}, metadata=about, raw=True)

    @traitlets.validate("prompt", "row", "relation", "head", "ablated")
    def _check(self, proposal: Any) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if name == "prompt" and not 0 <= value < len(self._prompts):
            raise ValueError(f"prompt={value}: give 0 to {len(self._prompts) - 1}")
        if name == "row" and value < 0:
            raise ValueError(f"row={value}: give 0 or more")
        if name == "relation" and value not in self._relations:
            raise ValueError(f"relation={value!r}: choose from {', '.join(self._relations)}")
        if name == "head":
            return self._head(value)
        return list(dict.fromkeys(map(self._head, value))) if name == "ablated" else value

    def _head(self, given: HeadLike) -> str:
        """The name of a head that is offered."""
        name = describe([head_of(given)])
        if name not in self._names:
            raise ValueError(f"head {name}: choose from {', '.join(self._names)}")
        return name

    def _show(self, _: Any = None) -> None:
        prompt = self._prompts[self.prompt]
        relation = prompt.relations[self.relation]
        drawing = None
        if rows := len(relation):
            row = min(self.row, rows - 1)
            head, query = head_of(self.head), relation.query[row : row + 1]
            attention = attention_from(self._model, prompt, [head], query, self._options)
            drawing = AttentionView(prompt, query.tolist(), attention).to_html(head, self.relation, row=row)
        aligned = self.relation in ("align_query", "align_key", "lookup")
        page = rendered(
            "report/templates/explorer.html",
            prompt=Html(prompt.to_html(relation=None if aligned else self.relation)),
            aligned=aligned,
            attention=drawing,
            relation=self.relation,
            answers=self._answers(prompt),
        )
        self.set_trait(
            "choices", {"prompts": len(self._prompts), "relations": self._relations, "rows": rows, "heads": self._names}
        )
        self.set_trait("shown", str(page))

    def _answers(self, prompt: Prompts) -> Html:
        """A table of the targets, and of what the model predicts with and without the ablated heads."""
        if not len(prompt.targets):
            return Html("<p>This prompt has no target.</p>")
        heads = [head_of(name) for name in self.ablated]
        runs = {"intact": []} | ({f"without {', '.join(self.ablated)}": self._edits(heads)} if heads else {})
        columns: dict[str, list[str]] = {}
        for name, edits in runs.items():
            answered = answers(self._model, prompt, edits=edits, options=self._options)
            columns.setdefault("target", list(map(readable, answered["target"])))
            marked = zip(answered["answer"], answered["right"], strict=True)
            columns[name] = [f"{readable(text)}{'' if right else ' ✗'}" for text, right in marked]
            columns[f"p, {name}"] = [f"{value:.2f}" for value in answered["p"]]
        return Html(pd.DataFrame(columns).to_html(index=False, border=0))

    def _edits(self, heads: Sequence[Head]) -> list[Edit]:
        for layer in {layer for layer, _ in heads} - self._baselines.keys():
            baseline = ablation_baseline(self._model, self._prompts, layers=[layer], options=self._options)
            self._baselines[layer] = baseline
        means = {name: mean for of_layer in self._baselines.values() for name, mean in of_layer.means.items()}
        by = next(iter(self._baselines.values())).by  # of all prompts, whatever the layer
        return [Ablate(heads, how="mean", baseline=AblationBaseline(means=means, by=by))]
