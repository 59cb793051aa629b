"""Stage B on each device: every experiment has the same measurements twice, and all phases train."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.reason.experiments import ablation, token_memory

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

FILES = Path(__file__).parents[2] / "configs" / "ablations"
# File, arm, and what makes it short. Together they have every phase that an experiment trains, ids and text.
PHASES = "reasoning.phases."
CASES = {
    "tracking": ("removal-s3", "c=2", ["train.steps=24", "ablation.tracking.lengths=[20]"]),
    "plasticity": ("delta-recall", "on", [f"{PHASES}plasticity.steps=3", "ablation.harder_chunks=[4]"]),
    "acceptance": ("accept-head", "three strengths", [f"{PHASES}plasticity.steps=2", f"{PHASES}acceptance.steps=3"]),
    "policy": (
        "token-memory-harder",
        "policy",
        [f"{PHASES}imitation.steps=30", f"{PHASES}policy.steps=3", f"{PHASES}policy.growth_steps=2"],
    ),
    "gain": (
        "babilong-memory",
        "qa1",
        [
            f"{PHASES}imitation.steps=3",
            f"{PHASES}policy={{steps: 2, episodes: 2, micro_batch: 40}}",
            "reasoning.rl={credit: gain, group_size: 4}",
        ],
    ),
    "operations": (
        "operations-index",
        "on",
        [f"{PHASES}operations_imitation.steps=3", f"{PHASES}operations.steps=2"],
    ),
}
SHORT = ["ablation.demands=[]", "ablation.chunks=[2]", "ablation.episodes=8"]


def quiet(text: str) -> None:
    pass


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_arm_has_the_same_measurements_twice(case: str, device: str, tmp_path: Path) -> None:
    name, arm, short = CASES[case]
    found = []
    for out in ("one", "other"):
        token_memory._IMITATED.clear()
        outcome = ablation.run(
            FILES / f"{name}.yaml",
            [*short, *SHORT, f"run.device={device}"],
            [1],
            tmp_path / out,
            arms=[arm],
            say=quiet,
        )
        found.append(outcome.measured[arm][1])
    assert found[0]
    assert found[0] == found[1]
