"""Which keys a hash of a configuration depends on, so that older runs can be resumed and shards used again."""

from __future__ import annotations

from typing import Any

from cdrmix.config.schema_optimizer import Optimizer, Schedule

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

# Keys that were added later, each with the value that means: as before the key existed. Config.hash and the content key
# of shards leave a key with this value out, so that older runs can be resumed and older shards are reused.
ADDED_LATER: dict[str, Any] = {
    "data.tokenizer.begin_of_text": "auto",
    "data.tokenizer.lossless": True,
    "data.tokenizer.min_frequency": 1,
    "data.tokenizer.max_token_length": None,
    "data.tokenizer.normalization": "none",
    "data.tokenizer.add_tokens": [],
    "data.objectives.fim.loss": "all",
    "data.objectives.fim.characters": None,
    "data.objectives.cot": None,
    "data.objectives.weights": None,
    "data.objectives.normalise": "mean_of_tokens",
    "data.order": "shuffled",
    "model.kind": "cdrmix",
    "model.bigrams": None,
    "model.depth": None,
    "model.feed_forward.dense_layers": [],
    "model.feed_forward.dense_hidden": None,
    "model.feed_forward.shared_hidden": None,
    "model.prediction": None,
    "train.weights": "fp32",
    "train.offload": "none",
    "train.start_from": None,
    "train.start_made_by": None,
    "train.dpo": None,
    "train.best_metric": None,
    "train.best_mode": None,
    "train.batch_warmup": None,
    **{f"train.optimizer.{key}": value for key, value in Optimizer().model_dump().items() if key != "kind"},
    "train.skip.spike": None,
    "train.skip": {},
    "train.schedule": Schedule().model_dump(),
    "train.groups": {},
}


def leave_out_added(data: dict[str, Any]) -> None:
    """Deletes the keys of ADDED_LATER that have their listed value. data: a dump of a Config, or of some sections."""
    for path, value in ADDED_LATER.items():
        *sections, key = path.split(".")
        section: Any = data
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and section[key] == value:
            del section[key]
    train = data.get("train")
    if isinstance(train, dict) and isinstance(train.get("optimizer"), dict) and [*train["optimizer"]] == ["kind"]:
        train["optimizer"] = train["optimizer"]["kind"]  # as before it was a section
