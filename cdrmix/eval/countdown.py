"""Tells the progress of a long evaluation, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from cdrmix.units import clock

Item = TypeVar("Item")
Say = Callable[[str], None]

INTERVAL = 10.0  # seconds between two lines


def counted(
    items: Iterable[Item], total: float, what: str, say: Say, size: Callable[[Item], float] = lambda item: 1
) -> Iterator[Item]:
    """The items. Every INTERVAL seconds a line tells which share of `total` is done, and the time that is left.

    total: the sum of the sizes of all items.
    """
    started = told = time.monotonic()
    done = 0.0
    for item in items:
        yield item
        done += size(item)
        now = time.monotonic()
        if now - told >= INTERVAL and 0 < done < total:
            told = now
            say(f"  {what}: {done / total:.0%}, {clock((now - started) * (total / done - 1))} left")
