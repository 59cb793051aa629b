"""The names that keys such as model.mixer_layers may have: of cdrmix itself, then those that plugins register."""

from __future__ import annotations

from collections.abc import Iterable

from cdrmix.registry import registered

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


def known(kind: str) -> list[str]:
    """The built-in names of a kind, then those of plugins."""
    built_in = BUILT_IN.get(kind, ())
    return [*built_in, *(name for name in registered(kind) if name not in built_in)]


def plugin_layers(mixers: Iterable[str], feed_forward: str) -> list[str]:
    """The mixers and the feed-forward that plugins register."""
    others = [name for name in mixers if name not in BUILT_IN["mixer"]]
    return others if feed_forward in BUILT_IN["feed-forward"] else [*others, feed_forward]
