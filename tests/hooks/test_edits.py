"""Edits beside hooks written by hand: one prompt at a time, without padding, one position after the other."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from legs import product, slow_but
from refusals import refused
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.hooks.edits import AblationBaseline, BatchContext, Edit
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, name_of
from align_circuits.jobs.identity import identity_of
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.run.forward_pass import capture, forward
from align_circuits.tables.provenance import Provenance

HEADS = [(0, 2), (0, 3), (1, 0), (1, 1)]
"""Two in each layer, which share a key head where four heads have two."""
LAYERS = [0, 1]
SITES: Any = HEAD_SITES + LAYER_SITES
NAMES = ["llama", "gpt2", "plain"]
New = Callable[[int, Any, int, int, Tensor], Any]
"""(layer, column, prompt, position without padding, old) -> what stands there instead."""


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> Prompts:
    """Prompts of few different tokens, of several kinds and two examples."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(12, (length,), generator=generator).tolist() for length in lengths]
    prompts = Prompts.from_tokens(ids)
    kinds = torch.randint(2, 5, prompts.mask.shape, generator=generator).where(prompts.mask, TokenKind.PAD.value)
    example = (torch.arange(prompts.mask.shape[1]) >= 6).long().where(prompts.mask, -1).expand_as(prompts.mask)
    return replace(prompts, token_kinds=kinds, example=example)


PADDED = random_prompts((9, 6, 10))
EQUAL = random_prompts((9, 9, 9))
POSITIONS = torch.rand(PADDED.mask.shape, generator=torch.Generator().manual_seed(3)) < 0.5


def plain_model() -> HandBuilt:
    """A model without Hugging Face: TransformerLens's hooks on a module of one's own, random weights."""
    cfg = HandBuiltConfig(n_layers=2, n_heads=4, d_model=32, d_head=8, d_mlp=16, d_vocab=64, n_ctx=64)
    model, generator = HandBuilt(cfg), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


@pytest.fixture(scope="module")
def models(random_hf_model):
    """Each model once."""
    made = {"plain": plain_model()}

    def make(name: str) -> Any:
        if name not in made:
            made[name] = ac.load(random_hf_model(name))
        return made[name]

    return make


def logits_of(
    model: Any, prompts: Prompts, engine: Any = "auto", batch_size: Any = "auto", **options: Any
) -> tuple[Tensor, str]:
    """The logits at every target, and the engine that ran."""
    found = torch.full((len(prompts.targets), model.cfg.d_vocab), torch.nan, dtype=torch.float64)
    ran = forward(
        model,
        prompts,
        prompt=prompts.column("prompt"),
        query=prompts.column("query_pos"),
        on_logits=lambda rows, logits: found.__setitem__(rows, logits.double()),
        options=ac.RunOptions(engine, batch_size),
        **options,
    )
    assert not found.isnan().any()
    return found, ran


def alone(prompts: Prompts, index: int) -> tuple[Tensor, int]:
    """One prompt's tokens [1 pos], and the padding before them."""
    mask = prompts.mask[index]
    return prompts.tokens[index][mask][None], int((~mask).sum())


def size_of(model: Any, site: str) -> int:
    """The last dimension of an activation."""
    return 8 if site in HEAD_SITES else model.cfg.d_mlp if site == "mlp_post" else 32


def hooks_at(model: Any, site: Any, layer: int, edit: Callable[..., Tensor]) -> list[Any]:
    """Hooks that edit a site. On a bridge `hook_resid_mid` is what the MLP reads alone: there the stream between
    attention and MLP is changed by what attention adds to it."""
    if site != "resid_mid" or not hasattr(model, "original_model"):
        return [(name_of(site, layer), edit)]
    before: list[Tensor] = []
    return [
        (f"blocks.{layer}.hook_resid_pre", lambda x, hook: before.__setitem__(slice(None), [x])),  # noqa: ARG005
        (f"blocks.{layer}.hook_attn_out", lambda x, hook: edit(before[0] + x, hook=hook) - before[0]),
    ]


def computed(model: Any, prompts: Prompts, site: Any, layer: int) -> list[Tensor]:
    """What a model computes at a site, prompt by prompt."""
    found = []
    for index in range(len(prompts)):
        model.run_with_hooks(
            alone(prompts, index)[0],
            fwd_hooks=[(name_of(site, layer), lambda x, **_: found.append(x[0].detach().clone()))],
        )
    return found


def part(activation: Tensor, site: str, column: Any, pos: int) -> Tensor:
    """The part of an activation, without prompts, that belongs to a head and a position."""
    return activation[column, pos] if site == "pattern" else activation[pos, column]


