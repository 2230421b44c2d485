"""Induction heads of a pretrained model, on random tokens and on prose, and function-vector heads on word pairs.

Prose is what ships with Python: the topics of its documentation, cut into windows at any word.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import spearmanr

from align_circuits.circuits.direct_effects import function_vectors
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.control_sets import score_matched
from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate, Edit
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, stored
from align_circuits.papers.statistics import mean_of, value_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.lexicon import LexiconTask
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.task import TOKEN_ROLES
from align_circuits.tasks.word_pairs import LEXICONS, WORD_TASKS

KEYS = ("part", "data", "of", "draw", "seed", "metric", "level", "layer", "head")
"""The key columns; missing where one does not apply."""


@dataclass(frozen=True)
class Wild:
    """Sample sizes."""

    seeds: tuple[int, ...] = (3, 4, 5)
    """Of random tokens; each seed has windows of prose that no other has."""
    n: int = 12
    """Prompts of random tokens, and of prose, a seed, on which heads are scored."""
    repeated: int = 50
    """Random tokens, written twice."""
    window: int = 256
    """Tokens of a window of prose on which heads are scored."""
    named_on: tuple[int, int] = (12, 25)
    """Prompts of random tokens on which `localize` names heads, and how many tokens each repeats."""
    windows: int = 32
    """Windows of prose a seed in which the in-context gain is measured."""
    early: int = 40
    """The first token of the early ones."""
    late: int = 480
    """The first token of the late ones, which have so many tokens before them."""
    band: int = 32
    """Tokens that are early, and tokens that are late."""
    draws: int = 5
    """Sets of control heads a seed."""
    lexicons: tuple[str, ...] = WORD_TASKS
    """The word-pair tasks; every other one chooses the head that is tested on the rest."""
    pairs: int = 6
    """Prompts of a word-pair task, of one pair behind eight examples."""


@lru_cache(maxsize=2)
def _prose_ids(tokenizer: Any) -> list[int]:
    """All topics as tokens, one behind the other."""
    texts = [topics[name] for name in sorted(topics)]
    return [token for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in ids]


def prose(tokenizer: Any, n: int, length: int, seed: int) -> Prompts:
    """Returns windows of prose, each behind the BOS token if there is one; no window is in two seeds.

    A window begins anywhere, so early and late tokens of a window are of one kind.

    Args:
        tokenizer: The model's tokenizer.
        n: How many windows.
        length: Tokens of a window, the BOS token left out.
        seed: Which windows.

    Raises:
        ValueError: There are not so many windows.
    """
    ids, start = _prose_ids(tokenizer), [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    count = len(ids) // length
    chosen = np.random.default_rng(length).permutation(count)[n * seed : n * (seed + 1)]
    if len(chosen) < n:
        raise ValueError(f"{count} windows of {length} tokens: {n} of seed {seed} are more than there are")
    windows = [[*start, *ids[length * window : length * (window + 1)]] for window in chosen.tolist()]
    return Prompts.from_tokens(windows, tokenizer=tokenizer)


def head_scores(*, model: str, data: str, n: int, length: int, seed: int, **_: str) -> pd.DataFrame:
    """Scores all heads for the roles of tokens; the function of a job.

    Args:
        model: What `load` takes.
        data: `"repeated"` or `"prose"`.
        n: Prompts.
        length: Random tokens, or tokens of a window.
        seed: Of the prompts.
        **_: The hashes of weights and prose, which a name can get anew.
    """
    loaded = stored(model)
    if data == "repeated":
        prompts = RepeatedTokensTask(length).sample(n, loaded.tokenizer, seed)
    else:
        prompts = prose(loaded.tokenizer, n, length, seed)
    return score_heads(loaded, prompts, [*TOKEN_ROLES]).heads().frame


@lru_cache(maxsize=1)
def _named(model: str, n: int, length: int) -> tuple[dict[str, list[Head]], dict[str, ndarray], Table]:
    """The heads that `localize` names on random tokens, the scores of all heads by role, and the evidence."""
    loaded, task = stored(model), RepeatedTokensTask(length)
    found = localize(loaded, task, n, seed=1000, n_controls=0)
    scores = score_heads(loaded, task.sample(n, loaded.tokenizer, 1001), [*TOKEN_ROLES])
    grids = {role: scores.to_array(role) for role in TOKEN_ROLES}
    return {role: found.heads(role) for role in found.heads_by_role}, grids, found.table


def _induction_heads(named: Mapping[str, list[Head]], grids: Mapping[str, ndarray]) -> list[Head]:
    """The named induction heads; where none is named, as in random models, the head that scores highest."""
    if heads := named.get("induction"):
        return heads
    layer, head = np.unravel_index(np.nanargmax(grids["induction"]), grids["induction"].shape)
    return [(int(layer), int(head))]


def named_heads(*, model: str, n: int, length: int, **_: str) -> pd.DataFrame:
    """Returns the score of every head that `localize` names on random tokens; the function of a job."""
    named, grids, evidence = _named(model, n, length)
    rows = [
        pd.DataFrame({"role": ["induction"], "value": [float(len(named["induction"]))], "metric": ["count"], "n": [1]})
    ]
    for role, heads in named.items():
        for layer, head in heads:
            rows.append(evidence.where(role=role, layer=layer, head=head, metric="score").frame)
    if not named["induction"]:
        rows.append(
            pd.DataFrame([{"role": "induction", "metric": "highest", "value": np.nanmax(grids["induction"]), "n": 1}])
        )
    columns = ["role", "layer", "head", "metric", "value", "low", "high", "n"]
    return pd.concat(rows).reindex(columns=columns).rename(columns={"role": "of"})


def in_context_gain(
    *,
    model: str,
    named_on: Sequence[int],
    windows: int,
    early: int,
    late: int,
    band: int,
    draws: int,
    seed: int,
    **_: str,
) -> pd.DataFrame:
    """Measures how much better late tokens are predicted than early ones, with sets of heads ablated to their means.

    The gain of a window is its mean log-probability of the late tokens minus that of the early ones: the loss early
    minus late of Olsson et al. (2022), in nats. What a set of heads costs is the loss of gain, window by window.

    Args:
        model: What `load` takes.
        named_on: Prompts and random tokens on which induction heads are named.
        windows: How many.
        early: The first early token.
        late: The first late token.
        band: How many of each.
        draws: Sets of other heads, each with a score near that of a named head or else of its layer.
        seed: Of windows and draws.
        **_: As for `head_scores`.
    """
    loaded = stored(model)
    named, grids, _evidence = _named(model, *named_on)
    induction = _induction_heads(named, grids)
    every = prose(loaded.tokenizer, windows, late + band, seed)
    prompts = every.select_targets(lambda targets: _is_late(targets, early, band) | _is_late(targets, late, band))
    others = [head for head in heads_of(loaded.cfg) if head not in induction]
    generator = np.random.default_rng(seed)
    drawn = [score_matched(induction, others, {"induction": grids["induction"]}, generator) for _ in range(draws)]
    baseline = ablation_baseline(loaded, prompts, "mean")
    sets: list[list[Edit]] = [[], *([Ablate(heads, how="mean", baseline=baseline)] for heads in (induction, *drawn))]
    early_tokens, late_tokens = _bands(loaded, prompts, sets, late)
    intact, without, *matched = late_tokens - early_tokens
    # The late tokens with only as many tokens of their own text before them as the early ones have.
    foreign = _bands(loaded, _with_other_beginnings(prompts, late + band, early + band), [[]], late)[1]
    lost = [intact - gain for gain in matched]
    rows = {
        ("nothing", "gain", None): intact,
        ("the beginning", "gain", None): foreign[0] - early_tokens[0],
        ("induction", "gain", None): without,
        ("induction", "lost", None): intact - without,
        ("matched", "lost", None): np.mean(lost, axis=0),
        ("induction", "lost beyond half", None): intact - without - intact / 2,
        ("matched", "lost beyond half", None): np.mean(lost, axis=0) - intact / 2,
        ("induction", "lost beyond matched", None): intact - without - np.mean(lost, axis=0),
        **{("matched", "gain", draw): gain for draw, gain in enumerate(matched)},
    }
    keys = pd.DataFrame([*rows], columns=["of", "metric", "draw"]).astype({"draw": "Int64"})
    values = np.stack(list(rows.values()))
    return Table.from_prompts(keys, values, np.ones_like(values), Provenance("gain"), bounded=False).frame


def _is_late(targets: pd.DataFrame, first: int, band: int) -> Any:
    """Which targets are the `band` tokens from the `first` of a window on."""
    return (targets["offset"] >= first) & (targets["offset"] < first + band)


def _bands(
    model: Any, prompts: Prompts, sets: list[list[Edit]], late: int
) -> tuple[Float[ndarray, "set prompt"], Float[ndarray, "set prompt"]]:
    """For each set of edits the mean log-probability of each window's early and late tokens, in nats."""
    targets = TargetMetrics.of(prompts, ("log_prob",))
    values, _ = targets.measure_edited(model, sets)
    is_late = (targets.targets["offset"] >= late).to_numpy()
    early, late_ = (values[0][:, part].reshape(len(sets), len(prompts), -1).mean(2) for part in (~is_late, is_late))
    return early, late_


