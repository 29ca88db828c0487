"""Reaction-diffusion u_t = nu u_xx + rho u (1 - u) on [0, 1), periodic (Fisher-KPP). No solver here yet."""

from collections.abc import Iterator
from typing import Any

from ups.boundary import PERIODIC
from ups.lazy import np
from ups.tasks.task import Array, Finding, Task

STILL = 1e-3   # a mean that moves less, where a reaction should move it, stays
FROZEN = 0.5   # published files stay equal to 4 digits for 90 % of their frames (PDEBench issue 94)


def reacts(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the field moves, and its mean, as a reaction moves it; in the published files it does not."""
    if scan.frozen_share > FROZEN:
        yield Finding("warning", f"{scan.frozen_share:.0%} of the frames equal the one before: the reaction "
                                 "is missing, as in the published files (PDEBench issue 94)", str(data.path),
                      data.task.remedy)
    if scan.drift and (median := float(np.median(scan.drift))) < STILL:
        yield Finding("warning", f"the mean of a trajectory stays (it moves by {median:.1g} of its RMS), and "
                                 "a reaction moves it: as in the published files (PDEBench issue 94), or "
                                 "another equation, such as burgers1d",
                      str(data.path),
                      f"name the right task in data.tasks; if it is the right one, {data.task.remedy}")


FAMILY = (Task(
    "reacdiff1d", ("u",), 1, PERIODIC, "arrays", (Array("tensor"),), "ReacDiff_Nu{}_Rho1.0.hdf5",
    ("Nu", "rho"),
    equation="∂u/∂t = Nu ∂²u/∂x² + rho u (1 - u)", constants=(("rho", 1.0),), t_end=1.0, resolution=1024,
    checks=(reacts,),
    published={
        "ReacDiff_Nu0.5_Rho1.0.hdf5": (133177, "69a429239778d529cd419ed5888ea835"),
        "ReacDiff_Nu1.0_Rho1.0.hdf5": (133181, "bd73c2f3448d03e95e98c3831fc8fa70"),
        "ReacDiff_Nu2.0_Rho1.0.hdf5": (133185, "925a7e2c9b9e40ad2dd44b7002ec882b"),
        "ReacDiff_Nu5.0_Rho1.0.hdf5": (133189, "0ed75b55f61bec11c47d379e34959e54"),
    },
),)
