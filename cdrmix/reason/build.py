"""From a configuration to stage B's model and phases."""

from __future__ import annotations

from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfTask
from cdrmix.data.shards import ShardSet
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.model.backbone import LanguageModel
from cdrmix.reason.acceptance import AcceptancePhase
from cdrmix.reason.controller import ControllerHeads
from cdrmix.reason.episodes import EpisodeSource, TextSource, TokenSource
from cdrmix.reason.imitation import ImitationPhase
from cdrmix.reason.joint import JointPhase
from cdrmix.reason.memory import Summariser
from cdrmix.reason.operations import OperationHeads
from cdrmix.reason.phase import Phase
from cdrmix.reason.plasticity import PlasticityPhase
from cdrmix.reason.policy import PolicyPhase
from cdrmix.reason.stage_b_model import StageBModel
from cdrmix.train.expert_parallel import expert_layer
from cdrmix.train.parallel import World


def build_model(config: Config) -> StageBModel:
    """Stage B's model, drawn from torch's generator as it stands; this process's experts."""
    reasoning = config.reasoning
    assert reasoning is not None
    language_model = LanguageModel(
        config.model,
        activation_checkpointing=config.train.activation_checkpointing,
        experts=expert_layer(config),
        reasoning=reasoning,
    )
    width = config.model.d_model
    return StageBModel(
        language_model,
        ControllerHeads(width, reasoning.controller.max_branches) if reasoning.controller.enabled else None,
        OperationHeads(width) if reasoning.phases.operations.steps else None,
        Summariser(width, reasoning.memory.dim, reasoning.memory.summary_stride),
    )


def make_source(section: EpisodesOfTask, config: Config, tokenizer: TextTokenizer | None) -> EpisodeSource:
    """Where a phase's episodes come from: ids of their own vocabulary, or text by the run's tokenizer."""
    assert config.reasoning is not None
    if section.tokens:
        return TokenSource(section.task, section.seed, config.reasoning.chunk, section.difficulty)
    assert tokenizer is not None
    return TextSource(section.task, section.seed, config.reasoning.chunk, section.difficulty, tokenizer)
