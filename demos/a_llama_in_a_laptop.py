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
# # A Llama in a laptop
#
# You will measure what a small Llama can do in context, and which of its heads do induction and lookup. You will also see what it cannot do: it solves a task if the
# symbol to translate is written out, and fails if it must find that symbol itself, since no head aligns.
#
# `toy-llama` has some two million parameters (less than 5 MB), pretrained from scratch on symbols, letters and lines, and comes with the package.

# %%
import align_circuits as ac

model = ac.load("toy-llama")
print(
    f"{model.cfg.n_layers} layers of {model.cfg.n_heads} heads, {sum(p.numel() for p in model.parameters()):,} parameters"
)

# %% [markdown]
# ## The same task, written twice
#
# Each of five symbols is translated by a *phrase* of two letters. A *pre-aligned* prompt repeats each symbol just before its phrase. A *standard* prompt does not, so the model
# must find out which symbol comes next.

# %%
shape = {"x_len": 5, "phrase_len": 2, "n_examples": 15}
tasks = {style: ac.Seq2SeqTask(style=style, **shape) for style in ("pre-aligned", "standard")}
prompts = {style: task.sample(100, model.tokenizer, seed=7) for style, task in tasks.items()}
for style, some in prompts.items():
    print(f"{style:>12}: ... {some.text[0].splitlines()[-1]}")

# %% [markdown]
# Compare the model with *history* at the first token of a phrase. History is the best that a predictor can do which knows every automaton, the alignment and the output so far,
# and never sees the input. Only a model above it has used the input.

# %%
accuracy = {style: ac.evaluate(model, some) for style, some in prompts.items()}
ac.plots.accuracy(accuracy["pre-aligned"], "Pre-aligned prompts")

# %% [markdown]
# With the symbols written out, nearly all tokens are right: the model looks the phrases up in the examples. Does it still without them?

# %%
ac.plots.accuracy(accuracy["standard"], "Standard prompts")

# %% [markdown]
# No: the first token is far below history. Later tokens follow from the letter before them, so they lose less.
#
# ## Its induction heads
#
# Random tokens, repeated once. An induction head attends to what came after the same token last time; the score is the share of its attention that it gives there.

# %%
repeated = ac.RepeatedTokensTask(length=40).sample(32, model.tokenizer, seed=0)
scores = ac.score_heads(model, repeated)
scores.top("induction", 4)

# %% [markdown]
# An induction head needs a head in an earlier layer that attends to the previous token. Look for one below the induction heads:

# %%
ac.plots.head_maps(scores, ["induction", "previous", "duplicate"])

# %% [markdown]
# L1H1 attends to the previous token, and the induction heads stand in the layers above it. No head attends to earlier copies of its own token.
#
# On pre-aligned prompts induction is lookup: what followed the symbol last time is its phrase. L2H1 and L3H4 are among the four best heads of both:

# %%
ac.score_heads(model, prompts["pre-aligned"]).top("lookup", 4)

# %% [markdown]
# ## No head aligns
#
# On standard prompts no head attends reliably, from the position that begins a phrase, to the symbol that the phrase translates. Chance is 1/5; the best head is right in less
# than half of the phrases; `localize` asks an aligner for at least half.

# %%
aligned = ac.score_heads(model, prompts["standard"])
aligned.top("align_query", 4)

# %% [markdown]
# This is the missing alignment link. [Tuning in context closes it](watch_alignment_emerge.ipynb). The [model card](../docs/model-card.md) says how the model was made, and what it
# can and cannot do.
