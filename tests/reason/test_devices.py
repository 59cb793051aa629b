"""Stage B on each device: every phase that an experiment trains changes weights, to the same bits twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

from cdrmix.config.schema import Config
from cdrmix.model import compiled
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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
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


def test_a_process_alone_rolls_out_by_the_compiled_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the model, by which processes agree on their passes, would turn it off."""
    name, arm, short = CASES["policy"]
    found: list[object] = []
    make = compiled.decoder

    def decoder(*arguments: Any, **options: Any) -> Any:
        found.append(make(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(compiled, "decoder", decoder)
    few = [f"{PHASES}imitation.steps=1", f"{PHASES}policy={{steps: 1, growth_steps: 1}}"]
    ablation.run(FILES / f"{name}.yaml", [*short, *SHORT, *few], [1], tmp_path, arms=[arm], say=quiet)
    assert found
    assert None not in found


@pytest.mark.slow
def test_an_arm_that_is_killed_in_any_phase_goes_on(tmp_path: Path) -> None:
    """It has the measurements of an arm that is not, to the bit, and makes no step again that a checkpoint has."""
    name, arm, short = CASES["policy"]
    said: list[str] = []

    def measured(out: str, killed_at: str) -> dict[str, float]:
        token_memory._IMITATED.clear()  # as in a new process
        said.clear()

        def say(text: str) -> None:
            said.append(text.strip())
            if said[-1].startswith(killed_at):
                raise KeyboardInterrupt

        outcome = ablation.run(FILES / f"{name}.yaml", [*short, *SHORT], [1], tmp_path / out, arms=[arm], say=say)
        return outcome.measured[arm][1]

    straight = measured("straight", "nothing")
    for killed_at in ("imitation, step 21:", "policy, step 2:"):
        with pytest.raises(KeyboardInterrupt):
            measured("killed", killed_at)
    assert "imitation: continues after step 20" in said
    assert measured("killed", "nothing") == straight
    assert "imitation: continues after step 30" in said
    assert "policy: continues after step 1" in said
    assert [line.split(":")[0] for line in said if ", step " in line] == ["policy, step 2", "policy, step 3"]
    assert not [*(tmp_path / "killed" / ablation.UNFINISHED).iterdir()]
