"""`tune` on every architecture: three updates equal a plain PEFT loop on plain Hugging Face, or are refused."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from plain import FUSED, Plain, first
from safetensors.torch import load_file
from torch import nn
from verbs import REFUSED, REFUSED_AT_LOAD, TUNED
from zoo import ARCHITECTURES, tiny

import align_circuits as ac
from align_circuits.tasks.own_prompts import OwnPrompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unchecked_shapes"),
    pytest.mark.filterwarnings("ignore"),  # TransformerLens's and PEFT's
]

TEXTS = [
    [1, *range(5, 24)],
    [1, 9, 8, 7, 6, 5, 9, 8, 7],
    [1, 30, 31, 30, 31],
    [1, *range(40, 55)],
    [1, 7, 7, 8, 7, 7, 8],
]
STEPS, LR, RANK, ALPHA = 3, 5e-4, 4, 8


def without_dropout(hf: Any) -> Any:
    """The masks that a batch draws are not those that its prompts would draw one by one."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "activation_dropout", "attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return hf


def modules_of(hf: Any, projections: Any) -> list[str]:
    """The names of the modules that compute projections, found on the plain model."""
    plain, names = Plain(hf), {}
    for layer in range(len(plain.layers)):
        attention, (down, _) = plain.attention[layer], plain.module("mlp_out", layer)
        mlp = next(owner for owner in plain.hf.modules() if down in owner.children())
        fused = first(attention, FUSED)
        up = ("gate_up_proj", "up_proj", "c_fc", "dense_h_to_4h", "fc_in", "fc1")
        found = {name: fused or getattr(attention, f"{name}_proj") for name in ("q", "k", "v")}
        found |= {"o": plain.out[layer], "up": first(mlp, up), "gate": first(mlp, up), "down": down}
        names |= {id(found[name]): None for name in projections}
    return [name for name, module in plain.hf.named_modules() if id(module) in names]


def by_hand(hf: Any, targets: list[str], texts: Any) -> tuple[Any, list[float]]:
    """LoRA by PEFT, and AdamW by PyTorch, one prompt at a time; returns the model and the loss of each update."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(hf, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0), []
    model.train()
    for step in range(STEPS):
        rows = [model(torch.tensor([text])).logits[0, :-1].log_softmax(-1) for text in texts]
        gold = [row[range(len(text) - 1), text[1:]] for row, text in zip(rows, texts, strict=True)]
        loss = -torch.cat(gold).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
        losses.append(float(loss))
    return model.eval(), losses


def texts_of(prompts: ac.Prompts) -> list[list[int]]:
    return [tokens[mask].tolist() for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True)]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in REFUSED_AT_LOAD])
def test_tuning_is_that_of_peft(name, tmp_path):
    # "longrope" takes short factors up to 12 tokens: the last of 13 counts, though nothing is predicted from it.
    prompts = ac.Prompts.from_tokens([*TEXTS[:3], TEXTS[3][:13], TEXTS[4]] if "long-rope" in name else TEXTS)
    without_dropout(tiny(name)).save_pretrained(tmp_path / "base")
    model: Any = ac.load(tmp_path / "base")
    without_dropout(model.original_model)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    settings: dict[str, Any] = {"steps": STEPS, "lr": LR, "r": RANK, "alpha": float(ALPHA), "dropout": 0.0, "batch": 4}
    projections: list[str] = []
    for verb, matrices in TUNED.items():
        if (reason := REFUSED[verb].get(name)) is None:
            projections = list(dict.fromkeys([*projections, *matrices]))
            continue
        with pytest.raises(ValueError, match=re.escape(reason)):
            ac.tune(model, prompts, ac.TuneConfig(projections=matrices, **settings), progress=False)
        if "gate, up" in reason:
            projections += ["gate", "up", "down"]
    config = ac.TuneConfig(projections=tuple(projections), probe_every=1, **settings)
    run = ac.tune(model, prompts, config, out=tmp_path / "run", progress=False)

    learned, held_out = OwnPrompts(prompts).split(0)
    plain = without_dropout(tiny(name))
    targets = modules_of(plain, projections)
    twin, losses = by_hand(plain, targets, texts_of(learned.prompts))
    np.testing.assert_allclose(run.log["loss"].dropna(), losses, atol=1e-5)
    own, right = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors"), get_peft_model_state_dict(twin)
    assert own.keys() == right.keys()
    for key in own:
        torch.testing.assert_close(own[key], right[key], atol=1e-5, rtol=0)

    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before), "the base model stays as it was"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # PEFT draws weights before it reads them
        tokens = torch.tensor(texts_of(prompts)[:1])
        expected = twin(tokens).logits
        elsewhere = PeftModel.from_pretrained(tiny(name), str(tmp_path / "run" / "adapter")).eval()
        again = ac.load(tmp_path / "run" / "adapter")
        for found in (elsewhere(tokens).logits, again(tokens), run.model(tokens)):
            torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    merged = ac.load(twin.merge_and_unload())
    probed: Any = run.table.where(step=STEPS).frame
    log_prob = probed[(probed["metric"] == "log_prob") & (probed["kind"] == "all") & probed["offset"].isna()]["value"]
    evaluated = ac.evaluate(merged, held_out.prompts).where(metric="log_prob", kind="all", offset=None).frame["value"]
    np.testing.assert_allclose(log_prob, evaluated, atol=1e-4)
    heads = probed[(probed["level"] == "head") & (probed["metric"] == "previous")]["value"]
    scores = ac.score_heads(merged, held_out.prompts, ["previous"]).heads().frame["value"]
    np.testing.assert_allclose(heads, scores, atol=1e-5)
