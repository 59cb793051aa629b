"""A rule about a combination of keys, what it answers, and the rule about registered names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from cdrmix.config.nodes import Path
from cdrmix.registry import nearest, registered

BUILT_IN = {  # kind of registry -> the names that cdrmix itself registers
    "mixer": ("attention", "rwkv7", "mamba2", "routing_mamba"),
    "feed-forward": ("moe", "dense", "channel_mix"),
    "optimizer": ("adamw", "muon"),
    "suite": (
        "choices",
        "code",
        "domains",
        "infilling",
        "latency",
        "leak",
        "long",
        "reasoning",
        "routing",
        "tools",
    ),
}


class Violation(NamedTuple):
    """What a rule allows for a value.

    path: of the value, relative to the first key of the rule. allowed: text. nearest: the most similar valid name.
    found: text; None: the value itself.
    """

    path: Path
    allowed: str
    nearest: str | None = None
    found: str | None = None


class Rule(NamedTuple):
    """`check` takes the values of `keys`. It returns what is allowed for the first key, or None without a conflict."""

    keys: tuple[str, ...]
    check: Callable[..., str | Violation | None]


def known(kind: str) -> list[str]:
    """The built-in names of a kind, then those of plugins."""
    built_in = BUILT_IN.get(kind, ())
    return [*built_in, *(name for name in registered(kind) if name not in built_in)]


def plugin_layers(mixers: Iterable[str], feed_forward: str) -> list[str]:
    """The mixers and the feed-forward that plugins register."""
    others = [name for name in mixers if name not in BUILT_IN["mixer"]]
    return others if feed_forward in BUILT_IN["feed-forward"] else [*others, feed_forward]


def registered_name(kind: str, name: str) -> Violation | None:
    """The rule that a key has a name of this kind."""
    names = known(kind)
    return None if name in names else Violation((), f"one of {', '.join(names)}", nearest(name, names))
