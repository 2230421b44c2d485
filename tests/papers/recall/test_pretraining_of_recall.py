"""Learning to recall: the model, its training, and what is measured, against slow and obvious twins."""

import copy
import math
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn.functional import cosine_similarity

import align_circuits as ac
from align_circuits.heads.task_vector_effects import representations, steer, task_vectors
from align_circuits.papers.recall.metrics import MATCHES, group_cosines, recall_matches, silhouette
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.models.training import Stage, next_token_loss, probe, train_stage
from align_circuits.papers.recall.task.sequences import IGNORED, DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.training.loop import TrainConfig

WORLD = RecallWorld.small()
FACTS = FactsTask(WORLD, n_facts=2, grammar_len=3)
STAGE = Stage(FACTS, TrainConfig(6, lr=3e-3, log_every=3), batch_size=4)


def network(seed: int = 0):
    return small_gpt2(WORLD.d_vocab, 40, d_model=16, seed=seed)


def test_matches_are_what_a_person_would_say():
    draws = torch.Generator().manual_seed(0)
    predicted = torch.randint(WORLD.d_vocab, (200,), generator=draws)
    subject, type_ = (torch.randint(limit, (200,), generator=draws) for limit in (WORLD.n_subjects, WORLD.n_types))
    found = recall_matches(predicted, subject, type_, torch.from_numpy(WORLD.facts))
    assert tuple(found) == MATCHES
    for row, (token, j, wanted) in enumerate(zip(predicted.tolist(), subject.tolist(), type_.tolist(), strict=True)):
        mine = [int(WORLD.facts[other, j]) for other in range(WORLD.n_types)]
        expected = (token == mine[wanted], token in WORLD.value_ids[wanted], token in mine, 16 <= token < 28)
        assert tuple(bool(found[name][row]) for name in MATCHES) == expected
    assert all(0 < found[name].mean() < 1 for name in MATCHES)


