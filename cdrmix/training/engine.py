"""The DeepSpeed engine behind one small face: forward, backward, clip, step, zero, and the state to keep.

How a gradient comes about, as read in DeepSpeed 0.19 and held against plain PyTorch in the tests:
- LossModel divides by the token count of the global batch, so micro-batches and processes are to be summed.
- `backward(..., scale_wrt_gas=False)` keeps DeepSpeed from dividing by the accumulation steps; where it reduces, under
  ZeRO-2 and 3, its division by the number of processes is undone by multiplying the loss.
- Without ZeRO and under ZeRO-1 gradients are added up here (`reduction.py`), beside an update's last backward pass;
  ZeRO-1's optimizer then takes the sums of its own weights from `.grad`.
- Weights, gradients and optimizer state are fp32. Lower precision is torch.autocast around the forward pass,
  so that ZeRO never sees it and reduces in fp32 whatever the stage. Products read 16-bit copies of the weights, which
  `step` and `load_weights` refresh, and add weight gradients to `.grad` by themselves (`ops/weights.py`).
- ZeRO-3 gathers a parameter for the module that owns it. The head's weight is read outside of its module;
  DeepSpeed's parameter dictionary notices that and gathers it for the module that reads (the loss model).
- With expert parallelism (`expert_parallel.py`) a process has its own experts and shares all else as before.
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
from cdrmix.training.expert_parallel import expert_groups, is_shared_out, total_norm
from cdrmix.training.optim import LossScale, WeightAverage, make_optimizer, parameter_groups
from cdrmix.training.reduction import GradientReduction, Shared
from cdrmix.training.zero import zero_stage

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET = 50_000_000  # elements of one communication; 200 MB of fp32
MOST_LIVE = 1_000_000_000  # parameters that ZeRO-3 holds whole at once, where a module's own are no more
PERSISTENCE_THRESHOLD = 100_000  # elements; ZeRO-3 keeps parameters up to this size whole: 400 KB, not worth a message


class Autocast(nn.Module):
    """A loss model whose forward pass runs under torch.autocast; the module that DeepSpeed wraps."""

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
        """The configured precision, for what is computed outside of the forward pass."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)


def accumulation(config: Config, world: DistributedContext) -> int:
    """Micro-batches of one process in one step."""
    return config.train.batch_rows // (config.train.micro_batch_rows * world.size)


