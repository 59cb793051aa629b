"""The checkpoints of a run for people: a table of them, their verification, their removal by rules, their mirror."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.config.best_metric import metric_and_mode
from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard, folder_bytes
from cdrmix.errors import CheckpointError, ConfigError, DiskFullError
from cdrmix.inference.checkpoints import MANIFEST, damages, list_checkpoints, named_checkpoint, read_manifest, step_of
from cdrmix.json_text import parse_json
from cdrmix.records import read_records
from cdrmix.run_folder import RunFolder
from cdrmix.training.mirror import ABOUT, Mirror, damaged_files, give_id, synchronise
from cdrmix.training.retention import BEST, LATEST, Rules, reasons_to_keep, set_aside
from cdrmix.units import amount_of_bytes

QUEUED = "queued"  # a reason to keep a checkpoint: the evaluation beside the training has it in its queue
ONLY = "the only complete one"


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a run.

    step: optimizer steps; tokens: with a target, trained on until then; None if the checkpoint does not say. bytes: of
    its files. figure: the value of train.best_metric at this step; None without a validation of it. kept: the reasons
    to keep it (last, best, every, queued); [] if `prune` removes it. problem: why it is incomplete, by its manifest and
    the sizes of its files; None if it is complete. mirrored: whether run.mirror has it; None without a mirror.
    """

    name: str
    path: Path
    step: int
    tokens: int | None
    bytes: int
    figure: float | None
    kept: list[str]
    problem: str | None
    mirrored: bool | None

    def as_json(self) -> dict[str, Any]:
        """The fields by name; the path as text."""
        return dataclasses.asdict(self) | {"path": str(self.path)}


class Checkpoints(NamedTuple):
    """The checkpoints of a run in order of step, the figure of their comparison, and the folder of its mirror."""

    infos: list[CheckpointInfo]
    metric: str | None
    mirror: Path | None


class Pruned(NamedTuple):
    """What `prune_run` removed, or would remove: checkpoints, unfinished copies, and their bytes; and what it kept."""

    removed: list[Path]
    bytes: int
    kept: dict[Path, list[str]]


def checkpoints(run: str | Path) -> list[CheckpointInfo]:
    """The checkpoints of a run folder, or of a run in a mirror, in order of step. Their hashes are not verified.

    Raises ConfigError if `run` is not a run folder.
    """
    return list_run(Path(run)).infos


def list_run(path: Path) -> Checkpoints:
    """The checkpoints of a run, by `path`. Raises ConfigError without a run folder, or for a damaged metrics.jsonl."""
    run, config = open_run(path)
    train = config.train
    chosen = metric_and_mode(train.best_metric, train.best_mode, pairs=train.dpo is not None)
    metric = chosen[0] if chosen else None
    steps = read_records(run.metrics_jsonl).steps
    figures = {record.step: record.held_out_figure(metric) for record in steps} if metric else {}
    mirror = _mirror_of(run, config)
    queued = _queued(run)
    infos = []
    for checkpoint, reasons in reasons_to_keep(run.checkpoints, Rules.of(train)).items():
        step = step_of(checkpoint)
        infos.append(
            CheckpointInfo(
                name=checkpoint.name,
                path=checkpoint,
                step=step,
                tokens=_tokens(checkpoint),
                bytes=folder_bytes(checkpoint),
                figure=figures.get(step),
                kept=reasons + ([QUEUED] if checkpoint.name in queued else []),
                problem=_problem(checkpoint),
                mirrored=None if mirror is None else _has(mirror, checkpoint),
            )
        )
    return Checkpoints(infos, metric, mirror.path if mirror is not None else None)


def verify_run(path: Path) -> tuple[int, list[str]]:
    """Reads every file of every checkpoint of a run, or of one checkpoint. Returns their number and all damages.

    Of a run in a mirror, the other files that never change are read too. A pointer (latest, best) to a checkpoint that
    is not there is a damage.
    Raises CheckpointError if there is no checkpoint, ConfigError if `path` is neither a run nor a checkpoint.
    """
    if (path / MANIFEST).is_file() or path in list_checkpoints(path.parent):
        return 1, damages(path)
    run, _ = open_run(path)
    found = list_checkpoints(run.checkpoints)
    if not found:
        raise CheckpointError(f"{path} has no checkpoints")
    problems = [problem for checkpoint in found for problem in damages(checkpoint)]
    for pointer in (run.checkpoints / LATEST, run.checkpoints / BEST):
        if not pointer.exists():
            continue
        try:
            target = named_checkpoint(pointer)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not target.is_dir():
            problems.append(f"{pointer} names {target.name}, which does not exist")
    if (path / ABOUT).is_file():
        problems += damaged_files(path)
    return len(found), problems


