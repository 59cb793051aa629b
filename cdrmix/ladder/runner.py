"""The runner of a ladder: forecasts, trains, evaluates and judges its rungs in turn, and records it in the ledger.

A rung is forecast before it is trained. It is promoted when the gates of its preset pass; until then no larger rung
begins. Each step is one line of the ledger (ledger.py). A ladder that was stopped at any point continues from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_ladder import Ladder
from cdrmix.data.prepare import prepare
from cdrmix.durable import write_atomically
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError, Preempted
from cdrmix.evaluate import evaluate_suites
from cdrmix.inference.load import SUMS, read_sums
from cdrmix.ladder import infrastructure
from cdrmix.ladder.evidence import check_key
from cdrmix.ladder.forecast import Forecast, Law, forecast
from cdrmix.ladder.infrastructure import Check
from cdrmix.ladder.judgement import Judgement, judge
from cdrmix.ladder.ladder_report import REPORT, write_ladder_report
from cdrmix.ladder.ledger import Entry, Ledger, locked, recorded_files
from cdrmix.ladder.presentation import forecast_json
from cdrmix.ladder.rungs import DataFactory, ModelFactory, RungPlan, plan_rungs, read_ladder, rung_named, write_config
from cdrmix.ladder.state import RungState, check_states, run_path, rung_states, stopping
from cdrmix.ladder.verdict import Outcome, Verdict, exit_code
from cdrmix.run_folder import RunFolder, finite
from cdrmix.training.launch import launch
from cdrmix.workflow import run_all

WORST_FIRST = (Outcome.FAIL, Outcome.HOLD, Outcome.NOT_MEASURED, Outcome.PASS)
PREEMPTED = Preempted.exit_code
AGAIN = "the same command continues the ladder"


@dataclass(frozen=True)
class PipelineResult:
    """What a run of a ladder has reached.

    rungs: the state of each rung of the plan. stopped: why it stopped before the last rung that was asked for; empty
    otherwise. exit_code: 0; 14 where a gate failed, 15 where gates are undecided. report: the HTML page.
    """

    rungs: tuple[RungState, ...]
    stopped: str
    exit_code: int
    report: Path

    @property
    def passed(self) -> bool:
        """Whether all rungs that were asked for are promoted."""
        return not self.stopped


class PipelineRunner:
    """Climbs a ladder: `PipelineRunner("ladder.yaml").run()`.

    Args:
        config: a ladder file, or a Ladder.
        overrides: `ladder.key=value` each, of the file.
        model_factory: returns the section `model` of a rung from its configuration. It may name mixers and
            feed-forwards that the caller has registered.
        data_factory: returns the section `data`. It may name sources that the caller has registered.
        lenient: the reason why rungs are promoted whatever the gates say; the ledger records it. None: as the file
            says.
        sign_with: a private key of ssh, which signs the evidence of each rung that is judged.
        processes: number of processes of the training on this machine. With more than one, registered parts must be
            those of plugins, because other processes do not see the caller's.
        say: receives progress messages.

    Raises:
        ConfigError: with file and line, for what cannot be used.
    """

    def __init__(
        self,
        config: Ladder | str | Path,
        overrides: Sequence[str] = (),
        *,
        model_factory: ModelFactory | None = None,
        data_factory: DataFactory | None = None,
        lenient: str | None = None,
        sign_with: Path | None = None,
        processes: int = 1,
        say: Callable[[str], None] = print,
    ) -> None:
        if isinstance(config, Ladder):
            if overrides:
                raise ConfigError("overrides are for a ladder file; a Ladder is complete")
            self.ladder, beside = config, None
        else:
            self.ladder, beside = read_ladder(Path(config), overrides)
        if lenient is not None and not lenient.strip():
            raise ConfigError("--lenient: give the reason; the ledger records it")
        if sign_with is not None:
            check_key(sign_with)
        if processes < 1:
            raise ConfigError(f"processes must be at least 1; found {processes}")
        self.root = Path(self.ladder.root).expanduser()
        self.rungs = plan_rungs(self.ladder, beside, model_factory=model_factory, data_factory=data_factory)
        self.lenient = lenient or (None if self.ladder.strict else self.ladder.reason)
        self.sign_with, self.processes, self.say = sign_with, processes, say

    @property
    def history(self) -> list[Entry]:
        """The lines of the ledger so far. Raises LedgerError where it was changed."""
        return Ledger(self.root).entries

    def states(self) -> list[RungState]:
        """The state of each rung of this plan. Raises LedgerError, CheckpointError or ConfigError as `run` does."""
        ledger = Ledger(self.root)
        states = rung_states(ledger, [rung.facts() for rung in self.rungs])
        check_states(ledger, states)
        return states

    def validate_infrastructure(self) -> list[Check]:
        """Checks the machine with the first rung, without the ledger. Raises ConfigError if a check fails."""
        with locked(self.root):
            return self._validate(self.rungs[0])

    def run(self, up_to: str | None = None) -> PipelineResult:
        """Climbs from the first rung to `up_to`, by default to the last one. Rungs that are promoted are not repeated.

        Raises:
            LedgerError: the ledger, or a file that it records, was changed.
            ConfigError: an unknown rung, another process works on the ladder, or a check of the machine fails.
            Preempted, and what the training raises; the same call continues.
        """
        names = [rung.name for rung in self.rungs]
        last = names[-1] if up_to is None else rung_named(up_to, names, "--up-to")
        return self._climb(self.rungs[: names.index(last) + 1], self.lenient)

    def run_progressive(
        self, start: str | None = None, end: str | None = None, validation_between_scales: bool = True
    ) -> PipelineResult:
        """Climbs from the rung `start` to the rung `end`, as `run` does. Rungs below `start` are left out.

        validation_between_scales: False promotes each rung whatever its gates say, and records that.
        """
        names = [rung.name for rung in self.rungs]
        first = 0 if start is None else names.index(rung_named(start, names, "start"))
        last = len(names) - 1 if end is None else names.index(rung_named(end, names, "end"))
        if last < first:
            raise ConfigError(f"end is {names[last]}, which comes before start, {names[first]}")
        lenient = self.lenient if validation_between_scales else self.lenient or "validation_between_scales is False"
        return self._climb(self.rungs[first : last + 1], lenient)

    def _climb(self, rungs: Sequence[RungPlan], lenient: str | None) -> PipelineResult:
        with locked(self.root):
            ledger = Ledger(self.root)
            plan = [rung.facts() for rung in self.rungs]
            check_states(ledger, rung_states(ledger, plan))
            self._record_plan(ledger, plan)
            stopped, code = "", 0
            if any(state.promoted is None for state in self._of(ledger, rungs)):
                self._check_machine(ledger, rungs[0])
            for rung in rungs:
                judged = self._rung(ledger, rung, lenient)
                if judged is not None:
                    code = judged.facts["exit_code"]
                    stopped = (
                        f"{rung.name} is not promoted: {judged.facts['outcome']}. {stopping(judged)}. Look at "
                        f"{self.root / REPORT}; --lenient REASON promotes the rung nevertheless"
                    )
                    self.say(stopped)
                    break
            return PipelineResult(tuple(self._of(ledger)), stopped, code, write_ladder_report(ledger))

    def _of(self, ledger: Ledger, rungs: Sequence[RungPlan] | None = None) -> list[RungState]:
        names = [rung.name for rung in (self.rungs if rungs is None else rungs)]
        states = rung_states(ledger, [rung.facts() for rung in self.rungs])
        return [state for state in states if state.name in names]

    def _record_plan(self, ledger: Ledger, plan: list[dict[str, Any]]) -> None:
        facts = finite(
            {
                "name": self.ladder.name,
                "rungs": plan,
                "gates": self.ladder.gates,
                "custom_gates": self.ladder.custom_gates,
                "suites": self.ladder.suites,
                "exponents": list(self.ladder.forecast.exponents),
                "slack": self.ladder.forecast.slack,
            }
        )
        before = ledger.of("ladder")
        if not before or before[-1].facts != facts:
            ledger.append("ladder", "", facts, {})

    def _check_machine(self, ledger: Ledger, rung: RungPlan) -> None:
        """Checks the machine, unless the ledger says that it was checked and is the same."""
        here = finite(infrastructure.machine(rung.config))
        before = ledger.of("infrastructure")
        if before and before[-1].record["machine"] == here:
            return
        checks = self._validate(rung)
        facts = {"rung": rung.name, "checks": {check.name: check.outcome.value for check in checks}}
        ledger.append("infrastructure", "", facts, {"machine": here, "checks": infrastructure.as_json(checks)})

    def _validate(self, rung: RungPlan) -> list[Check]:
        self.say(f"Checking this machine with {rung.name}")
        for left in self.root.glob(f"{infrastructure.PREFIX}*"):  # of a process that was killed
            shutil.rmtree(left)
        checks = infrastructure.validate_infrastructure(rung.config, self.root, self.say)
        if failed := infrastructure.failures(checks):
            raise ConfigError(f"this machine cannot train {rung.name}: {'; '.join(failed)}")
        return checks

    def _rung(self, ledger: Ledger, rung: RungPlan, lenient: str | None) -> Entry | None:
        """Does what is left of a rung. Returns its judgement if it is not promoted."""
        (state,) = self._of(ledger, [rung])
        if state.promoted is not None:
            self.say(f"{rung.name} is promoted already")
            return None
        if state.forecast is None:
            self._forecast(ledger, rung)
        for seed, config in rung.configs.items():
            if seed not in state.trained:
                self._train(ledger, rung, config)
        (state,) = self._of(ledger, [rung])
        judged = state.judged
        if judged is None or (judged.facts["exit_code"] and lenient is not None):
            judged = self._judge(ledger, rung, state, lenient)
        if judged.facts["exit_code"]:
            return judged
        reason = judged.facts["lenient"] if judged.facts["outcome"] != Outcome.PASS else None
        facts = {"identity": rung.identity, "outcome": judged.facts["outcome"], "lenient": reason}
        ledger.append("promoted", rung.name, {**facts, "attempt": state.earlier + 1}, {})
        self.say(f"{rung.name} is promoted" + (f", although {judged.facts['outcome']}: {reason}" if reason else ""))
        write_ladder_report(ledger)
        return None

    def _forecast(self, ledger: Ledger, rung: RungPlan) -> None:
        tokenizer = prepare(rung.config, say=self.say).tokenizer_fingerprint
        rungs = []
        for state in self._of(ledger):
            if state.promoted is None or state.measured is None or state.forecast is None:
                continue
            if state.forecast.facts["tokenizer"] != tokenizer:
                raise ConfigError(
                    f"{rung.name} has another tokenizer than {state.name}, so their losses cannot be compared: use one "
                    "text, one vocabulary and one tokenizer for all rungs, and climb in a new folder (ladder.root)"
                )
            rungs.append(state.measured)
        settings = self.ladder.forecast
        made = forecast(rungs, rung.name, rung.figures.compute, law=Law(settings.exponents, settings.slack))
        described = forecast_json(made)
        facts = {
            "identity": rung.identity,
            "tokenizer": tokenizer,
            "verdict": described["verdict"],
            "exponents": described["exponents"],
            "slack": described["slack"],
            "rungs": [vars(each) | {"losses": list(each.losses)} for each in made.rungs],
            **{key: described[key] for key in ("loss", "low", "high", "notes")},
        }
        ledger.append("forecast", rung.name, facts, {})
        if made.at is None:
            self.say(f"{rung.name}: no forecast: {'; '.join(made.notes)}")
        else:
            self.say(f"{rung.name}: forecast {made.at.loss:.4f}, band {made.at.low:.4f} to {made.at.high:.4f}")
        write_ladder_report(ledger)

    def _train(self, ledger: Ledger, rung: RungPlan, config: Config) -> None:
        finished = [run for run in RunFolder.all_of(config) if run.finished]
        self.say(f"{rung.name}, seed {config.run.seed}: {'trained already' if finished else 'training'}")
        if not finished:
            self._train_run(rung, config)
            finished = [run for run in RunFolder.all_of(config) if run.finished]
        if not finished:
            raise CheckpointError(f"the run of {rung.name} in {config.run.root} ended, but it is not finished")
        run = finished[0]
        summary = run.summary()
        sums = read_sums(run.export)
        facts = {
            "identity": rung.identity,
            "seed": config.run.seed,
            "config_hash": config.hash(),
            "step": summary["held_out_step"],
            "loss": summary["held_out"]["loss_nats_per_token"],
            "bits_per_byte": summary["held_out"]["bits_per_byte"],
            "text": summary["text_fingerprint"],
            "tokenizer": summary["corpus"]["tokenizer_sha256"],
            "exported_step": summary["export"]["step"],
            "weights": {name: digest for name, digest in sums.items() if name.endswith(".safetensors")},
        }
        files = [run.config_snapshot, run.metrics_jsonl, *(run.export / name for name in sums)]
        record = {
            "run": run.path.relative_to(self.root).as_posix(),
            "seconds": summary["stage_a"]["seconds"],
            "tokens_per_second": summary["stage_a"]["tokens_per_second"],
            "files": recorded_files(self.root, files),
        }
        ledger.append("trained", rung.name, facts, record)

    def _train_run(self, rung: RungPlan, config: Config) -> None:
        """The whole run, as `cdrmix train --resume auto` does it."""
        stopped = f"{rung.name} was stopped after a checkpoint; {AGAIN}"
        if self.processes == 1:
            try:
                run_all(config, resume="auto" if RunFolder.all_of(config) else None)
            except Preempted as error:
                raise Preempted(stopped) from error
            return
        path = write_config(config, self.root / "configs", rung.name)
        status, message = launch(self.processes, ["train", "--config", str(path), "--resume", "auto"])
        if status == PREEMPTED:
            raise Preempted(stopped)
        if status:
            failure = CdrmixError(f"{rung.name}: {message.removeprefix('cdrmix: error: ')}")
            failure.exit_code = status
            raise failure

    def _judge(self, ledger: Ledger, rung: RungPlan, state: RungState, lenient: str | None) -> Entry:
        """Judges the run of the first seed; the other seeds show how much the loss varies."""
        trained = state.trained[rung.config.run.seed]
        run = run_path(self.root, trained)
        results = self._evaluate(run)
        judgement = judge(
            run,
            self.ladder.gates,
            export=run / "export",
            results=results,
            forecast=state.forecast_with_loss(),
            custom_gates=self.ladder.custom_gates,
            lenient=lenient,
            sign_with=self.sign_with,
            say=self.say,
        )
        made = state.forecast_with_loss()
        verdicts, required = dict(judgement.verdicts), set(judgement.required)
        if made is not None and made.at is not None and "band" not in verdicts:
            verdicts["band"] = _band(made)  # the forecast counts as a gate in every preset
            required.add("band")
        found = {judgement.outcome, *(verdicts[name].outcome for name in required)}
        outcome = next(each for each in WORST_FIRST if each in found)
        for name, verdict in verdicts.items():
            needed = "" if name in required else " (not required)"
            self.say(f"{verdict.outcome:<12}  {name}{needed}: {verdict.reason}")
        facts = {
            "identity": rung.identity,
            "preset": judgement.preset,
            "outcome": outcome.value,
            "exit_code": exit_code(outcome, lenient),
            "lenient": lenient,
            "stopping": [name for name in verdicts if name in required and verdicts[name].outcome != Outcome.PASS],
            "verdicts": {name: verdict.outcome.value for name, verdict in verdicts.items()},
            "required": sorted(required),
        }
        files = _evidence(judgement, run, results)
        reasons = {name: verdict.reason for name, verdict in verdicts.items()}
        record = {"reasons": reasons, "files": recorded_files(self.root, files)}
        return ledger.append("judged", rung.name, facts, record)

    def _evaluate(self, run: Path) -> list[Path]:
        """Runs the suites on the exported model, once. Returns the files of results."""
        if not self.ladder.suites:
            return []
        path = run / "suites.json"
        if not path.is_file():
            self.say(f"Evaluating {run / 'export'}: {', '.join(self.ladder.suites)}")
            found = [result.as_json() for result in evaluate_suites(run / "export", self.ladder.suites)]
            write_atomically(path, json.dumps(found, indent=2, allow_nan=False) + "\n")
        return [path]


def _evidence(judgement: Judgement, run: Path, results: Sequence[Path]) -> list[Path]:
    files = [judgement.evidence, judgement.exported_evidence, run / "export" / SUMS, *results]
    return [path for path in files if path is not None]


def _band(made: Forecast) -> Verdict:
    """The forecast of a rung with a loss as the verdict of a gate."""
    assert made.at is not None
    assert made.verdict is not None
    reason = f"held-out loss {made.measured:.4f}, band {made.at.low:.4f} to {made.at.high:.4f}"
    return Verdict(made.verdict, reason, made.measured, threshold=made.at.high, n=len(made.used))
