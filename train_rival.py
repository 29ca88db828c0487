"""Rival of the student: the same network, trained by scores alone, without a teacher's draws, to compare.

    loss = CRPS + energy score of a few one-evaluation draws against what the operator left
    it starts as the corrector or, fresh, from what of it is linear in a draw

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/rival/: state/, metrics.jsonl, model.safetensors, done.json. Shown in a report whose
evaluate.stages (make: STAGES) name it.

    accelerate launch train_rival.py
    python train_rival.py --dry-run

Expected (configs/small.yaml): CRPS and energy score some 3 % above the student's at equal time; the report
compares the draws.
"""

from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.draws import ways_of
from ups.generative.judge import judge
from ups.generative.residuals import Batches, TransientResiduals, held_out_of
from ups.generative.student import (
    ends_of,
    fresh_of,
    metrics_of,
    score_noise,
    scores,
    twin_of,
    validate,
    words_of,
)
from ups.models.operator import load_operator
from ups.training.ending import main_guard

STAGE = "rival"


def loss_of(network: Corrector, batches: Batches, num_members: int, step: int, part: slice) -> tuple:
    """Loss and metrics of the rows `part` of this rank's share of a batch."""
    r, condition, within = batches.shown(network, step, part)
    noise = score_noise(r, within, batches.size, num_members, batches.seed, step)
    score = scores(network, batches.residuals[condition.name], condition, r, noise).mean()
    return score, {f"{condition.name}/score": score}


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, seed = config.rival, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}
    batches = Batches(residuals, section.train.batch_size, seed, STAGE, run.ranks, offset=3)
    corrector = load_corrector(config.run_dir / "diffusion", run.device, operator)
    held_out = held_out_of(
        residuals, seed, section.train.validate_trajectories, run.ranks, partial(ends_of, corrector, seed)
    )

    # ---- model
    run.seed_all()
    start = {"corrector": twin_of, "fresh": fresh_of}[section.start]
    network = run.attach(warm_start(run, start(corrector), config))
    run.probe(partial(loss_of, network, batches, section.members, batches.largest), batches.share)

    # ---- loop
    for step in run.steps():
        run.update(
            partial(loss_of, network, batches, section.members, step),
            batches.share,
            only=batches.schedule.task(step),
        )
        if run.is_due(section.train.validate_every):
            with run.ema_weights():
                found = validate(network, residuals, held_out, run.ranks)
            score = sum(entry["crps"] + entry["energy"] for entry in found.values())
            run.validated({"score": score, **metrics_of(found)}, words_of(found))
            run.keep_best(score)

    # ---- finish
    run.take_best()
    contexts = {name: config.context(name) for name in caches}
    judged = judge(ways_of(STAGE, network), residuals, contexts, seed, run.ranks)
    run.finish(
        {"validation": validate(network, residuals, held_out, run.ranks)}, network.description | judged
    )


if __name__ == "__main__":
    main()
