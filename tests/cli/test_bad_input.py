"""Broken input: the user sees one message and the exit code of its kind, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.run_folder import RunFolder

Arguments = Callable[..., list[str]]
GOOD = [json.dumps({"text": f"Line {number} of a small corpus, which says {number * number}."}) for number in range(40)]


def corpus(folder: Path, kind: str) -> list[str]:
    """Writes a broken corpus; returns the overrides that read it."""
    if kind == "missing path":
        return ["data.source.kind=jsonl", f"data.source.paths=[{folder / 'nowhere.jsonl'}]"]
    if kind == "empty":
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").touch()
        return ["data.source.kind=text", f"data.source.paths=[{folder / 'text'}]"]
    file = folder / "lines.jsonl"
    if kind == "not JSON":
        file.write_text("\n".join([*GOOD[:3], "{not json", *GOOD[3:]]) + "\n")
    elif kind == "invalid UTF-8":
        file.write_bytes("\n".join(GOOD).encode() + b'\n{"text": "\xff\xfe"}\n')
    else:
        assert kind == "field"
        file.write_text("\n".join(line.replace("text", "body") for line in GOOD) + "\n")
    return ["data.source.kind=jsonl", f"data.source.paths=[{file}]", "data.max_bad_records=0"]


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("missing path", ["nowhere.jsonl", "data.source.paths"]),
        ("empty", ["at least two different documents"]),
        ("not JSON", ["lines.jsonl:4", "data.max_bad_records"]),
        ("invalid UTF-8", ["lines.jsonl:41", "UTF-8"]),
        ("field", ["lines.jsonl:1", "text"]),
    ],
)
def test_a_broken_corpus(
    kind: str, messages: list[str], arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}", *corpus(tmp_path, kind)]
    assert main(["train", *arguments(*overrides)]) == 3
    error = capsys.readouterr().err
    assert error.startswith("cdrmix: error: ")
    for message in messages:
        assert message in error
    assert not [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".")]


def test_malformed_lines_below_the_limit_are_counted_and_skipped(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [f"run.root={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    overrides = [*where, *corpus(tmp_path, "not JSON"), "data.max_bad_records=1"]
    assert main(["data", "prepare", *arguments(*overrides)]) == 0
    out = capsys.readouterr().out
    assert "lines.jsonl:4" in out
    assert "1 bad record" in out


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (None, ["run.yaml", "no such file"]),
        ("", ["run.yaml"]),
        ("model: [\n", ["run.yaml:2"]),
        ("- a\n- b\n", ["run.yaml:1"]),
        ("base: TINY\ntrain: {stepz: 3}\n", ["run.yaml:2", "train.stepz", "did you mean train.steps"]),
        ("base: TINY\nmodel:\n  layers: four\n", ["run.yaml:3", "model.layers", '"four"']),
        ("base: TINY\nmodel:\n  feed_forward: {top_k: 9}\n", ["run.yaml:3", "model.feed_forward.top_k", "8"]),
        ("base: TINY\ntrain: {precision: fp8, zero_stage: 4}\n", ["train.precision", "bf16", "train.zero_stage", "3"]),
        ("base: nowhere.yaml\n", ["run.yaml:1", "nowhere.yaml"]),
    ],
)
def test_a_broken_configuration(
    text: str | None, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text.replace("TINY", str(tiny)))
    assert main(["train", "--config", str(file), f"run.root={tmp_path / 'runs'}"]) == 2
    error = capsys.readouterr().err
    for message in messages:
        assert message.lower() in error.lower(), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("default::cdrmix.errors.CdrmixWarning")
def test_a_corrupt_checkpoint_is_passed_over(
    arguments: Arguments, toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "runs" / toy_run.name
    shutil.copytree(toy_run, copy)
    for name in ("export", "report.html"):
        shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
    weights = copy / "checkpoints" / "step-00000004" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert main(["compare", str(toy_run), str(copy)]) == 1
    warning = capsys.readouterr().err
    assert warning.startswith("cdrmix: warning: ")
    assert "step-00000004" in warning
    assert warning.endswith("; step-00000002 is used instead\n")
    RunFolder.open(copy).update_summary({"finished": False})
    command = ["train", *arguments(f"run.root={toy_run.parent}"), "--resume", str(copy)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "skipped step-00000004" in out
    assert "continuing from step-00000002" in out
    assert main(["compare", str(toy_run), str(copy)]) == 0  # trained again to the same bits
    for checkpoint in (copy / "checkpoints").glob("step-*/model.safetensors"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    assert main(["eval", "--model", str(copy)]) == 5
    assert "corrupt" in capsys.readouterr().err


def test_corrupt_and_truncated_shards_are_refused(
    arguments: Arguments, toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.cache={tmp_path / 'cache'}", f"run.root={tmp_path / 'runs'}"]
    assert main(["data", "prepare", *arguments(*overrides)]) == 0
    (tokens,) = (tmp_path / "cache").glob("*/train.tokens-00000.bin")
    whole = tokens.read_bytes()
    for damaged, message in ((whole[:-2], "truncated"), (bytes([whole[0] ^ 1]) + whole[1:], "SHA-256")):
        tokens.write_bytes(damaged)
        assert main(["train", *arguments(*overrides)]) == 4
        error = capsys.readouterr().err
        assert tokens.name in error
        assert message in error


def test_a_tokenizer_too_large_for_the_model_is_a_vocabulary_error(
    arguments: Arguments, toy_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.tokenizer.path={toy_run / 'tokenizer.json'}", "model.vocab_size=260"]
    assert main(["train", *arguments(f"run.root={tmp_path / 'runs'}", *overrides)]) == 7
    assert "model.vocab_size" in capsys.readouterr().err
