"""The judgement of a run by the gates of a preset: its verdicts, what they add up to, and the evidence it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdrmix.ladder.forecast import Forecast
from cdrmix.ladder.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Judgement:
    """What the gates of a preset answer about a run.

    verdicts: by gate. required: the gates without which a run does not pass. outcome: PASS; FAIL where a required gate
    failed; otherwise HOLD or NOT_MEASURED. lenient: the reason for which the run passes nevertheless; None: strict.
    evidence: gates/<preset>.json of the run. exported_evidence: its copy in the export; None without an export.
    """

    preset: str
    verdicts: Mapping[str, Verdict]
    required: frozenset[str]
    outcome: Outcome
    lenient: str | None
    evidence: Path
    exported_evidence: Path | None

    @property
    def passed(self) -> bool:
        """Whether the run may be used for what the preset is for."""
        return self.outcome is Outcome.PASS or self.lenient is not None

    @property
    def stopping(self) -> tuple[str, ...]:
        """The required gates that did not pass."""
        return tuple(
            name
            for name, verdict in self.verdicts.items()
            if name in self.required and verdict.outcome is not Outcome.PASS
        )

    @property
    def exit_code(self) -> int:
        """0; 14 where a required gate failed; 15 where one is undecided or not measured."""
        if self.passed:
            return 0
        return 14 if self.outcome is Outcome.FAIL else 15


def judge(
    run: Path,
    preset: str,
    *,
    export: Path | None = None,
    results: Sequence[Path] = (),
    forecast: Forecast | None = None,
    tokens_per_second: float | None = None,
    custom_gates: Sequence[str] = (),
    lenient: str | None = None,
    measure: bool | None = None,
    sign: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Judgement:
    """Judges a run by the gates of a preset, and writes the evidence.

    Args:
        run: the run folder.
        preset: quick, standard, full or production.
        export: the exported model. Default: export/ of the run, if there is one.
        results: files of `cdrmix eval --suite ... --json`, of this model.
        forecast: of this run's held-out loss. None, or one with too few rungs: the gate `band` is not required.
        tokens_per_second: that the plan expects, of all processes. None: of `cdrmix plan`, if it knows the GPU.
        custom_gates: entry points of the group cdrmix.gates. Only these are imported. They are required.
        lenient: the reason why the run passes whatever the gates say. It is recorded. None: strict.
        measure: whether to train 20 steps again, and 20 from a checkpoint, where that is not measured yet. None: for
            full and production.
        sign: a private key of ssh, which signs the evidence.
        say: receives progress messages.

    Raises:
        ConfigError: there is no such preset or gate, the run cannot be judged, or a file of results is not one.
        CheckpointError: the run has no complete checkpoint.
        PluginError: a custom gate cannot be imported.
    """
    raise NotImplementedError