@pytest.mark.parametrize("with_itself", [True, False])
def test_group_cosines_are_means_over_pairs(with_itself):
    vectors = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = group_cosines(vectors, with_itself=with_itself)
    for g in range(3):
        for h in range(3):
            pairs = [
                float(cosine_similarity(vectors[g, k], vectors[h, other], dim=0))
                for k in range(4)
                for other in range(4)
                if with_itself or g != h or k != other
            ]
            assert float(found[g, h]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def slow_silhouette(vectors: torch.Tensor) -> list[list[float]]:
    """Eqs. of App. B.3, one distance at a time."""

    def distance(one, other):
        return 1 - float(cosine_similarity(one, other, dim=0))

    scores = []
    for g, group in enumerate(vectors):
        scores.append([])
        for k, one in enumerate(group):
            a = sum(distance(one, other) for place, other in enumerate(group) if place != k) / (len(group) - 1)
            b = min(sum(distance(one, x) for x in other) / len(other) for h, other in enumerate(vectors) if h != g)
            scores[-1].append((b - a) / max(a, b))
    return scores


def test_the_silhouette_is_that_of_the_definition():
    vectors = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    vectors += 2 * torch.eye(4, dtype=torch.float64)[:3, None]
    assert silhouette(vectors).tolist() == [pytest.approx(row, abs=1e-12) for row in slow_silhouette(vectors)]


def test_too_few_contexts_are_refused():
    refused("1 groups of 3 contexts", silhouette, torch.ones(1, 3, 2))
    refused("give at least 2", group_cosines, torch.ones(2, 1, 2), with_itself=False)


def test_the_network_is_a_gpt2_with_two_layers_of_one_head():
    net = network()
    assert (net.config.n_layer, net.config.n_head, net.config.n_embd) == (2, 1, 16)
    assert net.lm_head.weight is net.transformer.wte.weight
    same, other = network(), network(seed=1)
    assert torch.equal(same.lm_head.weight, net.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, net.lm_head.weight)


def test_finetuning_moves_embeddings_of_held_out_subjects_only_where_they_are_tied():
    seen, held_out = WORLD.split(8, seed=0)
    task = DemonstrationsTask(WORLD, n_demos=3, subjects=seen)
    stage = Stage(task, TrainConfig(4, lr=3e-3, weight_decay=0.0, log_every=2), batch_size=4)
    nets = {tied: small_gpt2(WORLD.d_vocab, 40, d_model=16, tied=tied) for tied in (True, False)}
    assert nets[False].config.tie_word_embeddings is False
    assert all(map(torch.equal, nets[True].transformer.parameters(), nets[False].transformer.parameters()))
    for tied, net in nets.items():
        before = net.transformer.wte.weight.detach().clone()
        assert torch.equal(before, net.lm_head.weight) == tied
        train_stage(net, stage)
        moved = (net.transformer.wte.weight - before).norm(dim=1)
        assert (moved[list(held_out)] > 0).all() == tied
        assert (moved[list(seen)] > 0).any()


@pytest.mark.parametrize(
    ("sizes", "message"), [({"d_model": 0}, "d_model is 0"), ({"d_model": 6, "n_heads": 4}, "4 heads do not divide")]
)
def test_impossible_networks_are_refused(sizes, message):
    refused(message, small_gpt2, 10, 10, **sizes)


def test_the_loss_is_the_mean_over_what_is_asked():
    net = network()
    cases: list[Any] = [(FACTS, "all"), (DemonstrationsTask(WORLD, 2, (1, 3)), "all"), (FACTS, "last")]
    for task, predict in cases:
        tokens, labels = task.batch(3, 6, predict)
        log_probs = net(tokens).logits.detach().log_softmax(-1)
        losses = [
            -float(log_probs[row, pos, label])
            for row, line in enumerate(labels.tolist())
            for pos, label in enumerate(line)
            if label != IGNORED
        ]
        assert next_token_loss(net, (tokens, labels)).item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_module_from_tokens_to_logits_trains_too():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.eye(WORLD.d_vocab), freeze=False)

        def forward(self, tokens):
            return self.table(tokens)

    net = Bigram()
    batch = FACTS.batch(0, 4)
    expected = nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())
    assert next_token_loss(net, batch).item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_stage_is_logged_and_resumes_to_the_bit(tmp_path):
    probes = {"pt": FACTS.sample(8), "icl": DemonstrationsTask(WORLD, 2).sample(8)}
    whole = train_stage(network(), STAGE, probes=probes, progress=False)
    assert [f"{name}.{match}" for name in probes for match in MATCHES] == list(whole.log.columns[4:])

    class Killed(Exception):
        pass

    calls = 0

    def killed(net: nn.Module, batch):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Killed
        return next_token_loss(net, batch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("align_circuits.papers.recall.models.training.next_token_loss", killed)
        train_stage(network(), STAGE, probes=probes, out=tmp_path, progress=False)
    resumed = train_stage(network(), STAGE, probes=probes, out=tmp_path, progress=False)
    assert whole.log.equals(resumed.log)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_stage_of_another_world_does_not_go_on_from_this_one(tmp_path):
    train_stage(network(), STAGE, out=tmp_path, progress=False)
    other = Stage(FactsTask(RecallWorld.small(world_seed=1), 2, 3), STAGE.train, STAGE.batch_size)
    refused("another", train_stage, network(), other, out=tmp_path, progress=False)


@pytest.mark.slow
def test_facts_are_learned():
    """A world of four subjects: the attribute due is right at the end, and was not before."""
    world = RecallWorld(4, (4, 2), 3, None, relation_tokens=True)
    task = FactsTask(world, n_facts=2, grammar_len=2, p_grammar=0.0)
    net, prompts = small_gpt2(world.d_vocab, 10, d_model=32), task.sample(64, seed=1)
    before = probe(net, prompts, world)["exact"].mean()
    train_stage(net, Stage(task, TrainConfig(600, lr=5e-3), 16), progress=False)
    assert before < 0.5
    assert probe(net, prompts, world)["exact"].mean() > 0.9


def test_the_probe_agrees_with_evaluate():
    net, prompts = network(), DemonstrationsTask(WORLD, 2).sample(16)
    train_stage(net, Stage(DemonstrationsTask(WORLD, 2), TrainConfig(30, lr=1e-2), 16), progress=False)
    quick = probe(net, prompts, WORLD)["exact"].mean()
    table = ac.evaluate(ac.load(copy.deepcopy(net)), prompts)
    slow = table.where(predictor="model", metric="accuracy", kind="all", offset=None).frame["value"].iloc[0]
    assert float(quick) == slow
    assert not math.isnan(slow)


def test_padded_prompts_are_for_evaluate():
    prompts = DemonstrationsTask(WORLD, 2, (1, 3)).sample(8)
    refused("these prompts are padded", probe, network(), prompts, WORLD)


def test_the_verbs_work_on_padded_prompts():
    model, prompts = ac.load(network()), DemonstrationsTask(WORLD, 2, (1, 3)).sample(6)
    fast, slow = (
        ac.evaluate(model, prompts, options=ac.RunOptions(engine=engine)).frame["value"]
        for engine in ("fast", "reference")
    )
    assert fast.to_numpy() == pytest.approx(slow.to_numpy(), abs=1e-5)
    assert set(ac.score_heads(model, prompts).frame["metric"]) >= set(prompts.relations)
    assert len(ac.ablate_heads(model, prompts).frame)


def learned():
    """A network that has seen a few demonstrations, as a TransformerLens model, and prompts of each type."""
    net = network()
    train_stage(net, Stage(DemonstrationsTask(WORLD, 2), TrainConfig(30, lr=1e-2), 16), progress=False)
    prompts = DemonstrationsTask(WORLD, 2).sample(60, seed=3)
    type_ = prompts.latent["type"][:, -1]
    return ac.load(net), prompts, [prompts[type_ == place] for place in range(3)], type_


def test_steering_is_what_a_hook_by_hand_does():
    model, prompts, groups, type_ = learned()
    vectors = task_vectors(model, groups, 1)
    other = (type_ + 1) % 3
    answers = {"own": prompts.column("token"), "other": torch.arange(60) % WORLD.d_vocab}
    table = steer(model, prompts, 1, vectors[type_], vectors[other], answers, betas=(0.0, 0.7))

    means = []
    for group in groups:
        _, cache = model.run_with_cache(group.tokens)
        means.append(cache["blocks.1.hook_attn_out"][:, -1].mean(0))
    for beta in (-1.0, 0.0, 0.7):

        def change(activation, hook, beta=beta):  # noqa: ARG001 - TransformerLens passes the hook point
            for row in range(len(activation)):
                one, two = means[type_[row]], means[other[row]]
                activation[row, -1] = (1 - beta) * one + beta * two
            return activation

        hooks = [] if beta == -1.0 else [("blocks.1.hook_attn_out", change)]
        with torch.no_grad():
            logits = model.run_with_hooks(prompts.tokens, fwd_hooks=hooks)[:, -1]
        for name, tokens in answers.items():
            ranks = [int((row > row[token]).sum()) for row, token in zip(logits, tokens.tolist(), strict=True)]
            found = table.where(beta=beta, answer=name, metric="rank").frame["value"].iloc[0]
            assert found == pytest.approx(sum(ranks) / 60, abs=0.05)
            log_probs = logits.log_softmax(-1).gather(1, tokens[:, None]).mean()
            found = table.where(beta=beta, answer=name, metric="log_prob").frame["value"].iloc[0]
            assert found == pytest.approx(float(log_probs), abs=1e-4)
    unsteered = table.where(beta=-1.0, answer="own", metric="log_prob").frame["value"].iloc[0]
    assert unsteered != pytest.approx(table.where(beta=0.0, answer="own", metric="log_prob").frame["value"].iloc[0])


def test_representations_are_those_of_the_last_token():
    model, prompts, _, _ = learned()
    name = "blocks.0.hook_attn_out"
    _, cache = model.run_with_cache(prompts.tokens)
    assert torch.allclose(representations(model, prompts, [name])[name], cache[name][:, -1], atol=1e-5)


def test_steering_without_answers_is_refused():
    model, prompts, groups, type_ = learned()
    vectors = task_vectors(model, groups, 1)[type_]
    refused("60 prompts, 0 answers", steer, model, prompts, 1, vectors, vectors, {})
    with pytest.raises(ValueError, match="a beta of -1, which in the table marks the model as it is"):
        steer(model, prompts, 1, vectors, vectors, {"own": prompts.column("token")}, betas=(0.5, -1.0))
