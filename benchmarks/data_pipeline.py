"""The data suite's cases of the whole pipeline: compressed JSON lines to shards, compared with datatrove; memory.

Each measurement is a process of its own. Speed is in megabytes of text a second of CPU time without tokenisation, which
data_tokens.py measures.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zstandard
from cases import Options, Result

HERE = Path(__file__).parent
PEER_BYTES = 2_000_000  # of the same text, for a peer that processes 100 kB a second
RULES = ["gopher_quality", "gopher_repetition", "c4", "fineweb", "language"]
DOCUMENTS = 2_000_000
WORDS = 60  # of each of them


def write_corpus(folder: Path, texts: list[str], files: int = 4) -> int:
    """Writes compressed JSON lines; returns the bytes of the texts."""
    for number in range(files):
        lines = [
            json.dumps({"text": text, "url": f"https://site{place % 50}.example.org/{number}/{place}"})
            for place, text in enumerate(texts[number::files])
        ]
        data = zstandard.ZstdCompressor().compress(("\n".join(lines) + "\n").encode())
        (folder / f"{number}.jsonl.zst").write_bytes(data)
    return sum(len(text.encode()) for text in texts)


def run(mode: str, *arguments: str) -> dict[str, Any]:
    """The last line that a process of this file prints."""
    command = [sys.executable, str(HERE / "data_pipeline.py"), mode, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mode} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(options: Options, texts: list[str]) -> Result:
    """The whole pipeline in one process against datatrove's with the same rules and kinds of near-duplicates.

    Ours keeps all documents, with bounds that no document violates, so that every stage processes all of the text. The
    peer drops documents that violate a rule before it searches personal data, and has no language identification: its
    model is a download.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "corpus")
        folder.mkdir()
        size = write_corpus(folder, texts) / 1e6
        samples = [run("ours", str(folder), str(Path(place, f"cache{number}")), "1") for number in range(3)]
        ours = [size / (sample["cpu_seconds"] - sample["tokens_cpu_seconds"]) for sample in samples]
        share = [sample["tokens_cpu_seconds"] / sample["cpu_seconds"] for sample in samples]
        figures = {
            "megabytes_a_cpu_second": sorted(ours)[1],
            "share_of_tokenisation": sorted(share)[1],
            "cpu_seconds_to_start": sorted(sample["start_cpu_seconds"] for sample in samples)[1],
            "megabytes_a_cpu_second_of_reading": size / sorted(sample["read_cpu_seconds"] for sample in samples)[1],
        }
        peer: list[float] = []
        absent = {}
        small = Path(place, "small")
        small.mkdir()
        some = texts[:: max(round(size * 1e6 / PEER_BYTES), 1)]
        small_size = write_corpus(small, some, files=1) / 1e6
        if any(name in "datatrove" for name in options.without):
            absent["datatrove"] = "left out by --without"
        else:
            try:
                found = run("datatrove", str(small), str(Path(place, "datatrove")))
                peer = [small_size / found["cpu_seconds"]] * len(ours)
                figures["speed_over_datatrove"] = figures["megabytes_a_cpu_second"] / peer[0]
            except RuntimeError as error:
                absent["datatrove"] = str(error)
    return Result(
        unit="MB of text a CPU second",
        peer_name="datatrove" if peer else None,
        ours=ours,
        peer=peer,
        figures=figures,
        settings={"device": "cpu", "megabytes": round(size, 2), "rules": RULES, "peer_megabytes": round(small_size, 2)},
        absent=absent,
    )


def processes(options: Options, texts: list[str]) -> Result:
    """Wall-clock time of one process over that of two, without tokenisation: each case thrice, in turns."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "corpus")
        folder.mkdir()
        size = write_corpus(folder, texts) / 1e6
        times: dict[str, list[float]] = {"1": [], "2": []}
        for number in range(3):
            for workers, seconds in times.items():
                found = run("ours", str(folder), str(Path(place, f"cache{number}-{workers}")), workers)
                seconds.append(found["seconds"] - found["tokens_seconds"])
    return Result(
        unit="seconds, two processes",
        peer_name="one process",
        ours=times["2"],
        peer=times["1"],
        figures={"speed_of_two_over_one": sorted(times["1"])[1] / sorted(times["2"])[1]},
        settings={"device": "cpu", "megabytes": round(size, 2)},
    )


def memory(options: Options) -> Result:
    """The peak of memory while DOCUMENTS documents, a fifth of them near-duplicates, are deduplicated."""
    found = run("memory", str(DOCUMENTS))
    return Result(
        unit="GB at the peak",
        peer_name=None,
        ours=[found["bytes"] / 1e9],
        peer=[],
        figures={"peak_gigabytes": found["bytes"] / 1e9, "documents_left": found["left"], "seconds": found["seconds"]},
        settings={"device": "cpu", "documents": DOCUMENTS, "words": WORDS},
    )


def run_ours(folder: str, cache: str, workers: str) -> dict[str, Any]:
    from cdrmix.config.schema import Config
    from cdrmix.config.schema_data import Filters
    from cdrmix.data.cleaning.filters import FilterChain
    from cdrmix.data.cleaning.rules import RULES as FILTERS
    from cdrmix.data.prepare import prepare

    # nothing is dropped, so that every stage processes all of the text
    chain = FilterChain(Filters(rules=RULES))
    bounds = {name: -1e30 if FILTERS[name].at_least else 1e30 for name in chain.names if name != "language"}
    path = Path(cache).with_suffix(".yaml")

    def config(paths: str) -> Config:
        path.write_text(f"""
