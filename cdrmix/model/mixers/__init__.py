"""The mixers by name. Importing this package registers the built-in ones."""

from __future__ import annotations

from cdrmix.model.mixers import attention, mamba2, routing_mamba, rwkv7  # each registers its mixer
from cdrmix.model.mixers.base import MIXERS

__all__ = ["MIXERS", "attention", "mamba2", "routing_mamba", "rwkv7"]
