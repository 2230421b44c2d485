"""What patching heads costs with other libraries: `patch_heads` beside nnsight, pyvene and TransformerLens.

A random Llama of 8 layers with 8 heads (4 key heads), a prompt of 448 tokens, float32 on the CPU. Everyone patches z of
the same heads, at the last 28 tokens, from the clean prompt into the corrupted one, and measures the mean
log-probability of the gold tokens; everyone makes their own clean activations, once. The peers run on the same Hugging
Face weights, one patched run at a time under SDPA, as their tutorials do it, and only for a sample of the heads: every
run of theirs costs the same, so the time of that part is scaled up to all 64. Contestants take turns, processor time of
one thread is counted, and the ratio is the median over rounds of the ratio within a round.

    python benchmarks/peers.py [--rounds 5] [--width 256] [--sample 4] [--out FOLDER]

It needs `pip install nnsight pyvene` beside this package; a package that is missing is left out, with a note.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import pandas as pd
import torch
from patching import EDITED, HEADS, TASK, network, processor, timed
from transformer_lens import patching

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tables.tables import Provenance, Table

LAYERS = 8
Patched = Callable[[int, int], float]
"""(layer, head) -> the metric of the patched run."""


class Setting:
    """The model, the pair of prompts, and what everyone measures."""

    def __init__(self, width: int):
        """Draws them."""
        self.hf, self.width = network(LAYERS, width), width
        self.bridge = ac.load(network(LAYERS, width), tokenizer=char_tokenizer())
        self.clean = TASK.sample(1, char_tokenizer(), references=False)
        self.corrupted = TASK.corrupt(self.clean, "query")
        self.query, self.gold = self.clean.column("query_pos"), self.clean.column("token")
        self.first = self.clean.mask.shape[1] - EDITED
        self.d_head = width // HEADS

    def metric(self, logits: torch.Tensor) -> float:
        """Returns the mean log-probability of the gold tokens from logits [1 pos d_vocab]."""
        return float(logits[0, self.query].log_softmax(-1).gather(1, self.gold[:, None]).mean())

    def columns(self, head: int) -> slice:
        """Returns where a head stands in z with its heads side by side."""
        return slice(head * self.d_head, (head + 1) * self.d_head)


def with_nnsight(setting: Setting) -> tuple[float, Patched]:
    """Returns the metric before, and what patches a head."""
    from nnsight import NNsight

    model = NNsight(setting.hf)
    values, before = _nnsight_values(model, setting)

    def patched(layer: int, head: int) -> float:
        where, first, value = setting.columns(head), setting.first, values[layer]
        with model.trace(setting.corrupted.tokens):
            model.model.layers[layer].self_attn.o_proj.input[:, first:, where] = value[:, first:, where]
            logits = model.output.logits.save()
        return setting.metric(logits)

    return before, patched


def _nnsight_values(model: Any, setting: Setting) -> tuple[list[torch.Tensor], float]:
    """Traces assign to plain local names only, so this is a function of its own."""
    with model.trace(setting.clean.tokens):
        values = list().save()  # noqa: C408 - nnsight gives objects, not literals, a method
        for layer in model.model.layers:
            values.append(layer.self_attn.o_proj.input.clone())
    with model.trace(setting.corrupted.tokens):
        before = model.output.logits.save()
    return values, setting.metric(before)


def with_pyvene(setting: Setting) -> tuple[float, Patched]:
    """Returns the metric before, and what patches a head."""
    import pyvene

    length = setting.clean.mask.shape[1]
    places = [[list(range(setting.first, length))]]
    clean, corrupted = {"input_ids": setting.clean.tokens}, {"input_ids": setting.corrupted.tokens}

    def patched(layer: int, head: int) -> float:
        where = {"layer": layer, "component": "attention_value_output", "unit": "pos", "max_number_of_units": EDITED}
        config = pyvene.IntervenableConfig([where], intervention_types=pyvene.VanillaIntervention)
        model = pyvene.IntervenableModel(config, model=setting.hf)
        columns = list(range(setting.width))[setting.columns(head)]
        _, output = model(corrupted, [clean], {"sources->base": (places, places)}, subspaces=[[columns]])
        return setting.metric(output.logits)

    return setting.metric(setting.hf(**corrupted).logits), patched


def with_transformer_lens(setting: Setting) -> tuple[float, Patched]:
    """Returns the metric before, and what patches a head."""
    model = setting.bridge
    _, cache = model.run_with_cache(setting.clean.tokens, names_filter=lambda name: name.endswith("hook_z"))
    options: Any = {"index_axis_names": None}

    def patched(layer: int, head: int) -> float:
        index = pd.DataFrame([(layer, head)], columns=["layer", "head"])
        run = patching.get_act_patch_attn_head_out_all_pos
        return float(run(model, setting.corrupted.tokens, cache, setting.metric, index_df=index, **options))

    return setting.metric(model(setting.corrupted.tokens)), patched


PEERS = {"transformer-lens": with_transformer_lens, "nnsight": with_nnsight, "pyvene": with_pyvene}


def compare(width: int, sample: int, rounds: int, out: str | None) -> None:
    """Prints what each contestant costs, and how far their results lie apart."""
    setting, every = Setting(width), [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    some = every[:: len(every) // sample]
    masks = {"edited": (torch.arange(setting.clean.mask.shape[1]) >= setting.first).expand_as(setting.clean.mask)}
    versions = {}
    for name in PEERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            print(f"{name} is not installed, and left out")
    times: dict[str, list[float]] = {name: [] for name in ["align_circuits", *versions]}
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(rounds):
            pair = ac.Pair(setting.clean, setting.corrupted)
            seconds, table = timed(lambda pair=pair: ac.patch_heads(setting.bridge, pair, positions=masks))
            frame = table.where(kind="all", metric="log_prob").frame.set_index(["layer", "head"])["value"]
            results["align_circuits"] = torch.tensor(frame.loc[some].to_numpy())
            times["align_circuits"].append(seconds)
            for name in versions:
                once, (before, patched) = timed(lambda name=name: PEERS[name](setting))
                seconds, values = timed(lambda patched=patched: [patched(*head) for head in some])
                results[name] = torch.tensor(values).double() - before
                times[name].append(once + seconds * len(every) / len(some))
    rows = []
    for name, seconds in times.items():
        ratios = [theirs / own for theirs, own in zip(seconds, times["align_circuits"], strict=True)]
        apart = float((results[name] - results["align_circuits"]).abs().max())
        measures = {"seconds": seconds, "times our time": ratios, "furthest from ours, nats": [apart]}
        rows += [(name, measure, median(v), min(v), max(v), len(v)) for measure, v in measures.items()]
    for row in rows:
        print("{:20s} {:26s} {:10.3g} [{:.3g}, {:.3g}], {} rounds".format(*row))
    if out:
        settings = {"width": width, "sample": sample, "processor": processor(), "threads": 1, "peers": versions}
        columns = ["contestant", "measure", "value", "low", "high", "n"]
        Table(pd.DataFrame(rows, columns=columns), Provenance("benchmark", settings)).save(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sample", type=int, default=4)
    parser.add_argument("--out", help="a folder for the table; low and high are the least and the most of the rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compare(arguments.width, arguments.sample, arguments.rounds, arguments.out)
