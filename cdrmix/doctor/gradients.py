"""Gradients of a small model with every kind of layer: kernels against float64, the engine against plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import ShardSet
from cdrmix.doctor.findings import ROWS, Finding
from cdrmix.model.loss import LossModel
from cdrmix.model.pipeline import is_copy
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine

# Against float64. On a CPU float32 sums of at most 300 terms in five layers: 300 * 5 * 2^-24. On a GPU products may
# round their factors to 10 bits (TF32), 2^-11 a factor, through five layers and back.
KERNEL_TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}
ENGINE_TOLERANCE = 2e-6  # the same kernels on both sides: sums of gradients in another order


def kernels(config: Config, shards: ShardSet) -> Finding:
    """Loss and every gradient of the model against the formulas in float64, with packed documents."""
    world = join(config)
    seed_everything(3)
    model = build_loss_model(config)
    _perturb(list(model.parameters()))
    exact = deepcopy(model).double()
    model.to(world.device)
    batches = _loader(config, shards).micro_batches(0)
    errors = {"loss": abs(_backward(model, batches, world.device) / _backward(exact, batches, torch.device("cpu")) - 1)}
    others = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = others[name].grad
        assert gradient is not None
        errors[name] = _relative_error(parameter.grad, gradient)
    worst = max(errors, key=lambda name: errors[name])
    passed = errors[worst] < KERNEL_TOLERANCE[world.device.type]
    remedy = f"the kernels of {worst} are wrong here: set CDRMIX_BACKEND=reference, and report the versions above"
    found = f"largest error {errors[worst]:.1e} of {len(errors) - 1} gradients and the loss ({worst})"
    return Finding("kernels against float64", passed, found, "" if passed else remedy)


def engine(check: str, config: Config, whole: Config, shards: ShardSet) -> Finding:
    """The engine's gradients of a global batch against those of plain PyTorch in one process. All processes call.

    config: with the mode of training. whole: the same model in one process.
    """
    world = join(config)
    seed_everything(3)
    plain = build_loss_model(whole).to(world.device)
    _perturb(list(plain.parameters()))
    trained = make_engine(config, build_loss_model(config), world)
    trained.load_weights(plain.language_model.state_dict() if world.leads else {})
    _backward(plain, _loader(config, shards).micro_batches(0), world.device)
    batches = _loader(config, shards, world).micro_batches(0)
    trained.set_micro_batches(len(batches))
    for _ in trained.passes(batches, Engine.forward):
        pass
    errors, expected = {}, dict(plain.language_model.named_parameters())
    for name, mine in trained.parameters.items():  # with a pipeline those of a stage
        if is_copy(mine):  # its gradient is in the table's
            continue
        parameter = expected[name]
        assert parameter.grad is not None
        errors[name] = _relative_error(trained.gradient(name), trained.part(name, parameter.grad))
    trained.zero()
    worst, name = max(
        (error, name) for each in world.gather(errors, "the errors of the gradients") for name, error in each.items()
    )
    passed = worst < ENGINE_TOLERANCE
    remedy = "" if passed else "do not train in this mode; install the versions of constraints.txt"
    return Finding(check, passed, f"largest error of a gradient {worst:.1e} ({name})", remedy)


def _loader(config: Config, shards: ShardSet, world: DistributedContext | None = None) -> TrainLoader:
    """The rows of this process, in micro-batches of one row. world: None: all rows."""
    rank, processes, slice_rank, slices = (0, 1, 0, 1) if world is None else world.loader_ranks
    return TrainLoader(
        shards.train,
        row_length=config.data.row_length,
        batch_rows=ROWS,
        micro_batch_rows=1,
        seed=5,
        rank=rank,
        world_size=processes,
        slice_rank=slice_rank,
        slices=slices,
    )


def _perturb(parameters: Sequence[torch.Tensor]) -> None:
    """Adds small numbers to all weights. Outputs start at zero, which would hide half of the gradients."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=0.02)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest element."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    scale = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    return difference / scale if scale else difference


def _backward(model: LossModel, batches: Sequence[Batch], device: torch.device) -> float:
    """Adds the gradients of a global batch to those of a model of plain PyTorch. Returns the loss."""
    total = 0.0
    for batch in batches:
        here = batch.to(device)
        arguments = here.ids_BT, here.targets_BT, here.weights_BT, here.documents, here.token_count
        losses = model(*arguments, 1 / len(batches))
        losses.total.backward()
        total += losses.total.item()
    return total
