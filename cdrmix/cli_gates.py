"""The arguments of the commands `gate` and `evidence`, and the commands."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cdrmix.cli_common import positive_number, time_with_zone

PRESETS = ("quick", "standard", "full", "production")


def add_gate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`gate` judges a run; `evidence verify` checks an export that was judged."""
    text = "judge a run by gates with confidence bounds, and write the evidence; exit code 14 failed, 15 undecided"
    sub = subparsers.add_parser("gate", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=gate, name="gate")
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

    text = "verify exported models that were judged, and remove old evidence"
    evidence = subparsers.add_parser("evidence", help=text, description=text, allow_abbrev=False)
    actions = evidence.add_subparsers(dest="action", required=True, metavar="COMMAND")
    text = (
        "verify that an export has the files that were judged, and print the outcome; exit code 5 for a changed, "
        "missing or added, 10 for other files than those that were judged, 14 or 15 if gates stopped the run"
    )
    verify = actions.add_parser("verify", help=text, description=text, allow_abbrev=False)
    verify.set_defaults(command=evidence_verify, name="evidence verify")
    verify.add_argument("export", type=Path, metavar="EXPORT", help="the folder of the exported model")
    text = "require signatures of these keys; the file is that of ssh-keygen(1), ALLOWED SIGNERS"
    verify.add_argument("--allowed-signers", type=Path, metavar="FILE", help=text)
    text = "require evidence of this preset; may be repeated"
    verify.add_argument("--require-preset", action="append", default=[], choices=PRESETS, metavar="NAME", help=text)
    text = "require that this evidence (without --require-preset: all) is of this time or later: 2026-03-01T12:00Z"
    verify.add_argument("--not-before", type=time_with_zone, metavar="TIME", help=text)
    text = "remove the evidence of a preset from an export and its SHA256SUMS; that of the run is kept"
    remove = actions.add_parser("remove", help=text, description=text, allow_abbrev=False)
    remove.set_defaults(command=evidence_remove, name="evidence remove")
    remove.add_argument("export", type=Path, metavar="EXPORT", help="the folder of the exported model")
    remove.add_argument("--preset", required=True, choices=PRESETS, help="the preset of the evidence")


def gate(options: argparse.Namespace) -> int:
    """`cdrmix gate`."""
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


def evidence_verify(options: argparse.Namespace) -> int:
    """`cdrmix evidence verify`. The exit code is that of the worst judgement in the export."""
    from cdrmix.ladder.evidence import verify_evidence
    from cdrmix.ladder.gate_text import evidence_text
    from cdrmix.ladder.verdict import refuse

    found = verify_evidence(
        options.export, options.allowed_signers, required=options.require_preset, not_before=options.not_before
    )
    print("\n".join(map(evidence_text, found)))
    for each in sorted(found, key=lambda each: each.exit_code):  # 14 before 15
        refuse(each.preset, each.outcome, each.stopping, each.lenient)
    return 0


def evidence_remove(options: argparse.Namespace) -> int:
    """`cdrmix evidence remove`."""
    from cdrmix.ladder.evidence import remove_evidence

    for path in remove_evidence(options.export, options.preset):
        print(f"removed {path}")
    return 0
