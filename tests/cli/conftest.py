"""A toy run that the command-line tests share: its text, and the arguments that train on it in seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from built_once import built_once

for name in ("pydantic", "matplotlib"):
    pytest.importorskip(name, reason=f"needs {name}, which is not installed")

from in_process import main
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from short_endings import short_endings as short_endings_of_runs

from cdrmix import plugins, workflow
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.registry import Registry

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
TOY = (
    "run.threads=1",  # two tests at a time on two cores; test_threads.py has other numbers
    "model.vocab_size=300",
    "model.d_model=32",
    "model.layers=2",
    "model.attention_fraction=0.5",
    "model.attention.heads=1",
    "model.attention.kv_heads=1",
    "model.feed_forward.hidden=16",
    "model.feed_forward.experts=4",
    "data.row_length=32",
    "data.workers=1",  # each process would import the package
    "train.steps=4",
    "train.batch_rows=2",
    "train.micro_batch_rows=1",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.evaluate_every=2",
    "train.evaluate_rows=4",
    "train.checkpoint_every=2",
)


def toy_arguments(text: Path, folder: Path, *more: str) -> list[str]:
    """The arguments of `cdrmix train` for a toy run on `text`, with its runs and shards in `folder`."""
    where = [f"run.root={folder / 'runs'}", f"data.cache={folder / 'cache'}"]
    source = ["data.source.kind=text", f"data.source.paths=[{text}]", "data.valid_fraction=0.25"]
    return ["--config", str(TINY), *TOY, *where, *source, *more]


SAVE, ARRANGE = Figure.savefig, ConstrainedLayoutEngine.execute


@pytest.fixture(scope="module", autouse=True)
def short_endings() -> Iterator[None]:
    """A run ends with a sample of few tokens and blank pictures: else the end takes longer than a toy training."""
    with short_endings_of_runs():
        yield


@pytest.fixture
def drawn_pictures(short_endings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of the pictures themselves."""
    monkeypatch.setattr(Figure, "savefig", SAVE)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", ARRANGE)


@pytest.fixture(scope="module")
def training_alone() -> Iterator[None]:
    """Runs end with their last step: no evaluation on held-out text, no export, sample and report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "_after_training", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 small files."""

    def write(folder: Path) -> None:
        for number in range(24):
            lines = f"def f{number}(x):\n    return x + {number}\n\nprint(f{number}(2))\n"
            (folder / f"{number}.py").write_text(lines)

    return built_once(tmp_path_factory, "toy-text", write)


@pytest.fixture(scope="session")
def toy_run(toy_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished toy run with checkpoints of steps 2 and 4, which several files share: copy it before a change."""

    def train(folder: Path) -> None:
        assert main(["train", *toy_arguments(toy_text, folder)]) == 0

    (run,) = (built_once(tmp_path_factory, "toy", train) / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs/, cache/ and others."""
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def arguments(toy_text: Path, workspace: Path) -> Callable[..., list[str]]:
    """`arguments(*overrides)`: the arguments of `cdrmix train` for a toy run in the workspace."""
    return partial(toy_arguments, toy_text, workspace)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The configuration that the small ones share."""
    return TINY


def install(folder: Path, module: str, entry: str = "toy_plugin") -> dict[str, str]:
    (folder / "toy_plugin.py").write_text(module)
    information = folder / "toy_distribution-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-distribution\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(f"[cdrmix.plugins]\ntoy = {entry}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


@pytest.fixture(scope="session")
def install_plugin() -> Callable[..., dict[str, str]]:
    """`install_plugin(folder, module, entry)`: makes a distribution below the folder with the module `toy_plugin` of
    this text and one entry point. Returns the environment of a process that has it installed."""
    return install


@pytest.fixture
def install_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`install_here(module, entry)`: for one test, this process has the plugin, which is not loaded yet."""

    def install_once(module: str, entry: str = "toy_plugin") -> None:
        install(tmp_path, module, entry)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "toy_plugin", plugins)  # what is there now is gone after the test
        del sys.modules["toy_plugin"]
        monkeypatch.setattr(plugins, "_loaded", {})
        for registry in Registry._all.values():
            monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    return install_once


@pytest.fixture(scope="session")
def wait_for_checkpoint() -> Callable[[Path], Path]:
    """Returns the only run in a folder, when it has a checkpoint."""

    def wait(root: Path) -> Path:
        deadline = time.monotonic() + 120
        while not (found := [run for run in root.glob("*") if list_checkpoints(run / "checkpoints")]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found[0]

    return wait


@pytest.fixture(scope="session")
def workers() -> Callable[[int], list[int]]:
    """The processes of the run that a launcher has started, by its process id."""

    def find(launcher: int) -> list[int]:
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
        return [pid for pid, parent in parents.items() if parent == launcher]

    return find
