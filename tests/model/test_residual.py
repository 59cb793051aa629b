"""The residual stream's dtype: the configured one, the same model up to roundings, float32 where it matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.training.build import build_loss_model

TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
SMALL = ("model.d_model=64", "model.vocab_size=300", "model.feed_forward.hidden=32", "model.attention.heads=2")


def make(*overrides: str) -> LanguageModel:
    torch.manual_seed(0)
    model = build_loss_model(Config.from_yaml(TINY, (*SMALL, "model.attention.kv_heads=2", *overrides))).language_model
    with torch.no_grad():
        for parameter in model.parameters():  # no output is zero
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def run(model: LanguageModel, *, autocast: bool) -> tuple[list[torch.dtype], Tensor, list[Tensor]]:
    """dtypes of the stream at each norm of a block, hidden states, and all gradients."""
    seen: list[torch.dtype] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        seen.extend((inputs[0].dtype, outputs[0].dtype))

    hooks = [
        norm.register_forward_hook(look)
        for block in model.blocks
        for norm in (block.mixer_norm, block.feed_forward_norm)
    ]  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 300, (2, 24), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden_BTD = model(ids_BT).hidden_BTD
    (hidden_BTD * torch.randn(hidden_BTD.shape, generator=generator)).sum().backward()
    for hook in hooks:
        hook.remove()
    gradients = [torch.zeros(1) if x.grad is None else x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    return seen, hidden_BTD.detach(), gradients


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        (("train.precision=bf16",), torch.bfloat16),
        (("train.precision=bf16", "train.activation_checkpointing=true"), torch.bfloat16),
        (("train.precision=bf16", "train.residual_dtype=fp32"), torch.float32),
        (("train.precision=fp32",), torch.float32),
    ],
)
def test_the_stream_has_the_configured_dtype(overrides: tuple[str, ...], dtype: torch.dtype) -> None:
    seen, hidden_BTD, _ = run(make(*overrides), autocast="train.precision=bf16" in overrides)
    assert set(seen) == {dtype}
    assert len(seen) >= 16
    assert hidden_BTD.dtype == torch.float32, "what the loss and the heads of stage B read is never narrowed here"


def test_without_autocast_the_stream_is_float32() -> None:
    """As when a trained model is evaluated or generates."""
    model = make("train.precision=bf16")
    assert set(run(model, autocast=False)[0]) == {torch.float32}


def test_a_narrow_stream_is_the_same_model_up_to_roundings() -> None:
    """Against float32: the stream's roundings, 8 sums of 2^-8 each at most, are of the size of those that the products
    make in bfloat16 anyway; the error may be twice that of a wide stream, and is far from that of a missing term.
    Without experts: a rounding that gives a token to another expert is no small one."""
    dense = "model.feed_forward.kind=dense"
    _, exact, exact_gradients = run(make(dense, "train.precision=fp32"), autocast=False)
    errors = {}
    for name in ("fp32", "bf16"):
        _, hidden_BTD, gradients = run(
            make(dense, "train.precision=bf16", f"train.residual_dtype={name}"), autocast=True
        )
        off = sum((x - y).square().sum() for x, y in zip(gradients, exact_gradients, strict=True))
        size = sum(y.square().sum() for y in exact_gradients)
        errors[name] = (float((hidden_BTD - exact).norm() / exact.norm()), float((off / size) ** 0.5))
    assert 0 < errors["fp32"][0] < errors["bf16"][0] < 0.03
    for wide, narrow in zip(errors["fp32"], errors["bf16"], strict=True):
        assert narrow < 2 * wide + 0.01
