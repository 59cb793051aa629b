"""The compiled decoding step of a model: its program, and the states that a run of the program continues.

`kernels/decode` executes the program on a CPU for float32. It reads the weights where they are. Before each run their
addresses are compared with those for which the program was made, and so are the modules, since another weight or a
hook asks for a new program or for the ordinary pass.
"""

from __future__ import annotations

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
from cdrmix.model.program import Plan, plan_of
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
    states = _States(plan, *ids_BT.shape, own=own)
    for block, before in zip(plan.blocks, cache or (BlockCache(),) * len(plan.blocks), strict=True):
        if not states.add(block, before):
            return None
    status, hidden, logits = decode.read(
        plan.compiled,
        ids_BT.to(torch.int64).contiguous(),
        plan.addresses,
        states.table(),
        model.head_weight if head else None,
        longest=states.longest,
        wants_hidden=wants_hidden,
    )
    if status:
        raise NonFiniteLogitsError(
            f"the logits of the router of layer {plan.routers[status - 1]} hold NaN or infinity: look for such values "
            "in its input and weights"
        )
    return Read(hidden, logits, tuple(states.after))


def _plan(model: Any) -> Plan | None:
    """The plan of the model, made anew where a module or the address of a weight has changed."""
    if type(model) is not LanguageModel or model.training or not decode.is_served(model.embedding.weight):
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

    Every tensor whose address is in the table is kept in `after` or in `_alive`.
    """

    def __init__(self, plan: Plan, rows: int, tokens: int, *, own: bool) -> None:
        self._plan, self._rows, self._tokens, self._own = plan, rows, tokens, own
        self._addresses: list[int] = []
        self._alive: list[np.ndarray] = []
        self.after: list[BlockCache] = []
        self.longest = 0

    def table(self) -> list[int]:
        """Addresses and bytes of a row in turns; those of the rotary angles come first."""
        return [*self._plan.angles(self.longest), *self._addresses]

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
        ends = position + self._tokens >= adapter.chunk
        if ends or a is None or a.shape != (rows, rank, width) or not a.is_contiguous():
            a = self._tensor(a, rows, rank, width, fresh=True)
        elif a.dtype != torch.float32 or a.device.type != "cpu":
            return None
        else:
            self._addresses += a.data_ptr(), 4 * rank * width
        pending = self._tensor(pending, rows, rank, width)
        last = self._tensor(last, rows, carried)
        if a is None or pending is None or last is None:
            return None
        self._addresses += position, 0
        return PlasticState(a, pending, last, (position + self._tokens) % adapter.chunk)

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
        after = [with_room(part, self._tokens, torch.float32, keep=True) for part in parts]
        table, first = np.empty((rows, 4), np.int64), 0
        for old, new in zip(parts, after, strict=True):
            number = np.arange(len(new.keys)) * new.keys.stride(0) * 4
            of = table[first : first + len(new.keys)]
            of[:, 0], of[:, 1] = new.keys.data_ptr() + number, new.values.data_ptr() + number
            of[:, 2], of[:, 3] = new.keys.stride(1), old.keys.shape[2]
            first += len(new.keys)
        self.longest = max(self.longest, int(table[:, 3].max()) + self._tokens)
        self._alive.append(table)
        self._addresses += table.ctypes.data, table.strides[0]
        return RaggedAttentionCache(tuple(after)) if ragged else after[0]
