"""Numbers only: forecasts, ensembles, gates."""
