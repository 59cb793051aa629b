"""One process of a training under test, told by a JSON argument what to do: train, or compare gradients."""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from saved_state import FINGERPRINTS, loads_the_state

from cdrmix import ops
from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Train
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.errors import CdrmixError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.model.feed_forward.moe import MoeFeedForward
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.prediction import Depths
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config, stage_a, trainer
from cdrmix.training.build import build_loss_model
from cdrmix.training.checkpoint import Progress, differences, save_checkpoint
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import make_engine
from cdrmix.training.expert_parallel import expert_layer, is_expert_shard
from cdrmix.training.launch import exit_worker
from cdrmix.training.optim import LossScale, make_optimizer, parameter_groups
from cdrmix.training.rendezvous import place
from cdrmix.training.schedule import learning_rate

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0


def train(order: dict[str, Any]) -> int:
    """Trains in the run folder `where`, which rank 0 makes if need be; `at`: see `act_before`. allowance: MiB that the
    process may allocate; by default as much as there is."""
    if "allowance" in order:
        used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (int(order["allowance"]) << 20),) * 2)
        deepspeed_config.MOST_LIVE = deepspeed_config.BUCKET = 1 << 21  # of a model that is small for these buffers
    if "at" in order and place().rank == 0:
        act_before(order["at"])
    return train_in(Path(order["where"]), order, order["overrides"], resume=order.get("resume"))


def train_in(where: Path, order: dict[str, Any], overrides: list[str], *, resume: str | None = None) -> int:
    config = Config.from_yaml(order["config"], overrides)
    rank = place().rank
    if rank == 0 and not where.exists():
        RunFolder.create(config).path.rename(where)
    join(config).barrier()
    run = RunFolder.open(where, writes=rank == 0)
    try:
        print(stage_a.train(config, run, open_shards(Path(order["shards"])), resume=resume, console=False))
    except CdrmixError as error:
        print(error)
        return error.exit_code
    return 0


def several(order: dict[str, Any]) -> int:
    """Trains in folders of `where`: `runs` has the further overrides of each by its name."""
    where = Path(order["where"])
    where.mkdir(exist_ok=True)
    runs = json.loads(order["runs"])
    return max(train_in(where / name, order, [*order["overrides"], *runs[name]]) for name in runs)


class BrokenOff(Exception):
    """Ends a training in the middle, in a process that lives on."""


def act_before(order: str) -> None:
    """ "3:SIGTERM" sends this process a signal in the step that follows 3 finished ones; "3:stop" raises; "3:hang"
    sleeps."""
    finished, _, act = order.partition(":")

    def act_then_answer(train: Train, step: int) -> float:
        if step == int(finished):
            trainer.learning_rate = learning_rate
            if act == "stop":
                raise BrokenOff
            if act == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.Signals[act])
        return learning_rate(train, step)

    trainer.learning_rate = act_then_answer


def repeat(order: dict[str, Any]) -> int:
    """For each ZeRO stage, two of them also with offload: one run straight, one broken off and resumed; then one that a
    signal to rank 0 stops."""
    where = Path(order["where"])
    where.mkdir(exist_ok=True)
    for name in ("0", "1", "2", "3", "2-optimizer", "3-all"):
        stage, _, offload = name.partition("-")
        overrides = [*order["overrides"], f"train.zero_stage={stage}", f"train.offload={offload or 'none'}"]
        assert train_in(where / f"straight{name}", order, overrides) == 0
        act_before("3:stop")
        try:
            train_in(where / f"broken{name}", order, overrides)
        except BrokenOff:
            assert train_in(where / f"broken{name}", order, overrides, resume="auto") == 0
    if place().rank == 0:
        act_before("2:SIGTERM")
    return train_in(where / "stopped", order, order["overrides"])


