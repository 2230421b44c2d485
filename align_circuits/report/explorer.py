"""An interactive view of prompts: the gold alignment, a head's attention, and the answers without heads."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from align_circuits.checks import checked
from align_circuits.hooks.head_names import HeadLike, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits
from align_circuits.tasks.task import TOKEN_ROLES


@checked
@leaves_as_found
def explore(
    model: HookedModel,
    prompts: Prompts,
    *,
    heads: Sequence[HeadLike] | None = None,
    relations: Sequence[str] | None = None,
    options: RunOptions = RunOptions(),
) -> Any:
    """Returns a widget that shows a prompt with its gold alignment and a head's attention, and ablates heads.

    Choose a prompt, a relation, one of its queries and a head; tick heads to ablate them and see the answers change.
    Works in Jupyter, VS Code and marimo; a page without a kernel shows the first view. Every choice can be made from
    Python as well: `explorer.prompt`, `relation`, `row`, `head` and `ablated` are its traits. Heads are ablated to
    their mean over like tokens of all of the prompts (`ablation_baseline`). Needs `align-circuits[notebook]`.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets and relations, such as `localization.prompts`.
        heads: Which heads are offered, as `(2, 3)` or `"L2H3"`, such as `localization.named_heads`; all by default.
        relations: Which relations are offered, the first of them shown at first; by default all that the prompts have
            rows of, before induction, previous and duplicate the prompts' own.
        options: Engine and batch size.

    Raises:
        ImportError: Without anywidget.
        KeyError: A relation that the prompts do not have.
        ValueError: Prompts without targets or relations, that do not fit the model, or a head that it does not have.
    """
    if find_spec("anywidget") is None:
        raise ImportError("the explorer needs anywidget: pip install 'align-circuits[notebook]'")
    check_fits(model, prompts)
    if relations is None:
        relations = [name for name, relation in prompts.relations.items() if len(relation)]
        relations.sort(key=TOKEN_ROLES.__contains__)  # which all prompts have; the sort keeps the order of the others
    if unknown := [name for name in relations if name not in prompts.relations]:
        raise KeyError(f"no relation {unknown[0]!r} in these prompts; they have {', '.join(prompts.relations)}")
    if not len(prompts.targets) or not relations or (heads is not None and not len(heads)):
        raise ValueError("nothing to explore: give prompts with targets, relations such as induction, and heads")
    from align_circuits.report.explorer_widget import Explorer

    return Explorer(model, prompts, heads_of(model.cfg, heads), relations, options)
