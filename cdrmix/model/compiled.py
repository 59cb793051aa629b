"""The compiled decoding step of a model: its program, and the states that a run of the program continues.

`kernels/decode` executes the program on a CPU for float32. It reads the weights where they are. Before each run their
addresses are compared with those for which the program was made, and so are the modules, since another weight or a
hook asks for a new program or for the ordinary pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cdrmix.errors import NonFiniteLogitsError
from cdrmix.model.block import BlockCache
from cdrmix.model.fast_weights import Adapter, PlasticState
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.model.mixers.attention import Attention, AttentionCache, RaggedAttentionCache, with_room
from cdrmix.model.mixers.rwkv7 import TimeMix, TimeMixCache
from cdrmix.model.program import Plan, is_intercepted, plan_of
from cdrmix.ops import decode

_known: WeakKeyDictionary[LanguageModel, Plan] = WeakKeyDictionary()


class Read(NamedTuple):
    """hidden_BTD: after the final norm, if wanted. logits_BV: of each row's last token, if wanted."""

    hidden_BTD: Tensor | None
    logits_BV: Tensor | None
    cache: Cache


def serves(model: Any) -> bool:
    """Whether `read` serves the model: of this package, in evaluation mode, with covered parts (`program.plan_of`)."""
    return _plan(model) is not None


def read(
    model: Any, ids_BT: Tensor, cache: Cache | None, *, own: bool = False, wants_hidden: bool = False, head: bool = True
) -> Read | None:
    """Reads one document a row from the state `cache`; None if the model or the state needs the ordinary pass.

    own: nobody else uses the state; the new state is then in its memory, and the old one must not be used again.
    head: the logits are wanted. Which path is taken depends on the device, the model and the fields of the state, not
    on the number of rows. Raises NonFiniteLogitsError for a router's logits.
    """
    plan = _plan(model)
    if plan is None or ids_BT.device.type != "cpu" or not ids_BT.numel():
        return None
    states = _States.of(plan, cache, *ids_BT.shape, own=own)
    if states is None:
        return None
    run = decode.run(
        plan.compiled,
        ids_BT.to(torch.int64).contiguous(),
        plan.addresses,
        states.table(),
        model.head_weight if head else None,
        longest=states.longest,
        wants_hidden=wants_hidden,
    )
    _check(run.execute(len(ids_BT)), plan)
    return Read(run.hidden_BTD, run.logits_BV, tuple(states.after))


class Decoder:
    """Continues rows token by token in memory of its own.

    The model must not be changed while a decoder is used: its weights are looked up once.
    """

    def __init__(self, plan: Plan, states: _States, head_VD: Tensor, rows: int) -> None:
        self._plan, self._states, self._rows, self._left = plan, states, rows, states.tokens
        self._weights = [tensors[name] for tensors, name in plan.weights]  # kept alive
        self._ids_R1 = torch.zeros(rows, 1, dtype=torch.int64)
        self._table = states.table()
        self._run = decode.run(
            plan.compiled, self._ids_R1, plan.addresses, self._table, head_VD, longest=states.longest
        )

    def read(self, tokens_R: Tensor) -> Tensor:
        """Reads one token for every row; the logits [R, V] are valid until the next call."""
        assert len(tokens_R) == self._rows
        assert self._left > 0, "the buffers of keys have room for the tokens that were asked for"
        self._left -= 1
        self._ids_R1[: self._rows, 0] = tokens_R
        _check(self._run.execute(self._rows), self._plan)
        for table in self._states.keys:
            table[:, 3] += 1
        for place, chunk in self._states.positions:
            self._table[place, 0] = (self._table[place, 0] + 1) % chunk
        assert self._run.logits_BV is not None
        return self._run.logits_BV[: self._rows]

    def drop(self, ended: Sequence[int]) -> list[int]:
        """Leaves out the rows with these numbers, ascending. Returns the numbers of the others in their new order: the
        last row takes the place of one that is left out, so that no more is copied."""
        order = list(range(self._rows))
        moved = self._table[self._table[:, 1] > 0]
        for row in reversed(ended):
            self._rows -= 1
            order[row] = order[-1]
            order.pop()
            if row < self._rows:
                for begin, size in moved.tolist():
                    ctypes.memmove(begin + row * size, begin + self._rows * size, size)
        return order


