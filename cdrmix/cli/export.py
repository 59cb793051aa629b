"""`cdrmix export`: the model of a run as a read-only folder with checksums."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.arguments import add_checkpoint, add_model
from cdrmix.cli.commands import Commands
from cdrmix.errors import ConfigError


def add(commands: Commands) -> None:
    export = commands.add("export", run, "write the model of a run to a read-only folder with checksums")
    add_model(export)
    add_checkpoint(export, "the run's export.checkpoint")
    where = export.add_mutually_exclusive_group()
    text = "folder to create (default: export/ in the run folder; a finished run has it already)"
    where.add_argument("--out", type=Path, metavar="PATH", help=text)
    where.add_argument(
        "--rwkv", type=Path, metavar="OUT.pth", help="write a pure RWKV-7 model for the rwkv package instead"
    )
    form = export.add_mutually_exclusive_group()
    text = "of a model with adapters: the base with the adapters merged into it (default: the run's export.lora)"
    form.add_argument("--merge", action="store_const", const="merge", dest="lora", help=text)
    text = "of a model with adapters: the adapters alone, as peft reads them"
    form.add_argument("--adapter", action="store_const", const="adapter", dest="lora", help=text)


def run(options: argparse.Namespace) -> int:
    from cdrmix.workflow import export_rwkv, export_to

    if options.rwkv:
        if options.lora is not None:
            raise ConfigError(f"--{options.lora} does not work with --rwkv")
        print(export_rwkv(options.model, options.rwkv, options.checkpoint))
    else:
        print(export_to(options.model, options.out, options.checkpoint, options.lora))
    return 0
