"""`cdrmix ablate`: small models with a mechanism on and off."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.arguments import name_list, seed_list
from cdrmix.cli.commands import Commands
from cdrmix.errors import ConfigError


def add(commands: Commands) -> None:
    text = "train small models with a mechanism on and off, and print a comparison; of a folder, for each of its files"
    ablate = commands.add_with_config("ablate", run, text)
    ablate.add_argument("--seeds", type=seed_list, metavar="1,2,3", help="seeds to run (default: those of the file)")
    ablate.add_argument("--arms", type=name_list, metavar="A,B", help="arms to run (default: all)")
    ablate.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the results (default: experiments/ablations)"
    )


def run(options: argparse.Namespace) -> int:
    from cdrmix.reason.experiments.ablation import run as run_file
    from cdrmix.reason.experiments.ablation import run_folder

    if options.config.is_dir():
        if options.arms is not None:
            raise ConfigError(f"--arms does not work with a folder; name one file of {options.config}")
        outcomes = run_folder(options.config, options.overrides, options.seeds, options.out)
    else:
        outcomes = [run_file(options.config, options.overrides, options.seeds, options.out, arms=options.arms)]
    return 0 if all(outcome.holds for outcome in outcomes) else 1
