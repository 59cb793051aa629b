"""Packed documents in models of transformers: as in separate passes, or refused."""

from __future__ import annotations

import copy
import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cdrmix.errors import ConfigError
from cdrmix.hf import mamba
from cdrmix.hf.head import head_layer, head_logits, head_loss, probe_head
from cdrmix.hf.packing import Packing, choose_packing, decode, leak, packed_arguments

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
architectures: Any = importlib.import_module("hf_architectures")
sys.path.remove(str(BENCHMARKS))
ARCHITECTURES, tiny = architectures.ARCHITECTURES, architectures.tiny

OPERATORS = ("nemotron_h", "mamba2", "bamba", "falcon_h1", "zamba2", "granitemoehybrid")
REFUSED = ("bloom", "jamba", "mamba", "lfm2", "qwen3_next", "olmo_hybrid", "recurrent_gemma")
QUICK = ("llama", "qwen3", "nemotron", "gpt_oss", "opt", "gemma2", "lfm2", *OPERATORS)
DOCUMENTS = ((5, 17, 10), (9, 1, 15, 7))  # lengths in the two rows
VOCAB = 320
Separate = tuple[Tensor, float, dict[str, Tensor]]


pytestmark = pytest.mark.usefixtures("without_fla")


def build(architecture: str) -> PreTrainedModel:
    return random(tiny(architecture, VOCAB))


