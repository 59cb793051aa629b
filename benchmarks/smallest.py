"""Runs the Triton kernels, both passes, on the smallest shapes that reach all branches: for memory checkers.

It compiles a kernel for every dtype, width and value of `recompute`, which takes long; smoke.py takes seconds.

compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/smallest.py [--suite NAME] [--dtype NAME]

The recurrence: two chunks and a remainder, packed documents with an empty one, states in and out, unequal widths, with
and without recomputation. The operators around it: with and without documents, and with and without the value residual.
The mixture of experts: sizes that are and are not multiples of tiles, more tokens than a tile, one and none, an expert
without rows, dropped routes, both activations, with and without recomputation; dispatch and combination.
The linear cross-entropy: one chunk and several, aligned and unaligned rows of logits, sets, rows that do not count.
The plastic update: rows, widths and ranks that are and are not multiples of tiles, branches, every rule, starts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cdrmix import ops

WIDTHS = ((64, 64), (32, 32), (128, 128), (32, 64), (128, 64))  # of keys and values
EQUAL = [pair for pair in WIDTHS if pair[0] == pair[1]]
DTYPES = [torch.bfloat16, torch.float32]
SPLITS = ([0, 33, 33, 70], None)  # three documents with an empty one; each row one document

# Tokens, inputs, outputs, rank, width of keys, branches: odd sizes; whole tiles; wide keys; one token.
PLASTIC = ((150, 72, 136, 12, 12, 3), (256, 128, 256, 16, 16, 1), (70, 64, 40, 24, 200, 2), (1, 5, 3, 1, 1, 1))


@dataclass(frozen=True)
class Experts:
    """Sizes of a layer. capacity: most rows of an expert."""

    tokens: int
    d_model: int
    hidden: int
    experts: int
    k: int
    capacity: int | None = None


EXPERTS = (
    Experts(150, 72, 40, 5, 2, capacity=140),  # the first expert is full, the last gets no rows
    Experts(300, 256, 256, 4, 2),
    Experts(1, 64, 64, 16, 3),
    Experts(0, 64, 64, 16, 3),
)


LOSSES = ((1100, 64, 50_257, 2), (40, 32, 512, 1), (1, 8, 1, 1))  # rows, D, V, sets: three chunks, one, one of one row


SCANS = ((64, 64), (16, 16), (128, 64), (24, 40))  # K, V


def main() -> int:
    """Exit code 1 where a value is not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--suite", choices=("wkv7", "moe", "ce", "plastic", "scan"), help="default: all")
    parser.add_argument("--shapes", type=int, help="how many of a suite's widths or shapes, the first ones")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: both, which compiles twice as much")
    arguments = parser.parse_args()
    if arguments.dtype:
        DTYPES[:] = [getattr(torch, arguments.dtype)]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found: PyTorch sees no CUDA device")
    os.environ["CDRMIX_BACKEND"] = "triton"
    torch.manual_seed(0)
    failed = 0
    device = torch.device(arguments.device)
    for suite, runs in (
        ("wkv7", time_mix),
        ("moe", mixtures),
        ("ce", losses),
        ("plastic", plastic_updates),
        ("scan", scans),
    ):
        if arguments.suite in (None, suite):
            for what, finite in runs(device, arguments.shapes):
                failed += not finite
                print(f"{what}: {'finite' if finite else 'NOT FINITE'}")
    return 1 if failed else 0


def time_mix(device: torch.device, shapes: int | None) -> Iterator[tuple[str, bool]]:
    """The recurrence and the operators around it: a label, and whether all values are finite."""
    choices = itertools.product(WIDTHS[:shapes], DTYPES, SPLITS, (False, True))
    for (key_width, value_width), dtype, split, recompute in choices:
        documents = "packed" if split else "one row"
        yield (
            f"wkv7 K {key_width} V {value_width} {dtype} {documents} {recompute=}",
            once(device, key_width, value_width, dtype, split, recompute),
        )
    for (width, _), dtype, packed in itertools.product(EQUAL[:shapes], DTYPES, (True, False)):
        yield f"time mix K {width} {dtype} {'packed' if packed else 'one row'}", around(device, width, dtype, packed)


def mixtures(device: torch.device, shapes: int | None) -> Iterator[tuple[str, bool]]:
    """The mixture of experts: a label, and whether all values are finite."""
    for shape, dtype, activation, recompute in itertools.product(
        EXPERTS[:shapes], DTYPES, ("swiglu", "relu2"), (False, True)
    ):
        finite = mixture(device, shape, dtype, activation, recompute)
        yield f"moe {shape} {dtype} {activation} {recompute=}", finite


