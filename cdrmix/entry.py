"""The programs `cdrmix` and `cdrmix-train`: they import the command line where an interrupt has its message already."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from cdrmix.errors import INTERRUPTED


def main() -> int:
    """`cdrmix`: runs a command and returns its exit code."""
    return _run(sys.argv[1:])


def train_main() -> int:
    """`cdrmix-train ...` is `cdrmix train ...`."""
    return _run(["train", *sys.argv[1:]])


def _run(arguments: list[str]) -> int:
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # and not ignored, as under nohup
        # The imports take half a second. Some compiled packages make a panic of a KeyboardInterrupt.
        signal.signal(signal.SIGINT, _end)
    from cdrmix.cli import main

    signal.signal(signal.SIGINT, former)
    try:
        return main(arguments)
    except KeyboardInterrupt:
        print("cdrmix: interrupted", file=sys.stderr)
        return INTERRUPTED


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"cdrmix: interrupted\n")
    os._exit(INTERRUPTED)
