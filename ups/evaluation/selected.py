"""The selection on validation between network and base alone, in words with the numbers that decided it: the
record of `ups.select.select_network`, stored with the weights and in results.json."""

from collections.abc import Mapping
from typing import Any

from ups.common.text import number

Selection = Mapping[str, Any]

SENTENCES = {
    "network": "The network serves: on validation it is better than its base alone ({numbers}).",
    "base": "The network is not used: on validation the base alone is better ({numbers}).",
    "tie": "The network is not used: validation finds no clear difference from the base alone ({numbers}).",
    "broken": "The network is not used: its validation error is not finite ({numbers}).",
    "unknown": "The network is not used; the weights hold no record of the validation that decided it.",
}
METRICS = ("nrmse", "nrmse_pooled")  # whose ratios decide, unless the record names one
DIGITS = range(3, 7)  # at most the six of the record


def outcome(selection: Selection | None) -> str:
    """network | base | tie | broken | unknown: the better of network and base on validation.

    base: its error is lower and both intervals of the ratio are above 1. broken: the network's error is not
    finite. unknown: there is no record.
    """
    if not selection:
        return "unknown"
    if selection["network_weight"] > 0:
        return "network"
    if selection["network"] is None:
        return "broken"
    lows = [selection[metric]["low"] for metric in metrics_of(selection)]
    is_lower = selection["base"] is not None and selection["base"] < selection["network"]
    return "base" if is_lower and None not in lows and min(lows) > 1 else "tie"


def metrics_of(selection: Selection) -> tuple[str, ...]:
    return (selection["decided_by"],) if "decided_by" in selection else METRICS


def in_words(selection: Selection | None) -> str:
    """A sentence that says which of the two is used, with the numbers."""
    if not selection:
        return SENTENCES["unknown"]
    return SENTENCES[outcome(selection)].format(numbers=numbers_in_words(selection))


def numbers_in_words(selection: Selection) -> str:
    """Both errors, the interval of their ratio (the hull of the metrics'), and the numbers of initial
    conditions and leads."""
    network, base = _apart(selection["network"], selection["base"])
    words = [f"nRMSE {network} with it, {base} by the base alone"]
    lows, highs = ([selection[metric][end] for metric in metrics_of(selection)] for end in ("low", "high"))
    count, leads, compared = (
        selection[key] for key in ("num_initial_conditions", "num_leads", "num_leads_compared")
    )
    if count > 1 and None not in (*lows, *highs):
        low, _, high = _apart(min(lows), 1.0, max(highs))
        words.append(f"95 % interval of the ratio {low} to {high}")
    words.append(f"{count} initial condition{'s' * (count != 1)}")
    if compared < leads:
        words.append(f"at {compared} of {leads} leads, as both have lost the truth at the others")
    return "; ".join(words)


def _apart(*values: float | None) -> list[str]:
    """The numbers with as few digits as distinguish them, at least three."""
    texts: list[str] = []
    for digits in DIGITS:
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts
