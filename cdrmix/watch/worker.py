"""Measures one suite on one checkpoint in a process of its own, whose end, whatever it is, the watcher survives.

python -m cdrmix.watch.worker JOB: JOB is a JSON object with the fields of `Job`. The result is written to job.result.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.json_text import parse_json
from cdrmix.watch.priority import end_with_parent, lower_priority


class Job(NamedTuple):
    """checkpoint: its folder. options: of SuiteOptions, as JSON data. result: file. parent: id of the watcher."""

    checkpoint: str
    suite: str
    options: dict[str, Any]
    device: str
    niceness: int
    threads: int
    result: str
    parent: int


def main(job: Job) -> int:
    """Returns 0, or the exit code of a CdrmixError, whose message is the last line of standard error."""
    end_with_parent(job.parent, signal.SIGKILL)
    lower_priority(job.niceness, job.threads)
    # Imported at low priority: it takes seconds.
    from cdrmix.durable import write_atomically
    from cdrmix.errors import CdrmixError
    from cdrmix.eval.suites import SuiteOptions
    from cdrmix.evaluate import evaluate_suites
    from cdrmix.run_folder import finite

    paths = {name: Path(job.options[name]) for name in ("sets", "canaries", "policy") if job.options[name] is not None}
    try:
        options = SuiteOptions(**job.options | paths)
        (result,) = evaluate_suites(
            Path(job.checkpoint), [job.suite], options=options, device=job.device, threads=job.threads
        )
    except CdrmixError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    write_atomically(Path(job.result), json.dumps(finite(result.as_json()), allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(Job(**parse_json(sys.argv[1]))))
