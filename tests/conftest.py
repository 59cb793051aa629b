"""Settings of the whole test run: Triton's interpreter, one thread, examples, poisoned memory, an unchanged process."""

from __future__ import annotations

import os
import signal
import sys

# Before the first `import triton`: set later, the interpreter fails inside the kernels. `pytest -m gpu` compiles them.
os.environ.setdefault("TRITON_INTERPRET", "0" if "gpu" in sys.argv else "1")
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["PYTHONSAFEPATH"] = "1"  # child processes must not find our kernels/ under the PyPI package's name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.append(os.path.dirname(__file__))  # forked.py and other modules that tests import
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a script's &, here and by what tests start

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import pkgutil
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import process_state
import pytest
import torch
from examples import FIXED, RANDOM
from flushing import stop_flushing
from hypothesis import HealthCheck, settings

import cdrmix.kernels
import cdrmix.ops
from cdrmix.kernels.common.products import strict_mode

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
strict_mode()  # before the first product, as in every command
stop_flushing()

# The machine may be slow and shared, so no deadline. The quick tests have the same examples every time: a failure is a
# fact. `make test-all` draws others each time: its seed is printed, and pytest --hypothesis-seed repeats it.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", ANY_MACHINE, max_examples=FIXED, derandomize=True)
settings.register_profile("random", ANY_MACHINE, max_examples=RANDOM, print_blob=True)
settings.load_profile("fixed")


def absent(dependency: str) -> bool:
    try:
        importlib.metadata.version(dependency)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


# A bare GPU machine has PyTorch, Triton and NumPy: only the tests of the kernels and others that can be imported run.
DEPENDENCIES = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
ABSENT = sorted(name for name in (re.split(r"[^\w.-]", text)[0] for text in DEPENDENCIES) if absent(name))


def missing_package(error: BaseException | None) -> str | None:
    """The package for want of which an import failed, unless it is installed, of Python or ours."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    name = error.name.partition(".")[0]
    known = name == "cdrmix" or name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    return None if known else name


def load_modules(packages: tuple[ModuleType, ...]) -> None:
    """Imports all modules of packages; passes over those that need an absent package, such as an optional one."""
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if not missing_package(error):
                    raise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="hold the CPU time of the tests against their budget")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(process_state)
    config.pluginmanager.register(Frozen())
    # The server of an executor's processes imports once for all of them.
    multiprocessing.set_forkserver_preload(["__main__", "cdrmix.data.prepare"])
    if config.getoption("--costs"):
        from costs import Costs  # here: it needs numba, which a bare GPU machine lacks

        config.pluginmanager.register(Costs())
    runs_tests = config.getoption("dist", "no") == "no" or hasattr(config, "workerinput")
    if runs_tests:
        # Examples are drawn from the constants of the loaded modules: all are loaded, whatever the order of the tests.
        for name in (
            "datasets",
            "deepspeed",
            "numba",
            "rich.live",
            "transformers.modeling_utils",
        ):  # what these change is not our doing
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        with process_state.unchanged("importing the package"):
            load_modules((cdrmix.ops, cdrmix.kernels) if ABSENT else (cdrmix, cdrmix.kernels))


class TestFile(pytest.Module):
    """A file of tests that is skipped, naming the package, where it imports a dependency which is absent."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if name := missing_package(error.__cause__):
                pytest.skip(f"needs {name}, which is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not ABSENT:
        return None
    file: TestFile = TestFile.from_parent(parent, path=module_path)
    return file


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # a quick failure is told first
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, 20, 20)  # in place of 700, 10, 10: 3 % of the time of the quick tests


class Frozen:
    """Keeps collections short, which the package asks for between two models: modules stay and are not looked at.

    The libraries that tests import later have a million objects, which a collection takes 0.2 s to pass over.
    """

    def __init__(self) -> None:
        self._modules = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if len(sys.modules) > self._modules + 100:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)


@pytest.fixture
def own_settings() -> Iterator[None]:
    """For tests of functions that set the threads and the determinism of their process: restores these."""
    from cdrmix.runtime import restored_settings  # here: a bare GPU machine cannot import it

    with restored_settings():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin give NaN (or the largest integer), so that reading what nobody wrote is seen."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill
