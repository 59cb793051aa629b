"""The mirror of a run: what it has, what it survives, and that a run goes on from it bit for bit."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import FORMAT, list_checkpoints, newest_whole_checkpoint, verify_checkpoint
from cdrmix.run_folder import RunFolder
from cdrmix.training import mirror as mirrors
from cdrmix.training.mirror_thread import MirrorThread, check_mirror
from cdrmix.training.restore import find_run
from cdrmix.training.retention import Rules

PAYLOAD = 4096  # bytes of the weights of a made checkpoint
Copy = Callable[[Path, Path], dict[str, object]]


def commit(run: RunFolder, step: int, *, best: bool = False, damaged: bool = False) -> Path:
    """A checkpoint of two files, with its manifest and pointers. damaged: one has not the bytes of the manifest."""
    final = run.checkpoints / f"step-{step:08d}"
    checkpoint = run.path / "unfinished"
    checkpoint.mkdir()
    files = {}
    state = json.dumps({"progress": {"step": step}})
    for name, content in (("model.safetensors", bytes([step]) * PAYLOAD), ("state.json", state.encode())):
        (checkpoint / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"format": FORMAT, "step": step, "periodic": True, "files": files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    if damaged:
        (checkpoint / "model.safetensors").write_bytes(b"x" * PAYLOAD)
    if best:
        (run.checkpoints / "best").write_text(final.name + "\n")
    with run.metrics_jsonl.open("a") as rows:
        rows.write(json.dumps({"step": step}) + "\n")
    checkpoint.rename(final)
    (run.checkpoints / "latest").write_text(final.name + "\n")
    return final


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(folder)]


def until(condition: Callable[[], bool]) -> None:
    """Waits for the thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> RunFolder:
    run = RunFolder.create(make_config(f"run.root={tmp_path / 'runs'}"))
    run.tokenizer.write_text("{}")
    (run.path / "base").mkdir()
    (run.path / "base" / "config.json").write_text("{}")
    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def mirrored(run: RunFolder, store: Path) -> Path:
    return store / run.path.name / "checkpoints"


def text_of(run: RunFolder) -> str:
    return run.log.read_text() if run.log.exists() else ""


def test_it_has_what_the_rules_keep_and_what_a_resumed_run_needs(run: RunFolder, store: Path) -> None:
    with MirrorThread(run, store, Rules(2)) as thread:
        for step in (1, 2, 3, 4):
            thread.committed(commit(run, step, best=step == 1))
            until(lambda step=step: steps(mirrored(run, store))[-1:] == [step] and not thread._copying)
    copy = mirrored(run, store)
    assert steps(copy) == steps(run.checkpoints) == [1, 3, 4]
    for path in list_checkpoints(copy):
        verify_checkpoint(path)
    assert [(copy / name).read_text() for name in ("latest", "best")] == ["step-00000004\n", "step-00000001\n"]
    for name in ("metrics.jsonl", "metrics.json", "config_snapshot.yaml", "tokenizer.json", "base/config.json"):
        assert (copy.parent / name).read_bytes() == (run.path / name).read_bytes()
    assert list(store.rglob("*.tmp")) == []


def test_a_half_copied_checkpoint_is_never_taken_and_the_copy_goes_on(
    run: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_file, broken, copied = mirrors.copy_file, [True], []

    def unplugged(source: Path, target: Path) -> dict[str, object]:
        if broken[0] and target.name == "state.json" and target.parent.name == "step-00000002":
            raise OSError(errno.EIO, "Input/output error", str(target))
        copied.append(f"{target.parent.name}/{target.name}")
        return copy_file(source, target)

    monkeypatch.setattr(mirrors, "copy_file", unplugged)
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1))
        until(lambda: steps(mirrored(run, store)) == [1])
        thread.committed(commit(run, 2))
        until(lambda: "warning: the mirror" in text_of(run))
        half = mirrored(run, store) / "step-00000002"
        assert [path.name for path in half.iterdir()] == ["model.safetensors"]
        newest = newest_whole_checkpoint(mirrored(run, store))
        assert newest is not None
        assert newest.name == "step-00000001"
        assert (mirrored(run, store) / "latest").read_text() == "step-00000001\n"
        broken[0] = False
        copied.clear()
        thread.committed(commit(run, 3))
    assert steps(mirrored(run, store)) == [2, 3]
    weights = [name for name in copied if name.endswith("model.safetensors")]
    assert weights == ["step-00000003/model.safetensors"], "that of step 2 was there"
    verify_checkpoint(half)
    log = text_of(run)
    assert log.count("is not up to date: Input/output error") >= 1
    assert log.count("The training goes on") == 1
    assert "is up to date again" in log


