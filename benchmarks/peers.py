"""What patching heads costs with other libraries: `patch_heads` beside nnsight, pyvene, interpkit and TransformerLens.

A random Llama of 8 layers with 8 heads (4 key heads), a prompt of 448 tokens, float32 on the CPU; with `--model
smollm2` SmolLM2 and a prompt of 272. Everyone patches z of the same heads from the clean prompt into the corrupted one,
at all tokens from the first at which these differ, and measures the mean log-probability of the gold tokens; everyone
makes their own clean activations. Two settings: the query corrupted, so that the last 28 (16) tokens are patched, and
the labels corrupted, so that almost all are. The peers run on the same Hugging Face weights, one patched run at a time
under SDPA, as their tutorials do it, and only for a sample of the heads: every run of theirs costs the same, so the
time of that part is scaled up to all heads. interpkit's `patch` runs both prompts anew for every head. Beside the
libraries a loop written by hand, which keeps keys and values of the tokens before the first difference and runs the
others alone, with a hook before the output matrix. Contestants take turns, processor time of one thread is counted, and
the ratio is the median over rounds of the ratio within a round.

    python benchmarks/peers.py [--rounds 5] [--width 256] [--sample 4] [--model smollm2] [--out FOLDER]

It needs `pip install nnsight pyvene interpkit` beside this package; a package that is missing is left out, with a note.
interpkit wants rich-gradient, and the others what they name; none of them may replace torch or transformers.
"""

from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from typing import Any

import pandas as pd
import torch
from contest import Row, command_line, keep, random_llama, ratios, rows_of, timed
from patching import REAL_TASK, TASK, random_model
from transformer_lens import patching
from transformers import AutoModelForCausalLM, DynamicCache

import align_circuits as ac
from align_circuits.models.smollm2 import converted_smollm2

LAYERS = 8
Patched = Callable[[int, int], float]
"""(layer, head) -> the metric of the patched run."""


class Setting:
    """The model, the pair of prompts, and what everyone measures."""

    def __init__(self, hf: Any, bridge: Any, task: ac.Seq2SeqTask, kind: str):
        """Draws the prompts.

        Args:
            hf: The network as Hugging Face has it.
            bridge: The same weights as TransformerLens has them.
            task: Of the prompts.
            kind: What is corrupted.
        """
        self.hf, self.bridge = hf, bridge
        self.clean = task.sample(1, bridge.tokenizer, references=False)
        self.corrupted = task.corrupt(self.clean, kind)
        self.length = self.clean.mask.shape[1]
        self.query, self.gold = self.clean.column("query_pos"), self.clean.column("token")
        self.first = int((self.clean.tokens != self.corrupted.tokens)[0].nonzero()[0, 0])
        self.d_head = bridge.cfg.d_head
        self.heads = [(layer, head) for layer in range(bridge.cfg.n_layers) for head in range(bridge.cfg.n_heads)]
        patched = f"the last {self.length - self.first} of {self.length} tokens"
        self.name = f"{kind} corrupted, {patched} patched"

    def metric(self, logits: torch.Tensor, start: int = 0) -> float:
        """Returns the mean log-probability of the gold tokens from logits [1 pos d_vocab] from a token on."""
        return float(logits[0, self.query - start].log_softmax(-1).gather(1, self.gold[:, None]).mean())

    def columns(self, head: int) -> slice:
        """Returns where a head stands in z with its heads side by side."""
        return slice(head * self.d_head, (head + 1) * self.d_head)


