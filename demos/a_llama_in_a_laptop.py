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
# `toy-llama` is a Llama of about two million parameters that comes with the package, in less than 5 MB, pretrained from scratch on symbols, letters and lines. It has
# induction heads, it looks up in context, and it shows the gap of the paper: it solves a task when the aligned symbols are written out, and fails when it must find them.

# %%
import align_circuits as ac

model = ac.load("toy-llama")
print(
    f"{model.cfg.n_layers} layers of {model.cfg.n_heads} heads, {sum(p.numel() for p in model.parameters()):,} parameters"
)

# %% [markdown]
# ## The same task, written twice
#
# A *pre-aligned* prompt writes each symbol once more before the phrase that translates it. A *standard* prompt does not.

# %%
shape = {"x_len": 5, "phrase_len": 2, "n_examples": 15}
tasks = {style: ac.Seq2SeqTask(style=style, **shape) for style in ("pre-aligned", "standard")}
prompts = {style: task.sample(100, model.tokenizer, seed=7) for style, task in tasks.items()}
for style, some in prompts.items():
    print(f"{style:>12}: ... {some.text[0].splitlines()[-1]}")

# %%
accuracy = {style: ac.evaluate(model, some) for style, some in prompts.items()}
ac.plots.accuracy(accuracy["pre-aligned"], "Pre-aligned prompts")

# %%
ac.plots.accuracy(accuracy["standard"], "Standard prompts")

# %% [markdown]
# With the symbols written out, the model looks phrases up in the examples. Without them, the first token of a phrase is no better than the *history* ceiling: what a predictor
# can reach that knows every automaton, the alignment and the output so far, and never sees the input. Later tokens follow from the letter before them and need less.
#
# ## Its induction heads
#
# Random tokens, repeated once: an induction head attends to what came after the same token last time.

# %%
repeated = ac.RepeatedTokensTask(length=40).sample(32, model.tokenizer, seed=0)
scores = ac.score_heads(model, repeated)
scores.top("induction", 4)

# %%
ac.plots.head_maps(scores, ["induction", "previous", "duplicate"])

# %% [markdown]
# On pre-aligned prompts the same heads look up the letters that the same symbol wrote before:

# %%
ac.score_heads(model, prompts["pre-aligned"]).top("lookup", 4)

# %% [markdown]
# ## No head aligns
#
# On standard prompts no head attends, at the position that begins a phrase, to the symbol that the phrase translates. (Chance is 1/5; the best head is a little above it.)

# %%
aligned = ac.score_heads(model, prompts["standard"])
aligned.top("align_query", 4)

# %% [markdown]
# That is the missing link which in-context tuning is to close. How the model was made, and what it can and cannot do, stands in its {doc}`model card </model-card>`.
