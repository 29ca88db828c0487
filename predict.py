"""Predict: the forecast of every field in a file (ups/commands/predict.py; `ups forecast` is the same).

python predict.py --run runs/small --task burgers1d --input my.h5 --output out.h5 --frames 30
"""

import signal
import sys

from ups.commands.predict import main
from ups.config.command import run_script

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that main cleans up
    run_script(main, "predict.py")
