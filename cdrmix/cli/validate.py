"""`cdrmix validate`: checks a configuration, and prints the value of every key."""

from __future__ import annotations

import argparse
import sys

from cdrmix.cli.commands import Commands
from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel


def add(commands: Commands) -> None:
    commands.add_with_config("validate", run, "check a configuration and print the value of every key")


def run(options: argparse.Namespace) -> int:
    from cdrmix.data.prepare import check_names

    config = Config.from_yaml(options.config, options.overrides)
    check_names(config)
    check_start(config)
    print(config.to_yaml(), end="")
    if isinstance(config.model, HuggingFaceModel) and config.model.random is None and config.model.folder is None:
        print(f"model.path: there is no folder {config.model.path}; {config.model.remedy}", file=sys.stderr)
    return 0


def check_start(config: Config, processes: int = 1) -> None:
    """Checks the weights to start from, and stage B, as far as that needs no prepared text."""
    if config.train.start_from is not None:
        from cdrmix.training import starting

        starting.check_start(config)
    if config.reasoning is not None:
        from cdrmix.reason.stage_b import check_stage_b

        check_stage_b(config, processes)
