"""What names a kept part: all that its numbers rest on, and nothing else."""

import functools
import importlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

import align_circuits as ac
from align_circuits.hooks.compat import bridges, model_state
from align_circuits.hooks.edits import AblationBaseline
from align_circuits.jobs import code_versions, identity, sweeps
from align_circuits.jobs.identity import Unidentified, identity_of
from align_circuits.models.parameters import model_identity
from align_circuits.run.target_metrics import TargetMetrics
from tests.jobs.test_sweeps import TASK, VERBS


def ablated(model: Any, pair: ac.Pair, options: ac.RunOptions) -> ac.Table:
    return ac.ablate_heads(
        model, pair.clean, "mean", baseline=pair.corrupted, metrics=[pair.metric or "prob"], options=options
    )


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    return lambda: ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)


@pytest.fixture(scope="module")
def pair(char_tokenizer) -> ac.Pair:
    clean = TASK.sample(3, char_tokenizer, seed=0)
    clean = replace(
        clean, targets=clean.targets.assign(wrong=7), group=torch.arange(3), positions={"END": torch.arange(3)}
    )
    clean = replace(clean, own_correct=clean.correct)
    return ac.Pair(clean, TASK.corrupt(clean, "query", seed=1), metric=logit_of(1), direction="noise")


def logit_of(token: int) -> Any:
    def metric(logits: Tensor, _: pd.DataFrame) -> Tensor:
        return logits[:, token]

    return metric


def changed(value: Any) -> list[Any]:
    """Values of the same kind that differ from one in a single place."""
    if isinstance(value, Tensor):
        if not value.numel():
            return [torch.ones(1)]
        other = value.clone()
        other.view(-1)[-1] = ~other.view(-1)[-1] if value.dtype == torch.bool else other.view(-1)[-1] + 1
        return [other]
    if isinstance(value, pd.DataFrame):
        columns = {name: changed(column.iloc[0])[0] for name, column in value.items()}
        return [value.assign(**{str(name): [new, *value[name].iloc[1:]]}) for name, new in columns.items()]
    if isinstance(value, Mapping):
        parts = [{**value, name: new} for name, part in [*value.items()][:1] for new in changed(part)]
        return [*parts, {**value, "another": 1}]
    if isinstance(value, list | tuple):
        return [type(value)([*value, 1])]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, torch.dtype):
        return [torch.float16]
    return [1 if value is None or callable(value) else value + 1]


def variants(value: Any) -> dict[str, Any]:
    """A dataclass with each of its fields changed, by the field's name; of a part that is one, its first field."""
    found = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if hasattr(part, "__dataclass_fields__"):
            news = [*variants(part).values()][:1]
        elif isinstance(part, Mapping) and any(hasattr(of, "__dataclass_fields__") for of in part.values()):
            news = [{**part, name: next(iter(variants(of).values()))} for name, of in part.items()]
        else:
            news = changed(part)
        for index, new in enumerate(news):
            found[f"{field.name} {index}"] = other = copy(value)
            object.__setattr__(other, field.name, new)
    return found


def test_every_field_of_what_is_measured_counts(pair):
    baseline = AblationBaseline(means={"a": torch.zeros(2, 8)}, values={"a": torch.zeros(2, 8)})
    values = (
        pair.clean,
        pair.clean.relations["align_query"],
        pair,
        TargetMetrics.of(pair.clean, ("log_prob", logit_of(1))),
        ac.Patch([(0, 1)], values={"a": torch.zeros(2, 8)}),
        ac.Ablate([(0, 1)], baseline=baseline),
        ac.Steer([(0, 1)], vector=torch.ones(8)),
        ac.Clamp([(0, 1)], relation="align_query"),
    )
    for value in values:
        others = {name: identity_of(other) for name, other in variants(value).items()}
        assert len({identity_of(value), *others.values()}) == len(others) + 1, type(value).__name__
        assert identity_of(deepcopy(value)) == identity_of(value)
    options = ac.RunOptions()
    of_no_effect = {"progress 0", "cache_dir 0"}
    for name, other in variants(options).items():
        assert (other.identity == options.identity) == (name in of_no_effect), name


def named(monkeypatch, verb: Any, *arguments: Any) -> list[str]:
    """The names of the folders where a verb would keep its parts; nothing is measured."""
    names: list[str] = []
    measure = sweeps.SweepParts.measure

    def measured(parts: Any, computes: Any) -> Any:
        if not parts.kept or parts._what == "means for ablations":  # what the sweep itself rests on
            return measure(parts, computes)
        names.append(str(parts._folder))
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(sweeps.SweepParts, "measure", measured)
        verb(*arguments)
    return names


