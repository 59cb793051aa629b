"""Rules about the section `data`, and the vocabulary: tokenizers, domains, stages of a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from cdrmix.config.nodes import dotted
from cdrmix.config.rule import Rule, Violation
from cdrmix.registry import nearest


def _vocab_size(
    vocabulary: int, tokenizer: str | None, fim: Mapping[str, Any] | None, add_tokens: list[str]
) -> str | None:
    marks = {fim.get(name, f"<|fim_{name}|>") for name in ("prefix", "middle", "suffix")} if fim is not None else set()
    least = 257 + len(marks | set(add_tokens))
    if tokenizer is None and vocabulary < least:
        also = ", and the three marks of data.objectives.fim" if marks else ""
        also += ", and data.tokenizer.add_tokens" if add_tokens else ""
        return f"at least {least} for a tokenizer trained on the corpus: 256 bytes and the end-of-text token{also}"
    return None


def _end_of_text(end_of_text: str | None, path: str | None) -> str | None:
    return "a token, for a tokenizer that is trained on the text" if end_of_text is None and path is None else None


def _begin_of_text(begin_of_text: str | None, path: str | None) -> str | None:
    if path is None and begin_of_text not in ("auto", None):
        return "auto or null, for a tokenizer that is trained on the text (data.tokenizer.path is not set)"
    return None


def _path_of_weights(path: str | None, start: str | None) -> str | None:
    if path is None and start is not None and start.endswith((".pth", ".safetensors")):
        return f"the tokenizer of {start}, such as a vocabulary rwkv_vocab_v20230424.txt: a file of weights has none"
    return None


def _domains(domains: Mapping[str, Any] | None, source: Mapping[str, Any] | None) -> str | None:
    if domains is not None and source is not None:
        return "null if data.source is set (the source can be one of the domains, with data.source: null)"
    return "at least one domain, or null" if domains is not None and not domains else None


def domain_names(domains: Mapping[str, Any] | None) -> list[str]:
    return ["text"] if domains is None else [*domains]


def _bands(bands: int, rows: int, num_perm: int) -> str | None:
    if bands * rows > num_perm:
        return f"at most {num_perm // rows}: data.dedup.num_perm={num_perm} over data.dedup.rows={rows}"
    return None


def _length_classes(bounds: list[int]) -> Violation | None:
    for index, (low, high) in enumerate(pairwise(bounds)):
        if high <= low:
            return Violation((index + 1,), f"above the one before it, {low}")
    return None


def _stage_ends(stages: list[Mapping[str, Any]]) -> Violation | None:
    end = 0.0
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        if stage["until"] <= end:
            return Violation((index, "until"), f"above {end:g}, where the stage before it ends")
        end = stage["until"]
        if last and end != 1:
            return Violation((index, "until"), "1: the last stage ends with the training")
    return None


def _stage_domains(stages: list[Mapping[str, Any]], domains: Mapping[str, Any] | None) -> Violation | None:
    known = domain_names(domains)
    for index, stage in enumerate(stages):
        weights = stage.get("domains")
        if weights is None:
            continue
        for name in weights:
            if name not in known:
                close = nearest(name, known)
                near = dotted(("data", "curriculum", index, "domains", close)) if close else None
                return Violation((index, "domains", name), f"weights of data.domains: {', '.join(known)}", near)
        if not any(weights.values()):
            return Violation((index, "domains"), "at least one weight above 0, or null")
    return None


def _stage_lengths(stages: list[Mapping[str, Any]], bounds: list[int]) -> Violation | None:
    for index, stage in enumerate(stages):
        weights = stage.get("lengths")
        if weights is not None and len(weights) != len(bounds) + 1:
            wanted = f"a list of {len(bounds) + 1}, one more than data.length_classes has bounds, or null"
            return Violation((index, "lengths"), wanted)
        if weights is not None and not any(weights):
            return Violation((index, "lengths"), "at least one weight above 0, or null")
    return None


def _mixture(mixture: str | None, mixtures: Mapping[str, Any], curriculum: list[Any]) -> Violation | str | None:
    if mixture is None:
        return None
    if curriculum:
        return (
            "null, since data.curriculum is set (the curriculum can be one of data.mixtures, with data.curriculum: [])"
        )
    if mixture not in mixtures:
        known = ", ".join(mixtures) or "(none)"
        return Violation((), f"one of data.mixtures: {known}, or null", nearest(mixture, mixtures))
    return None


def _of_mixtures(check: Callable[..., Violation | None], mixtures: Mapping[str, Any], *others: Any) -> Violation | None:
    """A rule about the stages of data.curriculum, for every mixture."""
    for name, stages in mixtures.items():
        problem = check(stages, *others)
        if problem is not None:
            near = problem.nearest and problem.nearest.replace("data.curriculum", dotted(("data", "mixtures", name)), 1)
            return problem._replace(path=(name, *problem.path), nearest=near)
    return None


def _of_mixture(
    check: Callable[..., Violation | None], mixtures: Mapping[str, Any], chosen: str | None, *others: Any
) -> Violation | None:
    """A rule about the stages of data.curriculum, for the chosen mixture only: the others may name other domains."""
    return _of_mixtures(check, {name: mixtures[name] for name in mixtures if name == chosen}, *others)


def _no_stages(stages: list[Mapping[str, Any]]) -> Violation | None:
    return _stage_ends(stages) if stages else Violation((), "at least one stage")


RULES = (
    Rule(("model.vocab_size", "data.tokenizer.path", "data.objectives.fim", "data.tokenizer.add_tokens"), _vocab_size),
    Rule(("data.tokenizer.end_of_text", "data.tokenizer.path"), _end_of_text),
    Rule(("data.tokenizer.begin_of_text", "data.tokenizer.path"), _begin_of_text),
    *(Rule(("data.tokenizer.path", start), _path_of_weights) for start in ("train.start_from", "reasoning.backbone")),
    Rule(("data.domains", "data.source"), _domains),
    Rule(("data.dedup.bands", "data.dedup.rows", "data.dedup.num_perm"), _bands),
    Rule(("data.length_classes",), _length_classes),
    Rule(("data.curriculum",), _stage_ends),
    Rule(("data.curriculum", "data.domains"), _stage_domains),
    Rule(("data.curriculum", "data.length_classes"), _stage_lengths),
    Rule(("data.mixture", "data.mixtures", "data.curriculum"), _mixture),
    Rule(("data.mixtures",), partial(_of_mixtures, _no_stages)),
    Rule(("data.mixtures", "data.mixture", "data.domains"), partial(_of_mixture, _stage_domains)),
    Rule(("data.mixtures", "data.mixture", "data.length_classes"), partial(_of_mixture, _stage_lengths)),
)
