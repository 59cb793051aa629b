"""One process of a run with adapters. Arguments: configuration file, `kill=STEP` or `resume`, overrides."""

from __future__ import annotations

import os
import signal
import sys

from cdrmix.config.schema import Config
from cdrmix.training import deepspeed_config
from cdrmix.training.callbacks import Callback
from cdrmix.training.launch import exit_worker
from cdrmix.workflow import run_all

deepspeed_config.PERSISTENCE_THRESHOLD = 0  # otherwise ZeRO-3 would keep every parameter of a tiny model whole


class Kill(Callback):
    """Kills the process after a step."""

    def __init__(self, last: int) -> None:
        self._last = last

    def on_step(self, step: int) -> None:
        if step == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    path, action, *overrides = sys.argv[1:]
    config = Config.from_yaml(path, overrides)
    if action == "resume":
        run_all(config, "auto")
    else:
        run_all(config, callbacks=[Kill(int(action.removeprefix("kill=")))])
    exit_worker(0)
