"""The memory model: against measured peaks, against itself, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.gpus import gpu_by_key
from cdrmix.plan import trace as tracing
from cdrmix.plan.fit import MAX_MEMORY_SHARE, Remedy, at_most, check_memory, fit
from cdrmix.plan.machine import Machine, host_memory, machine_for
from cdrmix.plan.memory import memory_of
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.stage_b import phases_of, updates_of
from cdrmix.plan.stage_b_fit import check_phases

CONFIGS = Path(__file__).parents[2] / "configs"
WORKER = Path(__file__).with_name("measure_worker.py")
RELEASED = [f"cdrmix-{kind}-{size}" for size in ("1b", "4b", "40b", "200b") for kind in ("core", "reason")]
# One block of time mix and one of attention: a trace takes as long as the model has operators.
SHORT = ["model.layers=2", "model.attention_fraction=0.5"]
PROCESSES = {"1b": 8, "4b": 8, "40b": 64, "200b": 512}
TINY = {
    "base/tiny": [],
    "cdrmix-hybrid-tiny": [],
    "cdrmix-reason-tiny": [],
    "base/tiny, muon": ["train.optimizer=muon"],
    # Gradients that are there before, and inputs of blocks alone: other moments are the highest.
    "base/tiny, checkpointed": ["train.activation_checkpointing=true", "train.batch_rows=16"],
}


def config_of(name: str, *overrides: str) -> Config:
    return Config.from_yaml(CONFIGS / f"{name}.yaml", list(overrides))


def short(*overrides: str) -> Config:
    return config_of("base/tiny", *SHORT, *overrides)


def card(memory_bytes: int | None, flops: float | None = 1e15) -> Machine:
    return Machine("a card", "cuda", memory_bytes, flops, "a test", False, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case != "cdrmix-reason-tiny" else case for case in TINY]
)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(case: str) -> None:
    name = case.partition(",")[0]
    measured = measured_bytes(name, "", *TINY[case])
    assert memory_of(config_of(name, *TINY[case]), "cpu", 1).tensors == pytest.approx(measured, rel=0.1)


def measured_bytes(name: str, phase: str, *overrides: str) -> int:
    command = [sys.executable, str(WORKER), str(CONFIGS / f"{name}.yaml"), phase, *overrides]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("measured ")[1])


# Episodes of ids, no text beside them; with the likelihood as reward the rollouts of a group differ, and it is kept.
IDS = [
    "run.threads=1",
    "reasoning.agent={task: agent, tokens: true, chunks: 2}",
    "reasoning.operations={task: hops, tokens: true, chunks: 4}",
    "reasoning.phases.plasticity.replay=[]",
    "reasoning.phases.operations_imitation.replay=[]",
    "reasoning.rl.reward=likelihood",
]
LONG = ["reasoning.chunk=128", "reasoning.memory.tokens=8", "model.layers=2"]
POLICY = ["reasoning.phases.policy.steps=2", "reasoning.phases.policy.warmup_steps=0"]
UPDATE = ["reasoning.phases.policy.micro_batch=64", "reasoning.phases.policy.rollout_rows=8"]
IMITATION = ["reasoning.phases.imitation.steps=2", "reasoning.phases.imitation.warmup_steps=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "overrides"),
    [
        ("plasticity", []),
        pytest.param("imitation", IMITATION, marks=pytest.mark.long),
        pytest.param("policy", [*LONG, *POLICY, *UPDATE], marks=pytest.mark.long),
    ],
)
def test_the_estimate_of_an_update_is_within_a_tenth_of_the_measured_peak(phase: str, overrides: list[str]) -> None:
    keys = [*IDS, *overrides]
    (planned,) = phases_of(config_of("cdrmix-reason-tiny", *keys), "cpu", 1, [phase])
    assert planned.moment == "update"
    measured = measured_bytes("cdrmix-reason-tiny", phase, *keys)
    assert planned.memory.tensors == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "overrides"),
    [("policy", [*LONG, *POLICY]), ("acceptance", []), ("operations_imitation", []), ("operations", [])],
)
def test_a_phase_takes_no_more_than_estimated(phase: str, overrides: list[str]) -> None:
    """Sizes that depend on the data are the largest possible, and the compiled decoding step of a CPU takes less."""
    keys = [*IDS, *overrides]
    (planned,) = phases_of(config_of("cdrmix-reason-tiny", *keys), "cpu", 1, [phase])
    assert measured_bytes("cdrmix-reason-tiny", phase, *keys) < 1.1 * planned.memory.tensors


ONLY_POLICY = [
    "model.layers=1",
    *(f"reasoning.phases.{name}.steps=0" for name in ("plasticity", "acceptance", "imitation", "operations", "joint")),
    "reasoning.phases.operations_imitation.steps=0",
    "reasoning.phases.policy={steps: 4, episodes: 4, micro_batch: 64, train: all}",
]


def test_rollouts_need_a_copy_a_reference_or_gathered_layers() -> None:
    def parts(*overrides: str) -> dict[str, int]:
        # So many rollouts at once that they, and not the update, need most.
        many = ["reasoning.phases.policy.episodes=256", "reasoning.phases.policy.micro_batch=1"]
        keys = [*ONLY_POLICY, "train.zero_stage=3", *many, *overrides]
        (phase,) = phases_of(config_of("cdrmix-reason-tiny", *keys), "cuda", 4)
        assert phase.moment == "rollouts"
        return {part.name: part.bytes for part in phase.memory.components}

    sharded, copied = parts(), parts("reasoning.rollout_weights=copied")
    reference = parts("reasoning.rollout_weights=copied", "reasoning.rl.kl_weight=0.1")
    assert copied["copy"] == reference["reference"] == pytest.approx(4 * sharded["weights"], rel=1e-4)
    assert copied["rollouts"] == sharded["rollouts"]
    assert 0 < sharded["gathered"] < copied["copy"]
    assert "gathered" not in copied
    assert "copy" not in sharded


def test_zero_3_keeps_no_casts_of_the_weights_of_other_blocks() -> None:
    """With activation checkpointing the passes of a block need as much in a model of twice as many blocks."""
    keys = ["train.zero_stage=3", "train.activation_checkpointing=true", "data.row_length=64", "model.vocab_size=1024"]
    keys += ["model.feed_forward.hidden=64", "model.attention_fraction=0.0"]
    working = [
        part.bytes
        for layers in (2, 4)
        for part in memory_of(config_of("cdrmix-core-1b", *keys, f"model.layers={layers}"), "cuda", 8).components
        if part.name == "working"
    ]
    assert working[1] == pytest.approx(working[0], rel=0.02)


@pytest.mark.parametrize("name", ["operations_imitation", pytest.param("operations", marks=pytest.mark.long)])
def test_separate_passes_need_the_memory_of_the_largest_pass(name: str) -> None:
    """Together, the gradients of all weights are whole under ZeRO-3, and all windows keep their activations."""
    keys = ["train.zero_stage=3", f"reasoning.phases.{name}={{steps: 1, episodes: 32, train: all}}", "model.layers=1"]
    needed = []
    for passes in ("together", "separate"):
        override = f"reasoning.phases.{name}.window_passes={passes}"
        config = config_of("cdrmix-reason-tiny", *IDS, *keys, override)
        (phase,) = phases_of(config, "cuda", 4, [name])
        assert phase.moment == "update"
        needed.append(sum(part.bytes for part in phase.memory.components if part.name in ("activations", "working")))
    assert needed[1] < needed[0] - 4 * count_parameters(config.cdrmix_model).total_stored


def test_passes_over_windows_of_rollouts_are_as_small_as_the_setting_says() -> None:
    """Also below the size of a group; and summaries in front of the windows count."""
    keys = ["reasoning.rl.group_size=8", "reasoning.phases.operations={steps: 1, episodes: 8, train: all}"]
    found = []
    for micro_batch, stride in ((8, 8), (4, 8), (2, 8), (2, 1)):
        own = [f"reasoning.phases.operations.micro_batch={micro_batch}", f"reasoning.memory.summary_stride={stride}"]
        separate = "reasoning.phases.operations.window_passes=separate"
        config = config_of("cdrmix-reason-tiny", *IDS, *keys, *own, separate)
        works = list(updates_of(config, "operations", 1))
        assert {work.value for work in works} == {micro_batch}
        found.append(max(work.passes.all_tokens for work in works))
        assert config.reasoning is not None
        chunk = config.reasoning.chunk
        longest = (min(config.reasoning.memory.max_spliced, config.reasoning.operations.chunks) + 1) * chunk + 1
        most = micro_batch * config.reasoning.operations.chunks * (chunk + 1)
        assert found[-1] <= max(most, longest + chunk // stride)
    assert found[0] > found[1] > found[2] < found[3]


def test_the_update_of_the_policy_has_the_turns_of_its_own_chunks() -> None:
    """One question of 2 rollouts: with 6 chunks of the phase there are 12 turns, and not the 6 of the agent's 3."""
    keys = ["reasoning.phases.policy.episodes=1", "reasoning.rl.group_size=2", "train.precision=fp32"]
    for chunks, turns in (("null", 6), ("6", 12)):
        config = config_of("cdrmix-reason-tiny", *ONLY_POLICY, *keys, f"reasoning.phases.policy.chunks={chunks}")
        (phase,) = phases_of(config, "cuda", 1)
        assert phase.moment == "update"
        assert phase.work is not None
        assert phase.work.value == turns


