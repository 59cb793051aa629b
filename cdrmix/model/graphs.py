"""Decoding by CUDA graphs: all kernels of a token are started at once.

A token of few rows starts some 50 kernels a layer, and the host takes longer to start most of them than the GPU to run
them. A graph is recorded once and then started as a whole. It runs the same kernels on the same memory, so the state
lies in memory of a fixed size and is changed in place.

Graphs are used if the environment variable CDRMIX_CUDA_GRAPHS is 1: their gain has not been measured yet.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cdrmix.errors import ConfigError
from cdrmix.model.cache import mapped, tensors
from cdrmix.model.fast_weights import Adapter
from cdrmix.model.feed_forward.moe import ChannelMix, DenseFeedForward, MoeFeedForward, SkippingFeedForward
from cdrmix.model.language_model import Cache, LanguageModel
from cdrmix.model.mixers.attention import Attention, AttentionCache, FixedAttentionCache, RaggedAttentionCache
from cdrmix.model.mixers.mamba2 import Mamba2
from cdrmix.model.mixers.routing_mamba import RoutingMamba
from cdrmix.model.mixers.rwkv7 import TimeMix
from cdrmix.model.program import is_intercepted
from cdrmix.model.tensor_parallel import Divisible
from cdrmix.ops.backend import backend, debugging, platform_of

SWITCH = "CDRMIX_CUDA_GRAPHS"
FEWEST = 8  # tokens: a recording takes about as long as two steps without one
# Those of plugins may wait for the device, and those of other processes' experts do.
MIXERS = (Attention, Mamba2, RoutingMamba, TimeMix)
FEED_FORWARDS = (ChannelMix, DenseFeedForward, MoeFeedForward, SkippingFeedForward)

Step = Callable[[], Tensor]


class Recorder(Protocol):
    """Runs steps, and records them to be run again."""

    def run(self, step: Step) -> Tensor:
        """Runs a step as it is, and compiles what a recording of it needs."""

    def record(self, step: Step) -> Step:
        """Records a step without running it. The result runs what was recorded, and returns the same tensor."""


class CudaGraphs:
    """The recorder of a GPU. Its graphs share memory for what a step makes, so only the newest one may be run again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # kernels of the default stream cannot be recorded
        self._pool = torch.cuda.graph_pool_handle()
        self._newest: torch.cuda.CUDAGraph | None = None  # PyTorch takes a pool that no graph uses as gone

    def run(self, step: Step) -> Tensor:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = step()
        current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def record(self, step: Step) -> Step:
        try:
            return self._record(step)
        except torch.OutOfMemoryError:
            # Nothing has been run. A graph cannot take memory that the allocator keeps for others.
            torch.cuda.empty_cache()
            return self._record(step)

    def _record(self, step: Step) -> Step:
        # Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time.
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may go on
            try:
                result = step()
            except BaseException:
                with suppress(RuntimeError):  # it would say that the recording failed, and not why
                    graph.capture_end()
                raise
            graph.capture_end()
        self._newest = graph

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphDecoder:
    """Continues rows token by token; has the interface of `compiled.Decoder`.

    Graphs are for the number of rows at the start, half of it, and so on: rows of a graph that have ended are read on.
    The last token of a chunk of fast weights is read without a graph, because it does more than the others.
    """

    def __init__(self, model: LanguageModel, cache: Cache, rows: int, tokens: int, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._state, self._rows, self._left = _fixed(cache, tokens), rows, tokens
        self._ids_R1 = torch.zeros(rows, 1, dtype=torch.int64, device=next(model.parameters()).device)
        self._recorded: dict[int, Step | None] = {}  # by rows; None: run once
        chunks = {each.chunk for each in model.modules() if isinstance(each, Adapter)}
        self._chunk = chunks.pop() if chunks else None
        positions = [state.position for block in cache for state in block.plastic or ()]
        self._position = positions[0] if positions else 0

    def read(self, tokens_R: Tensor) -> Tensor:
        """Reads one token for every row; the logits [R, V] are valid until the next call."""
        assert len(tokens_R) == self._rows
        assert self._left > 0, "the memory of keys has room for the tokens that were asked for"
        self._left -= 1
        self._ids_R1[: self._rows, 0] = tokens_R
        rows = len(self._ids_R1)
        while (rows + 1) // 2 >= self._rows and rows > 1:
            rows = (rows + 1) // 2
        step = partial(self._step, rows)
        if self._position + 1 == self._chunk:
            logits_RV = self._recorder.run(step)
        elif rows not in self._recorded:
            self._recorded[rows], logits_RV = None, self._recorder.run(step)
        else:
            recorded = self._recorded[rows] or self._record(step)
            self._recorded[rows], logits_RV = recorded, recorded()
        if self._chunk is not None:
            self._position = (self._position + 1) % self._chunk
        return logits_RV[: self._rows]

    def _record(self, step: Step) -> Step:
        try:
            return self._recorder.record(step)
        except RuntimeError as error:
            raise ConfigError(f"{SWITCH}: a step cannot be recorded ({error}); unset the variable") from error

    def drop(self, ended: Sequence[int]) -> list[int]:
        """As `compiled.Decoder.drop`."""
        order = list(range(self._rows))
        for row in reversed(ended):
            order[row] = order[-1]
            order.pop()
        self._rows = len(order)
        moved = [(to, row) for to, row in enumerate(order) if to != row]
        if moved:
            to_M, from_M = torch.tensor(moved, device=self._ids_R1.device).unbind(1)
            for tensor in tensors(self._state, by_row=True):
                tensor.index_copy_(0, to_M, tensor[from_M])
        return order

    def _step(self, rows: int) -> Tensor:
        """Reads `_ids_R1` and changes the state of so many rows in place; returns their logits."""
        before = _first(self._state, rows, self._position)
        output = self._model(self._ids_R1[:rows], cache=before, return_cache=True)
        for old, new in zip(tensors(before), tensors(output.cache), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        return self._model.logits(output.hidden_BTD[:, -1])


def decoder(model: Any, cache: Cache, rows: int, tokens: int) -> GraphDecoder | None:
    """A decoder of so many rows that begins with a copy of a state and reads up to `tokens` tokens of each; None where
    graphs are not wanted, not worth it, or the model or the state has a part that they cannot have."""
    if os.environ.get(SWITCH, "") in ("", "0") or tokens < FEWEST or not _serves(model, cache):
        return None
    return GraphDecoder(model, cache, rows, tokens, recorder_of(next(model.parameters()).device))


@functools.cache
def recorder_of(device: torch.device) -> Recorder:
    """The recorder of a device. It is kept, since each stream has memory of its own."""
    return CudaGraphs(device)


def _serves(model: Any, cache: Cache) -> bool:
    """Whether a token is the same operations whatever the values are, and none of them is a message."""
    if type(model) is not LanguageModel or model.training or not _runs_kernels(model.embedding.weight):
        return False
    if model.config.depth is not None or model.stage.size > 1:
        return False
    if any(block.mixer is None or any(each.pending.ndim > 3 for each in block.plastic or ()) for block in cache):
        return False
    parts = [*model.modules()]
    if any(is_intercepted(each) or (isinstance(each, Divisible) and each.tensor is not None) for each in parts):
        return False
    return all(type(each.mixer) in MIXERS and type(each.feed_forward) in FEED_FORWARDS for each in model.blocks)


def _runs_kernels(weight: Tensor) -> bool:
    """Whether the operators are kernels that read no value on the host: not so those in PyTorch, and with checks."""
    return platform_of(weight) == "cuda" and backend(weight) == "triton" and not debugging()


def _fixed(cache: Cache, tokens: int) -> Cache:
    """A copy of a state with room for so many more tokens."""

    def copied(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.clone(memory_format=torch.contiguous_format)
        if isinstance(part, AttentionCache | RaggedAttentionCache):
            return FixedAttentionCache.of(part, tokens)
        return part

    return mapped(copied, cache)


def _first(cache: Cache, rows: int, position: int) -> Cache:
    """The first rows of a state, in the same memory, at a position in the chunk of fast weights."""

    def first(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[:rows]
        if isinstance(part, FixedAttentionCache):
            return FixedAttentionCache(part.keys[:rows], part.values[:rows], part.first_B[:rows], part.next_1)
        return part if part is None else position

    return mapped(first, cache)