def _with_other_beginnings(prompts: Prompts, window: int, kept: int) -> Prompts:
    """The windows with all but their last `kept` tokens replaced by those of the next window."""
    start, inputs = prompts.inputs.shape[1] - window, prompts.inputs.clone()
    inputs[:, start:-kept] = prompts.inputs.roll(-1, 0)[:, start:-kept]
    return replace(prompts, inputs=inputs)


def function_vector_scores(
    *, model: str, lexicons: Iterable[str], n: int, false: bool, seed: int, **_: str
) -> pd.DataFrame:
    """Scores all heads by how far their mean output carries word-pair tasks; the function of a job.

    Args:
        model: What `load` takes.
        lexicons: The tasks, of `LEXICONS`.
        n: Prompts of each.
        false: Whether each word gets the translation of another one, so that no answer follows from the task alone.
        seed: Of the prompts.
        **_: As for `head_scores`.
    """
    loaded, pairs = stored(model), []
    for name in lexicons:
        words = LEXICONS[name]
        known = dict(zip(words, np.roll(list(words.values()), 7).tolist(), strict=True)) if false else words
        task = LexiconTask(known, x_len=1, n_examples=8)
        prompts = task.sample(n, loaded.tokenizer, seed)
        pairs.append(Pair(prompts, task.corrupt(prompts, "labels", seed=seed)))
    return function_vectors(loaded, pairs).frame


