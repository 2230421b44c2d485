"""Every public verb that runs a model, beside its twin on plain Hugging Face; and what is refused, with the reason."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import effects_by_hand
import numpy as np
import torch
from plain import Change, Plain
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.names import Site, name_of
from align_circuits.run.forward_pass import capture

TEXTS = [[1, *range(5, 24)], [1, 9, 8, 7, 6, 5, 9, 8, 7]]
"""Two prompts of different lengths: longer and shorter than windows and the range of short rotary factors."""

EDGES = [("input", "L0H1.q"), ("L0H1", "M0"), ("L0H1", "L1H2.q"), ("M0", "M1"), ("L0H1", "logits"), ("L1H2", "logits")]
"""Of every kind; those that a model does not have, as into the MLP of a parallel layer, are left out."""

LOG_PROB = {"metric": "log_prob", "kind": "all"}

Both = tuple[Any, Any]
"""What a verb finds, and what is right."""

Changes = Callable[[int], Sequence[Change]]
"""Of a run of each prompt."""


def unchanged(_: int) -> Sequence[Change]:
    """No changes."""
    return ()


class Case:
    """A model in a bridge, and its twin."""

    def __init__(self, plain: Plain, model: Any, options: ac.RunOptions, texts: Sequence[Sequence[int]] = TEXTS):
        self.plain, self.model, self.options, self.texts = plain, model, options, texts
        self.prompts = ac.Prompts.from_tokens(texts)
        self.corrupted = [[40 if place in (2, 5) else token for place, token in enumerate(text)] for text in texts]

    @cached_property
    def pair(self) -> ac.Pair:
        inputs = ac.Prompts.from_tokens(self.corrupted).inputs
        return ac.Pair(self.prompts, replace(self.prompts, inputs=inputs, relations={}))

    @cached_property
    def means(self) -> dict[Any, Tensor]:
        """Of outputs of heads, over all tokens from which something is predicted."""
        kept = self.kept(self.texts)
        return {place: torch.cat([each[place][0, :-1] for each in kept]).mean(0) for place in (("z", 0), ("z", 1))}

    def log_prob(self, changes: "Changes" = unchanged, texts: Any = None) -> Tensor:
        """The mean log-probability of all targets, with changes by prompt."""
        return self.log_probs([changes], texts)[0]

    def log_probs(self, sets: "Sequence[Changes]", texts: Any = None) -> Tensor:
        """The same for several changes `[set]`."""
        rows = []
        for index, (text, clean) in enumerate(zip(texts or self.texts, self.texts, strict=True)):
            logits = self.plain.side_by_side(text, [changes(index) for changes in sets])
            rows.append(logits.log_softmax(-1)[:, range(len(text) - 1), clean[1:]])
        return torch.cat(rows, 1).mean(1)

    def effects(self, sets: "Sequence[Changes]", texts: Any = None) -> Tensor:
        """How much changes move it `[set]`."""
        *changed, base = self.log_probs([*sets, unchanged], texts)
        return torch.stack(changed) - base

    def kept(self, texts: Any) -> list[dict[Any, Tensor]]:
        """Activations of each prompt."""
        return [self.plain.kept(text) for text in texts]

    @cached_property
    def function_vectors(self) -> list[float]:
        means = self.means  # from runs of their own, before hooks are attached to others

        def put(layer: int, head: int) -> list[Change]:
            def change(z: Tensor) -> Tensor:
                new = self.plain.put("z", head, means["z", layer].expand_as(z))(z)
                return torch.cat([new[:, :-1], z[:, -1:]], 1)

            return [(("z", layer), change)]

        rows, sets = [], [*(put(*head) for head in self.plain.heads), []]
        for text, clean in zip(self.corrupted, self.texts, strict=True):
            logits = self.plain.side_by_side(text, sets)
            rows.append(logits.softmax(-1)[:, range(len(text) - 1), clean[1:]])
        probability = torch.cat(rows, 1).mean(1)
        return (probability[:-1] - probability[-1]).tolist()

    def patched(self, places: "Sequence[tuple[str, int, int | None]]") -> list[float]:
        """The effects of denoising single places."""

        def put(site: str, layer: int, head: int | None) -> "Changes":
            return lambda i: [((site, layer), self.plain.put(site, head, self.plain.kept(self.texts[i])[site, layer]))]

        return self.effects([put(*place) for place in places], self.corrupted).tolist()

    def gradients(self, places: Sequence[Any]) -> list[dict[Any, Tensor]]:
        """Of the metric in the corrupted run."""
        zeros: list[dict[Any, Any]] = [{} for _ in self.texts]

        def watched(index: int) -> list[Change]:
            def leaf(place: Any) -> Callable[[Tensor], Tensor]:
                def change(activation: Tensor) -> Tensor:
                    zeros[index][place] = torch.zeros_like(activation, requires_grad=True)
                    return activation + zeros[index][place]

                return change

            return [(place, leaf(place)) for place in places]

        with torch.enable_grad():
            metric = self.log_prob(watched, self.corrupted)
            leaves = [zeros[i][place] for i in range(len(self.texts)) for place in places]
            found = iter(torch.autograd.grad(metric, leaves))
        return [{place: next(found) for place in places} for _ in self.texts]


def of_heads(table: ac.Table, **keys: Any) -> Any:
    frame = table.where(level="head", **keys).frame.sort_values(["layer", "head"])
    return frame["value"].to_numpy()


def evaluated(case: Case, *edits: Any, prompts: Any = None) -> float:
    table = ac.evaluate(case.model, prompts or case.prompts, edits=edits, options=case.options)
    return float(table.where(metric="log_prob", kind="all", offset=None).frame["value"].iloc[0])


def evaluate(case: Case) -> Both:
    return evaluated(case), case.log_prob()


def attention(case: Case) -> list[Any]:
    """Of each prompt `[layer head query key]`."""
    found: list[Any] = [case.plain.run(text, output_attentions=True)[2] for text in case.texts]
    return [torch.stack([layer[0] for layer in layers]) for layers in found]


def score_heads(case: Case) -> Both:
    metrics = ["previous_attention", "sink", "entropy"]
    table = ac.score_heads(case.model, case.prompts, metrics, options=case.options)
    patterns = attention(case)
    previous = torch.cat([each[:, :, range(1, each.shape[-1] - 1), range(each.shape[-1] - 2)] for each in patterns], -1)
    rows = torch.cat([each[:, :, 1:-1, :1] for each in patterns], 2)[..., 0]
    patterns = [each / each.sum(-1, keepdim=True) for each in patterns]  # what a sink gets is no candidate's
    entropy = torch.cat([-torch.xlogy(each, each).sum(-1)[:, :, 1:-1] for each in patterns], -1)
    right = [each.mean(-1).flatten() for each in (previous, rows, entropy)]
    return np.stack([of_heads(table, metric=name) for name in metrics]), torch.stack(right)


def captured(case: Case) -> Both:
    """`run.forward_pass.capture`: what attention and MLP add must be what the stream gains."""
    sites: list[Site] = ["resid_pre", "z", "resid_post", "attn_out", "mlp_out", "pattern"]
    found = {s: capture(case.model, case.prompts, [name_of(s, 1)], options=case.options)[name_of(s, 1)] for s in sites}
    kept, patterns, length = (case.kept(case.texts), attention(case), len(case.texts[0]))
    values, right = [], []
    for prompt, text in enumerate(case.texts):
        real, of_prompt = slice(length - len(text), None), kept[prompt]
        gained = (found["attn_out"] + found["mlp_out"])[prompt, real]
        values += [found[site][prompt, real].flatten() for site in sites[:3]]
        values += [gained.flatten(), found["pattern"][prompt, :, real, real].flatten()]
        right += [of_prompt[site, 1].flatten() for site in sites[:3]]
        right += [(of_prompt["resid_post", 1] - of_prompt["resid_pre", 1]).flatten(), patterns[prompt][1].flatten()]
    return torch.cat(values), torch.cat(right)


def explore(case: Case) -> Both:
    """The probabilities that the widget shows, to two digits, with and without a head."""
    explorer = ac.explore(case.model, case.prompts, options=case.options)
    explorer.ablated = ["L1H2"]
    cells = re.findall(r"<td>(0\.\d\d|1\.00)</td>", explorer.shown)
    means, text = case.means["z", 1], case.texts[0]
    changes: list[Change] = [(("z", 1), lambda z: case.plain.put("z", 2, means.expand_as(z))(z))]
    runs = [case.plain.run(text, change)[0].softmax(-1)[range(len(text) - 1), text[1:]] for change in ((), changes)]
    shown, right = np.array(cells, float), torch.stack(runs, 1).flatten().numpy()
    return shown, np.where(abs(shown - right) < 0.0051, shown, right)


def without_each(case: Case, value: Callable[[int, Tensor], Tensor]) -> list[float]:
    """The effects of giving each head the value of its layer."""

    def without(layer: int, head: int) -> Changes:
        return lambda _: [(("z", layer), lambda z: case.plain.put("z", head, value(layer, z).expand_as(z))(z))]

    return case.effects([without(*head) for head in case.plain.heads]).tolist()


def ablate_heads(case: Case) -> Both:
    found, right = [], []
    means = case.means
    kinds: Any = (("zero", lambda _, z: 0 * z), ("mean", lambda layer, _: means["z", layer]))
    for how, value in kinds:
        table = ac.ablate_heads(case.model, case.prompts, how, metrics=["log_prob"], options=case.options)
        found.append(of_heads(table, metric="log_prob", kind="all"))
        right.append(without_each(case, value))
    return found, right


def ablate_neurons(case: Case) -> Both:
    """The neurons of a layer's MLP at 0."""
    edit = ac.Ablate(site="mlp_post", layers=[1], how="zero")
    return evaluated(case, edit), case.log_prob(lambda _: [(("mlp_post", 1), lambda x: 0 * x)])


