"""Both engines beside each other, beside Hugging Face, and beside themselves in other batches."""

from typing import Any

import numpy as np
import pytest
import torch
from frozen import unchecked
from peft import LoraConfig, get_peft_model
from random_hand_built import hand_built
from refusals import refused
from transformer_lens import HookedRootModule
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.sources import boot_native

import align_circuits as ac
from align_circuits.run.forward_pass import capture, forward

NAMES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"]
LENGTHS = (17, 12, 17, 5, 20)


@pytest.fixture
def prompts():
    """Prompts of many lengths, so that most are padded."""
    generator = torch.Generator().manual_seed(1)
    return ac.Prompts.from_tokens([torch.randint(64, (n,), generator=generator).tolist() for n in LENGTHS])


def some_rows(prompts):
    """Different positions, and different numbers of them, in each prompt; one prompt has none."""
    keep = (prompts.column("query_pos") % 3 != 0) & (prompts.column("prompt") != 2)
    return prompts.column("prompt")[keep], prompts.column("query_pos")[keep]


def run(model, prompts, rows=None, engine: Any = "auto", batch_size: Any = "auto", **arguments):
    """Returns the pattern [layer row head pos], the logits [row d_vocab] and the engine that ran."""
    prompt, query = rows or some_rows(prompts)
    config = model.cfg
    pattern = torch.full(
        (config.n_layers, len(prompt), config.n_heads, prompts.mask.shape[1]), torch.nan, dtype=torch.float64
    )
    logits = torch.full((len(prompt), config.d_vocab), torch.nan, dtype=torch.float64)

    def on_pattern(rows, layer, values):
        assert values.dtype in (torch.float32, torch.float64)
        pattern[layer, rows] = values.double()

    def on_logits(rows, values):
        logits[rows] = values.double()

    options = ac.RunOptions(engine, batch_size)
    arguments |= {"on_pattern": on_pattern, "on_logits": on_logits, "options": options}
    ran = forward(model, prompts, prompt=prompt, query=query, **arguments)
    assert not pattern.isnan().any() and not logits.isnan().any(), "every row is handed over"
    return pattern, logits, ran


def hugging_face(hf, prompts):
    """Patterns and logits of each row, from Hugging Face's eager attention, one unpadded prompt at a time."""
    prompt, query = some_rows(prompts)
    hf.set_attn_implementation("eager")
    patterns, logits = [], []
    for row in prompt.unique().tolist():
        ids = prompts.tokens[row][prompts.mask[row]]
        pad = len(prompts.mask[row]) - len(ids)
        with torch.no_grad():
            out = hf(ids[None], output_attentions=True)
        at = query[prompt == row] - pad
        layers = torch.stack([layer[0][:, at].transpose(0, 1) for layer in out.attentions])
        patterns.append(torch.nn.functional.pad(layers, (pad, 0)).double())
        logits.append(out.logits[0, at].double())
    return torch.cat(patterns, 1), torch.cat(logits)


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_engines_agree_with_each_other_and_with_hugging_face(name, kind, random_hf_model, prompts):
    dtype, atol = getattr(torch, kind), {"float32": 1e-5, "float64": 1e-10}[kind]
    expected = hugging_face(random_hf_model(name).to(dtype), prompts)
    model = ac.load(random_hf_model(name).to(dtype))
    reference, fast = run(model, prompts, engine="reference"), run(model, prompts, engine="fast")
    assert (reference[2], fast[2]) == ("reference", "fast")
    for one in (reference, fast):
        torch.testing.assert_close(one[0], expected[0], atol=atol, rtol=0)
        torch.testing.assert_close(one[1], expected[1], atol=10 * atol, rtol=0)
    torch.testing.assert_close(fast[0], reference[0], atol=min(atol, 2e-6), rtol=0)
    assert fast[0].max() > 0.5, "attention is not near uniform, where little could differ"