def _jobs(config: Wild, inputs: Inputs) -> list[Measurement]:
    text = hashlib.sha256("".join(topics[name] for name in sorted(topics)).encode()).hexdigest()[:16]
    common = {**inputs.model, "text": text}
    lengths = {"repeated": config.repeated, "prose": config.window}
    scores = [
        Measurement(
            head_scores,
            {**common, "data": data, "n": config.n, "length": length},
            seed,
            {"part": "scores", "data": data},
        )
        for data, length in lengths.items()
        for seed in config.seeds
    ]
    n, length = config.named_on
    gain = {name: getattr(config, name) for name in ("named_on", "windows", "early", "late", "band", "draws")}
    tasks = {"chosen on": config.lexicons[::2], "tested on": config.lexicons[1::2]}
    vectors = [
        Measurement(
            function_vector_scores,
            {**common, "lexicons": list(lexicons), "n": config.pairs, "false": false},
            0,
            {"part": "function vectors", "data": data, "of": "false pairs" if false else "word pairs"},
        )
        for data, lexicons in tasks.items()
        for false in (False, True)
        if data == "tested on" or not false
    ]
    return [
        *scores,
        Measurement(named_heads, {**common, "n": n, "length": length}, None, {"part": "named", "data": "repeated"}),
        *(
            Measurement(in_context_gain, common | gain, seed, {"part": "gain", "data": "prose"})
            for seed in config.seeds
        ),
        *vectors,
    ]


def _summarize(_: Wild, rows: Rows) -> pd.DataFrame:
    """All rows, and over heads the rank correlation of scores on random tokens and on prose, for each seed."""
    frame = pd.concat(rows.values(), ignore_index=True).astype({"value": float, "low": float, "high": float})
    scores = frame[frame["part"] == "scores"]
    found = []
    for seed, of_seed in scores.groupby("seed"):
        wide: Any = of_seed.pivot(index=["layer", "head"], columns=["data", "metric"], values="value")
        for role in TOKEN_ROLES:
            for other in TOKEN_ROLES:
                found_of: Any = spearmanr(wide["repeated", role], wide["prose", other], nan_policy="omit")
                found.append(
                    {
                        "part": "correlation",
                        "of": role,
                        "metric": other,
                        "seed": seed,
                        "value": float(found_of.statistic),
                        "n": len(wide),
                    }
                )
    frame = pd.concat([frame, pd.DataFrame(found)], ignore_index=True)
    return frame.reindex(columns=[*KEYS, "value", "low", "high", "n"]).astype(
        dict.fromkeys(("draw", "seed", "layer", "head"), "Int64")
    )


def _over_seeds(table: Table, role: str, other: str) -> Any:
    return table.where(part="correlation", of=role, metric=other).frame["value"].to_numpy(float)


def _best(table: Table) -> dict[str, int]:
    """The head with the highest value."""
    best: Any = table.frame.loc[table.frame["value"].astype(float).idxmax()]
    return {"layer": int(best["layer"]), "head": int(best["head"])}


