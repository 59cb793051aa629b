"""The program of a compiled decoding step: the instructions by which a model reads tokens, and their operands.

A program is made once for a model. `cpu.Run` executes it for R rows of T tokens. Every token of the rows is a lane:
lane n = r T + t of [width, lanes] arrays, the registers. One vector instruction computes 8 lanes, so no bit of a lane
depends on the others. What mixes the tokens of a row (token shift, recurrence, attention, fast weights) is computed row
by row.

An operand is a register, by its first row in the scratch memory; a weight or a state, by its place in the tables of
addresses that `cpu.Run` gets; a constant, by its place in a table of floats; or a size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OPERANDS = 15  # most of an instruction; shorter ones are filled with zeros
NOTHING = -1  # an operand that is absent
MULTIPLE = 8  # registers have a multiple of so many rows, because 8 x 8 blocks of them are transposed

# The instructions, with their operands in order. Those named weight or state, and constants (alpha, epsilon, factor,
# scale), are places in tables; N, D, H, K and other sizes are numbers; all others are registers.
EMBED = 0  # y, weight [V, D], D, V
ANGLES = 1  # cosine, sine, states of their tables [P, N / 2], N / 2, state of the positions
NORM = 2  # x, y, weight, bias weight (NOTHING: rmsnorm), out, D, epsilon: x += y unless NOTHING, then out = norm(x)
SHIFT = 3  # x, out, state [R, D], D: out is the token before; the state becomes the last token
MIX = 4  # x, before, weight [D], out, D: out = x + (before - x) weight
PRODUCT = 5  # x, weight, y, inputs, outputs, floats from output to output, from input to input, 1: y is added to
TANH = 6  # x, width; in place, as the next two
SIGMOID = 7  # x, width
RELU2 = 8  # x, width
SWIGLU = 9  # gate, up, width, distance of rows: gate becomes silu(gate) up
KEYS = 10  # k, decay, rate, v, v_first, v_gate, weights w0, a0, v0, k_k, k_a, a, H, K, factor (`cpu_time_mix.keys`)
RECUR = 11  # r, w, k, v, a, b, y, state [R, H, K, K], H, K, scratch
GROUP = 12  # y, r, k, v, gate, weights r_k, weight, bias, H, K, epsilon: y becomes the input of the output's map
HEADS = 13  # x, heads, N, weight of the norm (NOTHING: none), epsilon, cosine (NOTHING: not rotated), sine
ATTEND = 14  # q, k, v, y, state of the rows' keys and values, heads, kv heads, N, scale, scratch
# own, read, states A, pending, last, position, r, d, gates, alpha and others, rule, chunk, rate weight, scratch
ADAPT = 15
EXPERTS = 16  # x, y, logits, bias weight, weights up, down, E, k, D, F, SwiGLU, scratch, hidden, router's number
ADD = 17  # x, y, width: y += x

HEBB, DELTA, OJA = 0, 1, 2  # rules of ADAPT
RULES = {"hebb": HEBB, "delta": DELTA, "oja": OJA}


@dataclass
class Program:
    """Instructions, floats, and the number of rows of the registers [rows, lanes]."""

    code: list[int] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    rows: int = 0

    def register(self, width: int) -> int:
        """A new register of so many rows, or more: its first row."""
        first = self.rows
        self.rows += width + -width % MULTIPLE
        return first

    def constant(self, *values: float) -> int:
        """The place of the first of these floats."""
        self.constants += values
        return len(self.constants) - len(values)

    def add(self, instruction: int, *operands: int) -> None:
        """Appends an instruction."""
        assert len(operands) <= OPERANDS
        self.code += [instruction, *operands, *[0] * (OPERANDS - len(operands))]
