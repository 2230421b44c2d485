"""What the verbs cost, beside a count of what they run."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import align_circuits as ac
from align_circuits.checks import WrongArgument
from align_circuits.heads import renamed_tokens
from align_circuits.hooks.graph import Graph
from align_circuits.validation.costs import (
    _DROPPED,
    _OF_A_ROW,
    _THROUGH_A_NORM,
    ModelShape,
    PromptSizes,
    Work,
    ablate_work,
    attribute_work,
    backward_work,
    base_work,
    edited_work,
    evaluate_work,
    forward_work,
    localize_work,
    patch_work,
    score_work,
    tune_work,
)

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=5)
SHAPE = ModelShape(layers=2, d_model=6, heads=3, key_heads=1, d_head=2, d_mlp=8, d_vocab=10)
SIZES = PromptSizes(prompts=4, tokens=7, targets=5, changed=2)
RUN = 4 * 7 * 2
"""Tokens of SIZES through the layers of SHAPE."""

COUNTED = {"q_proj": "attention", "up_proj": "mlp", "lm_head": "logits"}


@pytest.fixture(scope="module")
def model(random_hf_model: Any, char_tokenizer: Any) -> Any:
    hf = random_hf_model("llama", num_hidden_layers=3, max_position_embeddings=128)
    return ac.load(hf, tokenizer=char_tokenizer)


@pytest.fixture(scope="module")
def pair(model: Any) -> ac.Pair:
    clean = TASK.sample(4, model.tokenizer, references=False)
    return ac.Pair(clean, TASK.corrupt(clean, "query"))


@contextmanager
def counting(model: Any) -> Iterator[Counter[str]]:
    """Counts the tokens that go through attention, MLPs and the unembedding."""
    counts: Counter[str] = Counter()
    for name, module in model.original_model.named_modules():
        parts = [part for part in name.split(".") if part != "_original_component"]
        if parts and parts[-1] in COUNTED and isinstance(module, nn.Linear):
            vars(module)["counted_as"] = COUNTED[parts[-1]]  # also in the copy that is tuned

    def count(module: Any, given: Any, result: Any) -> None:
        if of := vars(module).get("counted_as"):
            tokens = given[0].numel() // module.in_features
            counts[of] += tokens
            if result.requires_grad:
                result.register_hook(lambda _: counts.update({f"{of} back": tokens}))

    # For all modules: with a hook of its own, a model is not replayed.
    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def agree(counts: Counter[str], expected: Work, slack: int) -> None:
    for name in COUNTED.values():
        assert abs(counts[name] - getattr(expected, name)) <= slack, (name, counts, expected)


def both_ways(counts: Counter[str], expected: Work, slack: int) -> None:
    for name in ("attention", "mlp"):
        assert abs(counts[name] + counts[f"{name} back"] - getattr(expected, name)) <= slack, (name, counts, expected)


def test_the_shape_is_that_of_the_model(model: Any):
    shape = ModelShape.of(model)
    weights = sum(weight.numel() for name, weight in model.original_model.named_parameters() if "norm" not in name)
    untied = shape.d_vocab * shape.d_model
    assert weights == shape.parameters + untied


@pytest.mark.parametrize(
    ("verb", "work"),
    [
        (lambda model, pair: ac.evaluate(model, pair.clean), evaluate_work),
        (lambda model, pair: ac.ablate_heads(model, pair.clean), ablate_work),
        (lambda model, pair: ac.patch_heads(model, pair), patch_work),
    ],
    ids=["evaluate", "ablate", "patch"],
)
def test_the_formula_counts_what_runs(
    model: Any, pair: ac.Pair, verb: Callable[..., Any], work: Callable[[ModelShape, PromptSizes], Work]
):
    with counting(model) as counts:
        verb(model, pair)
    sizes = PromptSizes.of(pair)
    # The engine of plain forward passes runs the token after the last prediction too, and the means need no logits.
    agree(counts, work(ModelShape.of(model), sizes), sizes.prompts * 3 + sizes.prompts * sizes.targets)


def test_patching_from_the_first_example_on_costs_what_the_formula_says(model: Any, pair: ac.Pair):
    other = ac.Pair(pair.clean, TASK.corrupt(pair.clean, "labels"))
    sizes = PromptSizes.of(other)
    assert sizes.changed > 2 * PromptSizes.of(pair).changed
    with counting(model) as counts:
        ac.patch_heads(model, other)
    agree(counts, patch_work(ModelShape.of(model), sizes), 0)


@pytest.mark.parametrize(("method", "steps"), [("atp", 1), ("ig_inputs", 4)])
def test_attribution_runs_forward_and_back_in_each_step(model: Any, pair: ac.Pair, method: Any, steps: int):
    shape, sizes = ModelShape.of(model), PromptSizes.of(pair)
    ac.attribute_heads(
        model, pair, method=method, steps=steps
    )  # the first call also sees that changes reach the logits
    with counting(model) as counts:
        ac.attribute_heads(model, pair, method=method, steps=steps)
    # A run of two tokens beforehand shows which hooks fire.
    both_ways(counts, attribute_work(shape, sizes, steps), (2 + (2 + 2 * steps) * sizes.prompts) * shape.layers)


def test_attribution_of_edges_runs_the_mlps_twice(model: Any, pair: ac.Pair):
    shape, sizes = ModelShape.of(model), PromptSizes.of(pair)
    with counting(model) as counts:
        ac.attribute_edges(model, pair, method="eap_ig_inputs", steps=3)
    work = attribute_work(shape, sizes, 3, edges=True)
    assert counts["mlp"] + counts["mlp back"] == pytest.approx(work.mlp, rel=0.1)
    # The model's own attention alone: what receivers read goes through its weights without its layers.
    assert counts["attention"] + counts["attention back"] == pytest.approx(
        attribute_work(shape, sizes, 3).attention, rel=0.1
    )


def test_a_step_of_tuning_costs_two_passes(model: Any, pair: ac.Pair):
    shape, sizes = ModelShape.of(model), PromptSizes.of(pair)
    config = ac.TuneConfig(steps=4, batch=4, probe_every=2, probe_prompts=2)
    with counting(model) as counts:
        ac.tune(model, TASK, config, progress=False)
    probed = 3 * 2 * 2 * shape.layers  # a probe runs the token after the last prediction too
    # Nothing below the lowest adapters needs a gradient: not what the first layer's queries are made of.
    lowest = 4 * 4 * sizes.tokens
    both_ways(counts, tune_work(shape, sizes, 4, probes=3, probe_prompts=2), probed + lowest)


def test_the_weights_of_a_shape():
    assert SHAPE.attention_weights == 6 * 6 + 2 * 6 * 2 + 6 * 6, "queries, keys and values, outputs"
    assert SHAPE.mlp_weights == 3 * 6 * 8 and replace(SHAPE, gated=False).mlp_weights == 2 * 6 * 8
    assert SHAPE.parameters == 2 * (SHAPE.attention_weights + SHAPE.mlp_weights) + 60
    cfg = SimpleNamespace(n_layers=2, d_model=6, n_heads=3, d_head=2, d_vocab=10)
    assert ModelShape.of(SimpleNamespace(cfg=cfg)) == ModelShape(2, 6, 3, 3, 2, 24, 10, gated=False)
    cfg = SimpleNamespace(**vars(cfg), n_key_value_heads=1, d_mlp=8, gated_mlp=True)
    assert ModelShape.of(SimpleNamespace(cfg=cfg)) == SHAPE


def test_floating_point_operations_beside_a_count():
    work = Work(attention=2, mlp=3, pairs=5, logits=7, products=11)
    multiplied = 2 * SHAPE.attention_weights + 3 * SHAPE.mlp_weights + 7 * 6 * 10 + 11
    of_pairs = 5 * 3 * 2 * 2  # each head multiplies a query with a key, and adds up values, of two numbers each
    assert work.flops(SHAPE) == 2 * (multiplied + of_pairs)
    assert work.passes(SHAPE, 2 * work) == 0.5


def test_runs_beside_a_count_of_tokens():
    """A query of a whole run sees all tokens up to its own, one of an edited run half of its own besides."""
    seen = [position + 1 for position in range(7)]
    assert forward_work(SHAPE, SIZES) == Work(RUN, RUN, 2 * 4 * sum(seen), 4 * 5)
    assert base_work(SHAPE, SIZES) == replace(forward_work(SHAPE, SIZES), mlp=4 * 7 + 4 * 5)
    back = backward_work(SHAPE, SIZES)
    assert back == replace(forward_work(SHAPE, SIZES), pairs=5 / 2 * forward_work(SHAPE, SIZES).pairs)
    attention = mlp = pairs = 0
    for layer in (0, 0, 1):  # three runs, edited from the third-last token on, in a model of three layers
        attention += (2 - layer) * 4 * 3
        pairs += (2 - layer) * 4 * sum(position + 0.5 for position in range(4, 7))
        mlp += (2 - layer) * 4 * 3
        mlp += 4 * 5  # of the last layer, at the targets
    layers = 2 + 2 + 1
    assert edited_work(SIZES, 3, layers, 3) == Work(attention, mlp, pairs, 3 * 4 * 5)
    assert edited_work(SIZES, 3, layers).logits == 0, "runs that predict nothing"


def test_heads_are_edited_in_all_layers_by_default():
    above = 3 * (1 + 0)  # three heads in each of two layers
    edited = edited_work(SIZES, 7, above, 6)
    assert ablate_work(SHAPE, SIZES) == forward_work(SHAPE, SIZES) + base_work(SHAPE, SIZES) + edited
    assert ablate_work(SHAPE, SIZES, heads=2) == ablate_work(SHAPE, SIZES, 2, 2 * 1 / 2), "half of the layers below"
    changed = edited_work(SIZES, 2, above, 6)
    other = patch_work(SHAPE, SIZES) + -1 * (base_work(SHAPE, SIZES) + changed)
    assert other == replace(edited_work(SIZES, 2, 2), mlp=4 * (2 + 5), logits=4 * 5), "the last MLP runs at the targets"
    assert patch_work(SHAPE, SIZES, heads=2) == patch_work(SHAPE, SIZES, 2, 2 * 1 / 2)


def test_edges_are_products_of_senders_and_receivers():
    graph, forward = Graph(n_layers=2, n_heads=3, n_key_heads=1), forward_work(SHAPE, SIZES)
    heads = attribute_work(SHAPE, SIZES, 4)
    assert heads == 2 * forward + 4 * (forward + backward_work(SHAPE, SIZES))
    assert attribute_work(SHAPE, SIZES) == attribute_work(SHAPE, SIZES, 1), "one gradient"
    edges = attribute_work(SHAPE, SIZES, 4, edges=True)
    in_norms = sum(receiver.site in ("q", "k", "v") for receiver in graph.receivers)
    pairs = len(graph.receivers) * len(graph.senders) / 2  # half of the senders come before a receiver
    products = 4 * 4 * 7 * 6 * (pairs + in_norms * _THROUGH_A_NORM)
    again = 2 * 4 * RUN  # forward and back
    assert edges == replace(heads, attention=heads.attention + again, mlp=heads.mlp + again, products=products)


def test_probes_are_scored_in_and_out_of_distribution():
    apart = replace(SIZES, changed=0)
    alone, probed = tune_work(SHAPE, apart, 9), tune_work(SHAPE, apart, 9, probes=2, probe_prompts=3)
    one = score_work(SHAPE, PromptSizes(1, 7, 5))
    assert probed == alone + 2 * 2 * 3 * one
    assert tune_work(SHAPE, apart, 9, probes=2) == alone + 2 * 2 * one
    assert alone.attention == 9 * 2 * RUN
    # Of 7 tokens 5 are run once; the last MLP computes one of them, and the 5 targets of either prompt.
    shared = Work(
        (5 + 2 * 2) * 2, 5 + 1 + 2 * (2 + 5), 2 * (1 + 2 + 3 + 4 + 5) + 2 * 2 * 12, 1 + 2 * 5, 2 * one.products
    )
    assert tune_work(SHAPE, SIZES, 9, probes=2, probe_prompts=3) == alone + 2 * 3 * shared


def test_localize_by_hand():
    """Tokens through the attention of two layers, and predictions, of five of ten prompts."""
    sizes = PromptSizes(prompts=10, tokens=7, targets=5, changed=2)
    work = localize_work(SHAPE, sizes, candidates=4, sets=8, exchanged=3, above=0.5, renamed=11)
    run, layer = 5 * 7 * 2, 5 * 7
    scored = 4 * run + 11 * 7 * 2
    chosen = run + run + 4 / 2 * layer + run + 5 * 2 * 2 + 4 / 2 * 5 * 2  # candidates, on the half that chooses
    ablated = run + run + (4 / 2 + 8 * 0.5 * 2) * layer
    patched, alone = (
        run + 5 * 2 * 2 + heads / 2 * 5 * 2 for heads in (4 + 2 + 3, 4 + 2)
    )  # two of six are no candidates
    assert work.attention == scored + chosen + ablated + patched
    assert work.logits == 5 * 5 * (4 + (1 + 1 + 4) + (1 + 1 + 4) + (1 + 1 + 4 + 8) + (1 + 1 + 4 + 2 + 3)) + 11
    assert work.products == _OF_A_ROW * 2 * 3 * 7 * (4 * 5 * 5 + 11)
    without = localize_work(SHAPE, sizes, 4, 8, above=0.5, renamed=0)
    assert without.attention == 4 * run + chosen + ablated + alone, "nothing is exchanged or renamed"
    renamed = renamed_tokens._QUERIES * renamed_tokens._NAMES
    assert localize_work(SHAPE, sizes, 4, 8) == localize_work(SHAPE, sizes, 4, 8, 0, 0.75, renamed)


def test_adapters_read_and_write_queries_keys_and_values():
    small, large = (tune_work(SHAPE, SIZES, steps=9, rank=rank) for rank in (1, 3))
    numbers = 2 * ((6 + 3 * 2) + (6 + 2) + (6 + 2))  # of the ranks that are added, each from d_model to its heads
    three_times = 3 * 9 * RUN * numbers  # forward, back, and for the weights themselves
    assert large == replace(small, products=small.products + three_times)
    dropped = 3 * 9 * RUN * 6 * _DROPPED  # what each of the three reads
    assert small.products == three_times / 2 + dropped
    assert tune_work(SHAPE, SIZES, steps=9) == tune_work(SHAPE, SIZES, steps=9, rank=ac.TuneConfig().r)


@pytest.mark.slow  # each part is counted above
def test_localize_is_the_sum_of_its_parts():
    model, task, n = ac.load("toy-llama"), ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=8), 20
    prompts = task.sample(n, model.tokenizer, references=False)
    sizes = replace(PromptSizes.of(ac.Pair(*task.pairs(prompts[n // 2 :], 0))), prompts=n)
    with counting(model) as counts:
        found = ac.localize(model, task, n=n, n_controls=3)
    whole = found.evidence.set_ablations.where(kind="all", ablated="nothing").frame["n"].iloc[0]
    controls = [draws for verdict in found.verdicts if verdict.role for draws in verdict.controls.values()]
    drawn = sum(math.isfinite(accuracy) for draws in controls for accuracy in draws)
    sets = found.evidence.set_ablations.where(kind="all").frame["n"].sum() / whole + drawn / 2
    candidates = len(found.evidence.ablation_effects.frame[["layer", "head"]].drop_duplicates())
    exchanged = 0 if found.evidence.interchanges is None else len(found.evidence.interchanges.frame) // 2
    assert candidates > 4
    assert sets > 4
    work = localize_work(ModelShape.of(model), sizes, candidates, sets, exchanged)
    assert 0.8 < counts["attention"] / work.attention < 1.25
    assert 0.8 < counts["mlp"] / work.mlp < 1.25


def test_scores_read_a_row_of_attention_for_each_head_and_target():
    run, scores = evaluate_work(SHAPE, SIZES), score_work(SHAPE, SIZES)
    assert scores == replace(run, products=_OF_A_ROW * 2 * 3 * 4 * 5 * 7)


@pytest.mark.parametrize("sizes", [ModelShape, PromptSizes])
def test_sizes_check_their_arguments(sizes: Any):
    with pytest.raises(WrongArgument, match="; it takes "):
        sizes(no_such_argument=0)


def test_works_add_up(model: Any, pair: ac.Pair):
    shape, sizes = ModelShape.of(model), PromptSizes.of(pair)
    one = forward_work(shape, sizes)
    assert (one + one).flops(shape) == (2 * one).flops(shape) == 2 * one.flops(shape)
    assert (3 * one).passes(shape, one) == pytest.approx(3)
    assert base_work(shape, sizes).passes(shape, one) < 1