def columns_of(model: Any, site: str) -> dict[int, list[Any]]:
    """What HEADS are called in the activations of each layer; in a site of layers, all that a token has."""
    if site in LAYER_SITES:
        return {layer: [slice(None)] for layer in LAYERS}
    shared = 4 // (getattr(model.cfg, "n_key_value_heads", None) or 4) if site in ("k", "v") else 1
    return {layer: sorted({head // shared for where, head in HEADS if where == layer}) for layer in LAYERS}


def by_hand(model: Any, prompts: Prompts, site: Any, new: New, positions: Tensor | None = None) -> Tensor:
    """The logits at every target under plain hooks, one prompt at a time."""
    found = []
    for index in range(len(prompts)):
        tokens, left = alone(prompts, index)

        def hooked(layer: int, columns: list[Any], index: int = index, left: int = left) -> Callable[..., Tensor]:
            def hook(activation: Tensor, **_: Any) -> Tensor:
                activation = activation.clone()
                for pos in range(activation.shape[2 if site == "pattern" else 1]):
                    if positions is None or positions[index, left + pos]:
                        for column in columns:
                            old = part(activation[0], site, column, pos)
                            old.copy_(torch.as_tensor(new(layer, column, index, pos, old.clone())))
                return activation

            return hook

        hooks = [
            pair
            for layer, columns in columns_of(model, site).items()
            for pair in hooks_at(model, site, layer, hooked(layer, columns))
        ]
        with torch.no_grad():
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks)[0].double()
        query = prompts.column("query_pos")[prompts.column("prompt") == index]
        found.append(logits[query - left])
    return torch.cat(found)


def place(site: str) -> dict[str, Any]:
    return {"site": site, **({"heads": HEADS} if site in HEAD_SITES else {"layers": LAYERS})}


def assert_equal(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def assert_edit_is(model: Any, prompts: Prompts, edit: Edit, expected: Tensor) -> None:
    """Both engines, where they apply, and in batches."""
    intact, _ = logits_of(model, prompts)
    assert (expected - intact).abs().max() > 1e-2, "the edit does something"
    for options in ({}, {"engine": "reference", "batch_size": 2}):
        assert_equal(logits_of(model, prompts, edits=[edit], **options)[0], expected)


class TestBesideHooksByHand:
    @pytest.mark.parametrize(("site", "name"), product(SITES, NAMES))
    def test_zero(self, models, name, site):
        model = models(name)
        for positions in (None, POSITIONS):
            expected = by_hand(model, PADDED, site, lambda *_: 0.0, positions)
            assert_edit_is(model, PADDED, ac.Ablate(**place(site), positions=positions, how="zero"), expected)

    @pytest.mark.parametrize(("site", "name"), product((site for site in SITES if site != "pattern"), NAMES))
    def test_steer(self, models, name, site):
        model = models(name)
        vector = torch.randn(size_of(model, site), generator=torch.Generator().manual_seed(5))

        def new(_layer, _column, _index, _pos, old):
            return old + 1.5 * vector

        expected = by_hand(model, PADDED, site, new, POSITIONS)
        assert_edit_is(model, PADDED, ac.Steer(**place(site), positions=POSITIONS, vector=vector, scale=1.5), expected)

    @pytest.mark.parametrize(("site", "name"), product(SITES, NAMES))
    def test_patch(self, models, name, site):
        model, other = models(name), random_prompts((9, 6, 10), seed=7)
        names = [name_of(site, layer) for layer in LAYERS]
        cached = {layer: computed(model, other, site, layer) for layer in LAYERS}
        values = capture(model, other, names, options=ac.RunOptions(engine="reference", batch_size=2))

        def new(layer, column, index, pos, _old):
            return part(cached[layer][index], site, column, pos)

        expected = by_hand(model, PADDED, site, new, POSITIONS)
        assert_edit_is(model, PADDED, ac.Patch(**place(site), positions=POSITIONS, values=values), expected)

    @pytest.mark.parametrize(("site", "name"), product((site for site in SITES if site != "pattern"), NAMES))
    def test_mean_by_role(self, models, name, site):
        model, others = models(name), random_prompts((8, 10, 7, 10), seed=9)
        means: dict[tuple[int, int, int], list[Tensor]] = {}

        def group(prompts: Prompts, layer: int, index: int, pos: int) -> tuple[int, int, int]:
            """Layer, role, and whether the token belongs to the last example of its prompt."""
            pos += alone(prompts, index)[1]
            example = prompts.example[index]
            return layer, int(prompts.token_kinds[index, pos]), int(example[pos] == example.max())

        for layer in LAYERS:
            for index, activation in enumerate(computed(model, others, site, layer)):
                for pos, token in enumerate(activation):
                    means.setdefault(group(others, layer, index, pos), []).append(token)
        assert len(means) == 12, "three kinds, before and in the test example, in two layers"

        def new(layer, column, index, pos, _old):
            return torch.stack(means[group(PADDED, layer, index, pos)]).mean(0)[column]

        expected = by_hand(model, PADDED, site, new, POSITIONS)
        reference = ablation_baseline(model, others, "mean", site=site, options=ac.RunOptions(batch_size=3))
        edit = ac.Ablate(**place(site), positions=POSITIONS, how="mean", baseline=reference)
        assert_edit_is(model, PADDED, edit, expected)

    @pytest.mark.parametrize(("site", "name"), product(SITES, NAMES))
    def test_resample(self, models, name, site):
        model, others = models(name), random_prompts((9, 9, 9), seed=9)
        cached = {layer: computed(model, others, site, layer) for layer in LAYERS}

        def new(layer, column, index, pos, _old):
            return part(cached[layer][[1, 2, 0][index]], site, column, pos)

        reference = ablation_baseline(model, others, "resample", site=site)
        edit = ac.Ablate(**place(site), how="resample", baseline=reference)
        assert_edit_is(model, EQUAL, edit, by_hand(model, EQUAL, site, new))

    @pytest.mark.parametrize("relation", ["induction", "previous"])
    @pytest.mark.parametrize("name", NAMES)
    def test_clamp(self, models, name, relation):
        model, rows = models(name), PADDED.relations[relation]
        keys = {
            (int(rows.prompt[row]), int(rows.query[row])): rows.keys_of(row) for row in range(len(rows))
        }  # with padding
        assert relation == "previous" or max(map(len, keys.values())) > 1, "equally to several"

        def new(_layer, _column, index, pos, old):
            left = alone(PADDED, index)[1]
            if (index, left + pos) not in keys:
                return old
            right = keys[index, left + pos]
            return torch.tensor([(left + k in right) / len(right) for k in range(len(old))])

        assert_edit_is(model, PADDED, ac.Clamp(HEADS, relation), by_hand(model, PADDED, "pattern", new))


class TestParts:
    """Neurons, directions, named positions, and hook points by their full names."""

    @pytest.mark.parametrize(("site", "name"), product(["mlp_post", "resid_mid", "z", "v"], NAMES))
    def test_neurons(self, models, name, site):
        model, neurons = models(name), [5, 0, 3]
        vector = torch.randn(size_of(model, site), generator=torch.Generator().manual_seed(5))

        def new(layer, column, index, pos, old):  # noqa: ARG001
            old[neurons] += vector[neurons]
            return old

        edit = ac.Steer(**place(site), vector=vector, neurons=neurons, positions=POSITIONS)
        assert_edit_is(model, PADDED, edit, by_hand(model, PADDED, site, new, POSITIONS))

    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    @pytest.mark.parametrize(("site", "k"), product(["attn_out", "mlp_post", "resid_mid", "z"], [None, 1, 3]))
    def test_directions(self, models, name, site, k):
        """The part within the span comes from the other run, the rest stays."""
        model, other, size = models(name), random_prompts((9, 6, 10), seed=7), size_of(models(name), site)
        vectors = torch.randn(k or 1, size, generator=torch.Generator().manual_seed(5))
        basis = torch.linalg.qr(vectors.T).Q.T
        held = {layer: computed(model, other, site, layer) for layer in LAYERS}

        def new(layer, column, index, pos, old):
            change = part(held[layer][index], site, column, pos) - old
            return old + sum((change @ row) * row for row in basis)

        values = capture(model, other, [name_of(site, layer) for layer in LAYERS])
        edit = ac.Patch(**place(site), values=values, direction=2 * vectors[0] if k is None else basis)
        assert_edit_is(model, PADDED, edit, by_hand(model, PADDED, site, new))

    def test_a_direction_is_projected_out(self, models):
        model, some = models("llama"), torch.randn(32, generator=torch.Generator().manual_seed(5))
        edit = ac.Ablate(layers=[0], site="resid_post", direction=some, how="zero")
        after = capture(model, PADDED, ["blocks.0.hook_resid_post"], edits=[edit])["blocks.0.hook_resid_post"]
        before = capture(model, PADDED, ["blocks.0.hook_resid_post"])["blocks.0.hook_resid_post"]
        unit = some / some.norm()
        assert (before @ unit).abs().max() > 0.1
        torch.testing.assert_close(after, before - (before @ unit)[..., None] * unit, atol=1e-5, rtol=0)

    @pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale/hook_normalized")
    @pytest.mark.parametrize("hook", ["hook_embed", "ln_final.hook_normalized", "blocks.1.ln2.hook_out"])
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_any_hook_point(self, models, name, hook):
        model, other = models(name), random_prompts((9, 6, 10), seed=7)
        values, expected = capture(model, other, [hook]), []
        for index in range(3):
            tokens, left = alone(PADDED, index)
            chosen = POSITIONS[index, left:, None]
            theirs = values[hook][index, left:]

            def patch(x: Tensor, hook: Any, chosen: Tensor = chosen, theirs: Tensor = theirs) -> Tensor:  # noqa: ARG001
                return torch.where(chosen, theirs, x)

            with torch.no_grad():
                logits = model.run_with_hooks(tokens, fwd_hooks=[(hook, patch)])[0].double()
            expected.append(logits[PADDED.column("query_pos")[PADDED.column("prompt") == index] - left])
        edit = ac.Patch(hook=hook, positions=POSITIONS, values=values)
        assert_edit_is(model, PADDED, edit, torch.cat(expected))
        mean = ac.Ablate(hook=hook, how="mean", baseline=ablation_baseline(model, PADDED, hook=hook))
        assert not torch.equal(logits_of(model, PADDED, edits=[mean])[0], logits_of(model, PADDED)[0])

    def test_a_hook_point_of_a_site_is_that_site(self, models):
        for name in ("llama", "plain"):
            model, vector = models(name), torch.ones(32)
            places: Any = {"layers": [1], "site": "resid_mid"}, {"hook": "blocks.1.hook_resid_mid"}
            one, other = (logits_of(model, PADDED, edits=[ac.Steer(**at, vector=vector)])[0] for at in places)
            assert torch.equal(one, other)

    def test_the_stream_between_attention_and_mlp_passes_the_mlp_by(self, models):
        """What `hook_resid_mid` alone changes on a bridge is another number."""
        model = models("llama")
        twice = [ac.Steer(layers=[1], site=site, vector=torch.ones(32)) for site in ("resid_mid", "resid_post")]
        names = ["blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"]
        mid, mlp, post = capture(model, EQUAL, names, edits=twice).values()
        torch.testing.assert_close(post, mid + mlp + 1, atol=1e-5, rtol=0)
        torch.testing.assert_close(mid, capture(model, EQUAL, names[:1])[names[0]] + 1)

    def test_named_positions(self, models):
        places = {"a": torch.tensor([4, 8, 5]), "b": torch.tensor([9, 9, 9])}
        model, prompts = models("llama"), replace(PADDED, positions=places)
        for names in ("a", ["a", "b"]):
            edits = [ac.Ablate(HEADS, positions=where, how="zero") for where in (names, prompts.mask_of(names))]
            one, other = (logits_of(model, prompts, edits=[edit], batch_size=2)[0] for edit in edits)
            assert torch.equal(one, other) and not torch.equal(one, logits_of(model, prompts)[0])
        with pytest.raises(KeyError, match="no position 'c' in these prompts: they have 'a', 'b'"):
            ac.evaluate(model, prompts, edits=[ac.Ablate(HEADS, positions="c", how="zero")])
        assert len(ac.Ablate(HEADS, positions="a", how="zero").fwd_hooks(model, prompts[:1])) == 2
        with pytest.raises(ValueError, match=r"named positions depend on the prompts: give them, as in fwd_hooks"):
            ac.Ablate(HEADS, positions="a", how="zero").fwd_hooks(model)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"hook": "hook_embed", "layers": [0]}, "already names the activation: name no site, heads or layers"),
            ({"hook": "blocks.0.attn.q_norm.hook_out"}, "has heads before tokens"),
            ({"heads": [(0, 0)], "neurons": [0], "direction": torch.ones(8)}, "neurons and a direction at once"),
            ({"heads": [(0, 0)], "neurons": []}, r"neurons=\[\]: name at least one"),
            ({"heads": [(0, 0)], "direction": torch.zeros(8)}, "a direction of length 0.0"),
            (
                {"heads": [(0, 0)], "direction": torch.ones(2, 2, 8)},
                r"shape \(2, 2, 8\): give a vector, or orthonormal rows",
            ),
            ({"heads": [(0, 0)], "direction": torch.ones(2, 8)}, r"\(2, 8\): its rows are not orthonormal; take torch"),
        ],
    )
    def test_parts_that_make_no_sense(self, fields, message):
        refused(message, ac.Ablate, **fields)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                ac.Ablate([(0, 0)], neurons=[1, 8, -1], how="zero"),
                "no neuron 8 at 'blocks.0.attn.hook_z': it has 8, counted",
            ),
            (
                ac.Ablate([(0, 0)], neurons=[1, -1, 8], how="zero"),
                "no neuron -1 at 'blocks.0.attn.hook_z': it has 8, counted",
            ),
            (
                ac.Ablate([(0, 0)], direction=torch.ones(9), how="zero"),
                "a direction of 9 numbers at 'blocks.0.attn.* give 8",
            ),
            (ac.Ablate([(0, 0)], site="pattern", neurons=[0], how="zero"), "has neither neurons nor directions"),
            (
                ac.Ablate(hook="ln_final.hook_norm", how="zero"),
                "no hook point 'ln_final.hook_norm' .*ln_final.hook_normalized",
            ),
            (
                ac.Ablate(hook="hook_pos_embed", how="zero"),
                "'hook_pos_embed' never fired.* Among those that fire are .*hook_embed",
            ),
            (ac.Ablate(hook="hook_embed", how="mean"), r"ablation_baseline\(model, prompts, how='mean', hook='hook_e"),
        ],
    )
    def test_parts_that_are_not_there(self, models, edit, message):
        refused(message, ac.evaluate, models("llama"), EQUAL, edits=[edit])


