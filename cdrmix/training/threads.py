"""How many CPU threads a run works with, chosen by the time that its own steps take.

No bit depends on the number, so that it may change between any two steps. Which is fastest depends on what else the
machine does: OpenMP's threads wait by spinning, so that two of them on two cores take half as long as one on a quiet
machine, and twice as long beside one busy process.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from cdrmix.kernels.common.products import set_num_threads

WARM_UP = 3  # steps that are not timed: kernels are compiled and memory is first touched
ROUNDS = 2  # steps with every number in a trial; the faster counts, since what comes between only delays
HOPELESS = 1.5  # numbers below one that takes so many times as long as the best are not tried
GAIN = 0.95  # another number is taken where it needs at most so much of the time
SLOWER, FASTER = 1.25, 0.8  # a trial follows when the median of RECENT steps leaves these multiples of the last trial's
RECENT = 5
PERIOD = 200  # steps from trial to trial at least, while the speed stays
OFTEN, SELDOM = 20, 100  # steps without a trial for each that one lost: 5 % while the speed changes, else 1 %


def candidates(cores: int) -> list[int]:
    """Numbers of threads worth trying on so many cores: all of them, and the powers of two below; the largest first."""
    return sorted({cores, *(2**power for power in range(cores.bit_length()))}, reverse=True)


class ThreadChoice:
    """The number of CPU threads, tried out among `numbers` (the largest first) while a run goes on.

    begin() before every step, end() behind it. A trial times steps with each number and keeps the fastest. One is made
    behind the first steps, when steps become slower or faster, and now and then; the more it loses by slow numbers, the
    less often. With one number there is none. say: hears of the first choice, and of every other one after it.
    """

    def __init__(self, numbers: Sequence[int], say: Callable[[str], None]) -> None:
        assert list(numbers) == sorted(set(numbers), reverse=True)
        self._numbers, self._say = list(numbers), say
        self.chosen = numbers[0]
        self._told = 0
        self._queue: list[int] = []  # of the trial's round, still to be timed
        self._round = 0
        self._seconds: dict[int, list[float]] = {}  # of the trial's steps
        self._reference = 0.0  # seconds of a step with the chosen number, as the last trial found
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._steps = 0  # since the last trial
        self._soonest = self._latest = WARM_UP

    def begin(self) -> None:
        """Sets the number of threads of the coming step."""
        if not self._queue and len(self._numbers) > 1 and self._is_due():
            self._queue, self._round, self._seconds = list(self._numbers), 1, {}
        set_num_threads(self._queue[0] if self._queue else self.chosen)

    def end(self, seconds: float) -> None:
        """Takes in how long the step took."""
        if not self._queue:
            self._steps += 1
            self._recent.append(seconds)
            return
        self._seconds.setdefault(self._queue.pop(0), []).append(seconds)
        found = {number: min(times) for number, times in self._seconds.items()}
        limit = HOPELESS * min(found.values())
        if seconds > limit and self._round == 1:
            self._queue = []
        if self._queue:
            return
        # What is chosen is given up for more than one slow step.
        hopeful = [number for number, least in found.items() if least <= limit or number == self.chosen]
        if self._round < ROUNDS:
            self._queue, self._round = hopeful, self._round + 1
        else:
            self._decide(found)

    def _is_due(self) -> bool:
        if self._steps < self._soonest:
            return False
        if self._steps >= self._latest:
            return True
        return len(self._recent) == RECENT and not FASTER < statistics.median(self._recent) / self._reference < SLOWER

    def _decide(self, found: dict[int, float]) -> None:
        """Ends a trial. found: seconds of the fastest step with each number that was tried."""
        best = min(found, key=lambda number: found[number])
        if self.chosen not in found or found[best] <= GAIN * found[self.chosen]:
            self.chosen = best
        self._reference = found[self.chosen]
        lost = sum(seconds / self._reference - 1 for times in self._seconds.values() for seconds in times)
        self._soonest, self._latest = max(2 * RECENT, round(OFTEN * lost)), max(PERIOD, round(SELDOM * lost))
        self._steps = 0
        self._recent.clear()
        if self.chosen != self._told:
            self._told = self.chosen
            times = ", ".join(f"{number}: {found[number] * 1000:.0f}" for number in sorted(found))
            self._say(f"CPU threads: {self.chosen}, by the time of a step (ms with {times})")
