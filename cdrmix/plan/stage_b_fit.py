"""Whether the phases of stage B fit their machine, which changes would fit, and the error message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.plan.components import GPU_RUNTIME
from cdrmix.plan.fit import GB, MAX_MEMORY_SHARE, MAX_PROCESSES, Remedy
from cdrmix.plan.machine import Machine, machine_for
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.stage_b import PhaseMemory, phases_of, rollouts_of, updates_of
from cdrmix.training.engine import BUCKET

MAX_HALVINGS = 12  # of a remedy


class PhaseFit(NamedTuple):
    """A phase's memory and the limit of a machine. fits: None if the memory of the machine is unknown. remedies: for
    this phase alone."""

    phase: PhaseMemory
    limit: int | None
    fits: bool | None
    remedies: tuple[Remedy, ...]


def fit_phases(
    config: Config, machine: Machine, processes: int, say: Callable[[str], None] = lambda text: None
) -> list[PhaseFit]:
    """Whether each phase fits, and for those that do not, what would fit: fewer rows at once, more processes."""
    limit = None if machine.memory_bytes is None else int(MAX_MEMORY_SHARE * machine.memory_bytes)
    found = []
    for phase in phases_of(config, machine.platform, processes):
        fits = None if limit is None else phase.memory.total <= limit
        remedies: tuple[Remedy, ...] = ()
        if limit is not None and not fits:
            say(f"Phase {phase.name} does not fit; searching for settings that fit ...")
            remedies = tuple(_remedies(config, phase, machine, processes, limit))
        found.append(PhaseFit(phase, limit, fits, remedies))
    return found


def check_phases(config: Config, processes: int, say: Callable[[str], None], machine: Machine | None = None) -> None:
    """Raises ConfigError with remedies for the first phase that does not fit. It allocates nothing. machine: None is
    this machine."""
    machine = machine_for(config, None, processes) if machine is None else machine
    if config.reasoning is None or machine.memory_bytes is None:
        return
    if at_most(config, processes) <= MAX_MEMORY_SHARE * machine.memory_bytes:
        return
    for each in fit_phases(config, machine, processes, say):
        if each.fits is False:
            raise ConfigError(refusal(config, each, machine))


def at_most(config: Config, processes: int) -> int:
    """A coarse upper bound of the bytes of a process, with the numbers for each token of `fit.at_most`."""
    reasoning, model = config.reasoning, config.cdrmix_model
    assert reasoning is not None
    used = [name for name, section in reasoning.phases if section.steps]
    works = [
        work for name in used for work in (*updates_of(config, name, processes), *rollouts_of(config, name, processes))
    ]
    tokens = max((work.passes.all_tokens for work in works), default=0)
    longest = max((work.passes.longest for work in works), default=0)
    ffn = model.feed_forward
    hidden = 12 * (
        max(ffn.hidden * (ffn.top_k if ffn.kind == "moe" else 1), ffn.dense_width) + (ffn.shared_hidden or 0)
    )
    inner = 40 * model.mamba.expand * model.d_model * ffn.top_k if any(model.mixer_layers.values()) else 0
    widest = 120 * model.d_model + hidden + inner + 8 * model.attention.heads * longest
    activations = 4 * tokens * (model.layers * widest + 12 * model.d_model)
    state = (
        40 * count_parameters(model, reasoning).total_stored
    )  # twice weights, gradients, moments; a copy; a reference
    return activations + 40 * tokens * model.vocab_size + state + 8 * min(BUCKET, state) + 4 * GPU_RUNTIME


def refusal(config: Config, fit: PhaseFit, machine: Machine) -> str:
    """Why a phase does not fit, and the remedies."""
    assert fit.limit is not None
    largest = sorted(fit.phase.memory.components, key=lambda part: -part.bytes)[:3]
    text = (
        f"phase {fit.phase.name} of {config.run.name} takes {fit.phase.memory.total / GB:,.1f} GB a process in its "
        f"{fit.phase.moment}, and of {machine.name} {fit.limit / GB:,.1f} GB may be planned with; most take "
        f"{', '.join(f'{part.name} {part.bytes / GB:,.1f} GB' for part in largest)}."
    )
    if fit.remedies:
        return f"{text} What would fit: {'; or '.join(str(remedy) for remedy in fit.remedies)}."
    return f"{text} Neither fewer rows nor more processes are sufficient; use a larger device or a smaller model."


def _remedies(config: Config, phase: PhaseMemory, machine: Machine, processes: int, limit: int) -> Iterator[Remedy]:
    """Fewer rows in the passes of the phase that are largest, one after another; then more processes."""
    changes: dict[str, Any] = {}
    tried: PhaseMemory | None = phase
    assert config.reasoning is not None
    if config.reasoning.rollout_weights == "copied":
        changes["reasoning.rollout_weights"] = "sharded"
        tried = _again(config, changes, phase.name, machine, processes)
    if not config.train.activation_checkpointing and phase.moment == "update":
        changes["train.activation_checkpointing"] = True
        tried = _again(config, changes, phase.name, machine, processes)
    for _ in range(MAX_HALVINGS):
        if tried is None or tried.memory.total <= limit or tried.work is None or tried.work.value < 2:
            break
        changes[tried.work.key] = tried.work.value // 2
        before, tried = tried, _again(config, changes, phase.name, machine, processes)
        if tried is not None and tried.work == before.work:
            break  # the smallest number of rows that the phase can have
    if tried is not None and tried.memory.total <= limit:
        yield Remedy(tuple(f"{key}={_shown(value)}" for key, value in changes.items()), processes, tried.memory.total)
    if machine.platform == "cpu":
        return
    more = processes * 2
    while more <= MAX_PROCESSES:
        tried = _again(config, {}, phase.name, machine, more)
        if tried is not None and tried.memory.total <= limit:
            yield Remedy((), more, tried.memory.total)
            return
        more *= 2


def _again(config: Config, changes: dict[str, Any], name: str, machine: Machine, processes: int) -> PhaseMemory | None:
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return next((each for each in phases_of(config, machine.platform, processes, [name])), None)


def _changed(section: Any, path: list[str], value: Any) -> Any:
    """A section with another value of a key in it."""
    name, *rest = path
    return section.model_copy(update={name: _changed(getattr(section, name), rest, value) if rest else value})


def _shown(value: Any) -> str:
    return str(value).lower()