@pytest.mark.parametrize(
    "name", ["patch_heads", *(pytest.param(name, marks=pytest.mark.slow) for name in VERBS if name != "patch_heads")]
)
def test_every_verb_asks_for_all_that_its_numbers_rest_on(models, pair, name, tmp_path, monkeypatch):
    verb = ablated if name == "ablate_heads" else VERBS[name]
    model, options = models(), ac.RunOptions(cache_dir=tmp_path)
    latent = {name: part + 1 for name, part in pair.clean.latent.items()}
    inputs = pair.corrupted.inputs.clone()
    inputs[0, 1] = inputs[0, 3]
    cases: list[tuple[Any, ac.Pair, ac.RunOptions]] = [
        (model, pair, options),
        (model, replace(pair, clean=replace(pair.clean, latent=latent)), options),
        (model, replace(pair, corrupted=replace(pair.corrupted, inputs=inputs)), options),
        (model, replace(pair, metric=logit_of(2)), options),
        (model, pair, replace(options, batch_size=2)),
        (model, pair, replace(options, engine="reference")),
    ]
    for change in (turned, narrowed, hooked, halved, weighted, swapped):
        cases.append((models(), pair, options))
        change(cases[-1][0])
    names = [named(monkeypatch, verb, *case)[0] for case in cases]
    assert len({*names}) == len(cases), "another case would have read these parts"
    assert named(monkeypatch, verb, models(), replace(pair, metric=logit_of(1)), options)[0] == names[0]


def turned(model: Any) -> None:
    model.original_model.model.rotary_emb.inv_freq.mul_(3.0)


def narrowed(model: Any) -> None:
    model.original_model.model.layers[1].self_attn.scaling = 0.1


def hooked(model: Any) -> None:
    model.original_model.model.norm.register_forward_hook(lambda *given: given[-1] * 2)


def halved(model: Any) -> None:
    model.original_model.model.norm.forward = lambda residual: residual / 2


class Weighted(LlamaMLP):
    """Computes with an object."""

    def forward(self, x: Tensor) -> Tensor:
        options: Any = self.options
        return options.weight * super().forward(x)


def weighted(model: Any, weight: float = 2.0) -> None:
    mlp = bridges.component(model.blocks[1].mlp)
    mlp.__class__, mlp.options = Weighted, SimpleNamespace(weight=weight)


def test_an_object_that_a_module_of_ones_own_computes_with_counts(models):
    names = []
    for weight in (1.0, 2.0, 1.0):
        model = models()
        weighted(model, weight)
        names.append(identity_of(model_state.settings_of(model)))
    assert names[0] == names[2] != names[1]


def swapped(model: Any) -> None:
    """Two weights that are not sampled: neither their sum nor a sample shows it."""
    weight = model.original_model.model.embed_tokens.weight.data.view(-1)
    weight[[101, 103]] = weight[[103, 101]]


def test_every_setting_of_a_model_counts(models, monkeypatch):
    model = models()
    monkeypatch.setattr(model_state, "modules_of", lambda *roots: roots)  # both have the configurations
    before = identity_of(model_state.settings_of(model))
    for config in (model.original_model.config, model.cfg):
        for name, value in [*vars(config).items()]:
            if name in model_state._LEFT_BEHIND or not model_state._is_setting(value):
                continue
            for new in changed(value):
                vars(config)[name] = new
                assert identity_of(model_state.settings_of(model)) != before, name
            vars(config)[name] = value
    assert identity_of(model_state.settings_of(model)) == before
    monkeypatch.undo()
    before = identity_of(model_state.settings_of(model))
    for buffer in (*model.original_model.buffers(),):
        buffer.add_(1)
        assert identity_of(model_state.settings_of(model)) != before
        buffer.sub_(1)
    tokenizer, model.tokenizer = model.tokenizer, None
    without = identity_of(model_identity(model))
    model.tokenizer = tokenizer
    assert identity_of(model_identity(model)) != without


OWN = """
import functools
import json
import torch
from own_settings import SCALE
import own_settings

TOKEN = {token}

class Metric:
    __name__ = "own"
    def __init__(self, token): self.token = token
    def __call__(self, logits, targets): return logits[:, self.token] * {scale}

def plain(logits, targets, token={token}): return logits[:, token]
def by_keyword(logits, targets, *, token={token}): return logits[:, token]
def by_global(logits, targets): return logits[:, TOKEN]
def by_import(logits, targets): return logits[:, 0] * SCALE
def by_module(logits, targets): return logits[:, 0] * own_settings.SCALE
def by_helper(logits, targets): return by_global(logits, targets)
def by_set(logits, targets): return torch.stack([logits[:, i] for i in {{"a", "b", "c"}} and [{token}]]).sum(0)

class Of:
    def method(self, logits, targets): return logits[:, self.token]

of = Of()
of.token = {token}
linear = torch.nn.Linear(2, 1)
with torch.no_grad(): linear.weight.fill_({scale}); linear.bias.fill_(0.0)

METRICS = {{
    "plain": plain, "by_keyword": by_keyword, "by_global": by_global, "by_import": by_import, "by_module": by_module,
    "by_helper": by_helper, "by_set": by_set, "object": Metric({token}), "method": of.method,
    "partial": functools.partial(plain, token={token}), "closure": (lambda k: lambda l, t: l[:, k])({token}),
    "lambda": lambda logits, targets: logits[:, {token}], "module": linear,
}}
"""


