"""A toy run that the command-line tests share: its text, and the arguments that train on it in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "configs" / "cdrmix-core-tiny.yaml"
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
    "train.steps=4",
    "train.batch_rows=2",
    "train.micro_batch_rows=1",
    "train.warmup_steps=1",
    "train.log_every=1",
    "train.evaluate_every=2",
    "train.evaluate_rows=4",
    "train.checkpoint_every=2",
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text/, which has 24 small files, and for runs/ and cache/."""
    folder = tmp_path_factory.mktemp("cli")
    text = folder / "text"
    text.mkdir()
    for number in range(24):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n\nprint(f{number}(2))\n")
    return folder


@pytest.fixture(scope="module")
def arguments(workspace: Path) -> Callable[..., list[str]]:
    """`arguments(*overrides)`: the arguments of `cdrmix train` for a toy run."""
    where = [f"run.root={workspace / 'runs'}", f"data.cache={workspace / 'cache'}"]
    source = ["data.source.kind=text", f"data.source.paths=[{workspace / 'text'}]", "data.valid_fraction=0.25"]
    return lambda *more: ["--config", str(TINY), *TOY, *where, *source, *more]


@pytest.fixture
def tiny() -> Path:
    """The shipped tiny configuration."""
    return TINY
