"""The cost of a training micro-batch on a GPU by counting, without a GPU: bytes, operations, launches, a modelled time.

python step_model.py [--config YAML] [--card NAME] [--operations N] [--label TEXT --append FILE] [KEY=VALUE ...]

One forward and backward pass of the real loss model runs on fake tensors, after a first one that leaves gradients.
Every operation that PyTorch dispatches is counted: bytes of its tensors, multiplications, kernel launches. Time is a
model, which is the same for every version of the code, so that versions can be compared:

    matrix products   operations at 72 % of the card's bf16 peak, or bytes at the measured bandwidth, if that is longer
    our kernels       the estimate of ahead-of-time compilation (results/aot.jsonl, sm_90) by tokens and width; bytes
                      where there is none
    attention         operations at a rate, see ATTENTION_RATES; as if every row were one document
    update            bytes of clipping, AdamW and refreshing the weights' copies, over the micro-batches of a step
    everything else   bytes of its inputs and outputs at the measured bandwidth; views cost nothing

Launches do not overlap, and nothing waits for the host. It runs with CDRMIX_BACKEND=triton and TRITON_INTERPRET=1, so
that the operators keep the same tensors for the backward pass as on a GPU; no kernel is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["CDRMIX_BACKEND"] = "triton"
os.environ["TRITON_INTERPRET"] = "1"

import machine
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from cdrmix.config.schema import Config
from cdrmix.errors import CdrmixError
from cdrmix.kernels.cross_entropy import triton as cross_entropy
from cdrmix.model.loss import LossModel
from cdrmix.ops import weights
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.training.build import build_loss_model

AOT = Path(__file__).parent / "results" / "aot.jsonl"
TRITON = "3.7.1"  # its rows are read; those of 3.6.0 are within 1.1 % in four of five cases
REFERENCE_TOKENS, REFERENCE_WIDTH = 32_768, 2_048  # of the launches in results/aot.jsonl
EFFICIENCY = 0.72  # of large products, of the peak: 8192 x 8192 x 8192 on an H200 reached 0.80, layers' sizes less
# Operations a second of attention, forward and backward together, by operation. Dense: the memory-efficient kernel with
# one split, which determinism requires, reads a mask and skips nothing. Varlen: FlashAttention 2 reached 320e12
# forward, and 0.55 of it backward and deterministic, on an H100 (arXiv 2407.08608, figures 5 and 6; its repository on
# the deterministic backward pass).
ATTENTION_RATES = {"dense": 120e12, "varlen": 250e12}
CARDS = {
    "h200": (4.3e12, 989e12),
    "h100": (3.0e12, 989e12),
}  # bytes a second as copied, bf16 operations a second stated

# The kernels that an operator launches: names and configurations in results/aot.jsonl. {K}: the head width.
KERNELS: dict[str, tuple[tuple[str, str], ...]] = {
    "wkv7": (("wkv7_map", "bf16 K{K} V{K} .*C32"), ("wkv7_forward", "bf16 K{K} V{K} .*C32")),
    "wkv7_backward": (
        ("wkv7_backward", "bf16 K{K} V{K} .*C32"),
        ("wkv7_gradient_values", "bf16 K{K} V{K} .*C32"),
        ("wkv7_gradient_keys", "bf16 K{K} V{K} .*C32"),
    ),
    "time_mix_streams": (("time_mix_streams_forward", "bf16 .*HAS_STARTS"),),
    "time_mix_streams_backward": (("time_mix_streams_backward", "bf16 .*HAS_STARTS"),),
    "time_mix_keys": (("time_mix_keys_forward", "bf16 K{K} HAS_V"),),
    "time_mix_keys_backward": (
        ("time_mix_keys_backward", "bf16 K{K} "),
        ("time_mix_values_backward", "bf16 K{K} "),
    ),
    "time_mix_output": (("time_mix_output_forward", "bf16 K{K} "),),
    "time_mix_output_backward": (("time_mix_output_backward", "bf16 K{K} "),),
}
ROUTING_LAUNCHES = {"router_logits_backward": 2, "moe_route": 4, "moe_experts": 4, "moe_experts_backward": 8}
PARTS = (
    *("experts", "projections", "low-rank products", "loss", "attention", "wkv7", "time-mix", "mamba", "routing"),
    *("weight casts and gradient sums", "norms, residual, casts, other"),
)
LOW_RANK = 512  # products with a dimension up to this are low-rank maps
FREE = {
    *("aten.detach.default", "aten.alias.default", "aten.empty.memory_format", "aten.empty_like.default"),
    *("aten.new_empty.default", "aten.lift_fresh.default", "aten.is_same_size.default", "aten._unsafe_view.default"),
}


@dataclasses.dataclass
class Cost:
    """The cost of one part of a micro-batch: kernel launches, bytes moved, floating-point operations, seconds."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __iadd__(self, other: Cost) -> Cost:
        self.launches += other.launches
        self.bytes += other.bytes
        self.flops += other.flops
        self.seconds += other.seconds
        return self


