"""Checks of the Triton kernels without a GPU: every shipped configuration compiled for four architectures, and a table.

python run.py --suite aot
python aot.py [--architecture NAME ...] [--only REGEX] [--write FOLDER]       a part of it

It refuses (exit code 1) a kernel that does not compile, takes more shared memory than a program may have, has products
that Triton before 3.7.1 compiles wrongly on Hopper (aot_ir.py), or spills registers without an advantage. On sm_90 a
kernel may spill if it is estimated faster than its other launches (its module's `alternatives`) that spill nothing, or
than all others where all spill. On the other architectures there are no estimates, and no kernel may spill. Times are
estimates for an H200 (aot_time.py), of our kernels and of fla-core's where that is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import re
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import aot_compile
import aot_fla
import aot_time
import machine
import torch
from aot_compile import KIB, MACHINES, Compiled
from cases import Case, Options, Result
from rich.console import Console
from rich.table import Table

KERNELS = Path(__file__).parents[1] / "kernels"
SCANNED = "wkv7_group_scan"  # is launched forward and backward


def modules() -> list[str]:
    """The Triton modules of the package: those that define builds(architecture)."""
    return [
        ".".join(("cdrmix.kernels", *path.relative_to(KERNELS).with_suffix("").parts))
        for path in sorted(KERNELS.rglob("*.py"))
        if re.search(r"^def builds\(", path.read_text(), re.MULTILINE)
    ]


def refusals(one: Compiled) -> list[str]:
    """The faults of a compiled kernel, in full sentences; empty if there are none."""
    where = f"{one.name} ({one.configuration}, {one.warps} warps, {one.stages} stages) on {one.architecture}"
    if one.error:
        return [f"{where} does not compile: {one.error}"]
    found = []
    if spills(one) and not 0 < one.time < one.rival:
        limit = (
            f"another launch is estimated at {one.rival:.0f} µs, it at {one.time:.0f}"
            if one.rival
            else "the limit is 0"
        )
        found.append(
            f"{where} spills: {one.spill_stores} bytes stored, {one.spill_loads} loaded, stack {one.stack}; {limit}"
            f" ({one.registers} registers a thread). Smaller tiles or more warps need fewer registers"
        )
    if one.transposed:
        found.append(
            f"{where} has {one.transposed} products by wgmma with an operand that is transposed in registers, which"
            " Triton 3.4 to 3.7.0 compiles wrongly. Two warps have no wgmma; tiles can be loaded as their transposes"
        )
    limit_shared = MACHINES[one.architecture].shared_limit
    if one.shared > limit_shared:
        found.append(
            f"{where} takes {one.shared / KIB:.1f} KiB of shared memory; the limit is {limit_shared // KIB} KiB."
            " Smaller tiles or fewer stages take less"
        )
    if not found and one.resident == 0:
        found.append(f"{where} does not fit: {one.registers} registers a thread in {one.warps} warps")
    return found


def spills(one: Compiled) -> bool:
    """Whether registers go to local memory."""
    return bool(one.spill_stores or one.spill_loads or one.stack)


def judged(compiled: Iterable[Compiled]) -> list[Compiled]:
    """The same kernels; those that spill with their `rival`, if their module has other launches and estimates."""
    return [dataclasses.replace(one, rival=_rival(one)) if spills(one) else one for one in compiled]


def _rival(one: Compiled) -> float:
    """The least estimate of a kernel's other launches that spill nothing, or of all if every one spills; else 0."""
    if not one.bounds:
        return 0.0
    dtype, *parts = one.configuration.split()
    # The alternatives have the same configuration except for their tiles.
    same = "".join(rf"(?=.*\s{re.escape(part)}(\s|$))" for part in parts if not part.startswith("BLOCK_"))
    tried = list(
        aot_compile.compile_all(
            modules(), (one.architecture,), only=rf"^{one.name} {dtype}\b{same}", builds="alternatives"
        )
    )
    spill_free = [other.time for other in tried if not refusals(other)]
    return min(spill_free or [other.time for other in tried if other.bounds and not other.transposed], default=0.0)


def chosen(candidates: Iterable[Compiled]) -> list[Compiled]:
    """For each kernel, the configuration of the least estimate among those without faults, or else among all.

    Where several have the same time by the same bound, the other bounds decide.
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
    """Prints the table, in 110 columns where the output is no terminal."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("kernel", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    table.add_column("target", no_wrap=True)
    for heading in ("wrp", "regs", "spill", "KiB", "fit", "tensor", "fp32", "mufu", "µs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for one in sorted(
        compiled, key=lambda one: (one.name, one.configuration, one.warps, list(MACHINES).index(one.architecture))
    ):
        spilled = one.spill_stores + one.spill_loads or one.stack
        table.add_row(
            re.sub(r"^fla\.|chunk_dplr_|kernel_|_kernel", "", one.name),
            re.sub(r"\b\w+=|GATHER_SUPPORTED", "", one.configuration),  # PRECISION=tf32 is known by its value
            one.architecture,
            str(one.warps),
            str(one.registers),
            f"[red]{spilled}[/]" if spilled else "0",
            f"{one.shared / KIB:.0f}",
            str(one.resident),
            *(_short(one.counts.get(kind, 0)) for kind in ("tensor", "fp32", "mufu")),
            f"{one.time:.0f}" if one.bounds else "",
            "[red]no code[/]" if one.error else one.bound,
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        "regs: a thread. spill: bytes stored and loaded. KiB: shared memory. fit: programs a multiprocessor holds."
        " tensor, fp32, mufu: instructions a warp, loops weighed. µs: estimate, H200, see aot_time.py.\n"
    )