def test_a_term_of_the_entropy_keeps_what_its_gradient_needs() -> None:
    """At least one float32 tensor of the logits' size more: 24 turns of 24 written tokens."""
    totals = []
    for weight in (0.0, 0.1):
        config = config_of("cdrmix-reason-tiny", *ONLY_POLICY, f"reasoning.rl.entropy_weight={weight}")
        (phase,) = phases_of(config, "cuda", 1)
        assert phase.moment == "update"
        totals.append(phase.memory.total)
    assert totals[1] - totals[0] >= 4 * 24 * 24 * 1024


@pytest.mark.parametrize("key", ["reasoning.rl.reward=likelihood", "reasoning.rl.credit=gain"])
def test_likelihoods_of_answers_count_as_rollouts(key: str) -> None:
    """With answers of 200 tokens their logits are the most: at least one float32 tensor of their size."""
    many = ["reasoning.phases.policy.episodes=256", "reasoning.phases.policy.micro_batch=1"]
    found = []
    for keys in ([], [key]):
        (phase,) = phases_of(
            config_of("cdrmix-reason-tiny", *ONLY_POLICY, *many, "reasoning.agent.answer_tokens=200", *keys), "cuda", 1
        )
        assert phase.moment == "rollouts"
        assert phase.work is not None
        found.append((phase.memory.total, phase.work.what))
    (plain, _), (with_likelihoods, what) = found
    assert what.endswith("with the right answer")
    assert with_likelihoods > plain
    assert with_likelihoods > 4 * 256 * 8 * 200 * 1024


