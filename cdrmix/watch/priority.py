"""The priority of the process that evaluates: it leaves processors, disk and memory to the training."""

from __future__ import annotations

import ctypes
import os
import platform
import random
from contextlib import suppress
from pathlib import Path

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # number of the system call, which the C library does not have
WHO_PROCESS, CLASS_IDLE, CLASS_SHIFT = 1, 3, 13  # linux/ioprio.h
PR_SET_PDEATHSIG = 1


def lower_priority(niceness: int, threads: int) -> None:
    """Gives this process, and those that it will start, a low priority for processors, and the lowest for the disk.

    niceness: 19 gets 15/1039 of a processor that another process wants (sched(7)). threads: the processors that they
    may use, drawn among those of this process. If memory is exhausted, the system ends them before the training. What
    the system does not have, or does not allow, is left as it is.
    The process must lead a session: Linux shares processors among sessions first, and a process's own priority counts
    within its session only (sched(7), autogroup). Without it, a process of priority 19 took a third of the speed of a
    training in another session.
    """
    assert os.getsid(0) == os.getpid(), "else the priority of others in the session is lowered too"
    os.nice(max(0, niceness - os.nice(0)))
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, WHO_PROCESS, 0, CLASS_IDLE << CLASS_SHIFT)
    processors = sorted(os.sched_getaffinity(0))
    with suppress(OSError):
        os.sched_setaffinity(0, random.sample(processors, min(threads, len(processors))))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent(parent: int, signal_number: int) -> None:
    """Makes the system send this process a signal when the process `parent`, which started it, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal_number)
