"""The data of a scenario, by APEBench's own environment (JAX), in which bench/apebench.py runs this file.

python apebench_data.py SCENARIO SETTINGS OUT.npz    # train, test: (trajectory, time, channel, *space)
"""

import json
import sys

import apebench
import numpy as np

if __name__ == "__main__":
    name, settings, out = sys.argv[1:]
    scenario = apebench.scenarios.scenario_dict[name](**json.loads(settings))
    np.savez(out, train=np.asarray(scenario.get_train_data()), test=np.asarray(scenario.get_test_data()))
