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
# # Find the heads
#
# You will find the heads that align an output with its input and those that look it up in the examples, and learn to read the evidence of `ac.localize` that a model needs them.
# The first model is a circuit whose heads we set by hand, so that every answer can be checked; the second was trained.
#
# ## A circuit that is known

# %%
import align_circuits as ac

task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=8)
circuit = ac.planted_circuit(task, seed=0)
found = ac.localize(circuit, task, n=32, seed=0)
print(found.summary)

# %% [markdown]
# That is the summary. The true roles are known: every head is named for its role, and no decoy (a head that attends like one of them and writes nothing) is named.

# %%
for role in ("align_query", "align_key", "lookup", "previous"):
    true = [head for head, of in circuit.roles.items() if of == role]
    print(f"{role:12} named {sorted(found.heads(role))}   true {true}")

# %% [markdown]
# One decoy attends to the right symbol as an aligner does. Its score is perfect, and its p-value is as small as an aligner's. What tells them apart is the effect of ablating and of
# patching them (`ablation`, `denoising`), in nats of the log-probability of the right letters.

# %%
decoy = next(head for head, kind in circuit.kinds.items() if kind == "gold_without_output")
evidence = found.table.where(role="align_query").frame
for head in (found.heads("align_query")[0], decoy):
    mine = evidence[(evidence["layer"] == head[0]) & (evidence["head"] == head[1])].set_index("metric")["value"]
    print(
        f"L{head[0]}H{head[1]} {circuit.kinds[head]:20}",
        mine[["score", "p", "ablation", "denoising"]].round(3).to_dict(),
    )

# %% [markdown]
# The named heads are ablated together, to their mean output at tokens of the same kind. Compare the yellow cross with the dots: each is a control set of as many other heads.

# %%
ac.plots.ablation(found.evidence.set_ablations, "First and later tokens with heads ablated")

# %% [markdown]
# Nearly every control set leaves the accuracy at 1, and the named heads lower it to .3. One set of heads of similar scores lowers it more, so the verdict above is "not shown to
# be necessary": the circuit also needs a head that has no role.
#
# What does a named head attend to? A row is the token that attends; look for one bright cell a row, on the symbol that comes next. `...` is all earlier lines.

# %%
ac.plots.attention(circuit, found.prompts[0], heads=[*found.heads("align_query"), *found.heads("lookup")[:1]])

# %% [markdown]
# The aligner (left) attends to one symbol after the other, from the letter before its phrase. The lookup head (right) attends to the earlier lines, where the translations are.
#
# `ac.report.save_localization(found, "runs/first")` writes all of this, with a report that opens in any browser.
#
# ## A model that was trained
#
# The bundled Llama looks up in pre-aligned prompts, where the symbol stands before its phrase. There a lookup head *is* an induction head: what followed the symbol last time is the
# phrase. So half of them have both names. To save time this call draws at most eight control sets, not twenty: no p-value of a verdict is below 1/9 then, and none can say "necessary".

# %%
llama = ac.load("toy-llama")
trained = ac.localize(llama, ac.Seq2SeqTask(style="pre-aligned", n_examples=8), n=32, seed=0, n_controls=8)
print(trained.summary)

# %% [markdown]
# Compare the cross with the dot:

# %%
ac.plots.ablation(trained.evidence.set_ablations, "toy-llama, pre-aligned prompts")

# %% [markdown]
# Ablating as many other heads can cost as much: 15 heads are too large a part of 35 for any set to stand out. So read the roles one by one (gray marks).
#
# One lookup head alone matters little, since others do the same work: the effects of single heads do not add up to the effect of the set. Read both.

# %%
ablated = trained.evidence.ablation_effects.where(kind="all", metric="log_prob").frame
ablated[["layer", "head", "value", "low", "high"]].sort_values("value").head(5)

# %% [markdown]
# ## By hand
#
# `localize` is made of functions that you can call yourself: `score_heads`, `patch_heads`, `ablate_heads`, and edits that are plain TransformerLens hooks. Here the named heads are
# patched from prompts with one order of symbols into prompts with another. Violet heads bring the first letter back; gray ones were not patched.

# %%
prompts = task.sample(16, circuit.tokenizer, seed=5)
corrupted = task.corrupt(prompts, "query", seed=5)
effects = ac.patch_heads(circuit, ac.Pair(prompts, corrupted), heads=found.named_heads)
ac.plots.head_map(effects.where(kind="first", metric="log_prob"), "log_prob", "Denoising: first tokens", unit="nats")

# %% [markdown]
# The aligner and both lookup heads bring first letters back. The other two do not: the previous-token head writes the same for both prompts, and the other aligner, of keys, serves
# later letters. Without the aligner of queries first letters are lost and later ones are not:

# %%
aligner = found.heads("align_query")
zero = ac.Ablate(aligner, how="zero")
with circuit.hooks(fwd_hooks=zero.fwd_hooks(circuit)):
    without = ac.evaluate(circuit, prompts).where(predictor="model", metric="accuracy", kind=["first", "later"])
without

# %% [markdown]
# A clamp goes the other way: it makes a head attend to the right keys. In a circuit whose heads are too weak to find the symbol, it shows how much of the failure is one of
# attention alone: most of it.

# %%
weak = ac.planted_circuit(task, seed=0, strength=0.35)
clamps = [ac.Clamp(found.heads(role), role) for role in ("align_query", "align_key", "lookup")]
for name, edits in {"as it is": [], "clamped onto gold": clamps}.items():
    first = ac.evaluate(weak, prompts, edits=edits).where(predictor="model", metric="accuracy", kind="first").frame
    print(f"{name:18} first token right: {first['value'].iloc[0]:.2f}")
