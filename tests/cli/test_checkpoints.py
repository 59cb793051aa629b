"""`cdrmix checkpoints` and `--checkpoint`: the table, verification, removal by rules, the mirror, and bad input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main
from json_rows import read_metrics

import cdrmix
from cdrmix import workflow
from cdrmix.errors import CdrmixWarning
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.run_folder import RunFolder

Arguments = Callable[..., list[str]]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(toy_run: Path, tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 2 and 4, and copies of them as steps 6 and 8. The best is that of step 2."""
    path = tmp_path / "runs" / toy_run.name
    shutil.copytree(toy_run, path)
    run = RunFolder.open(path)
    for step, origin in ((6, 2), (8, 4)):
        shutil.copytree(run.checkpoints / f"step-{origin:08d}", run.checkpoints / f"step-{step:08d}")
    (run.checkpoints / "best").write_text("step-00000002\n")
    return run


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")]


def flip(path: Path) -> None:
    """Changes one byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_table_says_what_is_there_and_why(run: RunFolder, capsys: Captured) -> None:
    bits = {row["step"]: row["valid_bits_per_byte"] for row in read_metrics(run.metrics_jsonl)}
    (run.checkpoints / "step-00000006" / "model.safetensors").unlink()
    assert main(["checkpoints", "list", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["mirror"]) == ("bits_per_byte", None)
    rows = found["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert [row["kept"] for row in rows] == [["best"], [], ["last"], ["last"]]
    assert [row["figure"] for row in rows] == [bits[2], bits[4], None, None]
    assert [row["problem"] is None for row in rows] == [True, True, False, True]
    assert rows[0]["tokens"] == next(row["tokens"] for row in read_metrics(run.metrics_jsonl) if row["step"] == 2)
    size = sum(path.stat().st_size for path in (run.checkpoints / "step-00000002").iterdir())
    assert rows[0]["bytes"] == size
    assert [info.as_json() for info in cdrmix.checkpoints(run.path)] == rows
    assert main(["checkpoints", "list", str(run.path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:2] == ["step-00000002", str(rows[0]["tokens"])]
    assert f"{bits[2]:.4f}  best" in shown[1]
    assert shown[-1].endswith("step-00000006/model.safetensors is missing")


def test_every_damaged_file_is_named(run: RunFolder, capsys: Captured) -> None:
    assert main(["checkpoints", "verify", str(run.path)]) == 0
    assert capsys.readouterr().out == "4 checkpoint(s): all files match their hashes\n"
    flip(run.checkpoints / "step-00000002" / "model.safetensors")
    (run.checkpoints / "step-00000004" / "optimizer-rank0.safetensors").unlink()
    (run.checkpoints / "step-00000004" / "state.json").write_text("{")
    (run.checkpoints / "step-00000006" / "manifest.json").write_text('{"format": 2, "files": {"../x": {}}}')
    (run.checkpoints / "latest").write_text("step-00000099\n")
    assert main(["checkpoints", "verify", str(run.path)]) == 5
    told = capsys.readouterr().out.splitlines()
    for line, (name, what) in zip(
        told,
        (
            ("step-00000002/model.safetensors", "is corrupt: its SHA-256"),
            ("step-00000004/optimizer-rank0.safetensors", "is missing"),
            ("step-00000004/state.json", "is corrupt: it has 1 bytes"),
            ("step-00000006/manifest.json", "is corrupt: it is not the manifest"),
            ("checkpoints/latest", "names step-00000099, which does not exist"),
        ),
        strict=True,
    ):
        assert f"{name} {what}" in line
    assert main(["checkpoints", "verify", str(run.checkpoints / "step-00000008")]) == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"..", b"../..\n", b"/etc\n", b"step-00000002/../step-00000004", b"\xff\xfe", b"\0", b"x" * 10_000_000],
)
def test_a_pointer_that_names_no_checkpoint(content: bytes, run: RunFolder, capsys: Captured) -> None:
    """By whatever reads latest and best: it is told, and nothing outside of the folder is read or removed."""
    for name in ("latest", "best"):
        (run.checkpoints / name).write_bytes(content)
        assert main(["generate", "--model", str(run.checkpoints / name)]) == 5
        assert f"{run.checkpoints / name} names no checkpoint; allowed:" in capsys.readouterr().err
    assert main(["checkpoints", "verify", str(run.path)]) == 5
    assert capsys.readouterr().out.count("names no checkpoint") == 2
    assert main(["generate", "--model", str(run.path), "--checkpoint", "best", "--max-new-tokens", "1"]) == 0
    assert main(["checkpoints", "prune", str(run.path), "--keep-last", "1"]) == 0
    assert steps(run.path)[-1] == 8
    capsys.readouterr()


def test_prune_follows_the_rules(run: RunFolder, capsys: Captured) -> None:
    queue = run.path / "eval" / "queue"
    shutil.copytree(run.checkpoints / "step-00000004", queue / "step-00000004")
    command = ["checkpoints", "prune", str(run.path), "--keep-last", "1"]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "would remove step-00000006",
        "kept step-00000002: best",
        "kept step-00000004: queued",
        "kept step-00000008: last",
    ]
    assert steps(run.path) == [2, 4, 6, 8]
    with run.locked():
        assert main(command) == 2
        assert "another process is working on this run" in capsys.readouterr().err
    assert main([*command, "--keep-every", "6"]) == 0
    assert steps(run.path) == [2, 4, 6, 8]
    (run.checkpoints / "step-00000010.tmp-7").mkdir()
    assert main(command) == 0
    assert steps(run.path) == [2, 4, 8]
    assert steps(queue.parent) == []
    assert (queue / "step-00000004" / "manifest.json").is_file()
    assert list(run.checkpoints.glob("*.tmp-*")) == []


def test_a_start_sweeps_what_a_kill_has_left(
    toy_run: Path, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "_after_training", lambda *_: None)
    root = tmp_path / "runs"
    run, other = (RunFolder.open(shutil.copytree(toy_run, root / name)) for name in (toy_run.name, f"{toy_run.name}-2"))
    run.update_summary({"finished": False})
    removed = "step-00000002.tmp-7-removed"
    for checkpoints, name in (
        (run.checkpoints, "step-00000006.tmp-7"),
        (run.checkpoints, removed),
        (other.checkpoints, "step-00000006.tmp-7"),  # perhaps it is being written, on another machine
        (other.checkpoints, removed),
    ):
        shutil.copytree(run.checkpoints / "step-00000004", checkpoints / name)
    old, new, restored, foreign = (
        root / name for name in ("20250101T000000Z-12345678", "20250101T000001Z-12345678", ".restore-7.tmp", "mine")
    )
    for folder in (old, new, restored, foreign):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config_snapshot.yaml").write_text("")
        for path in (folder / "checkpoints", folder / "config_snapshot.yaml", folder):
            os.utime(path, (0, 0) if folder != new else None)
    assert main(["train", "--resume", str(run.path), f"run.root={root}"]) == 0
    assert sorted(path.name for path in root.iterdir()) == sorted([run.path.name, other.path.name, new.name, "mine"])
    assert [path.name for path in run.checkpoints.glob("*.tmp-*")] == []
    assert [path.name for path in other.checkpoints.glob("*.tmp-*")] == ["step-00000006.tmp-7"]
    assert steps(run.path) == steps(other.path) == [2, 4]


def test_prune_keeps_the_only_complete_one(run: RunFolder, capsys: Captured) -> None:
    (run.checkpoints / "best").unlink()
    for step in (2, 6, 8):
        flip(run.checkpoints / f"step-{step:08d}" / "model.safetensors")
    command = ["checkpoints", "prune", str(run.path), "--keep-last", "1"]
    assert main(command) == 0
    assert "kept step-00000004: the only complete one" in capsys.readouterr().out
    assert steps(run.path) == [4, 8]
    flip(run.checkpoints / "step-00000004" / "model.safetensors")
    assert main(command) == 5
    assert "is complete, so none is removed" in capsys.readouterr().err
    assert steps(run.path) == [4, 8]


def test_what_is_no_run_with_checkpoints(run: RunFolder, tmp_path: Path, capsys: Captured) -> None:
    for name in ("list", "verify", "prune", "mirror"):
        assert main(["checkpoints", name, str(tmp_path / "none")]) == 2
        assert "is not a run folder" in capsys.readouterr().err
        assert main(["checkpoints", name, str(run.export)]) == 2
        assert "is an exported model, not a run folder" in capsys.readouterr().err
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    assert main(["checkpoints", "list", str(run.path)]) == 0
    assert capsys.readouterr().err == f"{run.path} has no checkpoints\n"
    for name in ("verify", "prune"):
        assert main(["checkpoints", name, str(run.path)]) == 5
        assert "has no checkpoints" in capsys.readouterr().err


def test_a_model_is_taken_from_the_checkpoint_that_is_wanted(run: RunFolder, capsys: Captured) -> None:
    (run.checkpoints / "step-00000006").rename(run.path / "six")
    shutil.rmtree(run.checkpoints / "step-00000008")
    bits = {row["step"]: row["valid_bits_per_byte"] for row in read_metrics(run.metrics_jsonl)}
    assert cdrmix.load(run.path, device="cpu").step == 4
    assert cdrmix.load(run.path, checkpoint="best", device="cpu").step == 2
    generate = ["generate", "--model", str(run.path), "--max-new-tokens", "1"]
    assert main([*generate, "--checkpoint", "best"]) == 0
    told = capsys.readouterr().err
    assert told.startswith(
        f"Using step-00000002, the best on held-out text ({bits[2]:.4f} bits per byte in its validation)"
    )
    assert main([*generate, "--checkpoint", "step-00000003"]) == 2
    assert "step-00000003 is no checkpoint of" in capsys.readouterr().err
    assert main(["generate", "--model", str(run.export), "--checkpoint", "best"]) == 2
    assert "--checkpoint selects one of a run folder" in capsys.readouterr().err
    (run.checkpoints / "best").unlink()
    with pytest.warns(CdrmixWarning, match="none is marked as the best"):
        assert cdrmix.load(run.path, checkpoint="best", device="cpu").step == 4


def test_a_mirror_is_made_by_hand_and_refused_where_it_belongs_to_another(
    run: RunFolder, tmp_path: Path, capsys: Captured
) -> None:
    assert main(["checkpoints", "mirror", str(run.path)]) == 2
    assert "has no run.mirror; name a folder with --to" in capsys.readouterr().err
    store = tmp_path / "store"
    command = ["checkpoints", "mirror", str(run.path), "--to", str(store)]
    assert main(command) == 0
    copied = store / run.path.name
    # The newest first, then the best, then the others that train.keep_last keeps.
    assert capsys.readouterr().out.split()[1::2] == ["step-00000008", "step-00000002", "step-00000006"]
    assert steps(copied) == [2, 6, 8]
    assert main(["checkpoints", "verify", str(copied)]) == 0
    assert main(["compare", str(run.path), str(copied)]) == 0
    flip(copied / "tokenizer.json")
    capsys.readouterr()
    assert main(["checkpoints", "verify", str(copied)]) == 5
    assert f"{copied / 'tokenizer.json'} is corrupt" in capsys.readouterr().out
    assert main(["checkpoints", "list", str(store)]) == 2
    assert f"name one of them: {copied}" in capsys.readouterr().err
    flip(run.checkpoints / "step-00000006" / "model.safetensors")
    shutil.rmtree(copied / "checkpoints" / "step-00000006")
    assert main(command) == 5
    assert "step-00000006/model.safetensors is corrupt" in capsys.readouterr().err
    run.update_summary({"mirror_id": "another"})
    assert main(command) == 2
    assert "is the mirror of another run of that name" in capsys.readouterr().err
    shutil.rmtree(copied)
    (copied / "checkpoints").mkdir(parents=True)
    assert main(command) == 2
    assert "has files but no mirror.json" in capsys.readouterr().err
    store = tmp_path / "a" / "b"  # its parent is missing, as that of an unplugged drive
    assert main(["checkpoints", "mirror", str(run.path), "--to", str(store)]) == 2
    assert f"cannot be written: No such file or directory: {store}" in capsys.readouterr().err
    for folder in (run.path.parent, run.path, run.path / "checkpoints", run.path / "inner"):
        assert main(["checkpoints", "mirror", str(run.path), "--to", str(folder)]) == 2
        assert "is in the folder of the run itself, or around it" in capsys.readouterr().err
    assert not (run.path / "inner").exists()
