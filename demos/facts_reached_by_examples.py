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
# # Facts reached by examples
#
# You will train a small attention-only model to recall facts from examples alone, and see that its heads change: one finds the subject, another the type that the examples share.
# You will also see how any model and any task of your own is scored and ablated.
#
# First the model reads what is true of some subjects, each fact stated in its own words. Later it is shown pairs, *subject, attribute*, all of one type, and must continue them:
# nothing states which type (Vasudeva et al., 2026).
#
# ## A world and the facts stated of it
#
# Every subject has one attribute (a *value*) of each type; several subjects may have the same. In a fact a relation token (`r`) announces the type. Below, a prompt of facts and
# one of examples, each with its answer and the positions that its relations call right:

# %%
from dataclasses import replace

import torch

import align_circuits as ac
from align_circuits.papers.recall.models.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.papers.recall.models.training import FINETUNING, PRETRAINING, Stage, train_stage
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld

torch.set_num_threads(1)  # waiting for each other, threads make a small model slower
world = RecallWorld(n_subjects=32, n_values=(4, 4, 4), n_grammar=6, div=None, relation_tokens=True)
seen, held_out = world.split(16)
facts = FactsTask(world, n_facts=3, grammar_len=4, p_grammar=0.0)
shown = DemonstrationsTask(world, n_demos=4, subjects=seen)
tested = replace(shown, query_subjects=held_out)

for task in (facts, tested):
    prompts = task.sample(1)
    print(prompts.text[0], "->", world.token_strings[int(prompts.targets["token"][0])])
    for name, relation in prompts.relations.items():
        print(f"    {name:14} positions {relation.keys_of(0)}")

# %% [markdown]
# ## Facts first, then demonstrations
#
# Both stages go through one training loop. The log holds the shares of predictions that are right (`exact`), that are a value of the right type (`type`) and that are the subject's
# value of any type (`subject`). Demonstrations are about half of the subjects, and queries are about the others (`held_out`). First the facts:

# %%
model = AttentionOnly(AttentionOnlyConfig(world.d_vocab, facts.length - 1, d_head=32), seed=0)
probes = {"facts": facts.sample(128, seed=1), "held_out": tested.sample(128, seed=1)}
pretraining = replace(PRETRAINING, steps=500, lr=3e-3, schedule="cosine", log_every=100)
first = train_stage(model, Stage(facts, pretraining, 32), probes=probes, progress=False)
first.log[["step", "loss", "facts.type", "facts.subject", "facts.exact", "held_out.exact"]].round(2)

# %% [markdown]
# The model knows all values of a subject, and guesses their type. Now the demonstrations:

# %%
before = ac.score_heads(model, probes["held_out"])
finetuning = replace(FINETUNING, steps=300, lr=3e-3, log_every=60)
second = train_stage(model, Stage(shown, finetuning, 32, "last"), probes=probes, progress=False)
second.log[["step", "loss", "held_out.type", "held_out.subject", "held_out.exact"]].round(2)

# %% [markdown]
# ## Which head looks where
#
# Most held-out queries are right now, though the model saw no demonstration of these subjects. The relations of the prompts are all that `score_heads` needs: the subject of the
# query (`query_subject`), and the attributes in the examples (`same_type`). Before finetuning and after:

# %%
after = ac.score_heads(model, probes["held_out"])
for name, table in (("before", before), ("after", after)):
    for metric in ("query_subject", "same_type"):
        rows = table.heads().where(metric=metric).frame
        print(f"{name:7} {metric:14}", {f"L0H{int(row['head'])}": round(row["value"], 2) for _, row in rows.iterrows()})

# %% [markdown]
# The change as a figure: violet heads attend more than before, orange ones less.

# %%
ac.plots.head_maps(after - before, ["query_subject", "same_type"])

# %% [markdown]
# The heads have divided the work: L0H0 and L0H1 turn to the subject, and L0H2 to the attributes of the examples.
#
# ## Which heads matter
#
# The effect of ablating each head to its mean, in nats of the right attribute's log-probability. `align-circuits reproduce recall/heads` does all this over seeds, beside the heads that the paper's theory
# predicts, and `recall/fig2` to `recall/fig24` follow its figures.

# %%
effects = ac.ablate_heads(model, probes["held_out"])
effects.where(metric="log_prob", kind="all").frame[["layer", "head", "value", "low", "high"]].round(2)
