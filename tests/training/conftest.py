"""A corpus and a model small enough to train in a second, and processes to train it in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from built_once import built_once

for name in ("pydantic", "zstandard", "tokenizers", "safetensors", "numba"):
    pytest.importorskip(name, reason=f"needs {name}, which is not installed")

from cdrmix.config.schema import Config
from cdrmix.data.shards import ShardSet, open_shards
from cdrmix.errors import ConfigError

WORDS = ("the", "loop", "reads", "rows", "adds", "gradients", "clips", "steps", "and", "forgets", "them", "again")

TINY: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "model": {
        "vocab_size": 300,
        "d_model": 16,
        "layers": 2,
        "attention_fraction": 0.5,
        "attention": {"heads": 2, "kv_heads": 1},
        "rwkv": {"head_size": 16, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4},
        "feed_forward": {"hidden": 16, "experts": 4},
    },
    "data": {"row_length": 24, "valid_fraction": 0.2},
    "train": {
        "steps": 6,
        "batch_rows": 8,
        "micro_batch_rows": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "precision": "fp32",
        "log_every": 2,
        "evaluate_every": 3,
        "evaluate_rows": 4,
        "checkpoint_every": 2,
    },
}


@pytest.fixture(scope="session")
def hybrid() -> tuple[str, ...]:
    """Overrides of TINY for a stack with every mixer: mamba2, attention, rwkv7, routing_mamba."""
    return (
        "model.layers=4",
        "model.mixer_layers={mamba2: [0], routing_mamba: [3]}",
        "model.mamba={d_state: 8, head_dim: 8, groups: 2}",
    )


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose corpus is eighty short invented documents."""

    def write(folder: Path) -> None:
        texts = folder / "texts"
        texts.mkdir()
        for number in range(80):
            words = [WORDS[(number * 7 + index * index) % len(WORDS)] for index in range(10 + number % 23)]
            (texts / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
        content = TINY | {"data": TINY["data"] | {"cache": str(folder / "cache")}}
        content["data"]["source"] = {"kind": "text", "paths": [str(texts)]}
        content["run"] = TINY["run"] | {"root": str(folder / "runs")}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")

    return built_once(tmp_path_factory, "tiny", write) / "tiny.yaml"


@pytest.fixture(scope="session")
def make_config(config_file: Path) -> Callable[..., Config]:
    """The configuration with overrides: make_config("train.steps=3")."""
    return lambda *overrides: Config.from_yaml(config_file, overrides)


@pytest.fixture
def refuses(make_config: Callable[..., Config]) -> Callable[..., None]:
    """Asserts that overrides are refused: refuses((PATTERN OF THE MESSAGE, *OVERRIDES), ...)."""

    def check(*cases: tuple[str, ...]) -> None:
        for reason, *overrides in cases:
            with pytest.raises(ConfigError, match=reason):
                make_config(*overrides)

    return check


@pytest.fixture(scope="session")
def shards_folder(make_config: Callable[..., Config]) -> Path:
    from cdrmix.data.prepare import prepare  # here: tests on a GPU machine write their shards without it

    return prepare(make_config(), say=lambda text: None).path


@pytest.fixture(scope="session")
def shards(shards_folder: Path) -> ShardSet:
    return open_shards(shards_folder)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of reports are empty: to draw them takes longer than to train a tiny model."""
    monkeypatch.setattr("cdrmix.report.plots.png", lambda figure, palette: b"")


Work = Callable[..., list[subprocess.CompletedProcess[str]]]


Told = Callable[..., dict[str, float]]


@pytest.fixture
def told(work: Work, tmp_path: Path) -> Told:
    """Runs a job as `work` does, and returns the figures that it writes: told("sequence_worker.py", "slices", 2, ...).

    They are printed, for who wants them: pytest -rP.
    """

    def run(script: str, job: str, processes: int, *overrides: str, **options: str) -> dict[str, float]:
        where = tmp_path / "told.json"
        finished = work(job, where, *overrides, processes=processes, script=script, **options)
        assert [process.returncode for process in finished] == [0] * processes, "\n".join(f.stdout for f in finished)
        print(where.read_text())
        found: dict[str, float] = json.loads(where.read_text())
        return found

    return run


@pytest.fixture
def work(config_file: Path, request: pytest.FixtureRequest) -> Work:
    """Runs a job of worker.py: work("train", run, "train.steps=3", processes=2, at="3:SIGTERM"); or another script.

    config, shards: paths of others than the tiny ones. patience: the seconds that a process may take.
    """

    def run(
        job: str, where: Path, *overrides: str, processes: int = 1, script: str = "worker.py", **options: str
    ) -> list[Any]:
        patience = float(options.pop("patience", 300))
        if "shards" not in options:
            options["shards"] = str(request.getfixturevalue("shards_folder"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        order = json.dumps(
            {
                "job": job,
                "config": str(config_file),
                "overrides": overrides,
                "where": str(where),
            }
            | options
        )
        workers = []
        for rank in range(processes):
            rendezvous = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            rendezvous |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | (rendezvous if processes > 1 else {})
            workers.append(forked.start([Path(__file__).with_name(script), order], environment))
        finished = []
        try:
            for worker in workers:
                status = worker.wait(timeout=patience)
                finished.append(subprocess.CompletedProcess(worker.args, status, worker.output))
                # One that kills itself leaves its peers waiting for it, as a node that fails would.
                if worker.returncode == -signal.SIGKILL:
                    for other in workers:
                        other.kill()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return finished

    return run
