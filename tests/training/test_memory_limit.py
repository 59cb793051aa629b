"""A model that is too large for the memory of one process is trained, saved and resumed by four."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_rows import read_metrics

from cdrmix.errors import OutOfMemoryError
from cdrmix.inference.checkpoints import list_checkpoints

# 201 million parameters, 767 MiB. One process has their weights, gradients, moments and average. Of four, each has a
# quarter of these, and while it loads a checkpoint, whole files of it are mapped into its memory.
LARGE = (
    *("model.d_model=256", "model.layers=8", "model.feed_forward.hidden=8192", "model.attention_fraction=0.25"),
    *("model.attention.heads=4", "model.attention.kv_heads=2", "model.rwkv.head_size=64"),
    *("train.steps=2", "train.warmup_steps=1", "train.evaluate_every=2", "train.checkpoint_every=1"),
    *("train.batch_rows=4", "train.micro_batch_rows=1", "train.ema_decay=0.9"),
)
ALLOWANCE = "2600"  # MiB


@pytest.mark.long
@pytest.mark.parametrize("keys", [("train.tensor_parallel=2", "train.pipeline_parallel=2"), ("train.zero_stage=3",)])
def test_four_processes_train_what_one_cannot(work: Callable[..., Any], tmp_path: Path, keys: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    (alone,) = work("train", tmp_path / "alone", *LARGE, allowance=ALLOWANCE)
    assert alone.returncode == OutOfMemoryError.exit_code, alone.stdout

    def train(**more: str) -> list[float]:
        finished = work("train", run, *LARGE, *keys, processes=4, allowance=ALLOWANCE, **more)
        assert [each.returncode for each in finished] == [0] * 4, "\n".join(each.stdout for each in finished)
        return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]

    losses = train()
    shutil.rmtree(list_checkpoints(run / "checkpoints")[-1])
    assert train(resume="auto") == losses
    assert "continuing from step-00000001" in (run / "train.log").read_text()
