"""Implementations of a mixture-of-experts layer: cdrmix's operators, PyTorch in two ways, and packages for training.

Each takes x [T, D], the router's logits [T, E] in float32 and the weights in its own layout, and returns y [T, D]: the
k largest logits of each token, weights from a softmax over them, nothing dropped. If a package's router cannot be given
logits, `routed` replaces it.

Our layout is [E, D, F] and [E, F, D] for relu2; [E, D, 2F] for swiglu, with a hidden's gate and up in adjacent columns.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cdrmix import ops

OURS = "cdrmix"
LOOP = "PyTorch, loop over experts"
GROUPED = "PyTorch, grouped_mm"
TRANSFORMERS = "transformers"
DEEPSPEED = "DeepSpeed, native MoE"
SCATTERMOE, SONICMOE, LIGER = "ScatterMoE", "SonicMoE", "Liger-Kernel"

Call = Callable[[Tensor, Tensor, list[Tensor]], Tensor]  # x, logits, weights -> y


@dataclass(frozen=True)
class Layer:
    """What every implementation needs in advance. activation: "relu2" or "swiglu"."""

    d_model: int
    hidden: int
    experts: int
    k: int
    activation: str

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"


@dataclass(frozen=True)
class Implementation:
    """A layer to be measured. arrange: its leaves from our two weights; restore: ours from its leaves' gradients."""

    call: Call
    arrange: Callable[[Tensor, Tensor], list[Tensor]] = lambda w_up, w_down: [w_up, w_down]
    restore: Callable[[list[Tensor]], tuple[Tensor, Tensor]] = lambda leaves: (leaves[0], leaves[1])


def halves_apart(w_up: Tensor) -> Tensor:
    """[..., 2F] from adjacent columns to all gates, then all ups."""
    return torch.cat([w_up[..., 0::2], w_up[..., 1::2]], -1)


def halves_together(w_up: Tensor) -> Tensor:
    """The inverse of `halves_apart`."""
    return torch.stack(w_up.chunk(2, -1), -1).flatten(-2)