def with_prefix_cache(setting: Setting) -> tuple[float, Patched]:
    """Returns the metric before, and what patches a head, by plain hooks on the tokens that differ alone."""
    layers, first = setting.hf.model.layers, setting.first
    values: list[torch.Tensor] = []
    keep = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: values.append(given[0][:, first:].clone()))
        for layer in layers
    ]
    setting.hf(setting.clean.tokens, logits_to_keep=1)
    for handle in keep:
        handle.remove()
    cache = DynamicCache(config=setting.hf.config)
    setting.hf(setting.clean.tokens[:, :first], past_key_values=cache, logits_to_keep=1)
    rest = setting.corrupted.tokens[:, first:]

    def run() -> float:
        metric = setting.metric(setting.hf(rest, past_key_values=cache).logits, first)
        cache.crop(first - setting.length)  # the tokens that were run
        return metric

    def patched(layer: int, head: int) -> float:
        def replace(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            z, where = given[0].clone(), setting.columns(head)
            z[..., where] = values[layer][..., where]
            return (z,)

        with_hook = layers[layer].self_attn.o_proj.register_forward_pre_hook(replace)
        metric = run()
        with_hook.remove()
        return metric

    return run(), patched


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

    places = [[list(range(setting.first, setting.length))]]
    clean, corrupted = {"input_ids": setting.clean.tokens}, {"input_ids": setting.corrupted.tokens}

    def patched(layer: int, head: int) -> float:
        where = {"layer": layer, "component": "attention_value_output", "unit": "pos"}
        where["max_number_of_units"] = setting.length - setting.first
        config = pyvene.IntervenableConfig([where], intervention_types=pyvene.VanillaIntervention)
        model = pyvene.IntervenableModel(config, model=setting.hf)
        columns = list(range(setting.bridge.cfg.n_heads * setting.d_head))[setting.columns(head)]
        _, output = model(corrupted, [clean], {"sources->base": (places, places)}, subspaces=[[columns]])
        return setting.metric(output.logits)

    return setting.metric(setting.hf(**corrupted).logits), patched


def with_interpkit(setting: Setting) -> tuple[float, Patched]:
    """Returns the metric before, and what patches a head; its own effect needs other logits, so ours is measured."""
    import interpkit

    model = interpkit.load(setting.hf, tokenizer=setting.bridge.tokenizer, device="cpu")
    positions = list(range(setting.first, setting.length))

    def patched(layer: int, head: int) -> float:
        at = f"model.layers.{layer}.self_attn"
        with redirect_stdout(StringIO()):
            found = model.patch(
                setting.clean.tokens, setting.corrupted.tokens, at=at, head=head, positions=positions, metric="kl_div"
            )
        return setting.metric(found["patched_logits"])

    return setting.metric(setting.hf(setting.corrupted.tokens).logits), patched


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


BY_HAND = "a loop with a prefix cache"

PEERS = {
    BY_HAND: with_prefix_cache,
    "transformer-lens": with_transformer_lens,
    "nnsight": with_nnsight,
    "pyvene": with_pyvene,
    "interpkit": with_interpkit,
}


def compare(setting: Setting, peers: list[str], sample: int, rounds: int) -> list[Row]:
    """Prints what each contestant costs and how far their results lie apart, and returns it."""
    every = setting.heads
    some = every[:: len(every) // sample][:sample]
    masks = {"edited": (torch.arange(setting.length) >= setting.first).expand_as(setting.clean.mask)}
    pair = ac.Pair(setting.clean, setting.corrupted)
    times: dict[str, list[float]] = {name: [] for name in ["align_circuits", *peers]}
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(rounds):
            seconds, table = timed(lambda: ac.patch_heads(setting.bridge, pair, positions=masks))
            frame = table.where(kind="all", metric="log_prob").frame.set_index(["layer", "head"])["value"]
            results["align_circuits"] = torch.tensor(frame.loc[some].to_numpy())
            times["align_circuits"].append(seconds)
            for name in peers:
                once, (before, patched) = timed(lambda name=name: PEERS[name](setting))
                seconds, values = timed(lambda patched=patched: [patched(*head) for head in some])
                results[name] = torch.tensor(values).double() - before
                times[name].append(once + seconds * len(every) / len(some))
    ours, own = results["align_circuits"], times["align_circuits"]
    measured: dict[tuple[str, str], list[float]] = {}
    for name, seconds in times.items():
        measured[name, "seconds"] = seconds
        measured[name, "times our time"] = ratios(seconds, own)
        measured[name, "furthest from ours, nats"] = [float((results[name] - ours).abs().max())]
    return rows_of(setting.name, measured)


def networks(model: str | None, width: int) -> tuple[Any, Any, ac.Seq2SeqTask]:
    """Returns the weights as Hugging Face and as TransformerLens have them, and the task of the prompts."""
    if model is None:
        return random_llama(LAYERS, width), random_model(LAYERS, width), TASK
    hf = AutoModelForCausalLM.from_pretrained(converted_smollm2(), dtype=torch.float32).eval()
    return hf, ac.load(model), REAL_TASK


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5, out=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sample", type=int, default=4)
    parser.add_argument("--model", choices=["smollm2"], help="in place of the random Llama")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {}
    for name in PEERS:
        try:
            versions |= {} if name == BY_HAND else {name: version(name)}
        except PackageNotFoundError:
            print(f"{name} is not installed, and left out")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    drawn = networks(arguments.model, arguments.width)
    found: list[Row] = []
    for kind in ("query", "labels"):
        found += compare(Setting(*drawn, kind), [BY_HAND, *versions], arguments.sample, arguments.rounds)
    keep(found, arguments, peers=versions, **({"width": "the model's"} if arguments.model else {}))
