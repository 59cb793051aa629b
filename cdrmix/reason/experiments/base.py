"""The registry of experiments, and small models initialised from a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.model import StageBModel
from cdrmix.registry import Registry

Say = Callable[[str], None]
Experiment = Callable[[Config, int, Say], dict[str, float]]

EXPERIMENTS: Registry[Experiment] = Registry("experiment")
"""Trains and measures one arm of an ablation at one seed: (config, seed, say) -> measurements by name."""


def small_model(config: Config, seed: int) -> StageBModel:
    """A model of the configuration with its adapters, initialised from `seed`. The global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StageBModel(LanguageModel(config.cdrmix_model, reasoning=config.reasoning))