def test_a_slow_mirror_does_not_stop_the_loop(run: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_file, open_door, entered = mirrors.copy_file, threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> dict[str, object]:
        if target.name == "model.safetensors":
            entered.set()
            assert open_door.wait(20)
        return copy_file(source, target)

    monkeypatch.setattr(mirrors, "copy_file", slow)
    with MirrorThread(run, store, Rules(1)) as thread:
        thread.committed(commit(run, 1))
        assert entered.wait(20)
        for step in (2, 3, 4):
            thread.committed(commit(run, step))  # returns while the copy waits
        assert steps(run.checkpoints) == [1, 4], "that which is being copied is not removed"
        open_door.set()
    assert steps(run.checkpoints) == steps(mirrored(run, store)) == [4]
    assert text_of(run).count("is slower than the training: step-00000001 is still being copied") == 1


def test_a_full_mirror_makes_room_by_its_rules_and_keeps_what_it_has(
    run: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two and a half checkpoints; later for less than one."""
    copy_file, room = mirrors.copy_file, [int(2.5 * PAYLOAD)]

    def limited(source: Path, target: Path) -> dict[str, object]:
        weights = [path.stat().st_size for path in store.rglob("model.safetensors")]
        if target.name == "model.safetensors" and sum(weights) + source.stat().st_size > room[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy_file(source, target)

    monkeypatch.setattr(mirrors, "copy_file", limited)
    with MirrorThread(run, store, Rules(2)) as thread:
        for step in (1, 2, 3, 4):
            thread.committed(commit(run, step))
            until(lambda step=step: steps(mirrored(run, store))[-1:] == [step] and not thread._copying)
        assert "warning" not in text_of(run)
        until(lambda: steps(mirrored(run, store)) == [3, 4])
        room[0] = 0
        thread.committed(commit(run, 5))
        until(lambda: "No space left on device" in text_of(run))
    assert steps(run.checkpoints) == [4, 5]
    newest = newest_whole_checkpoint(mirrored(run, store))
    assert newest is not None
    assert newest.name == "step-00000004"


def test_a_drive_that_goes_away_and_comes_back(run: RunFolder, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1))
        until(lambda: "mirrored step-00000001" in text_of(run))
        until(lambda: not thread._copying)
        store.rename(store.with_name("away"))
        thread.committed(commit(run, 2))
        until(lambda: f"is not up to date: No such file or directory: {store}" in text_of(run))
        assert not store.exists()
        store.with_name("away").rename(store)
        thread.committed(commit(run, 3))
    assert steps(mirrored(run, store)) == [2, 3]
    told = capsys.readouterr().out
    assert "The training goes on; the mirror is tried again after each checkpoint" in told
    assert "is up to date again" in told


def test_another_file_system_at_its_place_is_not_written(
    run: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty folder under a drive that was unmounted."""
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1))
        until(lambda: "mirrored step-00000001" in text_of(run) and not thread._copying)
        assert thread._mirror._device is not None
        thread._mirror._device += 1
        thread.committed(commit(run, 2))
        until(lambda: "the drive was unmounted" in text_of(run))
    assert steps(mirrored(run, store)) == [1]


