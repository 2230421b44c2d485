"""Calls of the public functions with one argument replaced by a wrong or an odd one, and how each of them ends.

Half of the values are of the right type: empty, huge, negative, NaN, reversed, of another length, model or tokenizer.

python tests/wrong_inputs.py --n 3000 --seed 0
"""

import argparse
import dis
import inspect
import json
import math
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer

PACKAGE = Path(ac.__file__).parent.resolve()
HOOKS = (PACKAGE / "hooks").resolve()
TIME_LIMIT_S = 10
FOREVER = "(([a-z_.0-9]+)+)+!"
"""Matched as a regular expression, it takes longer than the universe is old."""
SHORT: Any = {"steps": 1, "batch": 1, "probe_prompts": 2, "layers": 1}


@dataclass(frozen=True)
class Outcome:
    """How one call ended."""

    call: str
    argument: str
    value: str
    kind: str
    """`"accepted"`, `"refused"` (by a message of the public function, or one that names the argument or what it holds),
    `"depths"` (any other exception) or `"hang"`."""
    message: str = ""


class World:
    """A small model with shared key heads, in memory and in a folder, prompts, and a valid call of every function."""

    def __init__(self, place: Path) -> None:
        tokenizer = char_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
            )
            self.network = LlamaForCausalLM(config)
            self.model = ac.load(LlamaForCausalLM(config), tokenizer=tokenizer)
            self.tuned = ac.load(LlamaForCausalLM(config), tokenizer=tokenizer)
            small = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16)
            self.other = ac.load(GPT2LMHeadModel(small), tokenizer=tokenizer)
            narrow = LlamaForCausalLM(config)
            narrow.model.layers[1].half()
            self.odd_models = [
                self.other,
                ac.load(LlamaForCausalLM(config).double(), tokenizer=tokenizer),
                ac.load(LlamaForCausalLM(config).bfloat16(), tokenizer=tokenizer),
                ac.load(LlamaForCausalLM(config)),
                *made(
                    partial(ac.load, tokenizer=tokenizer), narrow, torch.nn.Module.to(LlamaForCausalLM(config), "meta")
                ),
            ]
        self.tokenizer = tokenizer
        words = WordLevel({letter: place for place, letter in enumerate("[]:abcd")}, unk_token="[")
        self.foreign_tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="]")
        self.foreign_tokenizer.backend_tokenizer.pre_tokenizer = Split("", "isolated")
        self.own = ac.Prompts.from_texts(["ab:", "cd:"], tokenizer, answer=["a", "c"], positions={"first": 1})
        self.task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)
        self.clean = self.task.sample(3, tokenizer, seed=0)
        self.pair = ac.Pair(*self.task.pairs(self.clean, 0))
        self.noise = ac.Pair(self.pair.clean, self.pair.corrupted, direction="noise")
        self.table = ac.score_heads(self.model, self.clean, ["lookup"])
        self.edges = ac.attribute_edges(self.model, self.noise, method="eap")
        self.log = pd.DataFrame({"step": [0, 1, 2], "value": [0.1, 0.5, 0.9]})
        self.folder, self.adapter = place / "model", place / "adapter"
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            self.network.save_pretrained(self.folder)
            lora = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
            get_peft_model(LlamaForCausalLM(config), lora).save_pretrained(str(self.adapter))
        self.settings = {
            folder: json.loads((folder / name).read_text()) | changes
            for folder, name, changes in (
                (self.folder, "config.json", {}),
                (self.adapter, "adapter_config.json", {"base_model_name_or_path": str(self.folder)}),
            )
        }

    def load(self, folder: Path, **settings: Any) -> Any:
        """Loads a model or an adapter after its configuration was changed."""
        for place, written in self.settings.items():
            name = "config.json" if place == self.folder else "adapter_config.json"
            given = {name: value for name, value in settings.items() if name in written or value is not None}
            changed = written | given if place == folder else written
            (place / name).write_text(json.dumps(changed, default=str))
        return ac.load(folder)

    def varied(self, folder: Path, *names: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The call that loads a folder, and those of its settings that are varied."""
        return partial(self.load, folder), {name: self.settings[folder].get(name) for name in names}

    def calls(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """A valid call by name: the function and all arguments that are varied."""
        model, clean, pair, heads = self.model, self.clean, self.pair, [(0, 0), (1, 2)]
        options = ac.RunOptions()
        texts, answers = ["ab:", "cd:"], ["a", "c"]
        return {
            "Seq2SeqTask": (ac.Seq2SeqTask, vars(ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)).copy()),
            "Seq2SeqTask.sample": (self.task.sample, {"n": 2, "tokenizer": self.tokenizer, "seed": 0}),
            "Seq2SeqTask.corrupt": (self.task.corrupt, {"prompts": clean, "kind": "query", "seed": 0}),
            "LexiconTask": (ac.LexiconTask, vars(ac.LexiconTask()).copy()),
            "RepeatedTokensTask": (ac.RepeatedTokensTask, {"length": 4}),
            "RepeatedTokensTask.sample": (ac.RepeatedTokensTask(length=4).sample, {"n": 2, "tokenizer": 20, "seed": 0}),
            "RunOptions": (ac.RunOptions, {"engine": "auto", "batch_size": 2, "progress": False}),
            "TuneConfig": (ac.TuneConfig, vars(ac.TuneConfig()).copy()),
            "Pair": (ac.Pair, {"clean": pair.clean, "corrupted": pair.corrupted, "metric": "prob", "kind": "all"}),
            "Ablate": (ac.Ablate, {"heads": heads, "how": "zero", "site": "z"}),
            "Patch": (ac.Patch, {"heads": heads, "site": "z", "positions": clean.mask}),
            "Clamp": (ac.Clamp, {"heads": heads, "relation": "lookup"}),
            "Steer": (ac.Steer, {"vector": torch.ones(16), "layers": [0]}),
            "Prompts.from_texts": (
                ac.Prompts.from_texts,
                {"texts": texts, "tokenizer": self.tokenizer, "answer": answers, "wrong": ["b", "d"], "groups": [0, 1]},
            ),
            "Prompts.from_pairs": (
                ac.Prompts.from_pairs,
                {"clean": texts, "corrupted": ["ba:", "dc:"], "tokenizer": self.tokenizer, "answer": answers},
            ),
            "Prompts.from_tokens": (ac.Prompts.from_tokens, {"ids": [[1, 2, 3], [4, 5]], "tokenizer": self.tokenizer}),
            "Relation.from_positions": (
                lambda query, **rest: ac.Relation.from_positions(query, "first", **rest),
                {"query": "END", "prompts": self.own, "candidates": ["END", "first"], "name": "own"},
            ),
            "Relation.from_pairs": (ac.Relation.from_pairs, {"pairs": [(0, 5, [2])], "prompts": clean, "name": "own"}),
            "load": (ac.load, {"source": self.network, "device": "cpu", "tokenizer": self.tokenizer}),
            "load of a folder": self.varied(
                self.folder,
                *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
                *("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "hidden_act"),
                *("model_type", "architectures", "dtype", "auto_map", "pad_token_id", "quantization_config"),
            ),
            "load of an adapter": self.varied(
                self.adapter,
                *("r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "layers_to_transform"),
                *("layers_pattern", "modules_to_save", "peft_type", "base_model_name_or_path", "auto_mapping"),
            ),
            "planted_circuit": (ac.planted_circuit, {"task": self.task, "seed": 0, "strength": 1.0}),
            "score_heads": (
                ac.score_heads,
                {"model": model, "prompts": clean, "metrics": ["lookup", "sink"], "options": options},
            ),
            "evaluate": (ac.evaluate, {"model": model, "prompts": clean, "options": options}),
            "ablate_heads": (
                ac.ablate_heads,
                {
                    "model": model,
                    "prompts": clean,
                    "how": "mean",
                    "heads": heads,
                    "metrics": ["prob"],
                    "baseline": clean,
                    "screen": 0.5,
                },
            ),
            "ablation_baseline": (
                ac.ablation_baseline,
                {"model": model, "prompts": clean, "how": "mean", "site": "z", "layers": [0]},
            ),
            "patch_heads": (
                ac.patch_heads,
                {
                    "model": model,
                    "pair": pair,
                    "sites": ["z"],
                    "heads": heads,
                    "positions": {"all": clean.mask},
                    "screen": 0.5,
                },
            ),
            "patch_sites": (ac.patch_sites, {"model": model, "pair": pair, "options": options}),
            "interchange_accuracy": (
                ac.interchange_accuracy,
                {"model": model, "pair": pair, "heads": heads, "sets": {"two": heads}},
            ),
            "localize": (ac.localize, {"model": model, "task": self.task, "n": 8, "seed": 0, "n_controls": 1}),
            "attribute_heads": (
                ac.attribute_heads,
                {"model": model, "pair": pair, "method": "atp", "sites": ["z"], "grad_drop": False, "steps": 2},
            ),
            "attribute_edges": (ac.attribute_edges, {"model": model, "pair": pair, "method": "eap", "steps": 2}),
            "patch_edges": (ac.patch_edges, {"model": model, "pair": pair, "edges": [("L0H1", "L1KV0.k")]}),
            "patch_paths": (
                ac.patch_paths,
                {"model": model, "pair": pair, "senders": ["L0H1"], "receivers": ["logits"]},
            ),
            "faithfulness": (
                ac.faithfulness,
                {"model": model, "scores": self.edges, "pair": self.noise, "fractions": [0.5], "by": "signed"},
            ),
            "direct_logit_attribution": (
                ac.direct_logit_attribution,
                {"model": model, "prompts": clean, "kind": "first"},
            ),
            "function_vectors": (ac.function_vectors, {"model": model, "pairs": [pair], "heads": heads}),
            "Table.top": (self.table.top, {"metric": "lookup", "n": 2}),
            "Table.where": (self.table.where, {"metric": "lookup", "layer": 0}),
            "Table.to_array": (self.table.to_array, {"metric": "lookup"}),
            "Table.load": (ac.Table.load, {"folder": "no such folder"}),
            "Prompts.select_targets": (self.own.select_targets, {"keep": "END"}),
            "Prompts.to_html": (clean.to_html, {"index": 0}),
            "plots.head_map": (ac.plots.head_map, {"table": self.table, "metric": "lookup"}),
            "tune": (ac.tune, {"model": self.tuned, "task": self.task, "config": ac.TuneConfig(**SHORT), "seed": 0}),
        }

    def odd_values(self, valid: Any) -> list[Any]:
        """Values of the type of a valid one, of which few make sense."""
        if isinstance(valid, bool) or valid is None:
            return [True, False]
        if isinstance(valid, int):
            return [0, -1, 1, 7, 65, 10**7, 10**12, -(2**63), 10**30]
        if isinstance(valid, float):
            return [0.0, -0.0, -1.0, 1e300, 1e-300, math.nan, math.inf, -math.inf]
        if isinstance(valid, str):
            return ["", " ", "a" * 300, "\ud800", "\x00", "\x1b[2J", valid.upper(), valid + " ", valid[:-1], "L9H9"]
        if isinstance(valid, torch.Tensor):
            parts = [
                valid[:0],
                valid[:-1],
                torch.cat([valid, valid]),
                valid[None],
                valid.flip(0),
                valid.float() * math.nan,
            ]
            return [*parts, valid.bool(), valid.double(), ~valid.bool(), valid.to("meta"), valid.long()]
        if isinstance(valid, tuple) and all(isinstance(part, int) for part in valid):
            return [valid[::-1], (0, 0), (-1, 10**9), (10**9, 10**12), valid[:1] * len(valid)]
        if isinstance(valid, list | tuple):
            return [valid[:0], valid[:1], valid[::-1], [*valid, *valid], [*valid] * 500, valid[-1:], [valid], valid[1:]]
        if isinstance(valid, dict):
            return [{}, {**valid, "": None}, dict.fromkeys(valid)]
        if isinstance(valid, ac.Prompts):
            foreign = ac.Prompts.from_texts(["ab:", "cd:"], self.foreign_tokenizer, answer=["a", "c"])
            many = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=9).sample(2, self.tokenizer, seed=1)
            ids = [ac.Prompts.from_tokens(rows) for rows in ([[1, 10**9]], [[1] * 400], [[5, 6, 5]])]
            return [valid[:0], valid[:1], self.own, foreign, many, *ids]
        if isinstance(valid, ac.Pair):
            cut = [(valid.clean[:n], valid.corrupted[:n]) for n in (0, 1)]
            return [*made(lambda parts: ac.Pair(*parts), *cut, (valid.clean, valid.clean)), self.noise]
        if isinstance(valid, ac.RunOptions):
            sizes = [ac.RunOptions(batch_size=size) for size in (1, 10**9)]
            return [*sizes, ac.RunOptions(engine="fast"), ac.RunOptions(engine="reference")]
        if isinstance(valid, ac.Task):
            tasks = [ac.LexiconTask(), ac.RepeatedTokensTask(length=4), ac.RepeatedTokensTask(length=2)]
            return [*tasks, ac.Seq2SeqTask(n_examples=10**7), ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=1)]
        if isinstance(valid, ac.Table):
            frames = [valid.frame[:0], valid.frame[::-1], pd.concat([valid.frame] * 2)]
            return [*made(lambda frame: replace(valid, frame=frame), *frames), self.edges, self.table]
        if isinstance(valid, ac.TuneConfig):
            sizes = [
                ("r", 10**12),
                ("r", 10**5),
                ("steps", 0),
                ("batch", 10**9),
                ("probe_prompts", 10**9),
                ("lr", math.nan),
            ]
            return made(lambda size: ac.TuneConfig(**SHORT | dict([size])), *sizes)
        if hasattr(valid, "all_special_ids"):
            return [self.foreign_tokenizer]
        return self.odd_models if hasattr(valid, "hook_dict") else []

    def wrong_values(self) -> list[Any]:
        """Values of wrong types, out of range, and of other models; some of them fit some arguments."""
        other = ac.RepeatedTokensTask(length=3).sample(2, 9)
        scalars = [None, True, -1, 0, 10**6, 10**9, 2.5, -0.5, math.nan, math.inf, "", "nonsense", b"bytes", 1j]
        names = ["L9H9", "L0H9", "L0KV7.k", "[]", "induction", "a" * 300, "../x", "\x00", FOREVER]
        heads = [[(9, 9)], [(0, -1)], ["L0KV9"], [(0,)], [0], ["L0H0", 3], [[]], [("L1H0", "L0H1.q")], [("a", "b")]]
        things = [[], (), {}, {"a": 1}, {1: 2}, [None], ["nonsense"], [1.5], [[1], "a"], object(), int, len]
        arrays = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.bool), torch.full((3,), math.nan), np.zeros((2, 2))]
        ours = [self.network, self.model, self.clean, other, self.pair, self.task, self.table, self.tokenizer]
        return [*scalars, *names, *heads, *things, *arrays, *ours, pd.DataFrame({"a": [1]}), Path("no/such/file")]


def wrong_calls(world: World, n: int, seed: int) -> Iterator[tuple[str, str, Any, Callable[[], Any]]]:
    """Yields calls, each with one argument replaced, drawn without repetition while that is possible."""
    calls = world.calls()
    cases = [
        (name, argument, index)
        for name, (_, arguments) in calls.items()
        for argument in arguments
        for index in range(len(world.wrong_values()))
    ]
    order = random.Random(seed).sample(cases, len(cases))
    for place in range(n):
        name, argument, index = order[place % len(order)]
        function, arguments = calls[name]
        odd = world.odd_values(arguments[argument])
        value = odd[index % len(odd)] if odd and place % 2 else world.wrong_values()[index]
        yield name, argument, value, lambda f=function, a=arguments | {argument: value}: f(**a)


def made(maker: Callable[..., Any], *cases: Any) -> list[Any]:
    """What a maker returns for each case, without those that it refuses."""
    found = []
    for case in cases:
        with suppress(ValueError):
            found.append(maker(case))
    return found


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _TooLong(BaseException):
    pass


def outcome_of(name: str, argument: str, value: Any, call: Any) -> Outcome:
    """Runs a call and says how it ended."""
    shown = (type(value).__name__ + " " + ascii(value).replace("\n", " "))[:60]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            with limited(TIME_LIMIT_S):
                call()
        except _TooLong:
            return Outcome(name, argument, shown, "hang")
        except Exception as error:
            last: Any = error.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            place = Path(last.tb_frame.f_code.co_filename).resolve()
            ours = place.is_relative_to(PACKAGE) or place.is_relative_to(HOOKS)
            meant = isinstance(error, ValueError | TypeError | LookupError | ImportError)
            raised = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
            told = str(error.args[0] if error.args else error)
            parts = (f"{name}=" for name in getattr(value, "__dataclass_fields__", ()))
            named = any(
                part in told for part in (argument.removesuffix("s"), str(value)[:40], repr(value)[:40], *parts)
            )
            function = call.__defaults__[0]  # of `wrong_calls`
            door = place == _file_of(function) or "check" in last.tb_frame.f_code.co_name
            kind = "refused" if ours and meant and raised and (named or door) else "depths"
            message = f"{type(error).__name__}: {ascii(str(error))[1:-1]} ({place.name}:{last.tb_lineno})"
            return Outcome(name, argument, shown, kind, message.replace("\n", " ")[:600])
    return Outcome(name, argument, shown, "accepted")


def _file_of(function: Any) -> Path:
    """The file that defines a public function; of a call that changes a folder first, that of `load`."""
    return Path(inspect.getfile(inspect.unwrap(ac.load if isinstance(function, partial) else function))).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--n", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=40, help="calls that end below, to print")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        world = World(Path(place))
        outcomes = [outcome_of(*case) for case in wrong_calls(world, options.n, options.seed)]
    frame = pd.DataFrame(outcomes)
    counts = frame.groupby(["call", "kind"]).size().unstack(fill_value=0)
    print(counts.to_string())
    print(frame["kind"].value_counts().to_string())
    refused = frame[frame["kind"] != "accepted"]
    print(f"of {len(refused)} that were not accepted, {(refused['kind'] != 'refused').mean():.1%} end below the door")
    for _, row in frame[frame["kind"].isin(["depths", "hang"])].head(options.show).iterrows():
        print(f"  {row['call']}({row['argument']}={row['value']}): {row['kind']} {row['message']}")


if __name__ == "__main__":
    main()
