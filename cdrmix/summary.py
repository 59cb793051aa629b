"""The contents of metrics.json, what a run knows of itself, with the types on which its readers rely."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdrmix.json_text import parse_json
from cdrmix.records import Count, Duration, Figure, Number

_Chunks = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
MISSING: Any = None  # the default of a key that a file may lack; `read_summary` leaves such a key out


class _Open(BaseModel):
    """A part that may have more keys."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Score(_Open):
    """cdrmix.eval.perplexity.Score."""

    loss_nats_per_token: Figure
    perplexity: Number  # up to exp(700)
    bits_per_byte: Figure
    tokens: Count
    text_bytes: Count
    domains: dict[str, _Score] = MISSING


class _HeldOut(_Score):
    """cdrmix.eval.perplexity.HeldOut."""

    unigram_bits_per_byte: Figure
    gzip9_bits_per_byte: Figure
    zstd19_bits_per_byte: Figure


class _Corpus(_Open):
    shards: str = MISSING
    index_sha256: str = MISSING
    tokenizer_sha256: str = MISSING


class _Demonstration(_Open):
    lines: list[str]
    answers: list[Any]


class _Export(_Open):
    step: Count = MISSING
    average: Count = MISSING


class _Parameters(_Open):
    stored: Count
    active: Count


class _Sample(_Open):
    prompt: str
    text: str


class _Stage(_Open):
    step: Count
    seconds: Duration


class _StageA(_Stage):
    tokens_per_second: Figure


class Summary(_Open):
    """The keys of metrics.json. Each may be missing."""

    config_hash: str = MISSING
    corpus: _Corpus = MISSING
    demonstration: _Demonstration = MISSING
    environment: dict[str, Any] = MISSING
    evaluations_logged: Count = MISSING
    export: _Export = MISSING
    finished: bool = MISSING
    held_out: _HeldOut = MISSING
    held_out_before: _HeldOut = MISSING
    held_out_before_step: Count = MISSING
    held_out_step: Count = MISSING
    lost_seconds: Duration = MISSING
    mechanisms: dict[str, Annotated[dict[_Chunks, dict[str, Figure]], Field(min_length=1)]] = MISSING
    mechanisms_step: Count = MISSING
    mirror_id: str = MISSING
    mlflow_run: str = MISSING
    name: str = MISSING
    not_trained: str = MISSING
    parameters: _Parameters = MISSING
    questions_fingerprint: str = MISSING
    recorded_step: Count = MISSING
    restarts: Count = MISSING
    sample: _Sample = MISSING
    stage_a: _StageA = MISSING
    stage_b: _Stage = MISSING
    started: str = MISSING
    text_fingerprint: str = MISSING
    trackers: list[str] = MISSING


def read_summary(text: str | bytes) -> dict[str, Any]:
    """The keys in the text of a metrics.json; {} if it is no JSON object.

    A key whose value, or a part of it, has not its type is missing, and so is one that is nested too deep or is no
    text of Unicode: a run may come from elsewhere, and makes it again.
    A figure that is null, because it was not finite, is NaN.
    """
    try:
        data = parse_json(text)
    except ValueError:  # neither JSON nor UTF-8
        return {}
    if not isinstance(data, dict):
        return {}
    read: dict[str, Any] = {}
    for key, value in data.items():
        with contextlib.suppress(ValidationError, RecursionError):
            read |= Summary.model_validate_json(json.dumps({key: value})).model_dump(exclude_unset=True)
    return read
