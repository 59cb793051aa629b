"""`cdrmix params`: the parameters of a model, counted without building it."""

from __future__ import annotations

import argparse

from cdrmix.cli.commands import Commands
from cdrmix.config.schema import Config


def add(commands: Commands) -> None:
    commands.add_with_config("params", run, "count stored and active parameters without building the model")


def run(options: argparse.Namespace) -> int:
    from cdrmix.plan.parameters import count_of, parameter_table

    config = Config.from_yaml(options.config, options.overrides)
    print(parameter_table(config, count_of(config)))
    return 0
