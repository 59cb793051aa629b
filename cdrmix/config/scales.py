"""The named sizes: what `model.size` stands for, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from cdrmix.config.schema import Size


@dataclass(frozen=True)
class Scale:
    """One column of the table of sizes. Widths in elements, horizons in controller steps."""

    # the core model
    d_model: int
    layers: int
    heads: int  # 128 wide at every size
    expert_hidden: int
    init_std_scale: float
    gradient_clip: float
    # the reasoning model on top of it
    lora_rank: int
    lora_alpha: float
    lora_decay: float  # of the fast weights, each controller step
    step_budget: int
    max_branches: int
    memory_dim: int
    memory_top_k: int
    memory_tokens: int
    horizon: int
    latency_weight: float
    stability_weight: float


SCALES: dict[Size, Scale] = {
    "1b": Scale(
        d_model=2048, layers=24, heads=16, expert_hidden=4608, init_std_scale=1.0, gradient_clip=1.0,
        lora_rank=8, lora_alpha=0.20, lora_decay=0.98, step_budget=64, max_branches=3,
        memory_dim=512, memory_top_k=4, memory_tokens=16_384,
        horizon=256, latency_weight=0.01, stability_weight=0.10,
    ),
    "4b": Scale(
        d_model=3072, layers=36, heads=24, expert_hidden=8192, init_std_scale=1.0, gradient_clip=1.0,
        lora_rank=12, lora_alpha=0.18, lora_decay=0.985, step_budget=96, max_branches=3,
        memory_dim=640, memory_top_k=6, memory_tokens=32_768,
        horizon=384, latency_weight=0.01, stability_weight=0.10,
    ),
    "40b": Scale(
        d_model=6144, layers=64, heads=48, expert_hidden=16384, init_std_scale=0.9, gradient_clip=0.9,
        lora_rank=16, lora_alpha=0.16, lora_decay=0.99, step_budget=128, max_branches=4,
        memory_dim=768, memory_top_k=8, memory_tokens=131_072,
        horizon=512, latency_weight=0.008, stability_weight=0.12,
    ),
    "200b": Scale(
        d_model=12288, layers=96, heads=96, expert_hidden=32768, init_std_scale=0.8, gradient_clip=0.8,
        lora_rank=24, lora_alpha=0.15, lora_decay=0.992, step_budget=160, max_branches=4,
        memory_dim=1024, memory_top_k=8, memory_tokens=262_144,
        horizon=768, latency_weight=0.006, stability_weight=0.12,
    ),
}  # fmt: skip


def scale_named(size: object) -> Scale | None:
    """The scale of that name, or None when `size` (whatever it is) names none."""
    return next((SCALES[name] for name in get_args(Size) if name == size), None)
