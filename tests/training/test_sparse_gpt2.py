"""The bundled GPT-2 of few heads, on prompts that it did not learn from, and its recipe."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import align_circuits as ac
from align_circuits.models import loading
from align_circuits.training.sparse_gpt2 import SPARSE_GPT2, hints, pretrain_sparse

MOST_NAMED = 8
FRESH = (101, 102, 103)
SMALL = replace(
    SPARSE_GPT2,
    train=replace(SPARSE_GPT2.train, steps=6, warmup=1, decay=2, log_every=2),
    most_examples=6,
    tokens=400,
    hint_steps=2,
    prune_from=2,
    prune_every=1,
)


@pytest.fixture(scope="module")
def sparse():
    return ac.load("sparse-gpt2")


def test_it_is_small_and_in_float32(sparse):
    folder = Path(loading.__file__).parent / "weights" / "sparse-gpt2"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    assert {weight.dtype for weight in sparse.original_model.parameters()} == {torch.float32}
    assert sparse.cfg.n_ctx == SPARSE_GPT2.n_ctx


@pytest.mark.parametrize("ood", [False, True])
def test_it_is_above_the_history_ceiling_at_every_length_that_it_learned(sparse, ood):
    for x_len in SPARSE_GPT2.x_len:
        prompts = ac.Seq2SeqTask(x_len=x_len, ood=ood).sample(100, sparse.tokenizer, seed=FRESH[0])
        table = ac.evaluate(sparse, prompts).where(metric="accuracy", kind="first").frame.set_index("predictor")
        assert table.loc["model", "low"] > table.loc["history", "value"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", FRESH)
def test_its_circuit_is_small_necessary_and_sufficient(sparse, seed):
    found = ac.localize(sparse, ac.Seq2SeqTask(x_len=SPARSE_GPT2.x_len[0]), seed=seed)
    roles = {role for role, heads in found.heads_by_role.items() if heads}
    assert {"align_query", "align_key", "lookup"} <= roles
    assert len({head for heads in found.heads_by_role.values() for head in heads}) <= MOST_NAMED
    holds = {(verdict.role, verdict.claim): verdict.holds for verdict in found.verdicts}
    assert holds[None, "necessary"]
    assert holds[None, "sufficient"]
    assert all(holds[role, "necessary"] for role in ("align_query", "align_key", "lookup"))


def test_removed_heads_write_nothing(tmp_path):
    run = pretrain_sparse(SMALL, out=tmp_path / "one", progress=False)
    assert run.log["heads"].tolist() == [24, 24, 22, 20]
    model = ac.load(tmp_path / "one" / "model").original_model
    written = [block.attn.c_proj.weight.detach().view(8, -1).abs().amax(1) for block in model.transformer.h]
    assert int((torch.stack(written) == 0).sum()) == 4
    assert torch.equal(torch.stack(written) > 0, run.model.get_buffer("kept"))


def test_hints_are_the_attention_to_the_right_tokens():
    """By hand: a line of two symbols a b and phrases of two letters, written twice in the other order."""
    inputs = torch.tensor([[1, 2], [9, 10]])
    letters = torch.tensor([[[4, 5], [6, 7]], [[12, 13], [14, 15]]])
    batch = {
        "inputs": inputs,
        "letters": letters,
        "order": torch.tensor([[[0, 1], [1, 0]]]),
        "phrases": torch.tensor([[[[3, 4], [5, 6]], [[5, 7], [8, 9]]]]),
    }
    attention = [torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))]

    def by_hand(*rows):
        return -torch.stack([(attention[0][0, 0, query, keys].sum() + 1e-4).log() for query, keys in rows]).mean()

    expected = {
        "align_query": by_hand((3, [1]), (5, [2]), (11, [9]), (13, [10])),
        "align_key": by_hand(
            *((pos, [key]) for pos, key in zip([4, 5, 6, 7, 12, 13, 14, 15], [1, 1, 2, 2, 9, 9, 10, 10], strict=True))
        ),
        "previous": by_hand(*((pos, [pos - 1]) for pos in (4, 5, 6, 7, 12, 13, 14, 15))),
        "lookup": by_hand((11, [6]), (13, [4])),
        "lookup, later": by_hand((12, [7])),
    }
    for role, loss in expected.items():
        torch.testing.assert_close(hints(attention, {role: (0, 0)}, batch), loss)
