"""Measures the CPU time of each test, with its child processes, and holds it against a budget: `make test-time`.

The unit is the CPU time of a fixed calculation, which is repeated between the tests: a machine, or an hour, in which
everything takes longer has the same figures. One unit is about one second. A test's time has three parts: its body, the
set-up and tear-down of its own fixtures, and numba's compilation in its process. A fixture that several tests share is
a row of its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from typing import Any

import forked
import pytest
from numba.core import event

TOTAL = 500  # units that all quick tests may take
MOST = 3  # units that one test may take, without compilation and shared fixtures
SHOWN = 30  # rows of the table
BETWEEN = 8.0  # CPU seconds of tests between two calibrations
UNIT = 18_000_000  # additions of Python in one unit
PART = 10  # a calibration makes so small a part of them
TICKS = os.sysconf("SC_CLK_TCK")


def calibration() -> float:
    """The CPU seconds of one unit, estimated from a part of it."""
    begun = time.process_time()
    total = 0
    for number in range(UNIT // PART):
        total += number * number % 7
    assert total
    return (time.process_time() - begun) * PART


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def cpu_seconds(pid: int | None = None) -> float:
    """The CPU time of a process and of all its descendants, those that ended too. Not that of the imports of the server
    in forked.py: it serves all tests."""
    pid = os.getpid() if pid is None else pid
    total = 0.0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # User and system time, of the process and of its children that have ended: man 5 proc_pid_stat.
        own, system, *ended = map(int, _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15])
        total = (sum(ended) + (0 if pid == forked.server_pid() else own + system)) / TICKS
        for task in os.listdir(f"/proc/{pid}/task"):
            children = _read(f"/proc/{pid}/task/{task}/children").split()
            total += sum(cpu_seconds(int(child)) for child in children)
    return total


class Compilation(event.Listener):
    """The CPU time of numba's compilation in this process so far."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._begun = 0.0, 0, 0.0

    def on_start(self, event: event.Event) -> None:
        if self._depth == 0:
            self._begun = time.process_time()
        self._depth += 1

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.process_time() - self._begun


class Costs:
    """A plugin of pytest: measures in the processes that run tests, and reports in the one that prints."""

    def __init__(self) -> None:
        self._compilation = Compilation()
        event.register("numba:compile", self._compilation)
        self._nested: list[float] = []  # seconds of compilation and of shared fixtures within what is measured
        self._found: dict[str, Any] = {}
        self._units: list[float] = []
        self._since = 0.0
        self._rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def _measured(self, kind: str) -> Iterator[None]:
        """Adds the CPU time within to a part of the test, without compilation and what is measured within it."""
        cpu, compiled = cpu_seconds(), self._compilation.seconds
        self._nested.append(0.0)
        try:
            yield
        finally:
            spent, compiled = cpu_seconds() - cpu, self._compilation.seconds - compiled
            inner = self._nested.pop()
            own = max(0.0, spent - compiled - inner)
            if self._nested:
                self._nested[-1] += spent - compiled
            else:
                self._found["compilation"] += compiled
            self._found[kind] = self._found.get(kind, 0.0) + own

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._found = {"body": 0.0, "fixtures": 0.0, "compilation": 0.0}
        if not self._units or self._since > BETWEEN:
            self._units.append(calibration())
            self._since = 0.0
        item.user_properties.append(("costs", self._found))
        begun = cpu_seconds()
        try:
            return (yield)
        finally:
            self._since += cpu_seconds() - begun

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        with self._measured("fixtures"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        with self._measured("body"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            with self._measured("fixtures"):
                return (yield)
        finally:
            self._found["unit"] = statistics.median(self._units)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function" or not self._nested:
            return (yield)
        with self._measured(f"{fixturedef.baseid or 'pytest'}::{fixturedef.argname}"):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._rows += [{"test": report.nodeid} | found for name, found in report.user_properties if name == "costs"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and self._over_the_budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _tests(self) -> list[tuple[str, float, float, float]]:
        """Each test with its body, its own fixtures and its compilation, in units."""
        return [
            (row["test"], row["body"] / row["unit"], row["fixtures"] / row["unit"], row["compilation"] / row["unit"])
            for row in self._rows
        ]

    def _shared(self) -> list[tuple[str, float, float, float]]:
        """The fixtures that several tests share, in the same form."""
        units: dict[str, float] = defaultdict(float)
        for row in self._rows:
            for part in row.keys() - {"test", "body", "fixtures", "compilation", "unit"}:
                units[part] += row[part] / row["unit"]
        return [(name, 0.0, spent, 0.0) for name, spent in units.items()]

    def _over_the_budget(self) -> list[str]:
        long = [(name, body + fixtures) for name, body, fixtures, _ in self._tests() if body + fixtures > MOST]
        lines = [f"{name} takes {units:.2f} units; a test may take {MOST}" for name, units in long]
        total = sum(sum(row[1:]) for row in [*self._tests(), *self._shared()])
        if total > TOTAL:
            lines.append(f"all tests take {total:.0f} units; they may take {TOTAL}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._rows:
            return
        rows = sorted([*self._tests(), *self._shared()], key=lambda row: -sum(row[1:]))
        units = [row["unit"] for row in self._rows]
        folders: dict[str, float] = defaultdict(float)
        for name, *parts in rows:
            folders["/".join(name.partition("::")[0].split("/")[:2])] += sum(parts)

        write = terminalreporter.write_line
        terminalreporter.section("CPU time in units of a fixed calculation")
        write(f"  body  fixtures  compilation   (one unit: {min(units):.2f} to {max(units):.2f} s)")
        for name, body, fixtures, compilation in rows[:SHOWN]:
            write(f"{body:6.2f} {fixtures:9.2f} {compilation:12.2f}   {name}")
        for name, spent in sorted(folders.items(), key=lambda folder: -folder[1]):
            write(f"{spent:6.1f}   {name}")
        write(f"{sum(folders.values()):6.1f}   {len(self._rows)} tests; the budget is {TOTAL}")
        for line in self._over_the_budget():
            write(f"over the budget: {line}", red=True)
