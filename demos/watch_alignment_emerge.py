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
# # Watch alignment emerge
#
# You will see a small Llama learn to align an output with its input, when it is tuned *in context*: on prompts whose rules are new every time. You will watch the heads that do it
# form within some twenty updates, and test whether the model needs them.
#
# ## Before
#
# Five symbols, each translated by a *phrase* of two letters. A symbol and the letters that translate it share a colour and a number.

# %%
import align_circuits as ac

task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=10)
before = ac.load("toy-llama")
prompts = task.sample(48, before.tokenizer, seed=0)
prompts[0]

# %% [markdown]
# The first letter of a phrase needs the aligned input symbol. A predictor that never sees the test input reaches at most the *history* ceiling, even if it knows all automata (the
# rules that write the phrases), the alignment, the grammar (the rule that orders the inputs) and the output so far. Is the model above it?

# %%
ac.plots.accuracy(ac.evaluate(before, prompts), "Before tuning")

# %% [markdown]
# At first letters it is far below: nothing shows that it uses the input.
#
# ## After
#
# `ac.tune` leaves an adapter of less than 1 MB, which plain Hugging Face and PEFT read too. One comes with the package. Is the tuned model above history?

# %%
after = ac.load("toy-llama-ica")
ac.plots.accuracy(ac.evaluate(after, prompts), "After tuning in context")

# %% [markdown]
# It is, at first letters. No label said what to align with what: the loss is that of the next token. Look for heads that changed: violet ones score higher than before.

# %%
metrics = ["align_query", "align_key", "lookup"]
scores = {name: ac.score_heads(model, prompts, metrics) for name, model in {"before": before, "after": after}.items()}
ac.plots.head_maps(scores["after"] - scores["before"], metrics, "What tuning changed")

# %% [markdown]
# Heads, mostly of layer 2, now attend to the symbol that is translated next (`align_query`) or was just translated (`align_key`), and heads of layers 3 to 5 look its translations up.
#
# Does the model read the examples, or did it learn automata by heart? With the letters of the examples replaced by those of other automata, the first token is lost again. Does it
# need the order of the examples' inputs? It works on any permutation of the symbols, too (*out of distribution*).

# %%
corrupted = task.corrupt(prompts, "labels", seed=0)
beyond = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=10, ood=True).sample(48, before.tokenizer, seed=0)
for name, batch in {"as they are": prompts, "labels corrupted": corrupted, "out of distribution": beyond}.items():
    first = ac.evaluate(after, batch).where(metric="accuracy", kind="first").frame.set_index("predictor")["value"]
    print(f"{name:20} first token {first['model']:.2f}   history ceiling {first['history']:.2f}")

# %% [markdown]
# ## Meanwhile
#
# Now we tune ourselves, for half as many updates. Every ten steps a *probe* measures accuracy and scores every head, on prompts like those of training and on others.

# %%
config = ac.TuneConfig(
    loss_on="all", steps=100, batch=8, lr=3e-3, alpha=64, dropout=0, projections=("q", "k", "v", "o"), probe_every=10
)
run = ac.tune(before, task, config, seed=0, progress=False)
run.log[["step", "loss", "first", "later", "align_query", "align_key", "lookup"]].round(2)

# %% [markdown]
# The best score of any head, for each metric. Which comes first, alignment or lookup?

# %%
run.figures["best heads"]

# %% [markdown]
# Both rise within the first twenty to thirty updates, so close together that this one run does not tell which is first.
#
# A whole run takes a few minutes: the settings above with `steps=200`, or `align-circuits tune`, which ends with the heads named and ablated. When a metric emerged is then a number, with
# an interval over seeds (`reproduce icatune/fig4`); here, from one seed and few prompts:

# %%
for metric, kind in (("align_query", "all"), ("lookup", "all"), ("accuracy", "first")):
    emerged = ac.emergence_step(run.table, metric, kind=kind, ood=False, offset=None)
    step = emerged.where(measure="step").frame["value"].iloc[0]
    print(f"{metric:12} {'did not emerge' if step != step else f'step {step:.0f}'}")

# %% [markdown]
# ## Is it the heads?
#
# `localize` names them on one half of fresh prompts and tests them on the other. To save time it draws at most four control sets, not twenty: no p-value of a verdict is below 1/5 then, and none can say "necessary".

# %%
found = ac.localize(after, task, n=32, seed=1, n_controls=4)
print(found.summary)

# %% [markdown]
# Compare the mark of each role (gray) with the blue one, at first and at later letters:

# %%
ac.plots.ablation(found.evidence.set_ablations, "The tuned model with heads ablated")

# %% [markdown]
# Without the aligners most first letters are lost and most later ones are kept, as alignment would have it. All 16 named heads together show nothing: 16 random heads of the same layers cost as much.
#
# Where do they attend on one prompt? A row is the token that attends, and `...` is all earlier lines. An aligner should draw a staircase, a lookup head attend to the earlier lines.

# %%
shown = [*found.heads("align_query")[:2], *found.heads("lookup")[:2]] or [(0, 0)]
ac.plots.attention(after, prompts[0], heads=shown)

# %% [markdown]
# They do. A page says how to [tune your own model](../docs/tune-a-model.md), and [another tutorial](a_pretrained_llama_tuned_in_context.ipynb) asks the same of SmolLM2.
