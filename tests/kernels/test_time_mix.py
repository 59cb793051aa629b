"""The element-wise ops around the recurrence on every implementation, against float64: values and all gradients.

Bars, as RMS ratios: a float32 result is a few rounded operations (2^-24 each) and a sum over a head; parameters'
gradients are sums over tokens. 2e-6 is 34 roundings, and any wrong term is far above. A gradient that is a small
difference of large terms (of y, through its norm) is held to the same bar, since inputs are of order 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from examples import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.kernels.time_mix import cpu as time_mix_cpu
from cdrmix.kernels.time_mix import reference
from cdrmix.kernels.time_mix import triton as time_mix

BAR = 2e-6
IMPLEMENTATIONS = ["triton", "cpu"]
Tensors = dict[str, Tensor | None]
Op = Callable[..., Tensor | tuple[Tensor, ...]]

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
sizes = st.tuples(st.integers(1, 2), st.integers(1, 37), st.sampled_from([(1, 32), (3, 32), (2, 64), (1, 128)]))


def streams_inputs(batch: int, length: int, heads: int, head_size: int, *, last: bool, starts: bool) -> Tensors:
    x = torch.randn(batch, length, heads * head_size)
    return {
        "x_BTD": x,
        "mixes_6D": torch.rand(6, heads * head_size),
        "last_BD": torch.randn_like(x[:, 0]) if last else None,
        "starts_BT": torch.rand(batch, length) < 0.3 if starts else None,
    }


def keys_inputs(batch: int, length: int, heads: int, head_size: int, *, values: bool) -> Tensors:
    names = ["k", "decay", "rate", "v", *(["v_first", "v_gate"] if values else [])]
    tokens = {name: torch.randn(batch, length, heads * head_size) * 2 for name in names}
    names = ["w0", "a0", "k_k", "k_a", *(["v0"] if values else [])]
    channels = {name: torch.randn(heads * head_size) for name in names}
    return dict.fromkeys(("v_first", "v_gate", "v0")) | tokens | channels


def output_inputs(batch: int, length: int, heads: int, head_size: int) -> Tensors:
    tokens = {name: torch.randn(batch, length, heads, head_size) for name in "yrkv"}
    gate = torch.randn(batch, length, heads * head_size)
    channels = {name: torch.randn(heads * head_size) for name in ("weight", "bias")}
    return {**tokens, "gate": gate, "r_k": torch.randn(heads, head_size), **channels}


def every(batch: int, length: int, heads: int, head_size: int) -> list[tuple[str, Tensors]]:
    """Each op with each choice of optional inputs."""
    sizes = batch, length, heads, head_size
    return [
        *(
            ("streams", streams_inputs(*sizes, last=last, starts=starts))
            for last in (False, True)
            for starts in (False, True)
        ),
        *(("keys", keys_inputs(*sizes, values=values)) for values in (False, True)),
        ("output", output_inputs(*sizes)),
    ]


def converted(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {key: x.to(dtype) if x is not None and x.is_floating_point() else x for key, x in tensors.items()}


def call(module: object, name: str, tensors: Tensors, head_size: int) -> tuple[Tensor, ...]:
    extra = {"head_size": head_size} if name == "keys" else {}
    found = getattr(module, f"time_mix_{name}")(**tensors, **extra)
    return (found,) if isinstance(found, Tensor) else found


def run(
    module: object, name: str, tensors: Tensors, head_size: int, dtype: torch.dtype, needed: set[str] | None = None
) -> dict[str, Tensor]:
    """Outputs by number, and the gradients of the inputs in `needed` (all floating ones) by name."""
    leaves = {key: x if x is None else x.detach() for key, x in converted(tensors, dtype).items()}
    for key, x in leaves.items():
        if x is not None and x.is_floating_point():
            x.requires_grad_(needed is None or key in needed)
    outputs = call(module, name, leaves, head_size)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    wanted = {key: x for key, x in leaves.items() if x is not None and x.requires_grad}
    reached = [y for y in outputs if y.requires_grad]
    reached_weights = [weight for y, weight in zip(outputs, weights, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad(reached, list(wanted.values()), reached_weights)
    found = {str(i): y.detach() for i, y in enumerate(outputs)}
    return found | {f"d{key}": dx for key, dx in zip(wanted, gradients, strict=True)}


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@implementations
@given(seed=st.integers(0, 10**6), size=sizes)
# No shrinking: it takes minutes in the interpreter.
@settings(max_examples=examples(3), phases=[Phase.generate])
def test_values_and_gradients_are_near_float64(implementation: str, seed: int, size: tuple) -> None:  # type: ignore[type-arg]
    batch, length, (heads, head_size) = size
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDRMIX_BACKEND", implementation)
        for name, tensors in every(batch, length, heads, head_size):
            exact = run(reference, name, tensors, head_size, torch.float64)
            found = run(ops, name, tensors, head_size, torch.float32)
            assert found.keys() == exact.keys()
            for key, value in exact.items():
                assert error(found[key], value) < BAR, f"{name} {key} {list(value.shape)}"


@implementations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rounding of the result (at most 2^-9 or 2^-12, its RMS 0.58 of that), nothing more; log_w stays float32 but
    beside bfloat16 on a GPU."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(0)
    bar = {torch.bfloat16: 2**-9, torch.float16: 2**-12}[dtype]
    wide = torch.bfloat16 if (implementation, dtype) == ("triton", torch.bfloat16) else torch.float32
    if implementation == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available():
        bar *= 2  # Triton's interpreter cuts bfloat16 off instead of rounding
    for name, tensors in every(2, 9, 2, 32):
        rounded, widened = converted(tensors, dtype), converted(converted(tensors, dtype), torch.float64)
        exact = call(reference, name, widened, 32)
        found = call(ops, name, rounded, 32)
        for i, (y, wanted) in enumerate(zip(found, exact, strict=True)):
            assert y.dtype == (wide if (name, i) == ("keys", 0) else dtype)
            assert error(y, wanted) < (BAR if y.dtype == torch.float32 else bar), f"{name} {i}"
        for key, dx in run(ops, name, tensors, 32, dtype).items():
            assert dx.dtype == (wide if (name, key) == ("keys", "0") else dtype)
            assert dx.isfinite().all()


@implementations
def test_only_some_inputs_need_gradients(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(1)
    for name, tensors in every(1, 5, 1, 32)[3:]:
        whole = run(ops, name, tensors, 32, torch.float32)
        for key, x in tensors.items():
            if x is not None and x.is_floating_point():
                part = run(ops, name, tensors, 32, torch.float32, {key})
                assert [k for k in part if k.startswith("d")] == [f"d{key}"]
                assert torch.equal(part[f"d{key}"], whole[f"d{key}"]), f"{name} {key}"


@implementations
def test_an_output_that_nobody_uses(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    x = torch.randn(1, 6, 32, requires_grad=True)
    mixes = torch.rand(6, 32)
    streams = ops.time_mix_streams(x, mixes)
    (found,) = torch.autograd.grad(streams[2].sum() + streams[5].sum(), x)
    exact = 2 - mixes[2] - mixes[5] + functional.pad((mixes[2] + mixes[5]).expand(5, -1), (0, 0, 0, 1))
    torch.testing.assert_close(found[0], exact)


@implementations
def test_documents_packed_equal_documents_apart_to_the_bit(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any position: rows of 3, 7, 1 and 150 tokens, alone and in one row. Parameters' sums are in pieces."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(2)
    lengths = [3, 7, 1, 150] if implementation == "cpu" else [3, 7, 1, 21]
    x = torch.randn(1, sum(lengths), 64, requires_grad=True)
    mixes = torch.rand(6, 64)
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts[0, torch.tensor(lengths).cumsum(0)[:-1]] = True
    weights = torch.randn(6, 1, sum(lengths), 64)
    packed = ops.time_mix_streams(x, mixes, None, starts)
    (dx,) = torch.autograd.grad(packed, x, list(weights))
    position = 0
    for length in lengths:
        span = slice(position, position + length)
        alone = ops.time_mix_streams(x[:, span], mixes)
        (dalone,) = torch.autograd.grad(alone, x, list(weights[:, :, span]))
        assert all(torch.equal(left[:, span], right) for left, right in zip(packed, alone, strict=True))
        assert torch.equal(dx[:, span], dalone[:, span])
        position += length
    for name, tensors in every(3, 11, 2, 32)[4:]:
        order = torch.tensor([2, 0, 1])
        rows = {key: x[order] if x is not None and x.shape[0] == 3 else x for key, x in tensors.items()}
        straight, turned = call(ops, name, tensors, 32), call(ops, name, rows, 32)
        assert all(torch.equal(left[order], right) for left, right in zip(straight, turned, strict=True))


@implementations
def test_thirty_runs_have_the_same_bits(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(3)
    for name, tensors in every(1, 19, 1, 32)[3:]:
        first = run(ops, name, tensors, 32, torch.float32)
        for _ in range(29 if implementation == "cpu" else 2):  # the interpreter has one thread and no race to lose
            again = run(ops, name, tensors, 32, torch.float32)
            assert all(torch.equal(first[key], again[key]) for key in first)


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(4)
    before = torch.get_num_threads()
    try:
        for name, tensors in every(2, 700, 4, 32)[3:]:
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(run(ops, name, tensors, 32, torch.float32))
            for other in results[1:]:
                assert all(torch.equal(results[0][key], other[key]) for key in other), name
    finally:
        torch.set_num_threads(before)


def test_reference_equals_the_formulas_in_torch() -> None:
    torch.manual_seed(5)
    x, mixes, last = torch.randn(2, 5, 64).double(), torch.rand(6, 64).double(), torch.randn(2, 64).double()
    before = torch.cat([last.unsqueeze(1), x[:, :-1]], 1)
    for stream, mix in zip(reference.time_mix_streams(x, mixes, last), mixes, strict=True):
        torch.testing.assert_close(stream, torch.lerp(x, before, mix))
    t = {key: x.double() for key, x in keys_inputs(2, 5, 2, 32, values=True).items() if x is not None}
    found = reference.time_mix_keys(**t, head_size=32)
    rate = torch.sigmoid(t["a0"] + t["rate"])
    kk = functional.normalize((t["k"] * t["k_k"]).view(2, 5, 2, 32), dim=-1, eps=1e-12)
    wanted = (
        -torch.exp(-functional.softplus(-(t["w0"] + t["decay"])) - 0.5),  # the paper's form of the log decay
        t["k"] * torch.lerp(torch.ones(64).double(), rate, t["k_a"]),
        -kk,
        kk * rate.view(2, 5, 2, 32),
        torch.lerp(t["v"], t["v_first"], torch.sigmoid(t["v0"] + t["v_gate"])),
    )
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right.view(2, 5, 2, 32))
    t = {key: x.double() for key, x in output_inputs(2, 5, 2, 32).items() if x is not None}
    normed = functional.group_norm(t["y"].view(10, 64), 2, t["weight"], t["bias"], 64e-5).view(2, 5, 2, 32)
    bonus = torch.einsum("bthk,bthk,hk->bth", t["r"], t["k"], t["r_k"]).unsqueeze(-1)
    expected = (normed + bonus * t["v"]).view(2, 5, 64) * t["gate"]
    torch.testing.assert_close(reference.time_mix_output(**t), expected)


@implementations
def test_extremes_are_finite_and_nan_is_seen(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero key normalises to zero with finite gradients; pinned sigmoids keep their slopes; NaN is passed on."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(6)
    tensors = keys_inputs(1, 4, 1, 32, values=True)
    for name, value in (("decay", 12.0), ("rate", -14.0), ("v_gate", -60.0)):
        tensors[name] = torch.full((1, 4, 32), value)
    for name in ("w0", "a0", "v0"):
        tensors[name] = torch.zeros(32)
    tensors["k"] = torch.zeros(1, 4, 32)
    exact = run(reference, "keys", tensors, 32, torch.float64)
    found = run(ops, "keys", tensors, 32, torch.float32)
    for key, value in exact.items():
        assert error(found[key], value) < BAR, key
    tensors["decay"] = torch.full((1, 4, 32), -1e4)
    assert run(ops, "keys", tensors, 32, torch.float32)["0"].abs().max() < 1e-37
    tensors["decay"] = torch.full((1, 4, 32), torch.nan)
    tensors["k"] = torch.full((1, 4, 32), torch.nan)
    log_w, new_k, a, b, _ = call(ops, "keys", tensors, 32)
    assert all(x.isnan().all() for x in (log_w, new_k, a, b))


def test_exp_of_the_cpu_kernels() -> None:
    """1.1 units in the last place over a dense grid; the bound is in its docstring."""
    x = -torch.linspace(0, 87, 1 << 18).view(-1, 128)
    zeros, ones, out = torch.zeros_like(x), torch.ones(128), torch.empty_like(x)
    # v' = v + (v_first - v) sigmoid(v_gate) is sigmoid(x) for v = 0, v_first = 1: e / (1 + e), 2 roundings more
    time_mix_cpu._values_forward(0, 1, *(t.numpy() for t in (zeros, zeros + 1, x, ones * 0, out)))
    exact = torch.sigmoid(x.double())
    assert float(((out.double() - exact).abs() / exact).max()) < 3 * 2**-23


def test_launches_go_to_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which of several need not be the tensors': every launch is guarded."""
    inside, launched = [], []

    @contextlib.contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    class Launched:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: launched.append(list(inside))

    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    monkeypatch.setattr(time_mix, "on", guard)
    kernels = [name for name in vars(time_mix) if name.startswith("time_mix_") and name.endswith("_kernel")]
    for name in kernels:
        monkeypatch.setattr(time_mix, name, Launched())
    for name, tensors in (*every(1, 5, 1, 32)[:1], *every(1, 5, 1, 32)[5:]):
        run(ops, name, tensors, 32, torch.float32)
    assert len(kernels) == 7
    assert launched == [[torch.device("cpu")]] * 7


