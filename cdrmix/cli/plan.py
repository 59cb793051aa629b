"""`cdrmix plan`: memory, operations, time and disk of a training."""

from __future__ import annotations

import argparse
import json
import sys

from cdrmix.cli.arguments import positive_integer
from cdrmix.cli.commands import Commands
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.gpus import GPUS
from cdrmix.training import launch


def add(commands: Commands) -> None:
    text = "estimate memory, operations, time and disk of a training; if it does not fit, suggest settings that do"
    plan = commands.add_with_config("plan", run, text)
    plan.add_argument(
        "--gpu",
        choices=[*(gpu.key for gpu in GPUS), "cpu"],
        help="plan for this device (default: the device that run.device selects on this machine)",
    )
    plan.add_argument(
        "--gpus", type=positive_integer, default=1, metavar="N", help="number of devices, one process each (default 1)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table; unknown values are null")


def run(options: argparse.Namespace) -> int:
    return print_plan(Config.from_yaml(options.config, options.overrides), options.gpu, options.gpus, options.json)


def print_plan(config: Config, gpu: str | None, processes: int, as_json: bool) -> int:
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
