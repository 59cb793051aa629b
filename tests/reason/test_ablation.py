"""Ablations: intervals against tables, verdicts on demands, an interrupted ablation that continues."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from in_process import main

from cdrmix.config.schema import Config
from cdrmix.config.schema_ablation import Demand
from cdrmix.errors import ConfigError
from cdrmix.model import compiled
from cdrmix.reason.experiments import ablation, token_memory
from cdrmix.reason.experiments.table import check, estimate, judge, student_quantile, verdict_line
from cdrmix.reason.experiments.trial import Trial

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "ablations").glob("*.yaml"))

FILE = """
model:
  vocab_size: 300
  d_model: 32
  layers: 1
  attention: {heads: 1, kv_heads: 1}
  rwkv: {head_size: 32, decay_rank: 4, iclr_rank: 4, value_rank: 4, gate_rank: 4}
  feed_forward: {kind: channel_mix, hidden: 32, experts: 1, top_k: 1}
train: {steps: 5, batch_rows: 1, micro_batch_rows: 1, learning_rate: 1.0e-3}
ablation:
  row: "0"
  shows: More steps give more.
  experiment: tracking
  seeds: [1, 2]
  arms:
    few: {}
    many: {says: more steps, set: [train.steps=50]}
  demands:
    - {arm: many, of: steps, minus_arm: few, at_least: 40}
    - {arm: few, of: steps, at_least: 100}
"""
HARDER = ROOT / "configs" / "ablations" / "token-memory-harder.yaml"
CARRIED = HARDER.with_name("babilong-carried.yaml")
SHORT = [
    "reasoning.phases.imitation.steps=30",
    "reasoning.phases.policy={steps: 3, growth_steps: 2}",
    *("ablation.demands=[]", "ablation.chunks=[2]", "ablation.episodes=8"),
]
TINY = (
    FILE.partition("    many:")[0]
    .replace("steps: 5", "steps: 20")
    .replace("seeds: [1, 2]", "seeds: [1]\n  episodes: 8\n  tracking: {lengths: [20]}")
)


@pytest.mark.parametrize(
    ("freedom", "wanted"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, wanted: float) -> None:
    assert student_quantile(freedom) == pytest.approx(wanted, abs=5e-5)  # four printed decimals


def test_an_interval_of_three_seeds() -> None:
    """Mean 2, deviation 1: half width 4.3027 / sqrt 3."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert estimate([4.0]) == (4.0, None, 1)


def judged(values: dict[str, list[float]], demand: Demand) -> str:
    measured = {
        arm: {seed: {"accuracy": value, "other": 0.5} for seed, value in enumerate(those)}
        for arm, those in values.items()
    }
    return judge(demand, measured).outcome


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.96, 0.97, 0.98], "not shown"),  # .97 and .025: from .945
        ([0.97, 0.98, 0.99], "holds"),  # .98 and .025: from .955
        ([0.9, 1.0, 1.0], "not shown"),
        ([0.5, 0.6, 0.7], "fails"),  # .6 and .248: to .848
        ([1.0], "not shown"),  # one seed has no interval
        ([math.nan, 1.0], "fails"),
    ],
)
def test_a_demand_is_judged_by_the_whole_interval(values: list[float], outcome: str) -> None:
    assert judged({"on": values}, Demand(arm="on", of="accuracy", at_least=0.95)) == outcome
    mirrored = [1 - value for value in values]
    assert judged({"on": mirrored}, Demand(arm="on", of="accuracy", at_most=1 - 0.95)) == outcome


def test_a_demand_with_two_bounds() -> None:
    demand = Demand(arm="on", of="accuracy", at_least=0.4, at_most=0.6)
    assert judged({"on": [0.5, 0.51]}, demand) == "holds"  # .505 and .064
    assert judged({"on": [0.5, 0.53]}, demand) == "not shown"  # .515 and .191
    assert judged({"on": [0.8, 0.81]}, demand) == "fails"
    assert judged({"on": [0.2, 0.21]}, demand) == "fails"
    assert judged({}, demand) == "not run"
    assert (
        judged({"on": [0.75, 0.75]}, Demand(arm="on", of="accuracy", at_least=0.75)) == "holds"
    )  # bounds belong to it


