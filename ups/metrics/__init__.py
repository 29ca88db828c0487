"""Errors of forecasts and of ensembles: pure functions."""
