"""Which keys the hash of a configuration depends on."""

from __future__ import annotations

from typing import Any

# The keys that Config.hash leaves out: they change neither a weight nor a measurement, only folders, logging and speed.
# run.device is not one of them: it decides the order in which sums are rounded.
NOT_HASHED: dict[str, Any] = {
    "run": {"root", "name", "threads", "mirror"},
    "data": {"cache", "engine", "workers", "memory_mb"},  # the shards are the same
    "train": {
        "keep_last": True,
        "keep_every": True,
        "log_every": True,
        "expert_parallel": True,
        "sequence_parallel": True,
        "tensor_parallel": True,
        "pipeline_parallel": True,
        "profile": True,
        "offload_folder": True,
        "hang_timeout": True,
        "async_checkpoints": True,
        "micro_batch_parts": True,  # micro_batch_rows times it is hashed
        "digests": True,
        "skip": {"nonfinite", "rollbacks"},  # so that a run that ended with NaN can be resumed
        "hyperparameters": True,
        "tokens_per_parameter": True,
    },  # of the last two the keys that they set are hashed
    "reasoning": {"rollout_weights"},
    "logging": True,
    "export": True,
    "evaluation": True,
}

# Keys of `train` that say what is kept in memory, and where. Config.hash has these values of them for every run.
MEMORY: dict[str, Any] = {"zero_stage": 0, "offload": "none", "activation_checkpointing": False}
