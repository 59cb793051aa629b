"""The runner of a ladder: forecasts, trains, evaluates and judges its rungs in turn, and records it in the ledger.

A rung is forecast before it is trained. It is promoted when the gates of its preset pass; until then no larger rung
begins. Each step is one line of the ledger (ledger.py). A ladder that was stopped at any point continues from there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_ladder import Ladder
from cdrmix.data.pipeline.executor import refuse_in_import
from cdrmix.data.prepare import prepare
from cdrmix.durable import write_atomically
from cdrmix.errors import CdrmixError, CdrmixWarning, CheckpointError, ConfigError, CorpusError, Preempted, ShardError
from cdrmix.eval.data_sets import missing_packages
from cdrmix.eval.suites import Measure, SuiteResult, suites
from cdrmix.evaluate import evaluate_suites
from cdrmix.inference.load import read_sums
from cdrmix.ladder import infrastructure
from cdrmix.ladder.custom_gates import load_gates
from cdrmix.ladder.evidence import check_key, sign
from cdrmix.ladder.forecast import LEAST_RUNGS, Law, forecast
from cdrmix.ladder.gates import Gate
from cdrmix.ladder.infrastructure import Check
from cdrmix.ladder.judgement import judge
from cdrmix.ladder.ladder_files import (
    JUDGEMENTS,
    RESULTS,
    keep_evidence,
    read_suites,
    remove_incomplete_evidence,
    run_path,
    training_facts,
    training_files,
)
from cdrmix.ladder.ladder_report import REPORT, write_ladder_report
from cdrmix.ladder.ledger import Entry, Ledger, check_files, locked, recorded_files
from cdrmix.ladder.presentation import forecast_json
from cdrmix.ladder.presets import preset
from cdrmix.ladder.rungs import DataFactory, ModelFactory, RungPlan, plan_rungs, read_ladder, rung_named, write_config
from cdrmix.ladder.state import RungState, check_states, rung_states, something_missing, stopping
from cdrmix.ladder.verdict import Outcome
from cdrmix.run_folder import RunFolder, finite
from cdrmix.runtime import restored_settings
from cdrmix.training.launch import launch
from cdrmix.workflow import run_all

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
        ConfigError: for what cannot be used: a key, with file and line, a rung, a suite, a custom gate, a key of ssh.
        PluginError: a custom gate cannot be imported.
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
            _try_key(sign_with)
        if processes < 1:
            raise ConfigError(f"processes must be at least 1; found {processes}")
        self.root = Path(self.ladder.root).expanduser()
        self.rungs = plan_rungs(self.ladder, beside, model_factory=model_factory, data_factory=data_factory)
        self.suites, self.custom_gates = _known_suites(self.ladder), _known_gates(self.ladder)
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

    @restored_settings()
    def validate_infrastructure(self) -> list[Check]:
        """Checks the machine with the first rung, without the ledger. Raises ConfigError if a check fails."""
        refuse_in_import()
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

    @restored_settings()
    def _climb(self, rungs: Sequence[RungPlan], lenient: str | None) -> PipelineResult:
        refuse_in_import()
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
                    code, stopped = judged.facts["exit_code"], self._stopped(judged)
                    self.say(stopped)
                    break
            return PipelineResult(tuple(self._of(ledger)), stopped, code, write_ladder_report(ledger))

    def _stopped(self, judged: Entry) -> str:
        """Why a rung is not promoted, and what can be done."""
        found = f"{judged.facts['outcome']} by the gates of {judged.facts['preset']}"
        text = f"{judged.rung} is not promoted: {found}. {stopping(judged)}."
        if "train.log_every" in text:
            text += f" A change of train.log_every trains {judged.rung} again from the beginning."
        if something_missing(judged):
            text += " The same command judges it again."
        return f"{text} Look at {self.root / REPORT}; --lenient REASON promotes the rung nevertheless"

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
        try:
            checks = infrastructure.validate_infrastructure(rung.config, self.root, self.say)
        except Preempted as error:
            raise Preempted(f"the checks of this machine were stopped; {AGAIN}") from error
        if failed := infrastructure.failures(checks):
            raise ConfigError(f"this machine cannot train {rung.name}: {'; '.join(failed)}")
        return checks

    def _rung(self, ledger: Ledger, rung: RungPlan, lenient: str | None) -> Entry | None:
        """Does what is left of a rung. Returns its judgement if it is not promoted."""
        (state,) = self._of(ledger, [rung])
        if state.promoted is not None:
            self.say(f"{rung.name} is promoted already")
            return None
        if state.forecast is None or not self._forecast_settings_of(state.forecast):
            self._forecast(ledger, rung)
        for seed, config in rung.configs.items():
            if seed not in state.trained:
                self._train(ledger, rung, config)
        (state,) = self._of(ledger, [rung])
        judged = state.judged
        if judged is None or self._judges_again(judged, lenient):
            judged = self._judge(ledger, rung, state, lenient)
        if judged.facts["exit_code"]:
            return judged
        reason = judged.facts["lenient"] if judged.facts["outcome"] != Outcome.PASS else None
        facts = {"identity": rung.identity, "outcome": judged.facts["outcome"], "lenient": reason}
        ledger.append("promoted", rung.name, {**facts, "attempt": state.earlier + 1}, {})
        self.say(f"{rung.name} is promoted" + (f", although {judged.facts['outcome']}: {reason}" if reason else ""))
        write_ladder_report(ledger)
        return None

    def _forecast_settings_of(self, made: Entry) -> bool:
        """Whether a forecast has the exponents and the slack of the ladder file."""
        settings = self.ladder.forecast
        return bool((made.facts["exponents"], made.facts["slack"]) == (list(settings.exponents), settings.slack))

    def _judgement_settings(self) -> dict[str, Any]:
        """What a judgement depends on besides the runs and the forecast."""
        custom = {name: origin for name, (_, origin) in self.custom_gates.items()}
        return {"gates": self.ladder.gates, "custom_gates": custom, "suites": self.suites}

    def _judges_again(self, judged: Entry, lenient: str | None) -> bool:
        """Whether a judgement may have another result now.

        It may with other settings, and where a required gate was not measured: the data set of its suite may be
        installed by now. A gate that failed or is undecided has read what the run recorded, which does not change.
        """
        if judged.facts.get("settings") != self._judgement_settings():
            return True
        return bool(judged.facts["exit_code"]) and (lenient is not None or something_missing(judged))

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
            self.say(f"{rung.name}: not forecast, because that takes {LEAST_RUNGS} smaller rungs that are promoted")
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
        stage = run.summary().get("stage_a")
        if stage is None:
            raise CheckpointError(f"{run.metrics_json} is incomplete: it has no stage_a; restore it, or climb again")
        weights = {name: digest for name, digest in read_sums(run.export).items() if name.endswith(".safetensors")}
        facts = {
            "identity": rung.identity,
            "seed": config.run.seed,
            "config_hash": config.hash(),
            **training_facts(run),
            "weights": weights,
        }
        record = {
            "run": run.path.relative_to(self.root).as_posix(),
            "seconds": stage["seconds"],
            "tokens_per_second": stage["tokens_per_second"],
            "files": recorded_files(self.root, training_files(run)),
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
        """Judges the run of the first seed; the other seeds show how much the loss varies.

        If nothing differs from the judgement before, that one is returned and the ledger stays as it is.
        """
        trained = state.trained[rung.config.run.seed]
        run = run_path(self.root, trained)
        folder = self.root / JUDGEMENTS / rung.name
        number = len(ledger.of("judged", rung.name)) + 1
        results = self._evaluate(trained, folder / str(number), ledger.of("judged", rung.name))
        remove_incomplete_evidence(run / "export")
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
        verdicts, required = judgement.verdicts, judgement.required
        facts = {
            "identity": rung.identity,
            "settings": self._judgement_settings(),
            "preset": judgement.preset,
            "outcome": judgement.outcome.value,
            "exit_code": judgement.exit_code,
            "lenient": lenient,
            "stopping": list(judgement.stopping),
            "verdicts": {name: verdict.outcome.value for name, verdict in verdicts.items()},
            "required": sorted(required),
        }
        reasons = {name: verdict.reason for name, verdict in verdicts.items()}
        before = state.judged
        if before is not None and before.facts == finite(facts) and before.record["reasons"] == reasons:
            return before
        for name, verdict in verdicts.items():
            needed = "" if name in required else " (not required)"
            self.say(f"{verdict.outcome:<12}  {name}{needed}: {verdict.reason}")
        assert judgement.evidence is not None
        files = keep_evidence(folder / str(number), judgement.evidence, results)
        record = {"reasons": reasons, "files": recorded_files(self.root, files)}
        return ledger.append("judged", rung.name, facts, record)

    def _evaluate(self, trained: Entry, folder: Path, earlier: Sequence[Entry]) -> list[Path]:
        """Runs the suites on the exported model. Returns the files of results.

        folder: of this judgement. earlier: the judgements of this rung. Their results of this model, and those that a
        kill left in the folder, are used again, unless something was not measured.
        """
        if not self.suites:
            return []
        export, path = run_path(self.root, trained) / "export", folder / RESULTS
        weights = trained.facts["weights"]
        found = read_suites(path, weights)
        for entry in earlier:
            check_files(self.root, entry)
            for name in entry.record["files"]:
                if Path(name).name == RESULTS:
                    found |= read_suites(self.root / name, weights)
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.suites:
            if name in found:
                continue
            self.say(f"Evaluating {export}: {name}")
            try:
                found[name] = evaluate_suites(export, [name])[0].as_json()
            except (ConfigError, CorpusError, ShardError) as error:
                # Such as a data set that is missing; the gates that need it are not measured.
                self.say(f"{name} was not measured: {error}")
                found[name] = SuiteResult(name, (Measure(name, problem=str(error)),)).as_json()
            done = [found[each] for each in self.suites if each in found]
            write_atomically(path, json.dumps(done, indent=2, allow_nan=False) + "\n")
        write_atomically(path, json.dumps([found[name] for name in self.suites], indent=2, allow_nan=False) + "\n")
        return [path]


def _known_suites(ladder: Ladder) -> list[str]:
    """The suites of a ladder. Warns of data sets that are missing. Raises ConfigError for an unknown suite."""
    try:
        known = suites(ladder.suites)
    except ConfigError as error:
        raise ConfigError(f"ladder.suites: {str(error).removeprefix('--suite: ')}") from error
    for name in known:
        for command in missing_packages(name):
            warnings.warn(
                f"ladder.suites: a data set of {name} is missing, so its gates will not be measured; "
                f"`{command}` installs it",
                CdrmixWarning,
                stacklevel=3,
            )
    return known


def _known_gates(ladder: Ladder) -> dict[str, tuple[Gate, dict[str, str]]]:
    """The custom gates of a ladder, with their origins. Raises ConfigError and PluginError."""
    gates = load_gates(ladder.custom_gates)
    if taken := {check.name for check in preset(ladder.gates)} & gates.keys():
        raise ConfigError(
            f"ladder.custom_gates: {', '.join(sorted(taken))} is also the name of a gate of {ladder.gates}; rename its "
            "entry point"
        )
    return gates


def _try_key(key: Path) -> None:
    """Signs an empty file. Raises ConfigError if that fails."""
    check_key(key)
    with tempfile.TemporaryDirectory(prefix="cdrmix-ladder-") as folder:
        trial = Path(folder) / "trial"
        trial.touch()
        sign(trial, key)