def test_a_phase_that_does_not_fit_is_refused_with_what_would_fit() -> None:
    # All turns are one micro-batch, of which a second process takes half: more than the buffers of NCCL.
    many = ["reasoning.phases.policy.episodes=64", "reasoning.phases.policy.micro_batch=2048"]
    overrides = [*ONLY_POLICY, *many, "train.precision=bf16"]
    config = config_of("cdrmix-reason-tiny", *overrides)
    (phase,) = phases_of(config, "cuda", 1)
    check_phases(config, 1, print, card(int(phase.memory.total / MAX_MEMORY_SHARE) + 1))
    small = card(int((phase.memory.total - phase.memory.tensors // 3) / MAX_MEMORY_SHARE))
    with pytest.raises(ConfigError, match=r"phase policy of cdrmix-reason-tiny takes .* in its update") as refused:
        check_phases(config, 1, print, small)
    remedy = re.search(r"What would fit: (.*?) \(.*; or (\d+) processes \(", str(refused.value))
    assert remedy is not None
    assert remedy[1] == "train.activation_checkpointing=true reasoning.phases.policy.micro_batch=768"
    check_phases(config_of("cdrmix-reason-tiny", *overrides, *remedy[1].split()), 1, print, small)
    check_phases(config, int(remedy[2]), print, small)


@pytest.mark.parametrize(
    ("accumulation", "checkpointing", "hidden", "row_length"),
    # Of one micro-batch, activations outweigh the gradients in the first case; gradients in the others.
    [
        pytest.param(8, "false", 32, 256, marks=pytest.mark.slow),
        pytest.param(8, "true", 32, 256, marks=pytest.mark.long),
        pytest.param(1, "false", 32, 256, marks=pytest.mark.long),
        pytest.param(1, "false", 1024, 64, marks=pytest.mark.slow),
        pytest.param(1, "true", 32, 256, marks=pytest.mark.slow),
    ],
)
def test_two_short_models_say_what_a_long_one_takes(
    accumulation: int, checkpointing: str, hidden: int, row_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every period of blocks adds the same, so the line through two of them is exact."""
    overrides = [
        "model.layers=16",
        "model.d_model=32",
        "model.rwkv.head_size=32",
        f"model.feed_forward.hidden={hidden}",
    ]
    overrides += ["train.batch_rows=16", f"train.activation_checkpointing={checkpointing}", "model.vocab_size=512"]
    config = config_of("base/tiny", *overrides, "train.micro_batch_rows=2", f"data.row_length={row_length}")
    monkeypatch.setattr(tracing, "FULL_TRACE_LAYERS", 12)
    short = tracing.trace(config, "cuda", zero_stage=0, accumulation=accumulation)
    monkeypatch.setattr(tracing, "FULL_TRACE_LAYERS", 16)
    whole = tracing.trace(config, "cuda", zero_stage=0, accumulation=accumulation)
    assert short == whole
    if accumulation == 1:
        gradients = 4 * count_parameters(config.model).total_stored
        assert whole.peak > gradients
        assert hidden != 1024 or whole.total_saved < gradients


def test_every_platform_saves_what_its_own_kernels_need() -> None:
    config = short("train.precision=bf16", "model.rwkv.head_size=64")
    saved = {
        platform: memory_of(config, platform, 1).saved_by_operator  # type: ignore[arg-type]
        for platform in ("cpu", "cuda", "hip")
    }
    assert saved["cuda"]["cdrmix.wkv7"] != saved["cpu"]["cdrmix.wkv7"]
    assert "aten._flash_attention_forward" in saved["cuda"]
    assert "aten._flash_attention_forward" not in saved["hip"].keys() | saved["cpu"].keys()


def test_what_is_saved_grows_with_rows_and_shrinks_with_checkpointing() -> None:
    def saved(*overrides: str) -> int:
        found = memory_of(short("train.batch_rows=64", *overrides), "cuda", 1)
        return next(part.bytes for part in found.components if part.name == "activations")

    one, two, four = (saved(f"train.micro_batch_rows={rows}") for rows in (2, 4, 8))
    assert one < two < four
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)
    assert saved("train.activation_checkpointing=true") < four / 4


def test_branches_that_skip_tokens_need_no_less_memory() -> None:
    """In the first steps they keep all tokens; the plan cannot know how many they keep later."""
    plain, *skipping = (
        memory_of(short(*overrides), "cuda", 1).total
        for overrides in ([], ["model.depth.part=feed_forward"], ["model.depth.part=both"])
    )
    assert all(plain <= total < 1.3 * plain for total in skipping)


def test_state_is_partitioned_as_in_zero() -> None:
    config = short("train.batch_rows=64", "train.micro_batch_rows=4", "train.zero_stage=auto")
    stored = sum(part.bytes for part in memory_of(config, "cuda", 1).components if part.name == "weights")

    def state(stage: object, processes: int = 4) -> int:
        changed = config.model_copy(update={"train": config.train.model_copy(update={"zero_stage": stage})})
        kept = ("weights", "masters", "optimizer", "gradients")
        return sum(part.bytes for part in memory_of(changed, "cuda", processes).components if part.name in kept)

    # A weight is 1, in float32; of four processes each has a quarter of what ZeRO partitions.
    assert state("auto", 1) == 4 * stored  # weight, gradient, two moments
    assert state(0) == 4 * stored
    assert state("auto") == state(1) == pytest.approx((1 + 0.25 + 0.5 + 1) * stored, rel=1e-5)
    assert state(2) == pytest.approx((1 + 0.25 + 0.5 + 2 * 0.25) * stored, rel=1e-5)
    assert state(3) == pytest.approx(5 / 4 * stored, rel=1e-5)


def test_offloaded_state_is_in_main_memory() -> None:
    memory = {
        offload: memory_of(short("train.zero_stage=auto", f"train.offload={offload}"), "cuda", 1)
        for offload in ("none", "optimizer", "all")
    }
    sizes = {offload: {part.name: part.bytes for part in plan.components} for offload, plan in memory.items()}
    weights, moments = sizes["none"]["weights"], sizes["none"]["optimizer"]
    assert "optimizer" not in sizes["optimizer"]
    assert "masters" not in sizes["optimizer"]
    assert sizes["optimizer"]["weights"] == weights
    moved = weights + moments + 2 * weights  # float32 weights, moments, gradients, a buffer
    assert memory["optimizer"].host_bytes == moved + weights
    assert "weights" not in sizes["all"]
    assert memory["all"].host_bytes == moved + weights + weights
    on_cpu = memory_of(short("train.zero_stage=auto", "train.offload=optimizer"), "cpu", 1)
    assert on_cpu.host_bytes == 0
    assert on_cpu.tensors > weights + moved


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith(("-1b", "-4b")) else pytest.mark.long)
        for name in RELEASED
        if name != "cdrmix-core-1b"  # the test below
    ],
)
def test_a_released_configuration_is_refused_on_half_of_what_it_needs(name: str) -> None:
    config = config_of(name)
    processes = PROCESSES[name.rsplit("-", 1)[-1]]
    needed = memory_of(config, "cuda", processes).total
    check_memory(config, card(int(needed / MAX_MEMORY_SHARE) + 1), processes)
    half = card(int(needed / MAX_MEMORY_SHARE) // 2)
    if name != "cdrmix-core-200b":  # which has the fewest remedies, each of which takes a trace
        assert fit(config, half, processes, remedies=False).fits is False
        return
    with pytest.raises(
        ConfigError, match=r"takes [\d,.]+ GB a process and a card has .*(What would fit|No number of rows)"
    ):
        check_memory(config, half, processes)


def test_the_1b_model_fits_as_it_is_released() -> None:
    """On one H200 without ZeRO, and on eight cards of 80 GB with its stage 1; on no card of half of what it needs."""
    config = config_of("cdrmix-core-1b")
    for key, processes in (("h200", 1), ("h100", 8), ("a100", 8)):
        found = fit(config, machine_for(config, key, processes), processes)
        assert found.fits, (key, found.memory.total)
    assert at_most(config, 1) > 1.5 * memory_of(config, "cuda", 1).total
    needed = int(found.memory.total / MAX_MEMORY_SHARE)
    check_memory(config, card(needed + 1), processes)
    assert fit(config, card(needed // 2), processes, remedies=False).fits is False


def test_a_refusal_names_what_would_fit_and_that_does_fit() -> None:
    config = short("train.batch_rows=64", "train.micro_batch_rows=16", "run.name=big")
    needed = memory_of(config, "cpu", 1).total
    small = Machine("a small machine", "cpu", int(0.98 * needed / MAX_MEMORY_SHARE), None, "a test", True, None)
    with pytest.raises(
        ConfigError, match=r"training big takes .* What would fit: train\.micro_batch_rows=8"
    ) as refused:
        check_memory(config, small, 1)
    assert "train.activation_checkpointing=true" in str(refused.value)
    for overrides in (["train.micro_batch_rows=8"], ["train.activation_checkpointing=true"]):
        assert fit(short("train.batch_rows=64", *overrides), small, 1).fits


@pytest.mark.long
def test_more_devices_are_proposed_with_nothing_else_changed() -> None:
    config = config_of("cdrmix-core-1b", "model.layers=4", "train.zero_stage=auto", "train.batch_rows=64")
    at_four = memory_of(config, "cuda", 4).total
    assert memory_of(config, "cuda", 2).total > at_four
    room = card(int(at_four / MAX_MEMORY_SHARE) + 1)
    assert fit(config, room, 1).remedies[-1] == Remedy((), 4, at_four)
    # A step of as many rows as a micro-batch has none for a second process: its rows go down with the number.
    small = config_of("cdrmix-core-1b", "model.layers=4", "train.zero_stage=auto", "train.batch_rows=8")
    small = small.model_copy(update={"train": small.train.model_copy(update={"micro_batch_rows": 8})})
    remedy = fit(small, room, 1).remedies[-1]
    assert remedy.settings == (f"train.micro_batch_rows={8 // remedy.processes}",)
    # The first batch of a batch warm-up must have rows for each process too.
    warm = config_of(
        "cdrmix-core-1b",
        "model.layers=4",
        "train.zero_stage=auto",
        "train.batch_rows=64",
        "train.micro_batch_rows=2",
        "train.batch_warmup={rows: 4, steps: 9}",
    )
    most = max(remedy.processes for remedy in fit(warm, room, 1).remedies)
    assert most in (1, 2, 4)
    for remedy in fit(warm, room, 1).remedies:
        changed = dict(setting.split("=") for setting in remedy.settings)
        rows = int(changed.get("train.micro_batch_rows", "2"))
        assert 4 % (rows * remedy.processes) == 0, remedy


@pytest.mark.parametrize("least", [["train.precision=bf16"], ["train.precision=bf16", "data.row_length=1024"]])
def test_narrower_precision_and_shorter_rows_are_proposed_where_nothing_else_suffices(least: list[str]) -> None:
    overrides = ["train.batch_rows=1", "train.micro_batch_rows=1", "train.activation_checkpointing=true"]
    overrides += ["train.precision=fp32", "data.row_length=4096"]
    needed = memory_of(short(*overrides, *least), "cuda", 1).total
    room = card(int(needed / MAX_MEMORY_SHARE) + 1)
    assert fit(short(*overrides), room, 1).remedies == (Remedy(tuple(least), 1, needed),)


def test_where_nothing_suffices_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"No number of rows, .* or rows of down to 256 tokens is sufficient"):
        check_memory(short("train.batch_rows=1", "train.micro_batch_rows=1"), card(10**7), 1)


def test_what_is_unknown_is_never_refused() -> None:
    config = short()
    found = fit(config, card(None), 1)
    assert found.fits is None
    assert found.remedies == ()
    check_memory(config, card(None), 1)


@pytest.mark.parametrize("name", ["base/tiny", "cdrmix-hybrid-tiny"])
def test_what_obviously_fits_really_takes_less(name: str) -> None:
    config = config_of(name)
    assert at_most(config, 1) > 1.5 * memory_of(config, "cuda", 1).total


def test_a_model_without_kernels_on_a_gpu_is_refused_there() -> None:
    config = config_of("base/tiny", "model.rwkv.head_size=16", "model.layers=1")
    with pytest.raises(ConfigError, match="cannot be trained on an NVIDIA GPU: time_mix_keys: head size 16"):
        memory_of(config, "cuda", 1)


def test_main_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:        10 kB\n")
    assert host_memory(tmp_path, meminfo) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path, meminfo) == 1000 * 1024
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096\n")
    assert host_memory(tmp_path, meminfo) == 4096
    assert host_memory(tmp_path / "nothing", tmp_path / "nothing") is None


def test_a_card_of_the_table_has_its_memory() -> None:
    config = config_of("base/tiny")
    gpu = gpu_by_key("mi300x")
    assert gpu is not None
    machine = machine_for(config, "mi300x", 1)
    assert (machine.platform, machine.memory_bytes) == ("hip", gpu.memory_bytes)


def test_muon_has_one_moment_of_matrices() -> None:
    orthogonalised = optimizer_size(short("train.optimizer=muon")).orthogonalised
    stored = count_parameters(short().cdrmix_model).stored
    # Four projections of 128 x 128 in each block, and all experts.
    assert orthogonalised == stored["experts"] + 2 * 4 * 128 * 128
    projections = optimizer_size(short("train.optimizer={kind: muon, experts: false}"))
    assert projections.orthogonalised == 2 * 4 * 128 * 128
    for stage, processes in ((0, 1), ("auto", 2)):
        state = {}
        for kind in ("adamw", "muon"):
            plan = memory_of(short(f"train.optimizer={kind}", f"train.zero_stage={stage}"), "cpu", processes)
            state[kind] = {part.name: part.bytes for part in plan.components}
        assert state["muon"]["optimizer"] == state["adamw"]["optimizer"] - 4 * orthogonalised // processes
        assert ("masters" in state["adamw"]) == (processes == 2)
        assert "masters" not in state["muon"]  # whole parameters are updated in place


def test_the_further_depths_of_a_prediction_are_traced() -> None:
    section = "model.prediction={kind: heads, tokens: 4, every: 4}"
    plain, with_heads = (
        tracing.trace(short("train.precision=bf16", *more), "cpu", zero_stage=0, accumulation=1)
        for more in ((), (section,))
    )
    heads = 3 * 4096 * 128  # their gradients are allocated while the losses are computed, and live to the update
    assert with_heads.peak - plain.peak >= 4 * heads
    assert with_heads.total_saved - plain.total_saved >= 4 * heads
