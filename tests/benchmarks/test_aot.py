"""The proof of kernels without a GPU: what it reads from compiled code, what it refuses, and our kernels' builds."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # its files import each other as a script's neighbours
aot: Any = importlib.import_module("aot")
aot_code: Any = importlib.import_module("aot_code")
aot_compile: Any = importlib.import_module("aot_compile")
aot_time: Any = importlib.import_module("aot_time")
sys.path.remove(str(BENCHMARKS))

KERNELS = '''"""Kernels whose use of the machine is known."""
import triton
import triton.language as tl
from cdrmix.kernels.common.triton_helpers import Build


@triton.jit
def add(x, y, z, n, N: tl.constexpr):
    i = tl.arange(0, N)
    sum = tl.load(x + i).to(tl.float32) + tl.load(y + i).to(tl.float32)
    tl.store(z + i, tl.exp2(sum).to(tl.bfloat16))


@triton.jit
def product(x, y, z, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sum = tl.zeros((M, N), tl.float32)
    for step in range(n):
        x_tile = tl.load(x + step * M * K + i[:, None] * K + k[None, :])
        y_tile = tl.load(y + step * K * N + k[:, None] * N + j[None, :])
        sum += tl.dot(x_tile, y_tile)
    tl.store(z + i[:, None] * N + j[None, :], sum.to(tl.bfloat16))


@triton.jit
def back_transposed(x, y, z, n, D: tl.constexpr):
    i = tl.arange(0, D)
    square = i[:, None] * D + i[None, :]
    scores = tl.dot(tl.load(x + square), tl.load(y + square)).to(tl.bfloat16)
    tl.store(z + square, tl.dot(tl.trans(scores), tl.load(y + square)).to(tl.bfloat16))


@triton.jit
def back_straight(x, y, z, n, D: tl.constexpr):
    i = tl.arange(0, D)
    square = i[:, None] * D + i[None, :]
    x_t, y_t = tl.trans(tl.load(x + square)), tl.trans(tl.load(y + square))
    scores = tl.dot(y_t, x_t).to(tl.bfloat16)
    tl.store(z + square, tl.dot(scores, tl.load(y + square)).to(tl.bfloat16))


SIGNATURE = {"x": "*bf16", "y": "*bf16", "z": "*bf16", "n": "i32"}


def of_product(name, M, N, K, num_warps, num_stages):
    constants = {"M": M, "N": N, "K": K}
    return Build(name, product, SIGNATURE, constants, num_warps, num_stages, 10, 0, 1000, trips=(5,))


def builds(architecture):
    found = [
        Build("add", add, SIGNATURE, {"N": 1024}, 4, 1, 10, 0, 1000),
        of_product("product", 64, 64, 64, 4, 1),
    ]
    if architecture == "sm_90":
        found.append(of_product("spills", 64, 128, 16, 1, 1))
        found.append(Build("back_transposed", back_transposed, SIGNATURE, {"D": 64}, 4, 1, 10, 0, 0))
        found.append(Build("back_straight", back_straight, SIGNATURE, {"D": 64}, 4, 1, 10, 0, 0))
    if architecture in ("sm_80", "sm_90"):
        found.append(of_product("too_much_shared", 128, 128, 128, 8, 5))
    return found
'''


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """`compiled(name, architecture)`: a build of KERNELS; those of an architecture are made when one is asked for."""
    path = tmp_path_factory.mktemp("kernels") / "known_kernels.py"
    path.write_text(KERNELS)

    @functools.cache
    def of(architecture: str) -> dict[str, Any]:
        return {one.name: one for one in aot_compile.compile_all([str(path)], (architecture,), processes=1)}

    of(QUICK)
    return lambda name, architecture: of(architecture)[name]


QUICK = "sm_90"  # of the quick tests: it has every kind of build


def each(*architectures: str) -> list[Any]:
    return [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in architectures]


@pytest.mark.parametrize("architecture", each(*aot_compile.MACHINES))
def test_known_kernels(compiled: Callable[[str, str], Any], architecture: str) -> None:
    """1024 elements are eight a thread, one load of 128 bits; AMD's waves are twice as wide."""
    one = compiled("add", architecture)
    assert aot.refusals(one) == []
    lanes = 256 if architecture == "gfx942" else 128
    bits = str(16 * 1024 // lanes)
    assert one.widths["global_load"] == {bits: 2}
    assert one.widths["global_store"] == {bits: 1}
    assert one.counts["mufu"] == 1024 // lanes
    assert (one.shared, one.loops, one.counts["tensor"], one.counts["local"]) == (0, 0, 0, 0)
    assert 8 < one.registers < 64
    assert one.resident >= 8

    product = compiled("product", architecture)
    assert aot.refusals(product) == []
    assert product.loops == 1
    assert product.counts["tensor"] > 0
    assert product.counts["barrier"] > 0
    if architecture != "sm_100":  # whose opcode does not give the shape
        assert product.tensor_flops == 10 * 5 * 2 * 64**3
    assert bool(product.bounds) == (architecture == "sm_90")


def test_a_spill_is_refused(compiled: Callable[[str, str], Any]) -> None:
    one = compiled("spills", "sm_90")
    assert one.spill_stores > 0
    assert one.counts["local"] > 0
    [message] = aot.refusals(one)
    told = "spills (bf16 M64 N128 K16, 1 warps, 1 stages) on sm_90 spills: "
    assert message.startswith(f"{told}{one.spill_stores} bytes stored, {one.spill_loads} loaded")
    assert "the limit is 0" in message


def test_a_spill_is_held_against_the_other_launches(compiled: Callable[[str, str], Any]) -> None:
    """Refused unless it is estimated faster; its bytes count in the estimate as if they went through HBM."""
    one = compiled("spills", "sm_90")
    assert aot.refusals(dataclasses.replace(one, rival=one.time + 0.01)) == []
    [message] = aot.refusals(dataclasses.replace(one, rival=one.time))
    assert f"another launch is estimated at {one.time:.0f} µs, it at {one.time:.0f}" in message
    lanes, programs, moved = 32, 10, 1000
    spilled = (one.spill_stores + one.spill_loads) * 5 * lanes * programs  # all of it in the loop of 5 rounds, at most
    assert moved / aot_time.BANDWIDTH * 1e6 < one.bounds["hbm"] + 0.005
    assert one.bounds["hbm"] <= (moved + spilled) / aot_time.BANDWIDTH * 1e6 + 0.005


def test_a_spill_has_no_rival_without_other_launches(
    compiled: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other launches are those of the same kernel, dtype and constants but for the tiles; the best is the rival."""
    one = dataclasses.replace(compiled("spills", "sm_90"), configuration="bf16 K64 V64 BLOCK_V64 C32 PRECISION=tf32")
    asked = []

    def others(modules: list[str], architectures: tuple[str, ...], *, only: str, builds: str) -> list[Any]:
        asked.append((architectures, only, builds))
        slow = dataclasses.replace(compiled("product", "sm_90"), bounds={"hbm": 9.0})
        return [] if len(asked) == 1 else [one, slow] if len(asked) == 2 else [one]

    monkeypatch.setattr(aot_compile, "compile_all", others)
    assert [judged.rival for judged in aot.judged([one, compiled("product", "sm_90")])] == [0.0, 0.0]
    assert aot.judged([one])[0].rival == 9.0
    assert aot.judged([one])[0].rival == one.time  # where all spill
    [(architectures, only, builds), *_] = asked
    assert (architectures, builds) == (("sm_90",), "alternatives")
    assert re.search(only, "spills bf16 K64 V64 BLOCK_V32 C32 BLOCK_K64 PRECISION=tf32")
    for other in (
        "spills bf16 K64 V64 C64 PRECISION=tf32",
        "spills fp16 K64 V64 C32 PRECISION=tf32",
        "more_spills bf16",
    ):
        assert not re.search(only, other)


def test_a_transpose_in_registers_is_refused_on_hopper(compiled: Callable[[str, str], Any]) -> None:
    """dot(trans(dot(x, y)), y), and the same product worked out as dot(dot(y^T, x^T), y)."""
    [message] = aot.refusals(compiled("back_transposed", "sm_90"))
    assert "has 1 products by wgmma with an operand that is transposed in registers" in message
    assert aot.refusals(compiled("back_straight", "sm_90")) == []


@pytest.mark.parametrize(
    ("architecture", "limit"), [pytest.param("sm_80", 163, marks=pytest.mark.slow), ("sm_90", 227)]
)
def test_too_much_shared_memory_is_refused(compiled: Callable[[str, str], Any], architecture: str, limit: int) -> None:
    one = compiled("too_much_shared", architecture)
    [message] = aot.refusals(one)
    assert message.startswith(f"too_much_shared (bf16 M128 N128 K128, 8 warps, 5 stages) on {architecture} takes ")
    assert f"{one.shared / 1024:.1f} KiB of shared memory; the limit is {limit} KiB" in message


def test_what_does_not_compile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong_kernels.py"
    path.write_text(KERNELS.replace("sum += tl.dot(x_tile, y_tile)", "sum += tl.dot(x_tile, x_tile[:, 0])"))
    [one] = aot_compile.compile_all([str(path)], ("gfx942",), only="^product", processes=1)
    assert one.name == "product"
    assert "does not compile: CompilationError" in aot.refusals(one)[0]


SASS = """
.text.sample:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
                                                                           /* 0x000e300000000800 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;        /* 0x0000000402047981 */
                                                                           /* 0x000ea2000c1e1d00 */
        /*0020*/              @!P0 BRA `(.L_x_2) ;                         /* 0x0000001000e48947 */
                                                                           /* 0x001fea0003800000 */
.L_x_0:
        /*0030*/                   LDSM.16.MT88.4 R8, [R20+0x100] ;        /* 0x000100001408783b */
                                                                           /* 0x000e280000004200 */
        /*0040*/                   HMMA.16816.F32.BF16 R24, R4, R8, R24 ;  /* 0x000000080418723c */
                                                                           /* 0x001fe20000041818 */
.L_x_1:
        /*0050*/                   MUFU.EX2 R12, R12 ;                     /* 0x0000000c000c7308 */
                                                                           /* 0x000e620000000800 */
        /*0060*/                   FFMA R13, R12, R12, R13 ;               /* 0x0000000c0c0d7223 */
                                                                           /* 0x002fe2000000000d */
        /*0070*/               @P1 BRA `(.L_x_1) ;                         /* 0xfffffffc00f41947 */
                                                                           /* 0x000fea000383ffff */
        /*0080*/                   STS.64 [R21], R12 ;                     /* 0x0000000c15007388 */
                                                                           /* 0x000fe20000000a00 */
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;           /* 0x0000000000007b1d */
                                                                           /* 0x000fec0000010000 */
        /*00a0*/               @P2 BRA `(.L_x_0) ;                         /* 0xfffffff400e42947 */
                                                                           /* 0x000fea000383ffff */
.L_x_2:
        /*00b0*/                   STL.64 [R1+0x8], R12 ;                  /* 0x0000080c01007387 */
                                                                           /* 0x0001e40000100a00 */
        /*00c0*/                   LDL R12, [R1+0x8] ;                     /* 0x00000800010c7983 */
                                                                           /* 0x000ea80000100800 */
        /*00d0*/                   STG.E.U16 desc[UR4][R2.64], R12 ;       /* 0x0000000c02007986 */
                                                                           /* 0x004fe2000c101504 */
        /*00e0*/                   EXIT ;                                  /* 0x000000000000794d */
                                                                           /* 0x000fea0003800000 */
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);                          /* 0xfffffffc00fc7947 */
                                                                           /* 0x000fc0000383ffff */
"""


def test_sass_is_read() -> None:
    code = aot_code.parse_sass(SASS)
    assert len(code) == 16
    outer, inner = aot_code.find_loops(code)
    assert (outer.head, sorted(outer.body)) == (3, list(range(3, 11)))
    assert (inner.head, sorted(inner.body)) == (5, [5, 6, 7])
    weight = aot_code.weights(code, (10, 7))
    assert aot_code.count_classes(code, weight) == {
        "tensor": 10,
        "fp32": 70,
        "mufu": 70,
        "global_load": 1,
        "global_store": 1,
        "shared_load": 10,
        "shared_store": 10,
        "local": 2,
        "barrier": 10,
    }
    assert aot_code.count_widths(code, weight, "global_load") == {128: 1}
    assert aot_code.count_widths(code, weight, "global_store") == {16: 1}
    assert aot_code.count_widths(code, weight, "shared_load") == {128: 10}
    assert aot_code.count_widths(code, weight, "shared_store") == {64: 10}
    assert aot_code.spilled_bytes(code) == (8, 4)
    assert aot_code.tensor_flops("HMMA.16816.F32.BF16") == 4096
    assert aot_code.tensor_flops("HGMMA.64x128x16.F32.BF16") * 4 == 2 * 64 * 128 * 16


def test_a_warp_waits_for_what_its_code_says() -> None:
    """A round of the loop takes what its waits add up to, however often it goes round."""
    code = aot_code.parse_sass(SASS)
    stalls = [one.control & 15 for one in code[:3]]
    assert stalls == [8, 1, 5]
    fields = [(one.control >> 5 & 7, one.control >> 11 & 63) for one in code[:5]]
    assert fields == [(0, 0), (2, 0), (7, 1), (0, 0), (7, 1)]  # scoreboard set, scoreboards waited for
    ten, twenty, thirty = (aot_time.chain_cycles(code, (rounds, 1)) for rounds in (10, 20, 30))
    assert thirty - twenty == twenty - ten
    assert 80 < (twenty - ten) / 10 < 120  # loads 30, MUFU 20, barrier 20, and what the instructions themselves hold


def test_amdgcn_is_read() -> None:
    code = aot_code.parse_amdgcn(
        "sample:                                 ; @sample\n; %bb.0:\n\ts_load_dwordx2 s[0:1], s[4:5], 0x0\n"
        ".LBB0_1:                                ; =>This Inner Loop\n\tglobal_load_dwordx4 v[0:3], v4, s[0:1]\n"
        "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]\n\tds_read_b64 v[6:7], v5 offset:16\n"
        "\tv_exp_f32_e32 v8, v8\n\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]\n\ts_cbranch_scc1 .LBB0_1\n"
        "; %bb.2:\n\tglobal_store_short v4, v8, s[0:1]\n\ts_endpgm\n.Lfunc_end0:\n\tv_exp_f32_e32 v8, v8\n"
    )
    [loop] = aot_code.find_loops(code)
    assert sorted(loop.body) == list(range(1, 7))
    weight = aot_code.weights(code, (3,))
    counts = aot_code.count_classes(code, weight)
    assert {kind: count for kind, count in counts.items() if count} == {
        "tensor": 3,
        "fp32": 3,
        "mufu": 3,
        "global_load": 3,
        "global_store": 1,
        "shared_load": 3,
    }
    assert aot_code.count_widths(code, weight, "global_load") == {128: 3}
    assert aot_code.count_widths(code, weight, "shared_load") == {64: 3}
    assert aot_code.count_widths(code, weight, "global_store") == {16: 1}
    assert aot_code.tensor_flops(code[2].opcode) == 2 * 32 * 32 * 8


@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "warps", "programs"),
    [
        ("sm_90", 255, 0, 4, 2),  # 65536 registers / (256 x 128 threads)
        ("sm_90", 168, 0, 8, 1),  # three warps a scheduler, not 3.05
        ("sm_90", 32, 113 * 1024, 4, 2),
        ("sm_90", 32, 114 * 1024, 4, 1),  # the system takes a kibibyte of each
        ("sm_80", 16, 0, 1, 32),
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 64, 40 * 1024, 4, 1),
    ],
)
def test_occupancy(architecture: str, registers: int, shared: int, warps: int, programs: int) -> None:
    assert aot_compile.occupancy(architecture, registers, shared, warps) == programs


def test_the_peer_takes_its_fastest_configuration_that_is_in_order(compiled: Callable[[str, str], Any]) -> None:
    good = compiled("product", "sm_90")
    slow = dataclasses.replace(good, warps=8, bounds={"hbm": good.time + 1})
    fast_but_spilling = dataclasses.replace(good, warps=2, bounds={"hbm": 0.1}, spill_stores=4)
    assert aot.chosen([fast_but_spilling, slow, good]) == [good]
    assert aot.chosen([fast_but_spilling]) == [fast_but_spilling]


def test_passes_are_added_up(compiled: Callable[[str, str], Any]) -> None:
    """A pass is its kernels; fla's backward pass launches those of `both` again and some element-wise work."""

    def one(
        name: str, time: float, configuration: str = "bf16 K64 V64 BLOCK_V64 C32", architecture: str = "sm_90"
    ) -> Any:
        made = {"name": name, "configuration": configuration, "architecture": architecture, "bounds": {"hbm": time}}
        return dataclasses.replace(compiled("product", "sm_90"), **made)

    names = {"wkv7_map": 1.0, "wkv7_map_keys": 2.0, "wkv7_forward": 4.0, "wkv7_backward": 8.0}
    names |= {"wkv7_gradient_values": 10.0, "wkv7_gradient_keys": 6.0}
    ours = [one(name, time) for name, time in names.items()]
    ours += [one("wkv7_map", 99.0, "bf16 K64 V64 BLOCK_V64 C64"), one("wkv7_map", 99.0, architecture="sm_80")]
    assert aot.passes(ours) == {"forward": 5.0, "backward": 24.0, "backward_recompute": 26.0}
    theirs = [one("fla.both.x", 100.0), one("fla.forward.y", 10.0), one("fla.backward.z", 1.0)]
    found = aot.peer_passes(theirs)
    assert found["forward"] == 110.0
    assert found["backward"] == pytest.approx(101 + 4 * 134217728 / 4.3e6, rel=1e-6)


@pytest.mark.parametrize("architecture", aot_compile.MACHINES)
@pytest.mark.parametrize("module", aot.modules())
def test_builds_name_the_kernels_arguments(module: str, architecture: str) -> None:
    builds = importlib.import_module(module).builds(architecture)
    assert builds
    for build in builds:
        aot_compile.check_arguments(build)
        assert min(build.programs, build.flops, build.bytes) > 0
    shipped = [(build.name, aot_compile.configuration(build), build.num_warps) for build in builds]
    assert len(set(shipped)) == len(shipped), "a configuration is listed twice"


@pytest.mark.slow
def test_the_default_kernels_are_in_order_on_hopper() -> None:
    """bfloat16, K = V = 64, at the chunk length that ships: what a model runs. The suite aot has the others.

    Those that spill must be faster, by estimate, than without: than the best that results/aot.jsonl has found.
    """
    wkv7 = importlib.import_module("cdrmix.kernels.rwkv7.triton")
    chunk = wkv7.chunk_sizes(torch.bfloat16, 64, 64)[0]
    only = rf"(bf16|group_scan fp32) (?=.*\bK64\b)(?!.*\bV(32|128)\b)(?!.*\bC(?!{chunk}\b)\d+\b)"
    compiled = list(aot_compile.compile_all(aot.modules(), ("sm_90",), only=only, processes=1))
    assert {one.name for one in compiled} >= {f"wkv7_{kernel}" for kernel in wkv7.KERNELS if kernel != "map_values"}
    lines = (BENCHMARKS / "results" / "aot.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["case"] == "kernel" and row["architecture"] == "sm_90"]
    rivals = {(row["name"], row["configuration"], row["triton"]): row.get("rival", 0.0) for row in rows}
    held = [
        dataclasses.replace(one, rival=rivals.get((one.name, one.configuration, one.triton), 0.0)) for one in compiled
    ]
    assert [message for one in held for message in aot.refusals(one)] == []
