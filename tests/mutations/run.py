"""The mutation check: puts one error at a time into a copy of the project, and shows which test finds it.

    python tests/mutations/run.py                       all of mutations.py; prints a table in Markdown
    python tests/mutations/run.py --only decay ties     those whose name has one of these words
    python tests/mutations/run.py --tests REVISION      with the tests as they were at a commit
    python tests/mutations/run.py --jobs 1              one error at a time; by default as many as there are CPUs

The quick tests among those of an error run; the slow ones only where none of them is quick, and the table says so. Each
job has a copy of its own. For an error in csrc/ the extensions that it affects are built in the copy.
Exit code 0: every error was found. 1: one was not, or is not valid: it does not compile, or the tests cannot be
collected. 2: a test that found one fails without any error too.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds for the tests of one mutation
CRASHES = [-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)]


class Outcome(NamedTuple):
    """The result of the tests: pytest's exit code (None: out of time), the tests that failed, CPU seconds, and whether
    slow tests ran."""

    code: int | None
    failed: str
    seconds: float
    slow: bool

    @property
    def valid(self) -> bool:
        """Whether the tests ran. Codes 2 to 5: the code does not compile or cannot be imported, or the tests are not
        there. A signal counts if it is of a crash: others come from outside."""
        return self.code in (None, 0, 1) or self.code in CRASHES

    @property
    def found(self) -> bool:
        """Whether a test failed."""
        return self.valid and self.code != 0


class Copy(NamedTuple):
    """A copy of the project, and the environment in which Python imports it."""

    tree: Path
    environment: dict[str, str]


@functools.cache
def own_copy(folder: Path, tests: str | None) -> Copy:
    """The copy of this process below `folder`: the tracked files and the built extensions."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    own = Path(tempfile.mkdtemp(dir=folder))
    tree, site = own / "tree", own / "site"
    for name in [*names.strip("\0").split("\0"), *extensions()]:
        source, target = ROOT / name, tree / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    if tests is not None:
        shutil.rmtree(tree / "tests")
        archive = subprocess.run(["git", "archive", tests, "tests"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
    site.mkdir()
    (site / "cdrmix").symlink_to(tree / "cdrmix")
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    # Compiled files save half of the time. Python makes them anew where the time or the size of the source is another.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    imported = subprocess.run(
        [sys.executable, "-c", "import cdrmix; print(cdrmix.__file__)"],
        cwd=tree, env=environment, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert imported.startswith(str(own)), f"the tests would import {imported.strip()}, not the copy"
    return Copy(tree, environment)


def extensions() -> list[str]:
    """The built C++ extensions."""
    return [str(path.relative_to(ROOT)) for path in (ROOT / "cdrmix").glob("*.so")]


def run_tests(copy: Copy, tests: Iterable[str], *, slow: bool = False, most_failures: int = 1) -> Outcome:
    """Runs tests in the copy; the slow ones too if `slow`, or if none of them is quick. Stops after `most_failures`
    failures (0: never)."""
    marks = "not gpu" if slow else "not gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"]
    command += [f"--maxfail={most_failures}", *sorted(set(tests))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            command, cwd=copy.tree, env=copy.environment, check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, output = None, ""
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and not slow:
        return run_tests(copy, tests, slow=True, most_failures=most_failures)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    failed = names[0] if most_failures == 1 and names else ", ".join(names)  # a test that fails may also leave a leak
    if code not in (0, 1):
        print(output[-3000:], file=sys.stderr)
    crashed = "out of time" if code is None else f"the process ended with {code}"
    return Outcome(code, failed or crashed, seconds, slow)


def check(folder: Path, revision: str | None, mutation: Mutation) -> Outcome:
    """Puts the error into the copy of this process, runs its tests, and restores the copy."""
    copy = own_copy(folder, revision)
    path = copy.tree / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {text.count(mutation.old)} times, not once: {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    compiled = mutation.file.startswith("csrc/")
    try:
        if compiled and not build(copy, mutation.file):
            return Outcome(2, "it does not compile", 0.0, slow=False)
        return run_tests(copy, mutation.tests)
    finally:
        for name in [mutation.file, *(extensions() if compiled else [])]:
            shutil.copy2(ROOT / name, copy.tree / name)


def build(copy: Copy, file: str) -> bool:
    """Builds the extensions that a file of csrc/ is a part of. Returns whether they compile."""
    script = Path(__file__).with_name("build_extensions.py")
    done = subprocess.run(
        [sys.executable, script, file], cwd=copy.tree, env=copy.environment, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        print(done.stderr[-3000:], file=sys.stderr)
    return done.returncode == 0


def check_clean(folder: Path, revision: str | None, tests: Iterable[str]) -> Outcome:
    """Runs tests in the copy of this process without an error in it."""
    return run_tests(own_copy(folder, revision), tests, slow=True, most_failures=0)


def main() -> int:
    """Runs the check and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="errors whose name has one of these")
    parser.add_argument("--tests", metavar="REVISION", help="take the tests from this commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="errors at once (default: CPUs)")
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if any(word in each.name for word in options.only)]
    missed: list[Mutation] = []
    by_slow_tests = 0
    finders: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cdrmix-mutations-") as name, ProcessPoolExecutor(options.jobs) as jobs:
        arguments = Path(name), options.tests
        print("| error | file | found by | CPU seconds |\n|---|---|---|---|", flush=True)
        for mutation, outcome in zip(chosen, jobs.map(functools.partial(check, *arguments), chosen), strict=True):
            if outcome.found:
                finders.append(outcome.failed if outcome.code == 1 else mutation.tests[0])
                by = f"`{outcome.failed.removeprefix('tests/')}`{' (slow)' * outcome.slow}"
                by_slow_tests += outcome.slow
            else:
                missed.append(mutation)
                by = "**nothing**" if outcome.valid else f"**not valid**: {outcome.failed}"
            print(f"| {mutation.name} | `{mutation.file}` | {by} | {outcome.seconds:.0f} |", flush=True)
        clean = jobs.submit(check_clean, *arguments, finders).result() if finders else None
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} found, {by_slow_tests} of them by slow tests.")
    if clean is not None and clean.code != 0:
        print(f"without any error fails, too: {clean.failed}", file=sys.stderr)
        return 2
    if clean is not None:
        print("Without any error the same tests pass.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
