"""Signals, memory and disk turned into errors that say what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from cdrmix.errors import NonFiniteLossError, OutOfMemoryError
from cdrmix.train.faults import MAX_CONSECUTIVE_SKIPS, Skips, StopRequest, check_finite, memory_guard


def test_a_signal_asks_to_stop_and_the_former_handler_returns() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import os, signal, time\n"
        "from cdrmix.train.faults import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 128 + signal.SIGTERM


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
    for key in ("train.micro_batch_rows", "train.activation_checkpointing", "train.zero_stage"):
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


def test_only_fp16_may_skip_and_not_for_ever() -> None:
    with pytest.raises(NonFiniteLossError, match="gradient norm of step 3"):
        Skips(may_skip=False).record(False, 3)
    skips = Skips(may_skip=True)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(False, step)
    skips.record(True, 99)
    assert (skips.total, skips.consecutive) == (MAX_CONSECUTIVE_SKIPS - 1, 0)
    for step in range(MAX_CONSECUTIVE_SKIPS - 1):
        skips.record(False, step)
    with pytest.raises(NonFiniteLossError, match="in a row"):
        skips.record(False, 100)
