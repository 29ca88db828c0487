"""What a field does at the ends of its domain, by name."""

PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW = "periodic", "no_flux", "dirichlet", "outflow"
