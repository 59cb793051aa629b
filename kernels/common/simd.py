"""Vectors of 8 float32 for numba loops in which LLVM does not find the register blocking by itself.

Numba keeps accumulators that are arrays in memory; these vectors stay in registers. Arrays are passed as addresses, and
indices count floats. The caller keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from cdrmix.kernels.common.cpu import compile_cached

SIMD_WIDTH = 8  # one AVX register, two of NEON's
LINE = 16  # floats of a cache line

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, SIMD_WIDTH)


class _Vector(types.Type):
    """Numba's type of 8 float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="float32x8")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _pointer(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    element = builder.gep(builder.inttoptr(base, _FLOAT.as_pointer()), [index])
    return builder.bitcast(element, kind.as_pointer())


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * SIMD_WIDTH)


def _shuffle(builder: Any, x: Any, y: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def _splat(builder: Any, scalar: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return _shuffle(builder, vector, vector, [0] * SIMD_WIDTH)


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once where the processor has such an instruction."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{SIMD_WIDTH}f32"
    )
    return builder.call(function, [x, y, z])


def _load8(builder: Any, base: Any, index: Any) -> Any:
    return builder.load(_pointer(builder, base, index, _VECTOR), align=4)


def _store8(builder: Any, base: Any, index: Any, x: Any) -> None:
    builder.store(x, _pointer(builder, base, index, _VECTOR), align=4)


@intrinsic
def load(_context: Any, base: Any, index: Any) -> Any:
    """The floats [index, index + 8) at an address."""
    return _vector(types.int64, types.int64), lambda context, builder, signature, at: _load8(builder, *at)


@intrinsic
def store(_context: Any, base: Any, index: Any, x: Any) -> Any:
    """Stores x to the floats [index, index + 8) at an address."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        _store8(builder, *at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _vector), generate


@intrinsic
def prefetch(_context: Any, base: Any, index: Any) -> Any:
    """Prefetches the cache line of the float at index; the address may be invalid."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        pointer = _pointer(builder, base, index, ir.IntType(8))
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # for reading, into the L1 cache, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[flag.type for flag in flags]])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def spread(_context: Any, base: Any, index: Any) -> Any:
    """The float at index, 8 times."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        return _splat(builder, builder.load(_pointer(builder, base, index, _FLOAT), align=4))

    return _vector(types.int64, types.int64), generate


@intrinsic
def number(_context: Any, base: Any, index: Any) -> Any:
    """The float at index."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        return builder.load(_pointer(builder, base, index, _FLOAT), align=4)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def put(_context: Any, base: Any, index: Any, x: Any) -> Any:
    """Stores x to the float at index."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index, x = at
        builder.store(x, _pointer(builder, base, index, _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def integer(_context: Any, base: Any, index: Any) -> Any:
    """The int64 at index."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        return builder.load(builder.gep(builder.inttoptr(base, index.type.as_pointer()), [index]))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def zero(_context: Any) -> Any:
    return _vector(), lambda context, builder, signature, none: _constant(0.0)


def _of_two(operation: str) -> Any:
    """The intrinsic of an operation of LLVM on two vectors."""

    @intrinsic
    def compute(_context: Any, x: Any, y: Any) -> Any:
        return _vector(_vector, _vector), lambda context, builder, signature, xy: getattr(builder, operation)(*xy)

    return compute


times, plus, minus, over = map(_of_two, ("fmul", "fadd", "fsub", "fdiv"))


@intrinsic
def larger(_context: Any, x: Any, y: Any) -> Any:
    """The larger number; x where one of them is NaN."""

    def generate(context: Any, builder: Any, signature: Any, xy: Any) -> Any:
        x, y = xy
        return builder.select(builder.fcmp_ordered("<", x, y), y, x)

    return _vector(_vector, _vector), generate


@intrinsic
def root(_context: Any, x: Any) -> Any:
    """The square root, rounded correctly."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{SIMD_WIDTH}f32")
        return builder.call(function, arguments)

    return _vector(_vector), generate


@intrinsic
def same(_context: Any, x: Any) -> Any:
    """The float x, 8 times."""
    return _vector(types.float32), lambda context, builder, signature, arguments: _splat(builder, *arguments)


@intrinsic
def fused(_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z."""
    return _vector(_vector, _vector, _vector), lambda context, builder, signature, xyz: _fused(builder, *xyz)


@intrinsic
def exponential(_context: Any, x: Any) -> Any:
    """e^x to 2 units in the last place; the value of e^-87 below -87.

    x = n ln 2 + f with |f| <= ln(2) / 2, and the result is 2^n times a polynomial in f. The bits do not depend
    on an element's position in a tensor. The C library's exp takes one float at a time.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        for bound, beyond in ((-87.0, "<"), (88.0, ">")):  # NaN compares false and stays
            x = builder.select(builder.fcmp_ordered(beyond, x, _constant(bound)), _constant(bound), x)
        shift = _constant(1.5 * 2**23)  # x + shift is rounded to an integer, which is in the low bits
        shifted = _fused(builder, x, _constant(1.4426950408889634), shift)
        n = builder.fsub(shifted, shift)
        f = _fused(builder, n, _constant(-0.693359375), x)  # ln 2 in two parts; n times the first part is exact
        f = _fused(builder, n, _constant(2.12194440e-4), f)
        p = _constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):  # Taylor; the first omitted term is f^8 / 8! < 6e-9
            p = _fused(builder, p, f, _constant(1 / divisor))
        integers = ir.VectorType(ir.IntType(32), SIMD_WIDTH)
        exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * SIMD_WIDTH))
        power = builder.add(exponent, ir.Constant(integers, [127 << 23] * SIMD_WIDTH))
        return builder.fmul(p, builder.bitcast(power, _VECTOR))

    return _vector(_vector), generate


@intrinsic
def zero_below(_context: Any, x: Any, y: Any) -> Any:
    """y, but 0 where x < -87, below which `exponential` is constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y = arguments
        return builder.select(builder.fcmp_ordered("<", x, _constant(-87.0)), _constant(0.0), y)

    return _vector(_vector, _vector), generate


@intrinsic
def row_sums(_context: Any, base: Any, index: Any) -> Any:
    """The sums of 8 rows of 8 floats, by 14 shuffles and 7 additions."""

    def generate(context: Any, builder: Any, signature: Any, at: Any) -> Any:
        base, index = at
        rows = [_load8(builder, base, builder.add(index, index.type(8 * i))) for i in range(8)]
        for _ in range(2):
            rows = [
                builder.fadd(
                    _shuffle(builder, x, y, [0, 2, 8, 10, 4, 6, 12, 14]),
                    _shuffle(builder, x, y, [1, 3, 9, 11, 5, 7, 13, 15]),
                )
                for x, y in zip(rows[::2], rows[1::2], strict=True)
            ]
        low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        return builder.fadd(_shuffle(builder, rows[0], rows[1], low), _shuffle(builder, rows[0], rows[1], high))

    return _vector(types.int64, types.int64), generate


@intrinsic
def transpose(_context: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, step: Any) -> Any:
    """Copies the transpose of an 8 x 8 block with rows `stride` floats apart to rows `step` floats apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, stride, target, to, step = arguments
        rows = [_load8(builder, source, builder.add(at, builder.mul(stride, at.type(i)))) for i in range(8)]
        for distance in (4, 2, 1):  # swap the off-diagonal blocks of size 4, then 2, then 1
            for i in range(8):
                if i & distance:
                    continue
                x, y = rows[i], rows[i + distance]
                low = [lane if not lane & distance else 8 + lane - distance for lane in range(8)]
                high = [lane + distance if not lane & distance else 8 + lane for lane in range(8)]
                rows[i], rows[i + distance] = _shuffle(builder, x, y, low), _shuffle(builder, x, y, high)
        for i, row in enumerate(rows):
            _store8(builder, target, builder.add(to, builder.mul(step, to.type(i))), row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def tile(outputs: int, vectors: int) -> Any:
    """Compiles a tile of a product, whose sums stay in registers: `outputs` sums for each of 8 `vectors` lanes.

        y[o, n] = sum_i w[o, i] x[i, n], in the order of i, from y[o, n] if `begun` is not 0, else from 0

    So the bits of a sum depend neither on the size of the tile nor on its place in it. The function's arguments: x at
    its first lane and the distance of its rows; w at its first output, the distances of its outputs and of its inputs;
    the number of inputs; y, whose rows are as far apart as those of x; begun.
    """

    @intrinsic
    def product(
        _context: Any, x: Any, stride: Any, w: Any, per_output: Any, per_input: Any, inputs: Any, y: Any, begun: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, stride, w, per_output, per_input, inputs, y, begun = arguments
            integers = stride.type
            lanes = [integers(SIMD_WIDTH * v) for v in range(vectors)]
            rows = [builder.mul(stride, integers(o)) for o in range(outputs)]
            begins = builder.icmp_signed("!=", begun, integers(0))
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in lanes] for _ in rows]
            for row, sums_o in zip(rows, sums, strict=True):
                for lane, total in zip(lanes, sums_o, strict=True):
                    before = _load8(builder, y, builder.add(row, lane))
                    builder.store(builder.select(begins, before, _constant(0.0)), total)
            with cgutils.for_range(builder, inputs) as step:
                at = builder.mul(step.index, stride)
                values = [_load8(builder, x, builder.add(at, lane)) for lane in lanes]
                weights = builder.mul(step.index, per_input)
                for o, sums_o in enumerate(sums):
                    place = builder.add(weights, builder.mul(per_output, integers(o)))
                    weight = _splat(builder, builder.load(_pointer(builder, w, place, _FLOAT), align=4))
                    for value, total in zip(values, sums_o, strict=True):
                        builder.store(_fused(builder, value, weight, builder.load(total)), total)
            for row, sums_o in zip(rows, sums, strict=True):
                for lane, total in zip(lanes, sums_o, strict=True):
                    _store8(builder, y, builder.add(row, lane), builder.load(total))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


def loop(function: Callable[..., None]) -> Any:
    """Compiles a loop on first use and keeps it on disk; it runs without the interpreter's lock."""
    return compile_cached(function, {"nogil": True})


def part(function: Callable[..., Any]) -> Any:
    """Compiles a function that loops call, without checks for a division by zero."""
    return njit(function, nogil=True, error_model="numpy")


@njit(nogil=True)
def copy(source, at, target, to, count):  # type: ignore[no-untyped-def]
    """Copies `count` floats, a multiple of 8."""
    for i in range(0, count, SIMD_WIDTH):
        store(target, to + i, load(source, at + i))


@njit(nogil=True)
def fill(source, target, to, count):  # type: ignore[no-untyped-def]
    """Sets `count` floats, a multiple of 8, to the first float of `source`."""
    for i in range(0, count, SIMD_WIDTH):
        store(target, to + i, spread(source, 0))


@njit(nogil=True)
def prefetch_span(address, at, count):  # type: ignore[no-untyped-def]
    for i in range(0, count, LINE):
        prefetch(address, at + i)
