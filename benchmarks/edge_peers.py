"""What attributing all edges costs with other code: `attribute_edges` beside circuitkit and the authors' release.

A random Llama of 8 layers with 8 heads (4 key heads), one prompt of 448 tokens, float32 on the CPU. Everyone scores all
edges by EAP and by EAP-IG of inputs (5 steps) with the mean log-probability of the gold tokens; the peers on the same
weights as a `HookedTransformer` of TransformerLens 3. They have an edge into each query head's keys and values, where
`attribute_edges` has one into each key head. For EAP-IG the released code takes gradients at the shares 0 to 4/5 of the
way, the paper and the others at 1/5 to 1, so that its scores differ. Contestants take turns, processor time of one
thread is counted, and the ratio is the median over rounds of the ratio within a round.

    python benchmarks/edge_peers.py [--rounds 3] [--width 256] [--out FOLDER]

It needs an environment of its own, with `transformer-lens==3.8.0` and `circuitkit` (which wants that version), and with
`src/eap` of https://github.com/hannamw/EAP-IG as the package `eap`, its 'cuda' replaced by 'cpu'. A package that is
missing is left out, with a note.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

with suppress(ImportError):
    import_module("circuitkit")  # changes TransformerLens, and must come before it

import torch
from contest import Row, command_line, in_turn, keep, random_llama, ratios, rows_of, timed
from patching import HEADS, TASK, random_model

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer

LAYERS, STEPS = 8, 5
METHODS = {"eap": "EAP", "eap_ig_inputs": "EAP-IG-inputs"}
"""Ours, and what the peers call them."""

PEERS = {"circuitkit": "circuitkit.backends.eap", "released EAP-IG": "eap"}
"""The packages that hold `attribute` and `graph`; circuitkit's grew out of the authors'."""

RELEASED = "commit 795f560"
"""Of the authors' repository."""


def hooked(hf: Any) -> Any:
    """Returns a random Llama as TransformerLens 3 has it, with the hook points that the peers need."""
    tl: Any = import_module("transformer_lens")
    convert = import_module("transformer_lens.pretrained.weight_conversions.llama").convert_llama_weights
    config = hf.config
    cfg = tl.HookedTransformerConfig(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_ctx=config.max_position_embeddings,
        d_head=config.hidden_size // config.num_attention_heads,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
        act_fn="silu",
        normalization_type="RMS",
        final_rms=True,
        gated_mlp=True,
        eps=config.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_dim=config.hidden_size // config.num_attention_heads,
        rotary_adjacent_pairs=False,
        rotary_base=int(config.rope_parameters["rope_theta"]),
        original_architecture="LlamaForCausalLM",
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        ungroup_grouped_query_attention=True,
    )
    model = tl.HookedTransformer(cfg)
    model.load_state_dict({name: weight.clone() for name, weight in convert(hf, cfg).items()}, strict=False)
    model.set_tokenizer(char_tokenizer())
    return model.eval()


def compare(width: int, rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Prints what each contestant costs and how far their scores lie apart; returns that and the versions."""
    bridge, model = random_model(LAYERS, width), hooked(random_llama(LAYERS, width))
    clean = TASK.sample(1, char_tokenizer(), references=False)
    corrupted = TASK.corrupt(clean, "query")
    pair = ac.Pair(clean, corrupted, direction="noise")
    query, gold = clean.column("query_pos"), clean.column("token")
    tokenizer: Any = char_tokenizer()
    texts = [tokenizer.decode(prompts.tokens[0, 1:]) for prompts in (clean, corrupted)]
    assert torch.equal(model.to_tokens(texts[0], prepend_bos=True), clean.tokens), "the peers read other tokens"

    def metric(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return logits[0, query].log_softmax(-1).gather(1, gold[:, None]).mean()

    def theirs(package: str, method: str) -> Callable[[], dict[tuple[str, str], float]]:
        attribute, graph_of = (import_module(f"{package}.{name}") for name in ("attribute", "graph"))

        def run() -> dict[tuple[str, str], float]:
            graph = graph_of.Graph.from_model(model)
            data = [([texts[0]], [texts[1]], torch.zeros(1))]
            attribute.attribute(model, graph, data, metric, METHODS[method], ig_steps=STEPS, quiet=True)
            return {(edge.parent.name, name.split("->")[1]): float(edge.score) for name, edge in graph.edges.items()}

        return run

    versions = {"transformer-lens": version("transformer-lens")}
    found: list[Row] = []
    names: list[str] = []
    for name, package in PEERS.items():
        try:
            import_module(f"{package}.attribute")
            versions[name] = version(name) if name in package else RELEASED
            names.append(name)
        except (ImportError, PackageNotFoundError) as error:
            print(f"{name} is left out: {error}")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    for method in METHODS:
        runs: dict[str, Callable[[], Any]] = {name: theirs(PEERS[name], method) for name in names}
        runs["align_circuits"] = lambda method=method: ac.attribute_edges(bridge, pair, method=method, steps=STEPS)
        turns = in_turn(runs, rounds, timed)
        times = {name: [seconds for seconds, _ in turn] for name, turn in turns.items()}
        scores = {name: turn[-1][1] for name, turn in turns.items()}
        ours = scores["align_circuits"].frame.set_index(["sender", "receiver"])["value"]
        measured: dict[tuple[str, str], list[float]] = {}
        for name, seconds in times.items():
            measured[name, "seconds"] = seconds
            measured[name, "times our time"] = ratios(seconds, times["align_circuits"])
            if name != "align_circuits":
                measured[name, "furthest from ours, of the largest"] = [_apart(scores[name], ours)]
        found += rows_of(method, measured)
    return found, versions


def _apart(theirs: dict[tuple[str, str], float], ours: Any) -> float:
    """The largest difference of scores of edges into queries, MLPs and logits, as a share of the largest score."""

    def renamed(name: str) -> str:
        if name.startswith("a"):  # a2.h3<q> is our L2H3.q, and a2.h3 our L2H3
            layer, head = name.removeprefix("a").removesuffix("<q>").split(".h")
            return f"L{layer}H{head}" + ".q" * name.endswith("<q>")
        return name.upper() if name.startswith("m") else name

    edges = {edge: score for edge, score in theirs.items() if not edge[1].endswith(("<k>", "<v>"))}
    same = [(score, ours[renamed(edge[0]), renamed(edge[1])]) for edge, score in edges.items()]
    return max(abs(score - own) for score, own in same) / max(abs(own) for _, own in same)


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=3, out=True)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, packages = compare(arguments.width, arguments.rounds)
    keep(lines, arguments, steps=STEPS, heads=HEADS, peers=packages)