def gradients(order: dict[str, Any]) -> int:
    """Holds the engine against plain PyTorch: `combinations` of ZeRO stage, accumulation and activation checkpointing,
    and loss scales at the stages `scaled`.

    Rank 0 writes `where`: for each combination the largest errors, relative to the largest element.
    """
    results = {}
    for stage, accumulation, checkpointing in json.loads(order["combinations"]):
        overrides = [f"train.zero_stage={stage}", f"train.activation_checkpointing={str(checkpointing).lower()}"]
        results[f"{stage} {accumulation} {checkpointing}"] = compare(order, overrides, accumulation)
    for stage in json.loads(order["scaled"]):
        results[f"scaled {stage}"] = compare_scaled(order, stage)
    if place().rank == 0:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def depths(order: dict[str, Any]) -> int:
    """Holds the engine against plain PyTorch as `gradients`, with multi-token prediction of several kinds."""
    results = {}
    for kind, settings in json.loads(order["cases"]):
        section = f"model.prediction={{tokens: 3, every: 2, kind: {kind}, weights: [1, 0.5, 0.25]}}"
        varied = {**order, "overrides": [*order["overrides"], section]}
        results[f"{kind} {settings}"] = compare(varied, [f"train.{setting}" for setting in settings], 2)
    if place().rank == 0:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def compare_scaled(order: dict[str, Any], stage: int, parallel: int = 1) -> dict[str, float]:
    """A step with a loss scale against one without, and what is left of the weights after an overflow: all errors."""
    rank, size, *_ = place()
    overrides = [f"train.zero_stage={stage}", f"train.expert_parallel={parallel}"]
    config = Config.from_yaml(order["config"], [*overrides, f"train.micro_batch_rows={8 // size}"])
    world = join(config)
    loader = TrainLoader(
        open_shards(Path(order["shards"])).train,
        row_length=config.data.row_length,
        batch_rows=8,
        micro_batch_rows=8 // size,
        seed=5,
        rank=rank,
        world_size=size,
    )
    (batch,) = loader.micro_batches(0)
    engines = []
    for scale in (1.0, 2.0**200):
        seed_everything(3)
        engine = make_engine(config, build_loss_model(config), world)
        engine.loss_scale = LossScale(scale > 1, initial=scale)
        before = {name: weight.clone() for name, weight in engine.weights().items()}
        engine.backward(engine.forward(batch, last=True).total)
        engine.clip()
        assert engine.step() == (scale == 1)
        engines.append(engine)
    plain, engine = engines
    assert not math.isfinite(engine.gradient_norm)
    assert engine.loss_scale.value == 2.0**199
    engine.zero()
    left = max((relative(weight, before[name]) for name, weight in engine.weights().items()), default=0.0)
    # The refused step leaves nothing behind: with a scale that fits, the next one is as if it were the first.
    engine.loss_scale.value = 2.0**10
    engine.backward(engine.forward(batch, last=True).total)
    engine.clip()
    assert engine.step()
    expected, weights = plain.weights(), engine.weights()
    return {
        "norm": abs(engine.gradient_norm / plain.gradient_norm - 1),
        "left": left,
        "weights": max((relative(weights[name], expected[name]) for name in expected), default=0.0),
    }


def prediction_depths(config: Config) -> Depths | None:
    """The depths of a first step, if the model has such heads."""
    section = config.cdrmix_model.prediction
    return None if section is None else Depths.of(section, 0, 1)


Tensors = dict[str, torch.Tensor]


@functools.cache
def plain_step(path: str, overrides: tuple[str, ...], shards: str, accumulation: int) -> tuple[Tensors, float, Tensors]:
    """A step of plain PyTorch: the gradients, their norm before it clips them, and the weights afterwards."""
    config = Config.from_yaml(path, overrides)
    depths, split = prediction_depths(config), open_shards(Path(shards)).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "seed": 5}
    size = place().size
    seed_everything(3)
    plain = build_loss_model(config)
    # The routers' losses are means over a micro-batch, so plain PyTorch sees the same micro-batches, of all ranks.
    for batch in TrainLoader(split, micro_batch_rows=8 // accumulation // size, **rows).micro_batches(0):
        plain(
            batch.ids_BT,
            batch.targets_BT,
            batch.weights_BT,
            batch.documents,
            batch.token_count,
            1 / accumulation / size,
            depths,
        ).total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}
    norm = nn.utils.clip_grad_norm_(plain.parameters(), config.train.gradient_clip).item()
    adamw = make_optimizer(parameter_groups(plain, config.train), config.train)
    for group in adamw.param_groups:
        group["lr"] = 1e-2 * group["multiplier"]
    adamw.step()
    return gradients, norm, {name: each.detach() for name, each in plain.language_model.named_parameters()}


