"""`cdrmix train`: everything, from text to an exported model."""

from __future__ import annotations

import argparse
import sys

from cdrmix.cli.arguments import non_negative_integer, positive_integer
from cdrmix.cli.commands import Commands
from cdrmix.cli.plan import print_plan
from cdrmix.cli.validate import check_start
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.training import launch


def add(commands: Commands) -> None:
    text = "run everything: prepare the text, train, evaluate, export, report"
    train = commands.add_with_config("train", run, text, required=False)
    train.add_argument(
        "--nproc", type=positive_integer, default=1, metavar="N", help="number of processes on this machine"
    )
    text = "start the processes again up to N times after one crashed, was killed, hung or ran out of memory"
    train.add_argument("--max-restarts", type=non_negative_integer, default=0, metavar="N", help=text)
    text = "number of machines; the command is started on each of them, with the same --nproc (default 1)"
    train.add_argument("--nnodes", type=positive_integer, default=1, metavar="N", help=text)
    train.add_argument("--node-rank", type=int, metavar="R", help="the number of this machine, from 0")
    text = "where the processes of all machines meet: a name of machine 0 and a free port of it"
    train.add_argument("--rendezvous", metavar="HOST:PORT", help=text)
    train.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue a run: auto is the newest unfinished run of this configuration; with a path, --config is by "
        "default the configuration of that run",
    )
    text = "with --resume RUN: continue it with this value, such as train.steps=2000; may be repeated"
    train.add_argument("--extend", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = (
        "print the plan of the run on this machine and stop; exit code 2 if it does not fit, 3 if the text is missing"
    )
    train.add_argument("--dry-run", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    config = _training(options)
    nodes = launch.Nodes.of(options.nnodes, options.node_rank, options.rendezvous)
    processes = options.nproc * nodes.count
    if options.dry_run:
        if options.resume:
            raise ConfigError("--dry-run plans a new run; remove --resume")
        from cdrmix.data.prepare import open_inputs
        from cdrmix.plan.disk import check_disk

        status = print_plan(config, None, processes, False)
        check_disk(config, None, lambda text: print(text, file=sys.stderr))
        open_inputs(config)  # a missing input would stop the run too
        check_start(config, processes)
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