class TestTogether:
    @pytest.mark.parametrize("name", NAMES)
    def test_edits_that_meet_apply_in_order(self, models, name):
        model, vector = models(name), torch.ones(8)
        steer, zero = ac.Steer([(1, 1), (1, 2)], vector=vector), ac.Ablate([(1, 1)], how="zero")
        for edits, ones in (([zero, steer], True), ([steer, zero], False)):

            def hook(z, ones=ones, **_):
                z[:, :, 1] = float(ones)
                z[:, :, 2] += 1
                return z

            with torch.no_grad():
                logits = model.run_with_hooks(EQUAL.tokens, fwd_hooks=[("blocks.1.attn.hook_z", hook)])
            expected = logits[EQUAL.column("prompt"), EQUAL.column("query_pos")].double()
            assert_equal(logits_of(model, EQUAL, edits=edits)[0], expected)

    @pytest.mark.parametrize("name", NAMES)
    def test_hooks_equal_edits(self, models, name):
        model = models(name)
        means, values = ablation_baseline(model, PADDED), capture(model, PADDED, ["blocks.1.hook_resid_pre"])
        flipped = {name: value.flip(2) for name, value in values.items()}
        for edit in (
            ac.Ablate(HEADS, how="zero"),
            ac.Ablate(HEADS, how="mean", baseline=means, positions=POSITIONS),
            ac.Patch(layers=[1], site="resid_pre", values=flipped),
            ac.Clamp(HEADS, "induction"),
            ac.Steer(HEADS, vector=torch.ones(8)),
        ):
            edited = ac.evaluate(model, PADDED, edits=[edit])
            with model.hooks(fwd_hooks=edit.fwd_hooks(model, PADDED)):
                hooked = ac.evaluate(model, PADDED)
            pd.testing.assert_frame_equal(hooked.frame, edited.frame, atol=1e-5)
            assert not ac.evaluate(model, PADDED).frame["value"].equals(edited.frame["value"])

    def test_hooks_do_without_prompts_where_the_edit_does(self, models):
        model = models("llama")
        patch = ac.Patch([(1, 2)], values=capture(model, EQUAL, ["blocks.1.attn.hook_z"]))
        edits = [ac.Ablate([(0, 1)], how="zero"), patch]
        with torch.no_grad():
            hooks = [hook for edit in edits for hook in edit.fwd_hooks(model)]
            logits = model.run_with_hooks(EQUAL.tokens, fwd_hooks=hooks)
        expected, _ = logits_of(model, EQUAL, edits=edits)
        assert_equal(logits[EQUAL.column("prompt"), EQUAL.column("query_pos")].double(), expected)

    def test_a_clamped_head_hits(self, models):
        model = models("llama")
        clamp = ac.Clamp([(0, 1), (1, 3)], "induction")
        metrics, options = ["induction_hit", "induction"], ac.RunOptions(engine="reference")
        table = ac.score_heads(model, PADDED, metrics, edits=[clamp], options=options)
        value: Any = table.frame.set_index(["metric", "layer", "head"])["value"]
        for metric in ("induction_hit", "induction"):
            assert value[metric, 0, 1] == value[metric, 1, 3] == pytest.approx(1, abs=1e-6)
            assert value[metric, 0, 0] < 0.9

    def test_readers_see_what_was_edited(self, models):
        model, found = models("llama"), {}
        forward(
            model,
            EQUAL,
            prompt=torch.arange(3),
            query=torch.full((3,), 8),
            on_activation={"blocks.0.attn.hook_z": lambda rows, z: found.update({int(rows[0]): z.clone()})},
            edits=[ac.Ablate([(0, 1)], how="zero")],
            options=ac.RunOptions(batch_size=2),
        )
        assert set(found) == {0, 2} and all((z[:, :, 1] == 0).all() and (z[:, :, 0] != 0).any() for z in found.values())