@pytest.mark.slow
def test_an_own_metric_counts_with_all_that_it_refers_to(tmp_path):
    """In another process, whose sets have another order, it is the same; with another constant anywhere it is not."""
    printed = "from own import METRICS; from align_circuits.jobs.identity import identity_of; import json; "
    printed += "print(json.dumps({name: identity_of(metric) for name, metric in METRICS.items()}))"
    found = []
    for number, (token, scale) in enumerate([(1, 2), (1, 2), (2, 3)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "own.py").write_text(OWN.format(token=token, scale=scale))
        (folder / "own_settings.py").write_text(f"SCALE = {scale}\n")
        path = os.pathsep.join([str(folder), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(number + 1)}
        done = subprocess.run([sys.executable, "-c", printed], env=environment, capture_output=True, check=True)
        found.append(json.loads(done.stdout))
    first, again, other = found
    assert first == again
    assert [name for name in first if first[name] == other[name]] == []
    assert len({*first.values()}) == len(first)


JOB = """
import functools
from os import environ
import own_settings
from own_settings import SCALE

LIMIT = 1
FIGURE = own_settings.torch.ones(2)
NAMED = {"a": [1]}

def factory(k): return lambda: k
closed = factory(1)

@functools.cache
def cached(): return 1

class Own:
    size = 1

def helper(x, power=1): return x ** power

def rows(*, seed, token=1):
    constant = 1
    parts = (helper(2), SCALE, own_settings.OTHER, LIMIT, FIGURE, NAMED, closed(), cached(), Own.size, token, constant)
    return [{"y": float(sum(parts)), "home": environ.get("HOME")}]
"""


def test_a_job_is_named_by_all_that_its_function_refers_to(tmp_path, monkeypatch):
    (tmp_path / "own_settings.py").write_text("import torch\nSCALE = 1\nOTHER = 1\n")
    settings = (tmp_path / "own_settings.py").read_text()
    monkeypatch.syspath_prepend(tmp_path)

    def version(job: str = JOB, settings: str = settings) -> str:
        for name, text in {"own_job": job, "own_settings": settings}.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        with monkeypatch.context() as context:
            context.setattr(sys, "dont_write_bytecode", True)
            return code_versions.code_version("own_job:rows")

    first = version()
    assert version(JOB.replace("LIMIT = 1", "LIMIT = 1  # a comment").replace("    size", "\n    size")) == first
    monkeypatch.setenv("HOME", "/elsewhere")  # what is installed counts with its version, its variables do not
    assert version() == first
    numbers = [place for place in range(len(JOB)) if JOB[place] in "12"]
    others = [version(JOB[:place] + "3" + JOB[place + 1 :]) for place in numbers]
    others += [version(settings=settings.replace(f"{name} = 1", f"{name} = 2")) for name in ("SCALE", "OTHER")]
    of_the_package = "align_circuits.tables.intervals:proportion"
    own = [code_versions.code_version(of_the_package)]
    for name in ("python", *identity.NUMERICAL):
        with monkeypatch.context() as context:
            versions = identity.versions() | {name: "another"}
            context.setattr(code_versions, "versions", lambda versions=versions: versions)
            others.append(version())
            own.append(code_versions.code_version(of_the_package))
    monkeypatch.setattr(code_versions, "release", lambda: "another")
    others.append(version())
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code_versions, "settings_of_the_process", lambda: {"dtype": torch.float64})
    others.append(version())
    own.append(code_versions.code_version(of_the_package))
    assert len(numbers) == 10 and len({first, *others}) == len(others) + 1
    assert len({*own}) == len(own)
    with pytest.raises(ValueError, match=r"'own_job:rows' could not be told .* own_settings, imported within a funct"):
        version(JOB.replace("constant = 1", "import own_settings"))


def test_a_module_of_ones_own_with_the_name_of_one_of_python_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    identity._is_installed.cache_clear()
    found = []
    for token in (1, 22):
        (tmp_path / "code.py").write_text(f"def metric(logits, targets): return logits[:, {token}]\n")
        monkeypatch.delitem(sys.modules, "code", raising=False)
        found.append(identity_of(importlib.import_module("code").metric))
    monkeypatch.undo()
    identity._is_installed.cache_clear()
    assert found[0] != found[1] and identity_of(json.dumps) != identity_of(json.loads)


def test_what_cannot_be_told_needs_a_text_of_its_own(models, pair, tmp_path):
    model, options = models(), ac.RunOptions(cache_dir=tmp_path)
    numbers = (token for token in (1, 2))

    def metric(logits: Tensor, _: pd.DataFrame) -> Tensor:
        return logits[:, next(numbers, 0)]

    own: Any = metric
    with pytest.raises(ValueError, match=r"since builtins.generator cannot: give .* an attribute identity"):
        ac.patch_heads(model, replace(pair, metric=own), options=options)
    assert not any(tmp_path.iterdir())
    own.identity = "first tokens, 1"
    first = identity_of(own)
    own.identity = "first tokens, 2"
    assert identity_of(own) != first
    ac.patch_heads(model, replace(pair, metric=own), heads=[(0, 0)], options=options)


def test_values_that_are_alike_are_told_apart():
    memory: dict[str, Any] = {}
    memory["itself"] = memory
    values = [
        *(None, True, 1, 1.0, "1", b"1", 0.0, -0.0, [1], (1,), {1}, {"1": 1}, {1: "1"}, [[1], 2], [1, [2]], range(3)),
        *(torch.ones(2), torch.ones(2, 1), torch.ones(2).double(), torch.ones(2).numpy(), torch.float32, slice(1)),
        *(torch.add, torch.sub, torch.ones(2).add, len, functools.reduce, pd.NA, pd.Series([1]), pd.Series(["1"])),
        *(functools.cache(json.loads), functools.cache(json.dumps), ..., lambda x: x[..., 0], lambda x: x[None, 0]),
        *(random.Random(0), random.Random(1), memory, torch.nn.Parameter(torch.ones(2))),
    ]
    for kind in (
        type("Whole", (int,), {"__repr__": lambda _: "1"}),
        type("Text", (str,), {}),
        type("Real", (float,), {}),
    ):
        values += [kind("1"), kind("2"), kind("1")]
        vars(values[-1])["unit"] = "m"
    numpy: Any = np
    values += [numpy.zeros(2).view(type("Own", (np.ndarray,), {"__module__": __name__})) for _ in range(2)]
    vars(values[-1])["unit"] = "m"
    values += [numpy.ma.array([1.0, 2.0], mask=mask) for mask in ([0, 1], [1, 0])]
    assert len({identity_of(value) for value in values}) == len(values)
    shared = [1.5]
    assert identity_of([shared, shared]) == identity_of([[1.5], [1.5]])
    reading = (
        lambda name: open(name),  # noqa: SIM115, PTH123 - never called
        *(lambda name: globals()[name], lambda name: sys.modules[name], lambda name: np.load(name)),  # noqa: TID251
        *(lambda path: path.read_text(), lambda path: [pd.read_csv(path) for _ in path], lambda path: load_file(path)),
        lambda path: path.open(),
    )
    for value in (
        *reading,
        (each for each in ()),
        threading.Lock(),
        sys.modules[__name__],
        torch.empty(2, device="meta"),
    ):
        with pytest.raises(Unidentified):
            identity_of([value])


class Backwards(set[str]):
    """A set whose names come in another order, as in a process with another seed of hashes."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), reverse=True))


def test_settings_do_not_depend_on_the_order_in_which_python_hashes_names():
    model = torch.nn.Module()
    for name in ("first", "second"):
        model.register_buffer(name, torch.ones(1), persistent=False)
    settings = []
    for names in ({"first", "second"}, Backwards({"first", "second"})):
        vars(model)["_non_persistent_buffers_set"] = names
        ((_, state),) = model_state.settings_of(model, persistent=False)
        settings.append([*state][:2])
    assert settings[0] == settings[1] == ["first", "second"]


def test_what_a_longer_prompt_leaves_behind_does_not_count(random_hf_model):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 12.0], "factor": 8.0}
    lengths = {"rope_theta": 1e4, "original_max_position_embeddings": 12}
    hf = random_hf_model("llama", rope_parameters={"rope_type": "longrope", **factors, **lengths})
    model, rotary = ac.load(hf), hf.model.rotary_emb.original_component
    before, frequencies = identity_of(model_state.settings_of(model)), rotary.inv_freq.clone()
    ac.evaluate(model, ac.Prompts.from_tokens([[*range(20)]]))
    assert not torch.equal(rotary.inv_freq, frequencies)
    assert identity_of(model_state.settings_of(model)) == before
    rotary.original_inv_freq.mul_(2)
    assert identity_of(model_state.settings_of(model)) != before
