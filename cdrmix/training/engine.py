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
- ZeRO-3 gathers a parameter for the module that owns it. The head's weight is read outside of its module. DeepSpeed's
  parameter dictionary detects this and gathers the weight for the module that reads it (the loss model).
- With expert parallelism (`expert_parallel.py`) a process has its own experts; everything else is replicated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.model.loss import Losses
from cdrmix.ops import weights as compute_weights
from cdrmix.training.compiling import mark_documents
from cdrmix.training.distributed import DistributedContext, any_threads
from cdrmix.training.expert_parallel import expert_groups, is_expert_shard, total_norm
from cdrmix.training.optim import LossScale, WeightAverage, make_optimizer, parameter_groups
from cdrmix.training.reduction import GradientReduction, ReplicatedParameters
from cdrmix.training.zero import zero_stage

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET = 50_000_000  # elements of one message; 200 MB of fp32
MOST_LIVE = 1_000_000_000  # most parameters that ZeRO-3 gathers at a time; a single module may exceed it
PERSISTENCE_THRESHOLD = 100_000  # elements; ZeRO-3 does not shard smaller parameters: 400 KB costs less than a message


class Autocast(nn.Module):
    """A loss model whose forward pass runs under torch.autocast. DeepSpeed wraps this module."""

    def __init__(self, loss_model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.loss_model = loss_model
        self.device_type = device_type
        self.dtype = dtype

    def forward(self, *arguments: Any) -> Any:
        """The loss model's forward pass, in the configured precision."""
        with self.precision():
            return self.loss_model(*arguments)

    def precision(self) -> AbstractContextManager[None]:
        """The configured precision, for computations outside of the forward pass."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)


def accumulation(config: Config, world: DistributedContext) -> int:
    """Micro-batches of one process in one step."""
    return config.train.batch_rows // (config.train.micro_batch_rows * world.size)


def deepspeed_config(config: Config, world: DistributedContext) -> dict[str, Any]:
    """Every DeepSpeed key that affects training is written out, so that no default of its version matters."""
    train, stage = config.train, zero_stage(config.train, world.size)
    return {
        "train_batch_size": train.batch_rows,
        "train_micro_batch_size_per_gpu": train.micro_batch_rows,
        "gradient_accumulation_steps": accumulation(config, world),
        "managed_gradient_accumulation": True,  # Engine.evaluate sets the boundary
        # Without ZeRO, DeepSpeed clips and does not return the norm, so Engine.clip clips. With ZeRO its step clips.
        "gradient_clipping": train.gradient_clip if stage > 0 else 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",  # the only one that every ZeRO stage has; Engine.backward undoes the division
        "use_data_before_expert_parallelism": False,  # ranks that exchange rows are adjacent
        # DeepSpeed converts also where one process has nothing to reduce.
        "communication_data_type": train.reduce_dtype if world.size > 1 else "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "disable_allgather": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": []},
        "zero_optimization": {
            "stage": stage,
            "legacy_stage1": False,
            # ZeRO-2 waits for the whole device before each message. ZeRO-3 reduces on its own stream, in an order that
            # depends on the model only.
            "overlap_comm": stage == 3,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET,
            "use_multi_rank_bucket_allreduce": False,  # a reduce to each owner has half the traffic of an all-reduce
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET,
            "compute_grad_norm": True,
            "round_robin_gradients": False,
            "parameter_alignment": False,
            "ignore_unused_parameters": True,
            "load_from_fp32_weights": True,
            "elastic_checkpoint": False,
            "pipeline_loading_checkpoint": False,
            "save_muon_momentum_buffer_in_memory": False,
            "offload_param": None,
            "offload_optimizer": None,
            "zenflow": None,
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_max_live_parameters": MOST_LIVE,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_module_granularity_threshold": 0,
            "stage3_use_all_reduce_for_fetch_params": False,
            "stage3_allgather_sequential": False,
            "stage3_gather_16bit_weights_on_model_save": False,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": False,
            "memory_efficient_linear": False,  # True replaces torch.nn.functional.linear in the whole process
            "override_module_apply": True,
            "log_trace_cache_warnings": False,
            "enable_sanity_checks": False,
        },
        "zero_allow_untested_optimizer": train.optimizer != "adamw",
        "zero_force_ds_cpu_optimizer": False,
        "compile": {"deepcompile": False},
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
        "comet": {"enabled": False},
        "csv_monitor": {"enabled": False},
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_python_gc": False,
        "log_level": "warning",
    }


def attach_copies(parameters: Iterable[Tensor], dtype: torch.dtype | None, stage: int) -> None:
    """Lets products keep copies of the weights in their dtype and accumulate weight gradients, where the stage allows.

    dtype: of autocast; None: products are float32 and need no copies.
    """
    if dtype is not None and stage < 3:  # under ZeRO-3 a weight is gathered only during its module's call
        # ZeRO-2's hooks read every gradient when it is computed; ZeRO-1 reads `.grad` after the last one.
        compute_weights.attach(parameters, dtype, add_gradients=stage < 2)


class Engine:
    """Trains a loss model on a DeepSpeed engine, at any ZeRO stage and with any number of processes.

    One step is: `forward` and `backward` of every micro-batch, `clip`, `step`, `zero`.
    """

    def __init__(self, config: Config, loss_model: nn.Module, world: DistributedContext) -> None:
        import deepspeed  # imported after distributed.join has chosen the accelerator

        self.world = world
        self.stage = zero_stage(config.train, world.size)
        self.gradient_clip = config.train.gradient_clip
        self.expert_parallel = config.train.expert_parallel
        self._compiled = config.train.compile
        self._experts = expert_groups(config)
        self.share = 1.0 / (accumulation(config, world) * world.size)
        self.gradient_norm = 0.0  # of the last step, before clipping
        self._norm = torch.zeros(())  # the same on the device, between `clip` and `step`
        self.loss_scale = LossScale(
            config.train.precision == "fp16",
            initial=config.train.loss_scale.initial,
            interval=config.train.loss_scale.interval,
        )
        self.module = Autocast(loss_model, world.device.type, AUTOCAST[config.train.precision])
        self.any_threads = any_threads(config, world.device)  # no bit depends on the number of CPU threads
        self.optimizer = make_optimizer(parameter_groups(loss_model, config.train), config.train)
        self._engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=deepspeed_config(config, world)
        )
        self._last = False  # the current micro-batch ends the update
        self.parameters: dict[str, Any] = {  # Any: ZeRO-3 gives parameters ds_tensor, ds_numel and ds_shape
            name.removeprefix("language_model."): parameter for name, parameter in loss_model.named_parameters()
        }
        attach_copies(self.parameters.values(), self.module.dtype, self.stage)
        self._reduction: GradientReduction | None = None
        if self.stage < 2:
            self._engine.enable_backward_allreduce = False
            if self.stage == 1:
                for hook in self._engine.optimizer._grad_acc_hooks:
                    hook.remove()  # they create buckets that stay empty
            self._reduction = GradientReduction(
                self.parameters.values(), self._replicated(), REDUCED[config.train.reduce_dtype], most=BUCKET
            )
        # State that no gradient changes: the routers' biases. Whole and equal in every process.
        self.buffers = {name.removeprefix("language_model."): buffer for name, buffer in loss_model.named_buffers()}
        decay = config.train.ema_decay
        self.average = None if decay is None else WeightAverage(self._local_weights(), decay)

    def set_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of every group for the next update: `rate` times the group's multiplier."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]

    def forward(self, batch: Batch, *, last: bool) -> Losses:
        """The losses of a micro-batch. last: the step ends with it, and its backward pass reduces the gradients."""
        here = batch.to(self.world.device)
        if self._compiled:
            here = mark_documents(here)
        losses: Losses = self.evaluate(
            here.ids_BT, here.targets_BT, here.weights_BT, here.cu_seqlens_N, here.token_count, self.share, last=last
        )
        return losses

    def evaluate(self, *arguments: Any, last: bool) -> Any:
        """The loss model's forward pass on any arguments; last: as in `forward`."""
        self._last = last
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*arguments)

    def backward(self, total: Tensor) -> None:
        """Accumulates the gradients of a micro-batch's loss. After the last one they are summed over the processes."""
        factor: float = self.world.size if self.stage >= 2 else 1
        if self.stage == 0:
            factor *= self.loss_scale.value
        elif self.loss_scale.enabled:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        reduction = self._reduction if self._last else None
        if reduction is not None:
            reduction.begin()
        self._engine.backward(total * factor, scale_wrt_gas=False)
        if reduction is not None:
            reduction.end()
            if self.stage == 1:
                self._hand_over_gradients()

    def clip(self) -> Tensor | None:
        """Clips the gradients to the norm `train.gradient_clip`. Returns their norm before, a scalar on the device.

        With ZeRO the gradients are in partitions that DeepSpeed's step clips: this does nothing and returns None.
        """
        if self.stage > 0:
            return None
        all_gradients = [(parameter.grad, is_expert_shard(parameter)) for parameter in self.parameters.values()]
        gradients = [(gradient, shared) for gradient, shared in all_gradients if gradient is not None]
        if self.loss_scale.enabled:
            torch._foreach_mul_([gradient for gradient, _ in gradients], 1.0 / self.loss_scale.value)
        self._norm = total_norm(gradients, self._experts)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.gradient_clip, self._norm, foreach=True)
        return self._norm

    def step(self, gradient_norm: float | None = None) -> bool:
        """One AdamW update, unless the gradient norm is not finite. Returns whether it was applied.

        gradient_norm: the value that `clip` returned, if the caller has read it. Reading it here waits for the device.
        """
        if self.stage == 0:
            self.gradient_norm = self._norm.item() if gradient_norm is None else gradient_norm
            applied = math.isfinite(self.gradient_norm)
            if applied:
                self._engine.step()
        else:
            self._engine.step()  # skips the update where the norm is not finite
            applied = self._engine.was_step_applied()
            self.gradient_norm = float(self._engine.get_global_grad_norm()) if applied else math.inf
        self.loss_scale.update(applied)
        if applied:
            compute_weights.refresh(self.parameters.values())
            if self.average is not None:
                self.average.update(self._local_weights())
        return applied

    def zero(self) -> None:
        """Removes the gradients. DeepSpeed's step does so only where the update was applied."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights on the CPU, with all experts and gathered under every ZeRO stage. {} except in rank 0.

        All ranks call.
        """
        return self._whole(self._local_weights()) | self._buffers()

    def copy_weights(self, target: nn.Module) -> None:
        """Copies all weights, gathered under every ZeRO stage, into a module of the same structure. All ranks call.

        Processes may run different numbers of forward passes of the copy. Under ZeRO-3 those of the trained module are
        collectives.
        """
        with torch.no_grad():
            for parameter, copied in zip(self.parameters.values(), target.parameters(), strict=True):
                with self._gathered(parameter):
                    copied.copy_(parameter)
            for buffer, its_copy in zip(self.buffers.values(), target.buffers(), strict=True):
                its_copy.copy_(buffer)

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of `weights`, with all experts, in every rank and without gathering."""
        shapes = {name: list(buffer.shape) for name, buffer in self.buffers.items()}
        for name, parameter in self.parameters.items():
            shapes[name] = list(parameter.ds_shape if self.stage == 3 else parameter.shape)
            if is_expert_shard(parameter):
                shapes[name][0] *= self.expert_parallel
        return shapes

    def average_weights(self) -> dict[str, Tensor]:
        """The averaged weights in the form of `weights`; {} without an average."""
        return {} if self.average is None else self._whole(self.average.tensors) | self._buffers()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Loads what `weights` returned. Rank 0's argument is sent to every rank. All ranks call."""
        for name, parameter in self.parameters.items():
            with self._gathered(parameter), torch.no_grad():
                if is_expert_shard(parameter):
                    assert self._experts is not None
                    self._experts.shard(parameter.data, weights[name] if self.world.rank == 0 else None)
                    continue
                if self.world.rank == 0:
                    parameter.copy_(weights[name])
                if self.stage < 3 and self.world.size > 1:
                    dist.broadcast(parameter.data, 0)
        for name, buffer in self.buffers.items():
            if self.world.rank == 0:
                buffer.copy_(weights[name])
            if self.world.size > 1:
                dist.broadcast(buffer, 0)
        if self.stage > 0:
            self._engine.optimizer.refresh_fp32_params()
        compute_weights.refresh(self.parameters.values())

    def load_average_weights(self, weights: dict[str, Tensor]) -> None:
        """Loads what `average_weights` returned; every rank passes the full weights."""
        assert self.average is not None
        for (name, parameter), mine in zip(self.parameters.items(), self.average.tensors, strict=True):
            whole = self._shard(parameter, weights[name]).flatten()
            if self.stage == 3:
                size = parameter.ds_tensor.numel()
                rank = dist.get_rank(parameter.ds_process_group)
                whole = whole[rank * size : (rank + 1) * size]
            mine.flatten()[: whole.numel()].copy_(whole)

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts: by parameter name in rank 0; with ZeRO by partition in every rank.

        All ranks call.
        """
        state = {}
        for name, parameter in self._optimized().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensor: Tensor | None = value.detach() if self.stage > 0 or self.world.rank == 0 else None
                if is_expert_shard(parameter) and value.shape == parameter.shape:
                    assert self._experts is not None
                    tensor = self._experts.whole(value)
                if tensor is not None:
                    state[f"{name}/{key}"] = tensor.cpu()
        return state

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Loads what `optimizer_state` returned: without ZeRO that of rank 0, with ZeRO that of the same rank."""
        optimized = self._optimized()
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = optimized[name]
            if value.dim() == parameter.dim():  # otherwise it is the step count
                value = self._shard(parameter, value)
            self.optimizer.state[parameter][slot] = value.to(parameter.device, copy=True)

    def _replicated(self) -> list[ReplicatedParameters]:
        # The processes that hold the same parameters, and under ZeRO-1 the owner of each.
        if self.world.size == 1:
            return []
        if self.stage == 1:
            zero = self._engine.optimizer
            assert not any(any(padding) for padding in zero.round_robin_bit16_padding), "gaps between parameters"
            layout = zip(zero.round_robin_bit16_groups, zero.real_dp_process_group, zero.partition_size, strict=True)
            return [ReplicatedParameters(parameters, group, int(part)) for parameters, group, part in layout]
        parameters = [each for each in self.parameters.values() if each.requires_grad]
        everyone = dist.group.WORLD
        assert everyone is not None
        groups = [ReplicatedParameters([each for each in parameters if not is_expert_shard(each)], everyone)]
        if self._experts is not None:
            groups.append(
                ReplicatedParameters([each for each in parameters if is_expert_shard(each)], self._experts.copies)
            )
        return groups

    def _hand_over_gradients(self) -> None:
        # As ZeRO-1 of DeepSpeed does after its own reduction: its step reads the sums of this process's partitions.
        zero = self._engine.optimizer
        for number, mine in enumerate(zero.params_in_partition):
            zero.all_grad_tensors[number] = zero.get_all_grad_tensors(mine, dtype=torch.float32)
        zero.finalize_gradient_accumulation_boundary()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _optimized(self) -> dict[str, Tensor]:
        # The tensors that AdamW updates: the parameters, or with ZeRO the flat fp32 partitions of this process.
        if self.stage == 0:
            return dict(self.parameters)
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        return {f"partition{number}": tensor for number, tensor in enumerate(flat)}

    def _local_weights(self) -> list[Tensor]:
        # The weights that this process holds: whole, or under ZeRO-3 one padded slice of each.
        if self.stage == 3:
            return [parameter.ds_tensor.data for parameter in self.parameters.values()]
        return [parameter.data for parameter in self.parameters.values()]

    def _whole(self, local: list[Tensor]) -> dict[str, Tensor]:
        whole = {}
        for (name, parameter), mine in zip(self.parameters.items(), local, strict=True):
            if self.stage == 3:
                mine = _joined(mine, parameter)
            tensor: Tensor | None = mine if self.world.rank == 0 else None
            if is_expert_shard(parameter):
                assert self._experts is not None
                tensor = self._experts.whole(mine)
            if tensor is not None:
                whole[name] = tensor.detach().cpu().contiguous()
        return whole

    def _buffers(self) -> dict[str, Tensor]:
        """A copy of the buffers, which are not averaged: in rank 0; {} in the others."""
        return {name: buffer.cpu().clone() for name, buffer in self.buffers.items()} if self.world.rank == 0 else {}

    def _shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The part of a whole tensor that belongs to this process's parameter."""
        if not is_expert_shard(parameter):
            return whole
        assert self._experts is not None
        return self._experts.experts.share(whole)

    def _gathered(self, parameter: nn.Parameter) -> Any:
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _joined(mine: Tensor, parameter: Any) -> Tensor:
    """Gathers a parameter under ZeRO-3 from the slices of its group. All ranks of the group call."""
    size = dist.get_world_size(parameter.ds_process_group)
    if size > 1:
        slices = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(slices, mine.contiguous(), group=parameter.ds_process_group)
        mine = torch.cat(slices)
    return mine[: parameter.ds_numel].view(parameter.ds_shape)


def make_engine(config: Config, loss_model: nn.Module, world: DistributedContext) -> Engine:
    """The engine of a run. It owns the loss model and moves it to the device."""
    return Engine(config, loss_model, world)
