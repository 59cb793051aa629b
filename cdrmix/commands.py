"""The commands of the command line: each takes the parsed options and returns the exit code.

Each imports the packages it needs itself, so that `cdrmix --help` does not import PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from cdrmix.cli_common import choose_checkpoint, chosen_device, show_every_character
from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.errors import ConfigError
from cdrmix.training import launch


def train(options: argparse.Namespace) -> int:
    config = _training(options)
    nodes = launch.Nodes.of(options.nnodes, options.node_rank, options.rendezvous)
    processes = options.nproc * nodes.count
    if options.dry_run:
        if options.resume:
            raise ConfigError("--dry-run plans a new run; remove --resume")
        from cdrmix.data.prepare import open_inputs
        from cdrmix.plan.disk import check_disk

        status = _print_plan(config, None, processes, False)
        check_disk(config, None, lambda text: print(text, file=sys.stderr))
        open_inputs(config)  # a missing input would stop the run too
        _check_start(config, processes)
        return status
    if options.max_restarts and nodes.count > 1:
        raise ConfigError(
            "--max-restarts: allowed on one machine only; on several, let the scheduler start the job again"
        )
    if processes > 1 or options.max_restarts:
        launch.check_processes(config, processes)
        arguments = ["train", *(["--resume", options.resume] if options.resume else [])]
        arguments += ["--traceback"] if options.traceback else []
        given = [] if options.config is None else ["--config", str(options.config)]
        arguments += [*given, *options.overrides]
        status, message = launch.launch(options.nproc, arguments, nodes, restarts=options.max_restarts, config=config)
        if message:
            print(message, file=sys.stderr)
        return status
    from cdrmix.workflow import run_all

    run_all(config, options.resume)
    return 0


def _training(options: argparse.Namespace) -> Config:
    """The configuration to train: of --config, or without it of the run to resume, extended by --extend."""
    if options.extend:
        if options.resume in (None, "auto") or options.config is not None or options.dry_run or options.nnodes > 1:
            raise ConfigError(
                "--extend continues one run with its own configuration, on one machine: use it with --resume RUN, "
                "without --config, --dry-run and --nnodes"
            )
        from cdrmix.training.extension import extend

        config = extend(options.resume, [*options.overrides, *options.extend])
        options.overrides = []  # the run has them now
        return config
    if options.config is not None:
        return Config.from_yaml(options.config, options.overrides)
    if options.resume in (None, "auto"):
        raise ConfigError("--config: needed, the configuration file; only with --resume RUN it may be left out")
    from cdrmix.run_folder import RunFolder

    return Config.from_yaml(RunFolder.open(options.resume).config_snapshot, options.overrides)


def _check_start(config: Config, processes: int = 1) -> None:
    """Checks the weights to start from, and stage B, as far as that needs no prepared text."""
    if config.train.start_from is not None:
        from cdrmix.training.starting import check_start

        check_start(config)
    if config.reasoning is not None:
        from cdrmix.reason.stage_b import check_stage_b

        check_stage_b(config, processes)


def doctor(options: argparse.Namespace) -> int:
    from cdrmix.doctor.report import examine
    from cdrmix.runtime import device_type

    device = device_type(options.device, "--device")
    if options.worker is not None:
        from cdrmix.doctor.parallel import work

        work(options.worker, device)
        return 0
    return 0 if examine(options.folder, device, options.nproc, as_json=options.json) else 1


def data_prepare(options: argparse.Namespace) -> int:
    from cdrmix.data.prepare import prepare

    print(prepare(Config.from_yaml(options.config, options.overrides)).path)
    return 0


def data_inspect(options: argparse.Namespace) -> int:
    from cdrmix.data.inspection import inspect

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    show_every_character()
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
    _check_start(config)
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
        check_gpu(torch.device("cuda", 0), config)
    plan = make_plan(config, machine, processes, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(plan.as_json(), indent=2, allow_nan=False) if as_json else plan_table(plan))
    return ConfigError.exit_code if plan.fits is False else 0


def params(options: argparse.Namespace) -> int:
    from cdrmix.plan.parameters import count_of, parameter_table

    config = Config.from_yaml(options.config, options.overrides)
    print(parameter_table(config, count_of(config)))
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
    choose_checkpoint(options)
    prompts = options.prompt or [""]
    model = load(options.model, device=chosen_device(options))
    show_every_character()
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


def reason_demo(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load_cdrmix
    from cdrmix.reason.demo import demonstrate

    show_every_character()
    choose_checkpoint(options)
    demonstrate(
        load_cdrmix(options.model, chosen_device(options)),
        document=options.document,
        question=options.question,
        chunks=options.chunks,
        number=options.number,
        session=options.session,
        memory=options.memory,
    )
    return 0


def reason_eval(options: argparse.Namespace) -> int:
    from cdrmix.hf.load import load_cdrmix
    from cdrmix.reason.document_evaluation import evaluate_documents, table

    choose_checkpoint(options)
    rows = evaluate_documents(
        load_cdrmix(options.model, chosen_device(options)),
        options.tasks,
        options.lengths,
        count=options.count,
        seed=options.seed,
        mechanisms=options.mechanisms,
        say=lambda line: print(line, file=sys.stderr),
    )
    print(json.dumps([row._asdict() for row in rows], indent=2) if options.json else table(rows))
    return 0


def ablate(options: argparse.Namespace) -> int:
    from cdrmix.reason.experiments.ablation import run, run_folder

    if options.config.is_dir():
        if options.arms is not None:
            raise ConfigError(f"--arms does not work with a folder; name one file of {options.config}")
        outcomes = run_folder(options.config, options.overrides, options.seeds, options.out)
    else:
        outcomes = [run(options.config, options.overrides, options.seeds, options.out, arms=options.arms)]
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def export(options: argparse.Namespace) -> int:
    from cdrmix.workflow import export_rwkv, export_to

    if options.rwkv:
        if options.lora is not None:
            raise ConfigError(f"--{options.lora} does not work with --rwkv")
        print(export_rwkv(options.model, options.rwkv, options.checkpoint))
    else:
        print(export_to(options.model, options.out, options.checkpoint, options.lora))
    return 0


def import_model(options: argparse.Namespace) -> int:
    from cdrmix.hf.import_rwkv import import_rwkv7

    print(import_rwkv7(options.weights, options.tokenizer, options.out))
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
