"""How long trainers wait where staleness is bounded, beside an oracle; for more seeds run it as a script."""

import asyncio
import heapq
import random
import sys

import pytest
from test_bounded_staleness import Outcome, Run

BATCHES = 40


class Outcomes:
    """What becomes of the groups of a seed, by the number of their slots."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._drawn = []

    def __getitem__(self, number):
        while len(self._drawn) <= number:
            self._drawn.append(Outcome.draw(self._rng))
        return self._drawn[number]


class Measured(Run):
    """A run without crashes, whose trainer publishes each batch as soon as it is trained."""

    def __init__(self, seed, max_staleness):
        super().__init__(seed, max_staleness)
        self._outcomes = Outcomes(seed)
        self._slot_count = 0

    def next_outcome(self):
        self._slot_count += 1
        return self._outcomes[self._slot_count - 1]

    async def waiting(self):
        """Return the seconds for which the trainer was idle: a batch takes it one."""
        self.rng = AlwaysPublishes()
        self.after(0.0, self.fill)
        while len(self.staleness) < BATCHES * self.batch_size:
            event = heapq.heappop(self.events)
            self.now = event.at
            await event.happens()
            await self.plan()
        return self.now - BATCHES


class AlwaysPublishes:
    """Chooses for the trainer to publish, one version at a time, and for workers to give up by a release."""

    def random(self):
        return 0.5

    def randint(self, least, _most):
        return least


class Oracle:
    """A trainer whose plans are made by one who knows all durations.

    It has the same bound and as many outstanding slots, begun as soon as there is a place; the n-th slots have the same
    outcome as the n-th of the service. Its waiting is a lower bound for all orders of plans, by relaxation: batch `k`
    begins once the trainer is idle, as many groups are ready as it takes, and so are all groups that must be trained by
    then: those begun at version `k - max_staleness` or before. No plans can do with less. It takes the groups that are
    due first, and leaves out that later batches must have room for what is due by then.

    Args:
        knows_fates: whether it also knows which groups will be lost or rejected, for which it does not wait.
    """

    def __init__(self, seed, max_staleness, *, knows_fates):
        self._outcomes = Outcomes(seed)
        self._max_staleness = max_staleness
        self._knows_fates = knows_fates
        self._slot_count = self._version = self._in_training = 0
        self._running, self._ready = [], []  # (end, number, start version); start versions

    def _fill(self, now):
        most = (self._max_staleness + 1) * Run.batch_size
        while len(self._running) + len(self._ready) + self._in_training < most:
            slot = (now + self._outcomes[self._slot_count].seconds, self._slot_count, self._version)
            heapq.heappush(self._running, slot)
            self._slot_count += 1

    def _go_on(self):
        """Have the next group end; return when."""
        now, number, begun = heapq.heappop(self._running)
        if self._outcomes[number].fate == "trained":
            self._ready.append(begun)
        self._fill(now)
        return now

    def _is_awaited(self, number, begun):
        """Whether the next batch cannot begin before a group has ended."""
        is_due = begun + self._max_staleness <= self._version
        return is_due and not (self._knows_fates and self._outcomes[number].fate != "trained")

    def waiting(self):
        """Return the seconds for which the trainer is idle."""
        now = waited = 0.0
        for _ in range(BATCHES):
            idle_since = now
            self._fill(now)
            while len(self._ready) < Run.batch_size or any(self._is_awaited(*each[1:]) for each in self._running):
                now = self._go_on()
            waited += now - idle_since
            self._ready = sorted(self._ready)[Run.batch_size :]
            self._in_training = Run.batch_size
            now += 1.0
            while self._running and self._running[0][0] <= now:
                self._go_on()
            self._in_training = 0
            self._version += 1
        return waited


def waiting(max_staleness, seeds):
    """Return the seconds that trainers wait with all seeds, and those of the oracles that know durations, and fates."""
    own = sum(asyncio.run(Measured(seed, max_staleness).waiting()) for seed in seeds)
    least = [sum(Oracle(seed, max_staleness, knows_fates=knows).waiting() for seed in seeds) for knows in (False, True)]
    return own, *least


@pytest.mark.nightly
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_a_trainer_waits_little_longer_than_with_an_oracle(max_staleness):
    own, least, _ = waiting(max_staleness, range(20))
    assert least - 1e-6 <= own <= 1.1 * least


if __name__ == "__main__":
    count = int(sys.argv[1]) if sys.argv[1:] else 250
    for eta in (0, 1, 2, 4):
        own, *least = (seconds / count for seconds in waiting(eta, range(count)))
        print(f"max_staleness {eta}: waits {own:.1f} s; ratio to an oracle that knows durations", end=" ")
        print(f"{own / least[0]:.3f}, and which groups are lost {own / least[1]:.3f}", flush=True)
