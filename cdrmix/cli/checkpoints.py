"""`cdrmix checkpoints`: lists, verifies, prunes and mirrors the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cdrmix.cli.arguments import positive_integer
from cdrmix.cli.commands import Commands, Run
from cdrmix.errors import CheckpointError


def add(commands: Commands) -> None:
    actions = commands.group(
        "checkpoints", "list, verify and remove the checkpoints of a run, and copy them to a second store"
    )

    def of_run(name: str, command: Run, text: str) -> argparse.ArgumentParser:
        sub = actions.add(name, command, text)
        sub.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a run in a mirror")
        return sub

    text = "print step, tokens, size, held-out figure, the reasons to keep it, whether it is complete and in run.mirror"
    of_run("list", list_, text).add_argument("--json", action="store_true", help="print JSON instead of a table")
    text = "read every file and compare it with its hash; exit code 5 if one is damaged or missing"
    of_run("verify", verify, text)
    text = "remove the checkpoints that no rule keeps; the best, queued ones and the only complete one always stay"
    prune_ = of_run("prune", prune, text)
    prune_.add_argument(
        "--keep-last", type=positive_integer, metavar="N", help="periodic ones to keep (default: train.keep_last)"
    )
    text = "keep that of each N-th step (default: train.keep_every)"
    prune_.add_argument("--keep-every", type=positive_integer, metavar="N", help=text)
    prune_.add_argument("--dry-run", action="store_true", help="print what would be removed; remove nothing")
    text = "copy to a second store what it lacks: checkpoints, and what is needed to resume from them"
    mirror_ = of_run("mirror", mirror, text)
    mirror_.add_argument("--to", type=Path, metavar="FOLDER", help="the second store (default: run.mirror)")


def list_(options: argparse.Namespace) -> int:
    from cdrmix.training.management import list_run, table

    found = list_run(options.run)
    if options.json:
        facts = {"metric": found.metric, "mirror": found.mirror and str(found.mirror)}
        shown = facts | {"checkpoints": [info.as_json() for info in found.infos]}
        print(json.dumps(shown, indent=2, allow_nan=False))
    elif found.infos:
        print(table(found))
    else:
        print(f"{options.run} has no checkpoints", file=sys.stderr)
    return 0


def verify(options: argparse.Namespace) -> int:
    from cdrmix.training.management import verify_run

    count, problems = verify_run(options.run)
    if problems:
        print("\n".join(problems))
        return CheckpointError.exit_code
    print(f"{count} checkpoint(s): all files match their hashes")
    return 0


def prune(options: argparse.Namespace) -> int:
    from cdrmix.training.management import prune_run, pruned_text

    pruned = prune_run(options.run, keep_last=options.keep_last, keep_every=options.keep_every, dry=options.dry_run)
    print(pruned_text(pruned, dry=options.dry_run))
    return 0


def mirror(options: argparse.Namespace) -> int:
    from cdrmix.training.management import mirror_run

    path, copied = mirror_run(options.run, options.to)
    for checkpoint in copied:
        print(f"copied {checkpoint.name}")
    print(path)
    return 0