def test_of_another_run_or_another_process_nothing_is_touched(run: RunFolder, store: Path) -> None:
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1))
        until(lambda: "mirrored step-00000001" in text_of(run) and not thread._copying)
        with MirrorThread(run, store, Rules(2)):  # as on another machine: it takes the mirror over
            pass
        assert mirrors.read_about(store / run.path.name)["writer"] != thread._mirror._writer
        thread.committed(commit(run, 2))
        until(lambda: "another process continues this run" in text_of(run))
    assert steps(mirrored(run, store)) == [1]
    run.update_summary({"mirror_id": "0" * 32})  # a run that has the same name by chance
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    with MirrorThread(run, store, Rules(2)) as thread:
        until(lambda: "is the mirror of another run of that name" in text_of(run))
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_named_and_not_mirrored(run: RunFolder, store: Path) -> None:
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1, damaged=True))
        until(lambda: "step-00000001 is not mirrored" in text_of(run))
        thread.committed(commit(run, 2))
    assert steps(mirrored(run, store)) == [2]
    assert text_of(run).count("step-00000001 is not mirrored") == 1


def test_a_mirror_that_cannot_be_one_is_refused_before_the_training(
    make_config: Callable[..., Config], run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder, told in (
        (tmp_path / "file", "is a file"),
        (run.path, "is one run"),
        (run.path / "checkpoints" / "copies", "is in the run folder"),
        (run.path.parent, "is run.root"),
    ):
        config = make_config(f"run.root={run.path.parent}", f"run.mirror={folder}")
        with pytest.raises(ConfigError, match=told):
            check_mirror(config)
        assert config.hash() == make_config().hash()


@pytest.fixture
def only_mirror(run: RunFolder, store: Path) -> Iterator[Path]:
    """The mirror of a run with checkpoints 1 (the best), 3 and 4, whose folder is gone."""
    with MirrorThread(run, store, Rules(2)) as thread:
        for step in (1, 2, 3, 4):
            thread.committed(commit(run, step, best=step == 1))
    shutil.rmtree(run.path)
    return store / run.path.name


def test_restoring_verifies_what_it_reads(
    only_mirror: Path, run: RunFolder, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config, told = make_config(f"run.root={tmp_path / 'new'}", f"run.mirror={only_mirror.parent}"), []
    weights = only_mirror / "checkpoints" / "step-00000004" / "model.safetensors"
    weights.write_bytes(b"x" * PAYLOAD)
    restored = find_run(config, "auto", told.append)
    assert restored is not None
    assert restored.path == tmp_path / "new" / run.path.name
    assert steps(restored.checkpoints) == [1, 3]
    assert [(restored.checkpoints / name).read_text() for name in ("latest", "best")] == [
        "step-00000003\n",
        "step-00000001\n",
    ]
    assert (restored.path / "base" / "config.json").read_text() == "{}"
    (line,) = told
    assert line.startswith("skipped step-00000004 of the mirror")
    with pytest.raises(ConfigError, match="exists; continue it with --resume"):
        find_run(config, str(only_mirror), told.append)
    for wanted in (only_mirror, only_mirror.parent):
        other = make_config(f"run.root={tmp_path / 'new'}", "run.seed=7")
        with pytest.raises(ConfigError, match=r"config_snapshot\.yaml"):
            find_run(other, str(wanted), told.append)
    shutil.rmtree(tmp_path / "new")
    (only_mirror / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is corrupt"):
        find_run(config, str(only_mirror), told.append)
    assert list((tmp_path / "new").iterdir()) == [], "nothing half restored stays"
    (only_mirror / "tokenizer.json").write_text("{}")
    for checkpoint in list_checkpoints(only_mirror / "checkpoints"):
        (checkpoint / "state.json").unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find_run(config, str(only_mirror.parent), told.append)
    (only_mirror / "mirror.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"mirror\.json is damaged"):
        find_run(config, "auto", told.append)


def test_a_run_with_a_checkpoint_is_continued_where_it_is(
    run: RunFolder, store: Path, make_config: Callable[..., Config]
) -> None:
    with MirrorThread(run, store, Rules(2)) as thread:
        thread.committed(commit(run, 1))
    config = make_config(f"run.root={run.path.parent}", f"run.mirror={store}")
    found = find_run(config, "auto", print)
    assert found is not None
    assert found.path == run.path
