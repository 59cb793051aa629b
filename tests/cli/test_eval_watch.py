"""`cdrmix eval watch`, by hand and started by a training: rows, restarts, failures, kills, and unchanged weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import forked
import pytest
from forked import Forked
from in_process import main

from cdrmix.config.names import BUILT_IN
from cdrmix.config.schema import Config
from cdrmix.eval.rows import read_rows
from cdrmix.eval.suites import SUITES, suites
from cdrmix.run_folder import RunFolder
from cdrmix.training.trackers import log_evaluations
from cdrmix.watch import watcher, worker
from cdrmix.watch.attached import AttachedWatcher

PLUGIN = """
import os, signal, time
from pathlib import Path
from cdrmix.eval.suites import SUITES, Measure, SuiteResult


@SUITES("fine")
def fine(subject, options, say):
    text = subject.generate(["def f"], 1, writing())[0][0]
    measures = (Measure("length", float(len(text)), 0.0, 9.0, 1), Measure("absent", problem="no data set"))
    group = Path("/proc/self/autogroup")
    facts = {"threads": len(os.sched_getaffinity(0)), "niceness": os.nice(0)}
    facts["of the session"] = int(group.read_text().split()[-1]) if group.is_file() else 1
    return SuiteResult("fine", measures, facts, ("a note",))


def writing():
    from cdrmix.eval.suites import Writing
    return Writing(max_new_tokens=4)


@SUITES("killed")
def killed(subject, options, say):
    os.kill(os.getpid(), signal.SIGKILL)


@SUITES("broken")
def broken(subject, options, say):
    raise RuntimeError("this suite has a defect")


@SUITES("slow")
def slow(subject, options, say):
    Path(options.sets, "pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
SECONDS = 300.0  # for a process to do what a test waits for


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, install_plugin: Callable[..., dict[str, str]]
) -> dict[str, str]:
    """The environment of a process that has a plugin with the suites fine, killed, broken and slow."""
    return install_plugin(tmp_path_factory.mktemp("plugin"), PLUGIN)


