"""The experiment of the accept head: trains a small model by phases B1 and B2, and compares decision rules."""

from __future__ import annotations

import torch

from cdrmix.config.schema import Config
from cdrmix.reason.controller.acceptance import measure
from cdrmix.reason.controller.controller import Controller, always, by_head, by_value, never
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.experiments.base import EXPERIMENTS, at_seed, small_model
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.heads import ControllerHeads
from cdrmix.reason.sources import source_of


@EXPERIMENTS("acceptance")
def acceptance(config: Config, seed: int, trial: Trial) -> dict[str, float]:
    """Trains a small model by phases B1 (its adapters) and B2 (its accept and value heads), and measures it.

    Returns for every number of chunks N of the ablation always@N, never@N, learned@N and by_value@N: the shares of
    right answers if every chunk, no chunk, or the chunks that the accept head or the value head selects are committed;
    and accept_good@N, accept_bad@N of the accept head.
    """
    config = at_seed(config, seed)
    reasoning, ablation = config.reasoning, config.ablation
    assert reasoning is not None
    assert ablation is not None
    model = small_model(config, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the heads start at zero, but making them takes random numbers
        model.controller = ControllerHeads(config.cdrmix_model.d_model, reasoning.controller.max_branches)
    poisoned = source_of(reasoning.acceptance or reasoning.plasticity, reasoning.chunk)
    for name in ("plasticity", "acceptance"):
        trial.train_phase(name, config, model, None)
    model.eval()
    controller, heads = Controller(model.language_model, reasoning), model.controller
    threshold = reasoning.controller.accept_threshold
    rules = {
        "always": always,
        "never": never,
        "learned": by_head(heads, threshold),
        "by_value": by_value(heads, threshold),
    }
    measured: dict[str, float] = {}
    for chunks in ablation.chunks:
        numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + ablation.episodes)
        for name, decide in rules.items():
            result = measure(controller, poisoned, decide, numbers, chunks)
            measured[f"{name}@{chunks}"] = result.pop("answered")
            if name == "learned":
                measured |= {f"{key}@{chunks}": value for key, value in result.items()}
    return measured
