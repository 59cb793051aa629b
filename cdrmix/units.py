"""Counts, sizes, durations and times as a person reads them."""

from __future__ import annotations

import datetime


def amount(value: float) -> str:
    """A count for people: 950, 10.7k, 1.25M, 3.2B."""
    rounded = float(f"{value:.3g}")  # first, because 999,700 is 1M, not 1000k
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= limit:
            return f"{rounded / limit:g}{unit}"
    return f"{rounded:g}"


def amount_of_bytes(size: int) -> str:
    """A size for people: 2.90 GB, 12.40 MB, 17 B."""
    for unit, limit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= limit:
            return f"{size / limit:,.2f} {unit}"
    return f"{size} B"


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def utc_text(time: datetime.datetime) -> str:
    """A time with a zone as files and messages have it: 2026-03-01T12:00:00Z."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_now() -> str:
    """The present time in that form."""
    return utc_text(datetime.datetime.now(datetime.UTC))
