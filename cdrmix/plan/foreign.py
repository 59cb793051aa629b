"""Models of transformers in a plan: their parameters and the activations of a micro-batch, on the meta device."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.hf.build import empty_model, recompute_activations
from cdrmix.hf.foreign import ForeignLossModel, section_of, vocabulary
from cdrmix.hf.head import Head
from cdrmix.hf.mamba import is_installed
from cdrmix.hf.packing import Packing
from cdrmix.ops.backend import Platform
from cdrmix.plan.trace import Gradients, LiveBytes, MicroBatch, documents_of, trace_module
from cdrmix.training.precision import AUTOCAST

NF4_BYTES = 0.52  # a weight in 4 bits, with its scales of two levels (arXiv 2305.14314)
KEPT_OF_A_MATRIX = 2  # of the estimate without a trace: how often the inputs and outputs of a matrix are kept


@dataclass(frozen=True)
class ForeignModelSize:
    """The numbers of a model of transformers that a plan needs. Parameters are counted once if they are tied.

    stored: parameters by part, with those of adapters. active: those that one token uses. trained: parameters that are
    not frozen. weight_bytes: of all weights as the training stores them. largest: elements of the largest parameter.
    tied: the output head is the embedding. layers: blocks of the decoder. width: of the residual stream.
    features: inputs and outputs of the matrices of the largest block, and of all blocks, that one token uses.
    attention: sum over the attention layers of heads * head size. states: sum over the Mamba-2 layers of inner channels
    * state size. taps: sum over them of the multiplications of the convolution. heads: of attention in a layer.
    vocabulary: rows of the embedding.
    """

    stored: dict[str, int]
    active: dict[str, int]
    trained: int
    weight_bytes: int
    largest: int
    tied: bool
    layers: int
    width: int
    largest_features: int
    features: int
    attention: int
    states: int
    taps: int
    heads: int
    vocabulary: int

    @property
    def total_stored(self) -> int:
        return sum(self.stored.values())

    @property
    def total_active(self) -> int:
        return sum(self.active.values())


class ForeignTrace(NamedTuple):
    """The memory of a micro-batch. untraced: why it is estimated by a formula; empty: it is traced."""

    step: MicroBatch
    untraced: str = ""


_sizes: dict[str, ForeignModelSize] = {}
_traces: dict[str, ForeignTrace] = {}


def foreign_size(config: Config) -> ForeignModelSize:
    """Counts the parameters of a model of transformers, built on the meta device from its description alone.

    Raises ConfigError if model.path has none.
    """
    key = f"{config.model} {config.train.weights}"
    if key not in _sizes:
        _sizes[key] = _measure(config, empty_model(config))
    return _sizes[key]


def foreign_trace(config: Config, platform: Platform, *, gradients_stay: bool, stage: int = 0) -> ForeignTrace:
    """The memory of a micro-batch of a model of transformers, traced with fake tensors through the real model.

    gradients_stay: gradients are kept between micro-batches or partitioned, and their memory is counted elsewhere.
    stage: of ZeRO.
    If an operator does not work with fake tensors, the activations are estimated: see `_estimated`.
    """
    train = config.train
    inputs = (config.model, config.data.row_length, train.micro_batch_rows, train.precision, train.weights)
    key = f"{inputs} {train.activation_checkpointing} {platform} {gradients_stay} {stage}"
    if key not in _traces:
        size = foreign_size(config)  # outside of `try`: its errors are the user's
        torch_log = logging.getLogger("torch._subclasses.fake_tensor")
        level = torch_log.level
        torch_log.setLevel(logging.CRITICAL)  # it prints a traceback of what is caught here
        try:
            _traces[key] = ForeignTrace(_traced(config, platform, gradients_stay, stage))
        except (RuntimeError, ValueError) as error:
            # An operator that depends on values raises subclasses of it, and NotImplementedError is one. RuntimeError
            # itself is of operators that fake tensors do not support: grouped_mm of experts with float32 weights, and
            # Triton kernels of other packages on a machine without a GPU.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            _traces[key] = ForeignTrace(_estimated(config, size), reason)
        finally:
            torch_log.setLevel(level)
    return _traces[key]


def _measure(config: Config, model: Any) -> ForeignModelSize:
    section, described = section_of(config), model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    stored: Counter[str] = Counter()
    expert_parameters = 0
    for name, parameter in model.named_parameters():
        part = _part(name, parameter, embedding.weight, head.weight)
        stored[part] += parameter.numel()
        if part == "experts":
            expert_parameters += parameter.numel()
    experts, top_k = _experts(described)
    active = dict(stored)
    if expert_parameters and experts:
        active["experts"] = expert_parameters * top_k // experts
    own = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    saved_by_quantization = int((embedding.weight.itemsize - NF4_BYTES) * _quantized(model, section))
    blocks = _blocks(model)
    features = [_features(block, experts, top_k) for block in blocks]
    attention, states, taps = _mixers(model, described)
    return ForeignModelSize(
        dict(stored),
        active,
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        weight_bytes=own - saved_by_quantization,
        largest=max(parameter.numel() for parameter in model.parameters()),
        tied=head.weight is embedding.weight,
        layers=len(blocks),
        width=embedding.embedding_dim,
        largest_features=max(features),
        features=sum(features),
        attention=attention,
        states=states,
        taps=taps,
        heads=int(getattr(described, "num_attention_heads", 0) or 0),
        vocabulary=embedding.num_embeddings,
    )


def _part(name: str, parameter: Tensor, embedding: Tensor, head: Tensor) -> str:
    """The part that a parameter belongs to, by its name in transformers."""
    if parameter is embedding:
        return "embedding"
    if parameter is head:
        return "head"
    parts = name.split(".")
    if "lora_" in name:
        return "adapters"
    if "experts" in parts:
        return "experts"
    if any(part in ("gate", "router") for part in parts):
        return "router"
    if any("norm" in part or part.startswith("ln_") for part in parts[-2:]) and parameter.ndim == 1:
        return "norms"
    return "layers"


def _experts(described: Any) -> tuple[int, int]:
    """Experts of a layer and those of one token; 0, 0 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((value for name in names if (value := getattr(described, name, None))), 0)
    return int(experts), int(getattr(described, "num_experts_per_tok", None) or 0)


