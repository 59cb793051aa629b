"""Signals, memory and disk turned into errors that say what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from cdrmix.errors import NonFiniteLossError, OutOfMemoryError
from cdrmix.training.faults import MAX_CONSECUTIVE_SKIPS, SAME_INTERRUPT, Skips, StopRequest, check_finite, memory_guard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
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
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
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
    with pytest.raises(OutOfMemoryError) as caught, memory_guard(make_config()):
        torch.empty(2**46, dtype=torch.float32)  # 256 TiB: the allocator refuses, nothing is touched
    for key in (
        "train.micro_batch_rows",
        "train.activation_checkpointing",
        "train.zero_stage",
        "train.expert_parallel",
    ):
        assert key in str(caught.value)
    assert caught.value.exit_code == 8
    with pytest.raises(RuntimeError, match="another"), memory_guard(make_config()):
        raise RuntimeError("another thing")


def test_a_loss_that_is_not_finite_names_step_and_batch() -> None:
    check_finite(1.0, 5)
    for loss in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteLossError, match=r"step 5 \(global batch 4 ") as caught:
            check_finite(loss, 5)
        assert caught.value.exit_code == 9
        assert "start a new run with a lower train.learning_rate" in str(caught.value)


def test_only_fp16_may_skip_and_not_for_ever() -> None:
    with pytest.raises(NonFiniteLossError, match=r"gradient norm of step 3.*start a new run"):
        Skips(may_skip=False).record(False, 3)
    skips = Skips(may_skip=True)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(False, step)
    skips.record(True, 99)
    assert (skips.total, skips.consecutive) == (MAX_CONSECUTIVE_SKIPS - 1, 0)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(False, step)
    with pytest.raises(NonFiniteLossError, match=r"in a row.*Start a new run with train\.precision=bf16"):
        skips.record(False, 100)
