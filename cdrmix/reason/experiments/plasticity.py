"""The experiment of fast weights: trains a small model by phase B1 alone, and measures it at several chunk counts."""

from __future__ import annotations

from cdrmix.config.schema import Config
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.experiments.base import EXPERIMENTS, at_seed, small_model, tokenizer_of
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.plasticity.phase import accuracy, swapped, zeroed
from cdrmix.reason.sources import source_of


@EXPERIMENTS("plasticity")
def plasticity(config: Config, seed: int, trial: Trial) -> dict[str, float]:
    """Trains a small model by phase B1 and measures it at every number of chunks of the ablation.

    Returns accuracy@N, of text also exact@N, and harder@N for episodes of the ablation's difficulty; with adapters also
    zeroed@N and swapped@N: the accuracy with fast weights of zeros, and with those of another episode.
    """
    config = at_seed(config, seed)
    reasoning, ablation = config.reasoning, config.ablation
    assert reasoning is not None
    assert ablation is not None
    tokenizer = tokenizer_of(config, reasoning.plasticity)
    section = reasoning.plasticity
    source = source_of(section, reasoning.chunk, tokenizer)
    model = small_model(config, seed)
    trial.train_phase("plasticity", config, model, tokenizer)
    language_model = model.language_model
    changes = {"zeroed": zeroed, "swapped": swapped} if language_model.adapters else {}
    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + ablation.episodes)
    measured: dict[str, float] = {}
    for chunks in ablation.chunks:
        result = accuracy(language_model, source, reasoning.carry, chunks, numbers, changes)
        measured |= {f"{name}@{chunks}": value for name, value in result.items()}
    harder = section.model_copy(update={"difficulty": {**section.difficulty, **ablation.difficulty}})
    for chunks in ablation.harder_chunks:
        asked = source_of(harder, reasoning.chunk, tokenizer)
        result = accuracy(language_model, asked, reasoning.carry, chunks, numbers)
        measured[f"harder@{chunks}"] = result["accuracy"]
    return measured
