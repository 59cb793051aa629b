"""A run from raw text to an exported model: prepare, stage A, stage B, evaluate, export, sample, report.

Each of these leaves its result in the run folder or in the data cache. If the result is there, it is not done again. So
a run that was stopped at any point continues from that point.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.data.pipeline.executor import refuse_in_import
from cdrmix.data.prepare import chat_template, prepare
from cdrmix.data.shards import ShardSet, open_shards
from cdrmix.durable import remove_remains, sha256_file
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError, ExportMismatchError
from cdrmix.eval.changes import changes, text_table
from cdrmix.eval.rows import read_rows
from cdrmix.evaluate import held_out_table, measure, to_standard_error
from cdrmix.hf.adapters import WEIGHTS as ADAPTERS
from cdrmix.hf.build import build_foreign
from cdrmix.hf.card import STAGE_A_ONLY
from cdrmix.hf.choice import choose_checkpoint
from cdrmix.hf.export import export_model, exported_step
from cdrmix.hf.export_adapters import export_adapters
from cdrmix.hf.export_foreign import export_foreign, keep_description
from cdrmix.hf.export_rwkv import export_official_rwkv7
from cdrmix.hf.foreign import section_of, transformers_config
from cdrmix.hf.hub import download
from cdrmix.hf.load import LoadedForeign, load_trained, untrained
from cdrmix.inference.checkpoints import list_checkpoints, newest_whole_checkpoint, step_of
from cdrmix.inference.choice import check_choice, is_run
from cdrmix.inference.generate import generate
from cdrmix.inference.load import SUMS, Loaded, load_model, load_start, run_of, verify
from cdrmix.inference.sampling import Sampling
from cdrmix.model.loss import LossModule
from cdrmix.plan.disk import check_disk
from cdrmix.plan.fit import check_memory
from cdrmix.plan.machine import machine_for
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.stage_b_fit import check_phases
from cdrmix.reason.build import load_stage_b
from cdrmix.reason.demo import demonstrate
from cdrmix.reason.evaluation import evaluate_stage_b
from cdrmix.reason.session import Session
from cdrmix.reason.sources import check_episodes, fingerprint_of_questions
from cdrmix.reason.stage_b import check_stage_b, spans, train_stage_b
from cdrmix.records import Rollout, read_lines, read_records
from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import free_memory, restored_settings
from cdrmix.training.build import build_loss_model
from cdrmix.training.callbacks import Callback
from cdrmix.training.distributed import DistributedContext, check_shared, join
from cdrmix.training.faults import memory_guard_after_training
from cdrmix.training.launch import check_processes, note_run
from cdrmix.training.mirror_thread import MirrorThread, check_mirror, mirroring
from cdrmix.training.restore import find_run
from cdrmix.training.retention import sweep, sweep_root
from cdrmix.training.stage_a import train
from cdrmix.training.starting import check_start
from cdrmix.training.trackers import check_trackers, log_evaluations
from cdrmix.units import amount
from cdrmix.watch.attached import AttachedWatcher
from cdrmix.watch.watcher import check_evaluation

Item = TypeVar("Item")

SAMPLE_PROMPT = "def "
SAMPLE = Sampling(temperature=0.6, top_p=0.9, max_new_tokens=160)


@restored_settings()
def run_all(config: Config, resume: str | Path | None = None, *, callbacks: Sequence[Callback] = ()) -> Path:
    """Does everything of a run that is not done yet. All processes of the run call it. Returns the run folder.

    resume: None starts a new run. 'auto' continues the newest unfinished run of this configuration, or starts a new
    run if there is none. A path continues that run; the path of a mirror restores its run first. callbacks: receive
    the steps, records and checkpoints of both stages. The last line that is printed is the path of the run folder.
    The settings of the process are those of the configuration during the run, and its own afterwards.
    """
    refuse_in_import()
    if not isinstance(config, Config):
        raise ConfigError(f"config must be a cdrmix.Config, for example of Config.from_yaml(path); found {config!r}")
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise ValueError(f"callbacks must be a list of objects of subclasses of cdrmix.Callback; found {callbacks!r}")
    resume = None if resume is None else str(resume)
    world = join(config)
    check_processes(config, world.size)
    check_trackers(config)
    check_choice(config.export.checkpoint)
    check_mirror(config)
    if config.evaluation.suites and config.evaluation.start:
        check_evaluation(config.evaluation)
    _make_base(config, world)
    if not isinstance(config.model, Model):
        transformers_config(config.model)  # raises before the text is prepared
    if config.reasoning is None or config.reasoning.backbone is None:
        _first_process(
            world,
            lambda: check_memory(config, machine_for(config, None, world.size), world.size, say=to_standard_error),
            "the check of the memory",
        )
    stage_b = config.kind == "reasoning" and bool(spans(config))
    if resume is None:
        check_start(config)
        if stage_b:
            check_stage_b(config, world.size)
            _first_process(
                world, lambda: check_phases(config, world.size, to_standard_error), "the check of the memory"
            )
    run = _run_folder(config, resume, world)
    with contextlib.ExitStack() as stack:
        _first_process(world, lambda: stack.enter_context(run.locked()), "the lock of the run")
        _first_process(world, lambda: sweep(run.checkpoints), "the removal of what killed processes left")
        mirror = stack.enter_context(mirroring(config, run))
        if config.kind == "reasoning" and not stage_b:
            run.say(STAGE_A_ONLY)
            run.update_summary({"not_trained": STAGE_A_ONLY})
        shards = _prepare(config, run, world)
        if stage_b:
            check_episodes(config, shards.tokenizer)
            if world.is_main_process and (questions := fingerprint_of_questions(config)):
                run.keep_questions(questions)
        if load_base := _trained_base(config, shards):
            _first_process(
                world,
                lambda: _measure_before(config, run, shards, world.device, load_base),
                "the evaluation before the training",
            )
        watcher = stack.enter_context(AttachedWatcher(run, config))
        callbacks = [*callbacks, watcher]
        if config.reasoning is None or config.reasoning.backbone is None:
            _train(config, run, shards, world, resume, callbacks, mirror)
        if stage_b:
            _train_stage_b(config, run, shards, world, callbacks, mirror)
        if world.is_main_process:
            free_memory()
            with memory_guard_after_training(run.path):
                _after_training(run, shards, world.device, watcher)
            print(run.path, flush=True)
    return run.path


def _make_base(config: Config, world: DistributedContext) -> None:
    """Makes the model that the training starts from, if its folder does not exist. Every process calls it.

    Downloads it (model.online), or runs the configuration model.made_by or train.start_made_by and copies its export.
    """
    if isinstance(config.model, Model):
        made_by, folder = config.train.start_made_by, config.train.start_from
    else:
        section = config.model
        _ = section.folder  # raises for a file
        if section.online:
            _first_process(world, lambda: download(section, to_standard_error), "the download of the model")
        made_by, folder = section.made_by, section.path
    if made_by is None or folder is None:
        return
    target = Path(folder).expanduser()
    if world.gather(world.is_main_process and target.exists(), f"whether {target} exists")[0]:
        return
    base = Config.from_yaml(made_by)
    if not isinstance(config.model, Model):
        section_of(base)
    export = RunFolder.open(run_all(base, resume="auto"), writes=False).export

    def copy() -> None:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_remains(target)
        shutil.copytree(export, temporary)
        temporary.rename(target)
        to_standard_error(f"The model of {made_by} is in {target}")

    _first_process(world, copy, "the copy of the model to start from")


def _first_process(world: DistributedContext, action: Callable[[], Item], what: str) -> Item:
    """Runs the action in the first process. Returns its result, or raises its CdrmixError, in all processes.

    what: the action, for the lines about a long wait.
    """
    outcome: tuple[Item | None, CdrmixError | None] = (None, None)
    if world.is_main_process:
        try:
            outcome = (action(), None)
        except CdrmixError as error:
            outcome = (None, error)
    item, problem = world.gather(outcome, what)[0]
    if problem is not None:
        raise problem
    return item  # type: ignore[return-value]


def _run_folder(config: Config, resume: str | None, world: DistributedContext) -> RunFolder:
    def choose() -> Path:
        sweep_root(Path(config.run.root).expanduser())
        run = find_run(config, resume, to_standard_error) if resume else None
        if run is not None:
            _check_records(run)
            check_disk(config, run.path, run.say)
            run.say(f"Continuing {run.path} ({config.run.name}, seed {config.run.seed})")
            return run.path
        check_disk(config, None, to_standard_error)
        run = RunFolder.create(config)
        run.say(f"Run {run.path} ({config.run.name}, seed {config.run.seed})")
        if resume:
            run.say(f"There was no unfinished run of this configuration ({config.hash()[:8]}) in {config.run.root}")
        return run.path

    path = _first_process(world, choose, "the choice of the run folder")
    check_shared(world, path, "run.root")
    if world.is_main_process:
        note_run(path, config.hash())
    return RunFolder.open(path, writes=world.is_main_process)


def _check_records(run: RunFolder) -> None:
    """Raises ConfigError for a damaged file of records: before any work, and not by the report at the end."""
    read_records(run.metrics_jsonl)
    read_rows(run.evaluation_rows)
    read_lines(run.rollouts, Rollout)


def _prepare(config: Config, run: RunFolder, world: DistributedContext) -> ShardSet:
    made: list[ShardSet] = []

    def make() -> Path:
        made.append(prepare(config, say=run.say))
        run.keep_text(made[0].fingerprint)
        return made[0].path

    path = _first_process(world, make, "the preparation of the text")
    check_shared(world, path, "data.cache")
    shards = made[0] if made else open_shards(path, verify=False)  # the first process has verified all files
    run.keep_tokenizer(shards.tokenizer_path)
    if (template := chat_template(config)) is not None:
        run.keep_chat_template(template, run.path if isinstance(config.model, Model) else run.base_model)
    run.update_summary(
        {
            "corpus": {
                "source": config.data.source_kinds(),
                "shards": str(shards.path.absolute()),  # for evaluations in another folder
                "index_sha256": sha256_file(shards.path / "index.json"),
                "tokenizer_sha256": shards.tokenizer_fingerprint,
                **shards.report,
            }
        }
    )
    return shards


def _trained_base(config: Config, shards: ShardSet) -> Callable[[], Loaded | LoadedForeign] | None:
    """Loads the trained weights that the run starts from, on the CPU. None: it starts from random weights."""
    section = config.model
    if isinstance(section, Model):
        start = Path(config.reasoning.backbone).expanduser() if config.reasoning and config.reasoning.backbone else None
        return functools.partial(load_start, start, config, shards.tokenizer) if start else None
    if section.random is not None:
        return None
    return lambda: untrained(config, shards.tokenizer)


def _measure_before(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    device: torch.device,
    load_base: Callable[[], Loaded | LoadedForeign],
) -> None:
    """Stores the results of the weights that the run starts from, on its held-out text by domain. Once for a run."""
    if "held_out_before" in run.summary() or list_checkpoints(run.checkpoints):
        return
    base = load_base()
    if base.tokenizer.fingerprint != shards.tokenizer_fingerprint:
        return  # the training refuses it, and gives the remedy
    run.say("Evaluating the weights before the training on held-out text")
    base.model.to(device)
    figures = measure(base, shards, config).as_json()
    run.update_summary({"held_out_before": figures, "held_out_before_step": 0})
    run.say("\n".join(text_table(changes(None, figures))))


def _train(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    world: DistributedContext,
    resume: str | None,
    callbacks: Sequence[Callback],
    mirror: MirrorThread | None,
) -> None:
    if world.gather(world.is_main_process and _finished(config, run), "whether stage A is complete")[0]:
        run.say(f"Stage A is already complete: {config.train.steps} steps")
        return
    if isinstance(config.model, Model):
        count = count_parameters(config.model, config.reasoning)
        run.update_summary({"parameters": {"stored": count.total_stored, "active": count.total_active, **count.stored}})
        what = f"; {amount(count.total_stored)} parameters, {amount(count.total_active)} active"
        build: Callable[[Config], LossModule] = build_loss_model
    else:
        what, build = "", functools.partial(build_foreign, world=world)
        described = transformers_config(config.model)
        if world.is_main_process:
            keep_description(described, config.model.folder, run.base_model)
    run.say(
        f"Stage A: {config.train.steps} steps of {config.train.batch_sizes.text}, {world.size} process(es) on "
        f"{world.device.type}{what}"
    )
    result = train(config, run, shards, build=build, resume=resume, callbacks=callbacks, mirror=mirror)
    run.update_summary(
        {"stage_a": {name: value for name, value in result._asdict().items() if not isinstance(value, Path)}}
    )


def _train_stage_b(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    world: DistributedContext,
    callbacks: Sequence[Callback],
    mirror: MirrorThread | None,
) -> None:
    last = spans(config)[-1]
    if world.gather(world.is_main_process and _reached(run, "stage_b", last.last), "whether stage B is complete")[0]:
        run.say(f"Stage B is already complete: {last.last} steps")
        return
    free_memory()
    if world.is_main_process and "held_out_before" not in run.summary() and (run.checkpoints / "latest").is_file():
        loaded = load_model(run.path, world.device)
        if loaded.step == config.train.steps:  # stage B must not make this worse
            figures = measure(loaded, shards, config).as_json()
            run.update_summary({"held_out_before": figures, "held_out_before_step": loaded.step})
        del loaded  # else it stays on the device while the phases train
    run.say("Stage B, steps by phase: " + ", ".join(f"{span.name} {span.section.steps}" for span in spans(config)))
    result = train_stage_b(config, run, shards, callbacks=callbacks, mirror=mirror)
    run.update_summary({"stage_b": {"step": result.step, "seconds": result.seconds}})


def _finished(config: Config, run: RunFolder) -> bool:
    """Whether the checkpoint of the last step exists and is complete. Earlier checkpoints are not verified."""
    # After a signal in the last step its checkpoint exists, but its validation and the summary do not.
    return _reached(run, "stage_a", config.train.steps)


def _reached(run: RunFolder, stage: str, step: int) -> bool:
    if stage not in run.summary():
        return False
    last = [path for path in list_checkpoints(run.checkpoints) if step_of(path) >= step]
    return bool(last) and newest_whole_checkpoint(run.checkpoints) in last


def _after_training(run: RunFolder, shards: ShardSet, device: torch.device, watcher: AttachedWatcher) -> None:
    loaded = load_trained(run.path, device)
    if run.summary().get("held_out_step") != loaded.step:
        run.say(f"Evaluating step {loaded.step} on held-out text")
        figures = measure(loaded, shards, loaded.config)
        run.update_summary({"held_out": figures.as_json(), "held_out_step": loaded.step})
        run.say(held_out_table(figures))
        summary = run.summary()
        if before := summary.get("held_out_before"):
            run.say(f"Bits per byte before (step {summary.get('held_out_before_step', 0)}) and after:")
            run.say("\n".join(text_table(changes(before, figures.as_json()))))
    if (
        isinstance(loaded, Loaded)
        and loaded.config.reasoning is not None
        and spans(loaded.config)
        and run.summary().get("mechanisms_step") != loaded.step
    ):
        mechanisms = evaluate_stage_b(load_stage_b(loaded), loaded.config, loaded.tokenizer, run.say)
        run.update_summary({"mechanisms": mechanisms, "mechanisms_step": loaded.step})
    _export(run, shards, loaded, device)
    text = "".join(piece for _, piece in generate(loaded.model, loaded.tokenizer, [SAMPLE_PROMPT], [SAMPLE]))
    run.update_summary({"sample": {"prompt": SAMPLE_PROMPT, "text": text}})
    run.say(f"Sample:\n{SAMPLE_PROMPT}{text}\n")
    watcher.finish()
    log_evaluations(run, loaded.config)
    write_report(run)
    run.update_summary({"finished": True})
    run.say(f"Report: {run.report}")


def _export(run: RunFolder, shards: ShardSet, last: Loaded | LoadedForeign, device: torch.device) -> None:
    """Exports the checkpoint that the configuration asks for, with its own figures on held-out text."""
    average = last.config.export.average
    chosen, reason = choose_checkpoint(run, last.config.export.checkpoint, average=average)
    if chosen.step == last.step and average == 1:
        chosen = last
    chosen.model.to(device)
    if not _is_exported(run, chosen.step, average):
        run.say(f"Exporting step {chosen.step}, {reason}")
        row = shards.valid.read(0, min(chosen.config.data.row_length, shards.valid.tokens)).tolist()
        summary = run.summary()
        if chosen is not last:
            figures = measure(chosen, shards, chosen.config).as_json()
            summary |= {"held_out": figures, "held_out_step": chosen.step}
        sessions: list[Path] = []
        if isinstance(chosen, LoadedForeign):
            write = export_adapters if _adapters_alone(chosen, None) else export_foreign
            write(chosen, run.export, summary=summary, held_out_row=row, replace=True)
        else:
            sessions = _demonstrate(chosen, run)
            export_model(chosen, run.export, summary=summary, held_out_row=row, replace=True, attachments=sessions)
        same = "the same logits" if _adapters_alone(chosen, None) else "the same logits bit for bit"
        run.say(f"Exported to {run.export}: read back, {same}")
        if sessions:
            _answers_the_same(run)
    sizes = [path.stat().st_size for path in run.export.iterdir()]
    facts = {"path": run.export.name, "step": chosen.step, "reason": reason, "files": len(sizes), "bytes": sum(sizes)}
    run.update_summary({"export": facts | ({"average": average} if average > 1 else {})})


def _demonstrate(loaded: Loaded, run: RunFolder) -> list[Path]:
    """Shows a model of stage B whose token memory reads text at work. Returns the session file to export."""
    reasoning = loaded.config.reasoning
    if reasoning is None or reasoning.agent.tokens or not reasoning.phases.train_on("imitation", "policy"):
        return []
    run.session.unlink(missing_ok=True)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        run.say(line)

    answers = demonstrate(loaded, session=run.session, say=say)
    run.update_summary({"demonstration": {"lines": lines, "answers": list(answers)}})
    return [run.session]


def _answers_the_same(run: RunFolder) -> None:
    """Raises ExportMismatchError if the exported model with the exported memory gives another answer than before."""
    loaded = load_model(run.export)
    answers = Session.load(loaded, run.export / run.session.name).answer()
    before = run.summary()["demonstration"]["answers"]
    if list(answers) != before:
        raise ExportMismatchError(f"the exported model with its memory answers {list(answers)}, the original {before}")
    run.say("The exported model with its memory gives the same answer")


def _is_exported(run: RunFolder, step: int, average: int) -> bool:
    """Whether export/ of the run has the complete model of that step, and the average of so many checkpoints.

    If the export must be replaced, the reason is printed.
    """
    if not run.export.exists():
        return False
    exported = exported_step(run.export)
    if run.summary().get("export", {}).get("average", 1) != average:
        run.say(f"{run.export} is not of export.average={average}. It is exported again")
        return False
    if exported != step:
        run.say(f"{run.export} has the model of step {exported}, not of step {step}. It is exported again")
        return False
    try:
        verify(run.export)
    except CheckpointError as error:
        run.say(f"{error}. It is exported again")
        return False
    return True


def export_to(
    model: Path, out: Path | None, checkpoint: str | None = None, lora: Literal["merge", "adapter"] | None = None
) -> Path:
    """Exports the model of a run or checkpoint folder to `out`, or to export/ in its run folder.

    checkpoint: of a run, instead of export.checkpoint in its configuration. lora: instead of its export.lora. With
    lora="merge" `model` may also be a folder of exported adapters.
    Raises ConfigError if another process is working on the run and `out` is None, and if `lora` is given for a model
    without adapters.
    """
    if (model / SUMS).is_file():
        if lora == "merge" and out is not None and (model / ADAPTERS).is_file():
            loaded = load_trained(model)
            assert isinstance(loaded, LoadedForeign)
            return export_foreign(loaded, out)
        raise CheckpointError(f"{model} is already an exported model")
    run = RunFolder.open(run_of(model).path)
    target = out or run.export
    if target.exists():
        raise ConfigError(f"{target} exists; an export is never overwritten: name another folder with --out")
    loaded = _to_export(model, checkpoint)
    with contextlib.nullcontext() if out else run.locked():
        adapters_alone = _adapters_alone(loaded, lora)
        if isinstance(loaded, LoadedForeign):
            return (export_adapters if adapters_alone else export_foreign)(loaded, target, summary=run.summary())
        return export_model(loaded, target, summary=run.summary())


def _adapters_alone(loaded: Loaded | LoadedForeign, wanted: Literal["merge", "adapter"] | None) -> bool:
    """Whether the adapters of a model are exported without their base. wanted: instead of export.lora."""
    if isinstance(loaded, LoadedForeign) and loaded.adapters:
        return (wanted or loaded.config.export.lora) == "adapter"
    if wanted is not None:
        raise ConfigError(f"--{wanted} works only with a model that was trained with adapters (model.lora)")
    return False


def export_rwkv(model: Path, out: Path, checkpoint: str | None = None) -> Path:
    """Writes the model of a run, checkpoint or export folder to a .pth file for the `rwkv` package.

    checkpoint: of a run, instead of export.checkpoint in its configuration.
    Raises ConfigError with all reasons if the model is not a pure RWKV-7.
    """
    loaded = _to_export(model, checkpoint)
    section = loaded.config.cdrmix_model  # refuses a model of transformers
    assert isinstance(loaded, Loaded)
    return export_official_rwkv7(section, loaded.model.state_dict(), out)


def _to_export(model: Path, checkpoint: str | None) -> Loaded | LoadedForeign:
    """The model to export. For a run it prints the chosen checkpoint and the reason on standard error."""
    if not is_run(model):
        if checkpoint is not None:
            raise ConfigError(f"--checkpoint selects one of a run folder; {model} is one model")
        return load_trained(model)
    run = RunFolder.open(model, writes=False)
    export = Config.from_yaml(run.config_snapshot).export
    loaded, reason = choose_checkpoint(run, checkpoint or export.checkpoint, average=export.average)
    to_standard_error(f"Exporting step {loaded.step}, {reason}")
    return loaded
