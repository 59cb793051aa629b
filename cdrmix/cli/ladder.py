"""`cdrmix ladder`: compares the rungs of a ladder, climbs it, shows its state, forecasts losses."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cdrmix.cli.arguments import check_writable, name_list, positive_integer, share, write_file
from cdrmix.cli.commands import Commands
from cdrmix.errors import ConfigError
from cdrmix.gpus import GPUS

if TYPE_CHECKING:
    from cdrmix.config.schema_ladder import Ladder
    from cdrmix.ladder.runner import PipelineRunner

EPILOG = "Arguments of the form ladder.key=value override keys of the ladder file. Example: ladder.gates=standard"


def add(commands: Commands) -> None:
    """`ladder` prints a table, and has commands of its own."""
    text = "compare the rungs of a ladder of models: parameters, operations, tokens, memory, learning rate, hours"
    ladder = commands.add("ladder", compare, text)
    text = "families of configs/ladder to print (default dense,hybrid; there is micro too)"
    ladder.add_argument("--families", type=name_list, default=["dense", "hybrid"], metavar="A,B", help=text)
    text = "a configuration to print instead of the families; may be repeated"
    ladder.add_argument("--config", action="append", type=Path, dest="configs", metavar="YAML", help=text)
    ladder.add_argument(
        "--gpu", choices=[gpu.key for gpu in GPUS], default="h200", help="GPU of the hours (default h200)"
    )
    text = "MFU: operations of the model as a share of the bf16 peak of the GPU (default 0.4)"
    ladder.add_argument("--mfu", type=share, default=0.4, metavar="X", help=text)
    text = "tokens of a row (default: those of each rung)"
    ladder.add_argument("--row-length", type=positive_integer, metavar="N", help=text)
    text = "rule for learning rate and batch (default: that of each rung)"
    ladder.add_argument("--hyperparameters", choices=["step-law", "svend"], help=text)
    text = "tokens of the training for each parameter (default: that of each rung)"
    ladder.add_argument("--tokens-per-parameter", type=positive_integer, metavar="N", help=text)
    ladder.add_argument("--json", action="store_true", help="print JSON instead of a table")
    actions = Commands(ladder, "ladder ", required=False)
    _add_run_and_status(actions)
    text = (
        "forecast the held-out loss of a rung from smaller ones, and judge the measured loss; exit code 1 if it is "
        "outside of the band, or with too few rungs"
    )
    sub = actions.add("forecast", forecast, text)
    text = (
        "table, CSV or JSON lines: compute (operations of the training), loss (nats per token; empty for a rung that "
        "is not trained yet), and optionally name, seed, parameters, tokens; lines of one name are seeds of one rung; "
        "or the folder of a ladder"
    )
    sub.add_argument("losses", type=Path, metavar="FILE", help=text)
    sub.add_argument("--rung", metavar="NAME", help="rung to forecast (default: that with the most operations)")
    sub.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the forecast as a picture too")
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_run_and_status(actions: Commands) -> None:
    """Adds the two commands to those of `cdrmix ladder`."""
    text = (
        "train the rungs of a ladder in turn: forecast, train, evaluate, gates, promote; the same command continues a "
        "ladder that was stopped; exit code 14 if a gate fails, 15 if gates are undecided"
    )
    climb = actions.add("run", run, text, epilog=EPILOG)
    _which(climb, required=True)
    climb.add_argument("--up-to", metavar="RUNG", help="the last rung to train (default: all), such as 500m")
    text = "print what each rung costs and what the ledger says of it, and stop; nothing is written"
    climb.add_argument("--dry-run", action="store_true", help=text)
    text = "promote rungs whatever their gates say; the ledger records the reason"
    climb.add_argument("--lenient", metavar="REASON", help=text)
    text = "sign the evidence of each rung with this private key of ssh"
    climb.add_argument("--sign", type=Path, metavar="KEY", help=text)
    text = "processes of the training on this machine (default 1)"
    climb.add_argument("--nproc", type=int, default=1, metavar="N", help=text)

    text = "verify the ledger of a ladder and the files that it records, and print the state of each rung"
    show = actions.add("status", status, text, epilog=EPILOG)
    show.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the folder of the ladder")
    _which(show, required=False)
    show.add_argument("--json", action="store_true", help="print JSON instead of a table")


def compare(options: argparse.Namespace) -> int:
    from cdrmix.gpus import gpu_by_key
    from cdrmix.ladder.comparison import RUNG_FAMILIES, comparison_json, comparison_table, rung_files
    from cdrmix.ladder.comparison import compare as compare_rungs

    unknown = [name for name in options.families if name not in RUNG_FAMILIES]
    if unknown:
        raise ConfigError(f"--families: found {unknown[0]!r}; allowed: {', '.join(RUNG_FAMILIES)}")
    given = {
        "data.row_length": options.row_length,
        "train.hyperparameters": options.hyperparameters,
        "train.tokens_per_parameter": options.tokens_per_parameter,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    gpu = gpu_by_key(options.gpu)
    assert gpu is not None, f"the parser allows only known GPUs, not {options.gpu}"
    rungs = compare_rungs(options.configs or rung_files(options.families), overrides, gpu, options.mfu)
    show = comparison_json if options.json else comparison_table
    shown = show(rungs, gpu, options.mfu)
    print(shown if isinstance(shown, str) else json.dumps(shown, indent=2, allow_nan=False))
    return 0


def forecast(options: argparse.Namespace) -> int:
    """Returns exit code 0 if the measured loss is inside of the band, or if there is a forecast and no loss yet."""
    from cdrmix.ladder.losses import forecast_of_table
    from cdrmix.ladder.presentation import forecast_json, forecast_picture, forecast_text
    from cdrmix.ladder.verdict import Outcome

    check_writable(options.plot, "--plot", ".png")
    if options.losses.is_dir():
        from cdrmix.ladder.state import forecast_of_ladder

        found = forecast_of_ladder(options.losses, options.rung)
    else:
        found = forecast_of_table(options.losses, options.rung)
    print(json.dumps(forecast_json(found), indent=2, allow_nan=False) if options.json else forecast_text(found))
    if options.plot is not None:
        write_file(options.plot, "--plot", forecast_picture(found))
    return 0 if found.verdict in (None, Outcome.PASS) else 1


def run(options: argparse.Namespace) -> int:
    """Returns 0 if every rung that was asked for is promoted; otherwise the exit code of the gates."""
    from cdrmix.ladder.runner import AGAIN, PipelineRunner

    if options.nproc < 1:
        raise ConfigError(f"--nproc must be an integer of at least 1; found {options.nproc}")
    ladder = _ladder_or_file(options)
    runner = PipelineRunner(
        ladder,
        options.overrides if isinstance(ladder, Path) else (),
        lenient=options.lenient,
        sign_with=options.sign,
        processes=options.nproc,
        say=_say,
    )
    if options.dry_run:
        return _dry_run(runner, options.up_to)
    try:
        result = runner.run(options.up_to)
    except KeyboardInterrupt:
        print(f"Interrupted; {AGAIN}.", file=sys.stderr)
        raise
    print(result.report)
    return result.exit_code


def _dry_run(runner: PipelineRunner, up_to: str | None) -> int:
    from cdrmix.gpus import gpu_by_key
    from cdrmix.ladder.comparison import comparison_table
    from cdrmix.ladder.ladder_report import status_text
    from cdrmix.ladder.ledger import Ledger
    from cdrmix.ladder.rungs import GPU, MFU, rung_named

    gpu = gpu_by_key(GPU)
    assert gpu is not None
    names = [rung.name for rung in runner.rungs]
    last = len(names) if up_to is None else names.index(rung_named(up_to, names, "--up-to")) + 1
    print(comparison_table([rung.figures for rung in runner.rungs[:last]], gpu, MFU))
    print()
    print(status_text(Ledger(runner.root), runner.states()[:last]))
    return 0


def status(options: argparse.Namespace) -> int:
    """Returns 0 if the ledger and the files that it records are whole."""
    from cdrmix.ladder.ladder_report import status_json, status_text
    from cdrmix.ladder.ledger import HEAD, LEDGER, Ledger
    from cdrmix.ladder.rungs import read_ladder
    from cdrmix.ladder.state import check_states, rung_states

    if options.folder is not None:
        if options.config or options.family or options.overrides:
            raise ConfigError("give a folder, --config or --family: one of the three")
        root = options.folder
    else:
        ladder = _ladder_or_file(options)
        settings = read_ladder(ladder, options.overrides)[0] if isinstance(ladder, Path) else ladder
        root = Path(settings.root).expanduser()
    if not (root / LEDGER).is_file() and not (root / HEAD).is_file():
        raise ConfigError(f"{root} is not the folder of a ladder: it has no {LEDGER}")
    ledger = Ledger(root)
    states = rung_states(ledger)
    check_states(ledger, states)
    print(json.dumps(status_json(states), indent=2, allow_nan=False) if options.json else status_text(ledger, states))
    return 0


def _which(parser: argparse.ArgumentParser, *, required: bool) -> None:
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--config", type=Path, metavar="YAML", help="the ladder file")
    text = "a family of configs/ladder (dense, hybrid, micro) with the default settings, instead of a file"
    which.add_argument("--family", metavar="NAME", help=text)


def _ladder_or_file(options: argparse.Namespace) -> Ladder | Path:
    """The file of --config, or the Ladder of --family with its overrides."""
    from cdrmix.ladder.rungs import ladder_of_family

    if options.config is not None:
        return Path(options.config)
    if options.family is None:
        raise ConfigError("give the folder of a ladder, --config or --family")
    return ladder_of_family(options.family, options.overrides)


def _say(text: str) -> None:
    """Prints progress at once, also where the output is a file."""
    from cdrmix.ladder.presentation import wrapped

    print(wrapped(text), flush=True, file=sys.stdout)
