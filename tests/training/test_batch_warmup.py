"""Batch warm-up in training: the rows of each step, their weights in the loss, and the same bits after a stop."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import train_loader
from cdrmix.data.shards import ShardSet
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import list_checkpoints, read_weights
from cdrmix.reason.phase import phase_config
from cdrmix.run_folder import RunFolder
from cdrmix.training.launch import check_processes
from cdrmix.training.stage_a import train
from cdrmix.training.threads import ThreadChoice
from cdrmix.training.trainer import Clock

pytestmark = pytest.mark.usefixtures("own_settings")

WARMUP = ("train.batch_rows=16", "train.batch_warmup={rows: 4, steps: 5}")
SIZES = [4, 4, 8, 8, 12, 16]  # the line 4 + 12 / 5 * step, rounded down to multiples of 4
SMALL = ("train.log_every=1", "train.checkpoint_every=1", "train.keep_last=9")


def rows_of(run: Path, shards: ShardSet) -> list[int]:
    """The rows of each step, from the epochs of metrics.jsonl."""
    before = [0, *(round(row["epoch"] * shards.train.rows) for row in read_metrics(run / "metrics.jsonl"))]
    return [stop - start for start, stop in itertools.pairwise(before)]


def trained(config: Config, shards: ShardSet) -> RunFolder:
    run = RunFolder.create(config)
    train(config, run, shards, console=False)
    return run


def weights_after(run: RunFolder, step: int) -> dict[str, Tensor]:
    (path,) = [path for path in list_checkpoints(run.checkpoints) if path.name == f"step-{step:08d}"]
    return {name: weight.clone() for name, weight in read_weights(path).items()}


def equal(one: Batch, other: Batch) -> bool:
    names = ("ids_BT", "targets_BT", "weights_BT", "cu_seqlens_N")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names) and (
        one.token_count == other.token_count
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_has_the_same_rows_for_any_number_of_processes(
    make_config: Callable[..., Config], shards: ShardSet, world: int
) -> None:
    config = make_config("train.micro_batch_rows=1", *WARMUP)
    alone = train_loader(config, shards.train)
    ranks = [train_loader(config, shards.train, rank, world) for rank in range(world)]
    seen: list[int] = []
    for step, rows in enumerate([*SIZES, 16]):
        batches = [loader.micro_batches(step) for loader in ranks]
        in_order = [of_rank[number] for number in range(rows // world) for of_rank in batches]
        assert len(in_order) == rows
        assert all(map(equal, in_order, alone.micro_batches(step)))
        assert sum(float(batch.weights_BT.sum()) for batch in in_order) == in_order[0].token_count
        assert alone.epoch(step) == len(seen) / shards.train.rows
        seen += alone.rows(step).tolist()
    # No row is left out and none comes twice: the batches are parts of the sequence of rows of a constant batch.
    constant = train_loader(make_config("train.batch_rows=4", "train.micro_batch_rows=1"), shards.train)
    assert seen == [row for step in range(len(seen) // 4) for row in constant.rows(step).tolist()]


def test_processes_that_cannot_share_the_first_batch_are_refused(
    make_config: Callable[..., Config], shards: ShardSet
) -> None:
    config = make_config("train.micro_batch_rows=2", "train.batch_warmup={rows: 2, steps: 5}")
    check_processes(config, 1)
    with pytest.raises(
        ConfigError, match=r"train\.batch_warmup\.rows: must be a multiple of .*=2 times the 2 .*found 2"
    ):
        check_processes(config, 2)
    with pytest.raises(ConfigError, match=r"train\.batch_warmup\.rows=2 must be a multiple of .*=2 times the 2 proc"):
        train_loader(config, shards.train, 0, 2)


def test_the_first_steps_are_those_of_a_smaller_batch(make_config: Callable[..., Config], shards: ShardSet) -> None:
    """Bit for bit, with the routers' losses, which are means over the micro-batches of a step."""
    cut = ("train.micro_batch_rows=2", "model.feed_forward.load_balance_weight=0.5", *SMALL)
    grown = trained(make_config(*cut, *WARMUP), shards)
    assert rows_of(grown.path, shards) == SIZES
    small = trained(make_config(*cut, "train.batch_rows=4"), shards)
    for step in (1, 2):
        one, other = weights_after(grown, step), weights_after(small, step)
        assert all(torch.equal(one[name], other[name]) for name in other), step
    figures = ("loss", "load_balance", "z_loss", "gradient_norm", "tokens", "epoch")
    for one, other in zip(read_metrics(grown.metrics_jsonl)[:2], read_metrics(small.metrics_jsonl), strict=False):
        assert [one[name] for name in figures] == [other[name] for name in figures]
    last, smaller = (weights_after(run, 3) for run in (grown, small))
    assert any(not torch.equal(last[name], smaller[name]) for name in last)


