"""The run folder: one directory that holds everything a run made, never overwritten."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard, write_atomically
from cdrmix.errors import ConfigError, DiskFullError, ShardError

PACKAGES = ("cdrmix", "torch", "deepspeed", "numpy", "tokenizers", "safetensors", "pydantic", "triton", "numba")


class RunFolder:
    """`<run.root>/<UTC timestamp>-<first 8 of the config hash>/` and the paths in it.

    Only a writing run folder (rank 0) prints and writes; on the other ranks the same object answers
    with paths and stays silent.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.writes = writes

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new folder under `config.run.root`; a name that is taken gets -2, -3, ... appended.

        Raises ConfigError when the root cannot be written, DiskFullError when nothing more fits there.
        """
        root = _root(config)
        timestamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{timestamp}-{config.hash()[:8]}"
        try:
            with disk_guard(f"a run folder under {root}", "Free some space there, or set run.root to another disk."):
                root.mkdir(parents=True, exist_ok=True)
                run = cls(_make_new(root, name))
                run.checkpoints.mkdir()
                write_atomically(run.config_snapshot, config.to_yaml())
                run.update_summary(
                    {
                        "finished": False,
                        "name": config.run.name,
                        "config_hash": config.hash(),
                        "started": timestamp,
                        "environment": environment(),
                    }
                )
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(
                f"run.root: cannot create a run folder under {root}: {error.strerror}; "
                "set run.root to a folder that you may write"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path, *, writes: bool = True) -> RunFolder:
        """An existing run folder. Raises ConfigError when `path` is not one."""
        path = Path(path)
        if not (path / "config_snapshot.yaml").is_file():
            raise ConfigError(f"{path} is not a run folder: it has no config_snapshot.yaml")
        if (path / "SHA256SUMS").is_file():
            raise ConfigError(f"{path} is an exported model, not a run folder")
        return cls(path, writes=writes)

    @classmethod
    def resume(cls, config: Config, resume: str) -> RunFolder | None:
        """The run folder that `--resume` names: a path, or 'auto' for the newest unfinished run of this config.

        One with a checkpoint goes before a newer one without, which a start that failed may have left. None when
        'auto' finds no such run; one that a live process holds is not taken for unfinished.
        Raises ConfigError when a named folder belongs to another config, or is held by another process.
        The run goes on under this configuration, whose keys outside the hash may differ from before: see `adopt`.
        """
        if resume == "auto":
            unfinished = [run for run in cls.all_of(config) if not run.finished and not run.is_locked()]
            begun = [run for run in unfinished if (run.checkpoints / "latest").is_file()]
            if not unfinished:
                return None
            run = (begun or unfinished)[-1]
            run.update_config(config)
            return run
        run = cls.open(resume)
        theirs = run.summary().get("config_hash")
        if theirs != config.hash():
            raise ConfigError(
                f"--resume {resume}: that run has config hash {str(theirs)[:8]}, this configuration has "
                f"{config.hash()[:8]}; resume with --config {run.config_snapshot}"
            )
        run.update_config(config)
        return run

    @classmethod
    def all_of(cls, config: Config) -> list[RunFolder]:
        """Every run folder of this configuration under its root, oldest first."""
        suffix = config.hash()[:8]
        found = [path.parent for path in _root(config).glob(f"*-{suffix}*/config_snapshot.yaml")]
        runs = [cls(path) for path in sorted(found, key=_age)]
        return [run for run in runs if run.summary().get("config_hash") == config.hash()]

    def update_config(self, config: Config) -> None:
        """Goes on under a configuration of the same hash: it becomes the snapshot, and train.log says what changed.

        So the snapshot names the places of today (run.root, data.cache), and as these keys decide no weight it
        reproduces the whole run as before; each checkpoint keeps the snapshot it was made under.
        Raises ConfigError when another process works on the run.
        """
        text = config.to_yaml()
        before = self.config_snapshot.read_text(encoding="utf-8")
        if text == before:
            return
        with self.locked():
            # The dump has one key a line, so the lines that are new are the keys that changed.
            new = [line.strip() for line in text.splitlines() if line not in before.splitlines()]
            write_atomically(self.config_snapshot, text)
            self.update_summary({"name": config.run.name})
            self.note(f"going on with other values of keys that decide no weight: {', '.join(new)}")

    @property
    def config_snapshot(self) -> Path:
        return self.path / "config_snapshot.yaml"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics_json(self) -> Path:
        return self.path / "metrics.json"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def load_plot(self) -> Path:
        return self.path / "load.png"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def session(self) -> Path:
        return self.path / "session.safetensors"

    @property
    def finished(self) -> bool:
        """Whether every step of the run's life, the report included, has been done."""
        return bool(self.summary().get("finished"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing into this run; the lock of a process that dies is free at once.

        Raises ConfigError when another process holds it.
        """
        if not self.writes:
            yield
            return
        with self.log.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path}: another process is working on this run; wait for it, or stop it"
                ) from error
            yield

    def is_locked(self) -> bool:
        """Whether some process holds this run now."""
        try:
            with self.locked():
                return False
        except ConfigError:
            return True

    def say(self, text: str) -> None:
        """Prints a line and appends it to train.log."""
        if self.writes:
            print(text, flush=True)
            self.note(text)

    def note(self, text: str) -> None:
        """Appends a line to train.log only, with the UTC time."""
        if self.writes:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            with self.log.open("a", encoding="utf-8") as log:
                log.writelines(f"{now} {line}\n" for line in text.splitlines() or [""])

    def summary(self) -> dict[str, Any]:
        """What metrics.json says; {} when it is missing or torn."""
        try:
            summary = json.loads(self.metrics_json.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def update_summary(self, values: Mapping[str, Any]) -> None:
        """Sets keys of metrics.json, replacing the file in one move."""
        if self.writes:
            summary = self.summary() | dict(values)
            write_atomically(self.metrics_json, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")

    def keep_text(self, fingerprint: str) -> None:
        """Notes the fingerprint of the text that this run is about.

        Raises ShardError when it began with another text.
        """
        check_text(self.summary().get("text_fingerprint", fingerprint), fingerprint, self.path)
        self.update_summary({"text_fingerprint": fingerprint})

    def keep_tokenizer(self, source: Path) -> None:
        """Copies the tokenizer into the run, so that the run is readable after the data cache is gone."""
        if self.writes and not self.tokenizer.exists():
            write_atomically(self.tokenizer, source.read_bytes())

    def drop_metrics_after(self, step: int) -> int:
        """Removes the rows of metrics.jsonl beyond `step`, so that a resumed run has every step once.

        Returns how many were removed; a torn last line counts as one.
        """
        if not self.writes or not self.metrics_jsonl.exists():
            return 0
        lines = self.metrics_jsonl.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [row for row in read_metrics(self.metrics_jsonl) if row["step"] <= step]
        write_atomically(self.metrics_jsonl, "".join(json.dumps(row) + "\n" for row in kept))
        return len(lines) - len(kept)


def check_text(before: str, now: str, origin: Path) -> None:
    """Raises ShardError when the fingerprint of the text a run began with (`origin`: the run's) is another one now."""
    if before != now:
        raise ShardError(
            f"the text has changed since this run began: {origin} was made from shards with the fingerprint "
            f"{before[:12]}, the shards of the text as it is now have {now[:12]}. Put the former text back (or "
            "data.source.revision, for a Hugging Face dataset), or start a new run."
        )


def _root(config: Config) -> Path:
    return Path(config.run.root).expanduser()


def _make_new(root: Path, name: str) -> Path:
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # exclusive: two runs started in one second get two folders
            return path
        except FileExistsError:
            number += 1


def _age(path: Path) -> tuple[str, int]:
    timestamp, _, rest = path.name.partition("-")
    number = rest.partition("-")[2]
    return timestamp, int(number) if number.isdigit() else 1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that is not a whole JSON object with a step (torn by a kill) is left out."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def environment(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Versions of what computed the run, and the machine it ran on."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": versions,
    }


def finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None: JSON has no NaN."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
