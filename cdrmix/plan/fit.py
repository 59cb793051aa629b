"""Whether a configuration fits its machine, what would fit where it does not, and the refusal that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.plan.machine import Machine
from cdrmix.plan.memory import GPU_RUNTIME, MemoryPlan, memory_of
from cdrmix.plan.parameters import count_parameters
from cdrmix.training.engine import BUCKET
from cdrmix.training.zero import zero_stage

GB = 1e9
MAX_MEMORY_SHARE = 0.9  # of a device's memory: what fragments, and what others hold, is not known to the byte
MAX_PROCESSES = 1024  # that a remedy proposes
MIN_ROW_LENGTH = 256  # tokens, that a remedy proposes


@dataclass(frozen=True)
class Remedy:
    """Settings with which a configuration would fit, as words of the command line, and what it would take then."""

    settings: tuple[str, ...]
    processes: int
    bytes: int

    def __str__(self) -> str:
        words = [*self.settings, *([f"{self.processes} processes"] if self.processes > 1 else [])]
        return f"{' '.join(words)} ({self.bytes / GB:,.1f} GB each)"


@dataclass(frozen=True)
class Fit:
    """A memory plan held against a machine. fits: None where the machine's memory is unknown."""

    memory: MemoryPlan
    limit: int | None
    fits: bool | None
    remedies: tuple[Remedy, ...]


def _discard(_: str) -> None:
    """Ignores a message."""


def fit(
    config: Config, machine: Machine, processes: int, *, remedies: bool = True, say: Callable[[str], None] = _discard
) -> Fit:
    """Whether the configuration fits, and where not, what would: fewer rows, checkpointing, ZeRO on more processes.

    Where none of them suffices: narrower precision, then shorter rows.

    remedies: whether they are looked for, each by another trace. say: is told so first; it may take a minute.
    """
    memory = memory_of(config, machine.platform, processes)
    limit = None if machine.memory_bytes is None else int(MAX_MEMORY_SHARE * machine.memory_bytes)
    fits = None if limit is None else memory.total <= limit
    if limit is None or fits or not remedies:
        return Fit(memory, limit, fits, ())
    say("It does not fit; looking for settings with which it would ...")
    return Fit(memory, limit, fits, tuple(_Search(config, machine, processes, limit).remedies()))


def check_memory(config: Config, machine: Machine, processes: int, say: Callable[[str], None] = _discard) -> None:
    """Raises ConfigError, with what would fit, where the machine's memory is known and too small; before any is used.

    What obviously fits is not traced, which takes seconds.
    """
    if machine.memory_bytes is None or at_most(config, processes) <= MAX_MEMORY_SHARE * machine.memory_bytes:
        return
    found = fit(config, machine, processes, say=say)
    if found.fits is False:
        raise ConfigError(refusal(config, found, machine, processes))


def at_most(config: Config, processes: int) -> int:
    """Bytes that a process takes less than, by a count so coarse that it is some five times what a small model takes.

    Of activations it has, a token and block: 120 numbers a width of the model (twelve streams, their gradients and
    products are some 60), 12 a hidden one of the experts, 40 an inner one of Mamba-2, 8 a key of attention's heads.
    """
    model, train, ffn = config.model, config.train, config.model.feed_forward
    tokens = train.micro_batch_rows * config.data.row_length
    hidden = 12 * ffn.hidden * (ffn.top_k if ffn.kind == "moe" else 1)
    inner = 40 * model.mamba.expand * model.d_model if any(model.mixer_layers.values()) else 0
    attention = 8 * model.attention.heads * config.data.row_length if "attention" in model.mixers else 0
    widest = 120 * model.d_model + hidden + inner * (ffn.top_k if "routing_mamba" in model.mixers else 1) + attention
    activations = 4 * tokens * (model.layers * widest + 12 * model.d_model)
    logits = 16 * min(tokens, 8192) * model.vocab_size
    state = 32 * count_parameters(model).total_stored
    return activations + logits + state + 8 * min(BUCKET, state) + 4 * GPU_RUNTIME


def shortfall(config: Config, found: Fit, machine: Machine, processes: int) -> str:
    """Why the configuration does not fit, in one sentence."""
    assert found.limit is not None
    assert machine.memory_bytes is not None
    largest = sorted(found.memory.components, key=lambda part: -part.bytes)[:3]
    each = "each of the processes' shares" if machine.platform == "cpu" and processes > 1 else machine.name
    return (
        f"training {config.run.name} takes {found.memory.total / GB:,.1f} GB a process and {each} has "
        f"{machine.memory_bytes / GB:,.1f} GB, of which {MAX_MEMORY_SHARE:.0%}, {found.limit / GB:,.1f} GB, "
        f"may be planned with; most take {', '.join(f'{part.name} {part.bytes / GB:,.1f} GB' for part in largest)}."
    )


def refusal(config: Config, found: Fit, machine: Machine, processes: int) -> str:
    """Why the configuration does not fit, and what would, in a sentence each."""
    text = shortfall(config, found, machine, processes)
    if found.remedies:
        return f"{text} What would fit: {'; or '.join(str(remedy) for remedy in found.remedies)}."
    return f"{text} {nothing_fits()}"


