"""Executes a program of `program.py`: all instructions for a group of rows and a piece of their tokens."""

from __future__ import annotations

from cdrmix.kernels.common.simd import SIMD_WIDTH, copy, integer, loop, number, part, put
from cdrmix.kernels.decode import cpu_adapters, cpu_attention, cpu_experts, cpu_lanes, cpu_time_mix
from cdrmix.kernels.decode.program import (
    ADAPT,
    ADD,
    ANGLES,
    ATTEND,
    EMBED,
    EXPERTS,
    GROUP,
    HEADS,
    KEYS,
    MIX,
    NORM,
    NOTHING,
    OPERANDS,
    PRODUCT,
    RECUR,
    RELU2,
    SHIFT,
    SIGMOID,
    SWIGLU,
    TANH,
)

HEAD = 256  # outputs of the head that are computed at once
WRONG_ID = -1  # what `execute` returns for an id that is not in the vocabulary


@part
def _logits(hidden, head, logits, D, V, columns, outputs, rows, tokens, stride):  # type: ignore[no-untyped-def]
    """logits [rows, V] of each row's last token. Registers: columns [D], outputs [HEAD, lanes] twice."""
    lanes = rows + -rows % SIMD_WIDTH
    for d in range(D):
        for r in range(lanes):
            put(columns, d * stride + r, number(hidden, d * stride + (min(r, rows - 1) + 1) * tokens - 1))
    by_row = outputs + 4 * HEAD * stride
    for first in range(0, V, HEAD):
        count = min(HEAD, V - first)
        cpu_lanes.product(columns, head + 4 * first * D, outputs, D, count, D, 1, 0, lanes, stride)
        cpu_lanes.to_rows(outputs, by_row, count + -count % SIMD_WIDTH, HEAD, lanes, stride)
        whole = count - count % SIMD_WIDTH
        for r in range(rows):
            copy(by_row, r * HEAD, logits, r * V + first, whole)
            for o in range(whole, count):
                put(logits, r * V + first + o, number(by_row, r * HEAD + o))