class TestEngines:
    @pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt_neox"])
    def test_agree(self, models, name):
        model = models(name)
        sites: Any = ["z", "q", "k", "v", *LAYER_SITES]
        if name == "gpt_neox":
            sites = ["z", *(site for site in LAYER_SITES if site != "resid_mid")]
        some = torch.randn(48, generator=torch.Generator().manual_seed(1)) / 3
        steer = [ac.Steer(**place(site), vector=some[: size_of(model, site)]) for site in sites]
        mean = ac.Ablate([(1, 3)], how="mean", baseline=ablation_baseline(model, PADDED))
        for edits in (steer, [mean]):
            fast, reference = (logits_of(model, PADDED, edits=edits, engine=which) for which in ("fast", "reference"))
            assert (fast[1], reference[1]) == ("fast", "reference")
            assert_equal(fast[0], reference[0])
            assert logits_of(model, PADDED, edits=edits)[1] == "fast", "auto"

    @pytest.mark.parametrize(
        "name", slow_but(["llama", "gpt2"], ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"])
    )
    def test_edits_in_the_attention_function_equal_the_hooks(self, models, name):
        model, other = models(name), random_prompts((9, 6, 10), seed=7)
        whole: dict[str, Any] = {"heads": [(0, 0), (0, 1), (1, 2), (1, 3)]}
        rotated = [] if name == "gpt2" else [("rot_q", "q"), ("rot_k", "k")]
        pairs: Any = [("z", "z"), ("v", "v"), ("pattern", "pattern"), *rotated]
        for site, plain in pairs:
            if name == "gpt_neox" and site.startswith("rot"):  # whose queries TransformerLens cannot patch
                fast, reference = (
                    logits_of(model, PADDED, edits=[ac.Ablate(**whole, site=s, how="zero")], engine=e)
                    for s, e in ((site, "fast"), (plain, "reference"))
                )
            else:
                names = [[name_of(which, layer) for layer in LAYERS] for which in (site, plain)]
                values = [capture(model, other, names[0], options=ac.RunOptions(engine="fast"))]
                values.append(capture(model, other, names[1], options=ac.RunOptions(engine="reference")))
                fast, reference = (
                    logits_of(model, PADDED, edits=[ac.Patch(**whole, site=s, values=v)], engine=e)
                    for s, v, e in zip((site, plain), values, ("fast", "reference"), strict=True)
                )
                if site == plain:
                    for one in names[0]:
                        torch.testing.assert_close(values[0][one], values[1][one], atol=1e-5, rtol=0)
            assert (fast[1], reference[1]) == ("fast", "reference")
            assert_equal(fast[0], reference[0])
            assert (fast[0] - logits_of(model, PADDED)[0]).abs().max() > 1e-2

    def test_rows_of_attention_come_after_an_edit_of_the_pattern(self, models):
        edit = ac.Ablate(HEADS, site="pattern", how="zero")
        rows: dict[str, Any] = {"prompt": torch.tensor([0, 1]), "query": torch.tensor([9, 9])}
        found: dict[Any, Tensor] = {}
        for engine in ("fast", "reference"):
            forward(
                models("llama"),
                PADDED,
                **rows,
                edits=[edit],
                on_pattern=lambda _, layer, x, engine=engine: found.update({(engine, layer): x.clone()}),
                options=ac.RunOptions(engine=engine),
            )
        for layer in LAYERS:
            torch.testing.assert_close(found["fast", layer], found["reference", layer], atol=1e-5, rtol=0)
        assert bool((found["fast", HEADS[0][0]][:, HEADS[0][1]] == 0).all())

    @pytest.mark.parametrize(("name", "site"), [("gpt2", "q"), ("gpt_neox", "q")])
    def test_silent_sites_go_to_the_reference(self, models, name, site):
        model, edit = models(name), ac.Ablate(HEADS, site=site, how="zero")
        assert logits_of(model, EQUAL)[1] == "fast"
        assert logits_of(model, EQUAL, edits=[edit])[1] == "reference"
        message = rf"hook_{site}' does not fire under it; leave the engine at 'auto'|hook_{site} d"
        refused(message, logits_of, model, EQUAL, edits=[edit], engine="fast")

    @pytest.mark.parametrize("name", NAMES)
    def test_batches_and_padding_change_nothing(self, models, name):
        model, other = models(name), random_prompts((9, 6, 10), seed=7)
        values = capture(model, other, ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"])
        means = ablation_baseline(model, other, options=ac.RunOptions(batch_size=1))
        for edits in (
            [ac.Ablate(HEADS, how="mean", baseline=means)],
            [ac.Patch(HEADS, values=values, positions=POSITIONS)],
            [ac.Clamp(HEADS, "previous"), ac.Steer(layers=[0], site="mlp_out", vector=torch.ones(32))],
        ):
            one, _ = logits_of(model, PADDED, edits=edits)
            for size in (1, 2):
                for engine in ("auto", "reference"):
                    assert_equal(logits_of(model, PADDED, edits=edits, batch_size=size, engine=engine)[0], one)

    @pytest.mark.parametrize("name", NAMES)
    def test_capture_is_what_each_prompt_computes_alone(self, models, name):
        model = models(name)
        for site in SITES:
            cached = capture(model, PADDED, [name_of(site, 1)], options=ac.RunOptions(batch_size=2))
            expected = computed(model, PADDED, site, 1)
            for index, activation in enumerate(cached[name_of(site, 1)]):
                left = alone(PADDED, index)[1]
                mine = activation[:, left:, left:] if site == "pattern" else activation[left:]
                assert_equal(mine, expected[index])
                padding = activation[:, :left] if site == "pattern" else activation[:left]
                assert (padding == 0).all(), "whatever the batch"


class TestRefusals:
    def test_hooks_that_never_fire(self):
        model = plain_model()
        model.blocks[1].forward = lambda residual, _hidden: residual
        for edit in (ac.Ablate([(1, 0)], how="zero"), ac.Ablate(layers=[1], site="mlp_out", how="zero")):
            refused(r"'blocks.1.*' never fired.*silent are 1 of 1", edit.fwd_hooks, model)
            refused("never fired", ac.evaluate, model, EQUAL, edits=[edit])

    def test_hooks_that_do_not_exist(self):
        model = plain_model()
        model.cfg = replace(model.cfg, n_layers=3)
        refused(
            r"no hook point 'blocks.2.attn.hook_z' in this HandBuilt", ac.Ablate([(2, 0)], how="zero").fwd_hooks, model
        )

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (ac.Ablate([(2, 0)], how="zero"), "no head L2H0: this model has layers 0 to 1 with heads 0 to 3"),
            (ac.Ablate([(0, -1)], how="zero"), "no head L0H-1"),
            (ac.Ablate([(0, 1), (1, 4)], how="zero"), "no head L1H4"),
            (ac.Ablate(layers=[2], site="mlp_out", how="zero"), "no layer 2: this model has layers 0 to 1"),
            (ac.Ablate(how="zero"), "takes place at heads: name at least one, and no layers"),
            (ac.Ablate([(0, 0)], layers=[0], how="zero"), "takes place at heads: name at least one, and no layers"),
            (
                ac.Ablate([(0, 0)], site="resid_pre", how="zero"),
                "takes place at layers: name at least one, and no heads",
            ),
            (ac.Clamp([], "induction"), "takes place at heads: name at least one"),
            (ac.Clamp([(0, 4)], "induction"), "no head L0H4"),
            (
                ac.Ablate([(0, 2)], site="k", how="zero"),
                "share a key head cannot change their k apart: name all of L0H2 L0H3",
            ),
            (ac.Ablate([(1, 1), (1, 2)], site="v", how="zero"), "name all of L1H0 L1H1 L1H2 L1H3"),
            (ac.Ablate([(0, 0)], how="mean"), r"needs a baseline that has 'blocks.0.attn.hook_z'"),
            (ac.Ablate([(0, 0)], how="resample"), r"needs a baseline .* ablation_baseline\(.*, how='resample'"),
            (ac.Patch([(1, 0)]), "no values for 'blocks.1.attn.hook_z': this patch has none"),
            (ac.Patch([(1, 0)], values={"blocks.0.attn.hook_z": torch.zeros(3, 9, 4, 8)}), "has blocks.0.attn.hook_z"),
            *(
                (
                    ac.Patch([(1, 3)], values={"blocks.1.attn.hook_z": torch.zeros(3, 9, *shape)}),
                    "at a token, which the",
                )
                for shape in ((4, 1), (1, 8), (8,), (4, 7), ())
            ),
            (ac.Steer([(0, 0)]), "no vector= is given to add at .*: give 8 numbers"),
            (ac.Steer([(0, 0)], vector=torch.ones(32)), r"a vector of shape \(32,\) .* give 8 numbers"),
            (ac.Steer(layers=[0], site="resid_pre", vector=torch.ones(8)), "give 32 numbers"),
            (ac.Steer([(0, 0)], site="pattern", vector=torch.ones(9)), "any site but 'pattern'"),
            (
                ac.Ablate([(0, 0)], layers=[0], site="resid_pre", how="zero"),
                "takes place at layers: name at least one, and no h",
            ),
            (ac.Ablate(site="resid_pre", how="zero"), "takes place at layers: name at least one, and no heads"),
        ],
    )
    def test_edits_that_make_no_sense(self, models, edit, message):
        refused(message, ac.evaluate, models("llama"), EQUAL, edits=[edit])

    def test_values_of_another_site_and_masks_of_numbers(self, models):
        other = ac.Patch(layers=[1], site="resid_pre", values={"blocks.1.hook_resid_pre": torch.zeros(3, 9, 1)})
        refused(
            r"are \(1,\) at a token, which the model's own are not: \(32,\)",
            ac.evaluate,
            models("llama"),
            EQUAL,
            edits=[other],
        )
        for numbers in (torch.ones(3, 9), torch.ones(3, 9, dtype=torch.long)):
            with pytest.raises(ValueError, match=r"positions of torch\.\w+: give a mask of True and False"):
                unchecked(ac.Ablate([(0, 0)], how="zero"), positions=numbers).__post_init__()

    def test_unknown_names(self, models):
        model, wrong = models("llama"), {"site": "attn"}
        with pytest.raises(ValueError, match="site='attn': choose one of z, q, k, v, pattern, rot_q, rot_k, resid_pre"):
            unchecked(ac.Ablate([(0, 0)], how="zero"), **wrong).fwd_hooks(model)
        for name in ("ln_final.hook_normalized", "hook_embed"):
            with pytest.raises(ValueError, match=f"is the name of a hook point: give it as hook='{name}'"):
                unchecked(ac.Ablate(layers=[0], how="zero"), site=name).__post_init__()
        with pytest.raises(ValueError, match="how='median': choose 'zero', 'mean' or 'resample'"):
            ac.evaluate(model, EQUAL, edits=[unchecked(ac.Ablate([(0, 0)], how="zero"), how="median")])
        for edits in ([ac.Clamp([(0, 0)], "lookup")], [ac.Ablate([(0, 1)], how="zero"), ac.Clamp([(0, 0)], "lookup")]):
            with pytest.raises(KeyError, match="no relation 'lookup' in these prompts; they have induction, previous"):
                ac.evaluate(model, EQUAL, edits=edits)

    def test_prompts_are_missing(self, models):
        model = models("llama")
        refused("a clamp depends on the prompts: give them", ac.Clamp([(0, 0)], "induction").fwd_hooks, model)
        for how in ("mean", "resample"):
            hooks = ac.Ablate([(0, 0)], how=how, baseline=ablation_baseline(model, EQUAL, how)).fwd_hooks(model)
            with pytest.raises(ValueError, match=f"how='{how}' depends on the prompts: give them"):
                model.run_with_hooks(EQUAL.tokens, fwd_hooks=hooks)

    def test_a_position_that_asks_twice(self, models):
        previous = PADDED.relations["previous"]
        columns = ("target", "prompt", "query", "key_value", "candidate_value")
        twice = replace(previous, **{name: torch.cat([getattr(previous, name)] * 2) for name in columns})
        prompts = replace(PADDED, relations={"twice": twice})
        with pytest.raises(ValueError, match="relation 'twice' has two rows at one query"):
            ac.evaluate(models("llama"), prompts, edits=[ac.Clamp([(0, 0)], "twice")])

    @pytest.mark.parametrize("lengths", [(10, 10, 10), (8, 8, 8), (9, 9), (9, 9, 9, 9)])
    def test_what_another_run_holds_must_match(self, models, lengths):
        model, other = models("llama"), random_prompts(lengths, seed=2)
        message = rf"the edit holds {len(lengths)} prompts of {lengths[0]} tokens, but the model runs on 3 of 9"
        for site in ("z", "pattern"):
            values = capture(model, other, [name_of(site, 0)])
            for edit in (
                ac.Patch([(0, 0)], site=site, values=values),
                ac.Ablate([(0, 0)], site=site, how="resample", baseline=AblationBaseline(values=values)),
                ac.Ablate([(0, 0)], site=site, positions=other.mask, how="zero"),
            ):
                refused(message, ac.evaluate, model, EQUAL, edits=[edit])
            with pytest.raises(ValueError, match=message):
                hooks = ac.Patch([(0, 0)], site=site, values=values).fwd_hooks(model)
                model.run_with_hooks(EQUAL.tokens, fwd_hooks=hooks)

    def test_hooks_run_on_what_they_were_made_for(self, models):
        model = models("llama")
        for edit in (
            ac.Clamp([(0, 0)], "induction"),
            ac.Ablate([(0, 0)], positions=EQUAL.mask, how="zero"),
            ac.Ablate([(0, 0)], how="mean", baseline=ablation_baseline(model, EQUAL)),
            ac.Patch(layers=[0], site="mlp_out", values=capture(model, EQUAL, ["blocks.0.hook_mlp_out"])),
        ):
            hooks = edit.fwd_hooks(model, EQUAL)
            for tokens in (EQUAL.tokens[:1], EQUAL.tokens[:, :7], torch.cat([EQUAL.tokens, EQUAL.tokens], 1)):
                message = r"the model runs on . prompts of .*, but the edit was made for 3 of 9"
                refused(message, model.run_with_hooks, tokens, fwd_hooks=hooks)

    def test_a_role_that_the_reference_lacks(self, models):
        model = models("llama")
        lacking = replace(
            EQUAL, token_kinds=EQUAL.token_kinds.where(EQUAL.token_kinds != TokenKind.COLON, TokenKind.INPUT.value)
        )
        edit = ac.Ablate([(0, 0)], how="mean", baseline=ablation_baseline(model, lacking))
        refused("tokens of a kind that the reference prompts lack", ac.evaluate, model, EQUAL, edits=[edit])
        ac.evaluate(model, lacking, edits=[edit])


