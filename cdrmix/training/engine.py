"""The DeepSpeed engine behind a small interface: forward, backward, clip, step, zero, and the state of checkpoints.

How a gradient is computed. What DeepSpeed 0.19 does is read in its source and tested against plain PyTorch:
- LossModel divides by the token count of the global batch, so gradients are summed over micro-batches and processes.
- `backward(..., scale_wrt_gas=False)` keeps DeepSpeed from dividing by the accumulation steps. Under ZeRO-2 and 3 it
  divides by the number of processes; the loss is multiplied by that number before.
- Without ZeRO and under ZeRO-1, `reduction.py` sums the gradients during the last backward pass of an update. The
  optimizer of ZeRO-1 then reads the sums of its own weights from `.grad`.
- Weights, gradients and optimizer state are fp32. Lower precision is torch.autocast around the forward pass, so ZeRO
  reduces in fp32 at every stage. Products read 16-bit copies of the weights, which `step` and `load_weights` refresh,
  and add weight gradients to `.grad` themselves (`ops/weights.py`).
- With `train.weights: bf16` the weights themselves are 16 bits, and products read them. ZeRO keeps float32 weights in
  its partitions, which are updated and saved (`master_weights.py`). Autograd gives bf16 gradients. They are summed over
  micro-batches and processes in float32 (`Tensor.grad_dtype` under ZeRO-1, ZeRO's partitions under 2 and 3). Only with
  `offload` under ZeRO-2 the sum of a micro-batch over the processes is rounded to bf16.
- With `train.offload` ZeRO's state is in main memory, or in memory-mapped files (`offload.py`).
- ZeRO-3 gathers a parameter for the module that owns it. The head's weight is read outside of its module. DeepSpeed's
  parameter dictionary detects this and gathers the weight for the module that reads it (the loss model).
- With expert parallelism (`expert_parallel.py`) a process has its own experts; everything else is replicated.
- With tensor parallelism (`tensor_groups.py`) a process has its share of every layer. DeepSpeed gets the groups as
  `mpu`: it divides by the number of processes with the same share, and counts each share once in the norm.
- With pipeline parallelism (`pipeline.py`) a process has a stage of the model, which is a whole model to DeepSpeed.
  `passes` runs the stage itself, and the norm and the check for numbers that are not finite are extended over the
  stages. A tied table is in the first stage, which updates it, and a copy in the last: its two gradients are summed
  before all others, and the copy gets the table after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.model.loss import Losses, LossModel
from cdrmix.model.pipeline import is_copy
from cdrmix.model.prediction import Depths
from cdrmix.model.tensor_parallel import cut_of, cuts_of
from cdrmix.ops import weights as compute_weights
from cdrmix.training.compiling import mark_documents
from cdrmix.training.copies import Keep, on_cpu
from cdrmix.training.deepspeed_config import BUCKET, accumulation, deepspeed_config
from cdrmix.training.digests import Digests, digests
from cdrmix.training.distributed import DistributedContext, any_threads
from cdrmix.training.expert_parallel import expert_groups, is_expert_shard
from cdrmix.training.gathered import Gathering
from cdrmix.training.master_weights import MasterWeights
from cdrmix.training.model_weights import ModelWeights
from cdrmix.training.muon import OrthogonalizedMomentum
from cdrmix.training.offload import move_state
from cdrmix.training.optim import LossScale, WeightAverage, make_optimizer, parameter_groups
from cdrmix.training.optimizer_state import Held, SavedPieces, load_pieces, pieces
from cdrmix.training.owners import Owners
from cdrmix.training.partitions import Partitions
from cdrmix.training.pipeline import EvaluatedPipeline, Item, Pipeline, PipelineGroups, extend_over, present
from cdrmix.training.precision import AUTOCAST, Autocast, attach_copies, sum_gradients_in_float32
from cdrmix.training.reduction import GradientReduction, ReplicatedParameters
from cdrmix.training.tensor_groups import TensorGroups
from cdrmix.training.updates import Replicated, Update, Zero1, Zero2, Zero3, copies_of
from cdrmix.training.zero import deepspeed_stage, shards_whole_parameters

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Engine:
    """Trains a loss model on a DeepSpeed engine, at any ZeRO stage and with any number of processes.

    One step is: `passes` over all micro-batches, `clip`, `step`, `zero`.
    loss_model: its parameters may be frozen (`requires_grad` False), and partitioned by ZeRO-3 already.
    base: the SHA-256 of the model that the frozen parameters are of, with adapters. Then `weights` and checkpoints hold
        the trained parameters alone, and a checkpoint of another base is refused. None: they hold all parameters.
    """

    def __init__(
        self, config: Config, loss_model: nn.Module, world: DistributedContext, *, base: str | None = None
    ) -> None:
        import deepspeed  # imported after distributed.join has chosen the accelerator

        self.world, self.base = world, base
        self.stage = deepspeed_stage(config.train, world.size)
        self.expert_parallel = config.train.expert_parallel
        self.micro_batch_rows = config.train.micro_batch_rows
        self._compiled = config.train.compile
        self._experts, self._shares = expert_groups(config), TensorGroups.of(loss_model)
        self._stages = PipelineGroups.of(loss_model)
        parallel = self._shares or self._stages  # this one has the same copies
        self._copies = None if parallel is None else parallel.copies
        cuts = cuts_of(loss_model)
        self._cuts = {name.removeprefix("language_model."): cut for name, cut in cuts.items()}
        self.share = 0.0  # of a micro-batch in its global batch
        self.set_micro_batches(accumulation(config, world))
        self.gradient_norm = 0.0  # of the last step, before clipping
        self.loss_scale = LossScale(
            config.train.precision == "fp16",
            initial=config.train.loss_scale.initial,
            interval=config.train.loss_scale.interval,
        )
        for buffer in loss_model.buffers():  # under ZeRO-3 DeepSpeed moves no module to the device
            if not buffer.is_meta:
                buffer.data = buffer.data.to(world.device)
        self.module = Autocast(loss_model, world.device.type, AUTOCAST[config.train.precision], stage=self.stage)
        self.any_threads = any_threads(config, world.device)  # no bit depends on the number of CPU threads
        self.optimizer = make_optimizer(parameter_groups(loss_model, config.train), config.train)
        narrow = config.train.weights == "bf16"
        before = [each.data for each in loss_model.parameters()] if narrow else []
        deepspeed.utils.groups.mpu = None  # of an engine before this one
        self._engine, *_ = deepspeed.initialize(
            model=self.module if self._stages is None else present(loss_model),
            optimizer=self.optimizer,
            config=deepspeed_config(config, world),
            mpu=parallel,
        )
        self.gathering = Gathering(self._engine.optimizer if self.stage == 3 else None)
        self._last = False  # the current micro-batch ends the update
        self._partitions = Partitions(self._engine.optimizer, self.stage) if self.stage > 0 else None
        masters: MasterWeights | None = None
        if narrow:
            assert self._partitions is not None, "bf16 weights need ZeRO"
            masters = MasterWeights(self._partitions, world.device)
            masters.restore(loss_model.parameters(), before)
        del before
        self._weights = ModelWeights(
            loss_model,
            world,
            self.stage,
            self._experts,
            self._shares,
            self._stages,
            masters,
            trained_only=base is not None,
        )
        self.parameters = self._weights.parameters
        self.trained = self._weights.trained
        attach_copies(self.parameters.values(), self.module.dtype, self.stage)
        offloads = config.train.offload != "none"
        if offloads and config.train.offload_folder is not None:
            move_state(self._engine.optimizer, self.stage, self.optimizer, config.train.offload_folder)
        # After the state is where it stays: `HostGradients` keeps its tensors.
        self._update = self._make_update(config.train.gradient_clip, offloads=offloads)
        self._owners: Owners | None = None
        if shards_whole_parameters(config.train, world.size):
            assert isinstance(self.optimizer, OrthogonalizedMomentum)
            self._owners = self.optimizer.ownership = Owners(self._replicated())
        self._reduction: GradientReduction | None = None
        if self._update.sums:
            self._engine.enable_backward_allreduce = False
            dtype = REDUCED[config.train.reduce_dtype]
            self._reduction = GradientReduction(self.parameters.values(), self._replicated(), dtype, most=BUCKET)
            if masters is not None:
                sum_gradients_in_float32(self.parameters.values())
        self._pipeline: Pipeline | None = None
        if self._stages is not None:
            assert isinstance(loss_model, LossModel)
            self._pipeline = Pipeline(self._stages, self.module, loss_model, world.device, self.module.dtype)
            if self.stage == 1:
                extend_over(self._stages, self._engine.optimizer)
        decay = config.train.ema_decay
        self.average = None if decay is None else WeightAverage(self._weights.local(), decay)

    def set_learning_rate(self, rate: float, own: Mapping[str, float] = {}) -> None:
        """Sets the learning rate of every group for the next update: `rate` times the group's multiplier.

        own: the rates of the groups with a schedule of their own (`schedule.group_rates`).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = own.get(group["schedule"], rate) * group["multiplier"]

    def set_micro_batches(self, count: int) -> None:
        """Sets the number of micro-batches of a process in the next steps, at first that of train.batch_rows.

        It gives each micro-batch its share of the means over micro-batches, which the routers' losses are.
        """
        self.share = 1.0 / (count * self.world.replicas)

    def passes(self, micro_batches: Sequence[Any], forward: Callable[..., Item]) -> Iterator[Item]:
        """The forward and backward passes over the micro-batches of a step; after the last one the gradients are summed
        over the processes.

        forward: gives for this engine, a micro-batch and `last` (of `forward`) an outcome with `total`, the loss, by
        calling `forward` or `evaluate`. Yields the outcomes in the order of the micro-batches.
        """
        if self._pipeline is None:
            for number, micro_batch in enumerate(micro_batches, 1):
                outcome = forward(self, micro_batch, last=number == len(micro_batches))
                self.backward(outcome.total)
                yield outcome
            return
        self._update.announce(self.loss_scale)
        yield from self._pipeline.run(
            micro_batches, lambda micro_batch: forward(self, micro_batch, last=True), self.loss_scale.value
        )
        assert self._stages is not None
        assert self._reduction is not None
        table = self._weights.tied
        if table is not None:
            assert table.grad is not None
            dist.all_reduce(table.grad, group=self._stages.ends)
        self._reduction.begin()
        self._reduction.end()
        self._update.gradients_are_final()

    @property
    def evaluated(self) -> nn.Module:
        """The module that evaluates, with the arguments of the loss model. With a pipeline all processes call it."""
        pipeline = self._pipeline
        return self.module if pipeline is None else EvaluatedPipeline(pipeline, self._engine.module)

    def forward(self, batch: Batch, *, last: bool, prediction: Depths | None = None) -> Losses:
        """The losses of a micro-batch. last: the step ends with it, and its backward pass reduces the gradients.

        prediction: as of LossModule.
        """
        here = self.placed(batch)
        arguments = here.ids_BT, here.targets_BT, here.weights_BT, here.documents, here.token_count, self.share
        losses: Losses = self.evaluate(*arguments, *(() if prediction is None else (prediction,)), last=last)
        return losses

    def placed(self, batch: Batch) -> Batch:
        """The micro-batch on the device of the training, ready for compiled blocks."""
        here = batch.to(self.world.device)
        return mark_documents(here) if self._compiled else here

    def evaluate(self, *arguments: Any, last: bool) -> Any:
        """The loss model's forward pass on any arguments; last: as in `forward`."""
        self._last = last
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*arguments) if self._pipeline is None else self.module(*arguments)

    def backward(self, total: Tensor) -> None:
        """Accumulates the gradients of a micro-batch's loss. After the last one they are summed over the processes."""
        assert self._pipeline is None, "`passes` runs the backward passes of a pipeline"
        factor = self._update.announce(self.loss_scale)
        if self._last and self._reduction is not None:
            self._reduction.begin()
        self._engine.backward(total * factor, scale_wrt_gas=False)
        if self._last:
            if self._reduction is not None:
                self._reduction.end()
            self._update.gradients_are_final()

    def clip(self) -> Tensor | None:
        """Clips the gradients to the norm `train.gradient_clip`. Returns their norm before, a scalar on the device.

        With ZeRO the gradients are in partitions that DeepSpeed's step clips: this does nothing and returns None.
        """
        return self._update.clip(self.loss_scale)

    def step(self, gradient_norm: float | None = None, *, discard: bool = False) -> bool:
        """One update, unless the gradient norm is not finite. Returns whether it was applied.

        gradient_norm: the value that `clip` returned, if the caller has read it. Reading it here waits for the device.
        discard: do not apply it.
        """
        applied, self.gradient_norm = self._update.apply(gradient_norm, discard=discard)
        if not discard:
            self.loss_scale.update(applied)
        if applied:
            if self._weights.tied is not None:
                assert self._stages is not None
                dist.broadcast(self._weights.tied.detach(), group=self._stages.ends, group_src=0)
            compute_weights.refresh(self.parameters.values())
            if self.average is not None:
                self.average.update(self._weights.local())
        return applied

    def zero(self) -> None:
        """Removes the gradients. DeepSpeed's step does so only where the update was applied."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._update.clear()

    def weights(self, keep: Keep = on_cpu, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """The fp32 weights on the CPU, with all experts and gathered under every ZeRO stage. {} except in rank 0.

        The names are of the model's state_dict; with `base` those of the trained parameters. wanted: which of them.
        All ranks call.
        """
        return self._weights.whole(self._weights.local(), keep, spread=False, wanted=wanted)

    def weights_part(self, keep: Keep = on_cpu) -> dict[str, Tensor]:
        """This process's part of what `weights` returns: each tensor is in one process, under ZeRO-3 they are spread
        evenly. All ranks call."""
        return self._weights.whole(self._weights.local(), keep, spread=True)

    def copy_weights(self, target: nn.Module) -> None:
        """Copies all weights, gathered under every ZeRO stage, into a module of the same structure. All ranks call."""
        self._weights.copy_to(target)

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of `weights`, with all experts, in every rank and without gathering."""
        return self._weights.shapes()

    def average_weights(self, keep: Keep = on_cpu) -> dict[str, Tensor]:
        """The averaged weights in the form of `weights`; {} without an average."""
        return {} if self.average is None else self._weights.whole(self.average.tensors, keep, spread=False)

    def average_weights_part(self, keep: Keep = on_cpu) -> dict[str, Tensor]:
        """The averaged weights in the form of `weights_part`; {} without an average."""
        return {} if self.average is None else self._weights.whole(self.average.tensors, keep, spread=True)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Loads what `weights` returned. The argument of rank 0, and of the first rank of each stage of a pipeline, is
        sent to the others (`world.leads`). All ranks call."""
        self._weights.load(weights)
        if self._weights.masters is None:
            self._update.weights_changed()
        compute_weights.refresh(self.parameters.values())

    def begin_average(self) -> None:
        """The average, if there is one, begins anew at the weights as they are."""
        if self.average is not None:
            for mine, weight in zip(self.average.tensors, self._weights.local(), strict=True):
                mine.copy_(weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has the averaged weights, if there is an average, and no step is made. All ranks call.

        Afterwards every weight has its bits again.
        """
        if self.average is None:
            yield
            return
        self._weights.exchange(self.average.tensors)
        compute_weights.refresh(self.parameters.values())
        try:
            yield
        finally:
            self._weights.restore(self.average.tensors)
            compute_weights.refresh(self.parameters.values())

    def load_average_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Loads what `average_weights` returned; every rank passes the full weights."""
        assert self.average is not None
        self._weights.load_local(self.average.tensors, weights)

    def optimizer_state(self, keep: Keep = on_cpu) -> dict[str, Tensor]:
        """This process's pieces of the optimizer's state. Together the processes have each element once."""
        return pieces(self.optimizer, self._held(saved=True), keep)

    def load_optimizer_state(self, checkpoint: Path, files: Iterable[str]) -> None:
        """Loads what all processes' `optimizer_state` returned. Their layout may have been another.

        files: those of the checkpoint that have it. Raises CheckpointError.
        """
        for state in self.optimizer.state.values():  # of later steps, where a run goes back
            for value in state.values():
                value.zero_()
        with SavedPieces(checkpoint, files, self._weights.names, self._cuts) as opened:
            load_pieces(self.optimizer, self._held(saved=False), opened)

    def digests(self) -> Digests:
        """The digests of the weights and of the optimizer's state, the same for every layout. All ranks call."""
        sums = digests(self.optimizer, self._held(saved=True), self.trained, self.world.device)
        if self.world.size > 1:
            dist.all_reduce(sums)
        return Digests(*sums.cpu())

    def gradient(self, name: str) -> Tensor:
        """The gradient of this process's parameter, summed over the processes, not partitioned. All ranks call."""
        return self._update.gradient(self.parameters[name])

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The part of a whole tensor that belongs to this process's parameter: with its experts."""
        return self._weights.shard(self.parameters[name], whole)

    def _make_update(self, largest_norm: float, *, offloads: bool) -> Update:
        arguments = self._engine, self.parameters, self.world.device
        match self.stage:
            case 1:
                return Zero1(*arguments)
            case 2:
                return Zero2(*arguments, self.world.replicas, offloads=offloads)
            case 3:
                return Zero3(*arguments, self.world.replicas, offloads=offloads)
        divided = None if self._experts is None else self._experts.experts.group
        if self._shares is not None:
            divided = self._shares.group
        line = None if self._stages is None else self._stages.line
        return Replicated(self._engine, self.parameters, largest_norm, divided=divided, line=line)

    def _replicated(self) -> list[ReplicatedParameters]:
        # The processes that hold the same parameters, and under ZeRO-1 the owner of each.
        if self.world.size == 1:
            return []
        if isinstance(self._update, Zero1):
            return self._update.owned()
        parameters = [each for each in self.parameters.values() if each.requires_grad and not is_copy(each)]
        everyone = dist.group.WORLD if self._copies is None else self._copies
        assert everyone is not None
        return copies_of(parameters, everyone, None if self._experts is None else self._experts.copies)

    def _held(self, *, saved: bool) -> Iterator[Held]:
        """The elements that this process's optimizer updates. saved: those alone that this process saves."""
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad or is_copy(parameter) or (saved and not self._saves(parameter)):
                continue
            before, shape = self._weights.place(parameter)
            tensor, start, first, end = parameter, 0, 0, parameter.numel()
            if self._partitions is not None:
                slices = self._partitions[parameter]
                tensor, start, (first, end) = self._partitions.flat[slices.number], slices.start, slices.mine
            elif self._owners is not None and not self._owners.mine(parameter):
                continue
            if first < end:
                share = self._weights.share(parameter)
                yield Held(name, tensor, start, before + first, before + end, shape, share)

    def _saves(self, parameter: Tensor) -> bool:
        """Whether no other process saves the state of this process's elements of a parameter."""
        if self._shares is not None and self._shares.rank > 0 and cut_of(parameter) is None:
            return False
        if self._owners is not None:
            return self._owners.saves(parameter)
        if self.stage > 0:
            return True
        if is_expert_shard(parameter):
            assert self._experts is not None
            return dist.get_rank(self._experts.copies) == 0
        if self._copies is not None:
            return dist.get_rank(self._copies) == 0
        return self.world.is_main_process


def make_engine(config: Config, loss_model: nn.Module, world: DistributedContext, *, base: str | None = None) -> Engine:
    """The engine of a run. It owns the loss model and moves it to the device. base: as of Engine."""
    return Engine(config, loss_model, world, base=base)
