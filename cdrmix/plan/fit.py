"""Whether a configuration fits its machine, which changes would fit, and the error message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cdrmix.config.conflicts import conflicts
from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import Lora
from cdrmix.config.schema_model import Model
from cdrmix.errors import ConfigError
from cdrmix.plan.components import GPU_RUNTIME, MemoryPlan
from cdrmix.plan.foreign import ForeignModelSize, foreign_size
from cdrmix.plan.machine import Machine
from cdrmix.plan.memory import memory_of
from cdrmix.plan.parameters import count_parameters
from cdrmix.training.engine import BUCKET
from cdrmix.training.launch import check_processes
from cdrmix.training.zero import zero_stage

GB = 1e9
MAX_MEMORY_SHARE = 0.9  # of the memory of a device; fragmentation and other processes are not known exactly
MAX_PROCESSES = 1024  # of a remedy
MIN_ROW_LENGTH = 256  # tokens, of a remedy
DIVIDED = (2, 4, 8)  # train.tensor_parallel of a remedy: the GPUs of one machine


@dataclass(frozen=True)
class Remedy:
    """Settings with which a configuration would fit, as command-line arguments, and the memory it would need."""

    settings: tuple[str, ...]
    processes: int
    bytes: int

    def __str__(self) -> str:
        settings = [*self.settings, *([f"{self.processes} processes"] if self.processes > 1 else [])]
        return f"{' '.join(settings)} ({self.bytes / GB:,.1f} GB each)"


@dataclass(frozen=True)
class Fit:
    """A memory plan and the limit of a machine. fits: None if the memory of the machine is unknown."""

    memory: MemoryPlan
    limit: int | None
    fits: bool | None
    remedies: tuple[Remedy, ...]


def _discard(_: str) -> None:
    """Ignores a message."""


def fit(
    config: Config, machine: Machine, processes: int, *, remedies: bool = True, say: Callable[[str], None] = _discard
) -> Fit:
    """Whether the configuration fits. If not, it searches for remedies: fewer rows, checkpointing, layers divided among
    the GPUs of a machine, ZeRO on more processes.

    If none of them is sufficient, it tries narrower precision, then shorter rows.

    remedies: whether to search for them, with one trace each. say: receives a message before the search, which may take
    a minute.
    """
    memory = memory_of(config, machine.platform, processes)
    limit = None if machine.memory_bytes is None else int(MAX_MEMORY_SHARE * machine.memory_bytes)
    fits = None if limit is None else memory.total <= limit
    if limit is None or fits or not remedies:
        return Fit(memory, limit, fits, ())
    say("It does not fit; searching for settings that fit ...")
    return Fit(memory, limit, fits, tuple(_Search(config, machine, processes, limit).remedies()))


def check_memory(config: Config, machine: Machine, processes: int, say: Callable[[str], None] = _discard) -> None:
    """Raises ConfigError with remedies if the memory of the machine is known and too small. It allocates nothing.

    A configuration that obviously fits is not traced, because a trace takes seconds.
    """
    if machine.memory_bytes is None or at_most(config, processes) <= MAX_MEMORY_SHARE * machine.memory_bytes:
        return
    result = fit(config, machine, processes, say=say)
    if result.fits is False:
        raise ConfigError(refusal(config, result, machine, processes))


def at_most(config: Config, processes: int) -> int:
    """A coarse upper bound of the bytes of a process, about five times the memory of a small model.

    Activations per token and block: 120 numbers per unit of the model width (twelve streams, their gradients and
    products are about 60), 12 per hidden unit of the experts, 40 per inner channel of Mamba-2, 8 per key of the
    attention heads.
    """
    train = config.train
    tokens = train.micro_batch_rows * config.data.row_length // train.sequence_parallel
    if not isinstance(config.model, Model):
        return _at_most_of_transformers(tokens, config.data.row_length, foreign_size(config))
    model, ffn = config.model, config.model.feed_forward
    hidden = 12 * (ffn.hidden * (ffn.top_k if ffn.kind == "moe" else 1) + (ffn.shared_hidden or 0))
    hidden = max(hidden, 12 * ffn.dense_width) if ffn.dense_layers else hidden
    inner = 40 * model.mamba.expand * model.d_model if any(model.mixer_layers.values()) else 0
    attention = 8 * model.attention.heads * config.data.row_length if "attention" in model.mixers else 0
    widest = 120 * model.d_model + hidden + inner * (ffn.top_k if "routing_mamba" in model.mixers else 1) + attention
    activations = 4 * tokens * (model.layers * widest + 12 * model.d_model)
    logits = 16 * min(tokens, 8192) * model.vocab_size
    state = 32 * count_parameters(model).total_stored
    return activations + logits + state + 8 * min(BUCKET, state) + 4 * GPU_RUNTIME


def _at_most_of_transformers(tokens: int, row_length: int, size: ForeignModelSize) -> int:
    """As at_most, with 12 numbers per token for each input and output of a matrix and 8 for each score of attention."""
    scores = 8 * row_length * size.heads * size.layers
    activations = 4 * tokens * (120 * size.layers * size.width + 12 * size.features + scores)
    logits = 16 * tokens * size.vocabulary
    return activations + logits + 32 * size.total_stored + 8 * BUCKET + 4 * GPU_RUNTIME


def shortfall(config: Config, result: Fit, machine: Machine, processes: int) -> str:
    """Why the configuration does not fit."""
    assert result.limit is not None
    assert machine.memory_bytes is not None
    largest = sorted(result.memory.components, key=lambda part: -part.bytes)[:3]
    each = "each of the processes' shares" if machine.platform == "cpu" and processes > 1 else machine.name
    text = (
        f"training {config.run.name} takes {result.memory.total / GB:,.1f} GB a process and {each} has "
        f"{machine.memory_bytes / GB:,.1f} GB, of which {MAX_MEMORY_SHARE:.0%}, {result.limit / GB:,.1f} GB, "
        f"may be planned with; most take {', '.join(f'{part.name} {part.bytes / GB:,.1f} GB' for part in largest)}."
    )
    return f"{text} {estimate_note(result.memory)}" if result.memory.untraced else text


def estimate_note(memory: MemoryPlan) -> str:
    """That the activations are estimated, and why."""
    return (
        "The activations are estimated by a formula, because an operator of the model cannot be traced: "
        f"{memory.untraced.rstrip('.')}."
    )


def refusal(config: Config, result: Fit, machine: Machine, processes: int) -> str:
    """Why the configuration does not fit, and the remedies."""
    text = shortfall(config, result, machine, processes)
    if result.remedies:
        return f"{text} What would fit: {'; or '.join(str(remedy) for remedy in result.remedies)}."
    return f"{text} {nothing_fits()}"


def nothing_fits() -> str:
    """The advice if no remedy was found, in one sentence."""
    return (
        f"No number of rows, checkpointing, ZeRO stage, number of such devices up to {MAX_PROCESSES}, 16-bit "
        f"precision or rows of down to {MIN_ROW_LENGTH} tokens is sufficient; use a larger device or a smaller model."
    )


@dataclass(frozen=True)
class _Search:
    """The search for changes of keys with which a configuration fits devices of `limit` bytes each."""

    config: Config
    machine: Machine
    processes: int
    limit: int

    def remedies(self) -> Iterator[Remedy]:
        """The smallest change of each kind that fits. If none fits: narrower precision and shorter rows."""
        any_fits = False
        for remedy in self._same_batch():
            any_fits = True
            yield remedy
        if not any_fits:
            yield from filter(None, [self._narrower_or_shorter()])

    def _tried(self, changes: dict[str, Any], count: int) -> Remedy | None:
        taken = memory_of(_changed(self.config, changes), self.machine.platform, count).total
        # On a CPU the processes share one memory.
        limit = self.limit if self.machine.platform != "cpu" else self.limit * self.processes // count
        settings = tuple(f"{key}={_shown(value)}" for key, value in changes.items())
        return Remedy(settings, count, taken) if taken <= limit else None

    def _first(self, choices: Iterable[dict[str, Any]]) -> Remedy | None:
        return next((fitting for changes in choices if (fitting := self._tried(changes, self.processes))), None)

    def _checkpointing(self) -> dict[str, Any]:
        return {} if self.config.train.activation_checkpointing else {"train.activation_checkpointing": True}

    def _same_batch(self) -> Iterator[Remedy]:
        """The smallest change that fits with the same processes: fewer rows, checkpointing, or both; then more
        processes.
        """
        rows = self.config.train.micro_batch_rows
        halves = [rows >> shift for shift in range(1, rows.bit_length()) if rows % (1 << shift) == 0]
        fewer = [{"train.micro_batch_rows": less} for less in halves]
        checkpointing = self._checkpointing()
        mild = [self._first(fewer), self._first([checkpointing] if checkpointing else [])]
        if not any(mild) and checkpointing:
            mild.append(self._first(checkpointing | changes for changes in fewer))
        yield from filter(None, mild)
        if not isinstance(self.config.model, Model):
            yield from filter(None, self._memory_modes())
        if self.machine.platform != "cpu":
            if isinstance(self.config.model, Model):
                yield from filter(None, [self._divided()])
            yield from filter(None, [self._on_more()])

    def _divided(self) -> Remedy | None:
        """The fewest GPUs of a machine that divide every layer, for the current or the least number of processes."""
        train = self.config.train
        for shares in DIVIDED:
            count, changes = math.lcm(self.processes, shares), {"train.tensor_parallel": shares}
            changed = _changed(self.config, changes)
            if shares <= train.tensor_parallel or not _runs(changed, count):
                continue
            if (remedy := self._tried(changes, count)) is not None:
                return remedy
        return None

    def _memory_modes(self) -> Iterator[Remedy | None]:
        """For a model of transformers: 16-bit weights, then the optimizer's state in main memory; low-rank adapters."""
        model, train = self.config.model, self.config.train
        assert not isinstance(model, Model)
        least: dict[str, Any] = self._checkpointing() | (
            {"train.micro_batch_rows": 1} if train.micro_batch_rows > 1 else {}
        )
        narrow: dict[str, Any] = {} if train.precision == "bf16" else {"train.precision": "bf16"}
        narrow |= {} if train.weights == "bf16" else {"train.weights": "bf16"}
        if self.processes == 1:
            narrow |= {} if train.zero_stage in ("auto", 2) else {"train.zero_stage": 2}
        elif train.zero_stage == 0:
            narrow |= {"train.zero_stage": 2}
        offload: dict[str, Any] = (
            {} if train.offload != "none" or self.machine.platform == "cpu" else {"train.offload": "optimizer"}
        )
        if offload and self.processes > 1 and zero_stage(train, self.processes) < 2:
            offload |= {"train.zero_stage": 2}
        modes = [narrow, narrow | offload] if offload else [narrow]
        yield self._first(mode | more for mode in modes for more in ({}, least) if mode | more)
        if model.lora is None and model.random is None and not model.vocab.add_tokens:
            adapters = narrow | {"model.lora": Lora()}
            yield self._first([adapters, adapters | least])
        if model.random is None and (model.lora is None or model.lora.quantize is None):
            lora = (model.lora or Lora()).model_copy(update={"quantize": "nf4"})
            if train.zero_stage != 3:
                yield self._first([narrow | least | {"model.lora": lora}])

    def _on_more(self) -> Remedy | None:
        """The smallest number of processes that fits, a power of two times the current number.

        First without other changes, then with a higher ZeRO stage, then also with checkpointing and single rows. If a
        step has too few rows for twice the processes, the rows of a micro-batch are reduced too.
        """
        train, processes = self.config.train, self.processes
        # Rows of which every step has a multiple; processes that share tokens or the model have the same.
        shared = train.batch_sizes.unit * train.sequence_parallel * train.parts
        counts = [
            processes << shift for shift in range(MAX_PROCESSES.bit_length()) if processes << shift <= MAX_PROCESSES
        ]
        unchanged = [(count, int(zero_stage(train, count))) for count in counts[1:] if zero_stage(train, count) > 0]
        least = max(zero_stage(train, processes), 1)
        most = 1 if train.optimizer.kind == "muon" or train.pipeline_parallel > 1 else 3
        several = [count for count in counts if count > train.parts]
        higher = [(count, stage) for count in several for stage in range(least, most + 1)]
        too_few = shared % (train.micro_batch_rows * 2 * processes) > 0
        single = self._checkpointing() | {"train.micro_batch_rows": 1}
        for changes, tried in (({}, unchanged), ({}, higher), (single, higher)):
            for count, stage in tried:
                rows = changes.get("train.micro_batch_rows", train.micro_batch_rows)
                if too_few:
                    rows = math.gcd(shared // count, rows)
                if rows == 0 or shared % (rows * count):
                    continue
                settings = changes | {"train.micro_batch_rows": rows, "train.zero_stage": stage}
                kept = {"train.micro_batch_rows": train.micro_batch_rows, "train.zero_stage": zero_stage(train, count)}
                settings = {key: value for key, value in settings.items() if kept.get(key) != value}
                if (settings or count > processes) and (remedy := self._tried(settings, count)) is not None:
                    return remedy
        return None

    def _narrower_or_shorter(self) -> Remedy | None:
        """bf16 instead of float32. If that is not sufficient, also the longest halved rows that fit.

        With the same processes, checkpointing and single rows. Both change the results of the training.
        """
        narrower: dict[str, Any] = {"train.precision": "bf16"} if self.config.train.precision == "fp32" else {}
        if narrower and (remedy := self._tried(narrower, self.processes)) is not None:
            return remedy
        single = {} if self.config.train.micro_batch_rows == 1 else {"train.micro_batch_rows": 1}
        least = narrower | single | self._checkpointing()
        if narrower and (remedy := self._tried(least, self.processes)) is not None:
            return remedy
        length = self.config.data.row_length
        halves = [length >> shift for shift in range(1, length.bit_length()) if length >> shift >= MIN_ROW_LENGTH]
        lengths = [half for half in halves if half % self.config.train.sequence_parallel == 0]
        shorter = [least | {"data.row_length": less} for less in lengths]
        if not shorter or self._tried(shorter[-1], self.processes) is None:
            return None  # tried first, because a trace of shorter rows takes less time
        return self._first(shorter)


def _shown(value: Any) -> str:
    """A value of a setting, as on the command line; of a section the keys that are set."""
    if isinstance(value, Lora):
        return "{" + ", ".join(f"{name}: {getattr(value, name)}" for name in sorted(value.model_fields_set)) + "}"
    return str(value).lower()


def _runs(config: Config, processes: int) -> bool:
    """Whether a configuration whose keys were changed is valid, and runs on so many processes."""
    if any(conflicts(config)):
        return False
    try:
        check_processes(config, processes)
    except ConfigError:
        return False
    return True


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration with other values of some keys, such as train.micro_batch_rows."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=updated)
