"""What is said of settings of stage B that a phase cannot use: before the training, and not when the phase begins."""

from __future__ import annotations

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

CONFIG = "configs/cdrmix-reason-tiny.yaml"
OWN = "phases.plasticity.train=own"


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ([OWN, "plastic_lora.enabled=false"], "phases.plasticity.train", "all: reasoning.plastic_lora has no adapters"),
        ([OWN, "plastic_lora.rwkv7=[]"], "phases.plasticity.train", "all: reasoning.plastic_lora has no adapters"),
        (["phases.acceptance.train=all"], "phases.acceptance.steps", "0 with train: all"),
        (["controller.enabled=false"], "phases.acceptance.steps", "0 without reasoning.controller.enabled and"),
        (["plastic_lora.rwkv7=[]"], "phases.acceptance.steps", "0 without reasoning.controller.enabled and adapters"),
        (
            ["phases.policy.steps=1", "rl.horizon=3"],
            "rl.horizon",
            "at least 4, the chunks of an episode and its answer",
        ),
        (["phases.policy={steps: 1, chunks: 8}", "rl.horizon=8"], "rl.horizon", "at least 9, the chunks"),
        (["operations.chunks=9", "rl.horizon=9"], "rl.horizon", "at least 10, the chunks"),
        (["memory.tokens=8", "memory.heads=3"], "memory.heads", "a divisor of reasoning.memory.tokens=8"),
        (["memory.max_tokens=16"], "memory.max_tokens", "at least reasoning.chunk=32, which is an episode"),
        (
            [
                "memory.max_tokens=16",
                "phases.operations.steps=0",
                "phases.operations_imitation.steps=0",
                "phases.plasticity.replay=[operations_imitation]",
            ],
            "memory.max_tokens",
            "at least reasoning.chunk=32, which is an episode",
        ),
    ],
)
def test_what_a_phase_cannot_use_is_refused(overrides: list[str], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(CONFIG, [f"reasoning.{each}" for each in overrides])
    assert f"reasoning.{key}: found" in str(caught.value)
    assert f"allowed: {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["plastic_lora.enabled=false", "phases.acceptance.steps=0"],
        [OWN, "plastic_lora.enabled=false", "phases.plasticity.steps=0", "phases.acceptance.steps=0"],
        ["memory.max_tokens=16", "phases.operations.steps=0", "phases.operations_imitation.steps=0"],
        ["rl.horizon=3", "phases.policy.steps=0", "phases.operations.steps=0"],
    ],
)
def test_what_no_phase_uses_is_not_refused(overrides: list[str]) -> None:
    Config.from_yaml(CONFIG, [f"reasoning.{each}" for each in overrides])