@pytest.mark.parametrize("which", ["fast", "reference"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_batch_size_changes_no_result(name, which, random_hf_model, prompts):
    model = ac.load(random_hf_model(name))
    one = run(model, prompts, engine=which, batch_size=1)
    for size in (2, 3, 100, "auto"):
        other = run(model, prompts, engine=which, batch_size=size)
        torch.testing.assert_close(other[:2], one[:2], atol=5e-6, rtol=0)


@pytest.mark.parametrize("which", ["fast", "reference"])
def test_out_of_memory_halves_the_batch(which, random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    expected = run(model, prompts, engine=which)
    sizes = []

    def small_memory(_module, args):
        sizes.append(len(args[0]))
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("out of memory, after the layers were handed over")

    model.original_model.lm_head.register_forward_pre_hook(small_memory)
    torch.testing.assert_close(run(model, prompts, engine=which)[:2], expected[:2], atol=2e-5, rtol=0)
    assert sizes == [4, 2, 2], "only the four prompts that have rows are run"
    with pytest.raises(torch.OutOfMemoryError):
        run(model, prompts, engine=which, batch_size=3)


def test_bf16_runs_and_engines_stay_close(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama").to(torch.bfloat16))
    fast, reference = run(model, prompts, engine="fast"), run(model, prompts, engine="reference")
    assert (fast[0] - reference[0]).abs().mean() < 1e-2
    assert (fast[1] - reference[1]).abs().mean() < 0.1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapter_on_and_off(random_hf_model, prompts):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        wrapped = get_peft_model(random_hf_model("llama"), config)
    model = ac.load(wrapped.eval())
    with wrapped.disable_adapter():
        off = run(model, prompts, engine="fast")
    plain = run(ac.load(random_hf_model("llama")), prompts, engine="fast")
    on, reference = run(model, prompts, engine="fast"), run(model, prompts, engine="reference")
    torch.testing.assert_close(off[:2], plain[:2], atol=1e-6, rtol=0)
    torch.testing.assert_close(on[:2], reference[:2], atol=2e-5, rtol=0)
    assert (on[0] - off[0]).abs().max() > 0.01


def test_only_the_logits_asked_for_are_computed(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    seen = []
    model.original_model.lm_head.register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[1]))
    rows = torch.tensor([0, 1]), torch.tensor([18, 19])
    for which in ("fast", "reference"):
        run(model, prompts, rows, engine=which)
    forward(model, prompts, prompt=rows[0], query=rows[1], on_pattern=lambda *_: None)
    assert seen == [2, 2, 1]


def test_auto_is_reference_while_hooks_are_attached(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    plain = run(model, prompts)
    assert plain[2] == "fast"

    def first_token_only(pattern, **_):
        return torch.zeros_like(pattern).index_fill(-1, torch.tensor([0]), 1.0)

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", first_token_only)]):
        edited = run(model, prompts)
        refused(r"hooks are attached \(blocks.0.attn.hook_pattern\)", run, model, prompts, engine="fast")
    assert edited[2] == "reference" and (edited[1] - plain[1]).abs().max() > 0.1
    torch.testing.assert_close(run(model, prompts)[:2], plain[:2], atol=0, rtol=0)


def test_unknown_engines_and_sizes(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    refused("engine='quick': choose", unchecked, ac.RunOptions, engine="quick")
    refused("batch_size=0", run, model, prompts, batch_size=0)


def test_native_bridge_runs_by_reference(prompts):
    config = TransformerBridgeConfig(
        d_model=16, d_head=4, n_layers=2, n_heads=4, n_ctx=32, d_vocab=64, d_mlp=32, act_fn="relu", seed=0
    )
    with torch.random.fork_rng(devices=[]):
        model = boot_native(config)
    one, many = run(model, prompts, batch_size=1), run(model, prompts, batch_size=5)
    assert one[2] == "reference"
    torch.testing.assert_close(many[:2], one[:2], atol=1e-5, rtol=0)
    refused("the fast engine cannot run this model", run, model, prompts, engine="fast")


@pytest.mark.parametrize("grouped", [{}, {"n_key_value_heads": 2}])
def test_parts_of_a_hand_built_model_equal_its_hooks(prompts, grouped):
    model = hand_built(zeros=True, d_head=40, **grouped)
    for kind, atol in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model = model.to(kind)
        for chosen in (prompts, ac.Prompts.from_tokens(prompts.tokens[[0, 4], -8:].tolist())):
            pattern, logits, ran = run(model, chosen)
            expected = run(model, chosen, engine="reference", batch_size=2)
            assert (ran, expected[2]) == ("fast", "reference")
            torch.testing.assert_close((pattern, logits), expected[:2], atol=atol, rtol=0)
    edits = [ac.Ablate([(0, 1)], how="zero")]
    assert run(model, prompts, edits=edits)[2] == "reference"
    refused("hook_z does not fire under it", run, model, prompts, edits=edits, engine="fast")
    model.W_U.data[0] = torch.nan
    refused("logits are NaN", run, model, prompts)


class Bare(HookedRootModule):
    """A model that has hook points, reached or not, and logits that are as asked."""

    def __init__(self, point: str, reached: bool, logit: float = 0.0):
        super().__init__()
        self.cfg = TransformerBridgeConfig(
            d_model=4, d_head=4, n_layers=1, n_heads=1, n_ctx=32, d_vocab=64, d_mlp=4, act_fn="relu"
        )
        attention = torch.nn.Module()
        setattr(attention, point, HookPoint())
        block = torch.nn.Module()
        block.attn = attention
        self.blocks = torch.nn.ModuleList([block])
        self.weight = torch.nn.Parameter(torch.tensor(logit))
        self.point, self.reached = getattr(attention, point), reached
        self.setup()

    def forward(self, tokens, **_):
        if self.reached:
            self.point(torch.eye(tokens.shape[1]).expand(len(tokens), 1, -1, -1))
        return self.weight.expand(*tokens.shape, 64)


def test_model_of_ones_own(prompts):
    pattern, logits, ran = run(Bare("hook_pattern", reached=True), prompts)
    _, query = some_rows(prompts)
    assert ran == "reference" and (logits == 0).all()
    assert torch.equal(pattern[0, :, 0].argmax(-1), query)


def test_hook_that_never_fires(prompts):
    refused(r"the hook 'blocks.0.attn.hook_pattern' never fired", run, Bare("hook_pattern", reached=False), prompts)
    refused(r"no hook point 'blocks.0.attn.hook_pattern' in this Bare", run, Bare("hook_z", reached=True), prompts)


def test_nan_logits(random_hf_model, prompts):
    refused("logits are NaN", run, Bare("hook_pattern", reached=True, logit=float("nan")), prompts)
    model = ac.load(random_hf_model("llama"))
    model.original_model.lm_head.weight.data[:] = float("nan")
    refused("logits are NaN", run, model, prompts)


def test_rows_must_be_tokens_in_order(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    for rows, message in [
        (([1, 0], [19, 19]), "prompts ascend"),
        (([-1, 0], [19, 19]), "rows of prompts -1 to 0, but there are 5"),
        (([0], [-1]), "holds no token"),
        (([5], [19]), "rows of prompts 5 to 5, but there are 5"),
        (([0], [20]), "holds no token"),
        (([3], [4]), "holds no token"),
    ]:
        refused(message, run, model, prompts, tuple(map(torch.tensor, rows)))


def test_no_rows_and_no_callbacks(random_hf_model, prompts):
    model = ac.load(random_hf_model("llama"))
    nothing = torch.empty(0, dtype=torch.long)
    assert forward(model, prompts, prompt=nothing, query=nothing) == "fast"
    prompt, query = some_rows(prompts)
    assert forward(model, prompts, prompt=prompt, query=query) == "fast"


def test_dropout_is_off_and_every_module_keeps_its_mode(random_hf_model, prompts):
    model = ac.load(random_hf_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5))
    model.train()
    model.original_model.transformer.ln_f.eval()
    modes = [module.training for module in model.modules()]
    assert any(modes) and not all(modes)
    one, two = run(model, prompts), run(model, prompts)
    torch.testing.assert_close(one[:2], two[:2], atol=0, rtol=0)
    assert modes == [module.training for module in model.modules()]


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_what_makes_the_logits_is_read_and_edited_at_every_column(llama, char_tokenizer, engine):
    prompts, options = ac.Seq2SeqTask(x_len=3, n_examples=2).sample(3, char_tokenizer), ac.RunOptions(engine=engine)
    with torch.no_grad():
        right = llama(prompts.tokens)
    name = "unembed.hook_out"
    torch.testing.assert_close(capture(llama, prompts, [name], options=options)[name], right, atol=1e-4, rtol=1e-4)
    rows = torch.arange(3), torch.full((3,), 4)
    read = capture(llama, prompts, [name], prompt=rows[0], query=rows[1], options=options)[name]
    torch.testing.assert_close(read, right, atol=1e-4, rtol=1e-4)
    means = ac.ablation_baseline(llama, prompts, "mean", hook=name, by="position", options=options).means[name]
    torch.testing.assert_close(means, right.mean(0), atol=1e-4, rtol=1e-4)
    edit = ac.Ablate(hook=name, how="zero", positions=torch.ones_like(prompts.mask))
    even = ac.evaluate(llama, prompts, metrics=["log_prob"], edits=[edit], options=options)
    np.testing.assert_allclose(even.frame["value"], -np.log(right.shape[-1]), atol=1e-5)
