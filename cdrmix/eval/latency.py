"""The suite `latency`: the time of a request of 128 tokens that gets 64 new ones, alone, and the memory it takes.

A request is the time from the token ids of the prompt to the last new token id. Requests follow one another, each with
another prompt; the prompts are generated text, so no prepared text is needed.
request_p50_ms, request_p99_ms: quantiles of the time of a request.
first_token_p50_ms, first_token_p99_ms: of the time to its first new token, in which the prompt is read.
token_p50_ms: the median over requests of the time of each further token.
request_p99_bound_ms: a bound which the 99 % quantile does not exceed at 95 % confidence.
peak_memory_mib: of the process on a CPU (resident), of tensors on a GPU, while the requests ran.
Intervals come from order statistics (cdrmix.confidence). A bound of the 99 % quantile needs 299 requests.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cdrmix.confidence import CONFIDENCE, items_for_quantile, upper_rank
from cdrmix.data.tasks import make_example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CdrmixError
from cdrmix.eval.suites import SUITES, Decode, Measure, Subject, SuiteOptions, SuiteResult
from cdrmix.peak_memory import peak, reset_peak

PROMPT, NEW = 128, 64  # tokens
WARM_UP = 3  # requests before those that count: kernels are compiled and memory is allocated in them
BUDGET = 30.0  # seconds of requests that count, without --limit
LEAST = 5  # requests, however long they take
FIRST_EXAMPLE = 1 << 41  # of the generated text


class Request(NamedTuple):
    """Seconds to the first new token and to the last."""

    first: float
    whole: float


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def median_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % interval of the median by order statistics; None for fewer than six values."""
    rank = upper_rank(len(values), 0.5, 1 - (1 - CONFIDENCE) / 2)
    if rank is None:
        return None, None
    ordered = sorted(values)
    return ordered[len(values) - rank], ordered[rank - 1]


def upper_bound(values: Sequence[float], share: float) -> float | None:
    """The bound of the quantile at 95 % confidence; None for too few values."""
    rank = upper_rank(len(values), share)
    return None if rank is None else sorted(values)[rank - 1]


@SUITES("latency")
def latency(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. options.limit: the number of requests; without it as many as in BUDGET."""
    parts = subject.model_parts("latency")
    device = next(parts.model.parameters()).device
    before = os.getloadavg()
    enough = items_for_quantile(0, 0.99)
    try:
        began = time.perf_counter()
        for number in range(WARM_UP):
            _request(parts.decode, _prompt(parts.tokenizer, options.seed, number))
        warm_up = time.perf_counter() - began
        exact = reset_peak(device)
        requests: list[Request] = []
        began = time.perf_counter()
        while len(requests) < (options.limit or enough):
            if options.limit is None and len(requests) >= LEAST and time.perf_counter() - began > BUDGET:
                break
            requests.append(_request(parts.decode, _prompt(parts.tokenizer, options.seed, WARM_UP + len(requests))))
        seconds = time.perf_counter() - began
    except CdrmixError as error:
        return SuiteResult("latency", (Measure("request_p50_ms", problem=str(error)),))
    count = len(requests)
    say(f"latency: {count} requests in {seconds:.0f} s")
    whole, first = [1e3 * each.whole for each in requests], [1e3 * each.first for each in requests]
    token = [1e3 * (each.whole - each.first) / (NEW - 1) for each in requests]
    missing = None
    if count < enough:
        minutes = enough * seconds / count / 60
        missing = (
            f"{count} requests; a bound of the 99 % quantile at 95 % confidence needs {enough}: --limit {enough}, "
            f"about {minutes:.1f} minutes here"
        )
    measures = (
        Measure("request_p50_ms", quantile(whole, 0.5), *median_interval(whole), count),
        Measure("request_p99_ms", quantile(whole, 0.99), None, upper_bound(whole, 0.99), count),
        Measure("request_p99_bound_ms", upper_bound(whole, 0.99), count=count, problem=missing),
        Measure("first_token_p50_ms", quantile(first, 0.5), *median_interval(first), count),
        Measure("first_token_p99_ms", quantile(first, 0.99), None, upper_bound(first, 0.99), count),
        Measure("token_p50_ms", quantile(token, 0.5), *median_interval(token), count),
        Measure("peak_memory_mib", peak(device) / 2**20, count=count),
    )
    after = os.getloadavg()
    cores = len(os.sched_getaffinity(0))
    facts = {
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "requests": count,
        "needed_for_p99_bound": enough,
        "warm_up_requests": WARM_UP,
        "warm_up_seconds": warm_up,
        "seconds": seconds,
        "slowest_ms": max(whole),
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "load_before": before,
        "load_after": after,
        "peak_memory_of_requests_alone": exact,
        "seed": options.seed,
    }
    notes = [
        f"{PROMPT} tokens of prompt, {NEW} new tokens, one request at a time; the first {WARM_UP} requests "
        f"({warm_up:.1f} s) are left out",
        f"{facts['device']}, {cores} cores, {facts['threads']} threads; load {before[0]:.2f} before and {after[0]:.2f} "
        "after (processes ready to run, mean of a minute; this one is among them)",
    ]
    if before[0] > cores / 2:
        notes.append("other processes were running: on an idle machine the times are shorter")
    if count < 100:
        notes.append(f"the 99 % quantile of {count} requests is their slowest")
    if not exact:
        notes.append("peak_memory_mib is of the process since its start, because this system cannot reset the peak")
    return SuiteResult("latency", measures, facts, tuple(notes))


def _request(decode: Decode, prompt: Sequence[int]) -> Request:
    """Each token id is a Python integer, so on a GPU it is known that the token was computed."""
    began = time.perf_counter()
    tokens = decode([prompt], NEW)
    next(tokens)
    first = time.perf_counter()
    rest = sum(1 for _ in tokens)
    assert rest == NEW - 1, f"{rest + 1} tokens"
    return Request(first - began, time.perf_counter() - began)


def _prompt(tokenizer: TextTokenizer, seed: int, number: int) -> list[int]:
    """The token that begins a document, and PROMPT - 1 tokens of generated text."""
    text = make_example("recall", seed, FIRST_EXAMPLE + number, 8 * PROMPT).text
    ids = tokenizer.encode(text)
    while ids and len(ids) < PROMPT - 1:
        ids = ids + ids
    return [tokenizer.first_id, *ids[: PROMPT - 1]]