def compare(order: dict[str, Any], overrides: list[str], accumulation: int) -> dict[str, float]:
    rank, size, *_ = place()
    overrides += [f"train.micro_batch_rows={8 // accumulation // size}", *order["overrides"]]
    config = Config.from_yaml(order["config"], overrides)
    world = join(config)
    from deepspeed.utils import safe_get_full_grad  # after join, which tells it the accelerator

    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "seed": 5}
    depths = prediction_depths(config)
    expected, norm, reference = plain_step(order["config"], tuple(order["overrides"]), order["shards"], accumulation)

    seed_everything(3)
    model = build_loss_model(config)
    engine = make_engine(config, model, world)
    mine = TrainLoader(split, micro_batch_rows=8 // accumulation // size, rank=rank, world_size=size, **rows)
    batches = mine.micro_batches(0)
    assert len(batches) == accumulation
    engine.set_learning_rate(1e-2)
    for batch in batches:
        engine.backward(engine.forward(batch, last=batch is batches[-1], prediction=depths).total)
    if config.train.zero_stage == 3 and size > 1:
        assert all(parameter.numel() == 0 for parameter in model.parameters()), "ZeRO-3 holds a parameter whole"
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if config.train.zero_stage == 0 else safe_get_full_grad(parameter)
        worst = max(worst, relative(gradient, engine._weights.shard(parameter, expected[name])))
    engine.clip()
    assert engine.step()
    engine.zero()
    weights = engine.weights()
    moved = max((relative(weights[name], reference[name]) for name in weights), default=0.0)
    return {"gradient": worst, "norm": abs(engine.gradient_norm / norm - 1), "weights": moved}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else found.abs().max().item()


def experts(order: dict[str, Any]) -> int:
    """Everything about expert parallelism that one start of the processes can tell; rank 0 writes it to `where`."""
    rank, size, *_ = place()
    folder, parallel = Path(order["folder"]), int(order["parallel"])
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        results[f"steps {stage}"] = expert_steps(order, stage, folder / f"saved-{size}-{stage}")
    if size == parallel:
        for stage in (0, 1, 3):  # 1 and 2 share their code for it
            results[f"scaled {stage}"] = compare_scaled(order, stage, parallel)
        results["layer"] = expert_layers(order)
        results["resumed"] = [expert_resume(order, stage, folder / f"runs-{stage}") for stage in (0, 3)]
    for saved, stage, other in json.loads(order["load"]):
        results[f"loaded {saved} at {stage} with {other}"] = expert_load(order, folder / saved, stage, other)
    if rank == 0:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def expert_config(order: dict[str, Any], stage: int, parallel: int) -> Config:
    fixed = (
        f"train.zero_stage={stage}",
        f"train.expert_parallel={parallel}",
        f"train.activation_checkpointing={str(stage in (1, 3)).lower()}",
        "train.micro_batch_rows=2",  # two micro-batches in each of two processes, one in each of four
        "train.gradient_clip=0.3",  # below the norm, so that clipping acts
        "train.epsilon=0.01",  # with AdamW's usual one an update of elements near zero magnifies rounding
        "train.ema_decay=0.9",
    )
    return Config.from_yaml(order["config"], [*fixed, *order["overrides"]])


def expert_steps(order: dict[str, Any], stage: int, save: Path) -> dict[str, float]:
    """Compares three engine steps with plain PyTorch and whole experts: the largest relative errors of a rank."""
    rank, size, *_ = place()
    config = expert_config(order, stage, int(order["parallel"]))
    world = join(config)
    from deepspeed.utils import safe_get_full_grad

    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "micro_batch_rows": 2, "seed": 5}
    everyone = TrainLoader(split, **rows)
    mine = TrainLoader(split, rank=rank, world_size=size, **rows)
    seed_everything(3)
    plain = build_loss_model(expert_config(order, 0, 1))
    adamw = make_optimizer(parameter_groups(plain, config.train), config.train)
    seed_everything(3)
    model = build_loss_model(config)
    engine = make_engine(config, model, world)
    worst = dict.fromkeys(("loss", "gradient", "expert gradient", "norm", "weights"), 0.0)

    def note(name: str, error: float) -> None:
        worst[name] = max(worst[name], error)

    for step in range(3):
        total = 0.0
        for batch in everyone.micro_batches(step):
            arguments = (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count)
            losses = plain(*arguments, 1 / 4)
            losses.total.backward()
            total += losses.total.item()
        batches = mine.micro_batches(step)
        found_total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            losses = engine.forward(batch, last=batch is batches[-1])
            engine.backward(losses.total)
            found_total += losses.total.detach()
        note("loss", abs(world.total(found_total).item() / total - 1))
        whole = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            found = parameter.grad if stage == 0 else safe_get_full_grad(parameter)
            expected = engine._weights.shard(parameter, whole[name].grad)
            note("expert gradient" if is_expert_shard(parameter) else "gradient", relative(found, expected))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), config.train.gradient_clip).item()
        assert norm > config.train.gradient_clip
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * group["multiplier"]
        engine.set_learning_rate(1e-2)
        adamw.step()
        adamw.zero_grad()
        engine.clip()
        assert engine.step()
        engine.zero()
        note("norm", abs(engine.gradient_norm / norm - 1))
        assert len(set(world.gather(engine.gradient_norm, "the test"))) == 1, "ranks differ about the norm"
    reference = dict(plain.language_model.named_parameters())
    for name, weight in engine.weights().items():
        note("weights", relative(weight, reference[name].detach()))
    save_checkpoint(engine, save, Progress(step=3), config, FINGERPRINTS).finish()
    return {name: max(errors[name] for errors in world.gather(worst, "the test")) for name in worst}


