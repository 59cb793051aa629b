"""Finds the run of `--resume`: a run folder, or a mirror, from which the run folder is made again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard, sync_folder, write_atomically
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import MANIFEST, list_checkpoints, pointed
from cdrmix.run_folder import RunFolder
from cdrmix.training.mirror import ABOUT, CHANGING, ID, copy_checkpoint, copy_file, read_about
from cdrmix.training.retention import BEST

Say = Callable[[str], None]


def find_run(config: Config, resume: str, say: Say) -> RunFolder | None:
    """The run folder for `--resume`, as of RunFolder.resume; a mirror is restored under run.root first.

    resume: auto, a run folder, a run in a mirror, or a mirror, of which the newest unfinished run of this configuration
    is taken. auto takes the run from run.mirror if no run under run.root has a checkpoint.
    Raises ConfigError, and CheckpointError if the mirror has no complete checkpoint.
    """
    if resume == "auto":
        run = RunFolder.resume(config, resume)
        if config.run.mirror is not None and not (run is not None and list_checkpoints(run.checkpoints)):
            sources = _unfinished(Path(config.run.mirror).expanduser(), config)
            sources = [source for source in sources if not _target(source, config).exists()]
            if sources:
                return _restored(sources[-1], config, say)
        return run
    source = _mirrored_run(Path(resume), config)
    return RunFolder.resume(config, resume) if source is None else _restored(source, config, say)


def _restored(source: Path, config: Config, say: Say) -> RunFolder:
    run = restore(source, config, say)
    run.update_config(config)
    return run


def _mirrored_run(path: Path, config: Config) -> Path | None:
    """The run to restore from a mirror; None if `path` is no mirror."""
    if (path / ABOUT).is_file():
        return path
    runs = _runs_in(path)
    if not runs or (path / "config_snapshot.yaml").is_file():
        return None
    own = _unfinished(path, config) or [run for run in runs if _hash_of(run) == config.hash()]
    if not own:
        names = ", ".join(f"{run.name} ({_hash_of(run)[:8]})" for run in runs)
        raise ConfigError(
            f"--resume {path}: the mirror has no run of this configuration ({config.hash()[:8]}); it has {names}: "
            f"resume one of them with --config {runs[-1] / 'config_snapshot.yaml'} --resume {runs[-1]}"
        )
    return own[-1]


def _runs_in(mirror: Path) -> list[Path]:
    """The runs in a mirror, oldest first."""
    return sorted(path.parent for path in mirror.glob(f"*/{ABOUT}")) if mirror.is_dir() else []


def _unfinished(mirror: Path, config: Config) -> list[Path]:
    """The unfinished runs of this configuration in a mirror that have a complete checkpoint by name, oldest first."""
    return [
        run
        for run in _runs_in(mirror)
        if _hash_of(run) == config.hash()
        and not RunFolder(run, writes=False).finished
        and any((checkpoint / MANIFEST).is_file() for checkpoint in list_checkpoints(run / "checkpoints"))
    ]


def _hash_of(run: Path) -> str:
    return str(read_about(run)["config_hash"])


def _target(source: Path, config: Config) -> Path:
    return Path(config.run.root).expanduser() / str(read_about(source)["run"])


def restore(source: Path, config: Config, say: Say) -> RunFolder:
    """Makes the run folder again from its mirror: the newest complete checkpoint, the best, and the other files.

    All files of checkpoints, and those that never change in a run, are verified while they are copied. The folder has
    the name that it had, under run.root, and appears only when it is complete.
    Raises ConfigError if the folder exists or the mirror is of another configuration; CheckpointError if no checkpoint
    of the mirror is complete, or another file is damaged; DiskFullError.
    """
    about = read_about(source)
    if about["config_hash"] != config.hash():
        RunFolder(source, writes=False).check_hash(config, f"--resume {source}")
    target = _target(source, config)
    if target.exists():
        raise ConfigError(
            f"--resume {source}: {target} exists; continue it with --resume {target}, or move it away to restore the "
            "run from its mirror"
        )
    temporary = target.with_name(f".restore-{os.getpid()}.tmp")
    try:
        with disk_guard(f"the run folder {target}", "Free some space there, or set run.root to another disk."):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "checkpoints").mkdir(parents=True)
            newest = _copy_checkpoints(source, temporary, say)
            _copy_files(source, temporary, about)
            sync_folder(temporary)
            temporary.rename(target)
            sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    run = RunFolder.open(target)
    run.say(f"Restored {target} from the mirror {source}: {newest.name}, verified")
    return run


def _copy_checkpoints(source: Path, target: Path, say: Say) -> Path:
    """Copies the newest complete checkpoint and the best. Returns the newest."""
    newest: Path | None = None
    problems = []
    checkpoints = list_checkpoints(source / "checkpoints")
    for checkpoint in reversed(checkpoints):
        try:
            copy_checkpoint(checkpoint, target / "checkpoints" / checkpoint.name)
        except CheckpointError as error:
            problems.append(str(error))
            say(f"skipped {checkpoint.name} of the mirror: {error}")
            shutil.rmtree(target / "checkpoints" / checkpoint.name, ignore_errors=True)
            continue
        newest = checkpoint
        break
    if newest is None:
        why = f": {problems[0]}" if problems else ""
        raise CheckpointError(f"{source} has no complete checkpoint, so the run cannot be continued from it{why}")
    write_atomically(target / "checkpoints" / "latest", newest.name + "\n")
    best = pointed(source / "checkpoints", BEST)
    if best is None or not best.is_dir() or best > newest:
        return newest
    if best != newest:
        try:
            copy_checkpoint(best, target / "checkpoints" / best.name)
        except CheckpointError as error:
            say(f"skipped {best.name} of the mirror, the best: {error}")
            shutil.rmtree(target / "checkpoints" / best.name, ignore_errors=True)
            return newest
    write_atomically(target / "checkpoints" / BEST, best.name + "\n")
    return newest


def _copy_files(source: Path, target: Path, about: dict[str, Any]) -> None:
    for name, entry in about["files"].items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if not (source / name).is_file():
            raise CheckpointError(f"{source / name} is missing, and the run cannot be continued without it")
        found = copy_file(source / name, target / name)["sha256"]
        if found != entry["sha256"]:
            raise CheckpointError(
                f"{source / name} is corrupt: its SHA-256 is {found}, {ABOUT} says {entry['sha256']}; the run cannot "
                "be continued without it"
            )
    for name in CHANGING:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(source / name, target / name)
    snapshot = target / "config_snapshot.yaml"
    if not snapshot.is_file():  # each checkpoint has one too, which was verified
        newest = (target / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        copy_file(target / "checkpoints" / newest / snapshot.name, snapshot)
    if "config_hash" not in RunFolder(target).summary():  # metrics.json is damaged: the checkpoint has what counts
        facts = {"finished": False, "config_hash": about["config_hash"], ID: about["id"]}
        write_atomically(target / "metrics.json", json.dumps(facts, indent=2) + "\n")
