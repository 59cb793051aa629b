"""Makes the program of a model's compiled decoding step (`kernels/decode/program.py`) from its modules.

Covered are blocks of RWKV-7 or attention with any feed-forward of this package, and plastic adapters. Not covered are
Mamba-2, layers of plugins, branches that skip tokens, bigrams, heads of multi-token prediction, modules divided among
ranks or with hooks, other dtypes than float32, and models wider than WIDEST.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from cdrmix.kernels.decode import program as instructions
from cdrmix.kernels.decode.program import MULTIPLE, NOTHING, RULES, Program
from cdrmix.model.context import rotary_angles
from cdrmix.model.fast_weights import NORM_FLOOR, Adapter
from cdrmix.model.feed_forward.moe import ChannelMix, DenseFeedForward, MoeFeedForward
from cdrmix.model.feed_forward.router import Router
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.layers import AddNorm, Projection, TokenEmbedding
from cdrmix.model.mixers.attention import Attention
from cdrmix.model.mixers.rwkv7 import TimeMix
from cdrmix.ops import decode

WIDEST = 256  # of D: the step has one thread; the products of wider models take most of the time, and can use several
POSITIONS = 256  # of the first table of rotary angles; a longer one is made twice as long as needed


@dataclass(frozen=True)
class BlockPlan:
    """The states of a block: the kind of its mixer, the heads and their width; its adapters; whether its feed-forward
    shifts tokens."""

    kind: type[nn.Module]
    heads: int
    head_width: int
    adapters: tuple[Adapter, ...]
    shifts: bool


@dataclass
class Plan:
    """A model's program, and what it was made for.

    routers: the names of the routers, which the program knows by their numbers. weights: in the order of the program,
    each as the mapping that holds it and its name there; addresses, strides: theirs. absent: those that were None.
    modules: with the mapping that holds each and its name there. families: such mappings and their lengths. settings:
    numbers that the program contains, each as its owner, its name and its value.
    """

    compiled: Any
    width: int
    blocks: tuple[BlockPlan, ...]
    routers: tuple[str, ...]
    rotary: tuple[int, float] | None  # head width and base of the angles
    weights: list[tuple[Mapping[str, Any], str]]
    absent: list[tuple[Mapping[str, Any], str]]
    modules: list[tuple[Mapping[str, Any], str, nn.Module]]
    families: list[tuple[Mapping[str, Any], int]]
    settings: list[tuple[Any, str, Any]]
    addresses: list[int] = field(init=False)
    strides: list[tuple[int, ...]] = field(init=False)
    _angles: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.addresses = [tensors[name].data_ptr() for tensors, name in self.weights]
        self.strides = [tensors[name].stride() for tensors, name in self.weights]

    def is_current(self) -> bool:
        """Whether the model still has these modules, without hooks, these settings, and its weights as they were laid
        out at these addresses."""
        for children, name, module in self.modules:
            if children.get(name) is not module or is_intercepted(module):
                return False
        if any(len(children) != count for children, count in self.families):
            return False
        if any(getattr(owner, name) != value for owner, name, value in self.settings):
            return False
        if any(tensors.get(name) is not None for tensors, name in self.absent):
            return False
        for (tensors, name), address, stride in zip(self.weights, self.addresses, self.strides, strict=True):
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != address or tensor.stride() != stride:
                return False
        return True

    def angles(self, positions: int) -> tuple[Tensor, ...]:
        """Two states: the tables of cosines and sines, [positions or more, N / 2], the same for every row."""
        if self.rotary is None:
            return ()
        width, theta = self.rotary
        if self._angles is None or len(self._angles[0]) < positions:
            places = torch.arange(max(POSITIONS, 2 * positions)).unsqueeze(0)
            cosine, sine = rotary_angles(places, width, theta, torch.float32)
            self._angles = cosine.flatten(0, 2).contiguous(), sine.flatten(0, 2).contiguous()
        return self._angles


def is_intercepted(module: nn.Module) -> bool:
    """Whether calls of the module do more than its class says: it has hooks, all modules have, or it has a `forward` of
    its own."""
    every = module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks
    return bool(every or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


class _NotCoveredError(Exception):
    """The model has a part for which there are no instructions."""


def plan_of(model: LanguageModel) -> Plan | None:
    """The plan of a model; None if it is not covered."""
    try:
        return _Planner(model).plan()
    except _NotCoveredError:
        return None


def _demand(covered: object) -> None:
    if not covered:
        raise _NotCoveredError


class _Planner:
    """Appends the instructions of a model to a program, module by module."""

    def __init__(self, model: LanguageModel) -> None:
        config = model.config
        _demand(model.prediction is None and model.bigrams is None and model.stage.size == 1)
        _demand(config.depth is None and config.d_model <= WIDEST and config.d_model % MULTIPLE == 0)
        self.model, self.config, self.width = model, config, config.d_model
        self.program = Program()
        self.weights: list[tuple[Mapping[str, Any], str]] = []
        self.absent: list[tuple[Mapping[str, Any], str]] = []
        self.modules: list[tuple[Mapping[str, Any], str, nn.Module]] = []
        self.families: list[tuple[Mapping[str, Any], int]] = []
        self.settings: list[tuple[Any, str, Any]] = []
        self.routers: list[str] = []
        self.states = 0
        self._registers: dict[tuple[str, int], int] = {}
        self._angles: tuple[int, int] | None = None
        self._adapted: dict[str, list[int]] = {}  # the states of the current block's adapters
        self._has_values = False  # a block of RWKV-7 came before
        self.rotary: tuple[int, float] | None = None
        attends = any(type(block.mixer) is Attention for block in model.blocks)
        if attends and config.attention.rope:
            self.rotary = (self.width // config.attention.heads, config.attention.rope_theta)
            self.states = 2  # the tables of angles

    def plan(self) -> Plan:
        model, x, fed = self.model, self.register("x", self.width), NOTHING
        self.watch(model)
        _demand(type(model.embedding) is TokenEmbedding and model.embedding.tensor is None)
        self.add(instructions.EMBED, x, self.weight(model.embedding, "weight"), *reversed(model.embedding.weight.shape))
        if model.embedding_norm is not None:
            self.norm(model.embedding_norm, x, NOTHING, x)
        blocks = []
        for number, block in enumerate(model.blocks):
            blocks.append(self.block(block, number, x, fed))
            fed = self.register("fed", self.width)
        hidden = self.register("hidden", self.width)
        self.norm(model.final_norm, x, fed, hidden)
        head = model.embedding if model.head is None else model.head
        _demand(type(head) is TokenEmbedding and head.tensor is None)
        self.weight(head, "weight")
        compiled = decode.compiled(self.program, self.width, hidden)
        return Plan(
            compiled,
            self.width,
            tuple(blocks),
            tuple(self.routers),
            self.rotary,
            self.weights,
            self.absent,
            self.modules,
            self.families,
            self.settings,
        )

    # Operands

    def add(self, instruction: int, *operands: int) -> None:
        self.program.add(instruction, *operands)

    def register(self, name: str, width: int) -> int:
        """The register of this name and width, which blocks share."""
        key = (name, width)
        if key not in self._registers:
            self._registers[key] = self.program.register(width)
        return self._registers[key]

    def state(self) -> int:
        """The place of the next state; `compiled.read` lists them in the same order."""
        self.states += 1
        return self.states - 1

    def weight(self, module: nn.Module, name: str) -> int:
        """The place of a parameter or buffer of a module; NOTHING if it is None."""
        tensors: Mapping[str, Any] = module._parameters if name in module._parameters else module._buffers
        tensor = tensors.get(name)
        if tensor is None:
            self.absent.append((tensors, name))
            return NOTHING
        _demand(tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous())
        _demand(tensor.numel() > 0 and not hasattr(tensor, "ds_id"))  # not partitioned by ZeRO-3
        self.weights.append((tensors, name))
        return len(self.weights) - 1

    def setting(self, owner: Any, name: str) -> Any:
        """The value of an attribute, which the program contains."""
        value = getattr(owner, name)
        self.settings.append((owner, name, value))
        return value

    def watch(self, module: nn.Module) -> None:
        """Remembers all modules below this one; those with hooks are not covered."""
        _demand(not is_intercepted(module))
        self.families.append((module._modules, len(module._modules)))
        for name, child in module._modules.items():
            if child is not None:
                self.modules.append((module._modules, name, child))
                self.watch(child)

    # Modules

    def norm(self, norm: AddNorm, x: int, y: int, out: int) -> None:
        _demand(type(norm) is AddNorm)
        weight, bias = self.weight(norm, "weight"), self.weight(norm, "bias")
        _demand((self.setting(norm, "kind") == "layernorm") == (bias != NOTHING))  # the step knows the kind by the bias
        self.add(
            instructions.NORM, x, y, weight, bias, out, self.width, self.program.constant(self.setting(norm, "eps"))
        )

    def product(self, x: int, weight: int, y: int, shape: torch.Size, *, inputs_first: bool = False) -> None:
        outputs, inputs = reversed(shape) if inputs_first else shape
        apart = (1, outputs) if inputs_first else (inputs, 1)
        self.add(instructions.PRODUCT, x, weight, y, inputs, outputs, *apart, 0)

    def linear(self, layer: nn.Module, x: int, y: int) -> None:
        _demand(type(layer) is Projection)
        assert isinstance(layer, Projection)
        self.product(x, self.weight(layer, "weight"), y, layer.weight.shape)

    def projection(self, block: Any, name: str, x: int, y: int) -> None:
        """A projection of a mixer, with its adapter if it has one."""
        self.linear(getattr(block.mixer, name), x, y)
        if block.plastic is None or name not in block.plastic:
            return
        adapter = block.plastic[name]
        _demand(type(adapter) is Adapter and adapter.width % MULTIPLE == 0)
        rank, width, gates = adapter.rank, adapter.width, int(adapter.gate is not None)
        own_width = width + 2 * gates + rank
        own, read = self.register("own", own_width), self.register("read", rank)
        high = own_width + -own_width % MULTIPLE + rank + -rank % MULTIPLE
        scratch = self.register("adapter", high + width // MULTIPLE + MULTIPLE)  # of 16 floats or more each
        self.product(x, self.weight(adapter, "keys"), own, adapter.keys.shape)
        if adapter.gate is not None:
            self.product(x, self.weight(adapter, "gate"), own + width, adapter.gate.shape)
        self.product(x, self.weight(adapter, "values"), own + width + 2 * gates, adapter.values.shape)
        config = self.setting(adapter, "config")
        constants = self.program.constant(config.alpha, config.decay, config.clamp, NORM_FLOOR)
        states = self._adapted[name]
        rule, rate = RULES[config.rule], self.weight(adapter, "rate")
        sizes = (rank, width, gates, constants, rule, self.setting(adapter, "chunk"))
        self.add(instructions.ADAPT, own, read, *states, *sizes, rate, scratch)
        up = self.weight(adapter, "up")
        self.add(instructions.PRODUCT, read, up, y, rank, len(adapter.up), rank, 1, 1)

    def block(self, block: Any, number: int, x: int, fed: int) -> BlockPlan:
        """x += fed, and then the block; the feed-forward's output is in the register `fed`, not yet added."""
        _demand(not block.depth_routers)
        normed, mixed = self.register("normed", self.width), self.register("mixed", self.width)
        self.norm(block.mixer_norm, x, fed, normed)
        mixer, adapters = block.mixer, block.plastic or {}
        _demand(type(mixer) in (TimeMix, Attention) and mixer.tensor is None)
        own = [self.state() for _ in range(2 if type(mixer) is TimeMix else 1)]
        self._adapted = {name: [self.state() for _ in range(4)] for name in adapters}
        if type(mixer) is TimeMix:
            heads, head_width = mixer.heads, mixer.head_size
            self.time_mix(block, normed, mixed, *own)
        else:
            heads, head_width = mixer.kv_heads, mixer.head_width
            self.attention(block, normed, mixed, *own)
        self.norm(block.feed_forward_norm, x, mixed, normed)
        out, feed_forward = self.register("fed", self.width), block.feed_forward
        _demand(type(feed_forward) in (MoeFeedForward, DenseFeedForward, ChannelMix) and feed_forward.tensor is None)
        if type(feed_forward) is MoeFeedForward:
            self.experts(feed_forward, number, normed, out)
        elif type(feed_forward) is DenseFeedForward:
            self.dense(feed_forward, normed, out)
        else:
            self.channel_mix(feed_forward, normed, out)
        shifts = type(feed_forward) is ChannelMix
        return BlockPlan(type(mixer), heads, head_width, tuple(adapters.values()), shifts)

    def time_mix(self, block: Any, x: int, y: int, last: int, state: int) -> None:
        mixer, width = block.mixer, self.width
        heads, head_width = mixer.heads, mixer.head_size
        before, stream = self.register("before", width), self.register("stream", width)
        r, k, decay, rate, gate, a, v_gate, read = (
            self.register(name, width) for name in ("r", "k", "decay", "rate", "gate", "a", "v_gate", "y")
        )
        first = not self._has_values
        v = self.register("v_first" if first else "v", width)
        self.add(instructions.SHIFT, x, before, last, width)

        def streamed(name: str) -> int:
            self.add(instructions.MIX, x, before, self.weight(mixer, name), stream, width)
            return stream

        def low_rank(letter: str, out: int, activation: int = NOTHING) -> None:
            down, up = getattr(mixer, f"{letter}1"), getattr(mixer, f"{letter}2")
            rank = self.register("rank", down.shape[1])
            self.product(stream, self.weight(mixer, f"{letter}1"), rank, down.shape, inputs_first=True)
            if activation != NOTHING:
                self.add(activation, rank, down.shape[1])
            self.product(rank, self.weight(mixer, f"{letter}2"), out, up.shape, inputs_first=True)

        self.projection(block, "receptance", streamed("x_r"), r)
        streamed("x_w")
        low_rank("w", decay, instructions.TANH)
        self.projection(block, "key", streamed("x_k"), k)
        self.projection(block, "value", streamed("x_v"), v)
        if not first:
            low_rank("v", v_gate)
        streamed("x_a")
        low_rank("a", rate)
        streamed("x_g")
        low_rank("g", gate, instructions.SIGMOID)
        values = (NOTHING, NOTHING) if first else (self.register("v_first", width), v_gate)
        weights = [
            NOTHING if name == "v0" and first else self.weight(mixer, name) for name in ("w0", "a0", "v0", "k_k", "k_a")
        ]
        factor = self.program.constant(2.0 if self.setting(mixer, "allow_neg_eigval") else 1.0)
        self.add(instructions.KEYS, k, decay, rate, v, *values, *weights, a, heads, head_width, factor)
        scratch = self.register("scan", 7 * width + MULTIPLE)
        self.add(instructions.RECUR, r, decay, k, v, a, rate, read, state, heads, head_width, scratch)
        group = mixer.ln_x
        _demand(type(group) is nn.GroupNorm)
        weights = [self.weight(mixer, "r_k"), self.weight(group, "weight"), self.weight(group, "bias")]
        epsilon = self.program.constant(self.setting(group, "eps"))
        self.add(instructions.GROUP, read, r, k, v, gate, *weights, heads, head_width, epsilon)
        self.projection(block, "output", read, y)
        self._has_values = True

    def attention(self, block: Any, x: int, y: int, table: int) -> None:
        mixer, width = block.mixer, self.width
        heads, kv_heads, head_width = mixer.heads, mixer.kv_heads, mixer.head_width
        _demand(head_width % MULTIPLE == 0)
        narrow = kv_heads * head_width
        q, read = self.register("q", width), self.register("read values", width)
        k, v = self.register("keys", narrow), self.register("values", narrow)
        self.projection(block, "query", x, q)
        self.projection(block, "key", x, k)
        self.projection(block, "value", x, v)
        cosine = sine = NOTHING
        if self.rotary is not None:
            half = head_width // 2
            cosine, sine = self.register("cosine", half), self.register("sine", half)
            if self._angles is None:
                self.add(instructions.ANGLES, cosine, sine, 0, 1, half, table)
                self._angles = cosine, sine
        for side, count, norm in ((q, heads, mixer.query_norm), (k, kv_heads, mixer.key_norm)):
            _demand(norm is None or type(norm) is nn.RMSNorm)
            weight = NOTHING if norm is None else self.weight(norm, "weight")
            epsilon = self.program.constant(0.0 if norm is None else self.setting(norm, "eps"))
            self.add(instructions.HEADS, side, count, head_width, weight, epsilon, cosine, sine)
        scale = self.program.constant(head_width**-0.5)
        scratch = self.register("attention", 2 * width + 2 * narrow + MULTIPLE)
        self.add(instructions.ATTEND, q, k, v, read, table, heads, kv_heads, head_width, scale, scratch)
        self.projection(block, "output", read, y)

    def dense(self, layer: DenseFeedForward, x: int, y: int) -> None:
        hidden = self.register("hidden of dense", (1 if layer.gate_up is None else 2) * layer.hidden)
        if layer.gate_up is not None:
            self.linear(layer.gate_up, x, hidden)
            self.add(instructions.SWIGLU, hidden, hidden + layer.hidden, layer.hidden, 1)
        else:
            assert layer.up is not None
            self.linear(layer.up, x, hidden)
            self.add(instructions.RELU2, hidden, layer.hidden)
        self.linear(layer.down, hidden, y)

    def channel_mix(self, layer: ChannelMix, x: int, y: int) -> None:
        width = self.width
        before, stream = self.register("before", width), self.register("stream", width)
        hidden_width = len(layer.key.weight)
        hidden = self.register("hidden of channels", hidden_width)
        self.add(instructions.SHIFT, x, before, self.state(), width)
        self.add(instructions.MIX, x, before, self.weight(layer, "x_k"), stream, width)
        self.linear(layer.key, stream, hidden)
        self.add(instructions.RELU2, hidden, hidden_width)
        self.linear(layer.value, hidden, y)

    def experts(self, layer: MoeFeedForward, number: int, x: int, y: int) -> None:
        router, width = layer.router, self.width
        _demand(type(router) is Router)
        count, k = self.setting(router, "experts"), self.setting(router, "top_k")
        gated = self.setting(layer, "activation") == "swiglu"
        hidden_width = layer.w_down.shape[1]
        scratch = self.register("of expert", 4 * width)
        hidden = self.register("hidden of expert", layer.w_up.shape[2])
        logits = self.register("router", 2 * count + 2)
        self.product(x, self.weight(router, "weight"), logits, router.weight.shape)
        bias = self.weight(router, "bias")
        weights = (self.weight(layer, "w_up"), self.weight(layer, "w_down"))
        self.routers.append(str(number))
        sizes = (count, k, width, hidden_width, int(gated))
        places = (scratch, hidden, len(self.routers))
        self.add(instructions.EXPERTS, x, y, logits, bias, *weights, *sizes, *places)
        if layer.shared is not None:
            _demand(type(layer.shared) is DenseFeedForward and layer.shared.tensor is None)
            assert isinstance(layer.shared, DenseFeedForward)
            shared = self.register("shared", width)
            self.dense(layer.shared, x, shared)
            self.add(instructions.ADD, shared, y, width)