def expert_load(order: dict[str, Any], saved: Path, stage: int, parallel: int) -> dict[str, Any]:
    """Whether a checkpoint, loaded with other shares of the experts, gives the same bits of all; errors of logits."""
    config = expert_config(order, stage, parallel)
    world = join(config)
    checkpoint = newest_whole_checkpoint(saved)
    seed_everything(4)
    engine = make_engine(config, build_loss_model(config), world)
    weights, average = read_weights(checkpoint), read_weights(checkpoint, average=True)
    same = {"optimizer": loads_the_state(engine, checkpoint, config)}
    told = " ".join(differences(checkpoint, engine))
    assert ("expert_parallel: 2 before" in told) == (parallel != 2)
    same["weights"] = same_bits(world, weights, engine.weights())
    same["average"] = same_bits(world, average, engine.average_weights())

    ids_BT = torch.arange(3 * 24).view(3, 24) * 7 % 300 + world.rank
    whole = LanguageModel(config.model)
    whole.load_state_dict(weights)
    shared = engine.module.loss_model
    with torch.no_grad():
        expected = whole.logits(whole(ids_BT).hidden_BTD)
        # Through the module that ZeRO-3 gathers for.
        targets, ones = torch.zeros_like(ids_BT), torch.ones(ids_BT.shape)
        loss = engine.module(ids_BT, targets, ones, None, 1.0, 1.0).next_token_sum
        error = abs(loss.item() / LossModel(whole)(ids_BT, targets, ones, None, 1.0).next_token_sum.item() - 1)
        if stage < 3:
            hidden = shared.language_model(ids_BT).hidden_BTD
            error = max(error, relative(shared.language_model.logits(hidden), expected))
    gathered = world.gather((same, error), "the test")
    return {name: all(each[name] for each, _ in gathered) for name in same} | {
        "logits": max(each for _, each in gathered)
    }


