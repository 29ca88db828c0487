"""What bench/apebench.py runs in APEBench's own environment (JAX): make data, train its networks.

    python apebench_jax.py data REQUEST.json OUT.npz    # train, test: (trajectory, time, channel, *space)
    python apebench_jax.py train REQUEST.json OUT.npz   # errors (200,) of the rollout from test[:, 0]

REQUEST has the scenario, its settings, network, seed, and steps or seconds. A training of some seconds
takes as many steps as a short run shows to fit; the learning rate rises over the first fifth and then falls,
as in APEBench's 10,000 steps. Compilation is not charged. The network, loss, batches, optimizer and metric
are APEBench's.
"""

import json
import sys
import time

import apebench
import equinox as eqx
import exponax as ex
import jax
import numpy as np
import trainax as tx

WARM, TIMED = 5, 40  # steps of the short run: not timed, timed


def scenario_of(request: dict, steps: int = 10_000):
    """Return the scenario with `steps` updates of its optimizer."""
    optimizer = f"adam;{steps};warmup_cosine;0.0;1e-3;{max(1, steps // 5)}"
    return apebench.scenarios.scenario_dict[request["scenario"]](
        optim_config=optimizer, **request["settings"]
    )


def data(request: dict) -> dict[str, np.ndarray]:
    scenario = scenario_of(request)
    return {"train": np.asarray(scenario.get_train_data()), "test": np.asarray(scenario.get_test_data())}


def fit(request: dict, train: np.ndarray, steps: int) -> tuple[eqx.Module, float, int]:
    """Return the trained stepper, processor seconds without compilation, and the number of weights. The
    trainer and keys are those of `BaseScenario.get_trainer` (one) and `run_raw`.
    """
    scenario, marks = scenario_of(request, steps), []
    init_key, shuffle_key = jax.random.split(jax.random.PRNGKey(request["seed"]), 2)
    stepper = scenario.get_network(request["network"], init_key)
    weights = sum(part.size for part in jax.tree.leaves(eqx.filter(stepper, eqx.is_inexact_array)))

    def mark(update: int, model: eqx.Module, batch: jax.Array) -> None:
        if update == WARM:
            jax.block_until_ready(eqx.filter(model, eqx.is_array))
            marks.append(time.process_time())

    trainer = tx.trainer.SupervisedTrainer(
        train,
        optimizer=scenario.get_optimizer(),
        num_training_steps=steps,
        batch_size=scenario.batch_size,
        num_rollout_steps=1,
        callback_fn=mark,
    )
    stepper, *_ = trainer(stepper, shuffle_key, record_loss_every=100, spawn_tqdm=False)
    jax.block_until_ready(eqx.filter(stepper, eqx.is_array))
    return stepper, (time.process_time() - marks[0]) * steps / (steps - WARM), weights


def train(request: dict) -> dict[str, np.ndarray]:
    stored = np.load(request["data"])
    frames, test, steps = jax.numpy.asarray(stored["train"]), stored["test"], request["steps"]
    if not steps:
        _, seconds, _ = fit(request, frames, WARM + TIMED)
        steps = max(2 * WARM, int(request["seconds"] * (WARM + TIMED) / seconds))
    stepper, seconds, weights = fit(request, frames, steps)
    rollout = jax.vmap(ex.rollout(stepper, test.shape[1] - 1))(test[:, 0])
    errors = scenario_of(request).perform_tests_on_rollout(rollout, test[:, 1:])["mean_nRMSE"][0]
    return {
        "errors": np.asarray(errors),
        "rollout": np.asarray(rollout),
        "steps": steps,
        "seconds": seconds,
        "num_parameters": weights,
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    command, request, out = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        np.savez(out, **{"data": data, "train": train}[command](json.load(file)))
