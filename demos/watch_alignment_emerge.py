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
# The bundled Llama looks up what it has seen, but it cannot tell which input symbol comes next. Tuned *in context*, on prompts whose automata are new every time, it learns above all
# to align. We look at the model before, load one that was tuned, and tune for half as long ourselves to see heads form.
#
# ## Before

# %%
import align_circuits as ac

task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=10)
before = ac.load("toy-llama")
prompts = task.sample(48, before.tokenizer, seed=0)
prompts[0]

# %% [markdown]
# The first letter of a phrase needs the aligned input symbol. A predictor that never sees the test input reaches at most the history ceiling, even if it knows all automata, the alignment, the grammar and the output so far.

# %%
ac.plots.accuracy(ac.evaluate(before, prompts), "Before tuning")

# %% [markdown]
# ## After
#
# `ac.tune` leaves an adapter of less than 1 MB, which plain Hugging Face and PEFT read too. One comes with the package.

# %%
after = ac.load("toy-llama-ica")
ac.plots.accuracy(ac.evaluate(after, prompts), "After tuning in context")

# %% [markdown]
# No label says what to align with what: the loss is that of the next token. Yet heads now attend to the symbol that is about to be translated.

# %%
metrics = ["align_query", "align_key", "lookup"]
scores = {name: ac.score_heads(model, prompts, metrics) for name, model in {"before": before, "after": after}.items()}
ac.plots.head_maps(scores["after"] - scores["before"], metrics, "What tuning changed")

# %% [markdown]
# It reads the examples and did not learn their automata: with the labels of the examples replaced by those of other automata, the first token is lost again. And it works on inputs that no
# example resembles, any permutation of the symbols.

# %%
corrupted = task.corrupt(prompts, "labels", seed=0)
beyond = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=10, ood=True).sample(48, before.tokenizer, seed=0)
for name, batch in {"as they are": prompts, "labels corrupted": corrupted, "out of distribution": beyond}.items():
    first = ac.evaluate(after, batch).where(metric="accuracy", kind="first").frame.set_index("predictor")["value"]
    print(f"{name:20} first token {first['model']:.2f}   history ceiling {first['history']:.2f}")

# %% [markdown]
# ## Meanwhile
#
# A shorter tuning, watched: every few steps a probe asks for accuracy and for every head, in distribution and out of it.

# %%
config = ac.TuneConfig(
    loss_on="all", steps=100, batch=8, lr=3e-3, alpha=64, dropout=0, projections=("q", "k", "v", "o"), probe_every=10
)
run = ac.tune(before, task, config, seed=0, progress=False)
run.log[["step", "loss", "first", "later", "align_query", "align_key", "lookup"]].round(2)

# %%
run.figures["best heads"]

# %% [markdown]
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
# `localize` names them on one half of fresh prompts and tests them on the other. To save time it draws four control sets, not twenty: no p-value of a verdict is below 1/5 then, and none can say "necessary".

# %%
found = ac.localize(after, task, n=32, seed=1, n_controls=4)
print(found.summary)

# %%
ac.plots.ablation(found.evidence.set_ablations, "The tuned model with heads ablated")

# %%
shown = [*found.heads("align_query")[:2], *found.heads("lookup")[:2]] or [(0, 0)]
ac.plots.attention(after, prompts[0], heads=shown)
