"""Why `localize` names no head for `same_type` in some attention-only models of `recall/heads` (scale `cpu`).

Trains those with relative positions in which none was named though a head attends to attributes of the type, and prints
where the head with most of it attends, on average over prompts, and which test it failed. Two minutes on one core:

    python benchmarks/recall_unnamed.py
"""

from dataclasses import replace

from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.names import name_of
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import CPU_EIGHT_TYPES
from align_circuits.papers.recall.models.training import FINETUNING, Stage, train_stage
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.run.forward_pass import capture

SEEDS = (1, 10, 11)
ROLE = "same_type"

if __name__ == "__main__":
    setup, every = CPU_EIGHT_TYPES, {"log_every": 10**6, "checkpoint_every": 10**6}
    world = setup.world()
    for seed in SEEDS:  # as `measure_heads` trains them
        seen, held_out = world.split(setup.n_seen, seed=seed)
        learned = DemonstrationsTask(world, setup.n_demos, subjects=seen)
        model, tested = setup.model(seed), replace(learned, query_subjects=held_out)
        finetuning = setup.schedule(FINETUNING, setup.finetuning, **every)
        stages = (
            Stage(setup.facts(world), setup.schedule_of_pretraining(**every), setup.batch_size),
            Stage(learned, finetuning, setup.batch_size, "last"),
        )
        for stage in stages:
            train_stage(model, stage, seed=seed, progress=False)
        prompts, site = tested.sample(64, seed=1), name_of("pattern", 0)
        relation = prompts.relations[ROLE]
        head = int(score_heads(model, prompts, [f"{ROLE}_attention"]).to_array(f"{ROLE}_attention")[0].argmax())
        attention = capture(model, prompts, [site])[site][relation.prompt, head, relation.query].mean(0)
        failed = [unnamed.why for unnamed in localize(model, tested, n=64).unnamed if unnamed.head == (0, head)]
        at_keys = {key: round(float(attention[key]), 2) for key in relation.keys_of(0)}
        print(f"seed {seed}, head {head}: attention at the attributes {at_keys}; {'; '.join(failed)}")
