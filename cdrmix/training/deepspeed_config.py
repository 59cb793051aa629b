"""The configuration of DeepSpeed: every key that affects training, so that no default of its version matters."""

from __future__ import annotations

import sys
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.zero import deepspeed_stage

BUCKET = 50_000_000  # elements of one message; 200 MB of fp32
MOST_LIVE = 1_000_000_000  # most parameters that ZeRO-3 keeps gathered; a single module may exceed it
PERSISTENCE_THRESHOLD = 100_000  # elements; ZeRO-3 does not shard smaller parameters: 400 KB costs less than a message


def accumulation(config: Config, world: DistributedContext) -> int:
    """Micro-batches of one process in a step after the batch warm-up."""
    return config.train.batch_rows // (config.train.micro_batch_rows * world.data_size)


def deepspeed_config(config: Config, world: DistributedContext) -> dict[str, Any]:
    """Every DeepSpeed key that affects training is written out, so that no default of its version matters."""
    train, stage = config.train, deepspeed_stage(config.train, world.size)
    narrow = train.weights == "bf16"
    # With stage 1 Engine sums the gradients of micro-batches in float32, and with offload HostGradients does.
    deepspeed_sums = not narrow or stage == 3 or (stage == 2 and train.offload == "none")
    # Pinned memory is allocated in powers of two, up to twice of what is needed.
    host = {"device": "cpu", "pin_memory": False}
    return {
        # DeepSpeed knows no slices: to it every process has rows of its own.
        "train_batch_size": train.batch_rows * world.sequence_parallel,
        "train_micro_batch_size_per_gpu": train.micro_batch_rows,
        "gradient_accumulation_steps": accumulation(config, world),
        # Engine.evaluate sets the boundary. So a step may have fewer micro-batches than the line above says.
        "managed_gradient_accumulation": True,
        # Without ZeRO, DeepSpeed clips and does not return the norm, so Engine.clip clips. With ZeRO its step clips.
        "gradient_clipping": train.gradient_clip if stage > 0 else 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",  # the only one that every ZeRO stage has; Engine.backward undoes the division
        "use_data_before_expert_parallelism": False,  # ranks that exchange rows are adjacent
        # DeepSpeed converts also where one process has nothing to reduce.
        "communication_data_type": train.reduce_dtype if world.size > 1 else train.weights,
        "seq_parallel_communication_data_type": "fp32",
        "disable_allgather": False,
        "bf16": {
            "enabled": narrow,
            "immediate_grad_update": False,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "data_types": {
            "grad_accum_dtype": "fp32" if deepspeed_sums else "bf16",
            "keep_in_fp32_modules": "auto" if narrow else [],  # buffers that transformers keeps in float32
        },
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
            "offload_param": host if train.offload == "all" else None,
            "offload_optimizer": host if train.offload != "none" else None,
            "zenflow": None,
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_max_live_parameters": MOST_LIVE,
            "stage3_max_reuse_distance": MOST_LIVE,
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
        "zero_allow_untested_optimizer": train.optimizer.kind != "adamw",
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