def mixture(device: torch.device, shape: Experts, dtype: torch.dtype, activation: str, recompute: bool) -> bool:
    """Routing, dispatch, combination and experts with every gradient; whether all values are finite."""

    def normal(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, device=device).to(kind).requires_grad_()

    logits = normal(shape.tokens, shape.experts, kind=torch.float32)
    tilt = torch.zeros(shape.experts, device=device)
    tilt[0], tilt[-1] = 9.0, -99.0  # the choice of almost all tokens, and of none
    routing = ops.route_topk(logits, shape.k, bias=tilt, capacity=shape.capacity)
    x, wide = normal(shape.tokens, shape.d_model), shape.hidden * (2 if activation == "swiglu" else 1)
    w_up = normal(shape.experts, shape.d_model, wide)
    w_down = normal(shape.experts, shape.hidden, shape.d_model)
    y = ops.moe_experts(x, w_up, w_down, routing, activation=activation, recompute=recompute)
    back = ops.moe_combine(ops.moe_dispatch(x, routing), routing)
    total = y.float().sum() + back.float().sum() + routing.load_balance + routing.z_loss
    gradients = torch.autograd.grad(total, (x, logits, w_up, w_down))
    return all(bool(one.isfinite().all()) for one in (y, back, *gradients))


def losses(device: torch.device, shapes: int | None) -> Iterator[tuple[str, bool]]:
    """The linear cross-entropy with every option and with none: a label, and whether all values are finite."""
    for shape, dtype, every in itertools.product(LOSSES[:shapes], DTYPES, (True, False)):
        yield f"ce {shape} {dtype} {'every option' if every else 'no option'}", loss(device, shape, dtype, every)


def loss(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype, every: bool) -> bool:
    """The losses with both gradients, and without them; a third of the targets has weight 0, another is ignored."""
    rows, d_model, vocabulary, sets = shape
    hidden = torch.randn(rows, d_model, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, d_model, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (sets, rows), device=device)
    weights = None
    if every:
        weights = torch.rand(sets, rows, device=device)
        weights[:, ::3] = 0
        targets[:, 1::3] = -100
    options = {"z_loss": 0.01, "label_smoothing": 0.1} if every else {}
    total = ops.linear_cross_entropy(hidden, weight, targets, weights=weights, **options)
    gradients = torch.autograd.grad(total.sum() / rows, (hidden, weight))
    with torch.no_grad():
        again = ops.linear_cross_entropy(hidden, weight, targets, weights=weights, **options)
    return all(bool(x.isfinite().all()) for x in (total, again, *gradients))


def plastic_updates(device: torch.device, shapes: int | None) -> Iterator[tuple[str, bool]]:
    """The plastic update by every rule, with starts and without: a label, and whether all values are finite."""
    for shape, dtype, rule in itertools.product(PLASTIC[:shapes], DTYPES, ("delta", "hebb", "oja")):
        for starts in (False, True):
            about = f"plastic {shape} {dtype} {rule}{' starts' if starts else ''}"
            yield about, plastic_update(device, shape, dtype, rule, starts)


def plastic_update(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, rule: str, started: bool) -> bool:
    """One chunk of two documents with every gradient, and its commit; whether all values are finite."""
    tokens, inputs, outputs, rank, width, branches = shape

    def normal(*size: int, unit: bool = False, kind: torch.dtype = dtype) -> torch.Tensor:
        x = torch.randn(size, device=device)
        return (torch.nn.functional.normalize(x, dim=-1) if unit else x).to(kind).requires_grad_()

    leaves = (
        *(normal(2, tokens, inputs), normal(outputs, inputs), normal(outputs, rank)),
        *(normal(2, tokens, width), normal(2, tokens, width, unit=True), normal(2, tokens, rank, unit=True)),
        torch.rand(branches, 2, tokens, device=device).to(dtype).requires_grad_(),
        normal(2, rank, width, kind=torch.float32),
    )
    starts = torch.arange(tokens, device=device).expand(2, -1) % 60 == 40 if started else None
    y, a_next = ops.plastic_lora(*leaves, alpha=0.5, decay=0.9, rule=rule, starts=starts)
    committed = ops.plastic_commit(a_next)
    gradients = torch.autograd.grad(y.float().sum() + committed.sum(), leaves)
    return all(bool(x.isfinite().all()) for x in (y, committed, *gradients))


def scans(device: torch.device, shapes: int | None) -> Iterator[tuple[str, bool]]:
    """The SSD scan, inclusive and exclusive: a label, and whether all values are finite."""
    for widths, dtype, exclusive in itertools.product(SCANS[:shapes], DTYPES, (False, True)):
        yield f"scan {widths} {dtype}{' exclusive' if exclusive else ''}", scan(device, widths, dtype, exclusive)


