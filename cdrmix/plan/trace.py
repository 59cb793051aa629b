"""The memory of one micro-batch, traced with fake tensors through the real model, forward and backward.

Fake tensors (torch._subclasses.fake_tensor) have shapes, dtypes and lifetimes, but no memory and no values. So the
trace includes every operator of the model and of autograd: tensors that are saved for the backward pass, and when
tensors are freed. The operators of `cdrmix.ops` have implementations for fake tensors, which depend on the platform of
the plan. `workspace` adds the temporary memory of kernels.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.prediction import Depths
from cdrmix.model.sequence import SequenceGroup
from cdrmix.model.tensor_parallel import TensorGroup, divide
from cdrmix.ops import weights as compute_weights
from cdrmix.ops.backend import Platform, assume_platform
from cdrmix.plan.workspace import workspace
from cdrmix.training.build import narrow_residual
from cdrmix.training.precision import AUTOCAST, Autocast, attach_copies

MAX_PERIOD = 8  # blocks: longest period of the mixers for which two shorter models are traced
NAMES: dict[Platform, str] = {"cpu": "a CPU", "cuda": "an NVIDIA GPU", "hip": "an AMD GPU"}
DOCUMENT_TOKENS = 512  # assumed mean length of a document, for which kernels keep a state; web text has 500 to 1,000
FULL_TRACE_LAYERS = 20  # up to this number of layers, the whole model is traced
Gradients = Literal["made", "added", "dropped", "none"]  # as of `trace_module`


@dataclass(frozen=True)
class MicroBatch:
    """Bytes of a micro-batch, without weights, optimizer state and earlier gradients.

    saved: allocated between the forward and the backward pass, by operator. copies: weights in the dtype of the
    products, which exist between updates; `saved` and `peak` do not include them. peak: the maximum at any time.
    """

    saved: dict[str, int]
    copies: int
    peak: int

    @property
    def total_saved(self) -> int:
        return sum(self.saved.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators allocate, until they are freed.

    made: current storage -> (bytes, operator). levels: the allocated bytes after each operator, with the workspace of
    its kernel.
    """

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self.platform = platform
        self.made: dict[int, tuple[int, str]] = {}
        self.there: set[int] = set()
        self.now = 0
        self.levels: list[int] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._see(tensor, operator)
        self.levels.append(self.now + workspace(operator, args, results, self.platform))
        return results

    def _see(self, tensor: Tensor, operator: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.made and key not in self.there:
            self.made[key] = (storage.nbytes(), operator.namespace + "." + operator._opname)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.made.pop(key, (0, ""))[0]

    def leave_out(self, tensors: Iterable[Tensor | None]) -> None:
        """Excludes tensors that existed before, because an operator may return them or a view of them."""
        self.there.update(tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None)

    def set_aside(self, tensor: Tensor) -> int:
        """Excludes a tensor from `by_operator`, but not from `now`. Returns its bytes."""
        return self.made.pop(tensor.untyped_storage()._cdata, (0, ""))[0]

    def pass_gradient(self, parameter: Tensor) -> None:
        """Excludes a sum of gradients: PyTorch adds in place, but fake tensors allocate a new sum."""
        assert parameter.grad is not None
        self._forget(parameter.grad.untyped_storage()._cdata)

    def by_operator(self) -> dict[str, int]:
        """The allocated bytes by operator, in descending order."""
        sizes: Counter[str] = Counter()
        for size, operator in self.made.values():
            sizes[operator] += size
        return dict(sizes.most_common())


def trace(config: Config, platform: Platform, *, zero_stage: int, accumulation: int) -> MicroBatch:
    """The memory of a micro-batch of stage A on one process. accumulation: micro-batches of a process in a step. With a
    pipeline it is that of a model with as many blocks as the largest stage has.
    """
    train, model = config.train, config.cdrmix_model
    if zero_stage == 3:  # below it `memory` subtracts what the experts of other ranks need
        model = with_experts_of_a_rank(model, train)
    # Only these keys affect the trace; other keys must not cause another trace.
    traced = _TraceInput(
        model,
        config.data.row_length,
        train.micro_batch_rows,
        train.precision,
        train.activation_checkpointing,
        narrow_residual(config),
        train.sequence_parallel,
        train.tensor_parallel,
        platform,
        zero_stage >= 2 or accumulation > 1,
        traced_stage(zero_stage),
    )
    layers = -(-model.layers // train.pipeline_parallel)
    if layers < model.layers:
        traced = dataclasses.replace(traced, model=with_layers(model, layers))
    return of_layers(traced.model, platform, lambda count: _trace(traced.key(count), traced))


def traced_stage(zero_stage: int) -> int:
    """The least ZeRO stage whose passes are the same: stage 1 partitions nothing that they allocate."""
    return 0 if zero_stage == 1 else zero_stage


@dataclass(frozen=True)
class Traced:
    """A MicroBatch with two peaks: in the first half of its passes and in the second half."""

    saved: dict[str, int]
    copies: int
    early: int
    late: int

    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.saved, self.copies, max(self.early, self.late))


def of_layers(model: Model, platform: Platform, traced: Callable[[int], Traced]) -> MicroBatch:
    """The memory of a model by traces of it with fewer layers. traced: the trace of its first layers, so many.

    A model with periodic mixers is traced with two smaller numbers of blocks and extrapolated. Each block adds the same
    amount to the saved tensors and to the allocated memory at a given block. In the backward pass each block frees the
    same amount and, in a step with one micro-batch, allocates gradients of the same size. So the allocated memory is
    linear between the top and the bottom of the model, and its maximum is at one of the two.
    Raises ConfigError for a model without kernels on the platform.
    """
    period = period_of(model)
    try:
        if model.layers <= FULL_TRACE_LAYERS or period is None:
            return traced(model.layers).micro_batch()
        fewer = period * max(2, 8 // period)  # each half has at least one whole period
        more = fewer + period * max(1, 4 // period)
        return _extended(traced(fewer), traced(more), (model.layers - fewer) / (more - fewer)).micro_batch()
    except ValueError as error:  # of an operator without a kernel for this shape on this platform
        raise ConfigError(f"this model cannot be trained on {NAMES[platform]}: {error}") from error


@dataclass(frozen=True)
class _TraceInput:
    model: Model
    row_length: int
    rows: int
    precision: str
    checkpointing: bool
    narrow_residual: bool
    sequence_parallel: int
    tensor_parallel: int
    platform: Platform
    gradients_pass: bool  # gradients are added to existing ones or partitioned, so they are freed at once
    zero_stage: int

    def key(self, layers: int) -> str:
        """Equal inputs have the same key."""
        return f"{layers} {self}"


def with_experts_of_a_rank(model: Model, train: Train) -> Model:
    """The model with the experts that a rank holds with train.expert_parallel; at least top_k, so that it can route."""
    experts = max(model.feed_forward.top_k, model.feed_forward.experts // train.expert_parallel)
    if model.feed_forward.kind != "moe" or experts >= model.feed_forward.experts:
        return model
    return model.model_copy(update={"feed_forward": model.feed_forward.model_copy(update={"experts": experts})})


def with_layers(model: Model, layers: int) -> Model:
    """The model with its first layers alone."""
    listed = {kind: [i for i in chosen if i < layers] for kind, chosen in model.mixer_layers.items()}
    dense = [layer for layer in model.feed_forward.dense_layers if layer < layers]
    feed_forward = model.feed_forward.model_copy(update={"dense_layers": dense})
    return model.model_copy(update={"layers": layers, "mixer_layers": listed, "feed_forward": feed_forward})


def _extended(fewer: Traced, more: Traced, steps: float) -> Traced:
    def line(first: int, second: int) -> int:
        return round(first + steps * (second - first))

    operators = {**more.saved, **fewer.saved}
    saved = {name: line(fewer.saved.get(name, 0), more.saved.get(name, 0)) for name in operators}
    saved = dict(sorted(saved.items(), key=lambda pair: -pair[1]))
    peaks = line(fewer.early, more.early), line(fewer.late, more.late)
    return Traced(saved, line(fewer.copies, more.copies), *peaks)


def period_of(model: Model) -> int | None:
    """The period of the layers; None if there is none of at most MAX_PERIOD."""
    skipping = [model.skips(layer, "mixer") for layer in range(model.layers)]
    kinds = list(zip(model.mixers, model.feed_forwards, skipping, strict=True))
    for period in range(1, MAX_PERIOD + 1):
        repeats = all(kind == kinds[layer % period] for layer, kind in enumerate(kinds))
        if repeats and model.layers % period == 0:
            return period
    return None


_results: dict[str, Traced] = {}


def _trace(key: str, traced: _TraceInput) -> Traced:
    if key not in _results:
        _results[key] = _run(traced, int(key.split()[0]))
    return _results[key]


def _run(traced: _TraceInput, layers: int) -> Traced:
    rows, length, processes = traced.rows, traced.row_length, traced.sequence_parallel
    with torch.device("meta"):
        model = LossModel(
            LanguageModel(
                with_layers(traced.model, layers),
                activation_checkpointing=traced.checkpointing,
                narrow_residual=traced.narrow_residual,
            ),
            _Slices(None, processes - 1, processes) if processes > 1 else None,
        )
    if traced.tensor_parallel > 1:
        divide(model, _Shares(None, 0, traced.tensor_parallel))
    section = traced.model.prediction
    depths = None if section is None else Depths(section.depth_weights, 0)

    def inputs() -> tuple[Any, ...]:
        ids = torch.zeros(rows, length, dtype=torch.long)
        targets = torch.zeros(rows, length // processes, dtype=torch.long)
        weights = torch.ones(rows, length // processes)
        return ids, targets, weights, documents_of(rows, length), float(rows * length), 1.0, depths

    gradients: Gradients = "made"
    if traced.gradients_pass:
        gradients = "added" if traced.zero_stage < 2 else "dropped"
    dtype = AUTOCAST[traced.precision]
    return trace_module(model, inputs, traced.platform, dtype, stage=traced.zero_stage, gradients=gradients)


def documents_of(rows: int, length: int) -> Tensor:
    """The bounds of as many documents as rows of this length have on average."""
    return torch.zeros(rows * max(1, length // DOCUMENT_TOKENS) + 1, dtype=torch.int32)


def trace_module(
    model: nn.Module,
    inputs: Callable[[], tuple[Any, ...]],
    platform: Platform,
    dtype: torch.dtype | None,
    *,
    stage: int,
    gradients: Gradients,
    casts: bool = True,
    live: LiveBytes | None = None,
) -> Traced:
    """Runs a module, whose result is a loss or has one (`total`), on fake tensors, and its backward pass.

    inputs: makes its arguments. dtype: of autocast. stage: of ZeRO. gradients: made by the backward pass; added to
    those that are there; dropped at once, as ZeRO partitions them; none: there is no backward pass. casts: the weights
    have copies in the dtype of the products. live: the counter.
    Raises ValueError for an operator that has no kernel for this shape on this platform.
    """
    live = LiveBytes(platform) if live is None else live
    backward = gradients != "none"
    with assume_platform(platform), FakeTensorMode():
        make_fake(model)
        parameters = list(model.parameters())
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if gradients == "added":
                parameter.grad = torch.zeros_like(parameter)
                parameter.register_post_accumulate_grad_hook(live.pass_gradient)
            elif gradients == "dropped":
                parameter.register_post_accumulate_grad_hook(drop_gradient)
        if casts:
            attach_copies(parameters, dtype, stage)
        arguments = inputs()
        live.leave_out([*parameters, *model.buffers()])
        live.leave_out(each for each in arguments if isinstance(each, Tensor))
        live.leave_out(parameter.grad for parameter in parameters)
        model.train(backward)
        with live, torch.set_grad_enabled(backward):
            result = Autocast(model, "cpu", dtype, stage=stage)(*arguments)
            copies = sum(live.set_aside(copy) for copy in compute_weights.copies(parameters))
            saved, forward = live.by_operator() if backward else {}, len(live.levels)
            if backward:
                (result if isinstance(result, Tensor) else result.total).backward()
    half = (forward + len(live.levels)) // 2
    early, late = (max(levels, default=copies) - copies for levels in (live.levels[:half], live.levels[half:]))
    return Traced(saved, copies, early, late)


@dataclass(frozen=True)
class _Slices(SequenceGroup):
    """A group whose other processes are not there: its messages have the right shapes, but no values."""

    group: None  # type: ignore[assignment]

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def heads(self, x_BLHN: Tensor) -> Tensor:
        return x_BLHN.unflatten(2, (-1, self.size)).movedim(3, 1).flatten(1, 2).contiguous()

    def tokens(self, y_BTHN: Tensor) -> Tensor:
        return y_BTHN.unflatten(1, (self.size, -1)).movedim(1, 3).flatten(2, 3).contiguous()

    def total(self, x: Tensor) -> Tensor:
        return x.detach().clone()


@dataclass(frozen=True)
class _Shares(TensorGroup):
    """A group whose other processes are not there."""

    group: None  # type: ignore[assignment]

    def reduce_(self, x: Tensor, operation: Any = None) -> Tensor:
        return x


def drop_gradient(parameter: Tensor) -> None:
    """Frees a whole gradient, as ZeRO with partitioned gradients does."""
    parameter.grad = None


def make_fake(module: nn.Module) -> None:
    """Replaces every parameter and buffer by a fake tensor of its shape on the CPU. Call it in a FakeTensorMode."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                part._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