def apart(layer: Layer, call: Call, *, transposed: bool) -> Implementation:
    """An implementation with gates before ups. transposed: with nn.Linear's layout, [E, 2F, D] and [E, D, F]."""

    def turned(x: Tensor) -> Tensor:
        return x.mT if transposed else x

    def arrange(w_up: Tensor, w_down: Tensor) -> list[Tensor]:
        up = halves_apart(w_up) if layer.gated else w_up
        return [turned(up).contiguous(), turned(w_down).contiguous()]

    def restore(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        up = turned(leaves[0])
        return halves_together(up) if layer.gated else up, turned(leaves[1])

    return Implementation(call, arrange, restore)


def routed(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Weights and experts, [T, K], in plain PyTorch."""
    chosen_TK, experts_TK = logits_TE.topk(k, -1)
    return chosen_TK.softmax(-1), experts_TK


def activated(z: Tensor, layer: Layer) -> Tensor:
    """The activation in plain PyTorch, on gates before ups."""
    if not layer.gated:
        return z.relu().square()
    gate, up = z.chunk(2, -1)
    return nn.functional.silu(gate) * up


def compiled_later(call: Call, dynamic: bool | None = None) -> Call:
    """torch.compile of `call`, made at its first use, so that listing a peer does not import the compiler."""
    made: list[Call] = []

    def run(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        if not made:
            made.append(torch.compile(call, dynamic=dynamic))
        return made[0](x, logits, weights)

    return run


def ours(layer: Layer, recompute: bool = False) -> Implementation:
    """This package's operators."""

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        w_up, w_down = weights
        routing = ops.route_topk(logits, layer.k)
        return ops.moe_experts(x, w_up, w_down, routing, activation=layer.activation, recompute=recompute)

    return Implementation(call)


def loop(layer: Layer, compiled: bool = False) -> Implementation:
    """The naive way: find each expert's tokens, compute them, add them up."""

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        w_up, w_down = weights
        weights_TK, experts_TK = routed(logits, layer.k)
        y = torch.zeros_like(x)
        for expert in range(layer.experts):
            token, choice = torch.where(experts_TK == expert)
            rows = activated(x[token] @ w_up[expert], layer) @ w_down[expert]
            y.index_add_(0, token, rows * weights_TK[token, choice, None].to(x.dtype))
        return y

    return apart(layer, compiled_later(call, dynamic=True) if compiled else call, transposed=False)


def grouped_mm(layer: Layer, compiled: bool = False) -> Implementation:
    """PyTorch's grouped product as torchtitan calls it: sort, copy, one product a matrix, scale in float32, add up."""

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        weights_TK, experts_TK = routed(logits, layer.k)
        order = experts_TK.flatten().argsort(stable=True)
        token = order // layer.k
        counts = (experts_TK.flatten()[:, None] == torch.arange(layer.experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return torch._grouped_mm(rows, weight.mT, offs=ends)

        rows = x.index_select(0, token)
        if layer.gated:
            hidden = nn.functional.silu(product(rows, weights[0])) * product(rows, weights[1])
        else:
            hidden = product(rows, weights[0]).relu().square()
        scaled = product(hidden, weights[-1]).float() * weights_TK.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x).index_add(0, token, scaled.to(x.dtype))

    def arrange(w_up: Tensor, w_down: Tensor) -> list[Tensor]:
        parts = [w_up[..., 0::2], w_up[..., 1::2]] if layer.gated else [w_up]
        return [part.mT.contiguous() for part in (*parts, w_down)]

    def restore(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        *parts, w_down = (leaf.mT for leaf in leaves)
        return torch.stack(parts, -1).flatten(-2), w_down

    return Implementation(compiled_later(call) if compiled else call, arrange, restore)


def transformers(layer: Layer) -> Iterator[tuple[str, Implementation]]:
    """Its experts' modules, Mixtral's for SwiGLU and Nemotron-H's for relu^2, in the two ways that fit the memory."""

    def make(way: str) -> Implementation:
        def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
            if not made:
                made.append(module())
            weights_TK, experts_TK = routed(logits, layer.k)
            named = dict(zip(names, weights, strict=True))
            return functional_call(made[0], named, (x, experts_TK, weights_TK.to(x.dtype)))

        def module() -> nn.Module:
            config = types.SimpleNamespace(hidden_size=layer.d_model, moe_latent_size=None, _experts_implementation=way)
            if layer.gated:
                from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

                config.num_local_experts, config.intermediate_size = layer.experts, layer.hidden
                config.hidden_act = "silu"
            else:
                from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts as Experts

                config.n_routed_experts, config.moe_intermediate_size = layer.experts, layer.hidden
                config.mlp_hidden_act = "relu2"
            with torch.device("meta"):  # the call passes the weights
                return Experts(config)

        made: list[nn.Module] = []
        names = ("gate_up_proj" if layer.gated else "up_proj", "down_proj")
        return apart(layer, call, transposed=True)

    owner = "MixtralExperts" if layer.gated else "NemotronHExperts"
    for way in ("eager", "grouped_mm"):
        yield f"{TRANSFORMERS}, {owner}, {way}", make(way)


def deepspeed(layer: Layer) -> Iterator[tuple[str, Implementation]]:
    """Its layer for one process, nothing dropped, no noise: every expert is padded to the rows of the fullest."""
    if layer.k != 2:
        return

    def build() -> nn.Module:
        from deepspeed.moe.experts import Experts
        from deepspeed.moe.sharded_moe import MOELayer, top2gating

        class Gate(nn.Module):
            def forward(self, x: Tensor, used: None, sparse_routes: bool, use_tutel: bool) -> object:
                return top2gating(given[0], 1.0, 4, False, None, False, sparse_routes)

        class Expert(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                width = layer.hidden * (2 if layer.gated else 1)
                self.up = nn.Parameter(torch.empty(layer.d_model, width))
                self.down = nn.Parameter(torch.empty(layer.hidden, layer.d_model))

            def forward(self, x: Tensor) -> Tensor:
                return activated(x @ self.up, layer) @ self.down

        with torch.device("meta"):
            experts = Experts(Expert(), layer.experts)
        return MOELayer(Gate(), experts, "ep_size_1", 1, layer.experts)

    made: list[nn.Module] = []
    given: list[Tensor] = []  # the logits of the current call
    names = [f"experts.deepspeed_experts.{i}.{name}" for name in ("up", "down") for i in range(layer.experts)]

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        if not made:
            os.environ.setdefault("DS_ACCELERATOR", x.device.type)
            made.append(build())
        given[:] = [logits]
        return functional_call(made[0], dict(zip(names, weights, strict=True)), (x[None], None))[0]

    def arrange(w_up: Tensor, w_down: Tensor) -> list[Tensor]:
        up = halves_apart(w_up) if layer.gated else w_up
        return [one.contiguous() for one in (*up.unbind(), *w_down.unbind())]

    def restore(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        up = torch.stack(leaves[: layer.experts])
        return halves_together(up) if layer.gated else up, torch.stack(leaves[layer.experts :])

    yield DEEPSPEED, Implementation(call, arrange, restore)


def scattermoe(layer: Layer) -> Iterator[tuple[str, Implementation]]:
    """Its two products around the activation, from its own package or from the copy in Axolotl."""

    def functions() -> types.ModuleType:
        if importlib.util.find_spec("scattermoe"):
            return importlib.import_module("scattermoe.parallel_experts")
        # Axolotl's packages above the copy import Axolotl's own dependencies; the copy itself does not need them.
        name = "scattermoe_of_axolotl"
        if name not in sys.modules:
            found = importlib.util.find_spec("axolotl")
            assert found is not None
            assert found.submodule_search_locations is not None
            folder = Path(next(iter(found.submodule_search_locations)))
            package = types.ModuleType(name)
            package.__path__ = [str(folder / "integrations" / "kernels" / "libs" / "scattermoe_lora")]
            sys.modules[name] = package
        return importlib.import_module(f"{name}.parallel_experts")

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        theirs = functions()
        w_up, w_down = (weight.permute(0, 2, 1) for weight in weights)
        weights_TK, experts_TK = routed(logits, layer.k)
        order = theirs.flatten_sort_count(experts_TK, num_experts=layer.experts)
        z = theirs.parallel_linear(x, w_up, layer.k, *order, grouped_out=True)
        hidden, gates = activated(z, layer), weights_TK.to(x.dtype)
        return theirs.parallel_linear(hidden, w_down, 1, *order, grouped_in=True, gates=gates)

    where = "its package" if importlib.util.find_spec("scattermoe") else "Axolotl's copy"
    yield f"{SCATTERMOE}, {where}", apart(layer, call, transposed=True)


def sonicmoe(layer: Layer) -> Iterator[tuple[str, Implementation]]:
    """Its layer for given routes; gates and ups in adjacent rows, where ours are in columns."""

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        from cutlass.base_dsl.common import DSLBaseError
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType

        weights_TK, experts_TK = routed(logits, layer.k)
        token_R = torch.arange(x.shape[0], dtype=torch.int32, device=x.device).repeat_interleave(layer.k)
        w_up, w_down = (weight.permute(1, 2, 0) for weight in weights)
        stream = torch.cuda.current_stream().cuda_stream
        try:
            y, _ = moe_general_routing_inputs(
                *(x, weights_TK.flatten(), token_R, experts_TK.flatten().to(torch.int32)),
                *(w_up, None, w_down, None, layer.experts, stream, ActivationType.SWIGLU),
                is_inference_mode_enabled=not torch.is_grad_enabled(),
            )
        except DSLBaseError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return y

    def arrange(w_up: Tensor, w_down: Tensor) -> list[Tensor]:
        return [w_up.mT.contiguous(), w_down.mT.contiguous()]

    yield SONICMOE, Implementation(call, arrange, lambda leaves: (leaves[0].mT, leaves[1].mT))


def liger(layer: Layer) -> Iterator[tuple[str, Implementation]]:
    """Its fused experts in Triton."""

    def call(x: Tensor, logits: Tensor, weights: list[Tensor]) -> Tensor:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        weights_TK, experts_TK = routed(logits, layer.k)
        return LigerFusedMoEFunction.apply(x, *weights, experts_TK.to(torch.int32), weights_TK)

    yield LIGER, apart(layer, call, transposed=True)


def implementations(device: str, layer: Layer) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The implementations that can be measured, ours first, and the reasons for the absent ones."""
    found = {OURS: ours(layer), f"{OURS}, recompute=True": ours(layer, recompute=True)}
    absent = {"MegaBlocks": "has source distributions alone, to be compiled against the machine's CUDA"}
    found[GROUPED] = grouped_mm(layer)
    only_gated = {} if layer.gated else dict.fromkeys((SONICMOE, LIGER), "has gated activations alone")
    on_gpus = {} if device == "cuda" else dict.fromkeys((SCATTERMOE, SONICMOE, LIGER), "its kernels are for GPUs")
    absent |= only_gated | on_gpus
    kernels = (
        (SCATTERMOE, ("scattermoe",) if importlib.util.find_spec("scattermoe") else ("axolotl",), scattermoe),
        (SONICMOE, ("sonicmoe", "quack", "cutlass"), sonicmoe),
        (LIGER, ("liger_kernel",), liger),
        (TRANSFORMERS, ("transformers",), transformers),
        (DEEPSPEED, ("deepspeed",), deepspeed),
    )
    for name, modules, make in kernels:
        missing = [module for module in modules if not importlib.util.find_spec(module)]
        if name in absent:
            continue
        if missing:
            absent[name] = f"{' and '.join(missing)} not installed"
        else:
            found |= dict(make(layer))
    found[LOOP] = loop(layer)
    if device == "cuda":
        found[f"{GROUPED}, compiled"] = grouped_mm(layer, compiled=True)
        found[f"{LOOP}, compiled"] = loop(layer, compiled=True)
    else:
        absent["PyTorch, compiled"] = "on a CPU the products are not its own, and it compiles for minutes"
    return found, absent