base: {HERE.parent / "configs" / "cdrmix-core-tiny.yaml"}
data:
  source: {{kind: jsonl, paths: [{paths}]}}
  cache: {cache}
  workers: {workers}
  filters: {{rules: {json.dumps(RULES)}, bounds: {json.dumps(bounds)}, language_score: 0}}
  pii: {{kinds: [email, phone, ip, credit_card, iban, secret]}}
""")
        return Config.from_yaml(path)

    def measured(paths: str) -> dict[str, Any]:
        begun, started = cpu_seconds(), time.monotonic()
        shards = prepare(config(paths), say=lambda line: None)
        stages = json.loads((shards.path / "report" / "report.json").read_text())["stages"]
        timings = {stage["name"]: stage for stage in stages}
        tokens = [timings[name] for name in ("tokens", "tokenizer_trained")]
        return {
            "cpu_seconds": cpu_seconds() - begun,
            "seconds": time.monotonic() - started,
            "read_cpu_seconds": timings["read_all"]["cpu_seconds"],
            "tokens_cpu_seconds": sum(stage["cpu_seconds"] for stage in tokens),
            "tokens_seconds": sum(stage["seconds"] for stage in tokens),
        }

    little = Path(folder).with_name(f"{Path(cache).name}-little")
    little.mkdir()
    write_corpus(little, [f"The text number {number} is short, and has an end. {number}" * 9 for number in range(99)])
    start = measured(str(little))  # loading of libraries, lists and models, once a process
    return {**measured(folder), "start_cpu_seconds": start["cpu_seconds"]}


def cpu_seconds() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run_datatrove(folder: str, out: str) -> dict[str, Any]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    config = MinhashConfig(n_grams=5, num_buckets=16, hashes_per_bucket=8)
    filters = [GopherQualityFilter(), GopherRepetitionFilter(), C4QualityFilter(), FineWebQualityFilter()]
    stages = [
        [JsonlReader(folder), *filters, PIIFormatter(), JsonlWriter(f"{out}/clean")],
        [JsonlReader(folder), MinhashDedupSignature(f"{out}/signatures", config)],
        [MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)],
        [MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config=config)],
        [JsonlReader(folder), MinhashDedupFilter(f"{out}/remove"), JsonlWriter(f"{out}/left")],
    ]
    begun = cpu_seconds()
    for number, stage in enumerate(stages):
        tasks = 16 if number == 2 else 1
        LocalPipelineExecutor(pipeline=stage, tasks=tasks, workers=1, logging_dir=f"{out}/logs{number}").run()
    return {"cpu_seconds": cpu_seconds() - begun}


def run_memory(count: str) -> dict[str, Any]:
    from cdrmix.config.schema_data import Dedup
    from cdrmix.data.pipeline.duplicates import deduplicate
    from cdrmix.data.sources.base import Document

    words = [f"w{number}" for number in range(5000)]

    def documents() -> Iterator[Document]:
        for number in range(int(count)):
            draw = random.Random(number if number % 5 else number + 1)  # every fifth is like the next one
            text = draw.choices(words, k=WORDS)
            if number % 5 == 0:
                text[3] = "changed"
            yield Document(" ".join(text), "synthetic", str(number))

    peak = [0]
    done = threading.Event()

    def watch() -> None:
        process = psutil.Process()
        while not done.wait(0.2):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    left = sum(1 for _ in deduplicate(documents(), Dedup(threshold=0.7)))
    done.set()
    watcher.join()
    return {"bytes": peak[0], "left": left, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    modes = {"ours": run_ours, "datatrove": run_datatrove, "memory": run_memory}
    print(json.dumps(modes[sys.argv[1]](*sys.argv[2:])))
