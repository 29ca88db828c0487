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

import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from ups.commands.stages import bench_rows, evaluated_operator, report_parents, report_record, why_report
from ups.common.files import explained, value_hash, write_sealed
from ups.common.progress import Bar, note
from ups.config.command import parse_arguments, run_script
from ups.config.load import to_dict
from ups.data.generate import num_cores
from ups.evaluation import gates, parts
from ups.forecaster import Forecaster
from ups.report import model_card, report, sections
from ups.results import Results
from ups.select import Decision
from ups.training.artifact import DONE, stage_config
from ups.training.environment import describe_environment
from ups_solvers.processes import worker_pool

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
    settings, directory = config.evaluate, config.report_dir
    parents, trained, folder = report_parents(config), evaluated_operator(config), config.operator_dir
    # stages whose samples are assessed
    stages = [name for name in config.reported_stages if name in parents and name != "operator"]
    if not why_report(config, parents):
        print(f"{directory / 'report.html'} is up to date: nothing to do")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = parts.Inputs(config, stages, device)
    (directory / DONE).unlink(missing_ok=True)
    corrected, conditioned = (
        config.reported_stages[name] if name in stages else [] for name in ("diffusion", "steady")
    )
    wanted = [  # the longest first
        *[("ensembles", name) for name in corrected],
        *[("steady", name) for name in conditioned],
        *[("long", name) for name in corrected],
        *[("tasks", name) for name in config.evaluated],
    ]
    bar = Bar(  # of parts of unequal length
        "report", len(wanted) + 1, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    )
    # section -> task, in the order of the configuration -> its entry; and what the report shows of it
    found: dict[str, dict[str, Any]] = {section: {} for section in parts.PARTS}
    shown: dict[str, dict[str, Any]] = {section: {} for section in parts.PARTS}
    for section, name in wanted:
        found[section][name] = None
    with parts.workers(inputs, worker_pool, num_cores()) as workers:
        # ---- parts
        for (section, name), (entry, sample, words) in workers.compute(wanted):
            found[section][name], shown[section][name] = entry, sample
            finish(bar, *words)
        for name, entry in found["ensembles"].items():
            entry.numbers |= found["long"][name].numbers
        beyond = ", ".join(stages) or "none, so the report is on the operator alone"
        bar.write(f"stages beyond the operator: {beyond}", file=sys.stdout)

        # ---- report
        note("figures")
        folders = {"operator": folder, **{stage: config.run_dir / stage for stage in stages}}
        decided = sections.decisions_of(folders, config.run_dir, corrected)
        facts = facts_of(inputs, trained, decided)
        results = Results(facts, found["tasks"], found["ensembles"], found["steady"])
        for name, rows in bench_rows(config, trained["parents"]).items():
            for model, row in rows.items():
                results.tasks[name].add(model, row)
        facts["gates"] = gates.check_gates(results, settings)
        facts["usability"] = gates.check_usability(results)
        extra = {"trust": partial(sections.trust_section, results.tasks)}
        for name, entry in results.ensembles.items():
            extra[f"{name}: ensembles"] = partial(sections.ensemble_section, entry, shown["ensembles"][name])
        for name, entry in results.steady.items():
            title = f"{name}: prior of partly observed coefficients"
            extra[title] = partial(sections.steady_section, entry, shown["steady"][name])
        extra["decisions"] = partial(sections.decisions_section, decided)
        with explained(directory, REPORT_BYTES, "run.root"):
            results.save(directory)
            path = directory / "report.html"
            report.write_report(results, shown["tasks"], inputs.history, path, extra, workers.call)
            if settings.split == "test" and not settings.weights:
                known = Forecaster(inputs.operator).tasks
                model_card.write_cards(config.run_dir, results, known, directory / "figures")

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


def facts_of(inputs: parts.Inputs, trained: dict[str, Any], decided: list[Decision]) -> dict[str, Any]:
    """What the report says of the run. trained: the record of the operator stage."""
    config = inputs.config
    described = stage_config(config.operator_dir, trained)
    return {
        "run": config.run.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_hash": value_hash(to_dict(config)),
        "environment": describe_environment(1, inputs.device),
        "protocol": {
            "split": config.evaluate.split,
            "context_frames": config.evaluate.context_frames,
            "seed": config.run.seed,
            "bootstrap": config.evaluate.num_bootstrap,
        },
        "decisions": [one.described() for one in decided],
        "stages": config.reported_stages,
        "training": {
            "steps": trained["step"],
            "parameters": sum(p.numel() for p in inputs.operator.parameters()),
            "precision": inputs.operator.precision,
            "seconds": parts.train_seconds(inputs.history),
            "source": described["data"]["source"],
            "data_seed": described["data"]["seed"],
            "seed": described["run"]["seed"],
            "init": described["operator"]["init"],
            **{key: described["operator"]["optim"][key] for key in ("muon_lr", "adamw_lr")},
        },
    }


if __name__ == "__main__":
    run_script(main, "evaluate.py")
