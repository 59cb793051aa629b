"""Settings of the whole test run: Triton's interpreter, one thread, repeatable hypotheses, poisoned memory."""

from __future__ import annotations

import os
import signal

# Before the first `import triton`: set later, the interpreter fails inside the kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["PYTHONSAFEPATH"] = "1"  # child processes must not find our kernels/ under the PyPI package's name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a script's &, here and by what tests start

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import cdrmix.kernels

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# The machine may be slow and shared, so no deadline; the same examples every time, so that a failure is a fact.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
# Examples are drawn from the constants of the project's modules that are loaded: all are, whichever tests ran before.
for package in (cdrmix, cdrmix.kernels):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin give NaN (or the largest integer), so that reading what nobody wrote is seen."""
    fill, deterministic = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