@part
def _hidden(hidden, out, by_row, D, rows, tokens, apart, lanes, stride):  # type: ignore[no-untyped-def]
    """out: the hidden states [rows, tokens, D], rows `apart` tokens. by_row: a register of D rows."""
    cpu_lanes.to_rows(hidden, by_row, D, D, lanes, stride)
    for n in range(rows * tokens):
        copy(by_row, n * D, out, (n // tokens * apart + n % tokens) * D, D)


@part
def _address(scratch, row, stride):  # type: ignore[no-untyped-def]
    """The address of a register; 0 for none."""
    return 0 if row == NOTHING else scratch + 4 * row * stride


@part
def _weight(weights, place):  # type: ignore[no-untyped-def]
    return 0 if place == NOTHING else integer(weights, place)


@part
def _state(states, place, row):  # type: ignore[no-untyped-def]
    """The address of a state at a row: the table has addresses and the bytes of a row in turns."""
    return integer(states, 2 * place) + row * integer(states, 2 * place + 1)


@part
def _lanes_only(code, weights, constants, scratch, lanes, stride):  # type: ignore[no-untyped-def]
    """Executes an instruction that needs no state and no rows."""
    kind, a, b, c = integer(code, 0), integer(code, 1), integer(code, 2), integer(code, 3)
    d, e, f = integer(code, 4), integer(code, 5), integer(code, 6)
    x = _address(scratch, a, stride)
    if kind == NORM:
        bias = _weight(weights, d)
        y, out = _address(scratch, b, stride), _address(scratch, e, stride)
        epsilon = number(constants, integer(code, 7))
        cpu_lanes.norm(x, y, _weight(weights, c), bias, out, f, epsilon, lanes, stride)
    elif kind == MIX:
        before, out = _address(scratch, b, stride), _address(scratch, d, stride)
        cpu_lanes.mix(x, before, _weight(weights, c), out, e, lanes, stride)
    elif kind == PRODUCT:
        y, begun = _address(scratch, c, stride), integer(code, 8)
        cpu_lanes.product(x, _weight(weights, b), y, d, e, f, integer(code, 7), begun, lanes, stride)
    elif kind == TANH:
        cpu_lanes.tanh(x, b, lanes, stride)
    elif kind == SIGMOID:
        cpu_lanes.sigmoid(x, b, lanes, stride)
    elif kind == RELU2:
        cpu_lanes.relu2(x, b, lanes, stride)
    elif kind == SWIGLU:
        cpu_lanes.swiglu(x, _address(scratch, b, stride), c, d, lanes, stride)
    elif kind == ADD:
        cpu_lanes.add(x, _address(scratch, b, stride), c, lanes, stride)
    elif kind == KEYS:
        first = _address(scratch, e, stride)
        cpu_time_mix.keys(
            x, _address(scratch, b, stride), _address(scratch, c, stride), _address(scratch, d, stride), first,
            _address(scratch, f, stride), _weight(weights, integer(code, 7)), _weight(weights, integer(code, 8)),
            _weight(weights, integer(code, 9)), _weight(weights, integer(code, 10)),
            _weight(weights, integer(code, 11)), _address(scratch, integer(code, 12), stride), integer(code, 13),
            integer(code, 14), number(constants, integer(code, 15)), lanes, stride,
        )  # fmt: skip
    elif kind == GROUP:
        cpu_time_mix.group(
            x, _address(scratch, b, stride), _address(scratch, c, stride), _address(scratch, d, stride),
            _address(scratch, e, stride), _weight(weights, f), _weight(weights, integer(code, 7)),
            _weight(weights, integer(code, 8)), integer(code, 9), integer(code, 10),
            number(constants, integer(code, 11)), lanes, stride,
        )  # fmt: skip
    elif kind == HEADS:
        cpu_attention.heads(
            x, b, c, _weight(weights, d), number(constants, e), _address(scratch, f, stride),
            _address(scratch, integer(code, 7), stride), lanes, stride,
        )  # fmt: skip
    else:
        return False
    return True


@loop
def execute(  # type: ignore[no-untyped-def]
    code, count, weights, states, constants, ids, batch, length, at_once, piece, scratch, stride, scores,
    hidden, D, every, by_row, head, V, columns, outputs, logits,
):  # fmt: skip
    """Reads int64 ids [batch, length], `at_once` rows and `piece` tokens of each at a time; changes the states.

    hidden: the register [D] of the last norm. every, logits: addresses of the hidden states [batch, length, D] and of
    the logits [batch, V] of the last tokens; 0: not wanted. scores: see `cpu_attention.attend`.
    Returns 0, WRONG_ID, or the number of the first router, from 1, whose logits are not finite.
    """
    instruction = 8 * (OPERANDS + 1)
    for first in range(0, batch, at_once):
        rows = min(at_once, batch - first)
        for begun in range(0, length, piece):
            tokens = min(piece, length - begun)
            lanes = rows * tokens
            lanes += -lanes % SIMD_WIDTH
            for number_of in range(count):
                at = code + number_of * instruction
                if _lanes_only(at, weights, constants, scratch, lanes, stride):
                    continue
                kind, a, b, c = integer(at, 0), integer(at, 1), integer(at, 2), integer(at, 3)
                d, e, f = integer(at, 4), integer(at, 5), integer(at, 6)
                x = _address(scratch, a, stride)
                if kind == EMBED:
                    here = ids + 8 * (first * length + begun)
                    if not cpu_lanes.embed(here, _weight(weights, b), x, d, c, rows, tokens, length, lanes, stride):
                        return WRONG_ID
                elif kind == SHIFT:
                    out = _address(scratch, b, stride)
                    cpu_lanes.shift(x, out, _state(states, c, first), d, rows, tokens, lanes, stride)
                elif kind == ANGLES:
                    cpu_attention.angles(
                        x, _address(scratch, b, stride), _state(states, c, 0), _state(states, d, 0), e,
                        _state(states, f, first), begun, rows, tokens, lanes, stride,
                    )  # fmt: skip
                elif kind == RECUR:
                    cpu_time_mix.recur(
                        x, _address(scratch, b, stride), _address(scratch, c, stride), _address(scratch, d, stride),
                        _address(scratch, e, stride), _address(scratch, f, stride),
                        _address(scratch, integer(at, 7), stride), _state(states, integer(at, 8), first),
                        integer(at, 9), integer(at, 10), _address(scratch, integer(at, 11), stride),
                        rows, tokens, lanes, stride,
                    )  # fmt: skip
                elif kind == ATTEND:
                    cpu_attention.attend(
                        x, _address(scratch, b, stride), _address(scratch, c, stride), _address(scratch, d, stride),
                        _state(states, e, first), f, integer(at, 7), integer(at, 8), number(constants, integer(at, 9)),
                        _address(scratch, integer(at, 10), stride), scores, begun, rows, tokens, lanes, stride,
                    )  # fmt: skip
                elif kind == ADAPT:
                    chunk = integer(at, 12)
                    cpu_adapters.adapt(
                        x, _address(scratch, b, stride), _state(states, c, first), _state(states, d, first),
                        _state(states, e, first), (_state(states, f, 0) + begun) % chunk,
                        integer(at, 7), integer(at, 8), integer(at, 9), constants + 4 * integer(at, 10),
                        integer(at, 11), chunk, _weight(weights, integer(at, 13)),
                        _address(scratch, integer(at, 14), stride), rows, tokens, lanes, stride,
                    )  # fmt: skip
                elif kind == EXPERTS:
                    logits_of = _address(scratch, c, stride)
                    chosen = logits_of + 4 * integer(at, 7) * stride
                    if not cpu_experts.choose(
                        logits_of, _weight(weights, d), chosen, integer(at, 7), integer(at, 8), rows * tokens, stride
                    ):
                        return integer(at, 14)
                    cpu_experts.experts(
                        x, _address(scratch, b, stride), chosen, _weight(weights, e), _weight(weights, f),
                        integer(at, 7), integer(at, 9), integer(at, 10), integer(at, 11),
                        _address(scratch, integer(at, 12), stride), _address(scratch, integer(at, 13), stride),
                        chosen + 4 * integer(at, 7) * stride,
                        rows * tokens, lanes, stride,
                    )  # fmt: skip
            last = scratch + 4 * hidden * stride
            if every != 0:
                to = every + 4 * (first * length + begun) * D
                _hidden(last, to, scratch + 4 * by_row * stride, D, rows, tokens, length, lanes, stride)
            if logits != 0 and begun + tokens == length:
                _logits(
                    last, head, logits + 4 * first * V, D, V, scratch + 4 * columns * stride,
                    scratch + 4 * outputs * stride, rows, tokens, stride,
                )  # fmt: skip
    return 0
