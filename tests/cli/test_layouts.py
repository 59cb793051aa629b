"""A run goes on with other numbers of processes and at other ZeRO stages, on the same rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix.inference.checkpoints import list_checkpoints

Arguments = Callable[..., list[str]]
SETTINGS = (
    *("train.batch_rows=4", "train.checkpoint_every=1", "train.keep_last=9", "train.epsilon=0.001"),
    # Each process of sequence or tensor parallelism has one head.
    *("model.attention.heads=2", "model.attention.kv_heads=2", "model.rwkv.head_size=16"),
)


# Steps before a move, processes and keys after it; and what the log says of all moves.
MOVES = {
    "every ZeRO stage": (
        [
            (1, 2, "train.zero_stage=3", "train.expert_parallel=2"),
            (2, 4, "train.zero_stage=2", "train.activation_checkpointing=true", "train.sequence_parallel=2"),
            (3, 1, "train.zero_stage=0"),
        ],
        [
            *("processes: 1 before, 2 now", "zero_stage: 0 before, 3 now", "expert_parallel: 1 before, 2 now"),
            *("processes: 2 before, 4 now", "zero_stage: 3 before, 2 now", "sequence_parallel: 1 before, 2 now"),
            *("processes: 4 before, 1 now", "zero_stage: 2 before, 0 now"),
        ],
    ),
    "from whole layers to partitions of shares and back": (
        [(1, 4, "train.tensor_parallel=2", "train.zero_stage=3"), (3, 1, "train.zero_stage=0")],
        [
            *("processes: 1 before, 4 now", "zero_stage: 0 before, 3 now", "tensor_parallel: 1 before, 2 now"),
            *("processes: 4 before, 1 now", "zero_stage: 3 before, 0 now", "tensor_parallel: 2 before, 1 now"),
        ],
    ),
    "from the whole model to stages of shares and back": (
        [
            (1, 4, "train.pipeline_parallel=2", "train.tensor_parallel=2"),
            (2, 4, "train.pipeline_parallel=2", "train.zero_stage=1"),
            (3, 1, "train.zero_stage=0"),
        ],
        [
            *("processes: 1 before, 4 now", "tensor_parallel: 1 before, 2 now", "pipeline_parallel: 1 before, 2 now"),
            *("zero_stage: 0 before, 1 now", "tensor_parallel: 2 before, 1 now", "processes: 4 before, 1 now"),
            *("zero_stage: 1 before, 0 now", "pipeline_parallel: 2 before, 1 now"),
        ],
    ),
}


@pytest.fixture(scope="module")
def straight(arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one process."""
    root = tmp_path_factory.mktemp("straight")
    assert main(["train", *arguments(*SETTINGS, f"run.root={root}")]) == 0
    (run,) = root.iterdir()
    return run


@pytest.mark.long
@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_in_other_layouts(arguments: Arguments, tmp_path: Path, straight: Path, name: str) -> None:
    moves, told = MOVES[name]
    run = tmp_path / straight.name
    shutil.copytree(straight, run, symlinks=True)
    again = ["train", *arguments(*SETTINGS, f"run.root={tmp_path}"), "--resume", str(run)]
    for step, processes, *layout in moves:
        for later in [path for path in list_checkpoints(run / "checkpoints") if int(path.name[5:]) > step]:
            shutil.rmtree(later)
        assert main([*again, "--nproc", str(processes), *layout]) == 0
    log = (run / "train.log").read_text()
    for change in told:
        assert log.count(f"{change}: sums are taken in another order") == 1, change
    expected, found = (read_metrics(each / "metrics.jsonl") for each in (straight, run))
    assert [(row["step"], row["tokens"]) for row in found] == [(row["step"], row["tokens"]) for row in expected]
    for row, other in zip(expected, found, strict=True):
        # float32 sums in another order: 1e-7 a step, which AdamW with this epsilon magnifies by less than 100. Moments
        # that were lost at one of the moves would be a difference above 1e-2 in the norm of the next gradient.
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)
        assert other["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=1e-3)
        if row.get("valid_bits_per_byte") is not None:
            assert other["valid_bits_per_byte"] == pytest.approx(row["valid_bits_per_byte"], rel=1e-4)


@pytest.mark.long
def test_processes_that_divide_layers_draw_the_same_numbers(arguments: Arguments, tmp_path: Path) -> None:
    """The noise of routers, also where a run of one process or of undivided layers goes on with divided ones."""
    settings = (*SETTINGS, "model.feed_forward.router_jitter=0.3", f"run.root={tmp_path}")
    assert main(["train", *arguments(*settings), "--nproc", "2"]) == 0
    (run,) = tmp_path.iterdir()
    for later in list_checkpoints(run / "checkpoints")[1:]:
        shutil.rmtree(later)
    assert main(["train", *arguments(*settings), "train.tensor_parallel=2", "--nproc", "2", "--resume", str(run)]) == 0
    first, *others = list_checkpoints(run / "checkpoints")
    states = [
        [json.loads((each / f"rng-rank{rank}.json").read_text())["torch"] for rank in (0, 1)]
        for each in (first, *others)
    ]
    assert states[0][0] != states[0][1]
    assert all(one == other for one, other in states[1:])
