"""What `localize` says of models made to deceive it, beside circuits that it must find.

In a family of nulls no head has the role that its scores may suggest: heads that prefer tokens, places or the latest
candidate, also on groups of related prompts; attention that was frozen at random while the rest was trained; circuits
whose heads write nothing, or whose prompts follow another alignment; random weights; heads that copy whatever they
attend to; MLPs that solve the task alone; decoys that attend rightly and write noise. Counted are the models with a
false name, the p-values up to .05 of heads whose attention has no role, and the share of true heads that are named,
also as without a correction for the causal test ("before"). In noisy circuits of the zoo names are also counted as with
the correction over all candidates, those too that had no effect on the prompts that choose ("unfiltered").

    python benchmarks/adversaries.py [--models 60] [--first 0] [--families NAME ...] [--quick] [--rows FOLDER]
        [--out FILE]

With `--rows` each family leaves its rows there, and is not measured again.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import align_circuits as ac
from align_circuits.heads.candidates import chance_of, confounded_roles
from align_circuits.heads.localization import Localization
from align_circuits.heads.role_tests import RoleTests, named_heads
from align_circuits.heads.where_heads_matter import ROLE, previous_where_heads_matter
from align_circuits.hooks.head_names import heads_of
from align_circuits.jobs.files import replacing
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig
from align_circuits.models.planted.planted_model import DECOYS, OTHER_DECOYS, PlantedModel
from align_circuits.models.planted.zoo import PUBLIC, zoo_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation
from align_circuits.tables.intervals import binomial_interval, t_interval
from align_circuits.tables.p_values import benjamini_hochberg
from align_circuits.tables.tables import Table
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.localize_ground_truth import FAMILIES as PROMPTS
from align_circuits.validation.localize_ground_truth import random_model, random_task
from align_circuits.validation.trained_circuits import train_circuit

TOKENIZER = char_tokenizer()
V, CONTEXT = len(TOKENIZER), 512
LETTERS = "ABCDEFGHIJKLMNOPQRST"
LEXICON = {f" {letter}": f" {letter.lower()}" for letter in LETTERS}
WEIGHTED = f"{ROLE}, weighted"
"""The p-values of previous-token heads where their output matters: of all heads, most of which `localize` asks not."""

PERIODS = (3.0, 5, 7, 11, 17, 34, 68, 200)
"""Of the sines and cosines by which a hand-built head knows a place, in tokens."""


@dataclass(frozen=True)
class Case:
    """A model with what it is localized on."""

    model: Any
    task: Any
    roles: Mapping[tuple[int, int], str | None] = field(default_factory=dict)
    """The true role of each head; none in a null."""
    either: frozenset[tuple[int, int]] = frozenset()
    """Heads of which names in other roles than their own are neither right nor false."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `localize`."""


@dataclass(frozen=True)
class Family:
    """Models of one kind, one for each seed."""

    make: Callable[[int], Case]
    uniform: bool = False
    """Whether the attention of all heads is a null, so that p-values are uniform or larger."""
    at_most: int = 60
    """How many models at most: some take a training."""
    unfiltered: bool = False
    """Whether names are counted, too, as if candidates without an effect on the prompts that choose were corrected."""


def attending(seed: int, tokens: float, pairs: float, places: float, late: float = 0.0, gain: float = 1.0) -> HandBuilt:
    """Eight heads that attend by random scores and copy what they attend to, a fifth of them its contrary.

    Args:
        seed: Of the scores.
        tokens: The spread of what the key's token adds to a score, in nats.
        pairs: That of the query's token and the key's together.
        places: That of both places, by sines.
        late: By how many nats a token the scores rise towards the latest.
        gain: The logit of a token that has all of a head's attention.
    """
    shape = HandBuiltConfig(1, 8, d_model=2 * V + 18, d_head=V + 17, d_mlp=1, d_vocab=V, n_ctx=CONTEXT)
    model, generator = HandBuilt(shape, TOKENIZER), torch.Generator().manual_seed(seed)
    one, number, sines = 2 * V + 16, 2 * V + 17, slice(2 * V, 2 * V + 16)
    with torch.no_grad():
        model.W_E[:, :V] = torch.eye(V)
        angle = torch.arange(CONTEXT)[:, None] * 2 * torch.pi / torch.tensor(PERIODS)
        model.W_pos[:, sines] = torch.cat([angle.sin(), angle.cos()], 1)
        model.W_pos[:, one], model.W_pos[:, number] = 1, torch.arange(CONTEXT).float()
        model.W_U[V : 2 * V] = torch.eye(V)
        attn, scale = model.blocks[0].attn, shape.d_head**0.5
        for head in range(shape.n_heads):
            attn.W_K[head, :V, :V], attn.W_K[head, sines, V : V + 16] = torch.eye(V), torch.eye(16)
            attn.W_K[head, number, -1], attn.W_Q[head, one, -1] = 1, late * scale
            attn.W_Q[head, :V, :V] = pairs * scale * torch.randn(V, V, generator=generator)
            attn.W_Q[head, one, :V] = tokens * scale * torch.randn(V, generator=generator)
            attn.W_Q[head, sines, V : V + 16] = places * scale * torch.randn(16, 16, generator=generator) / 4
            sign = 1 if torch.rand(1, generator=generator) < 0.8 else -1
            attn.W_V[head, :V, :V], attn.W_O[head, :V, V : 2 * V] = torch.eye(V), sign * gain * torch.eye(V)
    return model.eval()


