"""Decoding by CUDA graphs: the ordinary pass is its oracle, and a recorded step reads any later token.

On a CPU the operations of a step are recorded and run again. So a step that depends on a value in Python, such as a
position, or whose state is in new memory, gives wrong results here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.config.schema_layers import Bigrams, Depth, FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.config.schema_reasoning import Controller, Memory, PlasticLora, Reasoning, Rl
from cdrmix.errors import ConfigError
from cdrmix.model import graphs
from cdrmix.model.cache import tensors
from cdrmix.model.decoding import Prefix, prefill_rows, repeat
from cdrmix.model.language_model import LanguageModel
from cdrmix.ops.backend import assume_platform
from cdrmix.reason.rl.rollout import Generated, decode

VOCABULARY, CHUNK, END = 9, 5, 4
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 0], [1, 3, 5, 7], [2], [6, 4, 2]]
LIKE = [[1, 2, 3], [4, 5, 6], [7, 8, 0], [1, 3, 5], [2, 4, 6]]
ADAPTED = Reasoning(
    chunk=CHUNK,
    plastic_lora=PlasticLora(
        rank=3,
        key_width=8,
        alpha=0.5,
        decay=0.9,
        clamp=1.0,
        attention=["query", "key", "value", "output"],
        rwkv7=["receptance", "key", "value", "output"],
    ),
    controller=Controller(step_budget=8, max_branches=1),
    memory=Memory(dim=8, top_k=2, max_tokens=100),
    rl=Rl(horizon=32, latency_weight=0.01, stability_weight=0.1),
)
MODELS: dict[str, dict[str, object]] = {
    "rwkv7 and attention": {},
    "norms of keys, no positions": {"attention": Attention(heads=2, kv_heads=2, qk_norm=True, rope=False)},
    "channel mix": {"feed_forward": FeedForward(kind="channel_mix", hidden=24)},
    "mamba": {
        "layers": 3,
        "mixer_layers": {"mamba2": [0], "routing_mamba": [1]},
        "mamba": Mamba(d_state=16, head_dim=16),
    },
    "bigrams": {"bigrams": Bigrams(rows=31)},
    "adapters": {"adapted": True},
}


class Operations(TorchDispatchMode):
    """Records the operations that run within it: each with its arguments, which are tensors and constants."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Callable[..., Any], Any, Any]] = []  # operation, arguments, result

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: object, arguments: Any = (), options: Any = None
    ) -> Any:
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        result = operation(*arguments, **(options or {}))
        self._recorded.append((operation, (arguments, options or {}), result))
        return result

    def run(self, output: Tensor) -> Tensor:
        """Runs them again; what then stands for `output`, a result of the first run."""
        made: dict[int, Tensor] = {}

        def current(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        for operation, before, result in self._recorded:
            arguments, options = tree_map_only(Tensor, current, before)
            again = operation(*arguments, **options)
            made.update({id(old): new for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True)})
        return made[id(output)]


class Traced:
    """Records the operations of a step. Recording runs them too, so the state before is put back."""

    def __init__(self) -> None:
        self.run_as_they_are, self.recorded, self.run_again = 0, 0, 0

    def run(self, step: graphs.Step) -> Tensor:
        self.run_as_they_are += 1
        return step()

    def record(self, step: graphs.Step) -> graphs.Step:
        self.recorded += 1
        assert isinstance(step, partial)
        decoder: graphs.GraphDecoder = step.func.__self__  # type: ignore[attr-defined]  # a bound method
        state = [*tensors(decoder._state)]
        before = [tensor.clone() for tensor in state]
        with Operations() as operations:
            output = step()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)

        def again() -> Tensor:
            self.run_again += 1
            return operations.run(output)

        return again


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    recorder = Traced()
    monkeypatch.setattr(graphs, "_runs_kernels", lambda weight: True)
    monkeypatch.setattr(graphs, "recorder_of", lambda device: recorder)
    return recorder


def made(options: dict[str, object], dtype: torch.dtype = torch.float64, device: str = "cpu") -> LanguageModel:
    """A model whose every parameter is moved off its initial value, so that all of them matter."""
    reasoning = ADAPTED if options.get("adapted") else None
    config = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "layers": 2,
        "attention_fraction": 0.5,
        "attention": Attention(heads=2, kv_heads=1, rope_theta=20.0),
        "rwkv": Rwkv(head_size=32, decay_rank=3, iclr_rank=5, value_rank=2, gate_rank=7),
        "feed_forward": FeedForward(hidden=13, experts=4),
    }
    torch.manual_seed(1)
    model = (
        LanguageModel(
            Model.model_validate(config | {key: options[key] for key in options if key != "adapted"}),
            reasoning=reasoning,
        )
        .to(device, dtype)
        .eval()
    )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor += 0.1 * torch.randn_like(tensor)
    return model