def prune_run(path: Path, *, keep_last: int | None = None, keep_every: int | None = None, dry: bool = False) -> Pruned:
    """Removes the checkpoints of a run that no rule keeps, and what a killed process left of unfinished ones.

    keep_last, keep_every: instead of those of its configuration. The best checkpoint, and those in the queue of the
    evaluation beside the training (eval/queue), are always kept; so is the newest complete one if none of those is
    complete by its hashes. dry: nothing is removed.
    Raises CheckpointError if there is no checkpoint, or none is complete; ConfigError if `path` is not a run folder, or
    a process is working on it.
    """
    run, config = open_run(path)
    found = list_checkpoints(run.checkpoints)
    if not found:
        raise CheckpointError(f"{path} has no checkpoints")
    rules = Rules.of(config.train)
    rules = Rules(keep_last or rules.keep_last, keep_every or rules.keep_every)
    with contextlib.nullcontext() if dry else run.locked():
        queued = _queued(run)
        kept = {
            checkpoint: reasons + ([QUEUED] if checkpoint.name in queued else [])
            for checkpoint, reasons in reasons_to_keep(run.checkpoints, rules).items()
        }
        staying = [checkpoint for checkpoint, reasons in reversed(kept.items()) if reasons]
        if not any(not damages(checkpoint) for checkpoint in staying):
            others = [checkpoint for checkpoint in reversed(found) if checkpoint not in staying]
            complete = next((checkpoint for checkpoint in others if not damages(checkpoint)), None)
            if complete is None:
                raise CheckpointError(
                    f"no checkpoint of {path} is complete, so none is removed: {damages(found[-1])[0]}"
                )
            kept[complete].append(ONLY)
        leaving = [checkpoint for checkpoint, reasons in kept.items() if not reasons]
        leaving += sorted(run.checkpoints.glob("step-*.tmp-*"))
        size = sum(map(folder_bytes, leaving))
        if not dry:
            for checkpoint in leaving:
                shutil.rmtree(set_aside(checkpoint) if checkpoint in kept else checkpoint)
    return Pruned(leaving, size, {checkpoint: reasons for checkpoint, reasons in kept.items() if reasons})


def mirror_run(path: Path, to: Path | None = None) -> tuple[Path, list[Path]]:
    """Copies to the mirror of a run what it lacks, and removes there what the rules do not keep.

    to: the mirror instead of run.mirror. Returns the folder of the run in the mirror, and the checkpoints copied.
    Raises ConfigError if there is no mirror, it belongs to another run, it cannot be written, or a process is working
    on the run; CheckpointError if a checkpoint is damaged, after the others were copied; DiskFullError.
    """
    run, config = open_run(path)
    if (path / ABOUT).is_file():
        raise ConfigError(f"{path} is a mirror itself; name the run folder")
    if to is None and config.run.mirror is None:
        raise ConfigError(f"{path}: its configuration has no run.mirror; name a folder with --to")
    folder = (to or Path(str(config.run.mirror))).expanduser()
    if folder.resolve() == path.resolve().parent or folder.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{folder} is in the folder of the run itself, or around it; name a folder on another disk")
    with run.locked():
        give_id(run)
        mirror = Mirror(run, folder, Rules.of(config.train))
        try:
            with disk_guard(f"the mirror {mirror.path}", "Free some space there, or name another folder with --to."):
                copied = synchronise(mirror)
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(
                f"the mirror {mirror.path} cannot be written: {error.strerror}: {error.filename or folder}"
            ) from error
    return mirror.path, copied


def open_run(path: Path) -> tuple[RunFolder, Config]:
    """A run folder and its configuration. Raises ConfigError, which names the runs in a mirror."""
    inside = sorted(about.parent.name for about in path.glob(f"*/{ABOUT}"))
    if inside and not (path / "config_snapshot.yaml").is_file():
        raise ConfigError(f"{path} is a mirror of {len(inside)} run(s); name one of them: {path / inside[-1]}")
    run = RunFolder.open(path)
    return run, Config.from_yaml(run.config_snapshot)


def table(found: Checkpoints) -> str:
    """The checkpoints as aligned lines of text."""
    rows: list[Sequence[str]] = [("checkpoint", "tokens", "size", found.metric or "-", "kept as", "state", "mirror")]
    rows += [
        (
            info.name,
            "-" if info.tokens is None else f"{info.tokens:,}",
            amount_of_bytes(info.bytes),
            "-" if info.figure is None else f"{info.figure:.4f}",
            ", ".join(info.kept) or "-",
            "complete" if info.problem is None else "incomplete",
            {None: "-", True: "yes", False: "no"}[info.mirrored],
        )
        for info in found.infos
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 1 <= place <= 3 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += [f"{info.name}: {info.problem}" for info in found.infos if info.problem is not None]
    return "\n".join(lines)


def pruned_text(pruned: Pruned, *, dry: bool) -> str:
    """What was removed and what was kept, a line each."""
    verb = "would remove" if dry else "removed"
    lines = [f"{verb} {path.name}" for path in pruned.removed]
    lines += [f"kept {path.name}: {', '.join(reasons)}" for path, reasons in pruned.kept.items()]
    return "\n".join(
        [
            *lines,
            f"{verb} {len(pruned.removed)} of {len(pruned.removed) + len(pruned.kept)}, "
            f"{amount_of_bytes(pruned.bytes)}",
        ]
    )


def _mirror_of(run: RunFolder, config: Config) -> Mirror | None:
    if config.run.mirror is None or (run.path / ABOUT).is_file():
        return None
    return Mirror(run, Path(config.run.mirror).expanduser(), Rules.of(config.train))


def _has(mirror: Mirror, checkpoint: Path) -> bool:
    try:
        return mirror.has(checkpoint)
    except (OSError, CheckpointError):  # it cannot be read, or is damaged
        return False


def _queued(run: RunFolder) -> set[str]:
    return {path.name for path in list_checkpoints(run.path / "eval" / "queue")}


def _tokens(checkpoint: Path) -> int | None:
    try:
        return int(parse_json((checkpoint / "state.json").read_text(encoding="utf-8"))["progress"]["tokens"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None


def _problem(checkpoint: Path) -> str | None:
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError as error:
        return str(error)
    for name, entry in files.items():
        if not (checkpoint / name).is_file():
            return f"{checkpoint / name} is missing"
        if (size := (checkpoint / name).stat().st_size) != entry["bytes"]:
            return f"{checkpoint / name} has {size} bytes, the manifest says {entry['bytes']}"
    return None