def _median(table: Table) -> dict[str, int]:
    """The head with the median value."""
    order = table.frame.sort_values("value")
    middle: Any = order.iloc[len(order) // 2]
    return {"layer": int(middle["layer"]), "head": int(middle["head"])}


def _check(table: Table) -> list[Claim]:
    scores, gain = table.where(part="scores"), table.where(part="gain")
    first, *_rest, last = sorted(scores.frame["seed"].unique())
    checks = []
    for role in ("induction", "previous"):
        chosen = scores.where(data="repeated", metric=role, seed=int(first))
        for data, least in (("repeated", 0.5), ("prose", 0.25)):
            tested = scores.where(data=data, metric=role, seed=int(last))
            checks.append(
                Claim(
                    f"The first head for {role} on random tokens attends so on other {data} prompts ({role})"
                ).at_least(
                    least, value_of(tested, **_best(chosen)), value_of(tested, **_median(chosen)), "the median head"
                )
            )
    for role, other in (("induction", "previous"), ("previous", "induction")):
        checks.append(
            Claim(f"Heads that score high for {role} on random tokens do on prose (rank correlation)").at_least(
                0.5, _over_seeds(table, role, role), _over_seeds(table, role, other), f"{other} on prose"
            )
        )

    def rows(of: str, metric: str) -> Any:
        return mean_of(gain.where(of=of, metric=metric, draw=None))

    matched = "as many other heads of similar scores"
    checks += [
        Claim("Late tokens are predicted better than early ones (gain, nats)", "about 0.4").at_least(
            0.2, rows("nothing", "gain"), rows("the beginning", "gain"), "windows that begin with another text"
        ),
        Claim("Without the induction heads more than half of the gain is lost (lost minus half, nats)").at_least(
            0.0, rows("induction", "lost beyond half"), rows("matched", "lost beyond half"), matched
        ),
        Claim("They cost more of it than other heads of similar scores (lost minus lost, nats)").at_least(
            0.05, rows("induction", "lost beyond matched"), rows("matched", "lost"), f"{matched}, beside none"
        ),
    ]
    vectors = table.where(part="function vectors")
    head = _best(vectors.where(data="chosen on", of="word pairs"))
    tested = vectors.where(data="tested on")
    checks.append(
        Claim(
            "The first function-vector head of half of the word-pair tasks carries the others (probability)"
        ).at_least(
            0.01,
            value_of(tested.where(of="word pairs"), **head),
            value_of(tested.where(of="false pairs"), **head),
            "pairs of words that do not belong together",
        )
    )
    repeated = scores.where(data="repeated", metric="induction", seed=int(last))
    induction = _best(scores.where(data="repeated", metric="induction", seed=int(first)))
    checks.append(
        Claim("That head is no induction head (induction)").at_most(
            0.25, value_of(repeated, **head), value_of(repeated, **induction), "the first induction head"
        )
    )
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    scores = table.where(part="scores")
    first = min(int(seed) for seed in scores.frame["seed"])
    figures = {
        data: plots.head_maps(scores.where(data=data, seed=first), [*TOKEN_ROLES], f"attention on {data} prompts")
        for data in ("repeated", "prose")
    }
    vectors = table.where(part="function vectors", of="word pairs")
    figures["function vectors"] = plots.head_maps(
        vectors, list(vectors.frame["data"].unique()), "function-vector score", by="data", unit="probability"
    )
    gain: Any = table.where(part="gain", metric="gain").frame
    gain = gain.assign(
        row=["intact" if of == "nothing" else f"without {of}" for of in gain["of"]],
        seed=gain["seed"].map("seed {}".format),
    )
    figures["gain"] = plots.dots(gain, "row", "seed", "late minus early log-probability (nats)")
    return figures


WILD = Experiment(
    "wild/induction",
    "Induction heads of a pretrained model on random tokens and on prose, and function-vector heads on word pairs",
    "after Olsson et al. (2022) and Todd et al. (2024)",
    Study(
        "wild/induction",
        {
            "smoke": Wild(
                n=3,
                repeated=8,
                window=24,
                named_on=(8, 8),
                windows=3,
                early=8,
                late=40,
                band=6,
                draws=1,
                lexicons=("capital letters", "small letters"),
                pairs=3,
            ),
            "cpu": Wild(),
            "paper": Wild(n=64, draws=20, pairs=25),
        },
        _jobs,
        _summarize,
        models="one",
    ),
    _draw,
    _check,
)
