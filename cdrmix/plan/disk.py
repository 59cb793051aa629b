"""What a run writes to disks, and whether they have room for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.data.chains import source_of
from cdrmix.data.prepare import text_bytes
from cdrmix.durable import folder_bytes, free_bytes
from cdrmix.errors import CdrmixError, DiskFullError
from cdrmix.plan.components import FP32
from cdrmix.plan.foreign import foreign_size
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.parameters import count_parameters
from cdrmix.units import amount_of_bytes

PER_ROW = 20  # bytes of the index of a row with one document


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    text: of the files of the text, which are not compressed; None: unknown. shards: of all this text, at most, with a
    token for every byte; None: unknown. checkpoint: of one checkpoint. checkpoints: of all that exist at a time, with
    the one that is being written. needed: the least that the run folder needs for checkpoints and export.
    """

    text: int | None
    shards: int | None
    checkpoint: int
    checkpoints: int
    export: int
    needed: int


def disk_of(config: Config) -> Disk:
    """What a run of a configuration writes. No text is read."""
    train = config.train
    trained, export = _trained_and_exported(config)
    average = train.ema_decay is not None
    checkpoint = FP32 * (trained * (3 + average) - optimizer_size(config).orthogonalised)  # weights, moments
    steps = 0 if config.reasoning is not None and config.reasoning.backbone else train.steps
    for_good = train.steps // (train.keep_every or train.steps + 1)
    periodic = math.ceil(steps / train.checkpoint_every)
    kept = train.keep_last + 2 + for_good  # the best, and one being written
    try:
        text = text_bytes(config, {name: source_of(config.data, name) for name in config.data.all_domains()})
    except CdrmixError:  # the preparation tells what is missing
        text = None
    width = 2 if config.model.vocab_size <= 2**16 else 4
    shards = None if text is None else text * width + text // config.data.row_length * PER_ROW
    # An optimizer of a plugin may have no moments.
    sure = checkpoint if train.optimizer.kind in ("adamw", "muon") else FP32 * trained
    least = max(min(periodic, train.keep_last + 1) * sure, min(periodic, train.keep_last) * sure + export)
    return Disk(text, shards, checkpoint, kept * checkpoint, export, least)


def check_disk(config: Config, run: Path | None, say: Callable[[str], None]) -> None:
    """Compares free disk space with what a run will write. run: the folder of a run that continues.

    Raises DiskFullError if there is certainly too little for checkpoints and export; says it if there is perhaps.
    """
    disk = disk_of(config)
    root = Path(config.run.root).expanduser()
    free = free_bytes(root)
    there = 0 if run is None else sum(folder_bytes(run / name) for name in ("checkpoints", "export"))
    most = max(disk.checkpoints, disk.checkpoints - disk.checkpoint + disk.export)
    parts = (
        f"the disk of run.root={root} has {amount_of_bytes(free or 0)} free; checkpoints of "
        f"{amount_of_bytes(disk.checkpoint)} each and an export of {amount_of_bytes(disk.export)} take"
    )
    already = f", of which {amount_of_bytes(there)} are there" if there else ""
    if free is not None and free + there < disk.needed:
        raise DiskFullError(
            f"{parts} at least {amount_of_bytes(disk.needed)}{already}. Free some space, lower train.keep_last, or set "
            "run.root to another disk"
        )
    if free is not None and free + there < most:
        say(
            f"warning: {parts} up to {amount_of_bytes(most)}{already}; the run ends with exit code 6 when the disk is "
            "full"
        )


def _trained_and_exported(config: Config) -> tuple[int, int]:
    """The parameters that a checkpoint holds, and the bytes of the exported weights."""
    model = config.model
    if isinstance(model, Model):
        count = count_parameters(model)
        dropped = count.stored["prediction"] if config.export.prediction_heads == "drop" else 0
        return count.total_stored, FP32 * (count.total_stored - dropped)
    size = foreign_size(config)
    adapters = size.stored.get("adapters", 0)
    exported = adapters if model.lora is not None and config.export.lora == "adapter" else size.total_stored - adapters
    return size.trained, (2 if config.export.weights == "bf16" else FP32) * exported
