"""Which mixer each layer of a model has, from the keys of the section `model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def layer_mixers(layers: int, fraction: float, schedule: str, chosen: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """The name of the mixer of each layer.

    fraction, schedule: model.attention_fraction and model.schedule. chosen: model.mixer_layers, a mixer to its layers.
    """
    attention = attention_layers(layers, fraction, schedule)
    kinds = ["attention" if layer in attention else "rwkv7" for layer in range(layers)]
    for kind, others in chosen.items():
        for layer in others:
            kinds[layer] = kind
    return tuple(kinds)


def attention_layers(layers: int, fraction: float, schedule: str) -> frozenset[int]:
    """Which layers, counted from 0, a schedule makes attention: floor(fraction * layers) of them.

    top-of-x: the last ones. interleave-x: layer i where floor((i + 1) * fraction) steps up; at fraction 1/4,
    where (i + 1) mod 4 = 0, so that the last of every four is attention.
    """
    steps = [int((i + 1) * fraction + 1e-9) for i in range(-1, layers)]
    if schedule == "top-of-x":
        return frozenset(range(layers - steps[-1], layers))
    return frozenset(i for i in range(layers) if steps[i + 1] > steps[i])
