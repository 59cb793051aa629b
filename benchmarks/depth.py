"""The time of layers and of a step that skip tokens (Mixture-of-Depths), relative to computing every token, on a CPU.

python depth.py [--rounds N]

Each round measures every capacity once, forward and backward, in CPU seconds of one thread, so that other processes
disturb little. Printed are medians over the rounds, relative to a model without depth. A layer has core-tiny's form, at
its width and at twice its width; the step is that of core-tiny, with 2,048 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.model.block import Block
from cdrmix.model.context import Context, make_context
from cdrmix.model.depth import DepthRouter, move_biases
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.mixers.attention import Attention
from cdrmix.model.skipping import mix_kept

CORE_TINY = Path(__file__).parents[1] / "configs" / "cdrmix-core-tiny.yaml"
CAPACITIES = (None, 1.0, 0.75, 0.5, 0.25)
TOKENS, ROWS = 2048, 8


def main() -> None:
    """Prints a table: what, and for every capacity the relative time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':<28}{'ms':>8}" + "".join(f"{name or 'none':>8}" for name in CAPACITIES))
    wide = ["model.d_model=256", "model.feed_forward.hidden=512"]
    for name, overrides, measured in (
        ("experts, D 128", [], feed_forward),
        ("experts, D 256", wide, feed_forward),
        ("dense, D 256", [*wide, "model.feed_forward.kind=dense", "model.feed_forward.hidden=1024"], feed_forward),
        ("attention, D 256", [*wide, "model.depth.part=mixer"], attention),
        ("step, feed-forwards", [], step),
        ("step, both", ["model.depth.part=both"], step),
    ):
        calls = [measured(capacity, overrides) for capacity in CAPACITIES]
        seconds: list[list[float]] = [[] for _ in calls]
        for call in calls:
            call()
        for _ in range(rounds):
            for call, times in zip(calls, seconds, strict=True):
                begin = time.process_time()
                call()
                times.append(time.process_time() - begin)
        medians = [statistics.median(times) for times in seconds]
        shares = "".join(f"{each / medians[0]:>8.2f}" for each in medians)
        print(f"{name:<28}{1000 * medians[0]:>8.1f}{shares}", flush=True)


def made(capacity: float | None, overrides: list[str]) -> LanguageModel:
    """The model, whose routers keep random tokens, as many as their capacity."""
    part = [each for each in overrides if each.startswith("model.depth")]
    depth = [] if capacity is None else [f"model.depth.capacity={capacity}", *part]
    config = Config.from_yaml(CORE_TINY, [*(each for each in overrides if each not in part), *depth])
    model = LanguageModel(config.cdrmix_model)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def feed_forward(capacity: float | None, overrides: list[str]) -> Callable[[], None]:
    """The feed-forward of the second layer, with its decision."""
    block: Any = made(capacity, overrides).blocks[1]
    x = torch.randn(1, TOKENS, block.mixer_norm.weight.numel(), requires_grad=True)
    router = settled(block, x, "feed_forward")
    context = context_of(block, x)

    def call() -> None:
        gate = [] if router is None else [router.gate(x.flatten(0, 1))]
        block.feed_forward(x, context, None, *gate).y.sum().backward()

    return call


def attention(capacity: float | None, overrides: list[str]) -> Callable[[], None]:
    """The last block, attention, without its feed-forward's norm and residual sum: the mixer with its decision."""
    block: Any = made(capacity, overrides).blocks[-1]
    assert isinstance(block.mixer, Attention)
    x = torch.randn(ROWS, TOKENS // ROWS, block.mixer_norm.weight.numel(), requires_grad=True)
    router = settled(block, x, "mixer")
    context = context_of(block, x)

    def call() -> None:
        if router is None:
            y = block.mixer(x, context, None).y
        else:
            y = mix_kept(block.mixer, block.config, x, context, None, router.gate(x.flatten(0, 1))).y
        y.sum().backward()

    return call


def context_of(block: Any, x: torch.Tensor) -> Context:
    """The context of rows [B, T, D] of one document each."""
    return make_context(block.config, *x.shape[:2], None, 0, x.device, attends=True, keep_cache=False)


def settled(block: Block, x: torch.Tensor, branch: str) -> DepthRouter | None:
    """The router of a branch, with a bias that keeps its capacity of the tokens of x; None without one."""
    if branch not in block.depth_routers:
        return None
    router = block.depth_routers[branch]
    assert isinstance(router, DepthRouter)
    gated = router.gate(x.flatten(0, 1)).gated
    router.move(float(gated.threshold), float(gated.lowest), 1.0, 1.0)
    return router


def step(capacity: float | None, overrides: list[str]) -> Callable[[], None]:
    """Forward and backward pass of a step of core-tiny, without the optimizer."""
    model = LossModel(made(capacity, overrides))
    ids, weights = torch.randint(0, 4096, (ROWS, TOKENS // ROWS)), torch.ones(ROWS, TOKENS // ROWS)

    def call() -> None:
        losses = model(ids, ids, weights, None, float(TOKENS))
        losses.total.backward()
        if losses.depth is not None:
            move_biases(model, losses.depth.threshold_G, losses.depth.lowest_G, 1.0, 1.0)

    return call


if __name__ == "__main__":
    main()