def scan(device: torch.device, widths: tuple[int, int], dtype: torch.dtype, exclusive: bool) -> bool:
    """ssd_scan of packed documents with every gradient, then one step; whether all values are finite."""
    tokens, heads = 70, 4
    q, k = (torch.randn(1, tokens, 2, widths[0], device=device).to(dtype).requires_grad_() for _ in range(2))
    v = torch.randn(1, tokens, heads, widths[1], device=device).to(dtype).requires_grad_()
    log_decay = (-8 * torch.rand(1, tokens, heads, device=device)).requires_grad_()
    state = torch.randn(3, heads, widths[1], widths[0], device=device, requires_grad=True)
    cu_seqlens = torch.tensor([0, 40, 40, tokens], device=device)
    inputs = (q, k, v, log_decay)
    y, last = ops.ssd_scan(*inputs, state=state, cu_seqlens=cu_seqlens, exclusive=exclusive, return_state=True)
    assert last is not None
    gradients = torch.autograd.grad((y.float().sum(), last.square().sum()), (*inputs, state))
    step, after = ops.ssd_scan_step(*(x.detach()[:, -1] for x in inputs), last.detach()[-1:], exclusive)
    return all(bool(x.isfinite().all()) for x in (y, last, *gradients, step, after))


def once(
    device: torch.device, key_width: int, value_width: int, dtype: torch.dtype, split: list[int] | None, recompute: bool
) -> bool:
    """wkv7 with every gradient, then one step from its last state; whether all values are finite."""
    tokens, heads = 70, 2

    def normal(width: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, width, device=device)

    removal = torch.nn.functional.normalize(normal(key_width), dim=-1)
    log_w, rate = -0.6065 * normal(key_width).sigmoid(), normal(key_width).sigmoid()
    parts = (normal(key_width), log_w, normal(key_width), normal(value_width), -removal, removal * rate)
    inputs = [x.to(dtype).requires_grad_() for x in parts]
    documents = 1 if split is None else len(split) - 1
    state = torch.randn(documents, heads, value_width, key_width, device=device, requires_grad=True)
    cu_seqlens = None if split is None else torch.tensor(split, device=device)
    y, last = ops.wkv7(*inputs, state=state, cu_seqlens=cu_seqlens, return_state=True, recompute=recompute)
    assert last is not None
    gradients = torch.autograd.grad((y.float().sum(), last.square().sum()), [*inputs, state])
    r, log_w, k, v, a, b = (x.detach()[:, -1] for x in inputs)
    step, after = ops.wkv7_step(r, log_w, k, v, a, b, last.detach()[-1:])
    return all(bool(x.isfinite().all()) for x in (y, last, *gradients, step, after))


def around(device: torch.device, head_size: int, dtype: torch.dtype, packed: bool) -> bool:
    """The operators before and after the recurrence with every gradient; whether all values are finite.

    packed: with documents, a carried token and the value residual; else without all of these.
    """
    batch, tokens, heads = 2, 35, 3
    width = heads * head_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    def channels() -> torch.Tensor:
        return torch.randn(width, device=device, requires_grad=True)

    x, mixes, last = normal(batch, tokens, width), torch.rand(6, width, device=device, requires_grad=True), None
    starts, v_first, v_gate, v0 = None, None, None, None
    if packed:
        last, starts = normal(batch, width), torch.arange(tokens, device=device).expand(batch, -1) % 9 == 4
        v_first, v_gate, v0 = normal(batch, tokens, width), normal(batch, tokens, width), channels()
    streams = ops.time_mix_streams(x, mixes, last, starts)
    w0, a0, k_k, k_a, weight, bias = parameters = [channels() for _ in range(6)]
    k, decay, rate, v = streams[:4]
    keys = ops.time_mix_keys(k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a, head_size)
    y, r_k = normal(batch, tokens, heads, head_size), torch.randn(heads, head_size, device=device, requires_grad=True)
    r = streams[4].view(y.shape)
    output = ops.time_mix_output(y, r, keys[1], keys[4], streams[5], r_k, weight, bias)
    leaves = [leaf for leaf in (x, mixes, last, v_first, v_gate, v0, *parameters, y, r_k) if leaf is not None]
    total = sum(one.float().sum() for one in (output, *keys[:1], *keys[2:4]))
    assert isinstance(total, torch.Tensor)
    return all(bool(one.isfinite().all()) for one in (output, *keys, *torch.autograd.grad(total, leaves)))


if __name__ == "__main__":
    sys.exit(main())
