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
# # The birth of an induction head
#
# You will train networks of two attention layers on a laptop and see an induction head appear abruptly, after [Reddy (2024)](https://arxiv.org/abs/2312.03002). You will learn which
# attention comes before the transition and which with it, and test by intervening what brings it about.
#
# ## Sequences that know their relations
#
# Items and their labels alternate; the label of the last item is to be predicted. Here four of five sequences use classes that exist nowhere else, so that only the context can
# tell. Each sequence knows which position should attend to which:

# %%
import torch

import align_circuits as ac
from align_circuits.papers.abrupt.figs_3_4_5_transition import draw_measures
from align_circuits.papers.abrupt.grid import train_on_exemplars
from align_circuits.papers.abrupt.interventions import attend_to_previous
from align_circuits.papers.abrupt.models import ExemplarNet, ExemplarNetConfig
from align_circuits.papers.abrupt.progress_measures import BOTH, TRANSITION, training_courses
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.papers.statistics import measured
from align_circuits.training.loop import TrainConfig

torch.set_num_threads(1)  # waiting for each other, threads make a small model slower
task = ExemplarTask(n_classes=64, n_labels=16, n_pairs=4, d_content=32, n_positions=16, p_context=0.8, noise=0.0)
prompts = task.sample(3, seed=0)
for name, relation in prompts.relations.items():
    print(f"{name:14} position {int(relation.query[0])} should attend to {relation.keys_of(0)}")

# %% [markdown]
# ## Three seeds, trained as one
#
# Each seed's network has its own classes and labels (its *world*), weights and sequences, and ends as if it had been trained alone. Look for the step at which accuracy on sequences of novel
# classes (`in context`) leaves 1/4.

# %%
seeds = [0, 1, 2]


def train(steps, seeds=seeds, override=None):
    net = ExemplarNet(ExemplarNetConfig(16, task.d_in, d_head=32, d_hidden=64, init=32**-0.5), seeds)
    config = TrainConfig(steps, lr=0.1, optimizer="sgd", clip=None, log_every=100)
    worlds = Worlds([task] * len(seeds), seeds)
    how = {"batch_size": 64, "probe": 250, "intervention": override and override(net), "progress": False}
    return net, train_on_exemplars(net, worlds, config, **how)


_, table = train(2000)
training_courses(BOTH | {"swap": "labels swapped"}, {"mean of three seeds": {}})(table)

# %% [markdown]
# For a long time the network only guesses among the four labels that it sees: it has gone from 1/16 to 1/4. Then, within a few hundred steps, it learns to read the context, and swapping all labels
# does not disturb it. (Where seeds differ in their step, the interval over three of them is wide.) The step at which accuracy reaches 1/2, over seeds:

# %%
print(measured(TRANSITION(table)))

# %% [markdown]
# Four *progress measures*, read by hooks on the attention patterns and from the logits, are drawn with that step of each seed at 0. Two are of an induction head: *ILA1*, attention to the previous token in
# layer 1, and *TILA2*, attention of the last item (the *target*) to its label in layer 2. Two are of guessing: *TLA2*, attention of the target to labels at large, and *CLA*, the
# probability of the labels in the context. Which rise first?

# %%
draw_measures()(table)

# %% [markdown]
# *TLA2* and *CLA* rise long before the transition, *ILA1* and *TILA2* with it.
#
# ## Attention through the transition
#
# The attention of one network on one sequence, before, at and after the transition: layer 1 above, and below it what the target attends to in layer 2. Move the slider. (As a
# notebook on GitHub this page shows the first step alone.) Look at the cells beside the diagonal in layer 1, and at position 3 in layer 2, where the right label stands.

# %%
import pandas as pd

moment = int(TRANSITION(table)[0])
sequence = Worlds([task], [0]).batch(0, 1, "icl").inputs
maps = {"layer 1": [], "layer 2, the target": []}
for steps in (moment // 2, moment, 3 * moment // 2):
    net, _ = train(steps, [0])
    _, cache = net.run_with_cache(sequence)
    for layer, (rows, queries) in enumerate(zip(maps.values(), (range(9), [8]), strict=True)):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, 0]
        for query in queries:
            rows += [
                {"step": steps, "query": query, "key": key, "value": pattern[query, key].item()}
                for key in range(query + 1)
            ]
ac.plots.attention_course({name: pd.DataFrame(rows) for name, rows in maps.items()})

# %% [markdown]
# At first attention is spread widely. After the transition labels attend to the item before them, and the target to its label.
#
# ## Intervening
#
# Does attention to the previous token bring the rest about? At the labels, which must fetch the item before them, we clamp it from the first step on. The transition then comes
# far sooner. (If it is clamped at the items too, the transition comes sooner in some seeds only.)

# %%
_, overridden = train(1000, override=lambda net: attend_to_previous(net, "labels"))
print("free      ", measured(TRANSITION(table)))
print("overridden", measured(TRANSITION(overridden)))
