"""The commands of the command line: each takes the parsed options and returns the exit code.

Each imports the packages it needs itself, so that `cdrmix --help` does not import PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.training import launch


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
    from cdrmix.plan.parameters import count_parameters, parameter_table

    config = Config.from_yaml(options.config, options.overrides)
    print(parameter_table(config, count_parameters(config.model, config.reasoning)))
    return 0


def eval(options: argparse.Namespace) -> int:
    from cdrmix.run_folder import finite
    from cdrmix.workflow import evaluate_model, held_out_table

    if options.tasks is not None:
        return eval_tasks(options)
    for name in ("lengths", "count", "seed", "plot"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for --tasks; name some, for example --tasks recall")
    held_out = evaluate_model(options.model, options.config, options.overrides, device=_device(options))
    print(json.dumps(finite(vars(held_out)), indent=2, allow_nan=False) if options.json else held_out_table(held_out))
    return 0


def eval_tasks(options: argparse.Namespace) -> int:
    from cdrmix.workflow import evaluate_tasks

    if options.config or options.overrides:
        raise ConfigError("a configuration says what held-out text is; questions need none: leave it out with --tasks")
    if options.plot is not None and (options.plot.suffix != ".png" or not options.plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {options.plot}: name a file FILE.png in a folder that exists")
    scores = evaluate_tasks(
        options.model,
        options.tasks,
        options.lengths or [1024, 4096],
        count=options.count or 50,
        seed=1 if options.seed is None else options.seed,
        device=_device(options),
    )
    if options.plot is not None:
        from cdrmix.durable import write_atomically
        from cdrmix.report.plots_tasks import draw_scores

        write_atomically(options.plot, draw_scores(scores, title=str(options.model)))
    print(json.dumps(scores.as_json(), indent=2, allow_nan=False) if options.json else scores.table())
    return 0


def generate(options: argparse.Namespace) -> int:
    from cdrmix.inference.sampling import Sampling
    from cdrmix.inference.text_model import load

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
    pieces = load(options.model, device=_device(options)).stream(options.prompt, sampling)
    _show_every_character()
    print(options.prompt, end="", flush=True)
    for _, piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


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
    from cdrmix.reason.demo import demonstrate
    from cdrmix.workflow import load_alone

    _show_every_character()
    demonstrate(
        load_alone(options.model, _device(options)),
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
        print(export_rwkv(options.model, options.rwkv, options.checkpoint))
    else:
        print(export_to(options.model, options.out, options.checkpoint))
    return 0


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
