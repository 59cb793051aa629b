"""The effect of stage B's mechanisms: each on and off, at several numbers of chunks, on held-out episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfDocuments, EpisodesOfTask
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.reason.agent import agent
from cdrmix.reason.controller import acceptance
from cdrmix.reason.controller.controller import Controller, always, configured, never
from cdrmix.reason.episodes import FIRST_HELD_OUT, EpisodeSource
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations import policy as operations
from cdrmix.reason.operations.rollout import Reader
from cdrmix.reason.plasticity import phase as plasticity
from cdrmix.reason.sources import source_of


@torch.no_grad()
def evaluate_stage_b(
    model: StageBModel, config: Config, tokenizer: TextTokenizer | None, say: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """By mechanism and number of chunks: "on" and "off", the shares of right answers, and other measures.

    Measures every mechanism that a phase of the configuration trains. Decisions are greedy, so the results are
    reproducible.
    """
    reasoning = config.reasoning
    assert reasoning is not None
    phases, section = reasoning.phases, reasoning.evaluation
    numbers = range(FIRST_HELD_OUT, FIRST_HELD_OUT + section.episodes)
    carry = reasoning.carry

    def source(task: EpisodesOfTask) -> EpisodeSource:
        return source_of(task, reasoning.chunk, tokenizer)

    measure_of: dict[str, Callable[[int], dict[str, float]]] = {}
    lengths_of: dict[str, list[int]] = {}
    if phases.train_on("plasticity"):
        plasticity_source = source(reasoning.plasticity)

        def measure_plasticity(chunks: int) -> dict[str, float]:
            changes = {"off": plasticity.zeroed, "swapped": plasticity.swapped}
            asked = _limited(numbers, plasticity_source)
            measured = plasticity.accuracy(model.language_model, plasticity_source, carry, chunks, asked, changes)
            return {"on": measured.pop("accuracy"), **measured}

        measure_of["plasticity"] = measure_plasticity
        lengths_of["plasticity"] = _lengths(reasoning.plasticity, section.chunks)
    if phases.acceptance.steps and model.controller is not None:
        acceptance_source = source(reasoning.acceptance or reasoning.plasticity)
        controller, rule = Controller(model.language_model, reasoning), configured(reasoning, model.controller)

        def measure_acceptance(chunks: int) -> dict[str, float]:
            measured = acceptance.measure(controller, acceptance_source, rule, numbers, chunks)
            all_committed = acceptance.measure(controller, acceptance_source, always, numbers, chunks)["answered"]
            none_committed = acceptance.measure(controller, acceptance_source, never, numbers, chunks)["answered"]
            return {"on": measured.pop("answered"), "off": all_committed, "never": none_committed, **measured}

        measure_of["acceptance"] = measure_acceptance
    if phases.train_on("imitation", "policy"):
        agent_source = source(reasoning.agent)
        window, budget = agent.Window.of(reasoning, agent_source), reasoning.controller.step_budget

        def measure_agent(chunks: int) -> dict[str, float]:
            arguments = (model.language_model, window, agent_source, _limited(numbers, agent_source), chunks)
            on = agent.evaluate(*arguments, step_budget=budget)
            off = agent.evaluate(*arguments, step_budget=budget, last_only=True)
            held = {"capture": on.capture, "retention": on.retention}
            held = {name: share for name, share in held.items() if not math.isnan(share)}
            if agent_source.own_lengths:  # answers of any length, in any words: not compared token by token
                return {"on": on.f1, "off": off.f1, "exact": on.exact, "exact off": off.exact, **held}
            return {"on": on.matched, "off": off.matched, **held}

        measure_of["agent"] = measure_agent
        lengths_of["agent"] = _lengths(reasoning.agent, section.chunks)
    if phases.train_on("operations_imitation", "operations"):
        operations_source = source(reasoning.operations)
        without = reasoning.model_copy(update={"memory": reasoning.memory.model_copy(update={"episodic": False})})

        def measure_operations(chunks: int) -> dict[str, float]:
            on = operations.evaluate(model, Reader(reasoning, operations_source), numbers, chunks)
            off = operations.evaluate(model, Reader(without, operations_source), numbers, chunks)
            return {"on": on.pop("accuracy"), "off": off["accuracy"], **on}

        measure_of["operations"] = measure_operations
    model.eval()
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for name, measure in measure_of.items():
        lengths = lengths_of.get(name, section.chunks)
        most = "at most " if name in lengths_of and lengths is not section.chunks else ""
        say(f"Measuring {name}, on and off: {section.episodes} episodes of {most}{', '.join(map(str, lengths))} chunks")
        measured[name] = {str(chunks): measure(chunks) for chunks in lengths}
        say(table(name, measured[name]))
    return measured


def _limited(numbers: range, source: EpisodeSource) -> range:
    """Not more held-out episodes than a source has."""
    return numbers if source.held_out is None else numbers[: source.held_out]


def _lengths(section: EpisodesOfDocuments, chunks: list[int]) -> list[int]:
    """The numbers of chunks to measure at: documents of files have their own lengths, up to the configured one."""
    return chunks if section.data is None else [section.chunks]


def table(name: str, curve: Mapping[str, Mapping[str, Any]]) -> str:
    """A mechanism's measures as aligned lines, with a column for each number of chunks."""
    measures = list(next(iter(curve.values())))
    width = max(len(name), *map(len, measures)) + 2
    head = f"{name:<{width}}" + "".join(f"{chunks:>8}" for chunks in curve) + "  chunks"
    lines = [
        f"{measure:<{width}}" + "".join(f"{figures.get(measure, float('nan')):>8.3f}" for figures in curve.values())
        for measure in measures
    ]
    return "\n".join([head, *lines])
