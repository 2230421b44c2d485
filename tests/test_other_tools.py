"""The blocks of `docs/beside-other-tools.md` run, and each gives the number that is computed here in another way.

SAELens runs beside TransformerLens 3 alone (`make test-tl3`); nnsight and inseq are in `make test-neighbours`.
"""

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import align_circuits as ac

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # other packages' business

PAGE = Path(__file__).parents[1] / "docs" / "beside-other-tools.md"


def run_blocks(folder: Path, *sections: str) -> Any:
    """What the blocks of these sections leave, after the shared one."""
    start, *others = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = {text.splitlines()[0]: text for text in others}
    blocks = [
        block
        for text in (start, *(texts[section] for section in sections))
        for block in re.findall(r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) == 1 + len(sections)
    (folder / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(folder / "page.py")))


def log_prob(prompts: Any, logits: torch.Tensor) -> torch.Tensor:
    """Of each target."""
    return logits.log_softmax(-1)[tuple(prompts.column(name) for name in ("prompt", "query_pos", "token"))]


def measured(table: ac.Table) -> float:
    """The mean log-probability in a table of `evaluate`."""
    (value,) = table.where(predictor="model", metric="log_prob", kind="all", offset=None).frame["value"]
    return float(value)


def test_the_cache_holds_what_score_heads_says(tmp_path):
    page = run_blocks(tmp_path, "ActivationCache")
    best = ac.score_heads(page.model, page.prompts, ["lookup_attention"]).top("lookup_attention", 1).frame
    assert page.share.item() == pytest.approx(float(best["value"].iloc[0]), abs=1e-5)
    assert page.share > 0.5


def test_direct_contributions_sum_to_the_logit(tmp_path):
    page = run_blocks(tmp_path, "Direct logit attribution")
    logits = page.model(page.prompts.tokens, attention_mask=page.prompts.mask.long())
    first = torch.from_numpy((page.prompts.targets["kind"] == "first").to_numpy(copy=True))
    prompt, query, token = (page.prompts.column(name)[first] for name in ("prompt", "query_pos", "token"))
    above = logits[prompt, query, token] - logits[prompt, query].mean(-1)
    assert page.direct.frame["value"].sum() == pytest.approx(above.mean().item(), abs=1e-3)


@pytest.mark.parametrize("where", ["a stand-in", "SAELens"])
def test_a_heads_output_goes_through_an_autoencoder(tmp_path, monkeypatch, where):
    if where == "a stand-in":

        class Half(torch.nn.Module):
            """Reconstructs half of what it is given."""

            def __init__(self, config: Any):
                super().__init__()
                assert config["d_in"] == 32

            def forward(self, z: torch.Tensor) -> torch.Tensor:
                return z / 2

            def encode(self, z: torch.Tensor) -> torch.Tensor:
                return z.repeat(1, 2)

        monkeypatch.setitem(sys.modules, "sae_lens", SimpleNamespace(StandardSAE=Half, StandardSAEConfig=dict))
    elif find_spec("sae_lens") is None:
        pytest.skip("make test-tl3 has SAELens")
    with torch.random.fork_rng(devices=[]):  # SAELens draws its weights from torch's global generator
        torch.manual_seed(0)
        page = run_blocks(tmp_path, "ActivationCache", "SAELens")
    batch = {"attention_mask": page.prompts.mask.long()}
    name, weight = f"blocks.{page.layer}.attn.hook_z", page.model.W_O[page.layer, page.head]

    def changed(output: torch.Tensor, hook: Any) -> torch.Tensor:  # noqa: ARG001
        z = page.cache[name][:, :, page.head]
        return output + (page.sae(z) - z) @ weight

    hooks = [(f"blocks.{page.layer}.hook_attn_out", changed)]
    logits = page.model.run_with_hooks(page.prompts.tokens, fwd_hooks=hooks, **batch)
    lost = log_prob(page.prompts, logits) - log_prob(page.prompts, page.model(page.prompts.tokens, **batch))
    assert measured(page.lost) == pytest.approx(lost.mean().item(), abs=1e-4)
    assert abs(measured(page.lost)) > 1e-4
    assert page.features.shape[0] == len(page.prompts.targets)


def test_nnsight_zeroes_the_head_that_ablate_does(tmp_path):
    pytest.importorskip("nnsight", reason="make test-neighbours")
    page = run_blocks(tmp_path, "nnsight")
    ablated = ac.evaluate(page.model, page.prompts, edits=[ac.Ablate([(page.layer, page.head)], how="zero")])
    assert page.log_prob.item() == pytest.approx(measured(ablated), abs=1e-5)
    assert abs(measured(ablated) - measured(ac.evaluate(page.model, page.prompts))) > 0.01


def test_the_share_of_inseqs_attribution_is_that_of_gradients(tmp_path):
    pytest.importorskip("inseq", reason="make test-neighbours")
    page = run_blocks(tmp_path, "inseq")
    model, one = page.model.original_model, page.one
    lookup, shares = one.relations["lookup"], []
    for row, target in enumerate(lookup.target.tolist()):
        query, token = int(one.column("query_pos")[target]), int(one.column("token")[target])
        embedded = model.get_input_embeddings()(one.tokens[:, page.bos : query + 1]).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[0, -1].softmax(-1)[token], embedded)
        scores = (gradient * embedded)[0].norm(dim=-1)
        keys = torch.tensor(lookup.keys_of(row)) - page.bos
        shares.append((scores[keys].sum() / scores.sum()).item())
    assert page.on_keys.tolist() == pytest.approx(shares, abs=1e-3)
