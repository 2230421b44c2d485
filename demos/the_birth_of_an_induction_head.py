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
# An induction head appears abruptly while a network trains. After [Reddy (2024)](https://arxiv.org/abs/2312.03002) we watch it happen in a network of two attention layers, small
# enough for a laptop, over several seeds at once, and then interfere.
#
# ## Sequences that know their relations
#
# Items and their labels stand in alternation; at the end stands an item whose label is to be predicted. Here four of five sequences use classes that exist nowhere else, so that only the context
# can tell.

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
# Each seed's network has its own set of classes and labels (its *world*), weights and sequences, and ends as if it had been trained alone. Progress measures are read by hooks on the two attention patterns, on sequences of novel classes.

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
# For a long time the network only guesses among the four labels that it sees: it has gone from 1/16 to 1/4. Then it learns in context at once, and swapping all labels does
# not disturb it. The step where that happens, over seeds:

# %%
print(measured(TRANSITION(table)))

# %% [markdown]
# Aligned at that step, two measures rise with the accuracy (*ILA1*, attention to the previous token in layer 1; *TILA2*, attention of the *target*, the last item, to its label in layer 2),
# and two before it (*TLA2*, attention of the target to labels at large; *CLA*, the probability of the labels in the context).

# %%
draw_measures()(table)

# %% [markdown]
# ## Attention through the transition
#
# Move the slider: layer 1 above, what the target attends to in layer 2 below, on one sequence.

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
# ## Interfering
#
# Does attention to the previous token bring the rest about? At the labels, which must fetch the item before them, we clamp it from the first step on. The transition then comes
# far sooner. (If it is clamped at the items too, the transition comes sooner in some seeds only.)

# %%
_, overridden = train(1000, override=lambda net: attend_to_previous(net, "labels"))
print("free      ", measured(TRANSITION(table)))
print("overridden", measured(TRANSITION(overridden)))
