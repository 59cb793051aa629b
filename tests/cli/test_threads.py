"""The number of CPU threads changes no bit of a run, so a run can continue with another number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.run_folder import RunFolder

Arguments = Callable[..., list[str]]
# The widths of the shipped configurations: below 32,768 elements an operation of PyTorch's uses one thread anyway.
WIDE = (
    *("model.d_model=128", "model.layers=4", "model.attention_fraction=0.25"),
    *("model.attention.heads=4", "model.attention.kv_heads=4", "model.feed_forward.hidden=256"),
    *("data.row_length=256", "train.batch_rows=4", "train.micro_batch_rows=4", "train.steps=3"),
)


# Widths, experts and rows that MKL's threads would round otherwise: no multiples of 16, and few.
ODD = (
    *("model.d_model=48", "model.rwkv.head_size=16", "model.attention.heads=2", "model.attention.kv_heads=1"),
    *("model.feed_forward.hidden=27", "model.feed_forward.experts=6", "data.row_length=48"),
    *("train.batch_rows=4", "train.micro_batch_rows=1", "train.steps=3"),
)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((*WIDE, "model.mixer_layers={}"), marks=pytest.mark.long),
        pytest.param((*WIDE, "model.mixer_layers={mamba2: [0, 2]}"), marks=pytest.mark.slow),
        pytest.param(ODD, marks=pytest.mark.long),
        pytest.param(
            (*ODD, "model.mixer_layers={mamba2: [0]}", "model.mamba={d_state: 12, head_dim: 24}"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["core", "hybrid", "odd", "odd hybrid"],
)
def test_any_number_of_threads_trains_the_same_weights(
    arguments: Arguments, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[str, ...]
) -> None:
    runs = []
    for number in (1, 2, 3):
        root = tmp_path / str(number)
        more = (*shape, f"run.threads={number}", f"run.root={root}")
        assert main(["train", *arguments(*more)]) == 0
        (run,) = root.iterdir()
        runs.append(run)
    capsys.readouterr()
    for other in runs[1:]:
        assert main(["compare", str(runs[0]), str(other)]) == 0
        assert "identical" in capsys.readouterr().out
    hashes = {RunFolder.open(run).summary()["config_hash"] for run in runs}
    assert len(hashes) == 1
