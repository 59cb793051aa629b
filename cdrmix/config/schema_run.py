"""All sections of the configuration of a run, with the type, range, default and description of every key.

Sections are frozen and refuse unknown keys. The type of a key checks that key; `conflicts` combinations of keys. A key
without a default must be set, unless the autosizers derive it from `model.size`, `model.d_model` or
`model.attention.heads`, or a rule from `train.hyperparameters` and `train.tokens_per_parameter`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cdrmix.config.schema_ablation import Ablation
from cdrmix.config.schema_data import Data
from cdrmix.config.schema_evaluation import Evaluation
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.config.schema_training import Train
from cdrmix.config.section import NonNegativeInt, PositiveInt, Section, Text
from cdrmix.errors import ConfigError


class Run(Section):
    """Name, seed, folder and device of the run."""

    name: Text = "run"
    """Name of the run in the report, the model card and the trackers."""
    seed: NonNegativeInt = 1
    """Seed of everything random: initial weights, order of the rows, router jitter."""
    root: Text = "experiments"
    """Folder in which run folders are created."""
    mirror: Text | None = None
    """Folder on another disk or a mounted drive that receives a copy of each checkpoint, and of what is needed to
    resume from it. It is made if its parent exists. null: no mirror."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of this run. auto: a GPU if PyTorch can use one, otherwise the CPU."""
    threads: NonNegativeInt = 0
    """CPU threads of a process. 0: the run measures its own steps and selects the fastest number; models of
    transformers take all cores. With float32 it changes no bit of a model of cdrmix."""


class Logging(Section):
    """Experiment trackers, in addition to the run folder. Each needs an optional package."""

    tensorboard: bool = False
    """Log to TensorBoard."""
    wandb: bool = False
    """Log to Weights & Biases."""
    mlflow: bool = False
    """Log to MLflow."""


class Export(Section):
    """The checkpoint of a run that is exported, and what its model card says. With train.ema_decay the average of the
    weights is exported."""

    checkpoint: Text = "best"
    """best: that of the best validation of stage A (train.best_metric); after stage B the last one. last: the last one.
    Or the name or path of a checkpoint."""
    average: PositiveInt = 1
    """Number of checkpoints whose weights are averaged: that of `checkpoint` and those before it. 1: no average."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Data type of the exported weights of a model of transformers. bf16 halves the files and rounds the weights. fp32
    for `lora: adapter`."""
    license: Text | None = None
    """License of the exported model for the model card, as an identifier of the Hugging Face Hub such as apache-2.0.
    null: unknown."""
    base_model: Text | None = None
    """Model that this model was trained from, for the model card: its name on the Hugging Face Hub. null: none."""
    lora: Literal["merge", "adapter"] = "merge"
    """Of a run with model.lora. merge: the model with the adapters merged into it. adapter: the adapters alone, as peft
    reads them."""
    prediction_heads: Literal["drop", "keep"] = "drop"
    """Of a run with model.prediction. drop: the model that predicts the next token. keep: also the parameters of the
    other depths, with which it can draft (`cdrmix generate --speculative`)."""


def _with_kind(model: object) -> object:
    """The model section with its kind, which is cdrmix if it is not written."""
    return {"kind": "cdrmix", **model} if isinstance(model, dict) else model


class Sections(Section):
    """The configuration of one run. A `reasoning` section makes it a reasoning run (stage A, then stage B)."""

    run: Run = Field(default_factory=Run)
    model: Annotated[Model | HuggingFaceModel, Field(discriminator="kind"), BeforeValidator(_with_kind)]
    data: Data = Field(default_factory=Data)
    train: Train
    logging: Logging = Field(default_factory=Logging)
    export: Export = Field(default_factory=Export)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    reasoning: Reasoning | None = None
    """Stage B. null: the run trains stage A only."""
    ablation: Ablation | None = None
    """Comparison of small models for `cdrmix ablate`. null: this file is not an ablation."""

    @property
    def cdrmix_model(self) -> Model:
        """The section `model` of a model of this package. Raises ConfigError for a model of transformers."""
        if isinstance(self.model, Model):
            return self.model
        raise ConfigError(f"this works only with model.kind: cdrmix; the model of {self.run.name} is of transformers")

    @property
    def kind(self) -> Literal["core", "reasoning"]:
        return "core" if self.reasoning is None else "reasoning"
