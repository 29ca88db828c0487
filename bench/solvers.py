"""How fast the solvers are: seconds for a given number of trajectories, as `make data` runs them (a process
per core).

python -m bench.solvers   # 1000 Burgers trajectories, 1024 points, 201 frames
python -m bench.solvers --task diff_react2d --trajectories 50 --resolution 128 --frames 101
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ups.config import ROOT
from ups.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task",
        default="burgers1d",
        choices=[name for name, task in TASKS.items() if task.simulate and not task.of],
    )
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--frames", type=int, default=201)
    parser.add_argument("--parameter", type=float, default=0.01)
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"data.root={folder}",
            f"data.tasks=[{task.name}]",
            f"task.{task.name}.resolution={arguments.resolution}",
            f"task.{task.name}.num_trajectories={arguments.trajectories}",
            f"task.{task.name}.t_end={task.t_end}",
            f"task.{task.name}.num_frames={1 if task.is_steady else arguments.frames}",
            f"task.{task.name}.time_stride=1",
        ]
        if task.parameters:
            overrides.append(f"task.{task.name}.parameters=[{arguments.parameter}]")
        start = time.perf_counter()
        subprocess.run([sys.executable, "prepare_data.py", *overrides], cwd=ROOT, check=True)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(
        f"{task.name}: {arguments.trajectories} trajectories, {arguments.resolution} cells per axis, "
        f"{arguments.frames} frames, {size / 2**20:.0f} MiB: "
        f"{seconds:.1f} s on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