def unchecked(edit: Any, **changes: Any) -> Any:
    """An edit with a field that its annotations would not let through."""
    for name, value in changes.items():
        object.__setattr__(edit, name, value)
    return edit


def test_where_an_edit_starts_beside_a_loop():
    """At the first column that it may change in a prompt of the batch."""
    names = {"middle": torch.tensor([4, 6, 5]), "end": torch.tensor([9, 9, 9])}
    prompts, length = replace(PADDED, positions=names), PADDED.mask.shape[1]
    never = torch.zeros_like(PADDED.mask)
    for rows in ([0], [1], [0, 2], [1, 2], [0, 1, 2]):
        context = BatchContext(prompts, torch.tensor(rows))
        for positions in (POSITIONS, prompts.mask_of("middle"), "middle", ["end", "middle"], never):
            mask = positions if isinstance(positions, Tensor) else prompts.mask_of(positions)
            columns = [column for row in rows for column in range(length) if mask[row, column]]
            assert ac.Ablate(HEADS, positions=positions, how="zero").start(context) == min(columns, default=length)
        relation = prompts.relations["induction"]
        of_last = replace(prompts, relations={"last": relation.select(relation.prompt == 2)})
        queries = [int(query) for prompt, query in zip(relation.prompt, relation.query, strict=True) if prompt in rows]
        assert ac.Clamp(HEADS, "induction").start(context) == min(queries)
        last = ac.Clamp(HEADS, "last").start(BatchContext(of_last, torch.tensor(rows)))
        assert last == (int(of_last.relations["last"].query.min()) if 2 in rows else length)
    for edit in (ac.Ablate(HEADS, how="zero"), Everywhere()):
        assert edit.start(BatchContext.all_of(prompts)) == 0
    edit, context = ac.Ablate(HEADS, positions=EQUAL.mask, how="zero"), BatchContext.all_of(prompts)
    refused("the edit holds 3 prompts of 9 tokens, but the model runs on 3 of 10", edit.start, context)


