"""Scores of a steady prior, mean over kinds of observation, with intervals over fields."""

from typing import Any

import torch
from torch import Tensor

from ups.metrics.ensembles import LEVELS, coverage
from ups.metrics.intervals import Scores, bootstrap, entry, halves, plain_mean
from ups.metrics.joint import decades

POOLED = ("crps", "energy_score")
RATIOS = ("variogram_space", "nearest")


def pool(
    scores: dict[str, dict[str, Scores]],
    cases: list[str],
    other: str,
    num_bootstrap: int,
    seed: int,
    groups: Tensor,
) -> dict[str, Any]:
    """Score of the prior over that of `other`, mean over cases: ratios first, so that all cases weigh the
    same."""
    parts = {
        name: [
            scores[case][model][name].flatten(1).mean(1) for model in ("corrector", other) for case in cases
        ]
        for name in POOLED
    }
    return {
        name: entry(
            bootstrap(torch.stack(part, 1), lambda mean: halves(mean).mean(1), num_bootstrap, seed, groups)
        )
        for name, part in parts.items()
    }


def pool_spread(scores: list[Scores], num_bootstrap: int, seed: int, groups: Tensor) -> dict[str, Any]:
    """Spread/skill, mean over cases."""
    members = scores[0]["ranks"].shape[2] - 1
    parts = [part[key].flatten(1).mean(1) for key in ("variance", "squared_error") for part in scores]
    return entry(
        bootstrap(
            torch.stack(parts, 1),
            lambda mean: ((members + 1) / members * halves(mean)).sqrt().mean(1),
            num_bootstrap,
            seed,
            groups,
        )
    )


def pool_checks(
    scores: list[Scores], against: list[list[dict[str, float]]], num_bootstrap: int, seed: int, groups: Tensor
) -> dict[str, Any]:
    """Calibration of a prior, mean over cases: coverage, structure, and if the exact posterior is known
    (against: `moments_against` of every case and field) variance and independence."""

    def ratio(pairs: list[tuple[Tensor, Tensor]], which: Tensor | None) -> dict[str, Any]:
        both = torch.stack([part for side in zip(*pairs, strict=True) for part in side], 1)
        return entry(bootstrap(both, lambda mean: halves(mean).mean(1), num_bootstrap, seed, which))

    out = {
        name: ratio(
            [
                tuple(part[name].flatten(2).mean(2).unbind(1))
                if part[name].ndim > 2
                else tuple(part[name].unbind(1))
                for part in scores
            ],
            groups,
        )
        for name in RATIOS
    }
    energies, gaps = zip(*(decades(part["energy"]) for part in scores), strict=True)
    out["spectrum"] = entry(
        bootstrap(
            torch.cat(energies, 1),
            lambda mean: torch.stack(
                [gap(part) for gap, part in zip(gaps, mean.chunk(len(gaps), 1), strict=True)]
            ).mean(0),
            num_bootstrap,
            seed,
            groups,
        )
    )
    ranks = torch.stack([part["ranks"].sum(1) for part in scores], 1)
    out |= {
        f"coverage_{100 * level:.0f}": entry(
            bootstrap(
                ranks.sum(1), lambda mean, level=level: coverage(mean, level), num_bootstrap, seed, groups
            )
        )
        for level in LEVELS
    }
    for name, key in (("variance", "log_trace"), ("independence", "mean_error")):
        if against:
            out[name] = ratio(
                [
                    tuple(
                        torch.tensor([row[end] for row in rows], dtype=torch.float64)
                        for end in (key, f"{key}_exact")
                    )
                    for rows in against
                ],
                None,
            )
    return out


def summarise_exact(
    rows: list[dict[str, float]], splits: Tensor, num_bootstrap: int, seed: int
) -> dict[str, Any]:
    """Rows of `moments_against`, one per field, as figures with intervals over fields. floor: the 95 %
    quantile of the distance between exact samples."""
    values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    moments = {
        "distance": plain_mean(values["distance"][:, None]),
        **{
            key: (torch.stack([values[key], values[f"{key}_exact"]], 1), lambda mean: halves(mean)[:, 0])
            for key in ("trace", "log_trace", "leading")
        },
    }
    return {
        "fields": len(rows),
        "floor": float(torch.quantile(splits, 0.95)),
        **{key: entry(bootstrap(*part, num_bootstrap, seed)) for key, part in moments.items()},
    }
