"""`cdrmix gate`: judges a run by gates with confidence bounds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cdrmix.cli.arguments import PRESETS, positive_number
from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "judge a run by gates with confidence bounds, and write the evidence; exit code 14 failed, 15 undecided"
    sub = commands.add("gate", run, text)
    sub.add_argument("--model", required=True, type=Path, metavar="RUN", help="a run folder, or export/ of a run")
    sub.add_argument("--preset", required=True, choices=PRESETS, help="which gates and thresholds (docs/gates.md)")
    text = "the exported model (default: export/ of the run)"
    sub.add_argument("--export", type=Path, metavar="FOLDER", help=text)
    text = "output of `cdrmix eval --suite A --json` for this model"
    sub.add_argument("--results", type=Path, nargs="+", action="extend", default=[], metavar="FILE.json", help=text)
    text = "output of `cdrmix ladder forecast --json` for this rung; the gate band is then required"
    sub.add_argument("--forecast", type=Path, metavar="FILE.json", help=text)
    text = "planned speed of all processes (default: that of cdrmix plan, or of the steps that are trained again)"
    sub.add_argument("--tokens-per-second", type=positive_number, metavar="X", help=text)
    text = "a gate of an installed package (entry point of the group cdrmix.gates); may be repeated"
    sub.add_argument("--gate", action="append", default=[], dest="gates", metavar="NAME", help=text)
    text = "pass whatever the gates say, and record the reason (exit code 0)"
    sub.add_argument("--lenient", metavar="REASON", help=text)
    measure = sub.add_mutually_exclusive_group()
    text = "train 20 steps again, and 20 from a checkpoint, and compare the bits (default for full and production)"
    measure.add_argument("--measure", action="store_true", default=None, dest="measure", help=text)
    text = "do not train; what was not measured before is NOT_MEASURED"
    measure.add_argument("--no-measure", action="store_false", default=None, dest="measure", help=text)
    text = "sign the evidence with this private key of ssh"
    sub.add_argument("--sign", type=Path, metavar="KEY", help=text)
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    from cdrmix.ladder.gate_text import judgement_json, judgement_text
    from cdrmix.ladder.judgement import judge
    from cdrmix.ladder.verdict import refuse

    judgement = judge(
        options.model,
        options.preset,
        export=options.export,
        results=options.results,
        forecast=options.forecast,
        tokens_per_second=options.tokens_per_second,
        custom_gates=options.gates,
        lenient=options.lenient,
        measure=options.measure,
        sign_with=options.sign,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    shown = judgement_json(judgement)
    print(json.dumps(shown, indent=2, allow_nan=False) if options.json else judgement_text(judgement))
    refuse(judgement.preset, judgement.outcome, judgement.stopping, judgement.lenient)
    return 0