class Everywhere(Edit):
    """Which changes nothing."""

    def changes(self, cfg: Any, context: BatchContext | None) -> dict[str, Any]:  # noqa: ARG002 - one interface
        return {}


def test_an_edit_is_for_as_many_prompts_and_columns_as_run():
    everything = BatchContext.all_of(PADDED)
    everything.check("z", 3, 10)
    BatchContext(PADDED, torch.tensor([0, 1])).check("z", 2, 9)  # a column of padding is left out
    BatchContext(PADDED, torch.tensor([1])).check("z", 1, 6)
    BatchContext(PADDED, torch.tensor([0, 1]), slice(4, 9)).check("z", 2, 5)
    for context, batch, length in (
        (everything, 2, 10),
        (everything, 4, 10),
        (everything, 3, 9),
        (everything, 3, 11),
        (BatchContext(PADDED, torch.tensor([0, 1])), 2, 8),
        (BatchContext(PADDED, torch.tensor([0, 1]), slice(4, 9)), 2, 6),
        (BatchContext(PADDED, torch.tensor([0, 1]), slice(4, 9)), 2, 4),
    ):
        message = f"the model runs on {batch} prompts of {length} tokens, but the edit"
        refused(message, context.check, "z", batch, length)


def test_identities_tell_sets_of_edits_apart_by_all_that_they_hold():
    vector, means = torch.ones(8), {"a": torch.zeros(2, 8)}
    different = [
        [],
        [ac.Ablate([(0, 1)], how="zero")],
        [ac.Ablate([(0, 2)], how="zero")],
        [ac.Ablate([(0, 1)], how="zero"), ac.Ablate([(0, 1)], how="zero")],
        [ac.Ablate([(0, 1)], site="v", how="zero")],
        [ac.Ablate([(0, 1)], how="mean", baseline=AblationBaseline(means=means))],
        [ac.Ablate([(0, 1)], how="mean", baseline=AblationBaseline(means={"b": means["a"]}))],
        [ac.Ablate([(0, 1)], how="mean", baseline=AblationBaseline(values=means))],
        [ac.Steer([(0, 1)], vector=vector)],
        [ac.Steer([(0, 1)], vector=2 * vector)],
        [ac.Steer([(0, 1)], vector=vector.double())],
        [ac.Patch([(0, 1)])],
        [ac.Patch([(0, 1)], values={"a": vector[None]})],
        [ac.Patch([(0, 1)], values={"b": vector[None]})],
        [ac.Patch([(0, 1)], values={"a": vector[:, None]})],
    ]
    found = [identity_of(edits) for edits in different]
    assert len({*found}) == len(different)
    assert identity_of([replace(edit, vector=vector.clone()) for edit in different[8]]) == found[8]


