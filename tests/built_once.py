"""Builds what several tests read, such as a trained toy model, once for all processes of a test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name`, which `build` fills in the process that asks first; the others wait for it.

    name: unique in the test run. The tests must not change the folder: they copy it.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of this run and all its processes
    folder, done = root / name, root / f"{name}.built"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
