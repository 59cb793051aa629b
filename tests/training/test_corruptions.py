"""Random damage to the newest checkpoint of two processes: it is refused, and the one before it is taken."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built_once import built_once
from in_process import main

from cdrmix.inference import checkpoints
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, newest_whole_checkpoint

Damage = Callable[[random.Random, Path, Path], None]
EACH = 40  # of five kinds


@pytest.fixture
def runs(work: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """Where the runs `one` and `other` are: of two processes with ZeRO, checkpoints of steps 1 and 2, other seeds."""

    def train(folder: Path) -> None:
        settings = ("train.micro_batch_rows=4", "train.zero_stage=1", "train.ema_decay=0.5")
        steps = ("train.steps=2", "train.warmup_steps=1", "train.checkpoint_every=1", "train.evaluate_every=1")
        seeds = json.dumps({"one": ["run.seed=1"], "other": ["run.seed=2"]})
        finished = work("several", folder, *settings, *steps, processes=2, runs=seeds)
        assert [each.returncode for each in finished] == [0, 0], finished[0].stdout

    return shutil.copytree(built_once(tmp_path_factory, "corruptible", train), tmp_path / "runs")


def pick(rng: random.Random, folder: Path) -> Path:
    """A file of the folder; each with the same probability, not those that have the most bytes."""
    return rng.choice(sorted(folder.iterdir()))


def flip_a_bit(rng: random.Random, newest: Path, other: Path) -> None:
    path = pick(rng, newest)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng: random.Random, newest: Path, other: Path) -> None:
    path = pick(rng, newest)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(rng: random.Random, newest: Path, other: Path) -> None:
    pick(rng, newest).unlink()


def take_from_another_run(rng: random.Random, newest: Path, other: Path) -> None:
    """Any file, the manifest among them. The other run has files of the same names and sizes."""
    path = pick(rng, newest)
    while (content := (other / path.name).read_bytes()) == path.read_bytes():
        path = pick(rng, newest)
    path.write_bytes(content)


def swap_ranks(rng: random.Random, newest: Path, other: Path) -> None:
    ending = rng.choice(["optimizer-rank{}.safetensors", "rng-rank{}.json"])
    one, two = (newest / ending.format(rank) for rank in (0, 1))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, remove, take_from_another_run, swap_ranks])
def test_no_damage_is_read(runs: Path, damage: Damage) -> None:
    older, newest = list_checkpoints(runs / "one" / "checkpoints")
    other = list_checkpoints(runs / "other" / "checkpoints")[-1]
    intact = shutil.copytree(newest, runs / "intact")
    files = json.loads((intact / MANIFEST).read_text())["files"]
    rng = random.Random(damage.__name__)
    for attempt in range(EACH):
        try:
            damage(rng, newest, other)
            told: list[str] = []
            found = newest_whole_checkpoint(newest.parent, told.append)
            if found == newest:  # a bit of the manifest that says nothing about a file, a space or the version
                assert damage is flip_a_bit, attempt
                assert json.loads((newest / MANIFEST).read_text())["files"] == files
                assert all((newest / name).read_bytes() == (intact / name).read_bytes() for name in files)
                continue
            assert found == older, attempt
            assert len(told) == 1
            assert str(newest) in told[0]
            assert main(["checkpoints", "verify", str(newest)]) == 5
        finally:
            shutil.rmtree(newest)
            shutil.copytree(intact, newest)


def test_a_file_that_the_disk_cannot_read_is_passed_over(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newest = list_checkpoints(runs / "one" / "checkpoints")
    digest_of = checkpoints.sha256_file

    def bad(path: Path) -> str:
        if path == newest / "rng-rank0.json":
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(path)

    monkeypatch.setattr(checkpoints, "sha256_file", bad)
    told: list[str] = []
    assert newest_whole_checkpoint(newest.parent, told.append) == older
    assert "rng-rank0.json cannot be read: Input/output error" in told[0]
