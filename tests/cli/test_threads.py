"""At the shipped widths one CPU thread and two train the same weights; narrower products may round differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cdrmix.cli import main

Arguments = Callable[..., list[str]]
# The widths of the shipped configurations: below 32,768 elements an operation of PyTorch's uses one thread anyway.
WIDE = (
    *("model.d_model=128", "model.layers=4", "model.attention_fraction=0.25"),
    *("model.attention.heads=4", "model.attention.kv_heads=4", "model.feed_forward.hidden=256"),
    *("data.row_length=256", "train.batch_rows=4", "train.micro_batch_rows=4", "train.steps=3"),
)


@pytest.mark.parametrize(
    "mixers", ["model.mixer_layers={}", "model.mixer_layers={mamba2: [0, 2]}"], ids=["core", "hybrid"]
)
def test_one_thread_and_two_train_the_same_weights(
    arguments: Arguments, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mixers: str
) -> None:
    runs = []
    for number in (1, 2):
        root = tmp_path / str(number)
        more = (*WIDE, mixers, f"run.threads={number}", f"run.root={root}")
        assert main(["train", *arguments(*more)]) == 0
        (run,) = root.iterdir()
        runs.append(run)
    capsys.readouterr()
    assert main(["compare", *map(str, runs)]) == 0
    assert "identical" in capsys.readouterr().out
