"""`cdrmix evidence`: verifies exported models that were judged, and removes old evidence."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.arguments import PRESETS, time_with_zone
from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "verify exported models that were judged, and remove old evidence"
    actions = commands.group("evidence", text)
    text = (
        "verify that an export has the files that were judged, and print the outcome; exit code 5 for a changed, "
        "missing or added, 10 for other files than those that were judged, 14 or 15 if gates stopped the run"
    )
    verify = actions.add("verify", run_verify, text)
    verify.add_argument("export", type=Path, metavar="EXPORT", help="the folder of the exported model")
    text = "require signatures of these keys; the file is that of ssh-keygen(1), ALLOWED SIGNERS"
    verify.add_argument("--allowed-signers", type=Path, metavar="FILE", help=text)
    text = "require evidence of this preset; may be repeated"
    verify.add_argument("--require-preset", action="append", default=[], choices=PRESETS, metavar="NAME", help=text)
    text = "require that this evidence (without --require-preset: all) is of this time or later: 2026-03-01T12:00Z"
    verify.add_argument("--not-before", type=time_with_zone, metavar="TIME", help=text)
    text = "remove the evidence of a preset from an export and its SHA256SUMS; that of the run is kept"
    remove = actions.add("remove", run_remove, text)
    remove.add_argument("export", type=Path, metavar="EXPORT", help="the folder of the exported model")
    remove.add_argument("--preset", required=True, choices=PRESETS, help="the preset of the evidence")


def run_verify(options: argparse.Namespace) -> int:
    """Returns the exit code of the worst judgement in the export."""
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


def run_remove(options: argparse.Namespace) -> int:
    from cdrmix.ladder.evidence import remove_evidence

    for path in remove_evidence(options.export, options.preset):
        print(f"removed {path}")
    return 0
