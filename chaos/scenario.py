"""A scenario: one partition from its first sample to its clear, with all clients at work and faults at random times."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np

import tq_service as tq
from chaos.actors import NAMED_TASK, RANK_TASK, REQUESTS, USES, WORKER_TASK, described
from chaos.client_process import STOP_FILE
from chaos.cluster import Cluster, Process, wait_until
from chaos.content import FIELDS, GRADE, REWARD, columns_of, rewards_of, wrong_fields
from chaos.leases import grade_violations, worker_violations
from chaos.model import Claim, Samples, claims_of, rank_violations

Target = Literal["controller", "storage", "both", "twice", "client", "rolling restart"]

_CLIENTS: Final = (
    ("producer", (0, 1, 2, 3)),
    ("producer", (4, 5, 6, 7)),
    ("rank", (0, 1, 2, 3)),
    ("rank", (4, 5, 6, 7)),
    ("named", (0, 1, 2, 3)),
    ("worker", (0, 1, 2, 3)),
)
_REPLAYED_CLAIMS: Final = 24
_READ_SAMPLES: Final = 20
_WHILE_IT_STARTS_SECONDS: Final = 2.0
_ROWS_A_READ: Final = 64
_ANSWER_SECONDS: Final = 60.0
_END_SECONDS: Final = 120.0
_SAID_CHARACTERS: Final = 300


@dataclass(slots=True)
class Report:
    """The results of a trial, to which each scenario adds.

    Attributes:
        violations: broken guarantees.
        faults: number of faults for each target.
        back_seconds: for each fault of the service except rolling restarts, seconds from the signal until all services
            answered again.
        acknowledged_count: samples whose put was acknowledged.
        claim_count: batches delivered to ranks.
        replayed_count: claims that were repeated and whose answers were compared.
        read_count: samples whose bytes were compared, not counting reads by the actors.
    """

    violations: list[str] = field(default_factory=list)
    faults: dict[Target, int] = field(default_factory=dict)
    back_seconds: list[float] = field(default_factory=list)
    acknowledged_count: int = 0
    claim_count: int = 0
    replayed_count: int = 0
    read_count: int = 0


class Scenario:
    """One partition under load.

    Args:
        cluster: the running service.
        name: name of the partition.
        directory: directory for the logs of the actors.
        rng: chooses moments and targets.
        seed: seed of the clients' random numbers.
        report: receives the results.
        say: function that is called with a line about each fault.
    """

    _replayed_at_end: ClassVar[int | None] = None  # claims to repeat for each kind of actor; None: all

    def __init__(
        self,
        *,
        cluster: Cluster,
        name: str,
        directory: Path,
        rng: random.Random,
        seed: int,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        directory.mkdir(parents=True)
        self._cluster = cluster
        self._name = name
        self._directory = directory
        self._rng = rng
        self._report = report
        self._say = say
        self._clients = [self._client_process(number, *one, seed) for number, one in enumerate(_CLIENTS)]
        self._client = tq.Client(cluster.address, timeout=_ANSWER_SECONDS)
        self._stored_before = {name: self._stored(name) for name in cluster.storage_names}

    def _client_process(self, number: int, kind: str, numbers: Sequence[int], seed: int) -> Process:
        module = [sys.executable, "-m", "chaos.client_process"]
        arguments = [self._cluster.address, self._name, str(self._directory), str(seed), kind, *map(str, numbers)]
        return Process(f"{kind}s-{number}", [*module, *arguments], self._directory / f"{kind}s-{number}.log")

    def run(self, rounds: int, most_seconds: float, targets: Sequence[Target]) -> bool:
        """Inject `rounds` faults, let all actors finish, and check everything; return whether to continue."""
        try:
            self._client.create_partition(self._name, tasks=[RANK_TASK, NAMED_TASK, WORKER_TASK])
            for process in self._clients:
                process.start()
            wait_until(self._is_busy, _END_SECONDS)
            for target in self._in_turn(targets, rounds):
                time.sleep(self._rng.uniform(0.1, most_seconds))
                self._inject_fault(target)
                self._found(self._check_between())
                if dead := self._cluster.dead():
                    self._violated(f"{', '.join(dead)} ended without a fault, see the logs; the trial stops here")
                    return False
            self._found(self._finish())
            return True
        finally:
            self._client.close()
            for process in self._clients:
                process.end()

    def _found(self, violations: Iterator[str]) -> None:
        try:
            for violation in violations:
                self._violated(violation)
        except tq.TqError as error:
            self._violated(f"a call that must succeed: {error!r}")

    def _violated(self, violation: str) -> None:
        self._say(f"VIOLATION {violation[:_SAID_CHARACTERS]}")
        self._report.violations.append(f"{self._name}: {violation}")

    def _is_busy(self) -> bool:
        """Whether samples are being put and consumed."""
        return bool(claims_of(self._directory))

    # Faults

    def _in_turn(self, targets: Sequence[Target], rounds: int) -> list[Target]:
        """Return targets in random order. The counts of any two entries of `targets` differ by at most one."""
        decks = (self._rng.sample(targets, len(targets)) for _ in range(0, rounds, len(targets)))
        return [target for deck in decks for target in deck][:rounds]

    def _inject_fault(self, target: Target) -> None:
        count = self._report.faults
        count[target] = count.get(target, 0) + 1
        if target == "client":
            self._kill_client(self._rng.choice(self._clients))
            return
        if target == "rolling restart":
            for name in self._cluster.processes:
                self._hit([name], signal.SIGTERM)
            return
        if target == "twice":
            self._found(iter(self._cluster.inject_fault(self._victims(target), signal.SIGKILL)))
            time.sleep(self._rng.uniform(0, _WHILE_IT_STARTS_SECONDS))
        self._hit(self._victims(target), signal.SIGKILL)

    def _kill_client(self, victim: Process) -> None:
        self._say(f"{self._name}: kill {victim.name}")
        if code := victim.end():
            self._violated(f"{victim.name} had ended with {code} ({victim.log})")
        victim.start()

    def _victims(self, target: Target) -> list[str]:
        match target:
            case "controller":
                return [self._cluster.controller_name]
            case "storage":
                return [self._rng.choice(self._cluster.storage_names)]
        return list(self._cluster.processes)

    def _hit(self, names: Sequence[str], number: signal.Signals) -> None:
        killed_at = time.monotonic()
        self._found(iter(self._cluster.inject_fault(names, number)))
        if not wait_until(self._answers, _ANSWER_SECONDS):
            self._found(iter([f"no answer within {_ANSWER_SECONDS:g} s of {number.name} to {', '.join(names)}"]))
        took = time.monotonic() - killed_at
        if number == signal.SIGKILL:
            self._report.back_seconds.append(took)
        self._say(f"{self._name}: {number.name} {', '.join(names)}: back after {took:.2f} s")

    def _answers(self) -> bool:
        """Whether the controller and all storage services answer."""
        addresses = {self._cluster.address, *map(self._cluster.storage_address, self._cluster.storage_names)}
        for address in sorted(addresses):
            try:
                with tq.Client(address, timeout=0.3) as client:
                    if not client.health():
                        return False
            except tq.TqError:
                return False
        return True

    # Checks under load

    def _check_between(self) -> Iterator[str]:
        yield from self._check_samples(_READ_SAMPLES)
        yield from Samples.recorded(self._directory).held_violations(self._directory)
        yield from self._check_consumed()
        for kind in REQUESTS:
            yield from self._replay(kind, self._some_claims(kind, _REPLAYED_CLAIMS))

    def _check_samples(self, read_count: int | None) -> Iterator[str]:
        """Compare stored and acknowledged samples, and read `read_count` of them, or all of them if it is None."""
        before = Samples.recorded(self._directory)
        found, _ = self._client.lookup_samples(self._name)
        later = Samples.recorded(self._directory)
        present = _indexes_by_key(found)
        yield from before.violations(present, later)
        yield from before.tag_violations(dict(zip(present, found.custom_meta, strict=True)), later)
        readable = [key for key in before.acknowledged if key in present and key not in later.clearing]
        if read_count is not None:
            readable = self._rng.sample(readable, min(read_count, len(readable)))
        yield from self._read([key for key in readable if key in before.rewarded], [*FIELDS, REWARD])
        yield from self._read([key for key in readable if key not in before.rewarded], FIELDS)

    def _check_consumed(self) -> Iterator[str]:
        claimed = {index for claim in claims_of(self._directory) for index in claim.answer["indexes"]}
        meta, _ = self._client.lookup_samples(self._name, task_name=RANK_TASK)
        left = claimed.difference(meta.indexes[meta.consumed].tolist()).intersection(meta.global_indexes)
        yield from (f"sample {index} was delivered to a rank and is not consumed" for index in sorted(left))

    def _present(self) -> dict[str, int]:
        meta, _ = self._client.lookup_samples(self._name)
        return _indexes_by_key(meta)

    def _read(self, keys: Sequence[str], data_fields: Sequence[str]) -> Iterator[str]:
        for start in range(0, len(keys), _ROWS_A_READ):
            some = keys[start : start + _ROWS_A_READ]
            try:
                batch = self._client.get_data(self._name, keys=some, data_fields=data_fields, timeout=_ANSWER_SECONDS)
            except tq.TqError as error:
                clearing = Samples.recorded(self._directory).clearing
                if clearing.isdisjoint(some):
                    yield f"acknowledged samples cannot be read: {error}"
                else:  # their clear was requested after they were chosen
                    yield from self._read([key for key in some if key not in clearing], data_fields)
                continue
            self._report.read_count += len(some)
            yield from (f"wrong bytes: {wrong}" for wrong in wrong_fields(some, batch))

    def _some_claims(self, kind: str, most: int | None) -> list[Claim]:
        """Return up to `most` logged claims by actors of a kind, chosen at random, or all of them if `most` is None."""
        claims = claims_of(self._directory, kind)
        return claims if most is None else self._rng.sample(claims, min(most, len(claims)))

    def _replay(self, kind: str, claims: Sequence[Claim]) -> Iterator[str]:
        """Repeat claims by actors of a kind and compare the answers."""
        for claim in claims:
            asked = REQUESTS[kind](self._name, claim.rank, claim.batch_index, max_wait=0.0)
            try:
                answer = described(self._client.get_meta(**asked))
            except tq.errors.BatchForgottenError:  # of a reusing task only the last claims are kept
                continue
            except tq.TqError as error:
                yield f"{kind} {claim.rank}, batch {claim.batch_index}: repeated claim failed: {error!r}"
                continue
            self._report.replayed_count += 1
            if answer != claim.answer:
                yield f"{kind} {claim.rank}, batch {claim.batch_index} was {claim.answer} and is {answer}"

    # End of the scenario

    def _finish(self) -> Iterator[str]:
        (self._directory / STOP_FILE).touch()
        yield from self._join("producer")
        samples = Samples.recorded(self._directory)
        yield from samples.held_violations(self._directory)
        yield from self._complete_rewards(samples)
        self._let_go(samples)
        self._client.seal_partition(self._name)
        yield from self._join("rank", "named", "worker")
        yield from self._check_samples(None)
        live = set(self._present().values())
        yield from rank_violations(self._directory, live)
        yield from rank_violations(self._directory, live, kind="named", uses=USES)
        yield from worker_violations(self._directory, live)
        yield from grade_violations(self._directory, self._grades())
        for kind in REQUESTS:
            yield from self._replay(kind, self._some_claims(kind, self._replayed_at_end))
        self._report.acknowledged_count += len(samples.acknowledged)
        self._report.claim_count += len(claims_of(self._directory))
        self._client.clear_partition(self._name)
        yield from self._leaks()

    def _join(self, *kinds: str) -> Iterator[str]:
        deadline = time.monotonic() + _END_SECONDS
        for process in self._clients:
            if not process.name.startswith(kinds):
                continue
            code = process.exit_code(max(0.1, deadline - time.monotonic()))
            if code is None:
                yield f"{process.name} did not end within {_END_SECONDS:g} s ({process.log})"
            elif code:
                lines = process.log.read_text(errors="replace").strip().splitlines()
                yield f"{process.name} ended with {code}: {lines[-1] if lines else 'no word'} ({process.log})"

    def _complete_rewards(self, samples: Samples) -> Iterator[str]:
        """Put the rewards that killed producers had not put yet, so that every sample can be delivered."""
        keys = sorted(self._present())
        for start in range(0, len(keys), _ROWS_A_READ):
            some = keys[start : start + _ROWS_A_READ]
            found, _ = self._client.lookup_samples(self._name, some)
            unrewarded = self._unrewarded([str(key) for key in found.keys])
            lacking = [key for key in some if key in unrewarded]
            yield from (f"acknowledged reward of {key} is lost" for key in lacking if key in samples.rewarded)
            if lacking:
                self._client.put(self._name, {REWARD: rewards_of(lacking)}, keys=lacking, key_mode="existing")

    def _unrewarded(self, keys: Sequence[str]) -> set[str]:
        """Return the keys of samples without a reward or with a wrong text, which a later read detects."""
        batch = self._client.get_data(self._name, keys=keys, data_fields=["text", REWARD], missing="skip")
        keys_of_texts = dict(zip(columns_of(keys)["text"], keys, strict=True))
        return set(keys) - {keys_of_texts.get(text, "") for text in batch["text"]}

    def _grades(self) -> dict[int, int | None]:
        """Return the grade of each sample by index, or None if ungraded."""
        found, _ = self._client.lookup_samples(self._name)
        grades: dict[int, int | None] = dict.fromkeys(found.global_indexes)
        if GRADE in found.produced:
            graded = found.select_samples(np.flatnonzero(found.produced[GRADE]))
            values = self._client.get_data(graded, data_fields=[GRADE])[GRADE].tolist()
            grades |= zip(graded.global_indexes, values, strict=True)
        return grades

    def _let_go(self, samples: Samples) -> None:
        """Make held samples live, since tasks wait for them too."""
        held = samples.held & self._present().keys()
        if held:
            meta, _ = self._client.lookup_samples(self._name, sorted(held))
            self._client.put(meta, state="live")

    def _leaks(self) -> Iterator[str]:
        for name, before in self._stored_before.items():
            if not wait_until(partial(self._stores, name, before), _ANSWER_SECONDS):
                used_bytes, put_count = self._stored(name)
                yield f"{name} has {used_bytes} bytes in {put_count} puts after the clear, {before} before the scenario"

    def _stores(self, storage_name: str, most: tuple[int, int]) -> bool:
        """Whether at most as many bytes and puts remain as before. Puts cleared earlier may have been freed since."""
        return all(now <= before for now, before in zip(self._stored(storage_name), most, strict=True))

    def _stored(self, storage_name: str) -> tuple[int, int]:
        """Return the bytes and the number of puts of a storage service."""
        with tq.Client(self._cluster.storage_address(storage_name), timeout=_ANSWER_SECONDS) as client:
            stat = client.storage_stat()
            return stat.used_bytes, stat.put_count


def _indexes_by_key(meta: tq.BatchMeta) -> dict[str, int]:
    return {str(key): index for key, index in zip(meta.keys, meta.global_indexes, strict=True)}
