"""Forecasts, ensembles, assessment, figures, report, leaderboard."""
