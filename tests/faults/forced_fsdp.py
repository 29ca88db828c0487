"""FSDP2 on the CPU, for tests: Accelerate 1.15 makes DDP of it there and says nothing
(reference/distributed.md A3).

As a script it runs another so:

    accelerate launch --config_file .. tests/faults/forced_fsdp.py train_operator.py --config ..
"""

import runpy
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

import ups.training.ranks

# What accelerate launch makes of accelerate_configs/fsdp.yaml
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


def accelerator(**options) -> Accelerator:
    """An Accelerator in the state that it has on GPUs; touches its private state, so only here."""
    made, plugin = Accelerator(**options), FullyShardedDataParallelPlugin()
    if made.mixed_precision != "no":
        plugin.set_mixed_precision(made.mixed_precision)
    made.state.fsdp_plugin, made.state.distributed_type = plugin, DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made


def force() -> None:
    """From here on runs of this process get FSDP2."""
    ups.training.ranks.Accelerator = accelerator


if __name__ == "__main__":
    force()
    torch.set_num_threads(1)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
