"""A training on a small disk, which a checkpoint fills: exit code 6, and with more room it ends with the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.inference.checkpoints import list_checkpoints, verify_checkpoint
from cdrmix.run_folder import read_metrics

# The disk is in memory, and exists for the processes of one namespace of mounts.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "--fork", "--kill-child"]
SCRIPT = """
disk=$1 kept=$2; shift 2
mount -t tmpfs -o size=3m tmpfs "$disk" || exit 1
"$@"; echo "first: $?"
cp -r "$disk" "$kept/full"
mount -o remount,size=300m "$disk"
"$@" --resume auto; echo "second: $?"
cp -r "$disk" "$kept/resumed"
"""
SHAPE = ("train.steps=12", "train.checkpoint_every=1", "train.keep_last=20", "train.evaluate_every=12")


def can_mount() -> bool:
    """Whether this process may make a disk in memory."""
    try:
        tried = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.skipif(
    not can_mount(),
    reason="needs namespaces of users and mounts, of Linux",
)
@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_full_disk(arguments: Callable[..., list[str]], tmp_path: Path, beside: str) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    shape = (*SHAPE, f"train.async_checkpoints={beside}")
    train = [sys.executable, "-m", "cdrmix.cli", "train", *arguments(*shape, f"run.root={disk}")]
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", SCRIPT, "sh", str(disk), str(kept), *train], capture_output=True, text=True, check=True
    )
    assert "first: 6\n" in done.stdout, done.stdout + done.stderr
    assert "second: 0\n" in done.stdout, done.stdout + done.stderr
    assert "the disk is full" in done.stderr, done.stderr
    (full,), (resumed,) = (list((kept / name).iterdir()) for name in ("full", "resumed"))
    checkpoints = list_checkpoints(full / "checkpoints")
    assert 0 < len(checkpoints) < 12
    for checkpoint in checkpoints:
        verify_checkpoint(checkpoint)
    left = {path.name for path in (full / "checkpoints").iterdir()} - {each.name for each in checkpoints}
    assert left == {"latest"}, "nothing incomplete is left"
    assert f"continuing from {checkpoints[-1].name}" in (resumed / "train.log").read_text()
    assert [row["step"] for row in read_metrics(resumed / "metrics.jsonl")] == list(range(1, 13))
    straight = tmp_path / "straight"
    assert main(["train", *arguments(*shape, f"run.root={straight}")]) == 0
    assert main(["compare", str(next(straight.iterdir())), str(resumed)]) == 0
