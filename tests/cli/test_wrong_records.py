"""A run's files with a wrong value in any place: a command ends with a sentence, and resuming loses nothing."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.hf.card import model_card
from cdrmix.records import PhaseRecord, StepRecord, end_last_line, read_records
from cdrmix.report import domains, parts, report, stage_b, suites
from cdrmix.run_folder import RunFolder
from cdrmix.summary import Summary
from cdrmix.training.checkpoint import read_progress
from cdrmix.training.metrics import scalars

Captured = pytest.CaptureFixture[str]
WRONG = (None, [], {}, "", True, 1e300, -1)
SCORE = {
    "loss_nats_per_token": 2.0,
    "perplexity": 7.4,
    "bits_per_byte": 1.5,
    "tokens": 100,
    "text_bytes": 300,
    "unigram_bits_per_byte": 4.0,
    "gzip9_bits_per_byte": 3.0,
    "zstd19_bits_per_byte": 2.5,
}
HELD_OUT = SCORE | {"domains": {"web": SCORE}}
GOOD_SUMMARY = {
    "corpus": {"shards": "s", "index_sha256": "i", "tokenizer_sha256": "t", "documents": 7},
    "demonstration": {"lines": ["a", "b"], "answers": ["c"]},
    "environment": {"python": "3", "versions": {"torch": "2"}},
    "evaluations_logged": 1,
    "export": {"step": 4, "average": 1, "files": 3},
    "held_out": HELD_OUT,
    "held_out_before": SCORE,
    "held_out_before_step": 0,
    "held_out_step": 4,
    "lost_seconds": 2.0,
    "mechanisms": {"plasticity": {"1": {"on": 0.5, "off": 0.1}, "2": {"on": 0.4}}},
    "mechanisms_step": 4,
    "mirror_id": "m",
    "mlflow_run": "r",
    "not_trained": "nothing",
    "parameters": {"stored": 10, "active": 5},
    "questions_fingerprint": "q",
    "recorded_step": 4,
    "restarts": 1,
    "sample": {"prompt": "p", "text": "t"},
    "stage_a": {"step": 4, "seconds": 1.0, "tokens_per_second": 10.0},
    "stage_b": {"step": 5, "seconds": 1.0},
    "trackers": ["wandb"],
}


def step(number: int) -> dict[str, Any]:
    """A row with every field of a StepRecord."""
    figures = {"a": 2.0, "b": 1.5}
    row = {name: 1.0 for name, kind in get_type_hints(StepRecord).items() if kind is float}
    return row | {
        "step": number,
        "tokens": 100 * number,
        "routers": ["0", "2"],
        "router": {name: [0.9, 0.8] for name in ("entropy_bits", "entropy_normalised", "overflow", "dead_experts")},
        "load": [[0.5, 0.5], [0.25, 0.75]],
        "depth": {"1": 0.5, "1.mixer": 0.4},
        "valid_bits_per_byte": 1.5,
        "valid_loss": 2.0,
        "valid_preferences": {},
        "prediction_losses": {"2": 3.0, "3": 4.0},
        **dict.fromkeys(("valid_domains", "parts", "valid_parts", "preferences"), figures),
    }


def phase(name: str, number: int) -> dict[str, Any]:
    figures = {name: 1.0 for name, kind in get_type_hints(PhaseRecord).items() if kind is float}
    measures = {"accuracy": 0.5, "reward": 0.4, "entropy": 0.2}
    return figures | {"step": 4 + number, "phase": name, "phase_step": number, "measures": measures}


def digest(number: int) -> dict[str, Any]:
    digests = base64.b64encode(bytes(8)).decode()
    return {"step": number, "loss": 2.0, "state": digests, "weights": digests}


MEASURES = [{"name": "rate", "value": 0.5, "low": 0.4, "high": 0.6, "count": 9, "problem": None}]
EVALUATION = {"suite": "code", "sha256": "s", "reason": None, "options": {"seed": 1}, "measures": MEASURES}
ROLLOUT = {"question": "q\u2028", "right": ["a"], "memories": ["m"], "answer": "a", "reward": 1.0, "task": None}
FILES: dict[str, list[dict[str, Any]]] = {
    "metrics.jsonl": [*map(step, (1, 2, 3)), phase("plasticity", 1), phase("policy", 2)],
    "rollouts.jsonl": [{"step": number, **ROLLOUT} for number in (5, 6)],
    "extensions.jsonl": [{"time": "t", "step": 2, "from": "a", "to": "b", "keys": {"train.steps": [1, 2]}}],
    "eval/metrics.jsonl": [EVALUATION | {"step": each, "status": "measured"} for each in (2, 4)],
    "digests.jsonl": [{"parameters": ["a", "b"]}, digest(1), digest(2)],
}


def changed(data: Any) -> Iterator[tuple[str, Any]]:
    """The data with one value, at any depth, replaced by each wrong one, or left out. Of a list, its last item."""
    for key in data if isinstance(data, dict) else [len(data) - 1] if isinstance(data, list) and data else []:
        less = copy.copy(data)
        del less[key]
        yield f".{key} left out", less
        for wrong in (*WRONG, *((each, text) for text, each in changed(data[key]))):
            where, value = (wrong[1], wrong[0]) if isinstance(wrong, tuple) else (f"={wrong!r}", wrong)
            other = copy.copy(data)
            other[key] = value
            yield f".{key}{where}", other


def write(run: Path, name: str, rows: Iterable[Any]) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture(scope="module")
def whole(toy_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has every file, and every key of metrics.json."""
    run = Path(shutil.copytree(toy_run, tmp_path_factory.mktemp("whole") / toy_run.name))
    for name, rows in FILES.items():
        write(run, name, rows)
    RunFolder(run).update_summary(GOOD_SUMMARY)
    assert RunFolder(run).summary() == json.loads((run / "metrics.json").read_text())
    assert RunFolder(run).summary().keys() == get_type_hints(Summary).keys() - {"model_config"}
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have their tables of metrics alone, and are not written."""
    monkeypatch.setattr(report, "_checkpoints", lambda folder: "")
    for module in (report, domains, parts, stage_b, suites):
        for name in [*vars(module)]:
            if name.startswith(("draw", "write_atomically")):
                monkeypatch.setattr(module, name, lambda *_, **__: b"")


def is_refused(run: Path, name: str, what: str) -> bool:
    """Whether the report refuses a file. Then the message has the line, and the remedy."""
    try:
        report.write_report(RunFolder(run))
    except ConfigError as error:
        told = str(error)
    else:
        return False
    assert told.startswith(f"{run / name}:"), (what, told)
    assert told.endswith("restore it, or remove this line"), (what, told)
    return True


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "extensions.jsonl", "eval/metrics.jsonl"])
def test_a_wrong_value_in_a_row(name: str, run: Path) -> None:
    """In the last row of each kind: the row is refused, or the report shows it."""
    rows = FILES[name]
    found = []
    for number in {tuple(row): number for number, row in enumerate(rows)}.values():
        for what, row in changed(rows[number]):
            write(run, name, [*rows[:number], row, *rows[number + 1 :]])
            found.append(is_refused(run, name, what))
            if name == "metrics.jsonl" and not found[-1]:
                assert all(map(scalars, read_records(run / name).all))
    assert {*found} == {True, False}


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("key", "value"), [("load", [[1.5, -0.5]] * 2), ("seconds", -1.0), ("step", True), ("tokens", -1)]
)
def test_a_value_beyond_its_bounds(key: str, value: object, run: Path) -> None:
    write(run, "metrics.jsonl", [step(1), step(2) | {key: value}, step(3)])
    assert is_refused(run, "metrics.jsonl", key)


@pytest.mark.usefixtures("without_plots")
def test_a_wrong_value_in_a_summary(run: Path) -> None:
    """The whole key is missing then, for everybody who reads it; all others are as they were."""
    config = Config.from_yaml(run / "config_snapshot.yaml")
    good, seen = json.loads((run / "metrics.json").read_text()), set[str]()
    for what, summary in changed(good):
        (run / "metrics.json").write_text(json.dumps(summary))
        read = RunFolder(run).summary()
        differing = {key for key in good if read.get(key) != good[key]}
        assert differing <= {what.split(".")[1].split("=")[0].removesuffix(" left out")}, what
        if (text := str(read)) not in seen:
            seen.add(text)
            report.write_report(RunFolder(run))
            assert model_card(config, 4, 1, read)


BOUNDED = ("seconds", "lost_seconds", "load")


def with_figures(data: Any, value: float | None) -> Any:
    """The data with each number that has a fraction replaced; but for seconds and loads, which have bounds."""
    if isinstance(data, dict):
        return {key: each if key in BOUNDED else with_figures(each, value) for key, each in data.items()}
    if isinstance(data, list):
        return [with_figures(each, value) for each in data]
    return value if isinstance(data, float) else data


@pytest.mark.parametrize("value", [None, 1e100, -1.0, 0.0])
def test_figures_of_any_size_are_drawn(value: float | None, run: Path, capsys: Captured) -> None:
    for name in ("metrics.jsonl", "eval/metrics.jsonl"):
        write(run, name, with_figures(FILES[name], value))
    (run / "metrics.json").write_text(json.dumps(with_figures(GOOD_SUMMARY, value)))
    assert main(["report", str(run)]) == 0, capsys.readouterr().err


COMMANDS = {
    "report": ["report"],
    "checkpoints list": ["checkpoints", "list"],
    "gate": ["gate", "--preset", "quick", "--model"],
    "export": ["export", "--out", "exported", "--checkpoint", "best", "--model"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_damaged_line_is_named_by_every_command(
    command: list[str], run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "phase" not in row]
    write(run, "metrics.jsonl", [rows[0], rows[1] | {"loss": "x"}, rows[2]])
    assert main([*command, str(run)]) == 2
    where = f"{run / 'metrics.jsonl'}:2: loss: found 'x'; allowed: a valid number; the file is damaged"
    assert where in capsys.readouterr().err


def test_resuming_loses_no_damaged_line(run: Path, capsys: Captured) -> None:
    """metrics.jsonl is refused before any work. What cannot be read in the other files stays."""
    rows = FILES["metrics.jsonl"][:3]
    write(run, "metrics.jsonl", [rows[0], {**rows[1], "load": [[]]}, rows[2]])
    (run / "digests.jsonl").write_text('{"parameters": []}\n{"step": 1, "loss"\n{"step": "x"}\n{"step": 9}\n{"step"')
    before = (run / "metrics.jsonl").read_bytes()
    RunFolder(run).update_summary({"finished": False})
    assert main(["train", "--config", str(run / "config_snapshot.yaml"), "--resume", str(run)]) == 2
    assert f"{run / 'metrics.jsonl'}:2: found" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        RunFolder(run).drop_metrics_after(1)
    assert (run / "metrics.jsonl").read_bytes() == before
    RunFolder(run).drop_records_after(4)
    assert (run / "digests.jsonl").read_text() == '{"parameters": []}\n{"step": 1, "loss"\n{"step": "x"}\n'


def test_the_rows_of_a_run_have_one_number_of_routers(run: Path) -> None:
    rows = FILES["metrics.jsonl"][:3]
    fewer = rows[2] | {"routers": ["0"], "load": [[0.5, 0.5]], "router": {"entropy_bits": [1.0]}}
    experts = rows[2] | {"load": [[0.5, 0.5], [0.2, 0.3, 0.5]]}
    for row, what in (
        (fewer, r"\[1\] routers; allowed: \[2\]"),
        (experts, r"experts of each router; allowed: \[2, 2\]"),
    ):
        write(run, "metrics.jsonl", [*rows[:2], row])
        with pytest.raises(ConfigError, match=rf"metrics\.jsonl:3: load: found .*{what}, as in .*:1; the file"):
            read_records(run / "metrics.jsonl")


def test_a_comparison_names_a_damaged_digest(whole: Path, run: Path, capsys: Captured) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # so that the weights differ, and digests are looked at
    assert main(["compare", str(whole), str(run)]) == 1
    names, first, _ = FILES["digests.jsonl"]
    for number, row in (
        (1, {"parameters": "x"}),
        (1, {"parameters": [1]}),
        (2, first | {"state": "AAAA"}),
        (2, first | {"weights": "no base64"}),
        (2, first | {"weights": None}),
        (2, first | {"loss": "x"}),
        (2, first | {"step": None}),
        (2, []),
    ):
        write(run, "digests.jsonl", [row] if number == 1 else [names, row])
        assert main(["compare", str(whole), str(run)]) == 2, row
        assert f"{run / 'digests.jsonl'}:{number}: " in capsys.readouterr().err


def test_old_and_odd_rows_are_read(run: Path) -> None:
    """Rows of older and of newer versions; null is NaN, and None where there is no figure; a torn last line is none."""
    row = {name: each for name, each in step(1).items() if name not in ("routers", "load", "depth", "valid_loss")}
    text = json.dumps(row | {"loss": None, "valid_bits_per_byte": None, "of_a_newer_version": 1})
    (run / "metrics.jsonl").write_text(f"{text}\n\n{text[:-9]}")
    (record,) = read_records(run / "metrics.jsonl").steps
    assert math.isnan(record.loss)
    assert (record.valid_bits_per_byte, record.valid_loss, record.depth) == (None, None, {})
    assert record.router_names == ["0", "1"]


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 600 + "]" * 600, "1" * 5000], ids=["no text", "deep", "digits"])
def test_json_that_no_text_can_show(value: str, run: Path, capsys: Captured) -> None:
    (run / "metrics.json").write_text(f'{{"name": {value}, "corpus": {{"shards": "s", "other": {value}}}, "x": 1}}')
    rows = (run / "rollouts.jsonl").read_text().replace('"q\u2028"', value)
    assert RunFolder(run).summary() in ({}, {"x": 1})
    assert main(["report", str(run)]) == 0
    RunFolder(run).update_summary({"finished": True})
    (run / "rollouts.jsonl").write_text(rows)
    assert main(["report", str(run)]) == 2
    assert f"{run / 'rollouts.jsonl'}:1: " in capsys.readouterr().err


def test_a_step_that_waits_for_its_validation(run: Path) -> None:
    """Its record is in the state of the checkpoint."""
    path = run / "checkpoints" / "step-00000004" / "state.json"
    state = json.loads(path.read_text())
    for fields, right in (
        (step(4), True),
        (step(4) | {"loss": None}, True),
        ({"step": 4}, False),
        ({**step(4), "load": 1}, False),
    ):
        path.write_text(json.dumps(state | {"progress": state["progress"] | {"unvalidated": fields}}))
        with contextlib.nullcontext() if right else pytest.raises(CheckpointError, match=r"state\.json"):
            assert read_progress(path.parent).unvalidated == fields


def test_what_is_appended_after_a_torn_line_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for before, kept in (
        ('{"a": 1}\n{"a', ['{"a": 1}']),
        ('{"a": 1}', ['{"a": 1}']),
        ('{"a": 1}\n', ['{"a": 1}']),
        ("", []),
    ):
        path.write_text(before)
        end_last_line(path)
        with path.open("a") as file:
            file.write('{"b": 2}\n')
        assert path.read_text().splitlines() == [*kept, '{"b": 2}']