@pytest.fixture
def run(toy_run: Path, tmp_path: Path) -> Path:
    """A copy of the toy run."""
    return shutil.copytree(toy_run, tmp_path / "run")


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., Forked]]:
    """`start("eval", ...)` starts `cdrmix eval ...`; what is left at the end is killed."""
    started: list[Forked] = []

    def begin(*arguments: str) -> Forked:
        # At the lowest priority a test would wait for all other tests.
        niceness = [] if any("niceness" in word for word in arguments) else ["evaluation.niceness=0"]
        started.append(forked.start(["-m", "cdrmix.cli", *arguments, *niceness], environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def rows_of(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "eval" / "metrics.jsonl")


def told(run: Path) -> list[tuple[int, str | None, str]]:
    return [(row["step"], row["suite"], row["status"]) for row in rows_of(run)]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Worker:
    """A copy of this process that evaluates: what the watcher needs of `subprocess.Popen`, and it imports nothing."""

    def __init__(self, command: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: object) -> None:
        assert command[:-1] == [sys.executable, "-m", "cdrmix.watch.worker"]
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                os.dup2(stdout.fileno(), 1)
                os.dup2(stdout.fileno(), 2)
                os.environ.update(env)
                status = worker.main(worker.Job(**json.loads(command[-1])))
            except BaseException:  # noqa: BLE001 - the copy must not go on with the tests
                traceback.print_exc()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


def test_once(
    run: Path, install_here: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is deleted when its evaluation begins, as train.keep_last does."""

    def begin(command: list[str], **options: Any) -> Worker:
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        return Worker(command, **options)

    install_here(PLUGIN)
    monkeypatch.setattr(watcher, "subprocess", types.SimpleNamespace(Popen=begin, DEVNULL=subprocess.DEVNULL))
    assert main(["eval", "watch", str(run), "--once", "--suite", "fine", "evaluation.niceness=1"]) == 0
    said = capsys.readouterr().out
    assert "fine (step 4)  absent  not measured: no data set" in said
    assert told(run) == [(2, None, "skipped"), (4, "fine", "measured")]
    row = rows_of(run)[-1]
    assert row["measures"][0] == {"name": "length", "low": 0.0, "high": 9.0, "count": 1, "problem": None} | {
        "value": row["measures"][0]["value"]
    }
    of_model = row["facts"].pop("model")
    assert (of_model["step"], of_model["weights"]) == (4, {"model.safetensors": row["sha256"]})
    assert row["facts"] == {"threads": 1, "niceness": 1, "of the session": 1}
    assert row["options"]["seed"] == 1
    assert not list((run / "eval" / "queue").iterdir())
    assert json.loads((run / "metrics.json").read_text())["evaluation"]["fine"]["sha256"] == row["sha256"]
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Suites on checkpoints" in page
    assert "Figures of each suite over the steps" in page
    assert "1 measured, 1 skipped" in page
    assert "absent" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "evaluation.suites is empty; name suites by --suite"),
        (
            ["--suite", "cod"],
            'evaluation.suites[0]: found "cod" (a string)\n    allowed: one of choices, code, domains',
        ),
        (["--suite", "code", "train.steps=3"], "train.steps=3: `eval watch` takes only keys of the section evaluation"),
        (["--suite", "code", "evaluation.sets=absent"], "evaluation.sets: there is no folder absent"),
        (["--suite", "code", "evaluation.every=3"], "allowed: null, or a multiple of train.checkpoint_every=2"),
        (["--suite", "code", "evaluation.samples=2", "evaluation.temperature=0"], "above 0 with evaluation.samples=2"),
    ],
)
def test_wrong_arguments(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "watch", str(run), "--once", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "eval").exists()


def test_runs_without_something_to_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "watch", str(run / "absent"), "--once", "--suite", "code"]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["eval", "watch", str(run), "--once", "--suite", "code"]) == 0
    assert "there is no checkpoint to evaluate" in capsys.readouterr().out
    assert main(["--traceback", "eval", "watch", str(run), "--suite", "code"]) == 0  # the run is finished
    shutil.rmtree(run / "eval")
    (run / "eval").write_text("")
    assert main(["eval", "watch", str(run), "--once", "--suite", "code"]) == 2
    assert "eval is a file" in capsys.readouterr().err


def test_an_unknown_suite_is_refused_before_the_training(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"base: {tiny}\nrun: {{root: {tmp_path / 'runs'}}}\nevaluation:\n  suites: [code, code, cod]\n")
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}:4: evaluation.suites" in error
    assert not (tmp_path / "runs").exists()


def test_the_suites_of_cdrmix_are_known_to_the_configuration() -> None:
    suites([])  # imports the modules that register them
    assert sorted(BUILT_IN["suite"]) == SUITES.names()


def test_no_key_of_the_section_changes_the_hash(tiny: Path) -> None:
    before = Config.from_yaml(tiny).hash()
    assert Config.from_yaml(tiny, ["evaluation.suites=[code]", "evaluation.samples=3"]).hash() == before


@pytest.mark.long
def test_failures_are_rows(run: Path, start: Callable[..., Forked]) -> None:
    watch = start("eval", "watch", str(run), "--once", "--suite", "killed,broken")
    watch.wait(SECONDS)
    said = watch.output
    assert watch.returncode == 1, said
    killed, broken = rows_of(run)[1:]
    assert killed["status"] == broken["status"] == "failed"
    assert killed["reason"] == "the process was ended by SIGKILL, which the system sends when memory is exhausted"
    assert broken["reason"].startswith("RuntimeError: this suite has a defect (exit code 1; ")

    shutil.rmtree(run / "eval")
    (run / "checkpoints" / "step-00000004" / "manifest.json").write_text("{")
    (run / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    watch = start("eval", "watch", str(run), "--once", "--suite", "fine")
    watch.wait(SECONDS)
    said = watch.output
    assert watch.returncode == 1, said
    assert told(run) == [(4, None, "failed"), (2, "fine", "failed")]
    assert "manifest.json is corrupt" in rows_of(run)[0]["reason"]
    assert "model.safetensors is corrupt" in rows_of(run)[1]["reason"]


@pytest.mark.slow
def test_kills_restarts_and_a_second_watcher(
    run: Path, tmp_path: Path, start: Callable[..., Forked], capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    for statuses in ([], ["interrupted"]):
        pid.unlink(missing_ok=True)
        watch = start("eval", "watch", str(run), "--suite", "slow", f"evaluation.sets={tmp_path}")
        until(lambda: pid.is_file() and pid.read_text(), "the suite begins")
        worker = int(pid.read_text())
        assert told(run) == [(2, None, "skipped"), *((4, "slow", status) for status in statuses)]
        if not statuses:
            assert main(["eval", "watch", str(run), "--suite", "code"]) == 2
            error = capsys.readouterr().err
            assert f"another `cdrmix eval watch` works on this run: process {watch.pid} on " in error
        watch.kill()
        watch.wait()
        until(lambda worker=worker: not is_there(worker), "the evaluation ends with the watcher")
    watch = start("eval", "watch", str(run), "--suite", "slow", f"evaluation.sets={tmp_path}")
    assert watch.wait(SECONDS) == 0  # the run is finished
    assert told(run)[2:] == [(4, "slow", "failed")]
    assert "it is not tried again" in rows_of(run)[-1]["reason"]


@pytest.mark.long
def test_a_training_with_a_watcher_that_is_killed_and_resumed_has_the_same_weights(
    toy_run: Path, tmp_path: Path, arguments: Callable[..., list[str]], start: Callable[..., Forked]
) -> None:
    pid, runs = tmp_path / "pid", tmp_path / "runs"
    train = start("train", *arguments("evaluation.suites=[slow]", f"evaluation.sets={tmp_path}", f"run.root={runs}"))
    until(lambda: pid.is_file() and pid.read_text(), "the suite begins")
    (run,) = runs.iterdir()
    worker, watcher = int(pid.read_text()), int((run / "eval" / "lock").read_text().split()[1])
    assert is_there(worker)
    assert is_there(watcher)
    train.send_signal(signal.SIGKILL)
    until(lambda: not is_there(watcher) and not is_there(worker), "the watcher ends with the training")
    assert told(run)[-1][1:] == ("slow", "stopped")

    train = start("train", *arguments("evaluation.suites=[fine]", f"run.root={runs}"), "--resume", "auto")
    assert train.wait(SECONDS) == 0, train.output
    assert list(runs.iterdir()) == [run]
    assert main(["compare", str(toy_run), str(run)]) == 0
    assert "Suites on checkpoints:\n  fine (step 4)  length" in train.output
    assert Counter(told(run))[4, "fine", "measured"] == 1
    assert json.loads((run / "metrics.json").read_text())["evaluation"]["fine"]["step"] == 4
    log = (run / "eval" / "watch.log").read_text()
    assert log.count("The watcher ends, as it was told to") == 2


class FakeWandb(types.ModuleType):
    """Stands for the package wandb, and for its run; calls are noted."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any]) -> FakeWandb:
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.calls.append((name, step_metric))

    def log(self, figures: dict[str, float]) -> None:
        self.calls.append((figures,))

    def finish(self) -> None:
        pass


def test_trackers_get_each_result_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = Config.from_yaml(run / "config_snapshot.yaml", ["logging.wandb=true"])
    measure = {"name": "pass@1", "value": 0.5, "low": 0.4, "high": None}
    row = {"step": 2, "sha256": "1", "suite": "code", "status": "measured", "measures": [measure]}
    skipped = {"step": 3, "sha256": None, "suite": None, "status": "skipped", "measures": []}
    (run / "eval").mkdir()
    with (run / "eval" / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(row)}\n{json.dumps(skipped)}\n")
        file.flush()
        folder = RunFolder.open(run)
        log_evaluations(folder, config)
        log_evaluations(folder, config)
        file.write(json.dumps(row | {"step": 4}) + "\n")
    log_evaluations(folder, config)
    logged = [call for call in wandb.calls if len(call) == 1]
    figures = {"eval/code/pass@1": 0.5, "eval/code/pass@1/low": 0.4}
    assert logged == [({"eval/step": step, **figures},) for step in (2, 4)]
    # W&B's own step is never given, which figures of suites would push past that of the next record.
    assert {call for call in wandb.calls if len(call) == 2} == {
        ("*", "step"),
        *((name, "eval/step") for name in figures),
    }


def test_a_training_goes_on_without_a_watcher(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "eval").write_text("")
    config = Config.from_yaml(run / "config_snapshot.yaml", ["evaluation.suites=[code]"])
    with AttachedWatcher(RunFolder.open(run), config) as watcher:
        watcher.on_checkpoint(run / "checkpoints" / "step-00000004")
        watcher.finish()
    said = capsys.readouterr().out
    assert "Checkpoints are not evaluated: [Errno 17] File exists" in said
    assert "Not evaluated on the last checkpoint: code. `cdrmix eval watch " in said