def test_provenance_tells_edits_apart(models):
    model = models("llama")
    steer = ac.Steer(layers=[1], site="mlp_out", vector=torch.ones(32), scale=2.0)
    edits = [ac.Ablate([(0, 1)], how="zero"), ac.Clamp([(1, 2)], "induction"), steer]
    sha = hashlib.sha256(b" (32,) torch.float32" + torch.ones(32).numpy().tobytes()).hexdigest()
    records = [
        {"edit": "Ablate", "heads": [[0, 1]], "site": "z", "how": "zero"},
        {"edit": "Clamp", "heads": [[1, 2]], "relation": "induction"},
        {"edit": "Steer", "site": "mlp_out", "scale": 2.0, "layers": [1], "vector": sha[:16]},
    ]
    parts = ac.Ablate(hook="hook_embed", neurons=range(2), positions=["END"], how="zero")
    named = replace(EQUAL, positions={"END": torch.full((3,), 8)})
    assert ac.evaluate(model, named, edits=[parts]).provenance.settings["edits"] == [
        {"edit": "Ablate", "hook": "hook_embed", "neurons": [0, 1], "positions": ["END"], "how": "zero"}
    ]
    opposite = ac.evaluate(model, EQUAL, edits=[replace(steer, vector=-torch.ones(32))]).provenance.settings["edits"]
    assert opposite == [{**records[2], "vector": opposite[0]["vector"]}] != [records[2]]
    evaluated, scored = ac.evaluate(model, EQUAL, edits=edits), ac.score_heads(model, EQUAL, ["previous"], edits=edits)
    measured = {"metrics": ["accuracy", "log_prob"]}
    assert evaluated.provenance.settings == {**measured, "edits": records}
    assert scored.provenance.settings == {"metrics": ["previous"], "edits": records}
    assert Provenance.from_json(scored.provenance.to_json()) == scored.provenance
    assert ac.evaluate(model, EQUAL).provenance.settings == measured
    assert evaluated.provenance.engine == "fast", "the pattern is clamped inside the attention function"
    by_baseline = {
        json.dumps(ac.evaluate(model, EQUAL, edits=[ac.Ablate([(0, 1)], baseline=baseline)]).provenance.settings)
        for prompts in (EQUAL, replace(EQUAL, inputs=EQUAL.inputs.roll(1, 1)))
        for baseline in (ablation_baseline(model, prompts), ablation_baseline(model, prompts, by="position"))
    }
    assert len(by_baseline) == 4, "a mean is told by what it was measured on"