def started(model: LanguageModel) -> Prefix:
    """15 rows, of different lengths where a model may have them."""
    return repeat(prefill_rows(model, LIKE if model.adapters else PROMPTS), 3)


def continued(model: LanguageModel, switch: str, monkeypatch: pytest.MonkeyPatch, tokens: int = 20) -> Generated:
    """Rows that end one after another: at this temperature all tokens are about as probable as the end."""
    monkeypatch.setenv(graphs.SWITCH, switch)
    generator = torch.Generator().manual_seed(3)
    return decode(model, started(model), tokens, temperature=8.0, generator=generator, end=END)


@pytest.mark.parametrize("name", MODELS)
def test_rollouts_are_those_of_the_ordinary_pass(name: str, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(MODELS[name])
    ordinary = continued(model, "0", monkeypatch)
    assert traced.run_as_they_are == traced.recorded == 0
    found = continued(model, "1", monkeypatch)
    assert torch.equal(found.tokens_BN, ordinary.tokens_BN)
    assert torch.equal(found.mask_BN, ordinary.mask_BN)
    # Sums of some hundred terms in another order, through the layers.
    torch.testing.assert_close(found.log_probs_BN, ordinary.log_probs_BN, rtol=1e-6, atol=1e-6)
    ended = sorted(int(row.sum()) for row in ordinary.mask_BN)
    assert ended[0] < ended[-1], "rows have been dropped"
    assert traced.recorded >= 2, "of all rows and of half of them"
    assert traced.run_again > 2 * traced.recorded
    ends = 0 if not model.adapters else sum((3 + token) % CHUNK == 0 for token in range(1, 20))
    assert traced.run_as_they_are <= 5 + ends, "once each for 15, 8, 4, 2 rows and 1"


def test_the_state_that_it_begins_with_is_not_changed(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graphs.SWITCH, "1")
    model = made({})
    prefix = started(model)
    before = [tensor.clone() for tensor in tensors(prefix.cache)]
    for _ in range(2):
        decode(model, prefix, 12, temperature=1.0, generator=torch.Generator().manual_seed(3))
    assert traced.run_again
    for tensor, old in zip(tensors(prefix.cache), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, graphs.FEWEST),  # one of these is sampled from the prefix
        ({"depth": Depth(capacity=0.5)}, 20),
    ],
    ids=["few tokens", "skipped tokens"],
)
def test_what_graphs_do_not_serve_takes_the_ordinary_pass(
    options: dict[str, object], tokens: int, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(options)
    assert torch.equal(
        continued(model, "1", monkeypatch, tokens).tokens_BN, continued(model, "0", monkeypatch, tokens).tokens_BN
    )
    assert traced.run_as_they_are == 0


def test_a_hook_takes_the_ordinary_pass(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = made({}), []
    handle = model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    continued(model, "1", monkeypatch)
    assert calls
    assert traced.run_as_they_are == 0
    handle.remove()
    continued(model, "1", monkeypatch)
    assert traced.run_again


@pytest.mark.parametrize("switch", ["CDRMIX_DEBUG", "CDRMIX_BACKEND"])
def test_checks_and_the_reference_read_values_on_the_host(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(1)
    with assume_platform("cuda"):
        assert graphs._runs_kernels(weight)
        assert not graphs._runs_kernels(weight.double())
        monkeypatch.setenv(switch, "1" if switch == "CDRMIX_DEBUG" else "reference")
        assert not graphs._runs_kernels(weight)


def test_a_recording_that_fails_names_the_switch(monkeypatch: pytest.MonkeyPatch, traced: Traced) -> None:
    def record(step: graphs.Step) -> graphs.Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(traced, "record", record)
    with pytest.raises(ConfigError, match=r"CDRMIX_CUDA_GRAPHS: .*not permitted .*; unset the variable"):
        continued(made({}), "1", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_rollouts_by_graphs_are_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, and twice with the same bits."""
    model = made(MODELS[name], torch.float32, "cuda")
    ordinary, found, again = (continued(model, switch, monkeypatch) for switch in "011")
    assert torch.equal(found.tokens_BN, ordinary.tokens_BN)
    torch.testing.assert_close(found.log_probs_BN, ordinary.log_probs_BN, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.log_probs_BN, again.log_probs_BN)