def _quantized(model: Any, section: HuggingFaceModel) -> int:
    """Weights that the training stores in 4 bits: those of the layers with adapters."""
    if section.lora is None or section.lora.quantize is None:
        return 0
    return sum(layer.base_layer.weight.numel() for layer in model.modules() if hasattr(layer, "lora_A"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the decoder: the longest list of modules that is not inside another one, as experts are."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [modules for name, modules in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [*max(outer, key=len)]


def _features(block: nn.Module, experts: int, top_k: int) -> int:
    """Inputs and outputs of the matrices of a block that one token uses: of its experts, `top_k`."""
    total = 0.0
    for name, parameter in block.named_parameters():
        if parameter.ndim < 2:
            continue
        used = 1.0
        if experts and "experts" in name.split("."):
            # One parameter has the matrices of all experts, or each expert has its own.
            used = top_k if parameter.ndim == 3 else top_k / experts
        total += used * (parameter.shape[-1] + parameter.shape[-2])
    return round(total)


def _mixers(model: Any, described: Any) -> tuple[int, int, int]:
    """Sums over the attention and the Mamba-2 layers, as in ForeignModelSize."""
    attention = states = taps = 0
    heads = int(getattr(described, "num_attention_heads", 0) or 0)
    head_dim = int(getattr(described, "head_dim", None) or (described.hidden_size // heads if heads else 0))
    for module in model.modules():
        kind = type(module).__name__
        inside = [type(child).__name__ for child in module.modules() if child is not module]
        if kind.endswith("Attention") and not any(name.endswith("Attention") for name in inside):
            attention += heads * head_dim
        if hasattr(module, "ssm_state_size") and isinstance(getattr(module, "conv1d", None), nn.Conv1d):
            inner = int(getattr(module, "intermediate_size", described.hidden_size))
            states += inner * int(module.ssm_state_size)
            taps += 2 * module.conv1d.weight.numel()
    return attention, states, taps


class _InPlace(LiveBytes):
    """Counts the scaling of a gradient of the loss as it is on a device: in place. Fake tensors allocate a copy."""

    def _see(self, tensor: Tensor, operator: Any) -> None:
        if operator._opname == "mul" and self._of_loss(tensor):
            return
        super()._see(tensor, operator)

    def _of_loss(self, tensor: Tensor) -> bool:
        size = tensor.untyped_storage().nbytes()
        return tensor.dtype == torch.float32 and (size, "cdrmix.linear_cross_entropy") in self.made.values()


def _traced(config: Config, platform: Platform, gradients_stay: bool, stage: int) -> MicroBatch:
    """Passes a micro-batch forward and backward. Documents of a row are packed by positions, the head is linear."""
    train = config.train
    rows, length = train.micro_batch_rows, config.data.row_length
    model = empty_model(config)
    model.train()
    if train.activation_checkpointing:
        recompute_activations(model)
    # Without model.lora, for which the loss model would read the files of the base.
    loss_model = ForeignLossModel(model, section_of(config).model_copy(update={"lora": None}))
    loss_model.assume(Packing("positions", operators=is_installed(model)), Head())

    def inputs() -> tuple[Any, ...]:
        ids = torch.zeros(rows, length, dtype=torch.long)
        return ids, ids, torch.ones(rows, length), documents_of(rows, length), float(rows * length)

    gradients: Gradients = "dropped" if gradients_stay else "made"
    dtype, live = AUTOCAST[train.precision], _InPlace(platform)
    traced = trace_module(loss_model, inputs, platform, dtype, stage=stage, gradients=gradients, casts=False, live=live)
    return traced.micro_batch()


def _estimated(config: Config, size: ForeignModelSize) -> MicroBatch:
    """The activations by a formula, for models that cannot be traced.

    A block keeps the inputs and outputs of its matrices, in the dtype of the products, KEPT_OF_A_MATRIX times: with the
    results of norms, activation functions and residual sums. With activation checkpointing it keeps its input alone,
    and the backward pass needs the activations of one block and their gradients. The loss keeps the gradient of the
    head in float32.
    """
    train = config.train
    itemsize = 4 if train.precision == "fp32" else 2
    tokens = train.micro_batch_rows * config.data.row_length
    whole = KEPT_OF_A_MATRIX * itemsize * tokens * size.features
    largest = KEPT_OF_A_MATRIX * itemsize * tokens * size.largest_features
    kept = itemsize * tokens * size.width * size.layers if train.activation_checkpointing else whole
    rows = vocabulary(section_of(config)).rows
    head = 4 * rows * size.width if section_of(config).lora is None else 0
    return MicroBatch({"blocks": kept, "loss": head}, 0, kept + head + 2 * largest)
