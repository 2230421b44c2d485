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
# # Prompts that know their alignment
#
# You will make prompts whose alignment (which output translates which input) is known, and learn what an accuracy and a score of attention mean on them. You will also see
# why a score alone does not show that a model uses a head: in a circuit whose weights are set by hand, a head with a perfect score does nothing.
#
# The page takes a minute on a laptop and needs no weights.

# %%
import align_circuits as ac

task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)

# %% [markdown]
# ## The task
#
# An input is five symbols. Each symbol has an automaton of its own that writes phrases of two letters; the output is one phrase for each symbol. Symbols and automata are
# new in every prompt, so nothing can be known by heart: a model must read the automata from the 15 examples, and must find out *which symbol a phrase translates*. Follow one
# colour from the last line up:

# %%
model = ac.planted_circuit(task, seed=0)
prompts = task.sample(64, model.tokenizer, seed=0)
prompts[0]

# %% [markdown]
# The last line is the test example. A phrase to predict (framed), the symbol that it translates (framed), and the letters of earlier examples where that symbol was
# translated share a number and a colour. All of it is data. The tokens to predict (*targets*):

# %%
prompts.targets.head()

# %% [markdown]
# And where a head should attend (*relations*):

# %%
align = prompts.relations["align_query"]
print(align)
print(
    "the position that predicts the first letter:",
    int(align.query[0]),
    "- its aligned symbol stands at",
    align.keys_of(0),
)

# %% [markdown]
# Two relations are about alignment, and they are different jobs. `align_query` has its query at the position that is *about to write* a phrase; `align_key` has it at the phrase's first letter
# itself, which later positions can then find by the symbol. `lookup` asks which earlier letters translate the same symbol.
#
# ## What does an accuracy mean?
#
# A prediction is right if the true automaton accepts it, so a lucky guess is not rare. Compare the model with four references, which are computed from the automata and the prompt:
#
# - `chance`: a uniformly guessed letter;
# - `memoryless`: an ideal predictor that never sees the test input, but knows all five automata and the phrase so far;
# - `history`: the same, which also knows the alignment, the grammar and the whole output so far. **Alignment is shown only above this one**;
# - `oracle`: knows the alignment and looks the phrase up in the examples.

# %%
accuracy = ac.evaluate(model, prompts)
ac.plots.accuracy(accuracy)

# %% [markdown]
# The planted circuit reaches the oracle: it aligns and looks up.
#
# ## Which heads do it?
#
# Two heads have a perfect score, the next best one of chance (1/5):

# %%
scores = ac.score_heads(model, prompts)
scores.top("align_query", 5)

# %% [markdown]
# All heads at a glance; yellow cells are heads that nearly always attend most to the symbol that is translated next.

# %%
ac.plots.head_map(scores, "align_query", "Attention from the generating position to the aligned symbol (hit rate)")

# %% [markdown]
# The two stand in layers 1 and 3. Which heads give their attention to earlier letters of the same symbol?

# %%
ac.plots.head_map(scores, "lookup", "Attention to earlier letters of the same symbol (mass)")

# %% [markdown]
# Two heads of the last layer, above the aligners, since what to look up must be known first. (Gray: a head that gives letters no attention.)
#
# The circuit knows its true roles, since it was built by hand, with *decoys* beside it, such as a head that attends as required and writes nothing. Of the two heads with a perfect score one
# is an aligner and the other is a decoy. **A score is not a cause**: it says where a head attends, not whether the model uses it.

# %%
best = scores.top("align_query", 5).frame
best.assign(role=[model.roles[layer, head] for layer, head in zip(best["layer"], best["head"], strict=True)])

# %% [markdown]
# ## Is it alignment, or a fixed offset?
#
# With a monotonic alignment the distance of the aligned symbol follows from the number of the phrase alone. The control is a task whose alignment is a permutation. Follow a colour
# again: the first phrase no longer translates the first symbol.

# %%
permuted = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15, alignment="permutation", task_seed=3)
print("phrase p translates the symbol at position", permuted.aligned)
permuted.sample(1, model.tokenizer, seed=0)

# %% [markdown]
# ## Minimal pairs
#
# Causal questions need two prompts that differ in one respect. `corrupt` makes them: another test input (`"query"`), examples from other automata (`"labels"`), or examples that
# contradict the alignment (`"alignment"`). Lengths, targets and relations stay those of the clean prompts. With another test input the old answer is mostly wrong:

# %%
corrupted = task.corrupt(prompts, "query", seed=1)
print(prompts.text[0].splitlines()[-1], "->", corrupted.text[0].splitlines()[-1])
accuracies = {
    name: ac.evaluate(model, some).where(predictor="model", metric="accuracy", kind="first").frame["value"].item()
    for name, some in {"clean": prompts, "query corrupted": corrupted}.items()
}
accuracies

# %% [markdown]
# The [next tutorial](find_the_heads.ipynb) tests which heads a model needs. Two pages are about [your own prompts](../docs/your-own-data.md) and [your own model](../docs/your-own-model.md), and [paper or code](../docs/paper-or-code.md) lists
# every choice behind the task.
