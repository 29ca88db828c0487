"""Boundary conditions by name: one for all axes, or one per axis joined by commas, such as "periodic,no_flux"
for a channel."""

PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW = BOUNDARIES = ("periodic", "no_flux", "dirichlet", "outflow")


def along(boundary: str, ndim: int) -> tuple[str, ...]:
    """The boundary of each of `ndim` axes."""
    names = tuple(boundary.split(","))
    assert len(names) in (1, ndim), (boundary, ndim)
    return names * ndim if len(names) == 1 else names
