"""The memory of one micro-batch, found by sending fake tensors through the real model, forward and backward.

Fake tensors (torch._subclasses.fake_tensor) have shapes, dtypes and lifetimes, and neither memory nor numbers, so every
operator of the model and of autograd counts as the code has it: what is saved for the backward pass, what lives on, and
what is freed when. Operators of `cdrmix.ops` give their results as registered for fake tensors, which are those of the
kernels of the platform that is planned for; what a kernel allocates while it runs is added by `workspace`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdrmix.config.schema import Config, Model
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.ops import weights as compute_weights
from cdrmix.ops.backend import Platform, assume_platform
from cdrmix.plan.workspace import workspace
from cdrmix.training.build import narrow_residual
from cdrmix.training.engine import AUTOCAST, Autocast, attach_copies

MAX_PERIOD = 8  # blocks after which the mixers may repeat for a model to be traced by two shorter ones
NAMES: dict[Platform, str] = {"cpu": "a CPU", "cuda": "an NVIDIA GPU", "hip": "an AMD GPU"}
DOCUMENT_TOKENS = 512  # of a packed document on average: kernels keep a state for each; web text has some 500 to 1,000
FULL_TRACE_LAYERS = 20  # up to so many a model is traced as it is


@dataclass(frozen=True)
class MicroBatch:
    """Bytes of a micro-batch, beside weights, optimizer state and gradients that were there before.

    saved: alive between the forward and the backward pass, by the operator that made them. copies: of the weights in
    the products' dtype, kept from update to update, which `saved` and `peak` leave out. peak: the most alive at once.
    """

    saved: dict[str, int]
    copies: int
    peak: int

    @property
    def total_saved(self) -> int:
        return sum(self.saved.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes, for as long as it lives.

    made: of the storages alive now, bytes and the operator that made them. levels: after each operator the bytes alive,
    with what its kernel takes while it runs.
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
        """Does not count what was there before and stays: an operator may give it back, or a view of it."""
        self.there.update(tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None)

    def set_aside(self, tensor: Tensor) -> int:
        """Leaves a tensor that stays out of `by_operator`, though not out of `now`. Returns its bytes."""
        return self.made.pop(tensor.untyped_storage()._cdata, (0, ""))[0]

    def pass_gradient(self, parameter: Tensor) -> None:
        """Forgets a sum of gradients: PyTorch adds to it in place, but with fake tensors makes a new one."""
        assert parameter.grad is not None
        self._forget(parameter.grad.untyped_storage()._cdata)

    def by_operator(self) -> dict[str, int]:
        """Bytes alive now by the operator that made them, the most first."""
        found: Counter[str] = Counter()
        for size, operator in self.made.values():
            found[operator] += size
        return dict(found.most_common())


def trace(config: Config, platform: Platform, *, zero_stage: int, accumulation: int) -> MicroBatch:
    """What a micro-batch of stage A takes on one process. accumulation: micro-batches of a process in a step.

    A model whose mixers repeat every few blocks is traced with two smaller numbers of blocks: every block adds the same
    to what is saved, and to what is alive at the same place of the model. Going down through the blocks, the backward
    pass frees the same of every one; in a step with one micro-batch gradients of the same size come into being beside
    it. So what is alive changes evenly between the top of the model and its bottom, and is the most at one of them.
    """
    train = config.train
    # The rest of the configuration has no part in it, and must not make equal questions look different.
    traced = _TraceInput(
        config.model,
        config.data.row_length,
        train.micro_batch_rows,
        train.precision,
        train.activation_checkpointing,
        narrow_residual(config),
        platform,
        zero_stage >= 2 or accumulation > 1,
        zero_stage,
    )
    period = _period(config.model)
    if config.model.layers <= FULL_TRACE_LAYERS or period is None:
        return _trace(traced.key(config.model.layers), traced).micro_batch()
    fewer = period * max(2, 8 // period)  # the upper half of it is a whole period, and the lower one another
    more = fewer + period * max(1, 4 // period)
    steps = (config.model.layers - fewer) / (more - fewer)
    return _extended(_trace(traced.key(fewer), traced), _trace(traced.key(more), traced), steps).micro_batch()


@dataclass(frozen=True)
class _TraceResult:
    """A MicroBatch with two peaks: until half of the backward pass is done, and from there to its end."""

    saved: dict[str, int]
    copies: int
    early: int
    late: int

    def micro_batch(self) -> MicroBatch:
        return MicroBatch(self.saved, self.copies, max(self.early, self.late))


@dataclass(frozen=True)
class _TraceInput:
    model: Model
    row_length: int
    rows: int
    precision: str
    checkpointing: bool
    narrow_residual: bool
    platform: Platform
    gradients_pass: bool  # each is added to the one that is there, or shared out: in either case it does not stay
    zero_stage: int

    def key(self, layers: int) -> str:
        """The same for equal questions."""
        return f"{layers} {self}"

    def of_layers(self, layers: int) -> Model:
        listed = {kind: [i for i in chosen if i < layers] for kind, chosen in self.model.mixer_layers.items()}
        return self.model.model_copy(update={"layers": layers, "mixer_layers": listed})


def _extended(fewer: _TraceResult, more: _TraceResult, steps: float) -> _TraceResult:
    def line(first: int, second: int) -> int:
        return round(first + steps * (second - first))

    operators = {**more.saved, **fewer.saved}
    saved = {name: line(fewer.saved.get(name, 0), more.saved.get(name, 0)) for name in operators}
    saved = dict(sorted(saved.items(), key=lambda pair: -pair[1]))
    peaks = line(fewer.early, more.early), line(fewer.late, more.late)
    return _TraceResult(saved, line(fewer.copies, more.copies), *peaks)


def _period(model: Model) -> int | None:
    """After how many blocks the mixers repeat up to the last; None where they do not within MAX_PERIOD."""
    mixers = model.mixers
    for period in range(1, MAX_PERIOD + 1):
        repeats = all(mixer == mixers[layer % period] for layer, mixer in enumerate(mixers))
        if repeats and model.layers % period == 0:
            return period
    return None


_results: dict[str, _TraceResult] = {}


def _trace(key: str, traced: _TraceInput) -> _TraceResult:
    if key not in _results:
        try:
            _results[key] = _run(traced, int(key.split()[0]))
        except ValueError as error:  # an operator's: it has no kernel for such a shape there
            raise ConfigError(f"this model cannot be trained on {NAMES[traced.platform]}: {error}") from error
    return _results[key]


def _run(traced: _TraceInput, layers: int) -> _TraceResult:
    rows, length = traced.rows, traced.row_length
    with torch.device("meta"):
        model = LossModel(
            LanguageModel(
                traced.of_layers(layers),
                activation_checkpointing=traced.checkpointing,
                narrow_residual=traced.narrow_residual,
            )
        )
    dtype = AUTOCAST[traced.precision]
    with assume_platform(traced.platform), FakeTensorMode():
        _make_fake(model)
        parameters = list(model.parameters())
        live = LiveBytes(traced.platform)
        if traced.gradients_pass:
            for parameter in parameters:
                if traced.zero_stage < 2:
                    parameter.grad = torch.zeros_like(parameter)
                    parameter.register_post_accumulate_grad_hook(live.pass_gradient)
                else:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
        attach_copies(parameters, dtype, traced.zero_stage)
        ids = torch.zeros(rows, length, dtype=torch.long)
        weights = torch.ones(rows, length)
        documents = torch.zeros(rows * max(1, length // DOCUMENT_TOKENS) + 1, dtype=torch.int32)
        live.leave_out([*parameters, *model.buffers(), ids, weights, documents])
        live.leave_out(parameter.grad for parameter in parameters)
        with live:
            losses = Autocast(model, "cpu", dtype)(ids, ids, weights, documents, float(rows * length))
            copies = sum(live.set_aside(copy) for copy in compute_weights.copies(parameters))
            saved = live.by_operator()
            forward = len(live.levels)
            losses.total.backward()
    half = (forward + len(live.levels)) // 2
    return _TraceResult(saved, copies, max(live.levels[:half]) - copies, max(live.levels[half:]) - copies)


def _drop_gradient(parameter: Tensor) -> None:
    """What ZeRO does that shares gradients out: none is kept whole."""
    parameter.grad = None


def _make_fake(module: nn.Module) -> None:
    """Gives every parameter and buffer a fake tensor of its shape on the CPU; call it in a FakeTensorMode."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
