"""Report: rollouts of the test split by the finished operator and its baselines, scored against the data
files. For tuning, evaluate.split=val makes a separate report on the validation split.

Reads:  data files, cache/TASK.h5, RUN/operator/, and the other stages in evaluate.stages; or another run's
        weights (evaluate.weights).
Writes: RUN/report/ (report-val/): results.csv and .json, report.html, figures/, done.json; and a model card,
        README.md, beside the weights of every stage. If a gate fails: exit status 1, the reasons, and no
        done.json.

    python evaluate.py
    python evaluate.py evaluate.split=val "evaluate.tasks=[burgers1d_forced]"
    python evaluate.py --dry-run

Expected (configs/small.yaml): the numbers are in the README.
"""

import json
import sys
import time
from datetime import UTC, datetime

import torch

from ups.commands.stages import bench_rows, evaluated_operator, report_parents, report_record, why_report
from ups.common.files import explained, value_hash, write_sealed
from ups.common.place import TRANSIENT
from ups.common.progress import Bar, note
from ups.common.user_solver import solvers_of
from ups.config.command import parse_arguments, run_script
from ups.config.load import to_dict
from ups.evaluation import break_even, ensemble, forecast, gates, steady, transient, truth
from ups.evaluation.break_even import train_seconds
from ups.forecaster import Forecaster
from ups.generative import validation
from ups.generative.corrector import load_corrector
from ups.generative.residuals import SteadyResiduals, TransientResiduals
from ups.models.operator import load_operator
from ups.report import model_card, report, sections
from ups.results import Entry, Results
from ups.training.artifact import DONE, stage_config
from ups.training.environment import describe_environment

REPORT_BYTES = 20 * 2**20  # more than the page and figures of any configuration here


