"""The run folder: one folder that holds all results of a run. An existing run is never overwritten."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.changes import Change, changes, difference, listed
from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard, lock_file, write_atomically
from cdrmix.errors import ConfigError, CorpusError, DiskFullError, ShardError
from cdrmix.records import Extension, complete_lines, read_line, read_lines, read_record, write_lines
from cdrmix.summary import read_summary
from cdrmix.units import utc_now

EXTENSIONS = "extensions.jsonl"
RECORDED = "recorded_step"  # key of metrics.json
PACKAGES = ("cdrmix", "torch", "deepspeed", "numpy", "tokenizers", "safetensors", "pydantic", "triton", "numba")


class RunFolder:
    """`<run.root>/<UTC timestamp>-<first 8 digits of the configuration hash>/`, and the paths in it.

    writes: True in the main process, which prints and writes files. In the other processes it is False, and the object
    only gives paths.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.writes = writes

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Creates a folder under `config.run.root`. If the name exists, -2, -3, ... is appended.

        Raises ConfigError if the root cannot be written, DiskFullError if the disk is full.
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
                "set run.root to a folder that you can write"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path, *, writes: bool = True) -> RunFolder:
        """Opens an existing run folder. Raises ConfigError if `path` is not a run folder."""
        path = Path(path)
        if not _is_run(path):
            owner = next((each for each in path.absolute().parents[:2] if _is_run(each)), None)
            what = "is not a run folder: it has no config_snapshot.yaml"
            if (path / "config_snapshot.yaml").is_file():
                other = "a checkpoint" if (path / "state.json").is_file() else "an exported model"
                what = f"is {other}, not a run folder"
            raise ConfigError(f"{path} {what}" + ("" if owner is None else f"; the run is {owner}"))
        return cls(path, writes=writes)

    @classmethod
    def resume(cls, config: Config, resume: str) -> RunFolder | None:
        """Finds the run folder for `--resume`: a path, or 'auto' for the newest unfinished run of this configuration.

        'auto' prefers a run with a checkpoint to a newer run without one, which a failed start can leave. Returns None
        if there is no such run.
        The run continues with this configuration. Keys outside the hash may have changed: see `update_config`.
        Raises ConfigError if a named folder belongs to another configuration, if another process is working on it or,
        with 'auto', on an unfinished run of this configuration, and with 'auto' if such a run was extended.
        """
        if resume == "auto":
            unfinished = [run for run in cls.all_of(config) if not run.finished]
            for run in unfinished:
                if run.is_locked():
                    raise ConfigError(
                        f"--resume auto: another process is working on {run.path}, an unfinished run of this "
                        "configuration; wait until it ends, or stop it (to begin a second run beside it, leave "
                        "--resume out; to continue another one, name its folder)"
                    )
            if not unfinished:
                _refuse_extended(config)
                return None
            begun = [run for run in unfinished if (run.checkpoints / "latest").is_file()]
            run = (begun or unfinished)[-1]
            run.update_config(config)
            return run
        run = cls.open(resume)
        run.check_hash(config, f"--resume {resume}")
        run.update_config(config)
        return run

    @classmethod
    def all_of(cls, config: Config) -> list[RunFolder]:
        """All run folders of this configuration under its root, oldest first."""
        # The name of an extended run has the hash of the configuration that it began with.
        patterns = (f"*-{config.hash()[:8]}*/config_snapshot.yaml", f"*/{EXTENSIONS}")
        folders = {path.parent for pattern in patterns for path in _root(config).glob(pattern)}
        runs = [cls(path) for path in sorted(folders, key=_age)]
        return [run for run in runs if run.summary().get("config_hash") == config.hash()]

    def check_hash(self, config: Config, what: str) -> None:
        """Raises ConfigError, which names the keys, if the run belongs to another configuration.

        what: of the caller, with which the message begins.
        """
        theirs = self.summary().get("config_hash")
        if theirs != config.hash():
            raise ConfigError(
                f"{what}: the run has the configuration hash {str(theirs)[:8]}, this configuration has "
                f"{config.hash()[:8]}; they differ in\n{difference(self.config_snapshot, config)}\n"
                f"Resume with --config {self.config_snapshot}. To go on with other steps or periods: --resume "
                f"{self.path} --extend KEY=VALUE, without --config"
            )

    def update_config(self, config: Config) -> None:
        """Writes a configuration of the same hash as the new snapshot, and notes the changed keys in train.log.

        The snapshot then has the current paths (run.root, data.cache) and the current layout of the processes. Each
        checkpoint keeps the snapshot of its own time.
        Raises ConfigError if another process is working on the run.
        """
        if config.to_yaml() == self.config_snapshot.read_text(encoding="utf-8"):
            return
        with self.locked():
            try:
                changed = listed(changes(Config.from_yaml(self.config_snapshot), config))
            except ConfigError:  # another version of cdrmix wrote it
                changed = f"unknown, because {self.config_snapshot} could not be read"
            self._replace_config(config)
            self.note(f"changed keys, which may change in a run: {changed}")

    def extend(self, config: Config, changed: Sequence[Change], step: int) -> None:
        """Makes a configuration of another hash that of the run, which thereby is unfinished, and records the change.

        changed: its keys. step: the finished steps, which were made under the former configuration. The caller has the
        lock, and has checked that the change leaves these steps as they are.
        """
        before = self.summary().get("config_hash")
        now = utc_now()
        keys = {each.key: [each.before, each.after] for each in changed}
        row = {"time": now, "step": step, "from": before, "to": config.hash(), "keys": keys}
        # First the record, which names both hashes: after a kill in between the same command goes on.
        lines = complete_lines(self.path / EXTENSIONS)
        kept = [line.text for line in lines if read_line(line, Extension).after != config.hash()]
        write_lines(self.path / EXTENSIONS, [*kept, json.dumps(row).encode()])
        self.update_summary({"config_hash": config.hash(), "finished": False})
        self._replace_config(config)
        self.say(f"Extended after step {step}: {listed(changed)}")

    def _replace_config(self, config: Config) -> None:
        write_atomically(self.config_snapshot, config.to_yaml())
        self.update_summary({"name": config.run.name})

    @property
    def extensions(self) -> list[Extension]:
        """The changes by `extend`. Raises ConfigError if extensions.jsonl is damaged."""
        return read_lines(self.path / EXTENSIONS, Extension)

    def made_by(self, config_hash: str, config: Config) -> bool:
        """Whether a checkpoint of a configuration with that hash is one of the run under this configuration.

        It is of the same hash, or of one that the run had before it was extended to this configuration.
        """
        return config_hash == config.hash() or (
            self.summary().get("config_hash") == config.hash() and config_hash in self._former_hashes()
        )

    def _former_hashes(self) -> list[str | None]:
        return [each.before for each in self.extensions]

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
    def faults(self) -> Path:
        """Faults after which the processes were started again, and skipped steps: one JSON object on each line."""
        return self.path / "faults.jsonl"

    @property
    def digests(self) -> Path:
        """With train.digests, the digests of weights and optimizer state after each step."""
        return self.path / "digests.jsonl"

    @property
    def rollouts(self) -> Path:
        """With reasoning.rl.rollouts_every, rollouts of the policy phase as text: one JSON object on each line."""
        return self.path / "rollouts.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def base_model(self) -> Path:
        """Of a model of transformers: its config.json before training, and the files of its tokenizer."""
        return self.path / "base"

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
    def evaluation(self) -> Path:
        """What `cdrmix eval watch` keeps: its queue, log and lock."""
        return self.path / "eval"

    @property
    def evaluation_rows(self) -> Path:
        """The results of suites on checkpoints, one JSON object on each line."""
        return self.evaluation / "metrics.jsonl"

    @property
    def finished(self) -> bool:
        """Whether the run has completed all its stages, including the report."""
        return bool(self.summary().get("finished"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run against writes of other processes. The lock ends with the process.

        Raises ConfigError if another process has the lock.
        """
        if not self.writes:
            yield
            return
        with self.log.open("a") as file:
            lock_file(file, lambda: f"{self.path}: another process is working on this run")
            yield

    def is_locked(self) -> bool:
        """Whether another process has the lock of this run."""
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
            now = utc_now()
            with self.log.open("a", encoding="utf-8") as log:
                log.writelines(f"{now} {line}\n" for line in text.splitlines() or [""])

    def record_fault(self, exit_code: int, message: str, started: float) -> None:
        """Appends a fault after which the processes are started again to faults.jsonl, and sums up in metrics.json.

        started: seconds since the epoch when the processes that failed began. What they did after their last
        checkpoint is lost.
        """
        now = time.time()
        committed = [path for path in self.checkpoints.glob("step-*/manifest.json") if path.parent.name[5:].isdigit()]
        newest = max(committed, default=None)
        kept = started if newest is None else max(started, newest.stat().st_mtime)
        summary, lost = self.summary(), max(0.0, round(now - kept, 3))
        checkpoint = None if newest is None else newest.parent.name
        self._add_fault({"exit_code": exit_code, "message": message, "checkpoint": checkpoint, "lost_seconds": lost})
        whole = summary.get("lost_seconds", 0.0) + lost
        self.update_summary({"restarts": summary.get("restarts", 0) + 1, "lost_seconds": whole})
        self.note(f"restart after exit code {exit_code}, {lost:.0f} s lost: {message}")

    def record_skip(self, step: int, reason: str) -> None:
        """Appends a step whose update was not applied to faults.jsonl, and says so."""
        if self.writes:
            self._add_fault({"step": step, "message": reason})
            self.say(f"step {step} was skipped: {reason}")

    def record_rollback(self, last: int, step: int, rows: range, reason: str) -> None:
        """Appends to faults.jsonl, and says, that the run went back to the checkpoint of `step` after step `last`.

        rows: those that are passed over, in the order of the run.
        """
        if self.writes:
            text = f"went back from step {last} to step {step}, and passes over rows {rows.start} to {rows.stop - 1}"
            # The step is the first that is made again: a run that is resumed before it goes back again.
            self._add_fault({"step": step + 1, "rollback": step, "message": f"{text} of the run's order: {reason}"})
            self.say(f"{text} of the run's order: {reason}")

    def _add_fault(self, fault: Mapping[str, Any]) -> None:
        now = utc_now()
        kept = [line.text for line in complete_lines(self.faults)]
        with disk_guard(f"{self.faults}", "Free some space, then continue with --resume auto."):
            write_lines(self.faults, [*kept, json.dumps({"time": now, **fault}).encode()])

    def add_rollouts(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Appends rollouts to rollouts.jsonl."""
        if self.writes and rollouts:
            with (
                disk_guard(f"{self.rollouts}", "Free some space, then continue with --resume auto."),
                self.rollouts.open("a", encoding="utf-8") as file,
            ):
                file.writelines(json.dumps(finite(each), ensure_ascii=False) + "\n" for each in rollouts)

    def drop_records_after(self, step: int, *, resumed: bool = True) -> None:
        """Removes steps after `step` from faults.jsonl, digests.jsonl and rollouts.jsonl: they are made again.

        resumed: so are the rollbacks after it. False: the run itself goes back, and they stay.
        """

        def stays(row: Mapping[str, Any]) -> bool:
            at = row.get("step", 0)
            return not isinstance(at, int) or at <= step or ("rollback" in row and not resumed)

        for path in (self.faults, self.digests, self.rollouts):
            if self.writes and path.exists():
                # A line that cannot be read stays, for a person to see.
                write_lines(path, (line.text for line in complete_lines(path) if stays(line.data())))

    def summary(self) -> dict[str, Any]:
        """The contents of metrics.json (cdrmix.summary.Summary); {} if it is missing or incomplete."""
        try:
            return read_summary(self.metrics_json.read_bytes())
        except FileNotFoundError:
            return {}

    def update_summary(self, values: Mapping[str, Any]) -> None:
        """Sets keys of metrics.json. The file is replaced atomically."""
        if self.writes:
            summary = self.summary() | dict(values)
            write_atomically(self.metrics_json, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")

    def keep_text(self, fingerprint: str) -> None:
        """Records the fingerprint of the text of this run.

        Raises ShardError if the run began with another text.
        """
        check_text(self.summary().get("text_fingerprint", fingerprint), fingerprint, self.path)
        self.update_summary({"text_fingerprint": fingerprint})

    def keep_questions(self, fingerprint: str) -> None:
        """Records the fingerprint of the questions that stage B of this run is trained on.

        Raises CorpusError if the run began with others.
        """
        before = self.summary().get("questions_fingerprint", fingerprint)
        if before != fingerprint:
            raise CorpusError(
                f"the questions have changed since this run began: {self.path} was trained on files with the"
                f" fingerprint {before[:12]}, the current ones have {fingerprint[:12]}. Restore the former files, or"
                " start a new run."
            )
        self.update_summary({"questions_fingerprint": fingerprint})

    def keep_tokenizer(self, source: Path) -> None:
        """Copies the tokenizer into the run, so that the run does not depend on the data cache.

        source: its tokenizer.json. tokenizer_settings.json next to it names the tokens that begin and end a document; a
        tokenizer that does not need it has none.
        """
        if self.writes and not self.tokenizer.exists():
            settings = source.with_name("tokenizer_settings.json")
            if settings.exists():
                write_atomically(self.tokenizer.with_name(settings.name), settings.read_bytes())
            write_atomically(self.tokenizer, source.read_bytes())

    def keep_chat_template(self, template: str, folder: Path) -> None:
        """Writes the chat template of the conversations that the run is trained on. It becomes a part of the export.

        folder: the run, or its `base_model`.
        """
        path = folder / "chat_template.jinja"
        if self.writes and not path.exists():
            folder.mkdir(exist_ok=True)
            write_atomically(path, template)

    def drop_metrics_after(self, step: int) -> int:
        """Removes the rows of metrics.jsonl after `step`, so that a resumed run has each step once.

        Returns the number of removed rows. An incomplete last line counts as one. metrics.json then has the last step
        that was recorded before: trackers have got it. Raises ConfigError if a line is damaged, before any change.
        """
        if not self.writes or not self.metrics_jsonl.exists():
            return 0
        read = [(read_record(line).step, line.text) for line in complete_lines(self.metrics_jsonl)]
        kept = [text for of_line, text in read if of_line <= step]
        removed = len(self.metrics_jsonl.read_bytes().splitlines()) - len(kept)
        self.update_summary({RECORDED: max((of_line for of_line, _ in read), default=0)})
        write_lines(self.metrics_jsonl, kept)
        return removed


def check_text(before: str, now: str, origin: Path) -> None:
    """Raises ShardError if the fingerprint of the text has changed since the start of the run (`origin`)."""
    if before != now:
        raise ShardError(
            f"the text has changed since this run began: {origin} was trained on shards with the fingerprint "
            f"{before[:12]}, the current text gives {now[:12]}. Restore the former text (for a Hugging Face dataset, "
            "set data.source.revision), or start a new run."
        )


def _is_run(path: Path) -> bool:
    # A checkpoint and an export have the configuration too.
    others = ("state.json", "SHA256SUMS")
    return (path / "config_snapshot.yaml").is_file() and not any((path / name).is_file() for name in others)


def _refuse_extended(config: Config) -> None:
    """Raises ConfigError if an unfinished run of this configuration was extended, so that it is not begun again."""
    for path in _root(config).glob(f"*-{config.hash()[:8]}*/{EXTENSIONS}"):
        run = RunFolder(path.parent)
        if not run.finished and config.hash() in run._former_hashes():
            raise ConfigError(
                f"--resume auto: {run.path} began with this configuration and was extended; the differences:\n"
                f"{difference(run.config_snapshot, config)}\nContinue it with --resume {run.path}, or write the new "
                "values into the configuration"
            )


def _root(config: Config) -> Path:
    return Path(config.run.root).expanduser()


def _make_new(root: Path, name: str) -> Path:
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # fails if it exists: two runs that start in the same second get two folders
            return path
        except FileExistsError:
            number += 1


def _age(path: Path) -> tuple[str, int]:
    timestamp, _, rest = path.name.partition("-")
    number = rest.partition("-")[2]
    return timestamp, int(number) if number.isdigit() else 1


def environment(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """The versions of the packages of a run, and its machine."""
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
    """`value` with each non-finite float replaced by None, because JSON has no NaN."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
