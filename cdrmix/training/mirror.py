"""The mirror of a run (run.mirror): a second store with its checkpoints and with what is needed to resume from them.

MIRROR/RUN/
    mirror.json                  the run that it belongs to, who writes it, the SHA-256 of the files that never change
    config_snapshot.yaml, metrics.jsonl, metrics.json, train.log, tokenizer.json, base/, reference/ ...
    checkpoints/step-NNNNNNNN/   the same files as in the run; manifest.json is copied last
    checkpoints/latest, best     the name of a checkpoint

The folder has the layout of a run, so the commands that read a run read a mirror too. A checkpoint without its manifest
is not complete, so an interrupted copy is never taken for one. The files are verified when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdrmix.durable import is_disk_full, sha256_file, write_atomically
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, pointed, read_manifest
from cdrmix.json_text import parse_json
from cdrmix.run_folder import EXTENSIONS, RunFolder
from cdrmix.training.retention import BEST, Rules, reasons_to_keep
from cdrmix.units import utc_now

ABOUT = "mirror.json"
ID = "mirror_id"  # key of metrics.json: names the run, wherever its folder is
CONSTANT = ("tokenizer.json", "tokenizer_settings.json", "chat_template.jinja")  # never change in a run
CONSTANT_FOLDERS = ("base", "reference")
CHANGING = ("config_snapshot.yaml", "train.log", "metrics.jsonl", "eval/metrics.jsonl", EXTENSIONS, "metrics.json")
BLOCK = 1 << 22  # bytes that are copied at a time
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of drives that cannot flush a file


class Mirror:
    """Copies a run to `folder`/<name of the run>. It is opened by `claim`; only one process at a time writes it.

    rules: which checkpoints the mirror keeps.

    The methods raise OSError when the store cannot be written, and ConfigError when it belongs to another run.
    """

    def __init__(self, run: RunFolder, folder: Path, rules: Rules) -> None:
        self.run, self.folder, self.rules = run, folder, rules
        self.path = folder / run.path.name
        self._writer = uuid.uuid4().hex
        self._device: int | None = None  # of the file system, once the mirror was written
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of the files as they were copied
        self._sums: dict[str, Any] = {}

    @property
    def checkpoints(self) -> Path:
        """Its folder of checkpoints."""
        return self.path / "checkpoints"

    def claim(self) -> None:
        """Makes the folder, or checks that it is of this run and that no other process has begun to write it."""
        if self._device is None:
            self.folder.mkdir(exist_ok=True)
        elif self.folder.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, "another file system is at its place: the drive was unmounted")
        about = read_about(self.path) if (self.path / ABOUT).is_file() else None
        own = self.run.summary().get(ID)
        if about is not None and about["id"] != own:
            raise ConfigError(
                f"{self.path} is the mirror of another run of that name ({about['id'][:8]}, this one is "
                f"{str(own)[:8] if own else 'not mirrored yet'}); set run.mirror to another folder"
            )
        if about is None and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"{self.path} has files but no {ABOUT}: it is not a mirror; set run.mirror to another folder"
            )
        if self._device is not None and about is not None and about["writer"] != self._writer:
            raise ConfigError(
                f"another process continues this run and writes {self.path} (on {about['host']}, since "
                f"{about['since']}); this process does not write it any more"
            )
        if self._device is None or about is None:
            self.path.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._sums, self._copied = {}, {}
            self._write_about()
            self._device = self.folder.stat().st_dev

    def has(self, checkpoint: Path) -> bool:
        """Whether the mirror has a complete copy of a checkpoint, by its manifest and the sizes of its files."""
        copy = self.checkpoints / checkpoint.name
        try:
            if (copy / MANIFEST).read_bytes() != (checkpoint / MANIFEST).read_bytes():
                return False
            files = read_manifest(copy)["files"]
            return all((copy / name).stat().st_size == entry["bytes"] for name, entry in files.items())
        except FileNotFoundError:
            return False

    def copy(self, checkpoint: Path) -> None:
        """Copies a checkpoint: its files, then the files of the run, then its manifest.

        Raises CheckpointError if a file differs from its manifest; then the copy is removed.
        """
        copy = self.checkpoints / checkpoint.name
        try:
            try:
                copy_checkpoint(checkpoint, copy, self.copy_files)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                remove(copy)  # a part of it would only take room
                if not self._make_room(copy):
                    raise
                copy_checkpoint(checkpoint, copy, self.copy_files)
        except (CheckpointError, OSError) as error:
            if isinstance(error, CheckpointError) or is_disk_full(error):
                remove(copy)
            raise

    def copy_files(self) -> None:
        """Copies the files of the run that changed since the last call."""
        constant = [name for name in CONSTANT if (self.run.path / name).is_file()]
        for folder in CONSTANT_FOLDERS:
            found = (self.run.path / folder).rglob("*")
            constant += sorted(path.relative_to(self.run.path).as_posix() for path in found if path.is_file())
        known = dict(self._sums)
        for name in constant:
            if (entry := self._copy_if_changed(name)) is not None:
                self._sums[name] = entry
        if self._sums != known:
            self._write_about()
        for name in CHANGING:
            if (self.run.path / name).is_file():
                self._copy_if_changed(name)

    def point_and_prune(self, current: Path) -> None:
        """Writes the pointers, then removes what the rules do not keep. current: the newest checkpoint of the run.

        Nothing happens before the mirror has `current`.
        """
        if not self.has(current):
            return
        _write(self.checkpoints / "latest", current.name + "\n")
        best = pointed(self.run.checkpoints, BEST)
        if best is None:
            (self.checkpoints / BEST).unlink(missing_ok=True)
        elif self.has(best):
            _write(self.checkpoints / BEST, best.name + "\n")
        mine = {path.name for path in wanted(self.run, self.rules)}  # one that is half copied is continued
        kept = reasons_to_keep(self.checkpoints, self.rules, self.checkpoints / current.name)
        for checkpoint, reasons in kept.items():
            if not reasons and checkpoint.name not in mine:
                remove(checkpoint)

    def _make_room(self, copy: Path) -> bool:
        """Removes what the rules will not keep once `copy` is there; never the newest. Whether anything was removed."""
        there = [path for path in list_checkpoints(self.checkpoints) if path != copy and (path / MANIFEST).is_file()]
        if not there:
            return False
        rules = self.rules._replace(keep_last=max(1, self.rules.keep_last - 1))
        kept = reasons_to_keep(self.checkpoints, rules, there[-1])
        leaving = [path for path, reasons in kept.items() if not reasons and path != copy]
        for path in leaving:
            remove(path)
        return bool(leaving)

    def _copy_if_changed(self, name: str) -> dict[str, Any] | None:
        source, target = self.run.path / name, self.path / name
        facts = source.stat()
        state = (facts.st_size, facts.st_mtime_ns)
        if self._copied.get(name) == state and target.exists():
            return None
        # Not with parents=True: where a drive was unmounted, its folder must not be made on the disk below it.
        for folder in reversed(Path(name).parents[:-1]):
            (self.path / folder).mkdir(exist_ok=True)
        entry = copy_file(source, target)
        self._copied[name] = state
        return entry

    def _write_about(self) -> None:
        summary = self.run.summary()
        about = {
            "format": 1,
            "run": self.run.path.name,
            "id": summary[ID],
            "config_hash": summary.get("config_hash"),
            "writer": self._writer,
            "host": socket.gethostname(),
            "since": utc_now(),
            "files": self._sums,
        }
        _write(self.path / ABOUT, json.dumps(about, indent=2) + "\n")


def give_id(run: RunFolder) -> None:
    """Gives a run the identity by which its mirror knows it, unless it has one."""
    if ID not in run.summary():
        run.update_summary({ID: uuid.uuid4().hex})


def wanted(run: RunFolder, rules: Rules) -> list[Path]:
    """The checkpoints of a run that its mirror should have: the newest, then the best, then the others."""
    kept = [path for path, reasons in reasons_to_keep(run.checkpoints, rules).items() if reasons]
    best = pointed(run.checkpoints, BEST)
    return sorted(kept, key=lambda path: (path == kept[-1], path == best, path), reverse=True)


def synchronise(mirror: Mirror) -> list[Path]:
    """Brings a mirror up to date in this thread. Returns the checkpoints that were copied.

    Damaged checkpoints are not copied, which raises CheckpointError after the others.
    """
    mirror.claim()
    copied, problems = [], []
    for checkpoint in wanted(mirror.run, mirror.rules):
        if not mirror.has(checkpoint):
            try:
                mirror.copy(checkpoint)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            copied.append(checkpoint)
    mirror.copy_files()
    if checkpoints := list_checkpoints(mirror.run.checkpoints):
        mirror.point_and_prune(checkpoints[-1])
    if problems:
        raise CheckpointError("; ".join(problems))
    return copied


def copy_checkpoint(source: Path, target: Path, before_manifest: Callable[[], None] | None = None) -> None:
    """Copies a checkpoint, its manifest last. What an interrupted copy left is used, if it is the same.

    Raises CheckpointError if a file of `source` differs from the manifest. Then the copy has no manifest.
    """
    files = read_manifest(source)["files"]
    (target / MANIFEST).unlink(missing_ok=True)
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if path.name not in files:
            path.unlink()
    for name, entry in files.items():
        there = target / name
        if there.is_file() and there.stat().st_size == entry["bytes"] and sha256_file(there) == entry["sha256"]:
            continue
        try:
            found = copy_file(source / name, there)
        except FileNotFoundError:
            raise CheckpointError(f"{source / name} is missing") from None
        if found != {"bytes": entry["bytes"], "sha256": entry["sha256"]}:
            raise CheckpointError(
                f"{source / name} is corrupt: it has {found['bytes']} bytes and SHA-256 {found['sha256']}, the "
                f"manifest says {entry['bytes']} and {entry['sha256']}"
            )
    if before_manifest is not None:
        before_manifest()
    copy_file(source / MANIFEST, target / MANIFEST)


def copy_file(source: Path, target: Path) -> dict[str, Any]:
    """Copies a file atomically and flushes it to the disk. Returns {"bytes": size, "sha256": hexadecimal}."""
    temporary = target.with_name(target.name + ".tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as reader, temporary.open("wb") as writer:
            while block := reader.read(BLOCK):
                digest.update(block)
                size += len(block)
                writer.write(block)
            writer.flush()
            try:
                os.fsync(writer.fileno())
            except OSError as error:
                if error.errno not in NO_SYNC:
                    raise
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest.hexdigest()}


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint of a mirror, its manifest first, so that an interrupted removal leaves no complete one."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def read_about(path: Path) -> dict[str, Any]:
    """mirror.json of a mirrored run. Raises ConfigError if it is damaged."""
    try:
        about = parse_json((path / ABOUT).read_text(encoding="utf-8"))
        texts = [about[name] for name in ("run", "id", "config_hash", "writer", "host", "since")]
        files = about["files"]
        whole = all(isinstance(text, str) for text in texts) and Path(about["run"]).name == about["run"]
        whole = whole and all(_is_inside(name) and isinstance(entry["sha256"], str) for name, entry in files.items())
    except (ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f"{path / ABOUT} is damaged: it does not describe the mirror of a run")
    return dict(about)


def damaged_files(path: Path) -> list[str]:
    """The files of a mirrored run, outside of its checkpoints, that differ from mirror.json; a text for each."""
    problems = []
    for name, entry in read_about(path)["files"].items():
        if not (path / name).is_file():
            problems.append(f"{path / name} is missing")
        elif (found := sha256_file(path / name)) != entry["sha256"]:
            problems.append(f"{path / name} is corrupt: its SHA-256 is {found}, {ABOUT} says {entry['sha256']}")
    return problems


def _is_inside(name: str) -> bool:
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _write(path: Path, text: str) -> None:
    """Writes a file atomically, unless it has this text."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == text:
            return
    try:
        write_atomically(path, text)
    except OSError as error:
        if error.errno not in NO_SYNC or path.read_text(encoding="utf-8") != text:
            raise
