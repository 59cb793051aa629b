"""The commands of the command line: each takes the parsed options and returns the exit code.

Each imports the packages it needs itself, so that `cdrmix --help` does not import PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.errors import ConfigError
from cdrmix.training import launch

LENGTHS, COUNT, SEED = (1024, 4096), 50, 1  # defaults of `cdrmix eval --tasks`; the help of cli.py has them
BATCH_SIZE = 8  # default of `cdrmix eval --harness`
SUITE_BATCH_SIZE = 32  # default of `cdrmix eval --suite`
# Options of `cdrmix eval` and the ones of --tasks, --harness and --suite with which they work.
OPTIONS_OF = {
    **dict.fromkeys(("lengths", "count", "plot"), ("tasks",)),
    **dict.fromkeys(("include", "few_shot", "out", "online"), ("harness",)),
    **dict.fromkeys(("batch_size", "max_length"), ("harness", "suite")),
    **dict.fromkeys(("samples", "temperature", "max_new_tokens", "sets", "seconds", "memory"), ("suite",)),
    **dict.fromkeys(("allow_unsafe_execution", "canaries", "policy", "verbatim_tokens"), ("suite",)),
    "seed": ("tasks", "suite"),
    "limit": ("harness", "suite"),
}
EXAMPLES = {"tasks": "recall", "harness": "cdrmix_held_out", "suite": "code"}


def train(options: argparse.Namespace) -> int:
    config = Config.from_yaml(options.config, options.overrides)
    if options.dry_run:
        if options.resume:
            raise ConfigError("--dry-run plans a new run; remove --resume")
        from cdrmix.data.prepare import open_inputs

        status = _print_plan(config, None, options.nproc, False)
        open_inputs(config)  # a missing input would stop the run too
        return status
    if options.nproc > 1:
        launch.check_processes(config, options.nproc)
        arguments = ["train", "--config", str(options.config), *options.overrides]
        arguments += ["--resume", options.resume] if options.resume else []
        arguments += ["--traceback"] if options.traceback else []
        status, message = launch.launch(options.nproc, arguments)
        if message:
            print(message, file=sys.stderr)
        return status
    from cdrmix.workflow import run_all

    run_all(config, options.resume)
    return 0


def data_prepare(options: argparse.Namespace) -> int:
    from cdrmix.data.prepare import prepare

    print(prepare(Config.from_yaml(options.config, options.overrides)).path)
    return 0


def data_inspect(options: argparse.Namespace) -> int:
    from cdrmix.data.inspection import inspect

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _show_every_character()
    for line in inspect(
        options.shards,
        split=options.split,
        row=options.row,
        rows=options.rows,
        domain=options.domain,
        coloured=coloured,
    ):
        print(line)
    return 0


def validate(options: argparse.Namespace) -> int:
    from cdrmix.data.prepare import check_names

    config = Config.from_yaml(options.config, options.overrides)
    check_names(config)
    if config.reasoning is not None:
        from cdrmix.reason.stage_b import check_stage_b

        check_stage_b(config)
    print(config.to_yaml(), end="")
    if isinstance(config.model, HuggingFaceModel) and config.model.random is None and config.model.folder is None:
        print(f"model.path: there is no folder {config.model.path}; {config.model.remedy}", file=sys.stderr)
    return 0


def config(options: argparse.Namespace) -> int:
    from cdrmix.config.reference import reference

    print(reference(options.key), end="")
    return 0


def plan(options: argparse.Namespace) -> int:
    return _print_plan(Config.from_yaml(options.config, options.overrides), options.gpu, options.gpus, options.json)


def _print_plan(config: Config, gpu: str | None, processes: int, as_json: bool) -> int:
    """Returns exit code 0 if the configuration fits or the memory is unknown, 2 if it does not fit."""
    import torch

    from cdrmix.plan.machine import machine_for
    from cdrmix.plan.plan import make_plan, plan_table
    from cdrmix.runtime import check_cpu, check_gpu

    launch.check_processes(config, processes)
    machine = machine_for(config, gpu, processes)
    if machine.platform == "cpu":
        check_cpu(config.train.precision)
    elif machine.at_hand:
        check_gpu(torch.device("cuda", 0), config.train.precision)
    plan = make_plan(config, machine, processes, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(plan.as_json(), indent=2, allow_nan=False) if as_json else plan_table(plan))
    return ConfigError.exit_code if plan.fit.fits is False else 0


def params(options: argparse.Namespace) -> int:
    from cdrmix.plan.parameters import count_of, parameter_table

    config = Config.from_yaml(options.config, options.overrides)
    print(parameter_table(config, count_of(config)))
    return 0


def eval(options: argparse.Namespace) -> int:
    kinds = [kind for kind in EXAMPLES if getattr(options, kind) is not None]
    for name, needed in OPTIONS_OF.items():
        if getattr(options, name) is not None and not set(kinds) & set(needed):
            also = f" or --{needed[1]}" if needed[1:] else ""
            raise ConfigError(
                f"--{name.replace('_', '-')} works only with --{needed[0]}{also}, for example --{needed[0]} "
                f"{EXAMPLES[needed[0]]}"
            )
    if len(kinds) > 1:
        raise ConfigError(
            "--tasks are tasks of cdrmix, --harness are tasks of lm-eval, --suite are suites: name one of the three"
        )
    _choose(options)
    if options.suite is not None:
        return _eval_suites(options)
    if options.tasks is not None:
        return _eval_tasks(options)
    if options.harness is not None:
        return _eval_harness(options)
    from cdrmix.evaluate import evaluate_model, held_out_table
    from cdrmix.run_folder import finite

    held_out = evaluate_model(options.model, options.config, options.overrides, device=_device(options))
    print(
        json.dumps(finite(held_out.as_json()), indent=2, allow_nan=False) if options.json else held_out_table(held_out)
    )
    return 0


def _check_plot(plot: Path | None) -> None:
    if plot is not None and (plot.suffix != ".png" or plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {plot}: name a file FILE.png in a folder that exists")


def _write_plot(plot: Path, picture: bytes) -> None:
    from cdrmix.durable import write_atomically

    try:
        write_atomically(plot, picture)
    except OSError as error:
        raise ConfigError(f"--plot {plot}: cannot be written: {error.strerror}") from error


def _eval_tasks(options: argparse.Namespace) -> int:
    from cdrmix.evaluate import evaluate_tasks

    if options.config or options.overrides:
        raise ConfigError("--tasks does not use a configuration: remove --config and the overrides")
    _check_plot(options.plot)
    scores = evaluate_tasks(
        options.model,
        options.tasks,
        options.lengths or LENGTHS,
        count=options.count or COUNT,
        seed=SEED if options.seed is None else options.seed,
        device=_device(options),
    )
    if options.plot is not None:
        from cdrmix.report.plots_tasks import draw_scores

        _write_plot(options.plot, draw_scores(scores, title=str(options.model)))
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0


def _eval_suites(options: argparse.Namespace) -> int:
    from cdrmix.eval.suites import SuiteOptions
    from cdrmix.evaluate import evaluate_suites

    fields = {
        "seed": options.seed,
        "samples": options.samples,
        "limit": options.limit,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "sets": options.sets,
        "seconds": options.seconds,
        "megabytes": options.memory,
        "allow_unsafe": options.allow_unsafe_execution,
        "canaries": options.canaries,
        "policy": options.policy,
        "verbatim_tokens": options.verbatim_tokens,
    }
    if "leak" not in options.suite:
        for name in ("canaries", "policy", "verbatim_tokens"):
            if fields[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')} works only with --suite leak")
    given = SuiteOptions(**{name: value for name, value in fields.items() if value is not None})
    results = evaluate_suites(
        options.model,
        options.suite,
        options.config,
        options.overrides,
        options=given,
        batch_size=options.batch_size or SUITE_BATCH_SIZE,
        max_length=options.max_length,
        device=_device(options),
    )
    if options.json:
        print(json.dumps([result.as_json() for result in results], indent=2, allow_nan=False))
    else:
        print("\n\n".join(result.table() for result in results))
    return 0


def eval_watch(options: argparse.Namespace) -> int:
    """Returns exit code 1 if the evaluation of a suite has failed."""
    from cdrmix.run_folder import RunFolder
    from cdrmix.watch.watcher import keep_results, watch

    run = RunFolder.open(options.run.absolute())
    given = [f"evaluation.suites=[{', '.join(options.suite)}]"] if options.suite else []
    others = [word for word in options.overrides if not word.startswith("evaluation.")]
    if others:
        raise ConfigError(f"{others[0]}: `eval watch` takes only keys of the section evaluation")
    config = Config.from_yaml(run.config_snapshot, [*given, *options.overrides])
    succeeded = watch(run, config, once=options.once, parent=options.parent, say=lambda text: print(text, flush=True))
    if options.parent is None:
        keep_results(run)
    return 0 if succeeded else 1


def _eval_harness(options: argparse.Namespace) -> int:
    from cdrmix.evaluate import evaluate_harness

    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: name a file in a folder that exists")
    scores = evaluate_harness(
        options.model,
        options.harness,
        options.config,
        options.overrides,
        include=options.include,
        limit=options.limit,
        few_shot=options.few_shot,
        batch_size=options.batch_size or BATCH_SIZE,
        max_length=options.max_length,
        online=bool(options.online),
        device=_device(options),
    )
    if options.out is not None:
        scores.write(options.out)
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0


def generate(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load
    from cdrmix.inference.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        stop=tuple(options.stop),
    )
    _choose(options)
    prompts = options.prompt or [""]
    model = load(options.model, device=_device(options))
    _show_every_character()
    if len(prompts) == options.samples == 1 and not options.json:
        pieces = model.stream(prompts, sampling, speculative=options.speculative)
        print(prompts[0], end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print()
        _show_drafts(model.drafts)
        return 0
    samples = model.sample(prompts, options.samples, sampling, speculative=options.speculative)
    for place, (prompt, texts) in enumerate(zip(prompts, samples, strict=True), 1):
        for number, text in enumerate(texts):
            seed = options.seed + number
            if options.json:
                print(json.dumps({"prompt": prompt, "seed": seed, "text": text}))
            else:
                print(f"--- prompt {place}, seed {seed}\n{prompt}{text}")
    _show_drafts(model.drafts)
    return 0


def _show_drafts(statistics: object | None) -> None:
    """Writes the counts of speculative decoding to standard error; None: it was not used."""
    if statistics is not None:
        print(statistics, file=sys.stderr)


def _choose(options: argparse.Namespace) -> None:
    """Puts the checkpoint of the option --checkpoint, if it is given, in the place of its run in --model."""
    if options.checkpoint is None:
        return
    from cdrmix.inference.choice import of_run

    found = of_run(options.model, options.checkpoint)
    name = "" if found.path == options.model else f" {found.path.name},"
    print(f"Using{name} {found.reason}", file=sys.stderr, flush=True)
    options.model = found.path


def _device(options: argparse.Namespace) -> str | None:
    """The option --device. Raises ConfigError, which names the option, if this machine has no such device."""
    from cdrmix.runtime import device_type

    device: str | None = options.device
    if device is not None:
        device_type(device, "--device")
    return device


def _show_every_character() -> None:
    """Prints a character that the terminal cannot encode as its code; without this, printing would fail midway."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def reason_demo(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load_cdrmix
    from cdrmix.reason.demo import demonstrate

    _show_every_character()
    _choose(options)
    demonstrate(
        load_cdrmix(options.model, _device(options)),
        document=options.document,
        question=options.question,
        chunks=options.chunks,
        number=options.number,
        session=options.session,
        memory=options.memory,
    )
    return 0


