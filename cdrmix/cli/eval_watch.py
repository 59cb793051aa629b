"""`cdrmix eval watch`: suites on the checkpoints of a run while it is trained."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.arguments import name_list, positive_integer
from cdrmix.cli.commands import Commands
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError


def add(commands: Commands) -> None:
    text = "measure suites on the checkpoints of a run while it is trained, in processes of low priority"
    watch = commands.add("eval watch", run, text)
    watch.set_defaults(config=None)  # takes overrides
    watch.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    text = "suites, such as code (default: evaluation.suites of the run); evaluation.samples=5 sets another key"
    watch.add_argument("--suite", type=name_list, metavar="A,B", help=text)
    watch.add_argument("--once", action="store_true", help="evaluate the newest checkpoint that is there, and end")
    watch.add_argument("--parent", type=positive_integer, help=argparse.SUPPRESS)  # the training that started it


def run(options: argparse.Namespace) -> int:
    """Returns exit code 1 if the evaluation of a suite has failed."""
    from cdrmix.run_folder import RunFolder
    from cdrmix.watch.watcher import keep_results, watch

    folder = RunFolder.open(options.run.absolute())
    given = [f"evaluation.suites=[{', '.join(options.suite)}]"] if options.suite else []
    others = [word for word in options.overrides if not word.startswith("evaluation.")]
    if others:
        raise ConfigError(f"{others[0]}: `eval watch` takes only keys of the section evaluation")
    config = Config.from_yaml(folder.config_snapshot, [*given, *options.overrides])
    succeeded = watch(
        folder, config, once=options.once, parent=options.parent, say=lambda text: print(text, flush=True)
    )
    if options.parent is None:
        keep_results(folder)
    return 0 if succeeded else 1
