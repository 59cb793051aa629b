"""Makes stage B's model and phases from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_reasoning import EpisodesOfTask, Reasoning
from cdrmix.data.loader import TrainLoader
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CheckpointError
from cdrmix.inference.load import HEADS, Loaded, mismatch
from cdrmix.model.feed_forward.moe import MoeFeedForward
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent import imitation as _imitation  # noqa: F401  # these register their phases
from cdrmix.reason.agent import policy as _policy  # noqa: F401
from cdrmix.reason.controller import acceptance as _acceptance  # noqa: F401
from cdrmix.reason.episodes import EpisodeSource
from cdrmix.reason.heads import ControllerHeads, OperationHeads, Summariser
from cdrmix.reason.joint import JointPhase
from cdrmix.reason.model import StageBModel
from cdrmix.reason.operations import imitation as _operations_imitation  # noqa: F401
from cdrmix.reason.operations import policy as _operations_policy  # noqa: F401
from cdrmix.reason.phase import PHASES, Phase
from cdrmix.reason.plasticity import phase as _plasticity  # noqa: F401
from cdrmix.reason.sources import check_vocabulary, source_of
from cdrmix.training.build import narrow_residual
from cdrmix.training.expert_parallel import expert_layer
from cdrmix.training.sharded_construction import partitioner


def build_model(config: Config, *, whole: bool = False) -> StageBModel:
    """Stage B's model, initialised from torch's global generator: with the experts of this process, and under ZeRO-3
    with its partitions of the language model's weights. whole: with all weights."""
    reasoning = config.reasoning
    assert reasoning is not None
    language_model = LanguageModel(
        config.cdrmix_model,
        activation_checkpointing=config.train.activation_checkpointing,
        experts=MoeFeedForward if whole else expert_layer(config, equal_tokens=False),
        reasoning=reasoning,
        narrow_residual=narrow_residual(config),
        partition=None if whole else partitioner(config),
    )
    return with_heads(language_model, config.cdrmix_model, reasoning)


def load_stage_b(loaded: Loaded) -> StageBModel:
    """A trained model with its heads, in evaluation mode, on its device. CheckpointError if names or shapes differ."""
    assert loaded.config.reasoning is not None
    make = partial(with_heads, loaded.model, loaded.config.cdrmix_model, loaded.config.reasoning)
    problem = mismatch(make, loaded.heads, HEADS)  # the sizes may come from elsewhere
    if problem is not None:
        raise CheckpointError(f"the heads of step {loaded.step} do not match the configuration: the model {problem}")
    model = make()
    model.load_state_dict(dict(loaded.heads), strict=False)
    return model.to(loaded.model.embedding.weight.device).eval().requires_grad_(False)


def with_heads(language_model: LanguageModel, config: Model, reasoning: Reasoning) -> StageBModel:
    """A language model with new heads: those that the configuration's phases train or use."""
    width, phases = config.d_model, reasoning.phases
    return StageBModel(
        language_model,
        ControllerHeads(width, reasoning.controller.max_branches) if reasoning.controller.enabled else None,
        OperationHeads(width) if phases.train_on("operations_imitation", "operations") else None,
        Summariser(width, reasoning.memory.dim, reasoning.memory.summary_stride),
    )


def replayed(reasoning: Reasoning, name: str) -> list[str]:
    """What a phase trains on beside its own data: text, or other phases by name."""
    phases = reasoning.phases
    replay: list[str] = list(getattr(phases, name).replay)
    if name != "joint":
        return replay
    trained = [other for other in ("plasticity", "policy") if getattr(phases, other).steps]
    return list(dict.fromkeys(["text", *trained, *replay]))


def make_phase(
    name: str,
    config: Config,
    tokenizer: TextTokenizer | None,
    text: Callable[[], TrainLoader] | None = None,
) -> Phase:
    """A phase by its name in `reasoning.phases`, with the data that it replays. text: makes a loader of stage A's text,
    if it is replayed; None: there is no text."""
    reasoning = config.reasoning
    assert reasoning is not None
    replay = replayed(reasoning, name)

    def sources(section: EpisodesOfTask) -> EpisodeSource:
        source = source_of(section, reasoning.chunk, tokenizer)
        check_vocabulary(config, section, source)
        return source

    own = None if name == "joint" else PHASES[name](config, sources)
    if own is not None and not replay:
        return own
    loader = None
    if "text" in replay:
        assert text is not None
        loader = text()
    others = [PHASES[other](config, sources) for other in replay if other != "text"]
    return JointPhase(config, name, own, others, loader)