def random(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and scales begin as 0 and 1, which hides errors
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids and targets [2, 32], weights, cu_seqlens."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, VOCAB, (2, 2, 32), generator=generator)
    weights = (torch.rand(2, 32, generator=generator) > 0.2).float()
    ends = torch.tensor([0, *(length for row in DOCUMENTS for length in row)]).cumsum(0)
    return ids, targets, weights, ends.int()


def separate(model: PreTrainedModel) -> Separate:
    """Logits, loss and gradients of the documents one by one, by transformers alone."""
    ids, targets, weights, cu_seqlens = batch()
    logits = []
    for start, end in itertools.pairwise(cu_seqlens):
        logits.append(model(input_ids=ids.view(1, -1)[:, start:end], use_cache=False).logits[0])
    joined = torch.cat(logits).float()
    losses = torch.nn.functional.cross_entropy(joined, targets.view(-1), reduction="none")
    loss = (losses * weights.view(-1)).sum()
    loss.backward()
    return joined.detach(), loss.item(), taken_gradients(model)


def taken_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_as_separate(
    model: PreTrainedModel, packing: Packing, wanted: tuple[Tensor, float, dict[str, Tensor]]
) -> None:
    ids, targets, weights, cu_seqlens = batch()
    head, layer = probe_head(model), head_layer(model)
    hidden = decode(model, packing, ids, cu_seqlens).hidden_BTD.flatten(0, 1)
    logits = head_logits(head, layer, hidden)
    loss = head_loss(head, layer, hidden, targets.view(-1), weights.view(-1))
    loss.backward()
    gradients = taken_gradients(model)
    wanted_logits, wanted_loss, wanted_gradients = wanted
    sigma = float((logits.detach() - wanted_logits).abs().max() / wanted_logits.std())
    assert sigma <= 5e-6, f"logits differ by {sigma:.1e} standard deviations"
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    # Some are only rounding, as that of a key's bias: none counts for less than a thousandth of the largest.
    least = 1e-3 * max(gradient.norm() for gradient in wanted_gradients.values())
    for name, gradient in gradients.items():
        difference = float((gradient - wanted_gradients[name]).norm() / wanted_gradients[name].norm().clamp(min=least))
        assert difference <= 1e-5, f"the gradient of {name} differs by {difference:.1e}"


@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_packed_documents_are_as_in_separate_passes_or_refused(architecture: str) -> None:
    model = build(architecture)
    wanted = separate(model)
    assert mamba.is_installed(model) is False
    assert (mamba.install(model) > 0) is (architecture in OPERATORS) is mamba.is_installed(model)
    if architecture in REFUSED:
        with pytest.raises(ConfigError, match=rf"{architecture}.*model.packing: rows") as refused:
            choose_packing(model)
        assert refused.value.exit_code == 2
        packing = choose_packing(model, "rows")
        assert packing.way == "rows"
    else:
        packing = choose_packing(model)
        assert packing.way != "rows"
    check_as_separate(model, packing, wanted)


def test_rows_are_padded_to_less_than_twice_their_length_and_keep_the_routers() -> None:
    model = build("qwen3_moe").eval()
    ids, _, _, cu_seqlens = batch()
    seen: list[tuple[int, ...]] = []

    def call(arguments: dict[str, Any]) -> Any:
        seen.append(tuple(arguments["input_ids"].shape))
        return model.base_model(**arguments)

    options = {"output_router_logits": True}
    rows = decode(model, Packing("rows"), ids, cu_seqlens, options=options, call=call)
    assert seen == [(1, 1), (2, 7), (3, 15), (1, 17)]  # of the lengths 5, 17, 10, 9, 1, 15, 7
    packed = decode(model, Packing("positions"), ids, cu_seqlens, options=options)
    torch.testing.assert_close(rows.hidden_BTD, packed.hidden_BTD)
    assert [logits.shape for logits in rows.router_logits] == [(64, 4), (64, 4)]
    torch.testing.assert_close(rows.router_logits, packed.router_logits)
    seen.clear()
    next(model.parameters()).ds_id = 0  # as DeepSpeed marks weights that it shards
    sharded = decode(model, Packing("rows"), ids, cu_seqlens, call=call)
    assert seen == [(7, 17)]
    torch.testing.assert_close(sharded.hidden_BTD, packed.hidden_BTD)


def test_flash_attention_gets_one_row_and_the_starts_of_the_documents() -> None:
    """Without a GPU the same arguments go to sdpa, which reads the positions."""
    model = build("llama")
    wanted = separate(model)
    *_, cu_seqlens = batch()
    arguments = packed_arguments(model, Packing("flat"), 2, 32, cu_seqlens)
    assert arguments["position_ids"].shape == (1, 64)
    assert torch.equal(arguments["cu_seq_lens_q"], cu_seqlens)
    assert (arguments["max_length_q"], arguments["max_length_k"]) == (17, 17)
    assert "attention_mask" not in arguments
    check_as_separate(model, Packing("flat"), wanted)


@pytest.mark.parametrize("architecture", ["llama", "nemotron_h", "lfm2"])
def test_each_row_is_a_document_without_starts(architecture: str) -> None:
    model = build(architecture)
    ids, *_ = batch()
    for way in ("positions", "flat", "rows"):
        if architecture == "llama" or way != "flat":
            hidden = decode(model, Packing(way), ids, None).hidden_BTD
            torch.testing.assert_close(hidden, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)


def use_generator(*_: object) -> None:
    torch.rand(1)


def test_the_test_of_isolation_finds_a_leak_and_leaves_no_trace() -> None:
    model = build("nemotron_h")
    draw = model.model.layers[0].register_forward_pre_hook(use_generator)  # stands for dropout
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    assert leak(model, Packing("positions")) > 1e-3
    mamba.install(model)
    assert leak(model, Packing("positions", operators=True)) == 0.0
    draw.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("changed", [{"attention_mask": torch.ones(1, 16)}, {"use_cache": True}], ids=str)
def test_a_mask_of_ones_or_a_cache_is_found_to_leak(changed: dict[str, Any]) -> None:
    model = build("qwen3").eval()
    assert leak(model, Packing("positions")) == 0.0
    assert leak(model, Packing("positions"), call=lambda arguments: model.model(**(arguments | changed))) > 1e-3


def test_positions_that_do_not_restart_are_found() -> None:
    """The documents of this call are isolated, so the gradient is 0, but the second has the positions of one row."""
    model = build("gpt2").eval()

    def without_positions(arguments: dict[str, Any]) -> Any:
        return model.base_model(**{name: value for name, value in arguments.items() if name != "position_ids"})

    assert leak(model, Packing("masks")) == 0.0
    assert leak(model, Packing("masks"), call=without_positions) > 0.01


@pytest.mark.parametrize(
    ("error", "found", "message"),
    [(ValueError, ConfigError, "masks, which it refuses"), (torch.OutOfMemoryError, torch.OutOfMemoryError, "no room")],
)
def test_masks_that_are_refused_are_named_and_full_memory_is_not_taken_for_it(
    error: type[Exception], found: type[Exception], message: str
) -> None:
    model = build("qwen3").eval()

    def call(arguments: dict[str, Any]) -> Any:
        if "attention_mask" in arguments:
            raise error("no room")
        return model.model(**arguments, attention_mask=torch.ones(1, 16))  # documents see each other

    with pytest.raises(found, match=message):
        choose_packing(model, call=call)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "nemotron_h", "gpt_oss"])
def test_isolation_is_tested_in_bfloat16(architecture: str) -> None:
    model = build(architecture).to(torch.bfloat16)
    mamba.install(model)
    assert choose_packing(model).way == ("masks" if architecture == "gpt_oss" else "positions")


