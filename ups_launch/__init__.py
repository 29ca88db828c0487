"""Supervision of a training script: restarts after a death or hang, a guard in each rank."""
