"""Mirrors a run in the background of its training. No failure of the mirror stops the training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from cdrmix.config.schema import Config
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.run_folder import RunFolder
from cdrmix.training.mirror import Mirror, give_id, wanted
from cdrmix.training.retention import Rules, prune

RETRY = 60.0  # seconds after which a mirror that failed is tried again, if no checkpoint comes before
WAIT_AT_END = 1800.0  # seconds that a finished run waits for its mirror
WAIT_WHEN_STOPPED = 20.0  # after a signal; schedulers kill a process 30 s after SIGTERM, or later


@contextlib.contextmanager
def mirroring(config: Config, run: RunFolder) -> Iterator[MirrorThread | None]:
    """Mirrors a run during the body. None: the configuration has no mirror, or this process does not write the run."""
    if config.run.mirror is None or not run.writes:
        yield None
        return
    with MirrorThread(run, Path(config.run.mirror).expanduser(), Rules.of(config.train)) as thread:
        yield thread


def check_mirror(config: Config) -> None:
    """Raises ConfigError if run.mirror is a file, run.root, or in a run. That it cannot be written is no error."""
    if config.run.mirror is None:
        return
    folder, root = Path(config.run.mirror).expanduser(), Path(config.run.root).expanduser()
    remedy = "name a folder on another disk or a mounted drive"
    if folder.is_file():
        raise ConfigError(f"run.mirror: {folder} is a file; {remedy}")
    if folder.resolve() == root.resolve():
        raise ConfigError(f"run.mirror: {folder} is run.root, the folder of the runs themselves; {remedy}")
    inside = [each for each in (folder, *folder.resolve().parents) if (each / "config_snapshot.yaml").is_file()]
    if inside == [folder]:
        raise ConfigError(
            f"run.mirror: {folder} is one run; name the folder around it, in which each run gets a folder of its own"
        )
    if inside:
        raise ConfigError(f"run.mirror: {folder} is in the run folder {inside[-1]}; {remedy}")


class MirrorThread:
    """A thread that copies committed checkpoints to the mirror, the newest first. A context manager.

    A failure is a warning on the console and in train.log. The copy is tried again after each checkpoint and each
    minute, and then includes everything that the mirror lacks.
    """

    def __init__(self, run: RunFolder, folder: Path, rules: Rules) -> None:
        self._run, self._rules = run, rules
        self._mirror = Mirror(run, folder, rules)
        self._lock = threading.Lock()  # of the choice of a checkpoint against its removal
        self._copying: Path | None = None
        self._current: Path | None = None
        self._damaged: set[tuple[str, int]] = set()  # a checkpoint of that step may be written again
        self._wake, self._end = threading.Event(), threading.Event()
        self._problem: str | None = None
        self._told_behind = False
        # A daemon: a drive that does not answer must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def __enter__(self) -> MirrorThread:
        give_id(self._run)
        self._wake.set()  # the mirror may lack what was committed before a kill
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._wake.set()
        self._thread.join(2.0)
        if self._thread.is_alive():
            limit = WAIT_AT_END if kind is None else WAIT_WHEN_STOPPED
            self._say(f"waiting for the mirror {self._mirror.path}, {limit:.0f} s at most")
            self._thread.join(limit)
            if self._thread.is_alive():
                self._say(
                    f"warning: the mirror {self._mirror.path} is not up to date; `cdrmix checkpoints mirror "
                    f"{self._run.path}` copies what it lacks"
                )
        if self._current is not None:
            with self._lock:
                prune(self._run.checkpoints, self._rules, self._current, self._busy())

    def committed(self, checkpoint: Path) -> None:
        """A checkpoint was committed: it is copied soon. Removes those that no rule keeps, unless it is being copied.

        The loop calls it. It does no more than that, and never waits for the mirror.
        """
        with self._lock:
            self._current = checkpoint
            busy = self._busy()
            prune(self._run.checkpoints, self._rules, checkpoint, busy)
        if busy and not self._told_behind:
            self._told_behind = True
            self._say(
                f"the mirror {self._mirror.path} is slower than the training: {busy[0].name} is still being copied; "
                "the newest checkpoint follows, and those between are left out"
            )
        self._wake.set()

    def _busy(self) -> list[Path]:
        return [] if self._copying is None else [self._copying]

    def _work(self) -> None:
        last = False
        while not last:
            self._wake.wait(None if self._problem is None else RETRY)
            self._wake.clear()
            last = self._end.is_set()
            try:
                self._synchronise()
            except (OSError, CdrmixError) as error:
                self._failed(error)
            else:
                if self._problem is not None:
                    self._problem = None
                    self._say(f"the mirror {self._mirror.path} is up to date again")

    def _synchronise(self) -> None:
        mirror = self._mirror
        while (checkpoint := self._next()) is not None:
            try:
                mirror.claim()  # since the last copy the drive may have been unmounted, or taken by another process
                self._copy(checkpoint)
            finally:
                with self._lock:
                    self._copying = None
        mirror.claim()
        mirror.copy_files()
        if newest := list_checkpoints(self._run.checkpoints):
            mirror.point_and_prune(newest[-1])

    def _copy(self, checkpoint: Path) -> None:
        started = time.monotonic()
        try:
            self._mirror.copy(checkpoint)
        except CheckpointError as error:
            self._damaged.add(_version(checkpoint))
            self._say(f"warning: {checkpoint.name} is not mirrored: {error}")
        else:
            self._note(f"mirrored {checkpoint.name} to {self._mirror.path} in {time.monotonic() - started:.1f} s")
            self._mirror.point_and_prune(checkpoint)

    def _next(self) -> Path | None:
        """The first checkpoint that the mirror lacks. It is not removed while it is copied."""
        with self._lock:
            candidates = wanted(self._run, self._rules)
        for checkpoint in candidates:
            if _version(checkpoint) in self._damaged or self._mirror.has(checkpoint):
                continue
            with self._lock:
                if checkpoint.is_dir():
                    self._copying = checkpoint
                    return checkpoint
        return None

    def _failed(self, error: Exception) -> None:
        what = str(error)
        if isinstance(error, OSError) and error.strerror:
            what = f"{error.strerror}: {error.filename or self._mirror.folder}"
        text = f"warning: the mirror {self._mirror.path} is not up to date: {what}"
        if text == self._problem:
            self._note(text)
            return
        self._problem = text
        self._say(f"{text}. The training goes on; the mirror is tried again after each checkpoint")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the disk of the run may be full
            self._run.say(text)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._run.note(text)


def _version(checkpoint: Path) -> tuple[str, int]:
    """The name of a checkpoint and the time at which its folder was committed."""
    try:
        return checkpoint.name, checkpoint.stat().st_mtime_ns
    except FileNotFoundError:
        return checkpoint.name, 0
