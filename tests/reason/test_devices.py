"""Stage B on each device: every phase that an experiment trains changes weights, to the same bits twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

from cdrmix.config.schema import Config
from cdrmix.reason.experiments import ablation, token_memory
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.model import StageBModel
from cdrmix.reason.phase import Phase

FILES = Path(__file__).parents[2] / "configs" / "ablations"
# File, arm, and what makes it short. Together they have every phase that an experiment trains, ids and text.
PHASES = "reasoning.phases."
CASES = {
    "tracking": ("removal-s3", "c=2", ["train.steps=24", "ablation.tracking.lengths=[20]"]),
    "plasticity": ("delta-recall", "on", [f"{PHASES}plasticity.steps=3", "ablation.harder_chunks=[4]"]),
    "acceptance": ("accept-head", "three strengths", [f"{PHASES}plasticity.steps=60", f"{PHASES}acceptance.steps=3"]),
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


@pytest.mark.usefixtures("own_settings")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in ("acceptance", "policy") else case for case in CASES]
)
def test_an_arm_has_the_same_weights_and_measurements_twice(
    case: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arm, short = CASES[case]
    bits: list[bytes] = []  # of the weights after each phase
    train = Trial.train

    def trained(self: Trial, config: Config, model: StageBModel, phase: Phase) -> list[dict[str, float]]:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        records = train(self, config, model, phase)
        after = [parameter.detach().cpu() for parameter in model.parameters()]
        assert next(model.parameters()).device.type == device
        assert any(not torch.equal(one.cpu(), other) for one, other in zip(before, after, strict=True)), phase.name
        bits.append(b"".join(parameter.numpy().tobytes() for parameter in after))
        return records

    monkeypatch.setattr(Trial, "train", trained)
    found = []
    for out in ("one", "other"):
        token_memory._IMITATED.clear()
        overrides = [*short, *SHORT, f"run.device={device}"]
        outcome = ablation.run(FILES / f"{name}.yaml", overrides, [1], tmp_path / out, arms=[arm], say=quiet)
        found.append((outcome.measured[arm][1], tuple(bits)))
        bits.clear()
    assert found[0][0]
    assert found[0] == found[1]
