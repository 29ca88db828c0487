"""Supervision of a training script: restarts after a death or a hang, and a guard in each rank.

    python -m ups_launch --config_file accelerate_configs/cpu2.yaml train_operator.py --config ...

Optional: the same script runs under plain `accelerate launch`. It imports no ups, so that it can start any
script. A script that wants to be restarted sends events (`send_event`): "open" with the directory of its
heartbeats, "saved" with the step of each checkpoint, and at its end "finished", "stopped" after a signal, or
"failed" with its kind, exit code and cause. `Guard` watches its ranks.
"""

from ups_launch.guard import Guard
from ups_launch.processes import send_event

__all__ = ["Guard", "send_event"]