def two_names(seed: int, recent: float = 0.5, n: int = 64, related: int = 1) -> Prompts:
    """Texts with two letters in random places, of which one is the key: with probability `recent` the later one.

    So many texts each are a group: with the same letters in the same order, and the same key.
    """
    generator = np.random.default_rng(seed)
    texts, keys, others, names, key = [], [], [], np.empty(0, str), 0
    for number in range(n):
        if number % related == 0:
            names, key = generator.permutation(list(LETTERS))[:2], -1
        filler = "".join(generator.choice(list("klmnop"), 6 + generator.integers(3)))
        texts.append(f"{filler[:2]}{names[0]}{filler[2:4]}{names[1]}{filler[4:]}")
        key = int(generator.random() < recent) if key < 0 else key
        keys.append(str(names[key]))
        others.append(str(names[1 - key]))
    groups = None if related == 1 else [number // related for number in range(n)]
    places = {"right": keys, "wrong": others}
    prompts = Prompts.from_texts(texts, TOKENIZER, answer=keys, positions=places, groups=groups)
    own = Relation.from_positions("END", "right", prompts=prompts, candidates=["right", "wrong"])
    return prompts.with_relations(chosen=own)


def known_pairs(seed: int, n: int = 64) -> Prompts:
    """Four letters, each with the lower-case one after it, then one of them again, for which that is the answer."""
    generator = np.random.default_rng(seed)
    texts, pairs = [], []
    for prompt in range(n):
        letters = generator.permutation(list(LETTERS))[:4]
        place = int(generator.integers(4))
        texts.append("".join(f"{letter}{letter.lower()}" for letter in letters) + letters[place])
        pairs.append((prompt, place))
    answers = [text[-1].lower() for text in texts]
    prompts = Prompts.from_texts(texts, TOKENIZER, answer=answers)
    last = int(prompts.positions["END"][0])  # the letter that asks; behind it stands the answer
    first = last - 8
    rows = [(prompt, last, [first + 2 * place + 1]) for prompt, place in pairs]
    own = Relation.from_pairs(rows, prompts=prompts, candidates=[first + 1, first + 3, first + 5, first + 7])
    return prompts.with_relations(answer=own)


def some_task(seed: int, recent: float = 0.5) -> Any:
    """A task of the package in some style and shape, or prompts with a relation of their own, by turns."""
    shape = {"phrase_len": 1 + seed % 3, "n_examples": 2 + seed % 4, "alignment": "permutation", "task_seed": seed}
    kinds: list[Callable[[], Any]] = [
        lambda: ac.Seq2SeqTask(x_len=2, **shape),
        lambda: two_names(seed, recent),
        lambda: ac.Seq2SeqTask(x_len=3, **shape),
        lambda: ac.LexiconTask(LEXICON, x_len=2, n_examples=5, shared=True, alignment="permutation", task_seed=seed),
        lambda: ac.Seq2SeqTask(x_len=5, **shape),
        lambda: ac.Seq2SeqTask(x_len=4, **{**shape, "style": "marked"}),
        lambda: ac.RepeatedTokensTask(length=12, repeats=2 + seed % 2),
        lambda: ac.Seq2SeqTask(x_len=4, **{**shape, "style": "pre-aligned"}),
    ]
    return kinds[seed % len(kinds)]()


def planted_task(seed: int, **changes: Any) -> ac.Seq2SeqTask:
    """The task of a planted circuit."""
    fields = {"x_len": 5, "phrase_len": 2, "n_examples": 4, "alignment": "permutation", "task_seed": seed}
    return ac.Seq2SeqTask(**{**fields, **changes})


def circuit(seed: int, task: ac.Seq2SeqTask | None = None, **changes: Any) -> PlantedModel:
    """A planted circuit with all decoys, none of which is a second lookup head."""
    decoys = [kind for kind in (*DECOYS, *OTHER_DECOYS) if kind not in ("backup", "diffuse")]
    return ac.planted_circuit(task or planted_task(seed), seed, **{"n_heads": 6, "decoys": decoys, **changes})


def silenced(seed: int) -> Case:
    """A circuit whose heads attend as they should and write nothing; idle heads write noise."""
    model = circuit(seed)
    with torch.no_grad():
        for layer, head in (place for place, role in model.roles.items() if role):
            model.blocks[layer].attn.W_O[head] = 0
    return Case(model, model.task)


def of_another_alignment(seed: int) -> Case:
    """A circuit on prompts in which no phrase has the symbol that it attends to; previous tokens are what they were.

    By the first letter of a phrase a lookup head finds the second one under every alignment, which is half of lookup.
    """
    shape = {"phrase_len": 1 + seed % 2}
    model = circuit(seed, planted_task(seed, **shape))
    others = (planted_task(seed, **shape, task_seed=1000 + other) for other in count(seed))
    other = next(task for task in others if all(a != b for a, b in zip(task.aligned, model.task.aligned, strict=True)))
    by_letter = frozenset(head for head, role in model.roles.items() if role == "lookup" and shape["phrase_len"] == 2)
    return Case(model, other, {head: role for head, role in model.roles.items() if role == "previous"}, by_letter)


def with_noise(seed: int) -> Case:
    """A circuit of which every head, decoys too, writes noise; redundant heads are looked for as well.

    Decoys are the nulls here: by the noise that they read, heads of the circuit may attend as in another role.
    """
    model = circuit(seed, noise=0.006)
    heads = frozenset(head for head, role in model.roles.items() if role)
    return Case(model, model.task, model.roles, heads, {"n": 24, "redundant": True})


def full_strength(seed: int) -> Case:
    """A circuit with the decoys that it has by default."""
    model = ac.planted_circuit(planted_task(seed, n_examples=6), seed)
    return Case(model, model.task, model.roles, more={"n": 32})


def split_roles(seed: int) -> Case:
    """A circuit in which two heads share each role, found as redundant."""
    model = circuit(seed, n_heads=8, copies=dict.fromkeys(("previous", "align_query", "align_key", "lookup"), 2))
    return Case(model, model.task, model.roles, more={"redundant": True})


def of_noisy_zoo(seed: int) -> Case:
    """A circuit of the public zoo of which every head writes noise; a role has one to six heads."""
    model = zoo_circuit([each for each in PUBLIC if zoo_circuit(each).traits["noise"]][seed]).build()
    return Case(model, model.task, model.roles, more={"n": 24, "redundant": True})


def solved_by_mlp(seed: int) -> Case:
    """The MLP knows the answer from the last token; heads attend at random and write a little of what they see."""
    model, generator = attending(seed, 1.0, 0.0, 1.0, gain=0.3), torch.Generator().manual_seed(seed)
    shape = HandBuiltConfig(1, 8, d_model=2 * V + 18, d_head=V + 17, d_mlp=len(LETTERS), d_vocab=V, n_ctx=CONTEXT)
    solver = HandBuilt(shape, TOKENIZER)
    upper, lower = (TOKENIZER.convert_tokens_to_ids(list(letters)) for letters in (LETTERS, LETTERS.lower()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" not in name:
                solver.get_parameter(name).copy_(weight)
        mlp, units = solver.blocks[0].mlp, torch.arange(len(LETTERS))
        mlp.W_in[torch.tensor(upper), units] = 1
        mlp.W_out[units, V + torch.tensor(lower)] = 4 + torch.rand(len(LETTERS), generator=generator)
    return Case(solver.eval(), known_pairs(seed))


def frozen_attention(seed: int) -> Case:
    """All of a layer that attention does not rest on is trained: its attention is that of random weights."""
    task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3, alignment="permutation", task_seed=seed)
    shape = HandBuiltConfig(1, 8, d_model=48, d_head=12, d_mlp=64, d_vocab=V, n_ctx=64)
    model, generator = HandBuilt(shape, TOKENIZER), torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        spread = 0.5 if name in ("W_E", "W_pos") else weight.shape[-2] ** -0.5 if weight.ndim > 1 else 0.0
        spread *= 2 if "W_Q" in name else 1
        weight.data = spread * torch.randn(weight.shape, generator=generator)
        weight.requires_grad_(name not in ("W_E", "W_pos") and "W_Q" not in name and "W_K" not in name)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    prompts = task.sample(STEPS * 16, TOKENIZER, seed=1000 + seed, references=False)
    prompt, query, token = (prompts.column(name).view(len(prompts), -1) for name in ("prompt", "query_pos", "token"))
    for rows in torch.arange(len(prompts)).split(16):
        logits = model(prompts.inputs[rows])[prompt[rows] - rows[0], query[rows]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Case(model.requires_grad_(False).eval(), task)


STEPS = 150
"""Of the training with frozen attention."""


def of_random_weights(seed: int) -> Case:
    """Random weights, of diffuse and of sharp attention, on each kind of prompts."""
    family, gain = PROMPTS[seed % len(PROMPTS)], (1.0, 4.0)[seed // len(PROMPTS) % 2]
    return Case(random_model(family, gain, 9000 + seed), random_task(family, 9000 + seed), more={"n": 24})


def trained(seed: int) -> Case:
    """A circuit that interchange training put into random heads."""
    task = trained_task(31_000 + seed)
    model = train_circuit(task, 31_000 + seed)
    return Case(model, task, model.roles)


FAMILIES: dict[str, Family] = {
    "token preference": Family(lambda seed: Case(attending(seed, (1, 2, 3)[seed % 3], 0, 0), some_task(seed)), True),
    "place preference": Family(lambda seed: Case(attending(seed, 0, 0, (1, 2, 3)[seed % 3]), some_task(seed)), True),
    "recency, gold recent": Family(
        lambda seed: Case(attending(seed, 0.5, 0, 0, (0.05, 0.2, 1)[seed % 3]), some_task(seed, 0.7)), True
    ),
    "own relation": Family(lambda seed: Case(attending(seed, (1, 2, 3)[seed % 3], 0, seed % 2), two_names(seed)), True),
    "related prompts": Family(
        lambda seed: Case(attending(seed, (1, 2, 3)[seed % 3], 0, 0), two_names(seed, related=(4, 8)[seed % 2])), True
    ),
    "frozen random attention": Family(frozen_attention, True),
    "silenced circuits": Family(silenced),
    "another alignment": Family(of_another_alignment),
    "random weights": Family(of_random_weights, True),
    "causal copying": Family(lambda seed: Case(attending(seed, 1, 0, 1, gain=3), some_task(seed)), True),
    "token pairs": Family(lambda seed: Case(attending(seed, 1, 1, 1, gain=3), some_task(seed)), True),
    "solved by an MLP": Family(solved_by_mlp, True),
    "decoys writing noise": Family(with_noise),
    "planted, full strength": Family(full_strength, at_most=20),
    "planted, two heads a role": Family(split_roles, at_most=20),
    "zoo, noisy": Family(of_noisy_zoo, at_most=14, unfiltered=True),
    "trained": Family(trained, at_most=2),
}
"""Nulls, then circuits that are to be found; the noisy ones are both."""


def names_by(found: Localization, *metrics: str) -> set[tuple[tuple[int, int], str]]:
    """The names if the largest of these p-values was corrected, over all candidates."""
    roles, keys = list(found.heads_by_role), ["layer", "head", "role"]
    frame: Any = found.table.frame
    q, *p = (frame[frame["metric"] == metric].set_index(keys)["value"] for metric in ("q", *metrics))
    candidates = [((layer, head), role) for layer, head, role in q.index if role in roles]
    largest = np.max([of_metric[q.index].to_numpy(dtype=float) for of_metric in p], axis=0)
    others = frame[frame["metric"] != "q"]
    rows = frame[frame["metric"] == "q"].assign(value=benjamini_hochberg(largest) if len(q) else largest)
    table = Table(pd.concat([others, rows], ignore_index=True), found.table.provenance)
    tested = found.prompts
    confounded, chance = confounded_roles(tested, roles), chance_of(tested, roles)
    names = named_heads(RoleTests(table, roles, found.thresholds, confounded, chance), candidates)
    return {(head, role) for role, heads in names.items() for head in heads}


def measured(family: str, seed: int) -> dict[str, Any]:
    """What `localize` says of one model."""
    case = FAMILIES[family].make(seed)
    found = ac.localize(case.model, case.task, seed=seed, **{"n_controls": 0, **case.more})
    true = {(head, role) for head, role in case.roles.items() if role in found.heads_by_role}
    names = {
        "named": {(head, role) for role, heads in found.heads_by_role.items() for head in heads},
        "before": names_by(found, "p"),
        **({"unfiltered": names_by(found, "p", "causal_p")} if FAMILIES[family].unfiltered else {}),
        "grouped": {(member.head, role) for role, members in found.redundant.items() for member in members},
    }
    frame: Any = found.table.where(metric="p").frame
    p = {role: [float(p) for p in part["value"]] for role, part in frame.groupby("role")}
    if FAMILIES[family].uniform and ROLE in found.heads_by_role:
        by = "position" if found.prompts.of_one_length else None
        where = previous_where_heads_matter(case.model, found.prompts, heads_of(case.model.cfg), by=by)
        p[WEIGHTED] = [*where.p.values()]
    return {
        "seed": seed,
        "true": len(true),
        **{f"right, {name}": len(of_name & true) for name, of_name in names.items()},
        **{
            f"false, {name}": sorted(str(each) for each in of_name - true if each[0] not in case.either)
            for name, of_name in names.items()
        },
        "p": p,
    }


def summary(family: str, models: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Shares over the models of a family, with their intervals."""

    def share(metric: str, part: int, total: int, role: str = "any") -> dict[str, Any]:
        low, high = binomial_interval(part, total)
        return {"role": role, "metric": metric, "value": part / total, "low": low, "high": high, "n": total}

    kinds = ["named", "before"] + (["grouped"] if any(model["right, grouped"] for model in models) else [])
    for kind in kinds:
        yield share(
            f"models with a false name, {kind}", sum(bool(model[f"false, {kind}"]) for model in models), len(models)
        )
    if total := sum(model["true"] for model in models):
        for kind in kinds + ["unfiltered"] * FAMILIES[family].unfiltered:
            yield share(f"true heads, {kind}", sum(model[f"right, {kind}"] for model in models), total)
    if FAMILIES[family].uniform:
        roles = sorted({role for model in models for role in model["p"]})
        plain = [role for role in roles if role != WEIGHTED]
        for role, of_role in [("all", plain), *((role, [role]) for role in roles)]:
            p = [[each for name in of_role for each in model["p"].get(name, [])] for model in models]
            # Heads of one model are no independent observations.
            shares = np.array([np.mean(np.array(each) <= 0.05) for each in p if each])
            low, high = t_interval(shares[None])
            value = {"value": shares.mean(), "low": low[0], "high": high[0], "n": len(shares)}
            yield {"role": role, "metric": "p at most .05", **value}


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60, help="of each family, at most")
    parser.add_argument(
        "--first", type=int, default=0, help="the first model's seed: tests were developed on the first 60"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="one model of each family, and no training")
    parser.add_argument("--rows", type=Path, help="a folder for the rows of each family, which is then not run again")
    parser.add_argument("--out", type=Path, help="a CSV file to keep the table in")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    families = [name for name in arguments.families if not (arguments.quick and name == "trained")]
    rows = []
    for family in families:
        kept = arguments.rows and arguments.rows / f"{family}.json"
        if kept and kept.exists():
            models = json.loads(kept.read_text(encoding="utf-8"))
        else:
            models = [
                measured(family, arguments.first + number)
                for number in range(1 if arguments.quick else min(arguments.models, FAMILIES[family].at_most))
            ]
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with replacing(kept) as new:
                    new.write_text(json.dumps(models), encoding="utf-8")
        rows.append(pd.DataFrame({"family": family, **row} for row in summary(family, models)))
        print(rows[-1].round(3).to_string(index=False), flush=True)
    if arguments.out:
        pd.concat(rows, ignore_index=True).round(4).to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