def same_bits(world: DistributedContext, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> bool:
    if world.rank > 0:
        return not found
    return expected.keys() == found.keys() and all(torch.equal(value, found[name]) for name, value in expected.items())


def resumes(order: dict[str, Any], overrides: list[str], where: Path, *, stop: int, files: int = 2) -> bool:
    """Whether a run broken off before step `stop` and resumed ends with the bits of one that was not.

    files: the least number of files with tensors that are compared.
    """
    where.mkdir(exist_ok=True)
    assert train_in(where / "straight", order, overrides) == 0
    act_before(f"{stop}:stop")
    try:
        train_in(where / "broken", order, overrides)
    except BrokenOff:
        assert train_in(where / "broken", order, overrides, resume="auto") == 0
    one, other = (newest_whole_checkpoint(where / name / "checkpoints") for name in ("straight", "broken"))
    assert one is not None
    assert other is not None
    names = [path.name for path in one.glob("*.safetensors")]
    assert len(names) >= files
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def expert_resume(order: dict[str, Any], stage: int, where: Path) -> bool:
    """`resumes` with expert parallelism."""
    overrides = [
        *order["overrides"],
        f"train.zero_stage={stage}",
        f"train.expert_parallel={order['parallel']}",
        "train.micro_batch_rows=2",
        "train.evaluate_rows=5",  # so one rank has rows of none in its last batch
        "train.steps=5",
        "train.ema_decay=0.9",
    ]
    return resumes(order, overrides, where, stop=3, files=3)


def expert_layers(order: dict[str, Any]) -> dict[str, float]:
    """The largest relative error, by case, of a layer under expert parallelism against the whole layer, in float64."""
    config = expert_config(order, 0, int(order["parallel"]))
    world = join(config)
    sent: list[tuple[torch.dtype, int]] = []
    send = dist.all_to_all_single

    def noting(result: torch.Tensor, rows: torch.Tensor, *others: Any, **named: Any) -> Any:
        if rows.dim() == 2 and rows.is_floating_point():
            sent.append((rows.dtype, len(rows)))
        return send(result, rows, *others, **named)

    dist.all_to_all_single = noting
    results = {}
    for tokens in ((6, 9), (7, 0), (0, 5), (0, 0)):
        for favoured, activation, capacity in ((None, "relu2", None), (0, "swiglu", None), (3, "relu2", 2)):
            settings = config.model.feed_forward.model_copy(update={"activation": activation})
            model = config.model.model_copy(update={"feed_forward": settings})
            torch.manual_seed(5)
            whole = MoeFeedForward(model).double()
            torch.manual_seed(5)
            shared = expert_layer(config)(model).double()
            share = shared.experts.share
            torch.manual_seed(6)
            with torch.no_grad():
                whole.w_down.normal_()
                shared.w_down.copy_(share(whole.w_down))
            torch.manual_seed(7 + world.rank)
            count = tokens[world.rank]
            x = torch.randn(count, model.d_model, dtype=torch.float64)
            logits = torch.randn(count, settings.experts, dtype=torch.float64)
            if favoured is not None:  # and its neighbour: all rows to one rank
                logits[:, favoured] += 50
                logits[:, favoured ^ 1] += 50
            dy = torch.randn(count, model.d_model, dtype=torch.float64)
            found = []
            for layer in (whole, shared):
                leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
                routing = ops.route_topk(leaves[1], 2, capacity=capacity)
                sent.clear()
                y = layer.mix(leaves[0], routing)
                y.backward(dy)
                found.append([y.detach(), *(leaf.grad for leaf in leaves), layer.w_up.grad, layer.w_down.grad])
            assert sent[0] == (torch.float64, int(routing.counts_E.sum())), "dropped rows are not sent"
            for gradient in found[0][3:]:
                dist.all_reduce(gradient)
            expected = [*found[0][:3], *(share(gradient) for gradient in found[0][3:])]
            errors = [
                relative(one, other) if one.numel() else 0.0 for one, other in zip(found[1], expected, strict=True)
            ]
            results[f"{tokens} {favoured} {activation} {capacity}"] = max(
                world.gather(max(errors), "the test"), default=0.0
            )
    with torch.autocast("cpu", torch.bfloat16):
        sent.clear()
        shared.float().mix(x.float(), routing)
    assert {dtype for dtype, _ in sent} == {torch.bfloat16}, "rows travel in the compute dtype"
    dist.all_to_all_single = send
    return results


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    jobs = {"train": train, "several": several, "repeat": repeat, "gradients": gradients, "experts": experts}
    jobs |= {"depths": depths}
    exit_worker(jobs[order["job"]](order))