def deepspeed_config(config: Config, world: DistributedContext) -> dict[str, Any]:
    """Every DeepSpeed key that bears on training, written out: no default of its version decides anything."""
    train, stage = config.train, zero_stage(config.train, world.size)
    return {
        "train_batch_size": train.batch_rows,
        "train_micro_batch_size_per_gpu": train.micro_batch_rows,
        "gradient_accumulation_steps": accumulation(config, world),
        "managed_gradient_accumulation": True,  # with the boundary set by Engine.forward
        # Without ZeRO, DeepSpeed clips but forgets the norm, so Engine.clip does it; with ZeRO its step clips.
        "gradient_clipping": train.gradient_clip if stage > 0 else 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",  # the one that every ZeRO stage has; Engine.backward undoes it
        "use_data_before_expert_parallelism": False,  # ranks that exchange rows are neighbours
        # DeepSpeed converts whatever it reduces, also for a sum of one process.
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
            # ZeRO-2 would wait for the whole device before each message. ZeRO-3 reduces on a stream of its own, in an
            # order that the model alone decides.
            "overlap_comm": stage == 3,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET,
            "use_multi_rank_bucket_allreduce": False,  # each owner gets its sum, at half of an all-reduce's traffic
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
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear for the whole process
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
    """Lets products keep copies of the weights in their dtype, and add up weight gradients, where the stage allows.

    dtype: of autocast; None: the products are float32, and need none.
    """
    if dtype is not None and stage < 3:  # under ZeRO-3 a weight is whole for one module's call alone
        # ZeRO-2's hooks take each gradient as it comes; ZeRO-1 reads what `.grad` holds after the last one.
        compute_weights.attach(parameters, dtype, add_gradients=stage < 2)


class Engine:
    """Trains a loss model on a DeepSpeed engine, whatever the ZeRO stage and the number of processes.

    One step is: `forward` and `backward` of every micro-batch, `clip`, `step`, `zero`.
    """

    def __init__(self, config: Config, loss_model: nn.Module, world: DistributedContext) -> None:
        import deepspeed  # after parallel.join has settled the accelerator

        self.world = world
        self.stage = zero_stage(config.train, world.size)
        self.gradient_clip = config.train.gradient_clip
        self.expert_parallel = config.train.expert_parallel
        self._compiled = config.train.compile
        self._experts = expert_groups(config)
        self.share = 1.0 / (accumulation(config, world) * world.size)
        self.gradient_norm = 0.0  # of the last step, before clipping
        self._norm = torch.zeros(())  # the same where it was made, of gradients that were clipped and not yet applied
        self.loss_scale = LossScale(config.train.precision == "fp16")
        self.module = Autocast(loss_model, world.device.type, AUTOCAST[config.train.precision])
        self.any_threads = any_threads(config, world.device)  # whether no bit depends on the number of CPU threads
        self.optimizer = make_optimizer(parameter_groups(loss_model, config.train), config.train)
        self._engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=deepspeed_config(config, world)
        )
        self._last = False  # whether the micro-batch at hand ends the update
        self.parameters: dict[str, Any] = {  # Any: ZeRO-3 gives parameters ds_tensor, ds_numel and ds_shape
            name.removeprefix("language_model."): parameter for name, parameter in loss_model.named_parameters()
        }
        attach_copies(self.parameters.values(), self.module.dtype, self.stage)
        self._reduction: GradientReduction | None = None
        if self.stage < 2:
            self._engine.enable_backward_allreduce = False
            if self.stage == 1:
                for hook in self._engine.optimizer._grad_acc_hooks:
                    hook.remove()  # they would make buckets that nobody fills
            self._reduction = GradientReduction(
                self.parameters.values(), self._shared(), REDUCED[config.train.reduce_dtype], most=BUCKET
            )
        # Weights that no gradient changes, the routers' biases: whole and the same in every process.
        self.buffers = {name.removeprefix("language_model."): buffer for name, buffer in loss_model.named_buffers()}
        decay = config.train.ema_decay
        self.average = None if decay is None else WeightAverage(self._local_weights(), decay)

    def set_learning_rate(self, rate: float) -> None:
        """Gives every group its rate for the coming update: `rate` times the group's multiplier."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]

    def forward(self, batch: Batch, *, last: bool) -> Losses:
        """The losses of a micro-batch. `last` says that the step ends with it, so that its backward pass reduces."""
        here = batch.to(self.world.device)
        if self._compiled:
            here = mark_documents(here)
        losses: Losses = self.evaluate(
            here.ids_BT, here.targets_BT, here.weights_BT, here.cu_seqlens_N, here.token_count, self.share, last=last
        )
        return losses

    def evaluate(self, *arguments: Any, last: bool) -> Any:
        """The loss model's forward pass on a micro-batch of its own kind; `last` as for `forward`."""
        self._last = last
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*arguments)

    def backward(self, total: Tensor) -> None:
        """Adds the gradients of a micro-batch's total loss; after the last one they are summed over the processes."""
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
        """Scales the gradients down to the norm `train.gradient_clip`. Returns what it was, a scalar on the device.

        With ZeRO they lie in partitions that DeepSpeed's own step clips, so there this does nothing: None.
        """
        if self.stage > 0:
            return None
        found = [(parameter.grad, is_shared_out(parameter)) for parameter in self.parameters.values()]
        gradients = [(gradient, shared) for gradient, shared in found if gradient is not None]
        if self.loss_scale.enabled:
            torch._foreach_mul_([gradient for gradient, _ in gradients], 1.0 / self.loss_scale.value)
        self._norm = total_norm(gradients, self._experts)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.gradient_clip, self._norm, foreach=True)
        return self._norm

    def step(self, gradient_norm: float | None = None) -> bool:
        """One AdamW update, unless the gradient norm is not finite. Returns whether it was applied.

        gradient_norm: what `clip` returned, where the caller has read it: reading it here waits for the device.
        """
        if self.stage == 0:
            self.gradient_norm = self._norm.item() if gradient_norm is None else gradient_norm
            applied = math.isfinite(self.gradient_norm)
            if applied:
                self._engine.step()
        else:
            self._engine.step()  # refuses a non-finite norm by itself
            applied = self._engine.was_step_applied()
            self.gradient_norm = float(self._engine.get_global_grad_norm()) if applied else math.inf
        self.loss_scale.update(applied)
        if applied:
            compute_weights.refresh(self.parameters.values())
            if self.average is not None:
                self.average.update(self._local_weights())
        return applied

    def zero(self) -> None:
        """Forgets the gradients. DeepSpeed's step has done so too, but not where the update was refused."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights on the CPU, all experts and whole under every ZeRO stage: in rank 0; {} in the others.

        All ranks call.
        """
        return self._whole(self._local_weights()) | self._buffers()

    def copy_weights(self, target: nn.Module) -> None:
        """Copies all weights, whole under every ZeRO stage, into a module like the one in training. All ranks call.

        Forward passes of that one are as many as each process likes; the trained one's are collectives under ZeRO-3.
        """
        with torch.no_grad():
            for parameter, copied in zip(self.parameters.values(), target.parameters(), strict=True):
                with self._gathered(parameter):
                    copied.copy_(parameter)
            for buffer, its_copy in zip(self.buffers.values(), target.buffers(), strict=True):
                its_copy.copy_(buffer)

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of what `weights` gives, in every rank and without it; experts that are shared out count whole."""
        shapes = {name: list(buffer.shape) for name, buffer in self.buffers.items()}
        for name, parameter in self.parameters.items():
            shapes[name] = list(parameter.ds_shape if self.stage == 3 else parameter.shape)
            if is_shared_out(parameter):
                shapes[name][0] *= self.expert_parallel
        return shapes

    def average_weights(self) -> dict[str, Tensor]:
        """The averaged weights, as `weights` gives them; {} when there is no average."""
        return {} if self.average is None else self._whole(self.average.tensors) | self._buffers()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Takes over what `weights` gave: rank 0's argument, sent to every rank. All ranks call."""
        for name, parameter in self.parameters.items():
            with self._gathered(parameter), torch.no_grad():
                if is_shared_out(parameter):
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
        """Takes over what `average_weights` gave: the same full weights in every rank."""
        assert self.average is not None
        for (name, parameter), mine in zip(self.parameters.items(), self.average.tensors, strict=True):
            whole = self._share(parameter, weights[name]).flatten()
            if self.stage == 3:
                size = parameter.ds_tensor.numel()
                place = dist.get_rank(parameter.ds_process_group)
                whole = whole[place * size : (place + 1) * size]
            mine.flatten()[: whole.numel()].copy_(whole)

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts: by parameter name and whole, in rank 0; with ZeRO each rank's partition.

        All ranks call.
        """
        state = {}
        for name, parameter in self._optimized().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found: Tensor | None = value.detach() if self.stage > 0 or self.world.rank == 0 else None
                if is_shared_out(parameter) and value.shape == parameter.shape:
                    assert self._experts is not None
                    found = self._experts.whole(value)
                if found is not None:
                    state[f"{name}/{key}"] = found.cpu()
        return state

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Takes over what `optimizer_state` gave: without ZeRO in rank 0, with it in a process of the same rank."""
        optimized = self._optimized()
        for key, value in state.items():
            name, _, slot = key.rpartition("/")
            parameter = optimized[name]
            if value.dim() == parameter.dim():  # else the step count
                value = self._share(parameter, value)
            self.optimizer.state[parameter][slot] = value.to(parameter.device, copy=True)

    def _shared(self) -> list[Shared]:
        # Which processes hold the same parameters, and under ZeRO-1 who updates which of them.
        if self.world.size == 1:
            return []
        if self.stage == 1:
            zero = self._engine.optimizer
            assert not any(any(padding) for padding in zero.round_robin_bit16_padding), "gaps between parameters"
            layout = zip(zero.round_robin_bit16_groups, zero.real_dp_process_group, zero.partition_size, strict=True)
            return [Shared(parameters, group, int(part)) for parameters, group, part in layout]
        parameters = [each for each in self.parameters.values() if each.requires_grad]
        everyone = dist.group.WORLD
        assert everyone is not None
        found = [Shared([each for each in parameters if not is_shared_out(each)], everyone)]
        if self._experts is not None:
            found.append(Shared([each for each in parameters if is_shared_out(each)], self._experts.copies))
        return found

    def _hand_over_gradients(self) -> None:
        # What DeepSpeed's ZeRO-1 does after its own reduction: its step reads the sums of this process's partitions.
        zero = self._engine.optimizer
        for number, mine in enumerate(zero.params_in_partition):
            zero.all_grad_tensors[number] = zero.get_all_grad_tensors(mine, dtype=torch.float32)
        zero.finalize_gradient_accumulation_boundary()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _optimized(self) -> dict[str, Tensor]:
        # What AdamW really updates: the parameters, or with ZeRO the flat fp32 partitions of this process.
        if self.stage == 0:
            return dict(self.parameters)
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        return {f"partition{number}": tensor for number, tensor in enumerate(flat)}

    def _local_weights(self) -> list[Tensor]:
        # The weights this process holds: whole, or under ZeRO-3 one padded slice of each.
        if self.stage == 3:
            return [parameter.ds_tensor.data for parameter in self.parameters.values()]
        return [parameter.data for parameter in self.parameters.values()]

    def _whole(self, local: list[Tensor]) -> dict[str, Tensor]:
        whole = {}
        for (name, parameter), mine in zip(self.parameters.items(), local, strict=True):
            if self.stage == 3:
                mine = _joined(mine, parameter)
            found: Tensor | None = mine if self.world.rank == 0 else None
            if is_shared_out(parameter):
                assert self._experts is not None
                found = self._experts.whole(mine)
            if found is not None:
                whole[name] = found.detach().cpu().contiguous()
        return whole

    def _buffers(self) -> dict[str, Tensor]:
        """A copy of the buffers, as they are, also beside averaged weights: in rank 0; {} in the others."""
        return {name: buffer.cpu().clone() for name, buffer in self.buffers.items()} if self.world.rank == 0 else {}

    def _share(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """What of a whole tensor belongs to this process's parameter."""
        if not is_shared_out(parameter):
            return whole
        assert self._experts is not None
        return self._experts.experts.share(whole)

    def _gathered(self, parameter: nn.Parameter) -> Any:
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _joined(mine: Tensor, parameter: Any) -> Tensor:
    """A parameter under ZeRO-3 from the slices in the processes that share it out. All of them call."""
    size = dist.get_world_size(parameter.ds_process_group)
    if size > 1:
        slices = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(slices, mine.contiguous(), group=parameter.ds_process_group)
        mine = torch.cat(slices)
    return mine[: parameter.ds_numel].view(parameter.ds_shape)


def make_engine(config: Config, loss_model: nn.Module, world: DistributedContext) -> Engine:
    """The engine of a run; takes the loss model over and moves it to the device."""
    return Engine(config, loss_model, world)