EIGHT = dict.fromkeys("abcdefgh", torch.zeros(1))


@pytest.mark.parametrize(
    ("edit", "shown"),
    [
        (ac.Ablate([(1, 2), (0, 3)], how="zero"), "Ablate(L1H2 L0H3, how='zero')"),
        (ac.Ablate([], site="mlp_out", layers=[1], how="zero"), "Ablate(site='mlp_out', layers=[1], how='zero')"),
        (
            ac.Ablate(["L1H2"], how="mean", baseline=AblationBaseline(means={"a": torch.zeros(10, 4)})),
            "Ablate(L1H2, baseline=AblationBaseline(means at 1 hook points))",
        ),
        (ac.Patch([(0, 1)], positions=torch.zeros(3, 9, dtype=torch.bool)), "Patch(L0H1, positions=bool[3, 9])"),
        (ac.Patch([(0, 1)], values={"x": torch.zeros(3, 9, 8)}), "Patch(L0H1, values={x})"),
        (ac.Clamp([(0, 1)], "<lookup>"), "Clamp(L0H1, relation='<lookup>')"),
        (ac.Steer([(0, 1)], vector=torch.zeros(8), scale=2.0), "Steer(L0H1, vector=float32[8], scale=2.0)"),
        (
            ac.Ablate([(0, head) for head in range(9)], how="zero"),
            "Ablate(L0H0 L0H1 L0H2 L0H3 L0H4 L0H5 L0H6 L0H7 ... (9 heads), how='zero')",
        ),
        (ac.Steer([(0, 1)], vector=torch.zeros(8), scale=float("1")), "Steer(L0H1, vector=float32[8])"),
        (ac.Ablate(["L0KV1"], how="zero"), "Ablate(['L0KV1'], how='zero')"),
        (
            ac.Ablate([(0, head) for head in range(8)], how="zero"),
            "Ablate(L0H0 L0H1 L0H2 L0H3 L0H4 L0H5 L0H6 L0H7, how='zero')",
        ),
        (ac.Patch([(0, 1)], values=EIGHT), "Patch(L0H1, values={a, b, c, d, e, f, g, h})"),
        (ac.Patch([(0, 1)], values=EIGHT | {"i": torch.zeros(1)}), "Patch(L0H1, values={a, b, c, d, e, f, g, h, ...})"),
        (ac.Steer([(0, 1)], scale=float("1")), "Steer(L0H1)"),
    ],
)
def test_edits_show_themselves(edit, shown):
    assert repr(edit) == shown
    page = edit._repr_html_()
    assert page.startswith(f"<table><tr><th colspan=2>{type(edit).__name__}</th></tr>") and "<lookup>" not in page
    assert page.count("<tr>") == 1 + len(re.findall(r"\w+=|\((?=L|\[)", shown.split("AblationBaseline")[0]))


def test_rows_of_a_direction_may_be_rounded():
    fine, skewed = (torch.tensor([[1.0, 0, 0], [overlap, 1, 0]]) for overlap in (5e-5, 2e-4))
    ac.Ablate([(0, 0)], direction=fine, how="zero")
    refused("its rows are not orthonormal", ac.Ablate, [(0, 0)], direction=skewed)


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_zero_attend_equally_to_all_that_is_not_masked(models, name):
    """Neither to later tokens nor to padding, so that a prompt has the logits that it has alone."""
    model, (prompt, query) = models(name), map(PADDED.column, ("prompt", "query_pos"))
    edit = ac.Ablate(hook="blocks.1.attn.hook_attn_scores", how="zero")
    found, _ = logits_of(model, PADDED, edits=[edit])

    def equal(pattern: Tensor, hook: Any) -> Tensor:  # noqa: ARG001
        lower = torch.ones_like(pattern).tril()
        return lower / lower.sum(-1, keepdim=True)

    for index in range(len(PADDED)):
        tokens, padding = alone(PADDED, index)
        logits = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", equal)])[0]
        expected = logits[query[prompt == index] - padding].double()
        torch.testing.assert_close(found[prompt == index], expected, atol=1e-4, rtol=1e-4)


def test_hooks_whose_change_the_model_drops_are_refused():
    """OPT leaves its attention to Hugging Face, and shows weights that were computed elsewhere."""
    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48}
    config: Any = transformers.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64)
    with torch.random.fork_rng():
        model = ac.load(transformers.OPTForCausalLM(config).eval())
    for edit in (ac.Ablate([(0, 0)], site="pattern", how="zero"), ac.Clamp([(0, 0)], "induction")):
        refused("a change at 'blocks.0.attn.hook_pattern' changes nothing", edit.fwd_hooks, model, EQUAL)
    assert ac.Ablate([(0, 0)], how="zero").fwd_hooks(model, EQUAL)


@pytest.mark.parametrize("from_the_norm", [False, True])
def test_a_patch_between_attention_and_mlp_of_all_tokens_brings_all_back(from_the_norm):
    """All that follows hangs on it, also in a BLOOM whose stream goes on from the norm that reads it."""
    sizes: Any = {"n_layer": 2, "n_head": 4, "vocab_size": 64, "hidden_size": 32, "initializer_range": 0.3}
    config = transformers.BloomConfig(**sizes, apply_residual_connection_post_layernorm=from_the_norm)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ac.load(transformers.BloomForCausalLM(config).eval())
    clean = Prompts.from_tokens([[1, 5, 6, 7, 8, 9, 5, 6]])
    other = replace(clean, inputs=torch.tensor([[1, 5, 6, 40, 8, 9, 5, 6]]), relations={})
    pair = ac.Pair(clean, other, metric="log_prob")
    found = ac.patch_sites(model, pair, ["resid_mid", "resid_pre"], positions=None)
    effects = found.where(kind="all").frame["value"].to_list()
    assert effects == pytest.approx(effects[:1] * 4, abs=1e-5) and abs(effects[0]) > 0.01
