"""Tied and untied embeddings in finetuning, and pretrained ones that are put back."""

import pytest
import torch
from measured import table_of

from align_circuits.beyond.tied_embeddings import HELD_OUT, SEEN, TIED, TIED_EMBEDDINGS, UNTIED, untied, with_embeddings
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.models.training import next_token_loss

READ, UNREAD = torch.tensor([[1, 2, 3, 1], [3, 2, 1, 2]]), [0, 4, 5]


def test_an_untied_copy_computes_the_same_and_teaches_embeddings_of_what_it_reads_alone():
    model = small_gpt2(6, 4, d_model=8, seed=1)
    copy = untied(model)
    torch.testing.assert_close(copy(READ).logits, model(READ).logits, rtol=0, atol=0)
    next_token_loss(copy, (READ, READ.roll(-1, 1))).backward()
    moved = copy.transformer.wte.weight.grad.norm(dim=1)
    assert (moved[UNREAD] == 0).all() and (moved[[1, 2, 3]] > 0).all()


def test_embeddings_are_put_back_where_the_model_reads_and_not_where_it_writes():
    model, other = (small_gpt2(6, 4, d_model=8, seed=seed) for seed in (1, 2))
    embeddings = other.transformer.wte.weight.detach()
    copy = with_embeddings(model, UNREAD, embeddings)
    read = copy.transformer.wte.weight
    torch.testing.assert_close(read[UNREAD], embeddings[UNREAD])
    torch.testing.assert_close(read[[1, 2, 3]], model.transformer.wte.weight[[1, 2, 3]])
    torch.testing.assert_close(copy.lm_head.weight, model.lm_head.weight)
    torch.testing.assert_close(copy(READ).logits, model(READ).logits)


@pytest.mark.parametrize(
    ("restored", "verdict"), [({HELD_OUT: 0.9, SEEN: 0.3}, "holds"), ({HELD_OUT: 0.3, SEEN: 0.3}, "fails")]
)
def test_the_cause_is_shown_where_recall_comes_back_with_the_embeddings_of_held_out_subjects_alone(restored, verdict):
    ends = {"held_out": {TIED: 0.3, UNTIED: 0.9, **restored}, "seen": {TIED: 1.0, UNTIED: 1.0}}
    rows = [
        {"stage": "icl", "probe": f"icl_{queries}", "embeddings": name, "step": step, "seed": seed, "value": value}
        for queries, values in ends.items()
        for name, end in values.items()
        for step, value in ((0, 0.0), (100, end))
        if step or name in (TIED, UNTIED)
        for seed in range(6)
    ]
    comes, differs, back = TIED_EMBEDDINGS.check(table_of(rows, match="exact"))
    assert (comes.verdict, differs.verdict, back.verdict) == ("holds", "holds", verdict)
