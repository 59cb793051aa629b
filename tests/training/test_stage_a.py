"""The loop: the same bits twice, after a kill and after a signal, in one process and in two; and what stops it."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from json_rows import read_metrics
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader, Prefetcher
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CheckpointError, NonFiniteLossError, Preempted
from cdrmix.eval.perplexity import evaluate
from cdrmix.inference.checkpoints import list_checkpoints, newest_whole_checkpoint, read_weights
from cdrmix.inference.choice import find_checkpoint
from cdrmix.model.depth import FIRST_BIAS
from cdrmix.model.loss import Losses, LossModel
from cdrmix.run_folder import RunFolder
from cdrmix.training import stage_a
from cdrmix.training.console import Console
from cdrmix.training.engine import Engine
from cdrmix.training.stage_a import TrainResult, train

pytestmark = pytest.mark.usefixtures("own_settings")

Trainer = Callable[..., tuple[RunFolder, TrainResult]]


@pytest.fixture
def trainer(make_config: Callable[..., Config], shards: ShardSet) -> Trainer:
    """Trains the tiny configuration with overrides in a new run folder, or goes on in one."""

    def run(*overrides: str, folder: RunFolder | None = None) -> tuple[RunFolder, TrainResult]:
        config = make_config(*overrides)
        resume = None if folder is None else "auto"
        folder = RunFolder.create(config) if folder is None else folder
        return folder, train(config, folder, shards, resume=resume, console=False)

    return run


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, ...], tuple[RunFolder, TrainResult]]:
    """The runs of `straight`, by their overrides."""
    return {}


@pytest.fixture
def straight(trainer: Trainer, trained: dict[tuple[str, ...], tuple[RunFolder, TrainResult]]) -> Trainer:
    """A run with these overrides that nothing broke off. Tests share it, and only read it."""

    def run(*overrides: str) -> tuple[RunFolder, TrainResult]:
        if overrides not in trained:
            trained[overrides] = trainer(*overrides)
        return trained[overrides]

    return run


def weights(run: RunFolder) -> dict[str, Tensor]:
    newest = newest_whole_checkpoint(run.checkpoints)
    assert newest is not None
    # Copied: what is read lies in the file as long as nobody needs it, and tests write into files.
    return {name: weight.clone() for name, weight in read_weights(newest).items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name].view(torch.int32), other[name].view(torch.int32))]
    assert different == []


def timeless(run: RunFolder) -> list[dict[str, object]]:
    """The rows of metrics.jsonl without what depends on the machine's speed and memory."""
    names = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "router", "valid_bits_per_byte", "valid_loss")
    return [{name: row[name] for name in names} for row in read_metrics(run.metrics_jsonl)]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Does `act` once, when the console hears of the step."""
    done: list[int] = []
    on_step = Console.on_step

    def note_and_act(self: Console, number: int) -> None:
        on_step(self, number)
        if number == step and not done:
            done.append(number)
            act()

    monkeypatch.setattr(Console, "on_step", note_and_act)


class Killed(Exception):
    """Stands for a process that ends without a word."""


def killed() -> None:
    raise Killed


def test_it_learns_records_and_keeps_checkpoints(trainer: Trainer) -> None:
    run, result = trainer("train.steps=20", "train.evaluate_every=10", "train.checkpoint_every=7")
    rows = read_metrics(run.metrics_jsonl)
    assert [row["step"] for row in rows] == [1, *range(2, 21, 2)]
    assert rows[-1]["next_token_loss"] == result.final_loss < rows[0]["next_token_loss"] - 0.5
    assert result.step == 20
    assert rows[-1]["valid_bits_per_byte"] == result.valid_bits_per_byte < rows[5]["valid_bits_per_byte"]
    assert rows[0]["valid_loss"] is None
    assert all(len(rows[-1]["router"][name]) == 2 for name in ("entropy_bits", "overflow"))
    assert rows[-1]["tokens"] > 15 * 8 * 24 * 0.8
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-00000014", "step-00000020"]
    assert (run.checkpoints / "best").read_text() == (run.checkpoints / "latest").read_text() == "step-00000020\n"
    assert result.checkpoint == run.checkpoints / "step-00000020"


def test_figures_of_a_step_do_not_depend_on_how_it_is_cut(trainer: Trainer) -> None:
    # The routers' losses are means over micro-batches, so only what concerns tokens is the same in sum.
    plain = ["train.steps=1", "train.warmup_steps=0", "model.feed_forward.load_balance_weight=0.0"]
    plain += ["model.feed_forward.z_loss_weight=0.0"]
    whole = read_metrics(trainer(*plain)[0].metrics_jsonl)[0]
    cut = read_metrics(trainer(*plain, "train.micro_batch_rows=2")[0].metrics_jsonl)[0]
    for name in ("loss", "next_token_loss", "gradient_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=222 * 2**-24), name  # as in test_engine.py
    assert cut["tokens"] == whole["tokens"]


@pytest.mark.parametrize("micro_batch_rows", [8, 2])
def test_same_seed_same_bits_and_another_seed_others(trainer: Trainer, micro_batch_rows: int) -> None:
    cut = (f"train.micro_batch_rows={micro_batch_rows}", "train.steps=3")
    first, _ = trainer(*cut)
    second, _ = trainer(*cut)
    assert_same_bits(weights(first), weights(second))
    other, _ = trainer(*cut, "run.seed=2")
    assert any(not torch.equal(other_weight, weights(first)[name]) for name, other_weight in weights(other).items())


SETTINGS = ("bias_update_rate=0.02", "router_jitter=0.05", "drop=true")
ROUTERS = tuple(f"model.feed_forward.{setting}" for setting in SETTINGS)
# attention, which skips tokens, and the first RWKV-7 mixer, which does not
DEPTH = ("model.depth={part: both, rate: 0.5, release: 0.2}", "model.feed_forward.dense_layers=[1]")


WARM_UP = ("train.micro_batch_rows=2", "train.batch_warmup={rows: 2, steps: 4}", *ROUTERS)


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        # Before the first checkpoint, between a checkpoint and a validation, and after both.
        *(((), step) for step in (1, 3, 5)),
        *((WARM_UP, step) for step in (1, 3, 5)),  # and after the warm-up
        (("train.micro_batch_rows=2", "train.ema_decay=0.9", "train.precision=bf16"), 3),
        (ROUTERS, 3),
        (DEPTH, 3),
    ],
)
def test_broken_off_and_resumed_is_uninterrupted(
    trainer: Trainer, straight: Trainer, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], step: int
) -> None:
    break_off_and_resume(trainer, straight, monkeypatch, step, overrides)


def test_validations_and_the_best_are_of_the_average_that_is_exported(
    straight: Trainer, make_config: Callable[..., Config], shards: ShardSet
) -> None:
    common = ("train.micro_batch_rows=2", "train.precision=bf16")
    run, result = straight(common[0], "train.ema_decay=0.9", common[1])
    config = make_config(*common)
    rows = config.data.row_length, config.train.micro_batch_rows, config.train.evaluate_rows

    def bits(checkpoint: Path, *, average: bool) -> float:
        model, loader = stage_a.build_loss_model(config), EvalLoader(shards.valid, *rows)
        model.language_model.load_state_dict(read_weights(checkpoint, average=average))
        with torch.autocast("cpu", torch.bfloat16):
            return evaluate(model, loader, loader.text_bytes).bits_per_byte

    assert result.valid_bits_per_byte == pytest.approx(bits(result.checkpoint, average=True), rel=1e-6)
    assert result.valid_bits_per_byte != pytest.approx(bits(result.checkpoint, average=False), rel=1e-3)
    best, reason = find_checkpoint(run, "best")
    assert f"text ({bits(best, average=True):.4f} bits per byte in its validation)" in reason
    # Each validation gave back what is trained, bit for bit.
    plain, _ = straight(*common)
    assert_same_bits(weights(plain), weights(run))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_hybrid_learns_and_resumes_like_the_others(
    trainer: Trainer, straight: Trainer, monkeypatch: pytest.MonkeyPatch, hybrid: tuple[str, ...], precision: str
) -> None:
    overrides = (*ROUTERS, *hybrid, f"train.precision={precision}")
    run = break_off_and_resume(trainer, straight, monkeypatch, 3, overrides)
    rows = read_metrics(run.metrics_jsonl)
    assert rows[-1]["routers"] == ["0", "1", "2", "3.mixer", "3"]
    assert len(rows[-1]["router"]["entropy_bits"]) == len(rows[-1]["load"]) == 5
    assert rows[-1]["next_token_loss"] < rows[0]["next_token_loss"]


def break_off_and_resume(
    trainer: Trainer, straight: Trainer, monkeypatch: pytest.MonkeyPatch, step: int, overrides: tuple[str, ...]
) -> RunFolder:
    """Holds a run broken off after a step and resumed against one that was not, which it returns."""
    unbroken, expected = straight(*overrides)
    stop_at(monkeypatch, step, killed)
    runs: list[RunFolder] = []
    create = RunFolder.create
    monkeypatch.setattr(RunFolder, "create", lambda config: runs.append(create(config)) or runs[-1])
    with pytest.raises(Killed):
        trainer(*overrides)
    _, found = trainer(*overrides, folder=runs[0])
    assert_same_bits(weights(unbroken), weights(runs[0]))
    assert (found.step, found.final_loss, found.valid_bits_per_byte) == (
        expected.step,
        expected.final_loss,
        expected.valid_bits_per_byte,
    )
    if "train.ema_decay=0.9" in overrides:
        average = read_weights(found.checkpoint, average=True)
        assert_same_bits(read_weights(expected.checkpoint, average=True), average)
        assert any(not torch.equal(average[name], weight) for name, weight in weights(unbroken).items())
    assert timeless(unbroken) == timeless(runs[0])
    if "model.feed_forward.drop=true" in overrides:
        assert any(tensor.any() for name, tensor in weights(unbroken).items() if name.endswith("router.bias"))
        rows = [json.loads(line) for line in unbroken.metrics_jsonl.read_text().splitlines()]
        assert any(max(row["router"]["dropped"]) > 0 for row in rows)
    return unbroken


def test_the_share_of_kept_tokens_falls_to_the_capacity(trainer: Trainer) -> None:
    """From 1 at the start, in metrics.jsonl and in the biases of the checkpoint."""
    run, _ = trainer(*DEPTH, "train.steps=30", "train.log_every=1", "model.depth.capacity=0.6")
    rows = read_metrics(run.metrics_jsonl)
    assert rows[0]["depth"] == {"0": 1.0, "1.mixer": 1.0, "1": 1.0}
    shares = [sum(row["depth"].values()) / 3 for row in rows]
    # A batch has 192 tokens, so a share has a standard deviation of 0.035, and the scores move from step to step.
    assert abs(sum(shares[-10:]) / 10 - 0.6) < 0.1
    biases = [tensor.item() for name, tensor in weights(run).items() if "depth_routers" in name and "bias" in name]
    assert len(biases) == 3
    assert all(bias != FIRST_BIAS for bias in biases)


def test_a_finished_run_resumes_to_its_own_result(trainer: Trainer) -> None:
    run, first = trainer("train.steps=3")
    _, again = trainer("train.steps=3", folder=run)
    assert again == first


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_a_signal_saves_after_the_step_and_the_resumed_run_is_uninterrupted(
    trainer: Trainer, straight: Trainer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    unbroken, expected = straight()
    stop_at(monkeypatch, step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    runs: list[RunFolder] = []
    create = RunFolder.create
    monkeypatch.setattr(RunFolder, "create", lambda config: runs.append(create(config)) or runs[-1])
    evaluate, validated = stage_a.evaluate, []
    monkeypatch.setattr(stage_a, "evaluate", lambda *each, **named: validated.append(1) or evaluate(*each, **named))
    with pytest.raises(Preempted, match=f"after step {step} of 6") as caught:
        trainer("train.steps=6")
    assert caught.value.exit_code == 75
    assert (runs[0].checkpoints / "latest").read_text() == f"step-0000000{step}\n"
    assert len(validated) == (step - 1) // 3, "nobody waits for a validation after a signal"
    assert ("validated when the run goes on" in runs[0].log.read_text()) == (step in (3, 6))
    (runs[0].checkpoints / "best").unlink(missing_ok=True)  # as after a kill between a checkpoint and its pointer
    _, found = trainer("train.steps=6", folder=runs[0])
    assert_same_bits(weights(unbroken), weights(runs[0]))
    assert timeless(unbroken) == timeless(runs[0])
    assert found.valid_bits_per_byte == expected.valid_bits_per_byte
    assert (runs[0].checkpoints / "best").read_text() == (unbroken.checkpoints / "best").read_text()
    trainer("train.steps=6", folder=runs[0])
    assert timeless(unbroken) == timeless(runs[0]), "every step once, however often the run goes on"


def test_tokens_of_a_refused_step_are_not_counted(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, _ = trainer("train.steps=3", "train.log_every=1")
    step, calls = Engine.step, []
    monkeypatch.setattr(
        Engine, "step", lambda self, norm, discard: calls.append(1) or (len(calls) != 2 and step(self, norm))
    )
    skipping, _ = trainer("train.steps=3", "train.log_every=1", "train.skip.nonfinite=1")
    first, second, third = (row["tokens"] for row in read_metrics(straight.metrics_jsonl))
    assert [row["tokens"] for row in read_metrics(skipping.metrics_jsonl)] == [first, first, first + third - second]


def test_resume_passes_over_a_corrupt_checkpoint_and_says_so(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trainer()
    expected = weights(run)
    newest = list_checkpoints(run.checkpoints)[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x00")
    capsys.readouterr()
    trainer(folder=run)
    said = capsys.readouterr().out
    assert "skipped step-00000006" in said
    assert "continuing from step-00000004" in said
    assert_same_bits(weights(run), expected)
    for checkpoint in list_checkpoints(run.checkpoints):
        (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is whole"):
        trainer(folder=run)


def poison(monkeypatch: pytest.MonkeyPatch, step: int, spoil: Callable[[Losses], Losses]) -> None:
    forward, calls = LossModel.forward, []

    def forward_and_spoil(self: LossModel, *arguments: object) -> Losses:
        losses = forward(self, *arguments)  # type: ignore[arg-type]
        if not torch.is_grad_enabled():
            return losses
        calls.append(1)
        return spoil(losses) if len(calls) == step else losses

    monkeypatch.setattr(LossModel, "forward", forward_and_spoil)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda losses: losses._replace(total=losses.total * math.nan), "the loss is nan at step 3"),
        (lambda losses: losses._replace(total=losses.total + math.inf), "the loss is inf at step 3"),
        # A finite loss whose gradient is infinite: sqrt at zero.
        (
            lambda losses: losses._replace(total=losses.total + (losses.total * 0).sqrt()),
            "the gradient norm is not finite at step 3",
        ),
    ],
)
def test_nothing_non_finite_reaches_the_weights(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Losses], Losses], what: str
) -> None:
    engines, make = [], stage_a.make_engine
    monkeypatch.setattr(
        stage_a, "make_engine", lambda *arguments, base: engines.append(make(*arguments, base=base)) or engines[-1]
    )
    before: dict[str, Tensor] = {}

    def remember_and_spoil(losses: Losses) -> Losses:
        before.update({name: weight.clone() for name, weight in engines[0].weights().items()})
        return spoil(losses)

    poison(monkeypatch, 3, remember_and_spoil)
    with pytest.raises(NonFiniteLossError, match=what) as caught:
        trainer()
    assert caught.value.exit_code == 9
    assert "global batch 2 " in str(caught.value)
    assert all(torch.isfinite(weight).all() for weight in before.values())
    assert_same_bits(before, engines[0].weights())


def assert_same_state(one: Path, other: Path, optimizers: int, weights: int = 1) -> None:
    """The last checkpoints hold the same weights, average, optimizer state and generators, in so many files."""
    sums = [
        json.loads((path / "checkpoints" / "step-00000004" / "manifest.json").read_text())["files"]
        for path in (one, other)
    ]
    names = [name for name in sums[0] if name.endswith(".safetensors") or name.startswith("rng")]
    assert len(names) == 2 * weights + 2 + optimizers
    assert [sums[0][name] for name in names] == [sums[1][name] for name in names]


@pytest.mark.slow
def test_two_processes_broken_off_killed_and_signalled(work, tmp_path: Path) -> None:
    bias = "model.feed_forward.bias_update_rate=0.02"  # state that no ZeRO stage knows of
    overrides = ("train.steps=4", "train.micro_batch_rows=2", "train.ema_decay=0.9", bias)
    runs = tmp_path / "runs"
    finished = work("repeat", runs, *overrides, processes=2)
    assert [process.returncode for process in finished] == [75, 75], finished[0].stdout
    for name in ("0", "1", "2", "3", "2-optimizer", "3-all"):
        files = {"optimizers": 1 if name == "0" else 2, "weights": 2 if name.startswith("3") else 1}
        assert_same_state(runs / f"straight{name}", runs / f"broken{name}", **files)
    assert all("after step 3 of 4" in process.stdout for process in finished)
    assert (runs / "stopped" / "checkpoints" / "latest").read_text() == "step-00000003\n"

    finished = work("train", runs / "killed", *overrides, processes=2, at="3:SIGKILL")
    assert finished[0].returncode == -signal.SIGKILL
    assert (runs / "killed" / "checkpoints" / "latest").read_text() == "step-00000003\n"
    finished = work("train", runs / "killed", *overrides, processes=2, resume="auto")
    assert [process.returncode for process in finished] == [0, 0], finished[0].stdout
    assert_same_state(runs / "straight0", runs / "killed", 1)


def test_a_step_reads_the_device_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                reads.append(str(func))
            return func(*arguments, **(options or {}))

    micro_batches, counted = Prefetcher.micro_batches, []

    def counting(self: Prefetcher, step: int) -> list[Batch]:
        counted.append(len(reads))
        return micro_batches(self, step)

    monkeypatch.setattr(Prefetcher, "micro_batches", counting)
    with Reads():
        trainer("train.steps=6", "train.log_every=6", "train.evaluate_every=6", "train.checkpoint_every=6")
    between = [after - before for before, after in itertools.pairwise(counted[1:])]
    assert between == [0] * len(between), "a step waits for the device elsewhere than in StepAccumulator.total"


@pytest.mark.slow
def test_a_profile_is_written_and_changes_no_weight(trainer: Trainer) -> None:
    plain, _ = trainer("train.steps=4")
    profiled, _ = trainer("train.steps=4", "train.profile={first: 2, steps: 2}")
    assert_same_bits(weights(plain), weights(profiled))
    events = json.loads(gzip.decompress((profiled.profile / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(str(event.get("name")).startswith("ProfilerStep#") for event in events) >= 2
    assert "cdrmix::wkv7" in (profiled.profile / "operations.txt").read_text()
    assert f"Profile of steps 2 to 3 of this process: {profiled.profile}" in profiled.log.read_text()
    assert not plain.profile.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's compiler looks, and hides it where none is raised
def test_compiled_blocks_keep_the_bits_of_a_run_and_share_their_code(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three RWKV-7 layers and attention, with a smaller last batch of the validation before the kill.
    compiled = ("train.compile=true", "train.steps=5", "model.layers=4", "model.attention_fraction=0.25")
    counters = torch._dynamo.utils.counters
    counters.clear()
    straight, result = trainer(*compiled, "train.checkpoint_every=3", "train.evaluate_rows=3")
    # one for attention, two for RWKV-7: its first layer, the others; and as many for batches with filling
    assert counters["stats"]["unique_graphs"] == 6
    assert not counters["graph_break"]
    stop_at(monkeypatch, 3, killed)
    folders: list[RunFolder] = []
    create = RunFolder.create
    monkeypatch.setattr(RunFolder, "create", lambda config: folders.append(create(config)) or folders[-1])
    with pytest.raises(Killed):
        trainer(*compiled, "train.checkpoint_every=3", "train.evaluate_rows=3")
    torch._dynamo.reset()  # as in a new process
    resumed, _ = trainer(*compiled, "train.checkpoint_every=3", "train.evaluate_rows=3", folder=folders[-1])
    assert_same_bits(weights(straight), weights(resumed))
    _, expected = trainer(*compiled, "train.compile=false")
    assert result.final_loss == pytest.approx(expected.final_loss, rel=1e-3)  # five steps at a rate of 1e-2
    AsyncCompile.pool().shutdown()  # the compiler's threads, which it keeps
    AsyncCompile.pool.cache_clear()
