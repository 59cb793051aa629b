"""The plan of a run: memory against the machine, operations, time and disk, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_training import Train
from cdrmix.plan.components import micro_batches
from cdrmix.plan.disk import Disk, disk_of
from cdrmix.plan.fit import MAX_MEMORY_SHARE, Fit, Remedy, estimate_note, fit, nothing_fits
from cdrmix.plan.flops import TokenFlops, training_flops_per_token
from cdrmix.plan.machine import Machine
from cdrmix.plan.stage_b import TEXT_TOKENS
from cdrmix.plan.stage_b_fit import PhaseFit, fit_phases
from cdrmix.training.zero import zero_stage

PROCESSES_PER_HOST = 8
ASSUMED_MFU = 0.35  # share of the bfloat16 peak of a card
ASSUMPTION = (
    f"assumed, not measured: {ASSUMED_MFU:.0%} of the bf16 peak. Published values for mixtures of experts of these "
    "sizes on eight H100 are 30 to 40 %, communication included"
)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all processes, hours of stage A, and their source. None: unknown."""

    tokens_per_second: float | None
    hours: float | None
    source: str


@dataclass(frozen=True)
class Plan:
    """The resources of a configuration on a machine: of stage A, and the memory of the phases of stage B. tokens: in
    total. zero_stage: with `auto` resolved. sharded: no process has the whole model while it is trained.
    """

    name: str
    machine: Machine
    processes: int
    zero_stage: int
    fit: Fit
    flops: TokenFlops
    tokens: int
    speed: Speed
    disk: Disk
    notes: tuple[str, ...]
    sharded: bool
    phases: tuple[PhaseFit, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether both stages fit; None if the memory of the machine is unknown."""
        return None if self.fit.fits is None else self.fit.fits and all(each.fits for each in self.phases)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes, rates per second, unknown values null."""
        machine = dataclasses.asdict(self.machine)
        return {
            "name": self.name,
            "machine": machine,
            "processes": self.processes,
            "zero_stage": self.zero_stage,
            "memory": {
                "components": [dataclasses.asdict(part) for part in self.fit.memory.components],
                "total": self.fit.memory.total,
                "limit": self.fit.limit,
                "fits": self.fit.fits,
                "would_fit": [_remedy_json(remedy) for remedy in self.fit.remedies],
                "activations_by_operator": self.fit.memory.saved_by_operator,
                "host_bytes": self.fit.memory.host_bytes,
            },
            "phases": [
                {
                    "name": each.phase.name,
                    "moment": each.phase.moment,
                    "components": [dataclasses.asdict(part) for part in each.phase.memory.components],
                    "total": each.phase.memory.total,
                    "fits": each.fits,
                    "would_fit": [_remedy_json(remedy) for remedy in each.remedies],
                }
                for each in self.phases
            ],
            "flops_per_token": dataclasses.asdict(self.flops)
            | {"total": self.flops.total, "executed": self.flops.executed},
            "tokens": self.tokens,
            "speed": dataclasses.asdict(self.speed),
            "disk": dataclasses.asdict(self.disk),
            "notes": list(self.notes),
        }


def _remedy_json(remedy: Remedy) -> dict[str, Any]:
    return {"settings": list(remedy.settings), "processes": remedy.processes, "bytes": remedy.bytes}


def make_plan(config: Config, machine: Machine, processes: int, say: Callable[[str], None]) -> Plan:
    """The plan of a run on `processes` processes with one such device each. say: receives progress messages."""
    train = config.train
    flops = training_flops_per_token(config)
    tokens = train.batch_sizes.before(train.steps) * config.data.row_length
    notes = []
    fitting = fit(config, machine, processes, say=say)
    if max(processes, *(remedy.processes for remedy in fitting.remedies), 0) > PROCESSES_PER_HOST:
        notes.append(
            f"More than {PROCESSES_PER_HOST} GPUs are in several machines: start cdrmix train with --nnodes on each."
        )
    if fitting.memory.untraced:
        notes.append(estimate_note(fitting.memory))
    if train.offload != "none" and fitting.memory.host_bytes:
        notes.append(
            "The main memory includes the state that train.offload moves. The time does not include its transfers and "
            "the updates on the CPU."
        )
    phases: tuple[PhaseFit, ...] = ()
    if config.reasoning is not None:
        notes.append(
            "Operations, time and disk are those of stage A. Stage B's questions and answers of text without "
            f"question_tokens and answer_tokens are assumed to have {TEXT_TOKENS} tokens."
        )
        phases = tuple(fit_phases(config, machine, processes, say))
    return Plan(
        config.run.name,
        machine,
        processes,
        zero_stage(train, processes),
        fitting,
        flops,
        tokens,
        _speed(flops, tokens, machine, processes, pipeline_share(train, processes)),
        disk_of(config),
        tuple(notes),
        (zero_stage(train, processes) == 3 or train.pipeline_parallel > 1) and isinstance(config.model, Model),
        phases,
    )


def pipeline_share(train: Train, processes: int) -> float:
    """The share of a step's time in which the stages of a pipeline do not wait for it to fill or to empty."""
    count = micro_batches(train, processes)
    return count / (count + train.pipeline_parallel - 1)


def _speed(flops: TokenFlops, tokens: int, machine: Machine, processes: int, share: float) -> Speed:
    peak = machine.flops_per_second
    if peak is None:
        return Speed(None, None, f"unknown: the table of GPUs has no rates of {machine.name}")
    rate = share * ASSUMED_MFU * peak * processes / flops.executed
    waiting = "" if share == 1 else f"; the stages of the pipeline wait for {1 - share:.1%} of each step"
    return Speed(rate, tokens / rate / 3600, ASSUMPTION + waiting)


def plan_table(plan: Plan) -> str:
    """The plan as a table of at most 100 columns."""
    memory, machine = plan.fit.memory, plan.machine
    lines = [f"{plan.name} on {plan.processes} x {machine.name}, ZeRO stage {plan.zero_stage}", f"  {machine.source}"]
    lines += ["", "Memory of a process, GB (10^9 bytes)"]
    lines += [f"  {part.name:<14}{_gb(part.bytes)}   {part.why}" for part in memory.components]
    lines.append(f"  {'total':<14}{_gb(memory.total)}   {_verdict(plan, plan.fit.fits)}")
    if plan.fit.remedies:
        lines += _remedy_lines(plan, plan.fit.remedies)
    elif plan.fit.fits is False:
        lines += textwrap.wrap(nothing_fits(), 98, initial_indent="  ", subsequent_indent="  ")
    if memory.host_bytes:
        together = min(plan.processes, PROCESSES_PER_HOST)
        what = f"to build the model and to save it; {together} on a machine: {memory.host_bytes * together / 1e9:,.0f}"
        if together == 1:
            what = "to build the model and to save it"
        elif plan.sharded:
            what = "in the first process, which has the whole model to evaluate and export it at the end"
        lines.append(f"  {'main memory':<14}{_gb(memory.host_bytes)}   {what}")
    lines += _phase_lines(plan)
    saved = [(name, size) for name, size in memory.saved_by_operator.items() if size >= 0.01 * memory.total]
    lines += ["", "Saved for the backward pass, GB, by operator"]
    lines += [f"  {name:<44}{_gb(size)}" for name, size in saved] or ["  none has 1 % of the total"]
    flops = plan.flops
    each = flops.parameters / flops.active_parameters
    unit, scale = ("GFLOP", 1e9) if flops.total >= 1e8 else ("MFLOP", 1e6)
    lines += ["", f"Operations per token, {unit}"]
    parts = {
        "parameters": (flops.parameters, f"{each:.3g} x {flops.active_parameters:,} active"),
        "attention": (flops.attention, "scores and values over the causal half of a row"),
        "rwkv7": (flops.rwkv7, "the recurrence"),
        "mamba2": (flops.mamba2, "the recurrence and its convolution"),
        "prediction": (flops.prediction, "the further depths of multi-token prediction"),
        "total": (flops.total, "of the model, for MFU"),
        "recomputed": (flops.recomputed, "additional, by activation checkpointing"),
        "muon": (flops.muon, f"additional, by the optimizer: {flops.muon / flops.total:.1%} of the model's"),
    }
    lines += [f"  {name:<14}{number / scale:>11,.3f}   {why}" for name, (number, why) in parts.items() if number]
    speed = plan.speed
    lines += ["", f"Time, for {plan.tokens:,} tokens"]
    if speed.tokens_per_second is not None and speed.hours is not None:
        if_so = ", if it would fit" if plan.fit.fits is False else ""
        lines.append(f"  {'tokens/s':<14}{speed.tokens_per_second:>11,.0f}   {speed.hours:,.0f} hours{if_so}")
    lines += _wrapped(speed.source)
    disk = plan.disk
    lines += ["", "Disk, GB", _shards(disk)]
    lines.append(f"  {'checkpoints':<14}{_gb(disk.checkpoints)}   {disk.checkpoint / 1e9:,.2f} each")
    lines.append(f"  {'export':<14}{_gb(disk.export)}")
    for note in plan.notes:
        lines += ["", *(line.strip() for line in _wrapped(note))]
    return "\n".join(lines)


def _shards(disk: Disk) -> str:
    if disk.text is None or disk.shards is None:
        return f"  {'shards':<14}{'unknown':>11}   the size of the text is not known before it is read"
    return f"  {'shards':<14}{_gb(disk.shards)}   at most, of all {disk.text / 1e9:,.3f} GB of text"


def _remedy_lines(plan: Plan, remedies: Sequence[Remedy]) -> list[str]:
    lines = ["  what would fit:"]
    for remedy in remedies:
        settings = [*remedy.settings, *([f"--gpus {remedy.processes}"] if remedy.processes != plan.processes else [])]
        text = " ".join(settings)
        if len(text) > 72:
            lines += [f"    {each}" for each in settings[:-1]]
            text = settings[-1]
        lines.append(f"    {text:<72}{_gb(remedy.bytes)}")
    return lines


def _phase_lines(plan: Plan) -> list[str]:
    """The total of every phase of stage B, the parts of the one that needs most, and what would fit."""
    if not plan.phases:
        return []
    lines = ["", "Memory of a process in the phases of stage B, GB"]
    most = max(plan.phases, key=lambda each: each.phase.memory.total)
    for each in plan.phases:
        what = "" if each.phase.work is None else f": {each.phase.work.what}"
        lines.append(f"  {each.phase.name:<22}{each.phase.memory.total / 1e9:>9,.3f}   {each.phase.moment}{what}")
        if each.fits is False:
            nothing = ["    does not fit; neither fewer rows nor more processes are sufficient"]
            lines += _remedy_lines(plan, each.remedies) if each.remedies else nothing
    lines.append(f"  most: {most.phase.name}, {most.phase.moment}")
    lines += [f"  {part.name:<14}{_gb(part.bytes)}   {part.why}" for part in most.phase.memory.components]
    lines.append(f"  {'total':<14}{_gb(most.phase.memory.total)}   {_verdict(plan, most.fits)}")
    return lines


def _verdict(plan: Plan, fits: bool | None) -> str:
    if plan.fit.limit is None:
        return "unknown whether it fits: the memory of the machine is unknown"
    assert plan.machine.memory_bytes is not None
    limit = f"{plan.fit.limit / 1e9:,.2f}, {MAX_MEMORY_SHARE:.0%} of {plan.machine.memory_bytes / 1e9:,.2f}"
    return f"fits into {limit}" if fits else f"DOES NOT FIT into {limit}"


def _gb(size: int) -> str:
    return f"{size / 1e9:>11,.3f}"


def _wrapped(text: str, width: int = 98) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width - 2:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return [f"  {line}" for line in lines]
