"""Where tasks run decides nothing: this process, several, Ray; and what is said when one of them is killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cdrmix.data.pipeline.executor import LocalExecutor, make_executor
from cdrmix.data.prepare import prepare
from cdrmix.errors import ConfigError, CorpusError, OutOfMemoryError


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


def test_a_killed_process_is_told_of(tasks: Any) -> None:
    with LocalExecutor(2) as engine, pytest.raises(OutOfMemoryError, match=r"memory ran out; lower data\.memory_mb"):
        list(engine.run(tasks.kill_itself, range(20)))


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