def test_the_last_steps_are_those_of_the_full_batch(make_config: Callable[..., Config], shards: ShardSet) -> None:
    """A step after the warm-up with the same rows as a step of a constant batch has the same loss, of equal weights."""
    cut = ("train.micro_batch_rows=2", "train.learning_rate=1e-30", "train.log_every=1")
    grown = read_metrics(trained(make_config(*cut, "train.batch_warmup={rows: 4, steps: 2}"), shards).metrics_jsonl)
    constant = read_metrics(trained(make_config(*cut), shards).metrics_jsonl)
    for step in range(2, 6):  # 4 + 4 rows before it: those of one step of 8
        for name in ("loss", "load_balance", "gradient_norm"):
            assert grown[step][name] == pytest.approx(constant[step - 1][name], rel=1e-6), (step, name)


def test_threads_are_chosen_by_the_time_of_a_full_batch(
    make_config: Callable[..., Config], shards: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_second_more(clock: Clock) -> float:
        clock._seconds += 1.0
        return clock._seconds

    heard: list[float] = []
    monkeypatch.setattr(Clock, "stop", a_second_more)
    monkeypatch.setattr(ThreadChoice, "end", lambda choice, seconds: heard.append(seconds))
    trained(make_config("train.micro_batch_rows=4", *WARMUP), shards)
    assert heard == [16 / rows for rows in SIZES]


def test_a_phase_of_stage_b_has_no_batch_warm_up(make_config: Callable[..., Config]) -> None:
    train = phase_config(make_config("train.micro_batch_rows=2", *WARMUP)).train
    assert (train.batch_rows, train.micro_batch_rows, train.batch_sizes.at(0)) == (8, 1, 8)


@pytest.mark.long
def test_processes_and_zero_stages_train_alike(work, tmp_path: Path, shards: ShardSet) -> None:
    """One, two and four processes read the same rows, and every ZeRO stage gives the weights of one process."""
    overrides = ("train.micro_batch_rows=1", *WARMUP, *SMALL)
    runs = {}
    for name, processes, stage in (("1", 1, 0), ("2", 2, 0), ("4", 4, 0), ("z1", 2, 1), ("z2", 2, 2), ("z3", 2, 3)):
        runs[name] = tmp_path / name
        finished = work("train", runs[name], *overrides, f"train.zero_stage={stage}", processes=processes)
        assert [process.returncode for process in finished] == [0] * processes, finished[0].stdout
    expected = read_metrics(runs["1"] / "metrics.jsonl")
    for name, run in runs.items():
        assert rows_of(run, shards) == SIZES, name
        for row, alone in zip(read_metrics(run / "metrics.jsonl"), expected, strict=True):
            assert row["tokens"] == alone["tokens"]
            for figure in ("loss", "load_balance", "gradient_norm"):  # sums of the same terms in another order
                assert row[figure] == pytest.approx(alone[figure], rel=1e-3), (name, row["step"], figure)


@pytest.mark.long
def test_two_processes_broken_off_in_the_warm_up_are_uninterrupted(work, tmp_path: Path) -> None:
    """At each ZeRO stage, two of them also with offload: stopped after step 3 of a warm-up of 5 steps."""
    overrides = ("train.micro_batch_rows=1", "train.ema_decay=0.9", *WARMUP)
    finished = work("repeat", tmp_path / "runs", *overrides, processes=2)
    assert [process.returncode for process in finished] == [75, 75], finished[0].stdout
    for name in ("0", "1", "2", "3", "2-optimizer", "3-all"):
        sums = [
            json.loads((tmp_path / "runs" / f"{kind}{name}/checkpoints/step-00000006/manifest.json").read_text())[
                "files"
            ]
            for kind in ("straight", "broken")
        ]
        names = [file for file in sums[0] if file.endswith(".safetensors") or file.startswith("rng")]
        assert len(names) >= 5
        assert [sums[0][file] for file in names] == [sums[1][file] for file in names], name
