"""Compiles kernels for GPUs that need not be present, and reads the resources that they use from the compiled object.

As a program: python aot_compile.py ARCHITECTURES PART PARTS ONLY LIST MODULE ... prints a JSON line for every PARTS-th
Build of the modules' LIST(architecture), which is "builds" or "alternatives". It must not run under TRITON_INTERPRET,
where kernels are not compiled.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aot_code
import aot_ir
import aot_time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.errors import TritonError
from triton.runtime.jit import JITFunction

from cdrmix.kernels.common.triton_helpers import Build

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Machine:
    """What an architecture's multiprocessor (AMD: compute unit) holds, and how much of it one program may take."""

    target: GPUTarget
    shared_limit: int  # bytes of one program
    shared: int  # of all resident programs
    reserved: int  # taken by the system for each program
    warps: int
    programs: int


# CUDA programming guide, "Technical Specifications per Compute Capability"; AMD CDNA 3 instruction set, chapter 3.
MACHINES = {
    "sm_80": Machine(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB, KIB, 64, 32),
    "sm_90": Machine(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB, KIB, 64, 32),
    "sm_100": Machine(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB, KIB, 64, 32),
    "gfx942": Machine(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 0, 32, 32),
}
KINDS = {"bf16", "fp16", "fp32", "fp64", "i1", "i8", "u8", "i32", "i64"}
TENSOR_MEMORY = 512  # columns a multiprocessor of sm_100


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One Build compiled for one architecture.

    counts: instructions of one warp by class, weighted by the Build's trips; widths: loads and stores by the bits of a
    thread. loops: number of loops in the code. tensor_flops: of the launch, by its code (0: unknown).
    rival: the estimate that a kernel which spills must beat (0: not determined, or no other launches).
    transposed: products with an operand that some versions of Triton compile wrongly on Hopper (aot_ir.py).
    bounds: estimated microseconds on an H200 by the limiting resource (sm_90 only).
    """

    name: str
    configuration: str
    architecture: str
    warps: int
    stages: int
    programs: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    resident: int
    instructions: int
    counts: dict[str, int]
    widths: dict[str, dict[str, int]]
    loops: int
    trips: tuple[int, ...]
    tensor_flops: int
    flops: int
    bytes: int
    bounds: dict[str, float]
    triton: str
    seconds: float
    transposed: int = 0
    rival: float = 0.0
    error: str = ""

    @property
    def bound(self) -> str:
        """The limiting resource of the estimate; empty without an estimate."""
        return max(self.bounds, key=self.bounds.__getitem__) if self.bounds else ""

    @property
    def time(self) -> float:
        """Estimated microseconds; 0 without an estimate."""
        return max(self.bounds.values(), default=0.0)


def configuration(build: Build) -> str:
    """The narrowest element type, the constants and the variant of a build, in short: `bf16 K64 V64 VARLEN`."""
    pointers = {kind.removeprefix("*") for kind in build.signature.values() if kind.startswith("*")}
    parts = [kind for kind in ("bf16", "fp16", "fp32") if kind in pointers][:1]
    for name, value in build.constants.items():
        if value is True:
            parts.append(name)
        elif value is not False and value is not None:
            parts.append(f"{name}{value}" if isinstance(value, int) else f"{name}={value}")
    return " ".join([*parts, *([build.variant] if build.variant else [])])


def check_arguments(build: Build) -> None:
    """Asserts that signature and constants name every argument of the kernel once, constants among the constexprs."""
    # arg_names and fn exist under the interpreter too, where the kernel is no JITFunction.
    named, taken = sorted([*build.signature, *build.constants]), sorted(build.kernel.arg_names)
    assert named == taken, f"{build.name}: signature and constants name {named}, the kernel takes {taken}"
    annotated = {name for name, kind in inspect.get_annotations(build.kernel.fn).items() if "constexpr" in str(kind)}
    assert annotated <= build.constants.keys(), f"{build.name}: {annotated - build.constants.keys()} are no constants"
    kinds = {kind.removeprefix("*") for kind in build.signature.values()}
    assert kinds <= KINDS, f"{build.name}: {kinds - KINDS} are no types of arguments"


def compile_triton(build: Build, architecture: str) -> CompiledKernel:
    """Compiles the kernel as a launch does, with pointers to aligned tensors and no knowledge of the integers.

    A launch compiles again where an integer is 1 or a multiple of 16, unless the kernel's do_not_specialize names it.
    That code, which knows more, is not compiled here.
    """
    assert isinstance(build.kernel, JITFunction), "under TRITON_INTERPRET kernels are not compiled; see compile_all"
    check_arguments(build)
    names = build.kernel.arg_names
    attributes = {
        (names.index(argument),): [["tt.divisibility", 16]]
        for argument, kind in build.signature.items()
        if kind.startswith("*")
    }
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    source = ASTSource(build.kernel, signature, build.constants, attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    return triton.compile(source, target=MACHINES[architecture].target, options=options)


def compile_build(build: Build, architecture: str) -> Compiled:
    """Compiles the build and reads the resources that it uses."""
    started = time.perf_counter()
    kernel = compile_triton(build, architecture)
    seconds = time.perf_counter() - started
    machine = MACHINES[architecture]
    if machine.target.backend == "cuda":
        code, registers, stack, static = _read_cubin(kernel.asm["cubin"])
        static = max(static - machine.reserved, 0) if architecture != "sm_80" else static
        stores, loads = aot_code.spilled_bytes(code)
    else:
        code, registers, stack, stores, loads, static = _read_amdgcn(kernel.asm["amdgcn"])
    weight = aot_code.weights(code, build.trips)
    shared = max(kernel.metadata.shared, static)
    resident = occupancy(
        architecture, registers, shared, build.num_warps, tensor_memory=getattr(kernel.metadata, "tmem_size", 0)
    )
    tensor = sum(aot_code.tensor_flops(one.opcode) * times for one, times in zip(code, weight, strict=True))
    bounds = {}
    if architecture == "sm_90":
        bounds = aot_time.estimate(
            code,
            weight,
            build.trips,
            programs=build.programs,
            num_warps=build.num_warps,
            moved=build.bytes,
            resident=max(resident, 1),
        )
    return Compiled(
        name=build.name,
        configuration=configuration(build),
        architecture=architecture,
        warps=build.num_warps,
        stages=build.num_stages,
        programs=build.programs,
        registers=registers,
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        shared=shared,
        resident=resident,
        instructions=sum(weight),
        counts=aot_code.count_classes(code, weight),
        widths={
            kind: {str(bits): count for bits, count in aot_code.count_widths(code, weight, kind).items()}
            for kind in ("global_load", "global_store", "shared_load", "shared_store")
        },
        loops=len(aot_code.find_loops(code)),
        trips=build.trips,
        tensor_flops=tensor * build.num_warps * build.programs,
        flops=build.flops,
        bytes=build.bytes,
        bounds={name: round(value, 2) for name, value in bounds.items()},
        triton=triton.__version__,
        seconds=round(seconds, 2),
        transposed=len(aot_ir.transposed_operands(kernel.asm["ttgir"])) if architecture == "sm_90" else 0,
    )


def occupancy(architecture: str, registers: int, shared: int, num_warps: int, *, tensor_memory: int = 0) -> int:
    """How many programs a multiprocessor holds at once: the least of what each resource allows; 0 if none fits."""
    machine = MACHINES[architecture]
    if machine.target.backend == "cuda":
        # A quarter of the 64 Ki registers belongs to each scheduler, which allots them to its warps 256 at a time.
        per_scheduler = 16384 // (-(-registers // 8) * 8 * 32)
    else:
        per_scheduler = min(8, 512 // (-(-max(registers, 1) // 8) * 8))
    fits = [
        machine.programs,
        min(machine.warps, 4 * per_scheduler) // num_warps,
        machine.shared // max(shared + machine.reserved, 1),
    ]
    if tensor_memory:
        fits.append(TENSOR_MEMORY // tensor_memory)
    return min(fits)


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cubin(cubin: bytes) -> tuple[list[aot_code.Instruction], int, int, int]:
    """Instructions, registers a thread, stack bytes a thread, static shared bytes (with those of the system)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _output(_tool("nvdisasm"), "-c", "-hex", file.name)
        usage = _output(_tool("cuobjdump"), "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found, usage
    return aot_code.parse_sass(sass), int(found[1]), int(found[2]), int(found[3])


def _read_amdgcn(text: str) -> tuple[list[aot_code.Instruction], int, int, int, int, int]:
    """Instructions, registers (accumulators included), scratch bytes a thread, spilled bytes out and in, LDS bytes."""
    fields = {name: int(value) for name, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    code = aot_code.parse_amdgcn(text)
    stores, loads = aot_code.spilled_bytes(code)
    # A register may be spilled to an accumulator register, without scratch: 4 bytes of it count as stored too.
    stores = max(stores, 4 * fields["vgpr_spill_count"])
    return (
        code,
        fields["vgpr_count"],
        fields["private_segment_fixed_size"],
        stores,
        loads,
        fields["group_segment_fixed_size"],
    )


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


def load(module: str) -> ModuleType:
    """A module by its dotted name, or by the path of its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, module
    assert spec.loader is not None, module
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded  # inspect needs it to find a kernel's source
    spec.loader.exec_module(loaded)
    return loaded


def compile_all(
    modules: list[str], architectures: tuple[str, ...], *, only: str = "", processes: int = 2, builds: str = "builds"
) -> Iterator[Compiled]:
    """Compiles every build of the modules for every architecture, in child processes; yields them as they are done.

    builds: "builds", the shipped launches, or "alternatives", other launches, where a module has them.
    only: a regular expression that must match in the build's name and configuration. A build that does not compile has
    an `error`.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    lines: queue.Queue[str | int] = queue.Queue()

    def run(part: int) -> None:
        command = [sys.executable, __file__, ",".join(architectures), str(part), str(processes), only]
        command += [builds, *modules]
        with tempfile.TemporaryFile("w+") as complaints:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
            ) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    lines.put(line)
            complaints.seek(0)
            if child.returncode:
                lines.put(f"compiling ended with {child.returncode}:\n{complaints.read()[-4000:]}")
        lines.put(part)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(processes)]
    for thread in threads:
        thread.start()
    going = processes
    failure = ""
    while going:
        line = lines.get()
        if isinstance(line, int):
            going -= 1
        elif line.startswith("{"):
            fields = json.loads(line)
            yield Compiled(**(fields | {"trips": tuple(fields["trips"])}))
        else:
            failure += line
    for thread in threads:
        thread.join()
    if failure:
        raise RuntimeError(failure)


