"""The mixers by name: the values allowed in the schedule and `model.mixer_layers`, and their classes."""

from __future__ import annotations

from collections.abc import Callable

from cdrmix.config.schema import Model
from cdrmix.model.mixers.attention import Attention
from cdrmix.model.mixers.base import Mixer
from cdrmix.model.mixers.mamba2 import Mamba2
from cdrmix.model.mixers.routing_mamba import RoutingMamba
from cdrmix.model.mixers.rwkv7 import TimeMix
from cdrmix.registry import Registry

MIXERS = Registry[Callable[[Model, int], Mixer]]("mixer")
MIXERS("attention")(Attention)
MIXERS("rwkv7")(TimeMix)
MIXERS("mamba2")(Mamba2)
MIXERS("routing_mamba")(RoutingMamba)