def main() -> int:
    # ---- config
    config, is_dry_run = parse_arguments(__doc__)
    if is_dry_run:
        from ups.commands.dry_run import print_report_plan
        from ups.data.counts import print_refusals

        print_report_plan(config)
        return print_refusals(config, config.evaluated)

    # ---- setup
    settings, seed, directory = config.evaluate, config.run.seed, config.report_dir
    parents, trained, folder = report_parents(config), evaluated_operator(config), config.operator_dir
    # stages whose samples are assessed
    stages = [name for name in config.reported_stages if name in parents and name != "operator"]
    if not why_report(config, parents):
        print(f"{directory / 'report.html'} is up to date: nothing to do")
        return 0
    truths = {name: truth.open_truth(config, name) for name in config.evaluated}
    (directory / DONE).unlink(missing_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operator = load_operator(folder, device, solvers_of(config))
    trained_config = stage_config(folder, trained)

    corrected, conditioned = (
        config.reported_stages[name] if name in stages else [] for name in ("diffusion", "steady")
    )
    num_parts = 2 * len(truths) + len(corrected) + len(conditioned) + 1  # of unequal length
    bar = Bar("report", num_parts, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]")

    # ---- forecasts
    tasks, samples, others = {}, {}, bench_rows(config, trained["parents"])
    for name, known in truths.items():
        note(f"forecasts of {name}")
        started = time.perf_counter()
        tasks[name], samples[name] = forecast.assess_forecasts(operator, known, settings, seed, device)
        for model, row in others[name].items():
            tasks[name].add(model, row)
        finish(bar, f"{name}: {in_words(tasks[name])}, in {time.perf_counter() - started:.1f} s")

    # ---- break-even
    log = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    history = [json.loads(line) for line in log.splitlines()]
    for name, known in truths.items():
        note(f"{name}: time of its solver")
        entry = tasks[name]
        break_even.assess_break_even(entry, operator, known, config, folder, train_seconds(history))
        finish(bar, f"{name}: {entry.facts['break_even']['words']}")

    # ---- ensembles
    ensembles, priors, shown = {}, {}, {}
    if corrected:
        networks = [name for name in stages if name in TRANSIENT]
        samplers = ensemble.load_samplers(config.run_dir, networks, device, operator)
        for name in corrected:
            residuals = TransientResiduals(operator, truths[name].cache)
            serves = validation.default_sampler(config.run_dir, name)
            serves = "starts" if residuals.head.is_deterministic else serves
            ensembles[name], shown[name] = transient.assess_transient(
                ensemble.Ensembles(residuals, truths[name], samplers, seed), settings, serves
            )
            words = ensembles[name].facts["words"]
            words.append(validation.describe(config.run_dir, name))
            finish(bar, *words)
    if conditioned:
        prior = load_corrector(config.run_dir / "steady", device, operator)
        for name in conditioned:
            residuals = SteadyResiduals(operator, truths[name].cache, prior.heads[name].guess)
            priors[name], shown[name] = steady.assess_steady(residuals, prior, truths[name], settings, seed)
            finish(bar, *priors[name].facts["words"])
    beyond = ", ".join(stages) or "none, so the report is on the operator alone"
    bar.write(f"stages beyond the operator: {beyond}", file=sys.stdout)

    # ---- report
    folders = {"operator": folder, **{stage: config.run_dir / stage for stage in stages}}
    decided = sections.decisions_of(folders, config.run_dir, ensembles)
    facts = {
        "run": config.run.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_hash": value_hash(to_dict(config)),
        "environment": describe_environment(1, device),
        "protocol": {
            "split": settings.split,
            "context_frames": settings.context_frames,
            "seed": seed,
            "legacy": settings.legacy,
            "bootstrap": settings.num_bootstrap,
        },
        "decisions": [one.described() for one in decided],
        "stages": config.reported_stages,
        "training": {
            "steps": trained["step"],
            "parameters": sum(p.numel() for p in operator.parameters()),
            "precision": operator.precision,
            "seconds": train_seconds(history),
            "source": trained_config["data"]["source"],
            "data_seed": trained_config["data"]["seed"],
            "seed": trained_config["run"]["seed"],
            "init": trained_config["operator"]["init"],
            **{key: trained_config["operator"]["optim"][key] for key in ("muon_lr", "adamw_lr")},
        },
    }
    results = Results(facts, tasks, ensembles, priors)
    facts |= {"gates": gates.check_gates(results, settings), "usability": gates.check_usability(results)}
    note("figures")
    extra = {"break-even": sections.break_even_section(results.tasks)}
    for name, entry in results.ensembles.items():
        extra[f"{name}: ensembles"] = sections.ensemble_section(entry, shown[name])
    for name, entry in results.steady.items():
        title = f"{name}: prior of partly observed coefficients"
        extra[title] = sections.steady_section(entry, shown[name])
    extra["decisions"] = sections.decisions_section(decided)
    with explained(directory, REPORT_BYTES, "run.root"):
        results.save(directory)
        report.write_report(results, samples, history, directory / "report.html", extra)
        if settings.split == "test" and not settings.weights:
            model_card.write_cards(config.run_dir, results, Forecaster(operator).tasks, directory / "figures")

    # ---- finish
    finish(bar)
    bar.close()
    print(*[f"{name}: {entry['words']}" for name, entry in facts["usability"].items()], sep="\n")
    failed, undecided = gates.not_passed(facts["gates"])
    for gate in (*failed, *undecided):
        print(f"GATE {gates.outcome(gate)} {gate['name']}: {gate['reason']}", file=sys.stderr)
    passed = len(facts["gates"]) - len(failed) - len(undecided)
    print(
        f"{directory / 'report.html'}: {passed} of {len(facts['gates'])} gates passed"
        + f", {len(undecided)} undecided" * bool(undecided)
    )
    if failed:
        return 1
    write_sealed(directory / DONE, report_record(config, parents))
    return 0


def finish(bar: Bar, *lines: str) -> None:
    """Print lines above the bar, and count a part as done."""
    bar.write("\n".join(lines), file=sys.stdout, end="\n" * bool(lines))
    sys.stdout.flush()
    bar.update()


def in_words(task: Entry) -> str:
    """The operator's error on a task, with the horizon of the forecasts."""
    error = task.value("operator", gates.error_of(task))
    relative = f", relative to the {task.facts.get('measure')}," * bool(task.facts.get("offset"))
    return (
        f"nRMSE {error['value']:.2e} [{error['low']:.2e}, {error['high']:.2e}]{relative} over "
        f"{task.number('', 'num_trajectories')} trajectories{gates.horizon_of(task.facts)}"
    )


if __name__ == "__main__":
    run_script(main, "evaluate.py")