def test_a_difference_is_taken_seed_by_seed() -> None:
    demand = Demand(arm="on", of="accuracy", minus_arm="off", at_least=0.1)
    assert judged({"on": [0.8, 0.9, 0.7], "off": [0.2, 0.3, 0.1]}, demand) == "holds"  # seed by seed always .6
    assert judged({"on": [1.0, 0.1, 0.9], "off": [0.2, 0.3, 0.1]}, demand) == "not shown"  # .8, -.2, .8: mean .47
    assert judged({"on": [0.15, 0.25, 0.15], "off": [0.1, 0.2, 0.1]}, demand) == "fails"  # always .05
    no_worse = Demand(arm="on", of="accuracy", minus_arm="off", at_most=0.1)
    assert judged({"on": [0.2, 0.1, 0.3], "off": [0.3, 0.1, 0.2]}, no_worse) == "not shown"  # 0, to .25
    half = Demand(arm="on", of="accuracy", minus_arm="off", times=0.5, at_most=0.0)
    assert judged({"on": [0.2, 0.1], "off": [0.42, 0.22]}, half) == "holds"
    assert judged({"on": [0.22, 0.12], "off": [0.42, 0.22]}, half) == "fails"
    own = Demand(arm="on", of="accuracy", minus_of="other", at_least=0.25)
    assert judged({"on": [0.8, 0.8]}, own) == "holds"


def test_what_nothing_measures_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing measures 'acuracy'; there are accuracy, other"):
        judged({"on": [1.0]}, Demand(arm="on", of="acuracy", at_least=0))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[tuple[int, int]]]:
    """A file, and the (steps, seed) of every run of a stand-in for its experiment."""
    runs: list[tuple[int, int]] = []

    def experiment(config: object, seed: int, say: object) -> dict[str, float]:
        steps = config.train.steps  # type: ignore[attr-defined]
        runs.append((steps, seed))
        if len(runs) == 3:
            raise KeyboardInterrupt
        return {"steps": float(steps), "seed": float(seed)}

    monkeypatch.setattr(ablation, "EXPERIMENTS", {"tracking": experiment})
    path = tmp_path / "steps.yaml"
    path.write_text(FILE)
    return path, runs


def quiet(text: str) -> None:
    pass


@pytest.mark.usefixtures("own_settings")
def test_an_interrupted_table_goes_on(counted: tuple[Path, list[tuple[int, int]]], tmp_path: Path) -> None:
    path, runs = counted
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        ablation.run(path, out=out, say=quiet)
    assert runs == [(5, 1), (50, 1), (5, 2)]
    results = out / ablation.RESULTS
    results.write_bytes(results.read_bytes()[:-20])  # the second line was cut off
    outcome = ablation.run(path, out=out, say=quiet)
    assert runs[3:] == [(50, 1), (5, 2), (50, 2)]
    assert outcome.measured["many"] == {1: {"steps": 50, "seed": 1}, 2: {"steps": 50, "seed": 2}}
    assert [verdict.outcome for verdict in outcome.verdicts] == ["holds", "fails"]
    assert not outcome.holds
    assert (out / "steps.md").read_text() == outcome.table
    assert "many, steps minus few, steps: 45.000 (95 % from 45.000 to 45.000, 2 seeds), at least 40: HOLDS" in (
        outcome.table
    )
    assert "at least 100: FAILS" in outcome.table
    assert ablation.run(path, out=out, say=quiet).table == outcome.table  # nothing is run again
    assert len(runs) == 6


