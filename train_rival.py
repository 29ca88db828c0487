"""Rival of the student: the same network, trained by scores alone, without a teacher's draws, to compare.

    loss = CRPS + energy score of a few one-evaluation draws against what the operator left
    it starts as the corrector

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/rival/: state/, metrics.jsonl, model.safetensors, done.json. Shown in a report whose
evaluate.stages (make: STAGES) name it.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_rival.py --config configs/small.yaml
    python train_rival.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): CRPS and energy score some 3 % above the student's at equal time; the report
compares the draws.
"""

from functools import partial

from ups.data.schedule import Batch
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.residuals import Residuals, TransientResiduals, schedule_of
from ups.generative.student import held_out_of, metrics_of, score_noise, scores, twin_of, validate, words_of
from ups.models.operator import load_operator
from ups.seeds import generator
from ups.setup import opened, started
from ups.training.ranks import main_guard

STAGE = "rival"


def loss_of(network: Corrector, source: Residuals, batch: Batch, size: int, num_members: int, seed: int,
            step: int, part: slice) -> tuple:
    """Loss and metrics of the rows `part` of this rank's share `batch` of a global batch of `size` rows."""
    r, condition = network.shown(batch.task, source.draw(
        "reserved", batch.rows[part], batch.starts[part], generator(seed, STAGE, "augment", step),
        is_disturbed=True))
    noise = score_noise(r, batch.within(part), size, num_members, seed, step)
    score = scores(network, source, condition, r, noise).mean()
    return score, {f"{batch.task}/score": score}


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = opened(__doc__, STAGE)
    run = started(config, STAGE, caches)
    section, seed = config.rival, config.run.seed
    train, size = section.train, section.train.batch_size

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}
    schedule = schedule_of(residuals, "reserved", size, seed + 3)
    corrector = load_corrector(config.run_dir / "diffusion", run.device)
    held_out = held_out_of(corrector, residuals, train.validate_trajectories, seed, run.ranks)

    # ---- model: starts as the corrector
    run.seed_all()
    network = run.attach(twin_of(corrector))

    def loss_at(step: int) -> tuple[partial, int]:
        batch = schedule.batch(step).share(run.rank, run.world)
        source = residuals[batch.task]
        return partial(loss_of, network, source, batch, size, section.members, seed, step), len(batch)

    run.probe(*loss_at(schedule.step_of_largest({name: cache.frame_bytes for name, cache in caches.items()})))

    # ---- loop
    for step in run.steps():
        run.update(*loss_at(step))
        if run.is_due(train.validate_every):
            with run.ema_weights():
                found = validate(network, residuals, held_out, run.ranks)
            score = sum(entry["crps"] + entry["energy"] for entry in found.values())
            run.validated({"score": score, **metrics_of(found)})
            run.keep_best(score)
            run.print(f"step {run.step}: {words_of(found)}")

    # ---- finish
    run.take_best()
    run.finish({"validation": validate(network, residuals, held_out, run.ranks)}, network.description)


if __name__ == "__main__":
    main()
