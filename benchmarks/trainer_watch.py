"""The trainer's case of evaluation while training: steps per second beside a busy watcher, and beside a paused one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import trainer_peers as peers
import turns
from cases import NotMeasured, Options, Result

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import Prefetcher
from cdrmix.data.prepare import prepare
from cdrmix.run_folder import RunFolder
from cdrmix.training import row_objective, stage_a
from cdrmix.training.distributed import join

BLOCK = 10  # steps of one timing
IMPORTS = 8.0  # seconds of processor time after which the process that evaluates generates text
PATIENCE = 600.0  # seconds
SUITE = ("evaluation.samples=1000", "evaluation.temperature=0.8")  # of `code`; longer than any measurement


def speed(options: Options) -> Result:
    """Steps per second of stage A's loop, in turns of ten steps with the watcher busy (ours) and paused (peer)."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise NotMeasured("it is for two processors or more")
    steps = (turns.WARMUP_BLOCKS + 2 * options.blocks) * BLOCK + 1
    common = [f"run.device={options.device}", "train.warmup_steps=1", f"train.evaluate_every={steps + 1}"]
    short = Config.from_yaml(options.config, [*common, "train.steps=2", "train.checkpoint_every=2"])
    config = Config.from_yaml(options.config, [*common, f"train.steps={steps}", f"train.checkpoint_every={steps + 1}"])
    device = join(config).device
    shards = prepare(config)
    samples: dict[bool, list[float]] = {True: [], False: []}
    seconds = {True: 0.0, False: 0.0}  # of the processor, by the watcher's processes
    with turns.run_folder(short) as watched:
        watched.keep_tokenizer(shards.tokenizer_path)
        stage_a.train(short, watched, shards, console=False)
        with watching(watched) as watcher:

            class Turns(Prefetcher):
                begun, used, busy = 0.0, 0.0, True

                def micro_batches(self, step: int) -> list[Batch]:
                    if step % BLOCK == 0:
                        now, used = peers.clock(device), processor_seconds(watcher)
                        if step > 0:
                            samples[self.busy].append(BLOCK / (now - self.begun))
                            seconds[self.busy] += used - self.used
                            self.busy = not self.busy
                        for pid in children(watcher.pid):
                            os.kill(pid, signal.SIGCONT if self.busy else signal.SIGSTOP)
                        self.begun, self.used = peers.clock(device), processor_seconds(watcher)
                    return super().micro_batches(step)

            with turns.run_folder(config) as run, mock.patch.object(row_objective, "Prefetcher", Turns):
                stage_a.train(config, run, shards, console=False)
            if not children(watcher.pid):
                raise NotMeasured("the evaluation ended before the measurement")
    ours, paused = (samples[busy][turns.WARMUP_BLOCKS :] for busy in (True, False))
    count = min(len(ours), len(paused))
    return Result(
        unit="steps/s",
        peer_name="paused watcher",
        ours=ours[:count],
        peer=paused[:count],
        figures={"watcher_processor_seconds": seconds[True], "watcher_processor_seconds_paused": seconds[False]},
        settings={
            "config": options.config.name,
            "blocks": options.blocks,
            "steps_per_block": BLOCK,
            "device": device.type,
            "precision": config.train.precision,
            "threads": config.run.threads,
            "processors": cores,
        },
    )


@contextmanager
def watching(run: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """`cdrmix eval watch` on the checkpoint of a run, from when it generates text."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "cdrmix.cli", "eval", "watch", str(run.path), "--suite", "code", *SUITE]
    with tempfile.TemporaryFile() as said:
        watcher = subprocess.Popen(command, env=environment, start_new_session=True, stdout=said, stderr=said)
        try:
            until = time.monotonic() + PATIENCE
            while processor_seconds(watcher) < IMPORTS:
                if watcher.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise NotMeasured(f"the watcher does not evaluate: {said.read().decode(errors='replace')[-300:]}")
                time.sleep(0.1)
            yield watcher
        finally:
            watcher.terminate()  # it kills the process that evaluates
            watcher.wait()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processor_seconds(watcher: subprocess.Popen[bytes]) -> float:
    """Processor time of the process that evaluates, user and system."""
    total = 0.0
    for pid in children(watcher.pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