def main() -> None:
    """Compiles this process's part; see the module's docstring."""
    architectures, part, parts, only, builds, *modules = sys.argv[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    number = 0
    for module in modules:
        loaded = load(module)
        for architecture in architectures.split(","):
            for build in getattr(loaded, builds, lambda _: [])(architecture):
                if not re.search(only, f"{build.name} {configuration(build)}"):
                    continue
                number += 1
                if number % int(parts) != int(part):
                    continue
                print(
                    f"{build.name} {configuration(build)} for {architecture}", file=sys.stderr
                )  # if it crashes, which
                print(json.dumps(dataclasses.asdict(_compile_or_say(build, architecture))))


def _compile_or_say(build: Build, architecture: str) -> Compiled:
    try:
        return compile_build(build, architecture)
    except (TritonError, RuntimeError) as error:
        empty: dict[str, Any] = {
            field.name: {"int": 0, "float": 0.0, "str": "", "tuple[int, ...]": ()}.get(str(field.type), {})
            for field in dataclasses.fields(Compiled)
        }
        told = {
            "name": build.name,
            "configuration": configuration(build),
            "architecture": architecture,
            "warps": build.num_warps,
            "stages": build.num_stages,
            "triton": triton.__version__,
            "error": _told(error),
        }
        return Compiled(**(empty | told))


def _told(error: BaseException) -> str:
    """An error and its cause: Triton's error gives the position in the kernel, its cause the reason."""
    because = f"\nbecause of {_told(error.__cause__)}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {str(error)[-1000:]}{because}"


if __name__ == "__main__":
    main()
