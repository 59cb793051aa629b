"""Conflicts in the section `data`, and of the vocabulary: tokenizers, domains, stages of a curriculum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.nodes import Path, dotted
from cdrmix.config.schema_data import CurriculumStage, Data
from cdrmix.config.schema_run import Sections
from cdrmix.registry import nearest

WEIGHTS = (".pth", ".safetensors")  # files of weights, which have no tokenizer beside them


def conflicts(config: Sections) -> Iterator[Conflict]:
    yield from _vocabulary(config)
    yield from _tokenizer(config)
    yield from _sources(config.data)
    yield from _dedup(config.data)
    yield from _lengths(config.data)
    yield from _order(config.data)


def domain_names(data: Data) -> list[str]:
    return ["text"] if data.domains is None else [*data.domains]


def _vocabulary(config: Sections) -> Iterator[Conflict]:
    section, fim = config.data.tokenizer, config.data.objectives.fim
    if config.model.kind != "cdrmix" or section.path is not None:
        return
    marks = {fim.prefix, fim.middle, fim.suffix} if fim is not None else set()
    least = 257 + len(marks | set(section.add_tokens))
    if config.model.vocab_size < least:
        also = ", and the three marks of data.objectives.fim" if marks else ""
        also += ", and data.tokenizer.add_tokens" if section.add_tokens else ""
        trained = "for a tokenizer trained on the corpus: 256 bytes and the end-of-text token"
        yield Conflict("model.vocab_size", f"at least {least} {trained}{also}")


def _tokenizer(config: Sections) -> Iterator[Conflict]:
    section, prefix = config.data.tokenizer, "data.tokenizer"
    if section.path is None:
        if section.end_of_text is None:
            yield Conflict(f"{prefix}.end_of_text", "a token, for a tokenizer that is trained on the text")
        if section.begin_of_text not in ("auto", None):
            allowed = f"auto or null, for a tokenizer that is trained on the text ({prefix}.path is not set)"
            yield Conflict(f"{prefix}.begin_of_text", allowed)
        if section.normalization != "none" and section.lossless:
            allowed = f"none, or {prefix}.lossless: false, because it changes text"
            yield Conflict(f"{prefix}.normalization", allowed)
        backbone = None if config.reasoning is None else config.reasoning.backbone
        starts = {"train.start_from": config.train.start_from, "reasoning.backbone": backbone}
        for key, start in starts.items():
            if start is not None and start.endswith(WEIGHTS):
                why = "such as a vocabulary rwkv_vocab_v20230424.txt: a file of weights has none"
                yield Conflict(f"{prefix}.path", f"the tokenizer of {start}, {why}", others=(key,))
    else:
        trained = {
            "min_frequency": (section.min_frequency != 1, "1"),
            "max_token_length": (section.max_token_length is not None, "null"),
            "normalization": (section.normalization != "none", "none"),
        }
        for name, (differs, neutral) in trained.items():
            if differs:
                allowed = f"{neutral} for the tokenizer at {prefix}.path, which is not trained here"
                yield Conflict(f"{prefix}.{name}", allowed)
    yield from _added_tokens(config)


def _added_tokens(config: Sections) -> Iterator[Conflict]:
    key, tokens, end = "data.tokenizer.add_tokens", config.data.tokenizer.add_tokens, config.data.tokenizer.end_of_text
    if tokens and config.model.kind != "cdrmix":
        others = "model.vocab.add_tokens adds the tokens and their vectors"
        yield Conflict(key, f"[] for model.kind={config.model.kind}; {others}")
        return
    for index, token in enumerate(tokens):
        if token == end or token in tokens[:index]:
            allowed = "a token that is neither data.tokenizer.end_of_text nor listed before"
            yield Conflict(key, allowed, (index,))
            return


def _sources(data: Data) -> Iterator[Conflict]:
    if data.domains is not None and data.source is not None:
        allowed = "null if data.source is set (the source can be one of the domains, with data.source: null)"
        yield Conflict("data.domains", allowed)
    elif data.domains is not None and not data.domains:
        yield Conflict("data.domains", "at least one domain, or null")


def _dedup(data: Data) -> Iterator[Conflict]:
    dedup = data.dedup
    if dedup.bands * dedup.rows > dedup.num_perm:
        most = dedup.num_perm // dedup.rows
        over = f"data.dedup.num_perm={dedup.num_perm} over data.dedup.rows={dedup.rows}"
        yield Conflict("data.dedup.bands", f"at most {most}: {over}")


def _lengths(data: Data) -> Iterator[Conflict]:
    for index, (low, high) in enumerate(pairwise(data.length_classes), 1):
        if high <= low:
            yield Conflict("data.length_classes", f"above the one before it, {low}", (index,))
            return


def _order(data: Data) -> Iterator[Conflict]:
    if data.order == "sequential" and (data.curriculum or data.mixture is not None):
        allowed = "shuffled with data.curriculum or data.mixture, which draw rows at random"
        yield Conflict("data.order", allowed)
    if data.mixture is not None and data.curriculum:
        reason = "the curriculum can be one of data.mixtures, with data.curriculum: []"
        yield Conflict("data.mixture", f"null, since data.curriculum is set ({reason})")
    elif data.mixture is not None and data.mixture not in data.mixtures:
        known = ", ".join(data.mixtures) or "(none)"
        close = nearest(data.mixture, data.mixtures)
        yield Conflict("data.mixture", f"one of data.mixtures: {known}, or null", nearest=close)
    yield from _stages("data.curriculum", (), data.curriculum, data)
    for name, stages in data.mixtures.items():
        if not stages:
            yield Conflict("data.mixtures", "at least one stage", (name,))
        elif name == data.mixture:
            yield from _stages("data.mixtures", (name,), stages, data)
        else:  # the domains and lengths of the others may be those of other configurations
            yield from _ends("data.mixtures", (name,), stages)


def _stages(key: str, inside: Path, stages: Sequence[CurriculumStage], data: Data) -> Iterator[Conflict]:
    yield from _ends(key, inside, stages)
    for index, stage in enumerate(stages):
        if stage.domains is not None:
            yield from _domain_weights(key, (*inside, index, "domains"), stage.domains, domain_names(data))
        bounds, weights = len(data.length_classes), stage.lengths
        if weights is not None and len(weights) != bounds + 1:
            wanted = f"a list of {bounds + 1}, one more than data.length_classes has bounds, or null"
            yield Conflict(key, wanted, (*inside, index, "lengths"))
        elif weights is not None and not any(weights):
            yield Conflict(key, "at least one weight above 0, or null", (*inside, index, "lengths"))


def _domain_weights(key: str, inside: Path, weights: Mapping[str, float], known: Sequence[str]) -> Iterator[Conflict]:
    for name in weights:
        if name not in known:
            close = nearest(name, known)
            near = dotted((*key.split("."), *inside, close)) if close else None
            yield Conflict(key, f"weights of data.domains: {', '.join(known)}", (*inside, name), near)
            return
    if not any(weights.values()):
        yield Conflict(key, "at least one weight above 0, or null", inside)


def _ends(key: str, inside: Path, stages: Sequence[CurriculumStage]) -> Iterator[Conflict]:
    end = 0.0
    for index, stage in enumerate(stages):
        if stage.until <= end:
            yield Conflict(key, f"above {end:g}, where the stage before it ends", (*inside, index, "until"))
            return
        end = stage.until
    if stages and end != 1:
        yield Conflict(key, "1: the last stage ends with the training", (*inside, len(stages) - 1, "until"))