def ablation_baseline(case: Case) -> Both:
    found = ac.ablation_baseline(case.model, case.prompts, options=case.options).means
    groups = [found[name_of("z", layer)].flatten(1) for layer in (0, 1)]
    only = [group[~group.isnan().any(1)] for group in groups]
    return torch.cat(only), torch.stack([case.means["z", layer].flatten() for layer in (0, 1)])


def patch_z(case: Case) -> Both:
    table = ac.patch_heads(case.model, case.pair, options=case.options)
    return of_heads(table, **LOG_PROB), case.patched([("z", *head) for head in case.plain.heads])


def patch_qkv(case: Case) -> Both:
    """One at a time: `q` of a head, and keys and values of all heads that share them."""
    found, right, shared = [], [], case.plain.n_heads // case.plain.n_keys
    for site in get_args(Literal["q", "k", "v"]):
        table = ac.patch_heads(case.model, case.pair, sites=[site], options=case.options)
        found.append(of_heads(table, **LOG_PROB))
        heads = [(layer, head // (1 if site == "q" else shared)) for layer, head in case.plain.heads]
        right.append(case.patched([(site, *head) for head in heads]))
    return found, right


def patch_sites(case: Case) -> Both:
    sites: Any = ["resid_pre", "attn_out", "mlp_out", "resid_post"]
    table: Any = ac.patch_sites(case.model, case.pair, sites, positions=None, options=case.options).frame
    found = [
        float(table[(table["site"] == site) & (table["layer"] == layer)]["value"].iloc[0])
        for site in sites
        for layer in (0, 1)
    ]
    return found, case.patched([(site, layer, None) for site in sites for layer in (0, 1)])


def steer(case: Case) -> Both:
    """At a layer and at a head."""
    vector = torch.linspace(-1, 1, case.plain.hf.config.hidden_size)
    small = torch.linspace(1, 2, case.plain.width)
    given = [ac.Steer(site="resid_post", layers=[0], vector=vector, scale=2.0), ac.Steer(["L1H3"], vector=small)]
    wide = torch.zeros(case.plain.width * case.plain.n_heads)
    wide[case.plain.columns("z", 3)] = small
    changes: list[Change] = [(("resid_post", 0), lambda x: x + 2 * vector), (("z", 1), lambda z: z + wide)]
    return evaluated(case, *given), case.log_prob(lambda _: changes)


def clamp(case: Case) -> Both:
    """Attention to the token before alone, from each token but a prompt's first, whose attention stays."""
    shared, place = case.plain.n_heads // case.plain.n_keys, case.plain.columns("z", 2)
    values = case.kept(case.texts)

    def change(index: int) -> list[Change]:
        v = values[index]["v", 1][..., case.plain.columns("v", 2 // shared)]

        def clamped(z: Tensor) -> Tensor:
            new = z.clone()
            new[:, 1:-1, place] = v[:, :-2]  # the last token predicts nothing and has no row
            return new

        return [(("z", 1), clamped)]

    return evaluated(case, ac.Clamp(["L1H2"], "previous")), case.log_prob(change)


def interchange_accuracy(case: Case) -> Both:
    """The answers are what the model itself says to both prompts."""
    logits = [[case.plain.run(text)[0][:-1].argmax(-1) for text in texts] for texts in (case.texts, case.corrupted)]
    clean, corrupted = (torch.cat(each) for each in logits)
    pair = case.pair
    tokens = torch.arange(64)
    of_clean = replace(pair.clean, answer_tokens=tokens, correct=clean[:, None] == tokens)
    of_other = replace(pair.corrupted, answer_tokens=tokens, own_correct=corrupted[:, None] == tokens)
    table = ac.interchange_accuracy(case.model, ac.Pair(of_clean, of_other), options=case.options)
    said = []
    for text, values in zip(case.corrupted, case.kept(case.texts), strict=True):
        sets = [[(("z", layer), case.plain.put("z", head, values["z", layer]))] for layer, head in case.plain.heads]
        said.append(case.plain.side_by_side(text, sets)[:, :-1].argmax(-1))
    differs = clean != corrupted
    right = [(torch.cat(said, 1) == answers)[:, differs].double().mean(1) for answers in (clean, corrupted)]
    return [of_heads(table, metric=name) for name in ("interchange", "corrupted_correct")], right


def attributed(case: Case, sites: Any) -> Both:
    """AtP: gradients in the corrupted run, times what a patch would change."""
    found, right, places = [], [], [(site, layer) for site in sites for layer in (0, 1)]
    slopes, clean, base = case.gradients(places), case.kept(case.texts), case.kept(case.corrupted)
    for site in sites:
        found.append(of_heads(ac.attribute_heads(case.model, case.pair, sites=[site], options=case.options)))
        shared = case.plain.n_heads // case.plain.n_keys if site in "kv" else 1
        scores = np.zeros(len(case.plain.heads))
        for slope, one, other in zip(slopes, clean, base, strict=True):
            for index, (layer, head) in enumerate(case.plain.heads):
                moved = slope[site, layer] * (one[site, layer] - other[site, layer])
                scores[index] += float(moved[..., case.plain.columns(site, head // shared)].sum())
        right.append(scores)
    return found, right


def attribute_z(case: Case) -> Both:
    return attributed(case, "z")


def attribute_qkv(case: Case) -> Both:
    return attributed(case, "qkv")


def atp_star(case: Case) -> Both:
    """AtP*: the exact change of attention by patched queries or keys, times the gradient of attention."""
    found, right, shared = [], [], case.plain.n_heads // case.plain.n_keys
    with torch.enable_grad():
        rows, attention = [], []
        for text, clean in zip(case.corrupted, case.texts, strict=True):
            logits, _, patterns = case.plain.run(text, output_attentions=True)
            rows.append(logits.log_softmax(-1)[range(len(text) - 1), clean[1:]])
            attention.append(patterns)
        flat = [pattern for patterns in attention for pattern in patterns]
        gradients = torch.autograd.grad(torch.cat(rows).mean(), flat, allow_unused=True)
    for site in get_args(Literal["q", "k"]):
        table = ac.attribute_heads(case.model, case.pair, method="atp_star", sites=[site], options=case.options)
        found.append(of_heads(table))
        clean = case.kept(case.texts)
        scores = np.zeros((2, case.plain.n_heads))
        for index, text in enumerate(case.corrupted):
            for layer in (0, 1):
                put = of_all(case.plain, site, clean[index][site, layer])
                after = case.plain.run(text, [((site, layer), put)], output_attentions=True)[2][layer]
                score = ((after - attention[index][layer]) * gradients[2 * index + layer])[0].sum((1, 2)).detach()
                scores[layer] += (
                    score.view(-1, shared).sum(1).repeat_interleave(shared) if site == "k" else score
                ).numpy()
        right.append(scores.flatten())
    return found, right


def of_all(plain: Plain, site: str, value: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives all heads of a site, in a projection that may hold more, their part of a value."""

    def change(activation: Tensor) -> Tensor:
        for head in range(plain.n_heads if site in "qz" else plain.n_keys):
            activation = plain.put(site, head, value)(activation)
        return activation

    return change


def receiver(name: str) -> tuple[str, int, int | None]:
    """Site, layer and head of what reads."""
    if name == "logits":
        return "resid_post", 1, None
    if name.startswith("M"):
        return "mlp_out", int(name[1:]), None
    layer, head, site = re.fullmatch(r"L(\d)(?:H|KV)(\d)\.(.)", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return site, int(layer), int(head)


def sender(name: str) -> tuple[str, int, int | None]:
    """Site, layer and head of what writes."""
    if name == "input":
        return "resid_pre", 0, None
    if name.startswith("M"):
        return "mlp_out", int(name[1:]), None
    return "z", int(name[1]), int(name[3])


def with_edges(case: Case, edges: Sequence[tuple[str, str]], text: Sequence[int], other: Sequence[int]) -> list[Change]:
    """Changes of a run in which receivers read, of some senders, what these write in the run of another text.

    Receivers come in the order in which they run, so that all that they read has been computed.
    """
    plain, changes = case.plain, list[Change]()
    places = [sender(name)[:2] for name, _ in edges]
    theirs = plain.kept(other)
    for reads in dict.fromkeys(name for _, name in edges):
        now = plain.run(text, changes, places)[1]
        moved = torch.zeros(())
        for at, layer, head in [sender(name) for name, to in edges if to == reads]:
            change = theirs[at, layer] - now[at, layer]
            moved = moved + (change if at == "resid_pre" else plain.written(head, layer, change))
        changes = moved_edge(case, text, reads, moved, changes)
    return changes


def moved_edge(case: Case, text: Sequence[int], reads: str, moved: Tensor, more: Sequence[Change]) -> list[Change]:
    """The changes of a run in which one receiver reads the residual stream plus something.

    What it makes of that comes from a run whose residual stream is moved before its layer, and whose attention is held
    where the receiver is the MLP.
    """
    plain, (site, layer, head) = case.plain, receiver(reads)
    if site == "resid_post":
        return [*more, ((site, layer), lambda x: x + moved)]
    held: list[Change] = []
    if site == "mlp_out":
        now = plain.run(text, more, [("attn_out", layer)])[1]["attn_out", layer].detach()
        held = [(("attn_out", layer), lambda _: now)]
    shifted = [*more, (("resid_pre", layer), lambda x: x + moved), *held]
    value = plain.run(text, shifted, [(site, layer)])[1][site, layer]
    return [*more, ((site, layer), plain.put(site, head, value))]


def edges_of(case: Case) -> list[tuple[str, str]]:
    known = effects_by_hand.edges_of(case.model)
    return [edge for edge in EDGES if edge in known]


def patch_edges(case: Case) -> Both:
    table = ac.patch_edges(case.model, case.pair, edges=edges_of(case), options=case.options)
    sets: Any = [
        lambda i, edge=edge: with_edges(case, [edge], case.corrupted[i], case.texts[i]) for edge in edges_of(case)
    ]
    return by_edge(case, table), case.effects(sets, case.corrupted)


def by_edge(case: Case, table: ac.Table) -> list[float]:
    return [float(table.where(sender=one, receiver=other).frame["value"].iloc[0]) for one, other in edges_of(case)]


def attribute_edges(case: Case) -> Both:
    """EAP, and EAP-IG with two steps: the derivative of a patched edge, by the share of it that is patched."""
    found, right = [], []
    methods: Any = (("eap", (1.0,)), ("eap_ig_inputs", (0.5, 1.0)))
    for method, shares in methods:
        table = ac.attribute_edges(case.model, case.pair, method=method, steps=len(shares), options=case.options)
        found.append(by_edge(case, table))
        with torch.enable_grad():
            factors = torch.zeros(len(shares), len(edges_of(case)), requires_grad=True)
            sets: Any = [
                lambda i, at=(edge, factors[row, column], share): slope_of(case, i, *at)
                for row, share in enumerate(shares)
                for column, edge in enumerate(edges_of(case))
            ]
            (slopes,) = torch.autograd.grad(case.log_probs(sets, case.corrupted).sum(), factors)
        right.append(slopes.mean(0))
    return found, torch.stack(right)


def slope_of(case: Case, index: int, edge: tuple[str, str], factor: Tensor, share: float) -> list[Change]:
    """The changes of a run with embeddings between the two, and a share `factor` of what the edge carries."""
    plain, place = case.plain, ("resid_pre", 0)
    theirs, own = (case.plain.kept(texts[index]) for texts in (case.texts, case.corrupted))
    clean, corrupted = theirs[place], own[place]
    between: list[Change] = [(place, lambda _: clean + share * (corrupted - clean))]
    at, layer, head = sender(edge[0])
    moved = theirs[at, layer] - own[at, layer]
    moved = moved if edge[0] == "input" else plain.written(head, layer, moved)
    return moved_edge(case, case.corrupted[index], edge[1], factor * moved, between)


def patch_paths(case: Case, receivers: Sequence[str] = ("M1", "logits")) -> Both:
    receivers = [reads for reads in receivers if reads in {to for _, to in edges_of(case)}]
    senders = ["input", "L0H1", "M0"]
    table: Any = ac.patch_paths(case.model, case.pair, senders=senders, receivers=receivers, options=case.options).frame
    found, plain = list[float](), case.plain
    sets: list[Changes] = []
    zs: list[Any] = [("z", 0), ("z", 1)]
    for name in senders:
        at, layer, head = sender(name)
        for reads in receivers:
            site, of_layer, of_head = receiver(reads)

            def changes(index: int, name=(at, layer, head), to=(site, of_layer, of_head)) -> list[Change]:
                (at, layer, head), (site, of_layer, of_head) = name, to
                text = case.corrupted[index]
                base, source = plain.kept(text), plain.kept(case.texts[index])
                held: list[Change] = [(z, lambda _, z=z: base[z]) for z in zs]
                held.append(((at, layer), plain.put(at, head, source[at, layer])))
                value = plain.run(text, held, [(site, of_layer)])[1][site, of_layer]
                return [((site, of_layer), plain.put(site, of_head, value))]

            sets.append(changes)
            row = table[(table["sender"] == name) & (table["receiver"] == reads)]
            found.append(float(row["value"].iloc[0]))
    return found, case.effects(sets, case.corrupted)


def faithfulness(case: Case) -> Both:
    """The circuit of two heads with the embedding, the MLPs and the logits: all other edges are corrupted."""
    graph, pair = Graph.of(case.model.cfg), replace(case.pair, direction="noise")
    heads = [(0, 1), (1, 2)]
    scores = ac.attribute_edges(case.model, pair, method="eap", options=case.options)
    table: Any = ac.faithfulness(
        case.model, pair, scores, fractions=[1.0], heads={"two": heads}, options=case.options
    ).frame
    cut = graph.edges & ~graph.among(heads)
    edges = [(graph.senders[s].name, graph.receivers[r].name) for r, s in cut.nonzero().tolist()]
    none, every = case.log_prob(texts=case.corrupted), case.log_prob()
    circuit = case.log_prob(lambda i: with_edges(case, edges, case.texts[i], case.corrupted[i]))
    of_two = table[table["circuit"] == "two"].set_index("metric")["value"]
    ends = table[(table["circuit"] == "edges") & (table["metric"] == "log_prob")].sort_values("fraction")["value"]
    return [*ends, of_two["log_prob"], of_two["faithfulness"]], [
        none,
        every,
        circuit,
        (circuit - none) / (every - none),
    ]


def direct_logit_attribution(case: Case) -> Both:
    """What senders write, times what the last norm returns for what it reads, on the gold token."""
    table = ac.direct_logit_attribution(case.model, case.prompts, options=case.options)
    parts = [("z", 0, 1), ("mlp_out", 0, None), ("z", 1, 2), ("mlp_out", 1, None), ("resid_pre", 0, None)]
    names = ["L0H1", "M0", "L1H2", "M1", "input"]
    found = [float(table.where(sender=name).frame["value"].iloc[0]) for name in names]
    norm, weight = case.plain.norm, case.plain.unembed.weight
    by_target = []
    for text in case.texts:
        logits, kept, _ = case.plain.run(text, (), [part[:2] for part in parts] + [("resid_post", 1)])
        stream = kept["resid_post", 1][0]
        unscaled = case.plain.unembed(norm(stream))
        scale = (logits * unscaled).sum() / unscaled.square().sum()  # of Cohere and Granite
        centres = torch.allclose(norm(stream), norm(stream + 3), atol=1e-4)
        shift = norm(torch.zeros_like(stream[:1])) if centres else torch.zeros(())
        ratio = (norm(stream) - shift) / (stream - stream.mean(-1, keepdim=True) if centres else stream)
        gold = weight[text[1:]] - weight.mean(0)
        of_text = []
        for at, layer, head in parts:
            wrote = kept[at, layer].view(1, len(text), -1)
            wrote = (wrote if at == "resid_pre" else case.plain.written(head, layer, wrote))[0]
            wrote = wrote - wrote.mean(-1, keepdim=True) if centres else wrote
            of_text.append(scale * ((wrote * ratio)[:-1] * gold).sum(-1))
        by_target.append(torch.stack(of_text))
    return found, torch.cat(by_target, 1).mean(1)


def function_vectors(case: Case) -> Both:
    """The mean output of a head where clean prompts predict, put where corrupted ones do."""
    table = ac.function_vectors(case.model, [case.pair], options=case.options)
    return of_heads(table), case.function_vectors


def head_profile(case: Case) -> Both:
    """On prompts whose tokens come again, which have rows of induction; direct logits are tested by themselves."""
    relations = {**case.prompts.relations, "lookup": case.prompts.relations["induction"]}
    prompts = replace(case.prompts, relations=relations)
    table = ac.head_profile(case.model, prompts, [case.pair], options=case.options)
    return of_heads(table, metric="function_vector"), case.function_vectors


def localize(case: Case) -> Both:
    """On eight prompts: the effects by which heads are named, on the half that tests."""
    generator = torch.Generator().manual_seed(3)
    texts = [[1, *torch.randint(3, 40, (7,), generator=generator).tolist()] for _ in range(8)]
    whole = Case(case.plain, case.model, case.options, texts)
    thresholds = Thresholds(score=0.0, above_chance=-1.0, attention=0.0, share=0.0)
    found = ac.localize(
        case.model,
        whole.prompts,
        corrupted=whole.pair.corrupted,
        roles=["previous"],
        thresholds=thresholds,
        n_controls=0,
        options=case.options,
    )
    tested = Case(case.plain, case.model, case.options, found.prompts.inputs.tolist())
    effects = [
        of_heads(found.evidence.patching_effects, **LOG_PROB),
        of_heads(found.evidence.ablation_effects, metric="log_prob", kind="all"),
    ]
    right = tested.patched([("z", *head) for head in case.plain.heads])
    means = tested.means  # measured before any hook is set
    return effects, [right, without_each(tested, lambda layer, _: means["z", layer])]


VERBS: dict[str, Callable[[Case], Both]] = {
    "evaluate": evaluate,
    "capture": captured,
    "score_heads": score_heads,
    "explore": explore,
    "ablate_heads": ablate_heads,
    "Ablate(site='mlp_post')": ablate_neurons,
    "ablation_baseline": ablation_baseline,
    "patch_heads": patch_z,
    "patch_heads(sites=['q', 'k', 'v'])": patch_qkv,
    "patch_sites": patch_sites,
    "Steer": steer,
    "Clamp": clamp,
    "interchange_accuracy": interchange_accuracy,
    "attribute_heads": attribute_z,
    "attribute_heads(sites=['q', 'k', 'v'])": attribute_qkv,
    "attribute_heads(method='atp_star')": atp_star,
    "attribute_edges": attribute_edges,
    "patch_edges": patch_edges,
    "patch_paths": patch_paths,
    "patch_paths(receivers=['L1H2.q', 'M1'])": partial(patch_paths, receivers=["L1H2.q", "M1"]),
    "faithfulness": faithfulness,
    "direct_logit_attribution": direct_logit_attribution,
    "function_vectors": function_vectors,
    "head_profile": head_profile,
    "localize": localize,
}

TUNED: dict[str, tuple[str, ...]] = {
    "tune": ("q", "k", "v", "o"),
    "tune(projections=['q', 'k'])": ("q", "k"),
    "tune(projections=['up', 'down'])": ("up", "down"),
}
"""The matrices that `tune` adapts, which `test_tune.py` compares with PEFT."""

_TOGETHER = "norms the queries of all its heads together"
_SHOWN = "changes nothing in this model"
_NORMED = "norms what its attention or its MLP adds to the residual stream"
_QUERIES: dict[str, str] = dict.fromkeys(
    ("olmo2", "olmo3", "olmoe"), "norms the queries of all heads of layer 0 together"
)
_PATTERNS: dict[str, str] = dict.fromkeys(("gptj", "gpt-neo", "opt", "xglm"), _SHOWN)
_EDGES: dict[str, str] = dict.fromkeys(("gemma2", "gemma3", "olmo2", "olmo3", "glm4", "exaone4"), _NORMED) | {
    "olmoe": _TOGETHER
}
_FUSED: dict[str, str] = dict.fromkeys(
    (
        *("gpt2", "gpt-bigcode", "gpt-neox", "gpt-neox-sequential", "phi3", "phi3-long-rope"),
        *("falcon", "falcon-sequential", "bloom", "mpt"),
    ),
    "computes q, k, v by one matrix",
)
_GATED: dict[str, str] = dict.fromkeys(("phi3", "phi3-long-rope", "glm", "glm4"), "computes gate, up by one matrix")
_EXPERTS = ("qwen2-moe", "qwen3-moe", "gpt-oss", "olmoe", "mixtral")
_NO_MATRICES: dict[str, str] = dict.fromkeys(_EXPERTS, "a mixture of experts has none in its MLPs")
_NO_NEURONS: dict[str, str] = dict.fromkeys(_EXPERTS, "the neurons of a mixture of experts have no hook point")

REFUSED: Mapping[str, Mapping[str, str]] = {
    "patch_heads(sites=['q', 'k', 'v'])": _QUERIES,
    "attribute_heads(sites=['q', 'k', 'v'])": _QUERIES,
    "attribute_heads(method='atp_star')": {**_QUERIES, **_PATTERNS},
    "Clamp": _PATTERNS,
    "attribute_edges": _EDGES,
    "patch_edges": _EDGES,
    "patch_paths(receivers=['L1H2.q', 'M1'])": dict.fromkeys(_QUERIES, _TOGETHER),
    "faithfulness": _EDGES,
    "direct_logit_attribution": _EDGES,
    "head_profile": _EDGES,
    "tune": {},
    "tune(projections=['q', 'k'])": _FUSED,
    "tune(projections=['up', 'down'])": _GATED | _NO_MATRICES,
    "Ablate(site='mlp_post')": _NO_NEURONS,
}
"""What a verb refuses, by a part of its message; all else is equal."""

REFUSED_AT_LOAD = {
    "falcon-40b": "TransformerLens cannot wrap this FalconForCausalLM",
    "falcon-alibi": "TransformerLens computes other logits of this FalconForCausalLM",
    "openai-gpt": "TransformerLens computes other logits of this OpenAIGPTLMHeadModel",
    "deepseek-v3": "TransformerLens shows 'q' of layer 0 in the shape (1, 4, 8, 12)",
    "bert": "is no decoder: its logits depend on tokens to come",
    "t5": "is no decoder: an encoder reads its input",
    "mamba": "layer 0 of this MambaForCausalLM has no attention pattern",
}
"""What `load` refuses, by a part of its message."""
