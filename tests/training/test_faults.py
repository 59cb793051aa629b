"""Signals, memory and disk turned into errors that say what to do."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Skip
from cdrmix.errors import NonFiniteLossError, OutOfMemoryError
from cdrmix.training.checkpoint import Progress
from cdrmix.training.faults import (
    MAX_CONSECUTIVE_SKIPS,
    MAX_CONSECUTIVE_SPIKES,
    NORM,
    RECENT,
    ROBUST,
    SAME_INTERRUPT,
    Skips,
    StopRequest,
    memory_guard,
)
from cdrmix.training.trainer import Trainer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_to_stop_and_the_former_handler_returns(number: signal.Signals) -> None:
    def handler(*_: object) -> None:
        raise AssertionError

    former = signal.signal(number, handler)  # the whole test run may ignore it: SIGHUP under nohup
    try:
        with StopRequest() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
            assert stop.requested
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, former)


def test_an_ignored_hangup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, former)


def test_termination_from_several_sides_still_leaves_time_to_save() -> None:
    # Where this fails, the process of the tests is gone.
    with StopRequest() as stop:
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGUSR1,
            signal.SIGHUP,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGTERM,
        ):
            os.kill(os.getpid(), number)
        time.sleep(SAME_INTERRUPT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_a_second_interrupt_ends_the_process_at_once_but_one_that_arrives_twice_does_not() -> None:
    program = (
        "import os, signal, time\n"
        "from cdrmix.training.faults import SAME_INTERRUPT, StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('alive', flush=True)\n"
        "    time.sleep(SAME_INTERRUPT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False, stdout=subprocess.PIPE, text=True)
    assert (done.stdout, done.returncode) == ("alive\n", 128 + signal.SIGINT)


def test_outside_the_main_thread_it_never_asks_to_stop() -> None:
    seen: list[bool] = []

    def body() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]


def test_out_of_memory_names_the_keys_that_shrink_the_step(make_config) -> None:
    with pytest.raises(OutOfMemoryError) as caught, memory_guard(make_config(), in_rows=True):
        torch.empty(2**46, dtype=torch.float32)  # 256 TiB: the allocator refuses, nothing is touched
    for key in (
        "train.micro_batch_rows",
        "train.activation_checkpointing",
        "train.zero_stage",
        "train.expert_parallel",
    ):
        assert key in str(caught.value)
    fewer = "this run continues with train.micro_batch_rows=4 train.micro_batch_parts=2, which --max-restarts sets"
    assert fewer in str(caught.value)
    assert caught.value.exit_code == 8
    with (
        pytest.raises(OutOfMemoryError) as outside,
        memory_guard(make_config(), in_rows=False),
        memory_guard(make_config("train.micro_batch_rows=1"), in_rows=True),
    ):
        torch.empty(2**46, dtype=torch.float32)
    assert "this run continues with" not in str(outside.value)
    assert str(outside.value).count("does not fit in memory") == 1
    with pytest.raises(RuntimeError, match="another"), memory_guard(make_config(), in_rows=True):
        raise RuntimeError("another thing")


def test_a_loss_that_is_not_finite_names_step_and_batch() -> None:
    for loss in (float("nan"), float("inf")):
        skips = Skips(Skip(), fp16=False)
        reason = skips.reason(loss)
        assert reason == f"the loss is {loss}"
        with pytest.raises(NonFiniteLossError, match=r"at step 5 \(global batch 4 ") as caught:
            skips.record(5, loss, reason)
        assert caught.value.exit_code == 9
        assert "train.skip.nonfinite=3 it skips" in str(caught.value)


def test_fp16_may_overflow_but_not_for_ever() -> None:
    with pytest.raises(NonFiniteLossError, match=r"gradient norm is not finite at step 3.*start a new run"):
        Skips(Skip(), fp16=False).record(3, 1.0, NORM)
    skips = Skips(Skip(), fp16=True)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(step, 1.0, NORM)
    skips.record(99, 1.0, None)
    assert (skips.total, skips.consecutive.total()) == (MAX_CONSECUTIVE_SKIPS - 1, 0)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(step, 1.0, NORM)
    with pytest.raises(NonFiniteLossError, match=r"in a row.*Start a new run with train\.precision=bf16"):
        skips.record(100, 1.0, NORM)
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 7"):
        Skips(Skip(), fp16=True).record(7, math.nan, "the loss is nan")


def test_as_many_in_a_row_are_skipped_as_the_configuration_says() -> None:
    skips = Skips(Skip(nonfinite=2), fp16=False)
    for step in range(10):
        reason = None if step % 3 == 2 else ("the loss is nan", NORM)[step % 3]
        skips.record(step, math.nan if step % 3 == 0 else 1.0, reason)
    skips.record(10, 1.0, NORM)
    with pytest.raises(NonFiniteLossError, match="at step 11"):
        skips.record(11, 1.0, NORM)


def test_a_spike_is_judged_by_median_and_deviation_of_accepted_losses() -> None:
    skips = Skips(Skip(spike=6.0), fp16=False)
    losses = [3.0 + 0.01 * (number % 5 - 2) for number in range(RECENT // 2)]
    for step, loss in enumerate(losses):
        assert skips.reason(1e9) is None, "too few losses to judge by"
        skips.record(step, loss, None)
    limit = 3.0 + 6.0 * ROBUST * 0.01  # the median of |loss - 3| is 0.01
    assert skips.reason(limit - 1e-9) is None
    assert skips.reason(-1e9) is None, "a low loss is none"
    reason = skips.reason(limit + 1e-9)
    assert reason is not None
    assert "is a spike: usual are 3 +- 0.015" in reason
    again = Skips(Skip(spike=6.0), fp16=False, recent=tuple(skips.recent))
    assert again.reason(limit + 1e-9) == reason, "a resumed run decides alike"
    for step in range(MAX_CONSECUTIVE_SPIKES):
        reason = skips.reason(9.0)
        assert reason is not None
        skips.record(step, 9.0, reason)
    with pytest.raises(NonFiniteLossError):  # the spikes before are no faults of this kind
        skips.record(99, math.nan, skips.reason(math.nan))
    for step in range(3 * RECENT):  # the loss has a new level, which is the usual one from here on
        loss = 9.0 + 0.01 * (step % 5 - 2)
        reason = skips.reason(loss)
        assert reason is None
        skips.record(step, loss, reason)
    assert skips.reason(9.1) is not None
    assert skips.total == MAX_CONSECUTIVE_SPIKES + 1


def test_equal_losses_make_no_spike_of_the_last_digit() -> None:
    skips = Skips(Skip(spike=6.0), fp16=False, recent=(2.0,) * RECENT)
    assert skips.reason(2.0 + 1e-12) is None


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_at_any_zero_stage(work: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Neither a weight nor a moment, if one process alone has a NaN, or the loss is finite."""
    finished = work("skips", tmp_path / "runs", "train.micro_batch_rows=2", processes=2, script="fault_worker.py")
    assert [process.returncode for process in finished] == [0, 0], "\n".join(each.stdout for each in finished)
    changed = json.loads((tmp_path / "runs" / "changed.json").read_text())
    for name, steps in changed.items():
        files = {"0": 2, "3": 4}.get(name[0], 3)  # at stage 3 each process has a file of weights too
        assert [len(each) for each in steps] == [files, 0, 0, files], (name, steps)
        (nan, spike) = map(json.loads, (tmp_path / "runs" / name / "faults.jsonl").read_text().splitlines())
        assert (nan["step"], nan["message"]) == (3, "the loss is nan")
        assert (spike["step"], spike["message"]) == (4, "it is the fourth")
        assert "step 3 was skipped: the loss is nan" in (tmp_path / "runs" / name / "train.log").read_text()


def test_a_phase_does_not_judge_by_the_losses_before_it(make_config: Callable[..., Config]) -> None:
    settings = make_config("train.skip.spike=6").train
    progress = Progress(step=9, skipped_steps=3, consecutive_skips={"spike": 3}, recent_losses=(2.0, 3.0))
    for first_step, recent in ((0, [2.0, 3.0]), (9, [])):
        trainer = Trainer(settings, None, None, None, progress=progress, first_step=first_step)  # type: ignore[arg-type]
        assert list(trainer._skips.recent) == recent
        assert trainer._skips.consecutive.total() == (0 if first_step else 3)
        assert trainer._skips.total == 3, "of the whole run"
