"""The comparison of settings: equal cost, runs that are not repeated, the table, and the errors."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import recipes
import yaml

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
TOY = (
    *("model.vocab_size=300", "model.d_model=32", "model.layers=2", "model.attention_fraction=0.5"),
    *("model.attention={heads: 1, kv_heads: 1}", "model.feed_forward={hidden: 16, experts: 4}"),
    *("data.row_length=32", "data.max_documents=30", "train.batch_rows=2", "train.micro_batch_rows=1"),
    *("train.steps=40", "train.warmup_steps=4", "train.evaluate_rows=4"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Settings of a toy: the reference, one with half as many rows a step, and one that cannot learn."""
    toy = [*TOY, f"data.cache={tmp_path / 'cache'}"]
    settings = {
        "plain": toy,
        "one row": [*toy, "train.batch_rows=1"],
        "no rate": [*toy, "train.learning_rate=1.0e-9"],
    }
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"config": "configs/base/tiny.yaml", "settings": settings}, sort_keys=False))
    return path


def compare(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, as a user runs it."""
    command = [sys.executable, str(BENCHMARKS / "recipes.py"), str(file), "--validations", "2", *arguments]
    return subprocess.run(command, check=False, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)


def refused(file: Path, *arguments: str) -> str:
    """What the program says to arguments that it refuses."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(BENCHMARKS)}
    status, output = forked.run([BENCHMARKS / "recipes.py", file, *arguments], environment)
    assert status == 2, output
    return output


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "recipes").iterdir()), ids=lambda path: path.stem)
def test_all_settings_of_the_files_are_valid(path: Path) -> None:
    file = yaml.safe_load(path.read_text())
    settings = {name: Config.from_yaml(ROOT / file["config"], each) for name, each in file["settings"].items()}
    assert len({config.hash() for config in settings.values()}) == len(settings) > 1


@pytest.mark.long
def test_a_comparison_from_its_file_to_its_table(file: Path, tmp_path: Path) -> None:
    """Equal operations: twice the steps of half the rows. A second call makes the missing runs alone."""
    out = tmp_path / "out"
    first = compare(file, "--equal", "operations", "--seeds", "1", "--out", str(out))
    assert first.returncode == 0, first.stderr
    runs = {row["name"]: row for row in map(json.loads, (out / "runs.jsonl").read_text().splitlines())}
    assert {name: row["steps"] for name, row in runs.items()} == {"plain": 40, "one row": 80, "no rate": 40}
    assert {row["tokens"] for row in runs.values()} == {40 * 2 * 32}
    assert len(runs["plain"]["curve"]) == 2
    assert runs["plain"]["curve"][-1][1] == runs["plain"]["bits_per_byte"] < runs["no rate"]["bits_per_byte"]
    cells = [cell.strip() for cell in first.stdout.splitlines()[-1].strip("|").split("|")]
    assert (cells[:2], cells[5:]) == (["no rate", "40"], ["not reached"] * 3)
    assert (out / "bits.png").read_bytes().startswith(b"\x89PNG")

    for equal, seeds in (("operations", [2]), ("steps", [1, 2])):  # runs that are equal in something else are others
        before = (out / "runs.jsonl").read_text()
        again = compare(file, "--equal", equal, "--seeds", "1", "2", "--only", "plain", "--out", str(out))
        assert again.returncode == 0, again.stderr
        made = [json.loads(row) for row in (out / "runs.jsonl").read_text().removeprefix(before).splitlines()]
        assert sorted((row["name"], row["seed"]) for row in made) == [("plain", seed) for seed in seeds]


@pytest.mark.long
def test_a_run_that_fails_loses_no_other(file: Path, tmp_path: Path) -> None:
    """A rate at which the loss is soon not finite ends its run; the other one is in the file, and is not repeated."""
    settings = yaml.safe_load(file.read_text())
    settings["settings"]["no rate"][-1:] = ["train.learning_rate=1.0e+30"]
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    done = compare(file, "--seeds", "1", "--only", "no rate", "--only", "one row", "--out", str(tmp_path / "out"))
    assert done.returncode == 9, done.stderr
    assert done.stderr.startswith("recipes.py: error: ")
    (line,) = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == "one row"


@pytest.mark.parametrize("option", ["--only", "--plot"])
def test_settings_that_the_file_lacks_are_refused(file: Path, tmp_path: Path, option: str) -> None:
    said = refused(file, option, "muon", "--out", str(tmp_path / "out"))
    assert "has no settings named muon: it has plain, one row, no rate" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "allowed: two keys"),
        ("config: configs/base/tiny.yaml\nsettings: {}\n", "allowed: two keys"),
        ("config: 5\nsettings: {a: []}\n", "allowed: two keys"),
        ("config: configs/base/tiny.yaml\nsettings: {a: []}\nseeds: 3\n", "allowed: two keys"),
        ("config: configs/base/tiny.yaml\nsettings: {a: 5}\n", "allowed: two keys"),
        ("config: configs/base/tiny.yaml\nsettings: {a: [}\n", "expected the node content"),
        ("config: configs/nowhere.yaml\nsettings: {a: []}\n", "settings 'a': "),
        ("config: configs/base/tiny.yaml\nsettings: {a: [train.stpes=3]}\n", "train.stpes: unknown key"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        recipes.read(path)
    assert said in str(caught.value)


def test_the_length_of_a_batch_warm_up_is_not_made_equal(file: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(file.read_text())
    settings["settings"]["one row"][-1:] = ["train.batch_warmup={rows: 1, steps: 9}"]
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    said = refused(file, "--equal", "operations", "--out", str(tmp_path / "out"))
    assert "settings 'one row': train.batch_warmup is allowed with --equal steps only" in said


def test_runs_of_another_configuration_and_cut_off_lines_are_no_results(tmp_path: Path) -> None:
    settings = {"a": recipes.Settings("a", ROOT / "configs" / "base" / "tiny.yaml", ())}
    other = {"a": recipes.Settings("a", ROOT / "configs" / "moe-arch-tiny.yaml", ())}
    run = recipes.Measured("steps", "a", settings["a"].config.hash(), 1, 500, 10, 1.0, 1.0, 2.0, [(10, 2.0)])
    record, line = tmp_path / "runs.jsonl", json.dumps(dataclasses.asdict(run))
    record.write_text(f"{line}\n{line[:-9]}")
    assert recipes.finished(record, settings, "steps")["a"].keys() == {1}
    assert record.read_text() == f"{line}\n"
    assert not recipes.finished(record, other, "steps")["a"]
    assert not recipes.finished(record, settings, "seconds")["a"]
    record.write_text('{"name": "a"}\n')
    with pytest.raises(ConfigError, match="give another --out"):
        recipes.finished(record, settings, "steps")


def test_the_share_of_the_tokens_until_a_loss() -> None:
    """Interpolated between validations; infinite if the curve does not come so low; what is before is not known."""
    assert recipes.reaches([(100, 2.0)], 2.5) == recipes.reaches([(100, 2.0), (200, 2.0)], 2.5) == 100
    curve = [(100, 3.0), (200, 2.0), (300, 1.0)]
    assert recipes.reaches(curve, 1.5) == 250
    assert recipes.reaches(curve, 2.0) == 200
    assert recipes.reaches(curve, 0.9) == float("inf")
