"""Tests do not wait until the disk has written: they end processes, not the power of the machine.

Some 7,500 flushes took a tenth of the time of 140 tests of the preparation and of training.
"""

from __future__ import annotations

import os
from typing import Any


def stop_flushing() -> None:
    """For this process and its forks: a flush only asks whether the file is open. Programs in new ones still flush."""

    def flush(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    os.fsync = os.fdatasync = flush