@pytest.mark.slow
def test_of_two_processes_one_runs_an_arm_and_the_other_waits(tmp_path: Path) -> None:
    """Both print its result, which is stored once."""
    path, out = tmp_path / "steps.yaml", tmp_path / "out"
    path.write_text(TINY)
    command = [sys.executable, "-m", "cdrmix.cli", "ablate", "--config", str(path), "--out", str(out)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    told = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    (line,) = (out / ablation.RESULTS).read_text().splitlines()
    assert json.loads(line)["seed"] == 1
    assert sum("continues after" in text or ", step " in text for text in told) == 1, "one trained"
    assert all("steps, few, seed 1: last8@20" in text for text in told)
    assert not [*(out / ablation.UNFINISHED).iterdir()]


@pytest.mark.usefixtures("own_settings")
def test_a_run_of_other_code_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "steps.yaml", []
    path.write_text(TINY)

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("  tracking, step 6:"):
            raise KeyboardInterrupt

    for code in ("one", "one", "other"):
        monkeypatch.setattr(ablation, "_code", lambda code=code: code)
        with pytest.raises(KeyboardInterrupt):
            ablation.run(path, out=tmp_path / "out", say=say)
    assert [text for text in said if "continues" in text] == ["  tracking: continues after step 5"]
    assert sum("is of another version of the code" in text for text in said) == 1


def test_a_folder_is_checked_as_a_whole_and_then_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One command for all tables. A mistake in the last file is said before the first arm is run."""
    runs: list[int] = []

    def experiment(config: object, seed: int, say: object) -> dict[str, float]:
        runs.append(seed)
        return {"steps": float(config.train.steps)}  # type: ignore[attr-defined]

    monkeypatch.setattr(ablation, "EXPERIMENTS", {"tracking": experiment})
    folder, out, said = tmp_path / "files", tmp_path / "out", []
    folder.mkdir()
    with pytest.raises(ConfigError, match="has no files"):
        ablation.run_folder(folder, out=out, say=quiet)
    (folder / "a.yaml").write_text(FILE)
    (folder / "b.yaml").write_text(FILE.replace("minus_arm: few", "minus_arm: fwe"))
    with pytest.raises(ConfigError, match="there is no arm 'fwe'"):
        ablation.run_folder(folder, out=out, say=quiet)
    assert runs == []
    (folder / "b.yaml").write_text(FILE.replace("steps=50", "steps=60"))
    command = ["ablate", "--config", str(folder), "--out", str(out)]
    assert main(command) == 1, "two demands fail"
    assert sorted(runs) == [1, 1, 1, 2, 2, 2], "arms that files share are run once"
    lines = [json.loads(line) | {"seconds": 3600} for line in (out / ablation.RESULTS).read_text().splitlines()]
    (out / ablation.RESULTS).write_text("\n".join(map(json.dumps, lines)) + "\n")
    ablation.run_folder(folder, out=out, say=said.append)
    assert "4 demands: 2 holds, 0 not shown, 2 fails, 0 not run. The runs took 6.00 hours." in said
    assert main([*command, "--arms", "few"]) == 2
    assert len(runs) == 6


def test_what_decides_a_result_decides_its_mark(counted: tuple[Path, list[tuple[int, int]]]) -> None:
    path, _ = counted
    one = ablation.fingerprint(Config.from_yaml(path), 1)
    same = ['ablation.row="9"', "ablation.shows=x", "ablation.demands=[]", "run.name=other", "run.seed=7"]
    assert ablation.fingerprint(Config.from_yaml(path, same), 1) == one
    others = ["train.steps=6", "ablation.episodes=3", "ablation.tracking.task=s3", "model.rwkv.allow_neg_eigval=true"]
    marks = {ablation.fingerprint(Config.from_yaml(path, [other]), 1) for other in others}
    assert len(marks | {one, ablation.fingerprint(Config.from_yaml(path), 2)}) == len(others) + 2


def test_mistakes_are_said_before_anything_is_run(counted: tuple[Path, list[tuple[int, int]]], tmp_path: Path) -> None:
    path, runs = counted
    for text, said in [
        (FILE.replace("minus_arm: few", "minus_arm: fwe"), "there is no arm 'fwe'"),
        (FILE.replace(", at_least: 100", ""), "demands nothing"),
        (FILE.replace("of: steps, at_least: 100", "of: last8@9, at_least: 100"), "'few', which .* at 32, 64, 256"),
        (FILE.replace("train.steps=50", "train.stpes=50"), "stpes"),
        (FILE[: FILE.index("ablation:")], "has no section"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            ablation.run(path, out=tmp_path / "out", say=quiet)
    path.write_text(FILE)
    with pytest.raises(ConfigError, match="there is no arm 'lots'"):
        ablation.run(path, out=tmp_path / "out", arms=["lots"], say=quiet)
    for replay, said in [
        ("text", "an ablation has no stage A"),
        ("operations_imitation", "have no operations"),
        ("plasticity", "reasoning.agent.tokens: true; set reasoning.plasticity.tokens to the same"),
    ]:
        with pytest.raises(ConfigError, match=f"'imitation': reasoning.phases.imitation.replay has '{replay}'.*{said}"):
            ablation.run(HARDER, [*SHORT, f"reasoning.phases.imitation.replay=[{replay}]"], out=tmp_path, say=quiet)
    assert runs == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_it_demands_of_arms_that_it_has(path: Path) -> None:
    section = Config.from_yaml(path).ablation
    assert section is not None
    check(section)
    for arm in section.arms.values():
        Config.from_yaml(path, arm.set)
    assert callable(ablation.EXPERIMENTS[section.experiment])
    assert all(verdict_line(judge(demand, {})).endswith("not run") for demand in section.demands)


@pytest.mark.usefixtures("own_settings")
def test_a_process_alone_rolls_out_by_the_compiled_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the model, by which processes agree on their passes, would turn it off."""
    found: list[object] = []
    make = compiled.decoder

    def decoder(*arguments: Any, **options: Any) -> Any:
        found.append(make(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(compiled, "decoder", decoder)
    few = ["reasoning.phases.imitation.steps=1", "reasoning.phases.policy={steps: 1, growth_steps: 1}"]
    ablation.run(HARDER, [*SHORT, *few], [1], tmp_path, arms=["policy"], say=quiet)
    assert found
    assert None not in found


@pytest.mark.usefixtures("own_settings")
def test_an_arm_trains_what_its_phases_replay(tmp_path: Path) -> None:
    """And arms that differ only in how the replayed episodes are read do not share a model."""
    replay = ["reasoning.phases.imitation={steps: 1, replay: [plasticity]}", "reasoning.plasticity={tokens: true}"]
    replay += ["reasoning.plasticity.task=recall", "reasoning.phases.policy.steps=0"]
    token_memory._IMITATED.clear()
    for carry in ("fast", "all"):
        said: list[str] = []
        changes = [*SHORT, *replay, f"reasoning.carry={carry}"]
        ablation.run(HARDER, changes, [1], tmp_path, arms=["imitation", "two heads"], say=said.append)
        assert sum("imitation, step 1: " in line and "plasticity/loss" in line for line in said) == 2
    assert len(token_memory._IMITATED) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("own_settings")
def test_answers_are_trained_beside_demonstrations(tmp_path: Path) -> None:
    said: list[str] = []
    few = ["model={d_model: 32, vocab_size: 600, layers: 1}", "reasoning.phases.plasticity.steps=1"]
    few += ["reasoning.phases.plasticity.growth_steps=0", "ablation.chunks=[2]", "ablation.episodes=2"]
    ablation.run(CARRIED, few, [1], tmp_path, arms=["rwkv qa1 demonstrated"], say=said.append)
    (trained,) = (line for line in said if "plasticity, step 1: " in line)
    assert "imitation/loss" in trained


@pytest.mark.long
@pytest.mark.usefixtures("own_settings")
def test_an_arm_that_is_killed_in_any_phase_goes_on(tmp_path: Path) -> None:
    """It has the measurements of an arm that is not, to the bit, and makes no step again that a checkpoint has."""
    said: list[str] = []

    def measured(out: str, killed_at: str) -> dict[str, float]:
        token_memory._IMITATED.clear()  # as in a new process
        said.clear()

        def say(text: str) -> None:
            said.append(text.strip())
            if said[-1].startswith(killed_at):
                raise KeyboardInterrupt

        outcome = ablation.run(HARDER, [*SHORT], [1], tmp_path / out, arms=["policy"], say=say)
        return outcome.measured["policy"][1]

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


def test_arms_share_an_imitation_only_if_they_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three arms the first two share it; the third has another bound on the gradients."""
    monkeypatch.setattr(token_memory, "_IMITATED", {})
    trained: list[float] = []

    class Counted:
        def train_phase(self, name: str, config: Config, *_: object) -> None:
            assert name == "imitation"
            trained.append(config.train.gradient_clip)

    for override in ("reasoning.phases.policy.steps=0", "reasoning.phases.policy.steps=5", "train.gradient_clip=0.125"):
        token_memory._imitated(Config.from_yaml(HARDER, [*SHORT, override]), None, cast(Trial, Counted()))
    assert len(trained) == 2
    assert trained[1] == 0.125