def nothing_fits() -> str:
    """What to do where no remedy was found, in a sentence."""
    return (
        f"No number of rows, checkpointing, ZeRO stage, number of such devices up to {MAX_PROCESSES}, 16-bit "
        f"precision or rows of down to {MIN_ROW_LENGTH} tokens suffices; a larger device or a smaller model may."
    )


@dataclass(frozen=True)
class _Search:
    """Changes of a configuration, by their keys, tried on a machine whose devices may use `limit` bytes each."""

    config: Config
    machine: Machine
    processes: int
    limit: int

    def remedies(self) -> Iterator[Remedy]:
        """The mildest change of each kind that fits; where none does, narrower precision and shorter rows."""
        found = False
        for remedy in self._same_batch():
            found = True
            yield remedy
        if not found:
            yield from filter(None, [self._narrower_or_shorter()])

    def _tried(self, changes: dict[str, Any], count: int) -> Remedy | None:
        taken = memory_of(_changed(self.config, changes), self.machine.platform, count).total
        # On a CPU the processes share one memory.
        room = self.limit if self.machine.platform != "cpu" else self.limit * self.processes // count
        settings = tuple(f"{key}={str(value).lower()}" for key, value in changes.items())
        return Remedy(settings, count, taken) if taken <= room else None

    def _first(self, choices: Iterable[dict[str, Any]]) -> Remedy | None:
        return next((fitting for changes in choices if (fitting := self._tried(changes, self.processes))), None)

    def _checkpointing(self) -> dict[str, Any]:
        return {} if self.config.train.activation_checkpointing else {"train.activation_checkpointing": True}

    def _same_batch(self) -> Iterator[Remedy]:
        """The mildest of fewer rows, of checkpointing, then of both, that fits on as many processes; then on more."""
        rows = self.config.train.micro_batch_rows
        halves = [rows >> shift for shift in range(1, rows.bit_length()) if rows % (1 << shift) == 0]
        fewer = [{"train.micro_batch_rows": less} for less in halves]
        checkpointing = self._checkpointing()
        mild = [self._first(fewer), self._first([checkpointing] if checkpointing else [])]
        if not any(mild) and checkpointing:
            mild.append(self._first(checkpointing | changes for changes in fewer))
        yield from filter(None, mild)
        if self.machine.platform != "cpu" and (more := self._on_more()) is not None:
            yield more

    def _on_more(self) -> Remedy | None:
        """The fewest processes, a power of two times those of now, on which it fits: with nothing else changed, where
        that suffices; else with a higher ZeRO stage; else with checkpointing and single rows as well.

        Where a step has no rows for twice the processes, those of a micro-batch go down with their number.
        """
        train, processes = self.config.train, self.processes
        counts = [
            processes << shift for shift in range(MAX_PROCESSES.bit_length()) if processes << shift <= MAX_PROCESSES
        ]
        unchanged = [(count, int(zero_stage(train, count))) for count in counts[1:] if zero_stage(train, count) > 0]
        least = max(zero_stage(train, processes), 1)
        higher = [(count, stage) for count in counts if count > 1 for stage in range(least, 4)]
        too_few = train.batch_rows % (train.micro_batch_rows * 2 * processes) > 0
        single = self._checkpointing() | {"train.micro_batch_rows": 1}
        for changes, tried in (({}, unchanged), ({}, higher), (single, higher)):
            for count, stage in tried:
                rows = changes.get("train.micro_batch_rows", train.micro_batch_rows)
                if too_few:
                    rows = math.gcd(train.batch_rows // count, rows)
                if rows == 0 or train.batch_rows % (rows * count):
                    continue
                settings = changes | {"train.micro_batch_rows": rows, "train.zero_stage": stage}
                kept = {"train.micro_batch_rows": train.micro_batch_rows, "train.zero_stage": zero_stage(train, count)}
                settings = {key: value for key, value in settings.items() if kept.get(key) != value}
                if (settings or count > processes) and (remedy := self._tried(settings, count)) is not None:
                    return remedy
        return None

    def _narrower_or_shorter(self) -> Remedy | None:
        """bf16 instead of float32; where it does not suffice, also the longest rows that fit, halved some times.

        On as many processes, with checkpointing and single rows. Other results are to be expected of both.
        """
        narrower: dict[str, Any] = {"train.precision": "bf16"} if self.config.train.precision == "fp32" else {}
        if narrower and (remedy := self._tried(narrower, self.processes)) is not None:
            return remedy
        single = {} if self.config.train.micro_batch_rows == 1 else {"train.micro_batch_rows": 1}
        least = narrower | single | self._checkpointing()
        if narrower and (remedy := self._tried(least, self.processes)) is not None:
            return remedy
        length = self.config.data.row_length
        lengths = [length >> shift for shift in range(1, length.bit_length()) if length >> shift >= MIN_ROW_LENGTH]
        shorter = [least | {"data.row_length": less} for less in lengths]
        if not shorter or self._tried(shorter[-1], self.processes) is None:
            return None  # found out first: a trace of shorter rows takes less time
        return self._first(shorter)


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration with other values of some keys, such as train.micro_batch_rows."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=updated)
