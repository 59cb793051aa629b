"""Tests of the run folder and of metrics.jsonl."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import re
import sys
import types
from pathlib import Path

import pytest
from json_rows import read_metrics

from cdrmix import workflow as lifecycle
from cdrmix.config.batch_sizes import BatchSizes
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError, DiskFullError
from cdrmix.records import StepRecord
from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder, finite
from cdrmix.training.console import Console
from cdrmix.training.metrics import scalars
from cdrmix.training.trackers import Trackers, check_trackers
from cdrmix.units import amount, clock

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.from_yaml(TINY, [f"run.root={tmp_path / 'experiments'}"])


def record(step: int, *, loss: float = 2.5, valid: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=step / 100,
        loss=loss,
        next_token_loss=loss - 0.1,
        load_balance=1.0,
        z_loss=0.5,
        learning_rate=1e-3,
        gradient_norm=0.7,
        tokens=2048 * step,
        tokens_per_second=10_700.0,
        seconds=0.2 * step,
        memory_gib=0.5,
        router={"entropy_bits": [2.9, 2.8], "entropy_normalised": [0.97, 0.93]},
        valid_bits_per_byte=valid,
        valid_loss=valid,
    )


def test_a_run_folder_is_named_by_time_and_hash_and_never_overwritten(config: Config) -> None:
    runs = [RunFolder.create(config) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{config.hash()[:8]}(-\d)?", run.path.name)
        assert Config.from_yaml(run.config_snapshot) == config
        assert run.checkpoints.is_dir()
        assert not run.finished
    assert runs[0].summary()["environment"]["versions"]["torch"]


def test_auto_resume_takes_the_newest_unfinished_run_of_this_configuration(config: Config) -> None:
    assert RunFolder.resume(config, "auto") is None
    runs = [RunFolder.create(config) for _ in range(12)]  # -10 and later sort before -2 as text
    found = RunFolder.resume(config, "auto")
    assert found is not None
    assert found.path == runs[-1].path
    for run in runs[5:]:
        run.update_summary({"finished": True})
    found = RunFolder.resume(config, "auto")
    assert found is not None
    assert found.path == runs[4].path
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    assert RunFolder.resume(other, "auto") is None
    # A later start that failed at once does not stand in the way of the run that has got somewhere.
    (runs[2].checkpoints / "latest").write_text("step-00000003\n")
    found = RunFolder.resume(config, "auto")
    assert found is not None
    assert found.path == runs[2].path


def test_auto_resume_begins_no_second_run_beside_one_that_is_active(config: Config) -> None:
    older, active = RunFolder.create(config), RunFolder.create(config)
    (older.checkpoints / "latest").write_text("step-00000003\n")
    with active.locked(), pytest.raises(ConfigError, match=f"another process is working on {active.path}"):
        RunFolder.resume(config, "auto")
    active.update_summary({"finished": True})
    with active.locked():  # it is exported
        found = RunFolder.resume(config, "auto")
    assert found is not None
    assert found.path == older.path


@pytest.mark.parametrize("file", ["state.json", "SHA256SUMS"])
def test_what_has_a_configuration_but_is_no_run(config: Config, file: str) -> None:
    run = RunFolder.create(config)
    folder = run.checkpoints / "step-00000003"
    folder.mkdir()
    for name in (file, "config_snapshot.yaml"):
        (folder / name).write_text("")
    what = {"state.json": "a checkpoint", "SHA256SUMS": "an exported model"}[file]
    with pytest.raises(ConfigError, match=f"is {what}, not a run folder; the run is {run.path}"):
        RunFolder.resume(config, str(folder))
    with pytest.raises(ConfigError, match=f"it has no config_snapshot.yaml; the run is {run.path}"):
        RunFolder.open(run.checkpoints)


def test_resuming_another_configuration_is_refused(config: Config, tmp_path: Path) -> None:
    run = RunFolder.create(config)
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    resumed = RunFolder.resume(config, str(run.path))
    assert resumed is not None
    assert resumed.path == run.path
    with pytest.raises(ConfigError, match="the configuration hash"):
        RunFolder.resume(other, str(run.path))
    for override, key, before, here in (
        ("train.steps=77", "train.steps", config.train.steps, 77),
        ("run.seed=5", "run.seed", 1, 5),
        ("data.source={kind: jsonl, paths: [x]}", "data.source.kind", "null", "jsonl"),
        ("train.ema_decay=0.5", "train.ema_decay", "null", 0.5),
        ("train.skip.spike=6", "train.skip.spike", "null", 6.0),  # a key that came later: null is not in the hash
        ("train.micro_batch_parts=2", "train.micro_batch_parts", 1, 2),  # the hash has their product with the rows
    ):
        with pytest.raises(ConfigError, match=r"--extend KEY=VALUE") as raised:
            RunFolder.resume(Config.from_yaml(TINY, [override, "run.name=another"]), str(run.path))
        assert f"  {key}: {before} in the run, {here} here\n" in str(raised.value)
        assert "run.name" not in str(raised.value)  # that may be another one
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.resume(config, str(tmp_path / "nowhere"))


def test_a_run_goes_on_under_other_values_of_what_decides_no_weight(config: Config, tmp_path: Path) -> None:
    run = RunFolder.create(config)
    moved = [f"run.root={tmp_path / 'experiments'}", "run.name=other", "data.cache=elsewhere", "train.keep_last=1"]
    for resume, more in (("auto", []), (str(run.path), ["train.log_every=3", "logging.wandb=true"])):
        other = Config.from_yaml(TINY, [*moved, *more])
        found = RunFolder.resume(other, resume)
        assert found is not None
        assert found.path == run.path
        assert Config.from_yaml(run.config_snapshot) == other
        assert Config.from_yaml(run.config_snapshot).hash() == run.summary()["config_hash"]
    assert run.summary()["name"] == "other"
    first, second = run.log.read_text().splitlines()
    cache = config.data.cache
    assert first.endswith(
        f"in a run: run.name: run -> other, data.cache: {cache} -> elsewhere, train.keep_last: 2 -> 1"
    )
    assert second.endswith("which may change in a run: train.log_every: 10 -> 3, logging.wandb: false -> true")
    RunFolder.resume(other, "auto")
    assert len(run.log.read_text().splitlines()) == 2  # nothing to say when nothing changed
    with run.locked(), pytest.raises(ConfigError, match="another process"):
        RunFolder.resume(config, str(run.path))
    assert Config.from_yaml(run.config_snapshot) == other


def test_the_home_folder_in_the_root(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"root": "~/runs"})})
    run = RunFolder.create(config)
    assert run.path.parent == tmp_path / "runs"
    found = RunFolder.resume(config, "auto")
    assert found is not None
    assert found.path == run.path
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("call", ["mkdir", "write_bytes"])
def test_a_full_disk_under_the_root(config: Config, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, call, full)
    with pytest.raises(DiskFullError, match=r"a run folder under .*run\.root"):
        RunFolder.create(config)


def test_a_root_that_is_a_file_is_a_configuration_error(config: Config, tmp_path: Path) -> None:
    (tmp_path / "experiments").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run\.root"):
        RunFolder.create(config)


def test_metrics_survive_a_kill_and_hold_each_step_once_after_resume(config: Config) -> None:
    run = RunFolder.create(config)
    with Trackers(run, config) as trackers:
        for step in range(1, 7):
            trackers.on_record(record(step, loss=float(step)))
            assert len(read_metrics(run.metrics_jsonl)) == step  # readable at any moment
    with run.metrics_jsonl.open("a") as file:
        file.write('{"step": 7, "loss": 1.2')  # what SIGKILL may leave
    assert [row["step"] for row in read_metrics(run.metrics_jsonl)] == [1, 2, 3, 4, 5, 6]
    assert run.drop_metrics_after(4) == 3
    with Trackers(run, config) as trackers:
        trackers.on_record(record(5, loss=50.0))
    assert [(row["step"], row["loss"]) for row in read_metrics(run.metrics_jsonl)][3:] == [(4, 4.0), (5, 50.0)]


def test_a_torn_line_does_not_swallow_the_next_record(config: Config) -> None:
    run = RunFolder.create(config)
    run.metrics_jsonl.write_text('{"step": 1, "lo')
    with Trackers(run, config) as trackers:
        trackers.on_record(record(2))
    assert [row["step"] for row in read_metrics(run.metrics_jsonl)] == [2]


def test_metrics_are_json_even_when_a_figure_is_not_finite(config: Config) -> None:
    run = RunFolder.create(config)
    with Trackers(run, config) as trackers:
        trackers.on_record(record(1, loss=float("nan")))
    assert json.loads(run.metrics_jsonl.read_text())["loss"] is None
    assert finite({"a": [float("inf"), 1.0, 2]}) == {"a": [None, 1.0, 2]}


def test_other_ranks_write_and_say_nothing(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    path = RunFolder.create(config).path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    run = RunFolder.open(path, writes=False)
    run.say("hello")
    run.update_summary({"finished": True})
    assert run.drop_metrics_after(0) == 0
    with Trackers(run, config) as trackers, Console(run, 10) as console:
        trackers.on_record(record(1))
        console.on_record(record(1))
    assert capsys.readouterr().out == ""
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_plain_console_lines_are_aligned_and_logged(config: Config) -> None:
    run, stream = RunFolder.create(config), io.StringIO()
    with Console(run, 500, stream=stream) as console:
        console.on_record(record(5))
        console.on_record(record(100, valid=2.3))
    header, *lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert {len(line) for line in lines} == {len(header)}
    assert "2.3000" in lines[1]
    assert "10.7k" in lines[1]
    assert [line.split("Z ", 1)[1] for line in run.log.read_text().splitlines()] == lines


def test_terminal_console_shows_one_live_line(config: Config) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run, stream = RunFolder.create(config), Terminal()
    with Console(run, 500, stream=stream) as console:
        console.on_record(record(100, valid=2.3))
        console.on_step(101)
    shown = stream.getvalue()
    for text in ("101/500", "2.300", "bits/byte", "tok/s"):
        assert text in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


def test_the_time_left_is_in_proportion_to_the_rows(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a batch warm-up later steps take longer. 10 steps of 4 rows took 40 s; 490 of 8 rows take 3,920 s."""
    run, stream, now = RunFolder.create(config), io.StringIO(), [0.0]
    monkeypatch.setattr("cdrmix.training.console.time.monotonic", lambda: now[0])
    for rows, left in ((BatchSizes(8, 4, 10).before, clock(3920)), (None, clock(1960))):
        with Console(run, 500, stream=stream, rows=rows) as console:
            now[0] += 40.0
            console.on_record(record(10))
        assert stream.getvalue().splitlines()[-1].endswith(f" {left}")


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_tracker_is_told_before_anything_begins(
    config: Config, tracker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # as if it were not installed
    config = config.model_copy(update={"logging": config.logging.model_copy(update={tracker: True})})
    with pytest.raises(ConfigError, match=rf"pip install {tracker} .*pip install -e '\.\[{tracker}\]'"):
        Trackers(RunFolder.create(config), config)
    monkeypatch.setattr(lifecycle, "prepare", None)  # not called
    runs = len(list((tmp_path / "experiments").iterdir()))
    with pytest.raises(ConfigError, match=f"logging.{tracker}"):
        lifecycle.run_all(config)
    assert len(list((tmp_path / "experiments").iterdir())) == runs


def test_every_missing_tracker_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    config = config.model_copy(update={"logging": config.logging.model_copy(update={"mlflow": True, "wandb": True})})
    with pytest.raises(ConfigError, match=r"(?s)logging\.wandb.*logging\.mlflow"):
        check_trackers(config)


def test_tensorboard_gets_every_scalar_and_is_closed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []
    closed: list[str] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.folder = folder
            Path(folder).mkdir(exist_ok=True)
            if purge_step is not None:  # as TensorBoard does when it reads
                written[:] = [each for each in written if each[2] < purge_step]

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            closed.append(self.folder)

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    config = config.model_copy(update={"logging": config.logging.model_copy(update={"tensorboard": True})})
    run = RunFolder.create(config)
    with Trackers(run, config) as trackers:
        validated = dataclasses.replace(record(3, valid=2.3), valid_domains={"web": 2.1})
        trackers.on_record(validated)
    assert written == [(name, value, 3) for name, value in scalars(validated).items()]
    assert ("valid_domains/web", 2.1, 3) in written
    assert closed == [str(run.path / "tensorboard")]
    # Killed after step 6, resumed from step 4; then it goes back to step 5.
    with Trackers(run, config) as trackers:
        for step in (4, 5, 6):
            trackers.on_record(record(step))
    run.drop_metrics_after(4)
    with Trackers(run, config) as trackers:
        for step in (5, 6, 7, 6, 7, 8):
            trackers.on_record(record(step, loss=step + 0.25))
    assert [step for name, _, step in written if name == "loss"] == [3, 4, 5, 6, 7, 8]
    assert ("loss", 5.25, 5) in written
    assert len(closed) == 4


def test_trackers_get_flat_numbers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[str] = []
    mlflow = types.ModuleType("mlflow")
    started = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    for name, function in {
        "set_experiment": lambda name: None,
        "start_run": lambda run_id=None, run_name=None: started,
        "log_metrics": lambda values, step: logged.append((step, values)),
        "end_run": lambda: ended.append("mlflow"),
    }.items():
        setattr(mlflow, name, function)
    wandb = types.ModuleType("wandb")
    own = types.SimpleNamespace(
        log=lambda values: logged.append((values.get("step") or values["eval/step"], values)),
        finish=lambda: ended.append("wandb"),
        define_metric=lambda name, step_metric: None,
    )
    wandb.init = lambda **settings: own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = config.model_copy(update={"logging": config.logging.model_copy(update={"mlflow": True, "wandb": True})})
    run = RunFolder.create(config)
    with Trackers(run, config) as trackers:
        trackers.on_record(record(3))
    assert logged == [(3, {"step": 3, **scalars(record(3))}), (3, scalars(record(3)))]
    assert logged[0][1]["router/entropy_bits/layer1"] == 2.8
    assert "valid_loss" not in logged[0][1]
    assert sorted(ended) == ["mlflow", "wandb"]
    assert run.summary()["mlflow_run"] == "abc"
    run.evaluation.mkdir()
    row = {"step": 2, "suite": "code", "status": "measured", "measures": [{"name": "pass@1", "value": 0.5}]}
    run.evaluation_rows.write_text(json.dumps(row) + "\n")
    with Trackers(run, config) as trackers:
        trackers.on_record(record(4))
    assert (2, {"eval/code/pass_1": 0.5}) in logged  # MLflow refuses the character @
    assert (2, {"eval/step": 2, "eval/code/pass@1": 0.5}) in logged
    # Killed after step 6, resumed from step 4: the services have the records of steps 5 and 6.
    with Trackers(run, config) as trackers:
        for step in (5, 6):
            trackers.on_record(record(step))
    run.drop_metrics_after(4)
    with Trackers(run, config) as trackers:
        for step in (5, 6, 7, 6, 7):  # and it goes back to step 5
            trackers.on_record(record(step))
    for service in ("step" in values for values in (scalars(record(1)), {"step": 1})):
        found = [step for step, values in logged if "loss" in values and ("step" in values) == service]
        assert found == [3, 4, 5, 6, 7, 7]
    # A service that the run had not before gets every record.
    run.update_summary({"trackers": ["mlflow"]})
    logged.clear()
    run.drop_metrics_after(6)
    with Trackers(run, config) as trackers:
        trackers.on_record(record(7))
    assert [values.get("step") for _, values in logged] == [7]


def test_amounts_and_durations_read_well() -> None:
    assert [amount(value) for value in (0, 950, 10_700, 1_250_000, 3.2e9)] == ["0", "950", "10.7k", "1.25M", "3.2B"]
    # What rounds up to the next unit is told in it.
    assert [amount(value) for value in (999.7, 999_400, 999_700, 9.997e14)] == ["1k", "999k", "1M", "1000T"]
    assert [clock(value) for value in (0, 61, 3_725)] == ["0:00", "1:01", "1:02:05"]


def test_the_report_and_the_trackers_have_the_share_of_kept_tokens(config: Config) -> None:
    run = RunFolder.create(config)
    rows = [
        dataclasses.replace(record(step), depth={"0": 0.7, "1.mixer": share}) for step, share in ((1, 0.8), (2, 0.9))
    ]
    run.metrics_jsonl.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    page = write_report(run).read_text()
    assert "Tokens kept by depth, mean of the last 2 logged steps" in page
    assert "<th>0</th><th>1.mixer</th></tr><tr><td>kept</td><td>70.0%</td><td>85.0%</td>" in page
    assert scalars(rows[1])["depth/1.mixer"] == 0.9