def _short(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 100_000 else str(count)


def prove(architectures: tuple[str, ...], only: str = "") -> tuple[list[Compiled], list[Compiled]]:
    """Compiles and shows our kernels, and fla's for sm_90; prints what is refused on stderr. Returns both."""
    started = time.perf_counter()
    ours = []
    for one in aot_compile.compile_all(modules(), architectures, only=only):
        ours.append(one)
        if len(ours) % 50 == 0:
            print(f"{len(ours)} compiled in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    ours = judged(ours)
    for one in ours:
        for message in refusals(one):
            print(f"refused: {message}", file=sys.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.perf_counter() - started:.0f} s ({used.ru_utime + used.ru_stime:.0f} s of processors)"
    if ours:
        show(ours, f"{len(ours)} compilations in {seconds}, Triton {ours[0].triton}")
    theirs: list[Compiled] = []
    if "sm_90" in architectures and not aot_fla.absent():
        theirs = chosen(aot_compile.compile_all(["aot_fla"], ("sm_90",), only=only))
        if theirs:
            show(theirs, f"fla-core {aot_fla.version()}, chunk_rwkv7 as its layer calls it on an H200")
    return ours, theirs


def passes(ours: list[Compiled]) -> dict[str, float]:
    """Estimated microseconds of the recurrence's passes in bfloat16, K = V = 64, with the shipped chunk length."""
    wkv7 = importlib.import_module("cdrmix.kernels.rwkv7.triton")
    shape = {"bf16", "K64", "V64", f"C{wkv7.chunk_sizes(torch.bfloat16, 64, 64)[0]}"}
    times = {
        one.name: one.time for one in ours if one.architecture == "sm_90" and shape <= set(one.configuration.split())
    }
    gradients = times["wkv7_backward"] + times["wkv7_gradient_values"] + times["wkv7_gradient_keys"]
    return {
        "forward": times["wkv7_map"] + times["wkv7_forward"],
        "backward": gradients,
        "backward_recompute": times["wkv7_map_keys"] + gradients,
    }


def long_row() -> dict[str, float]:
    """Estimated microseconds of both scans of one row of 65,536 tokens: over all its chunks, and in groups of them."""
    found = {"whole": 0.0, "grouped": 0.0}
    for one in aot_compile.compile_all(["cdrmix.kernels.rwkv7.triton"], ("sm_90",), builds="long_rows"):
        found["whole" if one.configuration.endswith("whole") else "grouped"] += one.time * (1 + (one.name == SCANNED))
    return {f"long_row_{name}": round(time, 2) for name, time in found.items()}


def peer_passes(theirs: list[Compiled]) -> dict[str, float]:
    """The same for fla-core, whose backward pass repeats most of the forward pass, with its element-wise work."""
    times: dict[str, float] = {"forward": 0.0, "backward": aot_fla.ELEMENTWISE_BYTES / aot_time.BANDWIDTH * 1e6}
    for one in theirs:
        when = one.name.split(".")[1]
        for name in times:
            times[name] += one.time if when in (name, "both") else 0
    return times


def write(compiled: list[Compiled], folder: Path, *, anew: bool = False) -> None:
    """Writes a line for each to folder/aot.jsonl, replacing those of the same Triton and kernels; anew: all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"suite": "aot", "case": "kernel", "time": now, "commit": machine.commit()}
    path = folder / "aot.jsonl"
    before = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    made = {(one.name, one.architecture, _widths(one.configuration)) for one in compiled}
    kept = []
    for row in before:
        same = row["case"] == "kernel" and row["triton"] == compiled[0].triton
        if same and (anew or (row["name"], row["architecture"], _widths(row["configuration"])) in made):
            continue
        kept.append(row)
    rows = [about | dataclasses.asdict(one) | {"bound": one.bound} for one in compiled]
    with path.open("w", encoding="utf-8") as file:
        for row in (*kept, *rows):
            file.write(json.dumps(row) + "\n")


def _widths(configuration: str) -> str:
    """A configuration without its tiles."""
    return " ".join(part for part in configuration.split() if not part.startswith("BLOCK_"))


def kernels(options: Options) -> Result:
    """The suite's case: everything on every architecture; it replaces all rows of this Triton in results/aot.jsonl."""
    ours, theirs = prove(tuple(MACHINES))
    if options.results is not None:
        write([*ours, *theirs], options.results, anew=True)
    own = passes(ours)
    peer = peer_passes(theirs)
    return Result(
        unit="µs estimated, both passes",
        peer_name=f"fla-core {aot_fla.version()}" if theirs else None,
        ours=[own["forward"] + own["backward"]],
        peer=[sum(peer.values())] if theirs else [],
        figures={
            "refused": sum(bool(refusals(one)) for one in ours),
            "compiled": len(ours),
            **own,
            **long_row(),
            **({f"peer_{name}": time for name, time in peer.items()} if theirs else {}),
        },
        settings={"shape": "B8 T4096 H32 K64 V64 bf16", "gpu": "H200, estimated", "triton": ours[0].triton},
        absent={} if theirs else {"fla-core": aot_fla.absent()},
    )


CASES = {"kernels": Case(kernels, "the kernels compiled for four architectures: spills, shared memory, estimated time")}


def main() -> int:
    """Runs what the arguments name; returns 1 if one of our kernels is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", action="append", choices=list(MACHINES), help="default: all")
    parser.add_argument("--only", default="", help="regular expression of a kernel's name and configuration")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="replace their lines in FOLDER/aot.jsonl")
    arguments = parser.parse_args()
    ours, theirs = prove(tuple(arguments.architecture or MACHINES), arguments.only)
    if arguments.write:
        write([*ours, *theirs], arguments.write)
    return 1 if any(refusals(one) for one in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
