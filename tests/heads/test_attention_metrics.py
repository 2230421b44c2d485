"""Every metric beside a slow, obvious twin."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from align_circuits.heads.attention_metrics import entropy, hit_rate, ov_copying
from align_circuits.models.loading import load


@st.composite
def attention(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Patterns with zeros and ties, keys among candidates, empty ones included."""
    rows, heads, pos = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, 3), min_size=rows * heads * pos, max_size=rows * heads * pos))
    pattern = torch.tensor(counts, dtype=torch.float64).view(rows, heads, pos)
    label = st.lists(st.sampled_from(["key", "candidate", "neither"]), min_size=rows * pos, max_size=rows * pos)
    labels = draw(label)
    keys = torch.tensor([name == "key" for name in labels]).view(rows, pos)
    candidates = torch.tensor([name != "neither" for name in labels]).view(rows, pos)
    return pattern / pattern.sum(-1, keepdim=True).clamp(min=1), keys, candidates


def entries(pattern: Tensor, keys: Tensor, candidates: Tensor):
    """Each row and head with its attention, its keys and its candidates as plain lists."""
    for row in range(pattern.shape[0]):
        key = [k for k in range(pattern.shape[2]) if keys[row, k]]
        candidate = [k for k in range(pattern.shape[2]) if candidates[row, k]]
        for head in range(pattern.shape[1]):
            yield (row, head), pattern[row, head].tolist(), key, candidate


@given(attention())
def test_hit_rate_is_the_argmax_among_candidates(drawn):
    got = hit_rate(*drawn)
    for entry, attends, keys, candidates in entries(*drawn):
        most = max((attends[k] for k in candidates), default=0)
        best = [k for k in candidates if attends[k] == most]
        expected = sum(k in keys for k in best) / len(best) if most > 0 else 0
        assert got[entry].item() == pytest.approx(expected)


@given(attention())
def test_entropy_among_candidates(drawn):
    pattern, _, among = drawn
    got = entropy(pattern, among)
    for entry, attends, _, candidates in entries(*drawn):
        whole = sum(attends[k] for k in candidates)
        shares = [attends[k] / whole for k in candidates] if whole else []
        expected = -sum(p * math.log(p) for p in shares if p > 0) if whole else math.nan
        assert got[entry].item() == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_uniform_attention_scores_chance():
    pattern = torch.full((3, 2, 8), 1 / 8, dtype=torch.bfloat16)
    keys = torch.arange(8).expand(3, 8) < 2
    candidates = torch.arange(8).expand(3, 8) < 5
    hits = hit_rate(pattern, keys, candidates).float()
    torch.testing.assert_close(hits, torch.full((3, 2), 0.4), atol=2e-3, rtol=0)
    assert entropy(pattern.float(), candidates).flatten().tolist() == pytest.approx([math.log(5)] * 6)


def test_an_argmax_outside_the_candidates_does_not_count():
    pattern, keys = torch.tensor([[[0.90, 0.04, 0.06]]]), torch.tensor([[False, False, True]])
    assert hit_rate(pattern, keys, candidates=torch.tensor([[False, True, True]])).item() == 1
    assert hit_rate(pattern, keys, candidates=torch.tensor([[True, True, True]])).item() == 0


def test_rounding_does_not_decide_a_tie():
    pattern = torch.tensor([[[0.3, 0.3 + 3e-8, 0.3 - 3e-8, 0.1]], [[0.3, 0.3001, 0.2999, 0.1]]])
    keys = torch.tensor([[True, False, False, False]] * 2)
    assert hit_rate(pattern, keys, torch.ones(2, 4, dtype=torch.bool)).flatten().tolist() == pytest.approx([1 / 3, 0])


def test_nan_attention_is_not_a_miss():
    pattern = torch.tensor([[[torch.nan, 0.5]], [[0.5, 0.5]]])
    got = hit_rate(pattern, torch.tensor([[False, True]] * 2), torch.tensor([[True, True]] * 2))
    assert got[0].isnan().all()
    assert got[1].item() == 0.5


def weights(heads: int, kv_heads: int, seed: int = 0, d_vocab: int = 11, d_model: int = 6, d_head: int = 3):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(kv_heads, d_model, d_head), (heads, d_head, d_model), (d_vocab, d_model), (d_model, d_vocab)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_ov_copying_equals_the_eigenvalues_of_the_full_matrix(heads, kv_heads):
    W_V, W_O, W_E, W_U = weights(heads, kv_heads)
    got = ov_copying(W_V, W_O, W_E, W_U)
    for head in range(heads):
        full = W_E @ W_V[head * kv_heads // heads] @ W_O[head] @ W_U
        eigenvalues = torch.linalg.eigvals(full)
        expected = eigenvalues.sum().real / eigenvalues.abs().sum()
        assert got[head].item() == pytest.approx(expected.item())


def test_ov_copying_of_heads_that_copy_suppress_and_do_nothing():
    W_E = torch.linalg.qr(weights(1, 1, d_vocab=6)[2]).Q
    W_V = torch.eye(6)[None, :, :3].double().repeat(3, 1, 1)
    W_O = W_V.mT * torch.tensor([1.0, -1.0, 0.0])[:, None, None]
    got = ov_copying(W_V, W_O, W_E, W_E.T)
    assert got[:2].tolist() == pytest.approx([1, -1])
    assert got[2].isnan()


def test_ov_copying_refuses_heads_that_cannot_share():
    with pytest.raises(ValueError, match="3 heads cannot share 2 value heads"):
        ov_copying(*weights(3, 2))


def test_ov_copying_reads_a_loaded_model(random_hf_model):
    llama, found = random_hf_model("llama"), {}
    for name, network in (("llama", llama), ("gpt2", random_hf_model("gpt2"))):
        model: Any = load(network)
        found[name] = ov_copying(model.blocks[0].attn.W_V, model.blocks[0].attn.W_O, model.W_E, model.W_U)
        assert found[name].shape == (4,)
    value, output = (llama.model.layers[0].self_attn.get_submodule(name).weight for name in ("v_proj", "o_proj"))
    head = 3  # reads the second of two value heads, of eight numbers
    inside = value[8:16].T @ output[:, 8 * head : 8 * head + 8].T
    full = llama.get_input_embeddings().weight @ inside @ llama.get_output_embeddings().weight.T
    eigenvalues = torch.linalg.eigvals(full.detach().double())
    expected = float(eigenvalues.sum().real / eigenvalues.abs().sum())
    assert found["llama"][head].item() == pytest.approx(expected, abs=1e-4), "in float32"
