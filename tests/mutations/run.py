"""The mutation check: puts one error at a time into a copy of the project, and shows which test finds it.

    python tests/mutations/run.py                       all of mutations.py, the quick tests; prints a table in Markdown
    python tests/mutations/run.py --only decay ties     those whose name has one of these words
    python tests/mutations/run.py --slow                with the tests of `make test-all`
    python tests/mutations/run.py --tests REVISION      with the tests as they were at a commit

Exit code 0: every error was found. 1: one was not. 2: a test that found one fails without any error too.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from mutation import Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds for the tests of one mutation


class Outcome(NamedTuple):
    """The result of the tests: pytest's exit code (None: out of time), the tests that failed, CPU seconds."""

    code: int | None
    failed: str
    seconds: float

    @property
    def found(self) -> bool:
        """Whether a test failed. An error of collection (code 2 to 5) is no finding: the mutation is not valid Python,
        or the tests are not there."""
        return self.code is None or self.code == 1 or self.code < 0


def copy_project(folder: Path, tests: str | None) -> dict[str, str]:
    """Copies the tracked files and the built extension. Returns the environment in which Python imports the copy."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    extensions = [str(path.relative_to(ROOT)) for path in (ROOT / "cdrmix").glob("*.so")]
    tree = folder / "tree"
    for name in [*names.strip("\0").split("\0"), *extensions]:
        source, target = ROOT / name, tree / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    if tests is not None:
        shutil.rmtree(tree / "tests")
        archive = subprocess.run(["git", "archive", tests, "tests"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=tree, input=archive, check=True)
    site = folder / "site"
    site.mkdir()
    (site / "cdrmix").symlink_to(tree / "cdrmix")
    return os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}


def run_tests(
    tree: Path, environment: Mapping[str, str], tests: Iterable[str], *, slow: bool, most_failures: int = 1
) -> Outcome:
    """Runs tests in the copy. Stops after `most_failures` failures (0: never)."""
    marks = "not gpu" if slow else "not gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"]
    command += [f"--maxfail={most_failures}", *sorted(set(tests))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, output = None, ""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    failed = ", ".join(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE))
    if code not in (0, 1):
        print(output[-3000:], file=sys.stderr)
    crashed = "out of time" if code is None else f"the process ended with {code}"
    return Outcome(code, failed or crashed, seconds)


def mutate(tree: Path, mutation: Mutation) -> None:
    """Puts the error into the copy."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {text.count(mutation.old)} times, not once: {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def main() -> int:
    """Runs the check and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="errors whose name has one of these")
    parser.add_argument("--slow", action="store_true", help="also the tests with the marker slow")
    parser.add_argument("--tests", metavar="REVISION", help="take the tests from this commit")
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if any(word in each.name for word in options.only)]
    missed, finders = [], []
    with tempfile.TemporaryDirectory(prefix="cdrmix-mutations-") as name:
        folder = Path(name)
        environment = copy_project(folder, options.tests)
        tree = folder / "tree"
        imported = subprocess.run(
            [sys.executable, "-c", "import cdrmix; print(cdrmix.__file__)"],
            cwd=tree, env=environment, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert imported.startswith(name), f"the tests would import {imported.strip()}, not the copy"
        print("| error | file | found by | CPU seconds |\n|---|---|---|---|")
        for mutation in chosen:
            mutate(tree, mutation)
            outcome = run_tests(tree, environment, mutation.tests, slow=options.slow)
            shutil.copy2(ROOT / mutation.file, tree / mutation.file)
            if outcome.found:
                finders.append(outcome.failed if outcome.code == 1 else mutation.tests[0])
            else:
                missed.append(mutation)
            by = f"`{outcome.failed.removeprefix('tests/')}`" if outcome.found else "**nothing**"
            print(f"| {mutation.name} | `{mutation.file}` | {by} | {outcome.seconds:.0f} |", flush=True)
        clean = run_tests(tree, environment, finders, slow=options.slow, most_failures=0) if finders else None
    print(f"\n{len(finders)} of {len(chosen)} found.")
    if clean is not None and clean.code != 0:
        print(f"without any error fails, too: {clean.failed}", file=sys.stderr)
        return 2
    if clean is not None:
        print("Without any error the same tests pass.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
