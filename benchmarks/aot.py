"""Proof of the Triton kernels without a GPU: every shipped configuration compiled for four architectures, and a table.

python aot.py [--architecture NAME ...] [--only REGEX] [--dry]

It refuses (exit code 1) a kernel that does not compile, spills registers, or takes more shared memory than a program
may have. Times are estimates for an H200 (aot_time.py), of ours and of fla-core's kernels where that is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import aot_compile
import aot_fla
from aot_compile import KIB, MACHINES, Compiled
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
KERNELS = HERE.parent / "kernels"
RESULTS = HERE / "results" / "aot.jsonl"


def modules() -> list[str]:
    """The Triton modules: those of the package that define builds(architecture)."""
    return [
        f"cdrmix.kernels.{path.stem}"
        for path in sorted(KERNELS.glob("*.py"))
        if re.search(r"^def builds\(", path.read_text(), re.MULTILINE)
    ]


def refusals(one: Compiled) -> list[str]:
    """What is wrong with a compiled kernel, in full sentences; empty if nothing is."""
    where = f"{one.name} ({one.configuration}, {one.warps} warps, {one.stages} stages) on {one.architecture}"
    if one.error:
        return [f"{where} does not compile: {one.error}"]
    found = []
    if one.spill_stores or one.spill_loads or one.stack:
        found.append(
            f"{where} spills: {one.spill_stores} bytes stored, {one.spill_loads} loaded, stack {one.stack}; the limit"
            f" is 0 ({one.registers} registers a thread). Smaller tiles or more warps need fewer registers"
        )
    limit = MACHINES[one.architecture].shared_limit
    if one.shared > limit:
        found.append(
            f"{where} takes {one.shared / KIB:.1f} KiB of shared memory; the limit is {limit // KIB} KiB."
            " Smaller tiles or fewer stages take less"
        )
    if not found and one.resident == 0:
        found.append(f"{where} does not fit: {one.registers} registers a thread in {one.warps} warps")
    return found


def chosen(candidates: Iterable[Compiled]) -> list[Compiled]:
    """Of each kernel, the configuration of the least estimate among those that nothing is wrong with, else of all.

    Where the same bound gives the same time to several, the other bounds decide.
    """
    kernels: dict[str, list[Compiled]] = {}
    for one in candidates:
        if not one.error:
            kernels.setdefault(one.name, []).append(one)
    return [
        min([one for one in tried if not refusals(one)] or tried, key=lambda one: (one.time, sum(one.bounds.values())))
        for tried in kernels.values()
    ]


def show(compiled: list[Compiled], title: str) -> None:
    """The table, in 110 columns where the output is no terminal."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name, heading in {"kernel": "kernel", "configuration": "configuration", "target": "target"}.items():
        table.add_column(heading, overflow="fold", no_wrap=name == "target")
    for heading in ("wrp", "regs", "spill", "KiB", "fit", "tensor", "fp32", "mufu", "µs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for one in sorted(
        compiled, key=lambda one: (one.name, one.configuration, one.warps, list(MACHINES).index(one.architecture))
    ):
        spilled = one.spill_stores + one.spill_loads or one.stack
        table.add_row(
            re.sub(r"^fla\.|chunk_dplr_|kernel_|_kernel", "", one.name),
            one.configuration,
            one.architecture,
            str(one.warps),
            str(one.registers),
            f"[red]{spilled}[/]" if spilled else "0",
            f"{one.shared / KIB:.0f}",
            str(one.resident),
            *(_short(one.counts.get(kind, 0)) for kind in ("tensor", "fp32", "mufu")),
            f"{one.time:.0f}" if one.bounds else "",
            "[red]does not compile[/]" if one.error else one.bound,
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        "regs: a thread. spill: bytes stored and loaded. KiB: shared memory. fit: programs a multiprocessor holds."
        " tensor, fp32, mufu: instructions a warp, loops weighed. µs: estimate, H200, see aot_time.py.\n"
    )


def _short(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 100_000 else str(count)


def record(compiled: list[Compiled]) -> None:
    """Writes results/aot.jsonl anew: a line for every kernel, configuration and architecture."""
    commit = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty=+changes", "--abbrev=12"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout.strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", encoding="utf-8") as file:
        for one in compiled:
            row = {"suite": "aot", "case": "kernel", "time": now, "commit": commit or "unknown"}
            file.write(json.dumps(row | dataclasses.asdict(one) | {"bound": one.bound}) + "\n")


def prove(
    architectures: tuple[str, ...], only: str = "", *, dry: bool = False
) -> tuple[list[Compiled], list[Compiled]]:
    """Compiles and shows ours, and fla's for sm_90; says on stderr what is refused. Returns both."""
    started = time.perf_counter()
    ours = list(aot_compile.compile_all(modules(), architectures, only=only))
    seconds = time.perf_counter() - started
    if ours:
        show(ours, f"{len(ours)} compilations in {seconds:.0f} s, Triton {ours[0].triton}")
    theirs: list[Compiled] = []
    if "sm_90" in architectures:
        reason = aot_fla.absent()
        if reason:
            print(f"No peer: {reason}.", file=sys.stderr)
        else:
            theirs = chosen(aot_compile.compile_all(["aot_fla"], ("sm_90",)))
            show(theirs, f"fla-core {aot_fla.version()}, chunk_rwkv7 as its layer calls it on an H200")
    for one in ours:
        for message in refusals(one):
            print(f"refused: {message}", file=sys.stderr)
    if not dry:
        record([*ours, *theirs])
    return ours, theirs


def main() -> int:
    """Runs what the arguments name; 1 where a kernel of ours is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", action="append", choices=list(MACHINES), help="default: all")
    parser.add_argument("--only", default="", help="regular expression of a kernel's name and configuration")
    parser.add_argument("--dry", action="store_true", help="leave results/aot.jsonl as it is")
    arguments = parser.parse_args()
    ours, _ = prove(tuple(arguments.architecture or MACHINES), arguments.only, dry=arguments.dry)
    return 1 if any(refusals(one) for one in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