def decoder(model: Any, cache: Cache, rows: int, tokens: int, *, own: bool) -> Decoder | None:
    """A decoder of so many rows that begins with a state and reads up to `tokens` tokens of each; None and own as in
    `read`."""
    plan = _plan(model)
    states = None if plan is None else _States.of(plan, cache, rows, tokens, own=own, alone=True)
    if plan is None or states is None:
        return None
    return Decoder(plan, states, model.head_weight, rows)


def _check(status: int, plan: Plan) -> None:
    if status < 0:
        raise IndexError("an id is negative, or is not below the model's number of token ids")
    if status:
        raise NonFiniteLogitsError(
            f"the logits of the router of layer {plan.routers[status - 1]} hold NaN or infinity: look for such values "
            "in its input and weights"
        )


def _plan(model: Any) -> Plan | None:
    """The plan of the model, made anew where a module or the address of a weight has changed."""
    if type(model) is not LanguageModel or model.training or is_intercepted(model):
        return None
    if not decode.is_served(model.embedding.weight):
        return None
    plan = _known.get(model)
    if plan is not None and plan.is_current():
        return plan
    plan = plan_of(model)
    if plan is None:
        _known.pop(model, None)
    else:
        _known[model] = plan
    return plan


class _States:
    """The states of a run: the addresses by which the program knows them, and the cache after it.

    Every tensor whose address is in the table is kept in `after` or in `keys`. keys: the tables of attention layers.
    positions: the places of the adapters' positions in their chunks, and the lengths of these.
    """

    def __init__(self, plan: Plan, rows: int, tokens: int, *, own: bool, alone: bool) -> None:
        self._plan, self._rows, self.tokens, self._own, self._alone = plan, rows, tokens, own, alone
        self._addresses: list[int] = []
        self._first = 0 if plan.rotary is None else 2  # the states of the rotary angles come first
        self.keys: list[np.ndarray] = []
        self.positions: list[tuple[int, int]] = []
        self.after: list[BlockCache] = []
        self.longest = 0

    @classmethod
    def of(
        cls, plan: Plan, cache: Cache | None, rows: int, tokens: int, *, own: bool, alone: bool = False
    ) -> _States | None:
        """The states of a cache, for so many more tokens; None where it is of another form than the program's.

        alone: no memory but that of keys and values is shared with the cache, so that rows may be moved.
        """
        states = cls(plan, rows, tokens, own=own, alone=alone)
        blocks = cache or (BlockCache(),) * len(plan.blocks)
        every = all(states.add(block, before) for block, before in zip(plan.blocks, blocks, strict=True))
        return states if every else None

    def table(self) -> np.ndarray:
        """Address and bytes of a row of every state, int64 [S, 2]."""
        self._angles = self._plan.angles(self.longest)
        angles = [number for table in self._angles for number in (table.data_ptr(), 0)]
        return np.array([*angles, *self._addresses], np.int64).reshape(-1, 2)

    def add(self, block: Any, before: BlockCache) -> bool:
        """Adds a block's states; False where they are of another form than the program's, such as with branches."""
        rows, width = self._rows, self._plan.width
        mixer: Any = None
        if block.kind is TimeMix:
            last, state = (None, None) if before.mixer is None else before.mixer
            last = self._tensor(last, rows, width)
            state = self._tensor(state, rows, block.heads, block.head_width, block.head_width)
            if last is None or state is None:
                return False
            mixer = TimeMixCache(last, state)
        elif block.kind is Attention:
            mixer = self._keys(before.mixer, block)
            if mixer is None:
                return False
        plastic = []
        for number, adapter in enumerate(block.adapters):
            adapted = self._adapter(adapter, before.plastic[number] if before.plastic else None)
            if adapted is None:
                return False
            plastic.append(adapted)
        fed = self._tensor(before.feed_forward_BD, rows, width) if block.shifts else None
        if block.shifts and fed is None:
            return False
        self.after.append(BlockCache(mixer, fed, tuple(plastic) if plastic else None))
        return True

    def _tensor(self, before: Tensor | None, *shape: int, fresh: bool = False) -> Tensor | None:
        """The memory of a state of this shape, with its old content; None for another shape. fresh: new memory."""
        if before is None:
            after = torch.zeros(shape)
        elif before.shape != shape or before.dtype != torch.float32 or before.device.type != "cpu":
            return None
        elif self._own and not fresh and before.is_contiguous():
            after = before
        else:
            after = before.clone(memory_format=torch.contiguous_format)
        self._addresses += after.data_ptr(), 4 * after.numel() // max(1, self._rows)
        return after

    def _adapter(self, adapter: Adapter, before: PlasticState | None) -> PlasticState | None:
        rows, rank, width = self._rows, adapter.rank, adapter.width
        carried = width + (adapter.gate is not None)
        a, pending, last, position = (None, None, None, 0) if before is None else before
        if position >= adapter.chunk:
            return None
        # Other states may share A, which changes at the end of a chunk only: it is then new memory for each state.
        ends = position + self.tokens >= adapter.chunk
        if ends or self._alone or a is None or a.shape != (rows, rank, width) or not a.is_contiguous():
            a = self._tensor(a, rows, rank, width, fresh=True)
        elif a.dtype != torch.float32 or a.device.type != "cpu":
            return None
        else:
            self._addresses += a.data_ptr(), 4 * rank * width
        pending = self._tensor(pending, rows, rank, width)
        last = self._tensor(last, rows, carried)
        if a is None or pending is None or last is None:
            return None
        self.positions.append((self._first + len(self._addresses) // 2, adapter.chunk))
        self._addresses += position, 0
        return PlasticState(a, pending, last, (position + self.tokens) % adapter.chunk)

    def _keys(self, before: Any, block: Any) -> AttentionCache | RaggedAttentionCache | None:
        """The cache with room for these tokens; the table of its rows is added (`kernels/decode/cpu_attention.py`)."""
        rows, shape = self._rows, (block.heads, block.head_width)
        if before is None:
            empty = torch.empty(rows, block.heads, 0, block.head_width)
            before = AttentionCache(empty, empty)
        ragged = isinstance(before, RaggedAttentionCache)
        parts: Sequence[AttentionCache] = before.rows if isinstance(before, RaggedAttentionCache) else (before,)
        for part in parts:
            fits = part.keys.shape[1::2] == shape and part.keys.dtype == part.values.dtype == torch.float32
            if not fits or part.keys.device.type != "cpu":
                return None
        if sum(len(part.keys) for part in parts) != rows:
            return None
        spare = not self._alone  # a decoder knows how many tokens will follow
        after = [with_room(part, self.tokens, torch.float32, keep=True, spare=spare) for part in parts]
        table, first = np.empty((rows, 4), np.int64), 0
        for old, new in zip(parts, after, strict=True):
            number = np.arange(len(new.keys)) * new.keys.stride(0) * 4
            of = table[first : first + len(new.keys)]
            of[:, 0], of[:, 1] = new.keys.data_ptr() + number, new.values.data_ptr() + number
            of[:, 2], of[:, 3] = new.keys.stride(1), old.keys.shape[2]
            first += len(new.keys)
        self.longest = max(self.longest, int(table[:, 3].max()) + self.tokens)
        self.keys.append(table)
        self._addresses += table.ctypes.data, table.strides[0]
        return RaggedAttentionCache(tuple(after)) if ragged else after[0]
