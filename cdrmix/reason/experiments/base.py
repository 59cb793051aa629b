"""The registry of experiments; small models initialised from a seed, and the tokenizer of their text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfDocuments, EpisodesOfTask
from cdrmix.data.tasks import known_task, make_example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.filler import fillers_of
from cdrmix.reason.model import StageBModel
from cdrmix.registry import Registry
from cdrmix.runtime import device_type

TEXTS, CHARACTERS = 2000, 2000  # that a tokenizer is trained on: examples, and characters of each
END_OF_TEXT = "<|endoftext|>"

Experiment = Callable[[Config, int, Trial], dict[str, float]]

EXPERIMENTS: Registry[Experiment] = Registry("experiment")
"""Trains and measures one arm of an ablation at one seed: (config, seed, trial) -> measurements by name."""


def small_model(config: Config, seed: int) -> StageBModel:
    """A model of the configuration with its adapters, initialised from `seed`, on `run.device`.

    The global generator is unchanged. The numbers are drawn on the CPU, so they are the same on every device.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = StageBModel(LanguageModel(config.cdrmix_model, reasoning=config.reasoning))
    return model.to(device_type(config.run.device))


def at_seed(config: Config, seed: int) -> Config:
    """The configuration of one seed, which has episodes and draws of its own.

    Two sections with the same task and seed still have the same episodes as each other.
    """
    reasoning = config.reasoning
    assert reasoning is not None
    sections: dict[str, EpisodesOfTask] = {
        name: section.model_copy(update={"seed": section.seed + 1000 * seed})
        for name, section in (
            ("plasticity", reasoning.plasticity),
            ("acceptance", reasoning.acceptance),
            ("agent", reasoning.agent),
        )
        if section is not None
    }
    # The configured seed of the operations has no effect: the results that are kept have these episodes.
    sections["operations"] = reasoning.operations.model_copy(update={"seed": seed})
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": seed}),
            "reasoning": reasoning.model_copy(update=sections),
        }
    )


def tokenizer_of(config: Config, section: EpisodesOfTask) -> TextTokenizer | None:
    """A tokenizer trained on examples of the task among its filler, the same for all seeds; None for token ids."""
    if section.tokens:
        return None
    if not isinstance(section, EpisodesOfDocuments) or section.data is not None:
        raise ConfigError("ablation: the experiments are on generated tasks; leave out the section data")
    return _tokenizer_of(section.model_dump_json(exclude={"seed"}), config.cdrmix_model.vocab_size)


@lru_cache(maxsize=2)
def _tokenizer_of(json: str, vocab_size: int) -> TextTokenizer:
    section = EpisodesOfDocuments.model_validate_json(json)
    fillers, level = fillers_of(section.filler), known_task(section.task).standard.changed(section.difficulty)
    texts = (
        make_example(
            section.task, 0, number, level.at_length(CHARACTERS), filler=fillers.train if fillers else None
        ).text
        for number in range(TEXTS)
    )
    return TextTokenizer.train(texts, vocab_size=vocab_size, end_of_text=END_OF_TEXT)
