"""The memory of the phases of stage B on each device: of their rollouts, and of their update.

Both need the state that lasts, and are not at the same time. The sizes of the passes follow the phases in
`cdrmix/reason`; where the data decides, the largest are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfDocuments, EpisodesOfTask, Reasoning
from cdrmix.model.language_model import LanguageModel
from cdrmix.ops.backend import Platform
from cdrmix.plan.components import BYTES_16_BIT, FP32, Component, MemoryPlan, lasting_state, memory_plan
from cdrmix.plan.memory import buffers, largest_module
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.parameters import count_parameters, is_expert
from cdrmix.plan.stage_b_passes import Chunks, Decoding, Passes, Reading, Sequences, Text, Windows, trace_passes
from cdrmix.plan.trace import MicroBatch
from cdrmix.reason.agent.policy import objective_of
from cdrmix.reason.build import replayed, with_heads
from cdrmix.reason.episodes import EpisodeSource, Marks, TokenSource
from cdrmix.reason.operations.separate_passes import most_tokens
from cdrmix.reason.phase import PHASES, Phase
from cdrmix.reason.rl.rewards import LIKELIHOOD
from cdrmix.training.zero import zero_stage

TEXT_TOKENS = 64  # assumed for questions and answers of text whose widths only a tokenizer tells


class Work(NamedTuple):
    """Passes of a phase, the key whose value makes them smaller, that value, and what they are."""

    passes: Passes
    key: str
    value: int
    what: str


class PhaseMemory(NamedTuple):
    """The memory of a phase at its highest. moment: rollouts or update. work: the largest passes of that moment."""

    name: str
    moment: str
    work: Work | None
    memory: MemoryPlan


class _Sizes(NamedTuple):
    """Numbers of parameters. total: of the model and its heads. here: of this process before ZeRO. trained: those of
    `here` with gradients. all_trained: trained over all processes. outside: not in blocks."""

    total: int
    here: int
    trained: int
    all_trained: int
    outside: int


def phases_of(
    config: Config, platform: Platform, processes: int, names: Sequence[str] | None = None
) -> list[PhaseMemory]:
    """The memory of every phase that has steps, in their order; of those with these names. It takes seconds and
    allocates nothing."""
    if config.reasoning is None:
        return []
    used = [name for name, section in config.reasoning.phases if section.steps and (names is None or name in names)]
    return [_phase(config, name, platform, processes) for name in used]


def _phase(config: Config, name: str, platform: Platform, processes: int) -> PhaseMemory:
    reasoning = config.reasoning
    assert reasoning is not None
    own: Phase | None = None
    if name != "joint":
        own = PHASES[name](config, lambda section: widths_of(section, reasoning.chunk))
    trains: Callable[[str], bool] = (lambda parameter: True) if own is None else own.trains
    train, stage = config.train, zero_stage(config.train, processes)
    sizes = _sizes(config, trains)
    updates, rollouts = list(updates_of(config, name, processes)), list(rollouts_of(config, name, processes))
    # Micro-batches of a process in a step; of phases that replay others there are several.
    several = len(updates) > 1 or _micro_batches(reasoning, name, processes) > 1
    traced = {
        work: trace_passes(config, work.passes, trains, platform, stage=stage, several=several) for work in updates
    }
    rolled = {work: trace_passes(config, work.passes, None, platform, stage=stage, several=False) for work in rollouts}

    shared = -(-sizes.total // processes)
    divided = f", 1/{processes} (ZeRO 3)" if stage == 3 else ""
    weights = Component("weights", FP32 * (shared if stage == 3 else sizes.here), f"float32{divided}, with the heads")
    rows = train.model_copy(
        update={"ema_decay": None, "batch_rows": processes * (2 if several else 1), "micro_batch_rows": 1}
    )
    trained_share = -(-sizes.all_trained // processes)
    single = 0
    if sizes.trained * 2 > sizes.here:  # the whole language model, with the matrices of Muon
        orthogonalised = optimizer_size(config).orthogonalised
        single = -(-orthogonalised // processes) if stage > 0 else orthogonalised
    lasting, offloaded = lasting_state(
        rows,
        platform,
        stage,
        processes,
        weights=weights,
        here=sizes.trained,
        shared=trained_share,
        itemsize=FP32,
        single=single,
    )
    copies = max((step.copies for step in (*traced.values(), *rolled.values())), default=0)
    if copies:
        copies -= BYTES_16_BIT * (sizes.total - sizes.here)
        lasting.append(Component("copies", copies, f"of the weights in {train.precision}"))
    copied = stage == 3 and bool(rollouts) and reasoning.rollout_weights == "copied"
    if copied:
        lasting.append(Component("copy", FP32 * sizes.total, "of the whole model, for rollouts"))
    objective = objective_of(reasoning.rl)
    if objective.kl_weight and "policy" in (name, *replayed(reasoning, name)):
        lasting.append(Component("reference", FP32 * sizes.total, "the model that the divergence is from"))

    moments = {"update": [*lasting, *buffers(stage, config, sizes.here, processes)]}
    largest = {"update": _largest(traced)}
    step = traced[largest["update"]] if largest["update"] is not None else MicroBatch({}, 0, 0)
    if stage < 2 and not several:  # the trace has gradients of all experts, and the process of its own
        elsewhere = FP32 * (sizes.all_trained - sizes.trained)
        step = MicroBatch(step.saved, step.copies, max(step.total_saved, step.peak - elsewhere))
    moments["update"] += [
        Component("activations", step.total_saved, f"saved by the forward pass of {_what(largest['update'])}"),
        Component("working", max(0, step.peak - step.total_saved), "additional peak of the passes"),
    ]
    peaks = {"update": step}
    if rollouts:
        work = _largest(rolled)
        assert work is not None
        largest["rollouts"], peaks["rollouts"] = work, rolled[work]
        moments["rollouts"] = list(lasting)
        if stage == 3 and not copied:
            live = FP32 * (sizes.outside + largest_module(config))
            moments["rollouts"].append(Component("gathered", live, "tables, norms and heads, and the largest module"))
        if copied and train.precision != "fp32":
            casts = BYTES_16_BIT * (sizes.total - count_parameters(config.cdrmix_model).stored["experts"])
            moments["rollouts"].append(Component("casts", casts, "of the copy's weights outside of the experts"))
        moments["rollouts"].append(Component("rollouts", rolled[work].peak, f"states and passes of {work.what}"))
    host = offloaded + FP32 * max(sizes.total, sizes.here)
    plans = {moment: memory_plan(parts, peaks[moment], platform, processes, host) for moment, parts in moments.items()}
    moment = max(plans, key=lambda each: plans[each].total)
    return PhaseMemory(name, moment, largest[moment], plans[moment])


def _largest(traced: dict[Work, MicroBatch]) -> Work | None:
    return max(traced, key=lambda work: traced[work].peak, default=None)


def _what(work: Work | None) -> str:
    return "the heads alone" if work is None else work.what


def widths_of(section: EpisodesOfTask, chunk: int) -> EpisodeSource:
    """A source that has the widths of a section's episodes and, of text, no episodes. Widths of text that the
    configuration does not give are TEXT_TOKENS."""
    if section.tokens:
        return TokenSource(section.task, section.seed, chunk, section.difficulty)
    question = answer = own_lengths = None
    if isinstance(section, EpisodesOfDocuments):
        question, answer, own_lengths = section.question_tokens, section.answer_tokens, section.data is not None
    widths = SimpleNamespace(
        vocab_size=0,
        pad=0,
        marks=Marks(*range(1, 7)),
        chunk=chunk,
        question=question or TEXT_TOKENS,
        answer=answer or TEXT_TOKENS,
        least_chunks=1,
        own_lengths=bool(own_lengths),
    )
    return cast(EpisodeSource, widths)


def _sizes(config: Config, trains: Callable[[str], bool]) -> _Sizes:
    reasoning = config.reasoning
    assert reasoning is not None
    with torch.device("meta"):
        language_model = LanguageModel(config.cdrmix_model, reasoning=reasoning)
        model = with_heads(language_model, config.cdrmix_model, reasoning)
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    prefix, shares = "language_model.", config.train.expert_parallel
    here = {
        name: size // shares
        if name.startswith(prefix) and is_expert(language_model, name.removeprefix(prefix))
        else size
        for name, size in numbers.items()
    }
    trained = {name for name in numbers if trains(name)}
    return _Sizes(
        sum(numbers.values()),
        sum(here.values()),
        sum(here[name] for name in trained),
        sum(numbers[name] for name in trained),
        sum(size for name, size in here.items() if not name.startswith("language_model.blocks.")),
    )


def _share(episodes: int, processes: int) -> int:
    return -(-episodes // processes)


def _micro_batches(reasoning: Reasoning, name: str, processes: int) -> int:
    section = getattr(reasoning.phases, name)
    rows, micro_batch = _share(section.episodes, processes), section.micro_batch
    if name in ("imitation", "policy"):
        rows *= _turns(reasoning, name)
    elif name == "operations":
        micro_batch = max(1, micro_batch // reasoning.rl.group_size)  # questions
    return 1 if name == "acceptance" else -(-rows // micro_batch)


def _turns(reasoning: Reasoning, name: str) -> int:
    """The turns of an episode that write memories, over all its rollouts."""
    if name == "imitation":
        return reasoning.agent.chunks
    return (reasoning.phases.policy.chunks or reasoning.agent.chunks) * reasoning.rl.group_size


def _window(reasoning: Reasoning) -> tuple[int, int, int]:
    """Of the memory agent: tokens of [QUESTION | question], of the rest of a prompt, and the most that are written."""
    source = widths_of(reasoning.agent, reasoning.chunk)
    part = reasoning.memory.tokens // reasoning.memory.heads
    return source.question + 1, reasoning.memory.tokens + reasoning.chunk + 3, max(part, source.answer)


def updates_of(config: Config, name: str, processes: int) -> Iterator[Work]:
    """The passes with gradients of the phase itself and of what it replays."""
    reasoning = config.reasoning
    assert reasoning is not None
    for each in ([] if name == "joint" else [name]) + replayed(reasoning, name):
        if each == "text":
            rows = config.train.micro_batch_rows
            what = f"{rows} x {config.data.row_length} tokens of text"
            yield Work(Text(rows, config.data.row_length), "train.micro_batch_rows", rows, what)
            continue
        section = getattr(reasoning.phases, each)
        share, key = _share(section.episodes, processes), f"reasoning.phases.{each}.micro_batch"
        rows = min(section.micro_batch, share)
        if each == "plasticity":
            episodes = reasoning.plasticity
            source = widths_of(episodes, reasoning.chunk)
            probe = source.question + source.answer + 2
            passes: Passes = Chunks(
                rows, episodes.chunks, reasoning.chunk, probe, source.answer + 1, reasoning.carry == "fast"
            )
            what = f"{rows} episodes of {episodes.chunks * reasoning.chunk + probe} tokens"
            yield Work(passes, key, rows, what)
        elif each in ("imitation", "policy"):
            begin, rest, written = _window(reasoning)
            objective = objective_of(reasoning.rl) if each == "policy" else None
            rows = min(section.micro_batch, share * _turns(reasoning, each))
            passes = Sequences(rows, begin + rest, written, objective)
            yield Work(passes, key, rows, f"{rows} turns of {begin + rest + written} tokens")
        elif each == "operations_imitation" or (each == "operations" and section.train == "all"):
            separate = section.window_passes == "separate"
            if each == "operations_imitation":
                rows = min(section.micro_batch, share)
                windows = _demonstrated(reasoning, rows)
            else:
                size = reasoning.rl.group_size
                rows = size * min(max(1, section.micro_batch // size), share)
                windows = _rolled_out(reasoning, rows, separate=separate)
            if separate:
                yield from _separate(windows, key, section.micro_batch, most_tokens(reasoning, section))
                continue
            count, longest = sum(number for number, _ in windows.passes), max(length for _, length in windows.passes)
            yield Work(windows, key, rows, f"{count} windows of at most {longest} tokens")


def _demonstrated(reasoning: Reasoning, episodes: int) -> Windows:
    """All windows of so many episodes: their chunks, and the question with up to `max_spliced` chunks in front."""
    source, spliced = widths_of(reasoning.operations, reasoning.chunk), reasoning.memory.max_spliced
    spliced = min(spliced, reasoning.operations.chunks)
    asked = source.question + 2
    passes = [(episodes * reasoning.operations.chunks, reasoning.chunk + 1)]
    # Windows with 0, 1, ... spliced chunks as rows of their mean length: what is kept grows with the tokens alone.
    passes.append((episodes * (spliced + 1), -(-spliced * reasoning.chunk // 2) + asked))
    passes.append((episodes, spliced * reasoning.chunk + asked + source.answer - 1))
    imitation = reasoning.phases.operations_imitation
    summarises = imitation.summarised and imitation.summarised_batches
    return Windows(tuple(passes), _summaries(reasoning) if summarises else 0, source.answer)


def _rolled_out(reasoning: Reasoning, rollouts: int, *, separate: bool) -> Windows:
    """The windows of so many rollouts, if no two of them read the same window: of each chunk alone, and with 1, 2, ...
    `max_spliced` others in front. separate: the most windows of each shape, which no rollout has of all shapes."""
    chunks, chunk = reasoning.operations.chunks, reasoning.chunk
    spliced = min(reasoning.memory.max_spliced, chunks)
    passes = [(rollouts * (chunks + 1), chunk + 1)]
    for before in range(1, spliced + 1):
        windows = _with_spliced(reasoning, before if separate else spliced)
        if windows:
            passes.append((rollouts * windows, (before + 1) * chunk + 1))
    return Windows(tuple(passes), _rolled_summaries(reasoning), 0)


def _with_spliced(reasoning: Reasoning, spliced: int) -> int:
    """The most chunks of a rollout that can have so many others in front: the budget and the horizon allow no more."""
    chunks, costs = reasoning.operations.chunks, reasoning.rl.costs
    most = min(chunks + 1, math.ceil((reasoning.rl.horizon - chunks - 1) / (spliced + 1)))
    cost = costs.retrieve + spliced * costs.splice_window
    return most if cost == 0 else min(most, math.ceil(reasoning.controller.step_budget / cost))


def _summaries(reasoning: Reasoning) -> int:
    """The summaries of a chunk, which can stand in front of the next window."""
    return -(-reasoning.chunk // reasoning.memory.summary_stride)


def _rolled_summaries(reasoning: Reasoning) -> int:
    """The summaries in front of a window of a rollout, which may summarise if its budget allows that once."""
    return _summaries(reasoning) if reasoning.rl.costs.summarize <= reasoning.controller.step_budget else 0


def _separate(windows: Windows, key: str, micro_batch: int, most: int) -> Iterator[Work]:
    """The passes of windows one by one, each of at most so many tokens or one window."""
    last = len(windows.passes) - 1
    for number, (count, length) in enumerate(windows.passes):
        rows = min(count, max(1, most // (length + windows.summaries)))
        passes = Windows(((rows, length),), windows.summaries, windows.answer if number == last else 0)
        yield Work(passes, key, micro_batch, f"{rows} windows of {length} tokens")


def rollouts_of(config: Config, name: str, processes: int) -> Iterator[Work]:
    """The passes without gradients of the phase itself and of what it replays."""
    reasoning = config.reasoning
    assert reasoning is not None
    phases, size = reasoning.phases, reasoning.rl.group_size
    passes: Passes
    for each in ([] if name == "joint" else [name]) + replayed(reasoning, name):
        if each == "policy":
            begin, rest, _ = _window(reasoning)
            rows = size * _share(phases.policy.episodes, processes)
            if phases.policy.rollout_rows is not None:
                rows = min(rows, size * max(1, phases.policy.rollout_rows // size))
            key, what = "reasoning.phases.policy.rollout_rows", f"{rows} rows of {begin + rest} tokens"
            yield Work(Decoding(rows, begin, rest), key, rows, what)
            if reasoning.rl.reward == LIKELIHOOD or reasoning.rl.credit == "gain":
                asked, answer = begin + reasoning.memory.tokens + 2, widths_of(reasoning.agent, reasoning.chunk).answer
                what = f"{rows} rows of {asked + answer} tokens with the right answer"
                yield Work(Sequences(rows, asked, answer, None), key, rows, what)
        elif each == "operations_imitation" and phases.operations_imitation.window_passes == "separate":
            # What the update reads again was read before, without gradients.
            rows = min(phases.operations_imitation.micro_batch, _share(phases.operations_imitation.episodes, processes))
            windows = _demonstrated(reasoning, rows)
            yield from _separate(windows, f"reasoning.phases.{each}.micro_batch", rows, windows.all_tokens)
        elif each == "acceptance":
            episodes, controller = reasoning.acceptance or reasoning.plasticity, reasoning.controller
            source = widths_of(episodes, reasoning.chunk)
            # `_calibrate` reads all episodes in every process.
            rows = min(
                phases.acceptance.micro_batch, max(size, processes) * _share(phases.acceptance.episodes, processes)
            )
            scales = tuple(controller.write_strengths[: controller.max_branches])
            probe = source.question + source.answer + 2
            passes = Reading(
                rows, episodes.chunks, reasoning.chunk, probe, source.answer + 1, scales, reasoning.carry == "all"
            )
            what = f"{rows} rows of {reasoning.chunk} tokens with {len(scales)} branches"
            yield Work(passes, "reasoning.phases.acceptance.micro_batch", rows, what)
        elif each == "operations":
            micro = phases.operations.micro_batch
            rows = min(size * max(1, micro // size), size * _share(phases.operations.episodes, processes))
            longest = min(reasoning.memory.max_spliced, reasoning.operations.chunks) + 1
            passes = Windows(((rows, longest * reasoning.chunk + 1),), _rolled_summaries(reasoning), 0)
            what = f"{rows} windows of {longest * reasoning.chunk + 1} tokens"
            yield Work(passes, "reasoning.phases.operations.micro_batch", rows, what)
