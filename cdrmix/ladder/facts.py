"""The recorded facts of a run that gates read, as plain JSON data: what was trained, logged, measured and exported.

They are stored in gates/<preset>.facts.json of the run, so that every verdict can be computed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cdrmix.run_folder import finite

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is known of a run. A part that is None was not measured.

    Each object has its own copy of the data, as plain JSON data: a number that is not finite is None. So gates read
    what the file of facts has, and a gate that changes its copy does not change the facts.

    run: name, config_hash, folder, step (of the newest checkpoint; None without one), steps (of the configuration, with
        those of stage B), finished.
    settings: of its configuration: vocabulary, steps, warmup_steps, log_every, preferences (whether it trains on
        pairs, so that its loss is not that of tokens), routed (whether the model has routers).
    rows: the lines of metrics.jsonl in stage A (cdrmix.records.StepRecord), by step.
    phases: its lines in stage B (PhaseRecord).
    held_out: the results on all held-out text (cdrmix.eval.perplexity.HeldOut), of the step held_out_step.
    weights: of the newest checkpoint: checkpoint, step, values (their number), not_finite (how many are not finite),
        first (the first tensor with such a value), files (name -> SHA-256).
    machine: name, memory_bytes; None if the run was trained on another machine.
    plan: tokens_per_second, source.
    forecast: of the held-out loss in nats per token: low, high, loss, rungs (of the fit), notes; band: whether there
        is one.
    determinism, resume: steps trained again, or from a checkpoint: steps, differences (sentences; none if all bits are
        the same), tokens_per_second, problem (why they cannot be trained again here, or None). determinism also has
        compared_with_the_run: whether their losses were compared with those of the run, which needs its machine.
    export: step, files (name -> SHA-256), problems (files that SHA256SUMS does not fit), logits (whether they are those
        of the checkpoint; None: not compared), logits_problem (why not).
    results: of suites (cdrmix.eval.suites.SuiteResult) of this model, each with `origin`: file and its SHA-256.
    foreign_results: sentences on the files of results that are not used, because they are of another model.
    """

    run: Json
    settings: Json
    rows: tuple[Json, ...] = ()
    phases: tuple[Json, ...] = ()
    held_out: Json | None = None
    weights: Json | None = None
    machine: Json | None = None
    plan: Json | None = None
    forecast: Json | None = None
    determinism: Json | None = None
    resume: Json | None = None
    export: Json | None = None
    results: tuple[Json, ...] = ()
    foreign_results: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            plain = finite(value)
            object.__setattr__(self, entry.name, tuple(plain) if isinstance(value, tuple) else plain)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each part, as JSON with sorted keys."""
        texts = {
            name: json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
            for name, part in self.as_json().items()
        }
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

    def digest(self, *parts: str) -> str:
        """The SHA-256 of the lines `part digest` of some parts, sorted. Without names: of all parts."""
        lines = sorted(f"{name} {self.digests[name]}\n" for name in parts or self.digests)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """All parts as JSON data."""
        return {entry.name: finite(getattr(self, entry.name)) for entry in dataclasses.fields(self)}

    def copy(self) -> Facts:
        """The same facts with data of their own."""
        return dataclasses.replace(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The facts that `as_json` gave. Raises ValueError for other parts than those of this class."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        if set(data) != names:
            raise ValueError(f"expected the parts {', '.join(sorted(names))}; found {', '.join(sorted(data))}")
        parts: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**parts)

    def after_warmup(self) -> list[Json]:
        """The rows after the warm-up of the learning rate."""
        return [row for row in self.rows if row["step"] > self.settings["warmup_steps"]]

    def measures(self, suite: str, name: str) -> list[Json]:
        """The figures of a suite with this name, in all results; those that were not measured too."""
        every = (measure for result in self.results if result["suite"] == suite for measure in result["measures"])
        return [measure for measure in every if measure["name"] == name]
