"""Where tasks run decides nothing: this process, several, Ray; and what is said when one of them is killed."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any

import pytest

import cdrmix
from cdrmix.data.pipeline.executor import LocalExecutor, make_executor
from cdrmix.data.prepare import prepare
from cdrmix.errors import ConfigError, CorpusError, OutOfMemoryError
from cdrmix.ladder.runner import PipelineRunner
from cdrmix.registry import Registry


def quiet(line: str) -> None:
    pass


TASKS = """
import os, signal
from cdrmix.errors import CorpusError
def square(task):
    return task * task, os.getpid()
def threads(task):
    return os.environ["RAYON_NUM_THREADS"], os.environ["FASTOKENS_BPE_THREADS"]
def kill_itself(task):
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
def refuse(task):
    if task == 3:
        raise CorpusError("three is refused")
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of functions that other processes can import."""
    (tmp_path / "tasks_of_a_test.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("tasks_of_a_test")
    del sys.modules["tasks_of_a_test"]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_once(tasks: Any, workers: int) -> None:
    with LocalExecutor(workers) as engine:
        results = list(engine.run(tasks.square, range(20)))
        assert sorted(result for result, _ in results) == [task * task for task in range(20)]
        assert len({process for _, process in results}) <= workers
        assert (os.getpid() in {process for _, process in results}) == (workers == 1)
        of_parts = [result for result, _ in engine.run_parts(tasks.square, range, [3, 0, 2])]
        assert sorted(of_parts) == [0, 0, 1, 1, 4]


def test_processes_encode_on_one_thread_each(tasks: Any) -> None:
    with LocalExecutor(2) as engine:
        assert {*engine.run(tasks.threads, range(4))} == {("1", "1")}


def test_an_error_of_a_task_is_raised_here(tasks: Any) -> None:
    with LocalExecutor(2) as engine, pytest.raises(CorpusError, match="three is refused"):
        list(engine.run(tasks.refuse, range(20)))


@pytest.mark.parametrize("before", [0, 3])
def test_a_killed_process_is_told_of(tasks: Any, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """With none before, it is killed while this process starts the next one, of a pool whose pipes are closed."""
    prepare, started = spawn.get_preparation_data, []

    def slow(name: str) -> Any:
        started.append(time.sleep(0.5 * len(started)))
        return prepare(name)

    if not before:
        monkeypatch.setattr(spawn, "get_preparation_data", slow)
    with LocalExecutor(2) as engine, pytest.raises(OutOfMemoryError, match=r"memory ran out; lower data\.memory_mb"):
        list(engine.run(tasks.kill_itself, range(3 - before, 20)))


SCRIPT = """
from pathlib import Path
with Path({folder!r}, "imported").open("a") as file:
    file.write("x")
import {package}
{call}
"""


def in_script(monkeypatch: pytest.MonkeyPatch, folder: Path, call: str) -> types.ModuleType:
    """As if this process had been started with a script without a guard, which has come to `call`."""
    script = types.ModuleType("__main__")
    script.__file__ = str(folder / "script.py")
    package = call.rpartition("(")[0].rpartition(".")[0]
    (folder / "script.py").write_text(SCRIPT.format(folder=str(folder), call=call, package=package))
    monkeypatch.setitem(sys.modules, "__main__", script)
    return script


def test_processes_do_not_run_the_user_s_script_again(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = in_script(monkeypatch, tmp_path, "os.abort()")
    with LocalExecutor(2) as engine:
        assert sorted(result for result, _ in engine.run(tasks.square, range(8))) == [n * n for n in range(8)]
        assert sys.modules["__main__"] is script
    assert not (tmp_path / "imported").exists()


def test_a_script_that_registers_a_part_needs_a_guard(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_script(monkeypatch, tmp_path, "cdrmix.data.pipeline.executor.refuse_in_import()")
    monkeypatch.setattr(Registry, "_all", dict(Registry._all))
    Registry[Any]("part of a test")("mine")(type("Mine", (), {"__module__": "__main__"}))
    read = forkserver.read_signed  # an exit code is read from a pipe, once: two threads that ask for it find 255
    monkeypatch.setattr(forkserver, "read_signed", lambda pipe: (time.sleep(0.1), read(pipe))[1])
    with LocalExecutor(2) as engine, pytest.raises(ConfigError, match='if __name__ == "__main__"'):
        list(engine.run(tasks.square, range(8)))
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda: prepare(None),  # type: ignore[arg-type]
        lambda: cdrmix.train(None),  # type: ignore[arg-type]
        lambda: PipelineRunner._climb(None, [], None),  # type: ignore[arg-type]
        lambda: PipelineRunner.validate_infrastructure(None),  # type: ignore[arg-type]
    ],
)
def test_no_work_begins_in_a_process_that_imports_its_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: Callable[[], object]
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        call()
    assert 'if __name__ == "__main__"' in capsys.readouterr().err


PARENT = """
import os, signal
from pids import pid_of
from cdrmix.data.pipeline.executor import LocalExecutor
if __name__ == "__main__":
    with LocalExecutor(2) as engine:
        print(*set(engine.run(pid_of, range(8))), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""
PIDS = """
import os, time
def pid_of(task):
    time.sleep(0.05)
    return os.getpid()
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Also when that is killed and cannot tell them."""
    (tmp_path / "pids.py").write_text(PIDS)
    command, environment = (
        [sys.executable, "-c", PARENT],
        {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    # output into a file: a pipe would be open until the processes are gone
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(command, env=environment, stdout=out, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    processes = list(map(int, (tmp_path / "out").read_text().split()))
    assert processes
    for process in processes:
        wait_until_gone(process)


def wait_until_gone(process: int) -> None:
    for _ in range(300):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} is still there after 30 s")


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdrmix\[ray\]'"):
        make_executor("ray", 1)


RAY = """
import sys
from cdrmix.config.schema import Config
from cdrmix.data import prepare
if __name__ == "__main__":
    prepare.MEMORY_PER_TEXT_BYTE = 30
    print(prepare.prepare(Config.model_validate_json(sys.argv[1])).fingerprint)
"""


@pytest.mark.usefixtures("own_settings")  # Ray sets environment variables
@pytest.mark.slow
def test_ray_makes_the_same_shards(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, on a Ray of two processors: several files, tasks of some 35 kB."""
    pytest.importorskip("ray")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        lines = [{"text": f"{' '.join(f'w{number}x{i}y{k}' for k in range(80))}"} for i in range(60)]
        lines += [{"text": lines[3]["text"] + " end"}, lines[4]]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "jsonl", "paths": [str(folder)]}
    monkeypatch.setattr("cdrmix.data.prepare.MEMORY_PER_TEXT_BYTE", 30)
    local = prepare(make_config(source, workers=1, memory_mb=1), say=quiet)
    assert local.report["filtered"] == {"exact_duplicate": 3, "near_duplicate": 3}
    config = make_config(source, cache=str(tmp_path / "ray"), workers=2, memory_mb=1, engine="ray")
    command = [sys.executable, "-c", RAY, config.model_dump_json()]
    environment = {**os.environ, "RAY_TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == local.fingerprint
