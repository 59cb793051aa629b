"""A training on a small disk, which a checkpoint fills: exit code 6, and with more room it ends with the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.inference.checkpoints import list_checkpoints, verify_checkpoint
from cdrmix.plan.disk import check_disk, disk_of
from cdrmix.run_folder import RunFolder
from cdrmix.training.checkpoint_writer import when_full
from cdrmix.units import amount_of_bytes

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
SHAPE = ("train.steps=12", "train.checkpoint_every=1", "train.keep_last=7", "train.evaluate_every=12")


def can_mount() -> bool:
    """Whether this process may make a disk in memory."""
    try:
        tried = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free))


def test_a_disk_without_room_is_refused_before_the_training(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = arguments(f"run.root={tmp_path / 'runs'}")
    config = Config.from_yaml(where[1], where[2:])
    disk = disk_of(config)
    with_free(monkeypatch, disk.needed - 1)
    for command in (["train", *where], ["train", *where, "--dry-run"]):
        assert main(command) == 6
        assert f"{amount_of_bytes(disk.needed)}. Free some space, lower train.keep_last" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    said: list[str] = []
    with_free(monkeypatch, disk.needed)  # enough, if no checkpoint is the best
    check_disk(config, None, said.append)
    (line,) = said
    assert f"up to {amount_of_bytes(disk.checkpoints)}; the run ends" in line
    with_free(monkeypatch, disk.checkpoints)
    check_disk(config, None, said.append)
    # What a run has already counts.
    run = RunFolder.create(config)
    (run.checkpoints / "step-00000002").mkdir()
    (run.checkpoints / "step-00000002" / "model.safetensors").write_bytes(b"x" * disk.checkpoint)
    with_free(monkeypatch, disk.checkpoints - disk.checkpoint)
    check_disk(config, run.path, said.append)
    assert len(said) == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 0))
    check_disk(config, None, said.append)  # the disk does not tell
    assert len(said) == 1


def test_a_preparation_on_a_small_disk_warns(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["data", "prepare", *arguments(f"data.cache={tmp_path / 'cache'}")]
    with_free(monkeypatch, 1000)
    assert main(command) == 0
    assert "its preparation takes up to 3 times as much" in capsys.readouterr().out
    assert main(command) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_planned_shards_are_those_of_the_whole_text(
    arguments: Callable[..., list[str]], toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = arguments(f"data.cache={tmp_path / 'cache'}", "train.steps=2")  # of which the training reads a part
    config = Config.from_yaml(where[1], where[2:])
    disk = disk_of(config)
    assert disk.text == sum(path.stat().st_size for path in toy_text.iterdir())
    folder = prepare(config, say=lambda line: None).path
    written = sum(path.stat().st_size for path in folder.glob("*.tokens-*"))
    assert disk.shards is not None
    assert written < disk.shards
    assert main(["plan", *where, "--gpu", "cpu"]) == 0
    assert "at most, of all 0.000 GB of text" in capsys.readouterr().out
    for unknown in ("data.max_documents=3", "data.source.paths=[nowhere]"):
        assert disk_of(Config.from_yaml(where[1], [*where[2:], unknown])).shards is None
        assert main(["plan", *where, unknown, "--gpu", "cpu"]) == 0
        assert "unknown   the size of the text" in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["step-00000002"], ["step-00000002", "step-00000004"]])
def test_a_full_disk_names_the_checkpoints_that_are_there(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000006.tmp-1").mkdir()
    text = when_full(tmp_path)
    assert [word.strip(",") for word in text.split() if word.startswith("step-")] == names
    assert ("No checkpoint is there yet" in text) == (not names)
    assert "--resume auto" in text


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