def ablate(options: argparse.Namespace) -> int:
    from cdrmix.reason.experiments.ablation import run

    outcome = run(options.config, options.overrides, options.seeds, options.out, arms=options.arms)
    return 0 if outcome.holds else 1


def export(options: argparse.Namespace) -> int:
    from cdrmix.workflow import export_rwkv, export_to

    if options.rwkv:
        if options.lora is not None:
            raise ConfigError(f"--{options.lora} does not work with --rwkv")
        print(export_rwkv(options.model, options.rwkv, options.checkpoint))
    else:
        print(export_to(options.model, options.out, options.checkpoint, options.lora))
    return 0


def ladder(options: argparse.Namespace) -> int:
    from cdrmix.gpus import gpu_by_key
    from cdrmix.ladder.comparison import RUNG_FAMILIES, compare, comparison_json, comparison_table, rung_files

    unknown = [name for name in options.families if name not in RUNG_FAMILIES]
    if unknown:
        raise ConfigError(f"--families: found {unknown[0]!r}; allowed: {', '.join(RUNG_FAMILIES)}")
    given = {
        "data.row_length": options.row_length,
        "train.hyperparameters": options.hyperparameters,
        "train.tokens_per_parameter": options.tokens_per_parameter,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    gpu = gpu_by_key(options.gpu)
    assert gpu is not None, f"the parser allows only known GPUs, not {options.gpu}"
    rungs = compare(options.configs or rung_files(options.families), overrides, gpu, options.mfu)
    show = comparison_json if options.json else comparison_table
    shown = show(rungs, gpu, options.mfu)
    print(shown if isinstance(shown, str) else json.dumps(shown, indent=2, allow_nan=False))
    return 0


def ladder_forecast(options: argparse.Namespace) -> int:
    """Returns exit code 0 if the measured loss is inside of the band, or if there is a forecast and no loss yet."""
    from cdrmix.ladder.losses import forecast_of_table
    from cdrmix.ladder.presentation import forecast_json, forecast_picture, forecast_text
    from cdrmix.ladder.verdict import Outcome

    _check_plot(options.plot)
    if options.losses.is_dir():
        from cdrmix.ladder.state import forecast_of_ladder

        forecast = forecast_of_ladder(options.losses, options.rung)
    else:
        forecast = forecast_of_table(options.losses, options.rung)
    print(json.dumps(forecast_json(forecast), indent=2, allow_nan=False) if options.json else forecast_text(forecast))
    if options.plot is not None:
        _write_plot(options.plot, forecast_picture(forecast))
    return 0 if forecast.verdict in (None, Outcome.PASS) else 1


def compare(options: argparse.Namespace) -> int:
    from cdrmix.compare import compare

    comparison = compare(*options.runs)
    print("\n".join(comparison.lines))
    return 0 if comparison.identical else 1


def report(options: argparse.Namespace) -> int:
    from cdrmix.report.report import write_report
    from cdrmix.run_folder import RunFolder

    print(write_report(RunFolder.open(options.run)))
    return 0
