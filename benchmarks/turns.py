"""Stage A's loop in turns with other ways to train on the same batches, so that all see the same machine and load."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import trainer_peers as peers

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import Prefetcher
from cdrmix.data.shards import ShardSet
from cdrmix.model.loss import LossModule
from cdrmix.run_folder import RunFolder
from cdrmix.training import row_objective, stage_a
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join

OURS = "cdrmix"
WARMUP_BLOCKS = 1  # first blocks of a timing, which are discarded because memory is being allocated

Step = Callable[[int, list[Batch]], object]  # number of the step and its micro-batches -> one optimizer step


def steps_of(blocks: int, block: int) -> int:
    """The number of steps that so many timings of so many steps need."""
    return (WARMUP_BLOCKS + blocks) * block + 1


def in_turns(
    config: Config,
    shards: ShardSet,
    others: Mapping[str, Step],
    block: int,
    *,
    build: Callable[[Config], LossModule] = build_loss_model,
) -> dict[str, list[float]]:
    """Steps per second of stage A's loop ("cdrmix") and of each of the others, a sample every `block` steps.

    The loop is stage_a.train itself. Its source of batches stops it before every such step while the others take their
    turns. Evaluation and checkpoints come with the last step, which does not count. build: makes our loss model.
    """
    device = join(config).device
    samples: dict[str, list[float]] = {name: [] for name in (OURS, *others)}

    class Turns(Prefetcher):
        started = 0.0

        def micro_batches(self, step: int) -> list[Batch]:
            if step % block == 0:
                now = peers.clock(device)
                if step > 0:
                    samples[OURS].append(block / (now - self.started))
                    for name, train in others.items():
                        begun = peers.clock(device)
                        for number in range(step - block, step):
                            train(number, self.loader.micro_batches(number))
                        samples[name].append(block / (peers.clock(device) - begun))
                    now = peers.clock(device)
                self.started = now
            return super().micro_batches(step)

    with run_folder(config) as run, mock.patch.object(row_objective, "Prefetcher", Turns):
        stage_a.train(config, run, shards, build=build, console=False)
    return {name: values[WARMUP_BLOCKS:] for name, values in samples.items()}


@contextmanager
def run_folder(config: Config) -> Iterator[RunFolder]:
    """A run folder for the time of a measurement."""
    with tempfile.TemporaryDirectory(prefix="cdrmix-benchmark-") as root:
        yield RunFolder.create(config.model_copy(update={"run": config.run.model_copy(update={"root": root})}))