def test_first_block_hands_v_through() -> None:
    tensors = keys_inputs(1, 3, 2, 32, values=False)
    assert call(ops, "keys", tensors, 32)[4].data_ptr() == tensors["v"].data_ptr()  # type: ignore[union-attr]


@implementations
def test_inputs_that_are_not_contiguous(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    for name, tensors in every(2, 6, 2, 32)[3:]:
        strided = {key: x if x is None else x.repeat_interleave(2, -1)[..., ::2] for key, x in tensors.items()}
        for left, right in zip(call(ops, name, tensors, 32), call(ops, name, strided, 32), strict=True):
            assert torch.equal(left, right)


def test_errors_name_the_argument() -> None:
    x, mixes = torch.randn(1, 4, 64), torch.rand(6, 64)
    with pytest.raises(ValueError, match=r"mixes_6D must be \[6, 64\]; found \[5, 64\]"):
        ops.time_mix_streams(x, mixes[:5])
    with pytest.raises(ValueError, match=r"starts_BT must be bool \[1, 4\]; found torch\.int64"):
        ops.time_mix_streams(x, mixes, None, torch.zeros(1, 4, dtype=torch.int64))
    tensors = keys_inputs(1, 4, 2, 32, values=True)
    with pytest.raises(ValueError, match="v_first, v_gate and v0 go together"):
        ops.time_mix_keys(**(tensors | {"v0": None}), head_size=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rate is torch\.bfloat16, but k is torch\.float32"):
        ops.time_mix_keys(**(tensors | {"rate": tensors["rate"].bfloat16()}), head_size=32)  # type: ignore[arg-type,union-attr]
    with pytest.raises(ValueError, match="width 64 is not a multiple of the head size 48"):
        ops.time_mix_keys(**tensors, head_size=48)  # type: ignore[arg-type]


def test_autocast_gives_streams_in_its_dtype() -> None:
    x, mixes = torch.randn(1, 4, 64), torch.rand(6, 64)
    with torch.autocast("cpu", torch.bfloat16):
        streams = ops.time_mix_streams(x, mixes)
    for stream, exact in zip(streams, reference.time_mix_streams(x, mixes), strict=True):
        assert stream.dtype == torch.bfloat16
        torch.testing.assert_close(stream, exact.bfloat16(), rtol=2**-8, atol=0)


def test_activation_checkpointing_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands saved tensors out once, so that a backward pass may look at them once."""
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    for name, tensors in every(1, 5, 1, 32)[3:]:
        leaves = [x.requires_grad_() for x in tensors.values() if x is not None and x.is_floating_point()]
        results = []
        for again in (False, True):
            arguments = (ops, name, tensors, 32)
            outputs = checkpoint(call, *arguments, use_reentrant=False) if again else call(*arguments)
            results.append(torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves))  # type: ignore[arg-type]
        assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
