"""Backbone, base predictors, operator, rollouts."""