class Counter(TorchDispatchMode):
    """Counts the operations dispatched while it is entered, by part and by operation."""

    def __init__(self, config: Config, model: LossModel, card: str) -> None:
        super().__init__()
        self.bandwidth, self.peak = CARDS[card]
        self.config = config
        # A pass over a tensor of these shapes is a cast, a copy or a sum.
        shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1]
        self.weights = {*shapes, *((*shape[:-2], shape[-1], shape[-2]) for shape in shapes)}
        self.estimates = aot_estimates()
        self.parts: dict[str, Cost] = {part: Cost() for part in PARTS}
        self.operations: dict[tuple[str, str], Cost] = defaultdict(Cost)

    def __torch_dispatch__(self, func: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = func(*arguments, **options)
        if not (func.is_view or str(func) in FREE):
            given, made = tensors_of((arguments, options)), tensors_of(result)
            if made or str(func).endswith("_backward.default") or func._schema.is_mutable:
                flops = 0
                if func is torch.ops.aten.addmm.dtype_out:  # the registry takes its dtype argument for a shape
                    arguments = arguments[:3]
                if func._overloadpacket in flop_registry:
                    flops = flop_registry[func._overloadpacket](*arguments, **options, out_val=result)
                part, cost = self.cost(func, given, made, flops)
                self.parts[part] += cost
                self.operations[part, str(func)] += cost
        return result

    def cost(self, func: Any, given: list[Tensor], made: list[Tensor], flops: int) -> tuple[str, Cost]:
        """The part to which an operation belongs, and its cost."""
        name = func._schema.name.partition("::")[2]
        ours = func.namespace == "cdrmix"
        moved = sum(bytes_of(x) for x in [*given, *made])
        if name.startswith("_scaled_dot_product"):
            return "attention", self.attention(given[0], moved, "dense", name.endswith("backward"))
        if ours and "attention" in name:
            return "attention", self.attention(given[0], moved, "varlen", "backward" in name)
        if ours and name.startswith("linear_cross_entropy"):
            return "loss", self.loss(given, moved)
        if ours and name.startswith(("moe_experts", "moe_product")):
            return "experts", self.experts(name, given, moved)
        if ours and name in KERNELS:
            return ("wkv7" if name.startswith("wkv7") else "time-mix"), self.kernels(name, moved)
        if ours and name.startswith(("moe_", "route")):
            return "routing", self.by_bytes(moved, ROUTING_LAUNCHES.get(name, 1))
        if ours and name.startswith(("ssd_scan", "causal_conv")):
            return "mamba", self.by_bytes(moved)
        if ours and name.startswith("linear") and "norm" not in name:
            flops = linear_flops(given)
        if flops:
            narrow = min(size for x in given if x.dim() > 1 for size in x.shape[-2:])
            part = "routing" if narrow <= self.config.model.feed_forward.experts else "projections"
            return ("low-rank products" if part != "routing" and narrow <= LOW_RANK else part), self.product(
                flops, moved
            )
        weighty = any(tuple(x.shape) in self.weights for x in made or given[:1])
        return PARTS[-2] if weighty else PARTS[-1], self.by_bytes(moved)

    def by_bytes(self, moved: int, launches: int = 1) -> Cost:
        """An operation that only moves bytes."""
        return Cost(launches, moved, 0, moved / self.bandwidth)

    def product(self, flops: int, moved: int, launches: int = 1) -> Cost:
        """A matrix product."""
        return Cost(launches, moved, flops, max(flops / (EFFICIENCY * self.peak), moved / self.bandwidth))

    def kernels(self, name: str, moved: int) -> Cost:
        """An operator with estimated times of its kernels, by tokens and width."""
        model = self.config.model
        scale = tokens_of(self.config) * model.d_model / (REFERENCE_TOKENS * REFERENCE_WIDTH)
        wanted = [(kernel, form.format(K=model.rwkv.head_size)) for kernel, form in KERNELS[name]]
        found = [self.estimates.find(kernel, form) for kernel, form in wanted]
        microseconds = sum(time for time in found if time is not None)
        seconds = max(microseconds * 1e-6 * scale, 0.0) if None not in found else moved / self.bandwidth
        return Cost(len(wanted), moved, 0, seconds)

    def experts(self, name: str, given: list[Tensor], moved: int) -> Cost:
        """Two products forward; backward the gradients of both inputs and both weights.

        Feed-forwards that skip tokens compute model.depth.capacity of the rows. Their bytes are those of all rows.
        """
        ffn, model = self.config.model.feed_forward, self.config.model
        backward = "backward" in name
        if name.startswith("moe_experts"):
            w_up, w_down, weights_TK = given[1 + backward : 4 + backward]
            forward = 2 * weights_TK.numel() * (w_up[0].numel() + w_down[0].numel())
            if model.depth is not None and model.depth.part != "mixer":
                forward = round(model.depth.capacity * forward)
        else:
            widening = 2 if ffn.activation == "swiglu" else 1
            forward = 2 * tokens_of(self.config) * ffn.top_k * model.d_model * ffn.hidden * (1 + widening)
        return self.product(forward * (2 if backward else 1), moved, ROUTING_LAUNCHES.get(name, 2))

    def loss(self, given: list[Tensor], moved: int) -> Cost:
        """Logits, the gradient of the hidden states and that of the weight; and chunks' logits written and read."""
        rows, width = given[0].shape[-2:]
        vocabulary = given[1].shape[0]
        chunks = loss_chunks(rows, width, vocabulary)
        logits = 4 * 2 * rows * vocabulary  # bf16: written, read by the softmax, its gradient written, read twice
        sums = chunks * 2 * 4 * vocabulary * width  # float32 gradient of the weight: read and written for each chunk
        product = self.product(3 * 2 * rows * width * vocabulary, 0, 4 * chunks)
        memory = self.by_bytes(moved + logits + sums, 0)
        return Cost(product.launches, memory.bytes, product.flops, product.seconds + (logits / self.bandwidth))

    def attention(self, q: Tensor, moved: int, kind: str, backward: bool) -> Cost:
        """Two products forward and five backward: of all pairs of a row, or only of causal pairs."""
        length = self.config.data.row_length
        keys = length if kind == "dense" else length // 2  # of a query
        flops = (10 if backward else 4) * tokens_of(self.config) * keys * self.config.model.d_model
        return Cost(3 if backward else 1, moved, flops, max(flops / ATTENTION_RATES[kind], moved / self.bandwidth))


class Estimates:
    """Estimated microseconds of kernels on an H200, by name and configuration: the newest row of each."""

    def __init__(self, rows: Iterator[dict[str, Any]]) -> None:
        self._rows = {(row["name"], row["configuration"]): max(row["bounds"].values()) for row in rows if row["bounds"]}

    def find(self, name: str, form: str) -> float | None:
        """The least estimate among the matching configurations; None where there is none."""
        found = [time for (kernel, text), time in self._rows.items() if kernel == name and re.match(form, text + " ")]
        return min(found, default=None)


def aot_estimates() -> Estimates:
    """The committed estimates."""
    rows = (json.loads(line) for line in AOT.read_text().splitlines())
    return Estimates(row for row in rows if (row.get("architecture"), row.get("triton")) == ("sm_90", TRITON))


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested arguments, each storage once."""
    found: dict[int, Tensor] = {}
    for x in tree_flatten(tree)[0]:
        if isinstance(x, Tensor):
            found.setdefault(id(x), x)
    return list(found.values())


def bytes_of(x: Tensor) -> int:
    """Bytes of a tensor's elements; an expanded dimension counts once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or size == 1 else 1
    return count * x.element_size()


def linear_flops(given: list[Tensor]) -> int:
    """Of our own projections: 2 x the elements of the widest activation x the other dimension of the weight."""
    matrices = sorted((x for x in given if x.dim() >= 2), key=lambda x: x.numel(), reverse=True)
    if len(matrices) < 2:
        return 0
    rows = matrices[0].numel() // matrices[0].shape[-1]
    weight = matrices[-1]
    return 2 * rows * weight.numel()


def loss_chunks(rows: int, width: int, vocabulary: int) -> int:
    """The number of chunks of the linear cross-entropy on a GPU, as its kernels choose it."""
    from cdrmix.kernels.cross_entropy import triton as cross_entropy

    return -(-rows // cross_entropy.chunk_rows(rows, width, vocabulary, 2, rounded=False))


def tokens_of(config: Config) -> int:
    """Tokens of a micro-batch."""
    return config.train.micro_batch_rows * config.data.row_length


def fake_batch(config: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, targets, weights and document starts of a micro-batch."""
    rows, length = config.train.micro_batch_rows, config.data.row_length
    ids = torch.empty(rows, length, dtype=torch.int64)
    starts = torch.empty(4 * rows + 1, dtype=torch.int32)
    return ids, torch.empty_like(ids), torch.empty(rows, length), starts


def count(config: Config, card: str) -> Counter:
    """The cost of a micro-batch that is not the first of its step: it adds to existing gradients."""
    with FakeTensorMode():
        model = build_loss_model(config)
        copied = attach(model)
        counter = Counter(config, model, card)
        for counting in (False, True):
            *batch, starts = fake_batch(config)
            with counter if counting else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                losses = model(*batch, starts, 1.0, 1.0)
            with counter if counting else nullcontext():
                losses.total.backward()
        stored = sum(parameter.numel() for parameter in model.parameters())
    # Norm 4 bytes a parameter, scaling 8; AdamW reads four float32 tensors, writes three; a copy reads 4, writes 2.
    share = config.train.batch_rows // config.train.micro_batch_rows
    counter.parts["update"] = counter.by_bytes((stored * (4 + 8 + 28) + 6 * copied) // share)
    return counter


def attach(model: LossModel) -> int:
    """Attaches to the weights what the engine attaches; returns the number of elements that are copied."""
    weights.attach(model.parameters(), torch.bfloat16, add_gradients=True)
    for user in (sys.modules["cdrmix.ops.linear"], cross_entropy):
        user.add_product = add_product  # type: ignore[attr-defined]
    others = ("embedding", "router", "norm", "conv")  # which no product reads, or one in float32
    return sum(x.numel() for name, x in model.named_parameters() if x.dim() > 1 and not any(o in name for o in others))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """As on a GPU. Fake tensors are on a CPU, where the factors would first be cast to float32."""
    torch.addmm(total, left.mT, right, out_dtype=total.dtype, out=total)


def row_of(counter: Counter, options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The figures as a line of results/step_model.jsonl."""
    total = total_of(counter)
    tokens = tokens_of(counter.config)
    useful = training_flops_per_token(counter.config).total * tokens
    return {
        "suite": "step_model",
        "case": counter.config.run.name,
        "label": options.label,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "card": options.card,
        "overrides": overrides,
        "tokens": tokens,
        "milliseconds": round(total.seconds * 1e3, 2),
        "tokens_per_second": round(tokens / total.seconds),
        "mfu": round(useful / total.seconds / counter.peak, 4),
        "launches": total.launches,
        "bytes": total.bytes,
        "flops": total.flops,
        "parts": {
            part: {
                "milliseconds": round(cost.seconds * 1e3, 2),
                "bytes": cost.bytes,
                "flops": cost.flops,
                "launches": cost.launches,
            }
            for part, cost in counter.parts.items()
            if cost.launches
        },
    }


def total_of(counter: Counter) -> Cost:
    """All parts together."""
    total = Cost()
    for cost in counter.parts.values():
        total += cost
    return total


def show(counter: Counter, row: dict[str, Any], operations: int) -> None:
    """The table by part, and the most expensive operations."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part")
    for heading in ("ms", "GB", "TFLOP", "launches"):
        table.add_column(heading, justify="right")
    total = total_of(counter)
    for part, cost in [*counter.parts.items(), ("total", total)]:
        if cost.launches:
            figures = (cost.seconds * 1e3, cost.bytes / 1e9, cost.flops / 1e12)
            table.add_row(part, *(f"{figure:.1f}" for figure in figures), str(cost.launches))
    console.print(table)
    console.print(
        f"{row['case']}, {row['tokens']:,} tokens on one {row['card']}, modelled: {row['milliseconds']:.0f} ms, "
        f"{row['tokens_per_second']:,} tokens/s, {row['mfu']:.1%} of the peak. Matrix products at {EFFICIENCY:.0%}."
    )
    dearest = sorted(counter.operations.items(), key=lambda item: -item[1].seconds)
    for (part, name), cost in dearest[:operations]:
        console.print(f"{cost.seconds * 1e3:8.2f} ms {cost.bytes / 1e9:7.1f} GB {cost.launches:5d}  {name} ({part})")


def main() -> int:
    """Prints the table; appends the row where a file is named. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="default: the shipped 1b configuration with 8 rows a micro-batch")
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="list the N dearest operations as well")
    parser.add_argument("--label", default="", help="what this version of the code has, for the row")
    parser.add_argument("--append", type=Path, metavar="FILE", help="append the figures to this file of JSON lines")
    options, overrides = parser.parse_known_args()
    if options.config is None:
        options.config = machine.ROOT / "configs" / "cdrmix-core-1b.yaml"
        overrides = ["train.micro_batch_rows=8", *overrides]
    try:
        config = Config.from_yaml(options.config, overrides)
    except CdrmixError as error:
        print(f"step_model.py: {error}", file=sys.stderr)
        return error.exit_code
    counter = count(config, options.card)
    row = row_of(counter, options, overrides)
    show(counter, row, options.operations)
    if options.append:
        with options.append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
