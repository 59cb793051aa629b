"""Chooses the number of CPU threads of a run by the measured time of its steps.

The bits do not depend on the number, so it may change between any two steps. The fastest number depends on the load of
the machine. OpenMP threads wait by spinning: on two cores, two threads take half the time of one on a quiet machine,
and twice the time of one next to a busy process.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from cdrmix.kernels.common.products import set_num_threads

WARM_UP = 3  # untimed steps: kernels are compiled and memory is allocated
ROUNDS = 2  # steps with each number in a trial; the fastest counts, since disturbances only add time
HOPELESS = 1.5  # smaller numbers are not tried after one that takes this multiple of the best time
GAIN = 0.95  # another number is chosen if it takes at most this fraction of the time
SLOWER, FASTER = 1.25, 0.8  # range of the median of RECENT steps, relative to the last trial
RECENT = 5
PERIOD = 200  # least steps between trials at constant speed
OFTEN, SELDOM = 20, 100  # steps between trials for each step that a trial cost: 5 % at changing speed, else 1 %


def candidates(cores: int) -> list[int]:
    """Numbers of threads to try: the number of cores and the smaller powers of two, the largest first."""
    return sorted({cores, *(2**power for power in range(cores.bit_length()))}, reverse=True)


class ThreadChoice:
    """Chooses the number of CPU threads among `numbers` (the largest first) during a run.

    Call begin() before and end() after every step. A trial times steps with each number and keeps the fastest number.
    Trials are made after the first steps, when the speed changes, and periodically; the more time a trial costs, the
    later the next. With one number there are no trials. say: prints the first choice and every change.
    """

    def __init__(self, numbers: Sequence[int], say: Callable[[str], None]) -> None:
        assert list(numbers) == sorted(set(numbers), reverse=True)
        self._numbers, self._say = list(numbers), say
        self.chosen = numbers[0]
        self._printed = 0
        self._queue: list[int] = []  # numbers of the current round that are not timed yet
        self._round = 0
        self._seconds: dict[int, list[float]] = {}  # of the steps of the current trial
        self._reference = 0.0  # seconds of a step with the chosen number in the last trial
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._steps = 0  # since the last trial
        self._soonest = self._latest = WARM_UP

    def begin(self) -> None:
        """Sets the number of threads of the next step."""
        if not self._queue and len(self._numbers) > 1 and self._is_due():
            self._queue, self._round, self._seconds = list(self._numbers), 1, {}
        set_num_threads(self._queue[0] if self._queue else self.chosen)

    def end(self, seconds: float) -> None:
        """Records the time of the step; of a step in the batch warm-up what one with train.batch_rows rows would take.

        seconds: in proportion to the rows.
        """
        if not self._queue:
            self._steps += 1
            self._recent.append(seconds)
            return
        self._seconds.setdefault(self._queue.pop(0), []).append(seconds)
        fastest = {number: min(times) for number, times in self._seconds.items()}
        limit = HOPELESS * min(fastest.values())
        if seconds > limit and self._round == 1:
            self._queue = []
        if self._queue:
            return
        # One slow step does not exclude the chosen number.
        hopeful = [number for number, least in fastest.items() if least <= limit or number == self.chosen]
        if self._round < ROUNDS:
            self._queue, self._round = hopeful, self._round + 1
        else:
            self._decide(fastest)

    def _is_due(self) -> bool:
        if self._steps < self._soonest:
            return False
        if self._steps >= self._latest:
            return True
        return len(self._recent) == RECENT and not FASTER < statistics.median(self._recent) / self._reference < SLOWER

    def _decide(self, fastest: dict[int, float]) -> None:
        """Ends a trial. fastest: seconds of the fastest step, by the number of threads."""
        best = min(fastest, key=lambda number: fastest[number])
        if self.chosen not in fastest or fastest[best] <= GAIN * fastest[self.chosen]:
            self.chosen = best
        self._reference = fastest[self.chosen]
        lost = sum(seconds / self._reference - 1 for times in self._seconds.values() for seconds in times)
        self._soonest, self._latest = max(2 * RECENT, round(OFTEN * lost)), max(PERIOD, round(SELDOM * lost))
        self._steps = 0
        self._recent.clear()
        if self.chosen != self._printed:
            self._printed = self.chosen
            times = ", ".join(f"{number}: {fastest[number] * 1000:.0f}" for number in sorted(fastest))
            self._say(f"CPU threads: {self.chosen}, by the time of a step (ms with {times})")