def test_checkpointed_layers_get_the_documents_again() -> None:
    model = build("nemotron_h")
    wanted = separate(model)
    mamba.install(model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    check_as_separate(model, choose_packing(model), wanted)


@pytest.mark.parametrize(
    "architecture", [name if name == "nemotron_h" else pytest.param(name, marks=pytest.mark.slow) for name in OPERATORS]
)
def test_generation_with_a_cache_is_that_of_transformers(architecture: str) -> None:
    model = build(architecture).eval()
    prompt = batch()[0][:1, :11]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "attention_mask": torch.ones_like(prompt)}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(prompt, **options)
    mamba.install(model)
    found = model.generate(prompt, **options)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.sequences, wanted.sequences)


def test_only_one_model_gets_the_operators_and_gives_them_back() -> None:
    model, other = build("nemotron_h"), build("nemotron_h")
    names, forward = list(model.state_dict()), type(model.model.layers[0].mixer).forward
    assert mamba.install(model) == mamba.install(model) == 2
    assert list(model.state_dict()) == names
    assert type(model.model.layers[0].mixer).forward is forward
    assert not mamba.is_installed(other)
    twin = copy.deepcopy(model)  # calls its own weights, not those of the model
    with torch.no_grad():
        twin.model.layers[0].mixer.D.zero_()
    ids, _, _, cu_seqlens = batch()
    packing = Packing("positions", operators=True)
    assert not torch.equal(*(decode(x, packing, ids, cu_seqlens).hidden_BTD for x in (model, twin)))
    mamba.restore(model)
    assert not mamba.is_installed(model)
    with pytest.raises(ValueError, match="packed sequences"):  # of transformers, without a CUDA build
        decode(model, packing, ids, cu_seqlens)


def test_the_operators_are_not_given_what_a_decoder_passes_to_all_its_layers() -> None:
    model = build("granitemoehybrid").eval()
    ids, _, _, cu_seqlens = batch()
    wanted = decode(model, Packing("rows"), ids, cu_seqlens, options={"output_router_logits": True})
    mamba.install(model)
    found = decode(model, choose_packing(model), ids, cu_seqlens, options={"output_router_logits": True})
    torch.testing.assert_close(found.hidden_BTD, wanted.hidden_BTD)
    torch.testing.assert_close(found.router_logits, wanted.router_logits)


def test_the_time_steps_keep_their_limits() -> None:
    config = tiny("mamba2", VOCAB)
    config.time_step_limit = (0.6, 0.7)  # softplus of 0 is 0.69
    model = random(config)
    wanted = separate(model)
    mamba.install(model)
    check_as_separate(model, choose_packing(model), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_isolation_is_tested_through_the_module_of_an_engine(stage: int) -> None:
    """In a process of its own, for DeepSpeed keeps state. A threshold of 0 shards every weight of the tiny model."""
    code = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch
from hf_architectures import tiny
from transformers import AutoModelForCausalLM
from cdrmix.config.schema import Config
from cdrmix.hf import mamba
from cdrmix.hf.head import Head, probe_head
from cdrmix.hf.packing import Packing, choose_packing, decoder_of, leak
from cdrmix.training.distributed import join

class Root(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, arguments=None, ids=None):
        if arguments is None:
            return self.model(input_ids=ids, use_cache=False).logits
        return decoder_of(self.model)(**arguments)

join(Config.from_yaml({str(BENCHMARKS.parent / "configs" / "cpt-tiny.yaml")!r}))
import deepspeed
model = AutoModelForCausalLM.from_config(tiny("nemotron_h"))
mamba.install(model)
zero = dict(stage={stage}, stage3_param_persistence_threshold=0)
config = dict(train_batch_size=1, optimizer=dict(type="Adam", params=dict(torch_adam=True)), zero_optimization=zero)
engine, *_ = deepspeed.initialize(model=Root(model), config=config)
call = lambda arguments: engine.module(arguments)
assert probe_head(model, lambda ids: engine.module(ids=ids)) == Head()
assert choose_packing(model, call=call) == Packing("positions", operators=True)
assert leak(model, Packing("positions", operators=True), call=lambda a: call(a | dict(use_cache=True))) > 1e-3
loss = engine(ids=torch.arange(32).view(2, 16)).square().mean()
engine.backward(loss)
engine.step()
assert choose_packing(model, call=call) == Packing("positions", operators=True)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_the_convolution(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 3, 10), (3, 4), (3,))
    )
    cu_seqlens = torch.tensor([0, 6, 7, 10, 20], dtype=torch.int32)

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return mamba._convolution(x, weight, bias if biased else None, "silu", cu_seqlens)

    assert torch.autograd.gradcheck(convolved, (x, weight, bias))
