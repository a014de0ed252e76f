"""The service without HTTP: trainers' answers gathered into batches, and each answer's reward kept.

A rule works on a batch (`aggregation.rule.Past`); a process of a trainer brings a part of one, and most engines bring
one answer a request. `exact` holds answers until all parts of a batch are there, and makes one message a group and one
round of the rule of them. `stream` scores what gathers within a moment, with history, lead and fairness frozen at the
last closed round, and closes a round after so many answers.

No axis letters: arrays are `rule_rounds`' affair.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from appa_flwr.analysis.aggregation import Rule
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from appa_flwr.run.records import ServedRound
from appa_flwr.run.served import Kept, ServedRuns
from server_app.federation.groups import Federation
from server_app.serve.requests import Item, Part, Refused, Scored, metrics
from server_app.serve.rule_rounds import RuleRounds, round_after

MOST_WAITING = 16_384  # answers that wait at once, of all runs
BUSY_SECONDS, RETRY_SECONDS = 5.0, 10.0  # after which a refused trainer may come again
DEADLINE_SECONDS = 600.0  # for which parts of a batch wait for the others; then it is scored as it is
GATHER_SECONDS = 0.02  # for which stream mode gathers answers

log = logging.getLogger("appa.server")


class _Awaited(Protocol):
    waiting: int


@dataclass
class _Held:
    """A part that waits for the others; `waiting` requests want its rewards, none if its trainer went away."""

    part: Part
    digests: list[bytes]
    waiting: int = 0


@dataclass
class _Batch:
    size: int
    parts: int
    deadline: float
    done: asyncio.Future[tuple[ServedRound, dict[str, Kept]]]
    held: dict[int, _Held] = field(default_factory=dict)
    closing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def count(self, *, without: int | None = None) -> int:
        """Answers that are there, perhaps without a part's."""
        return sum(len(held.part.items) for number, held in self.held.items() if number != without)


@dataclass
class _Sample:
    item: Item
    digest: bytes
    done: asyncio.Future[Mapping[str, Any]]
    waiting: int = 0


@dataclass
class _Stream:
    """A run's stream: samples by id, from their arrival until they are scored; `gathered` are not asked for yet."""

    samples: dict[str, _Sample] = field(default_factory=dict)
    gathered: list[_Sample] = field(default_factory=list)
    owned: set[str] = field(default_factory=set)  # ids that the service gave to samples whose trainer waits
    delivered: set[str] = field(default_factory=set)  # since the last write
    task: asyncio.Task[None] | None = None


class Service:
    """Scores answers for any number of runs, one message to the groups at a time.

    Its coroutines belong to one event loop; groups are asked, and rounds written, by a thread of its own.

    Args:
        groups: who score.
        rule: how their rewards become one.
        catalogue: the public questions.
        config: task, metric and alignment weight.
        store: where rounds and answers are kept.
        broken: called with an error that no later request could be spared.
        closed: called with each run's name and round that has closed.
    """

    def __init__(
        self,
        groups: Federation,
        rule: Rule,
        catalogue: wire.Catalogue,
        config: Config,
        store: ServedRuns,
        *,
        broken: Callable[[Exception], None],
        closed: Callable[[str, ServedRound], None],
    ) -> None:
        self._store, self._broken = store, broken
        self._rounds = RuleRounds(groups, rule, catalogue, config, store, closed=closed)
        self._batches: dict[tuple[str, int, int], _Batch] = {}
        self._streams: dict[str, _Stream] = {}
        self._turn, self._worker = asyncio.Lock(), ThreadPoolExecutor(1, "rewards")
        self._num_waiting, self._stopped = 0, False

    async def close(self) -> None:
        """Refuse whoever still waits, once the groups have answered what they were asked."""
        self._stopped = True
        tasks = [batch.closing for batch in self._batches.values()] + [of.task for of in self._streams.values()]
        for batch in self._batches.values():
            if batch.closing is None:
                assert batch.timer is not None
                batch.timer.cancel()
                batch.done.set_exception(_stopping())
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        self._worker.shutdown()

    # --- exact ---

    async def score(self, part: Part) -> Scored:
        """The rewards of a part, once its batch is complete or its deadline has passed.

        Raises:
            Refused: see there; nothing is lost by it.
        """
        digests = self._checked(part.items)
        if not 0 <= part.part < part.parts or len(part.items) > part.size:
            raise Refused(422, f"part {part.part} of {part.parts} with {len(part.items)} of {part.size} answers")
        if (kept := self._kept(part.run, part.attempt, part.items, digests)) is not None:
            return _scored(self._store.round(part.run, part.attempt, kept[0].round), kept)
        key = (part.run, part.attempt, part.round)
        if (batch := self._batches.get(key)) is None:
            if (over := self._over(part)) is not None:
                return _missed(over, part)
            batch = self._opened(key, part)
        held = batch.held.get(part.part)
        if held is None or held.digests != digests:
            if held is not None and held.waiting:
                where = f"round {part.round}: part {part.part} is there already with other answers"
                raise Refused(409, f"{where}; does another trainer use the run name '{part.run}'?")
            if batch.closing is not None:
                return _missed((await asyncio.shield(batch.done))[0], part)
            batch.held[part.part] = held = self._fitting(batch, part, digests)
        with self._waiting(len(part.items), held):
            if batch.count() == batch.size:
                self._begin(key, batch)
            record, found = await asyncio.shield(batch.done)
        return _scored(record, [found[item.id] for item in part.items])

    def _checked(self, items: Sequence[Item]) -> list[bytes]:
        """Digests of the items, once these are known to be scorable."""
        if self._stopped:
            raise _stopping()
        for item in items:
            if item.question_id not in self._rounds.position:
                known = f"the {len(self._rounds.position)} questions (such as '{next(iter(self._rounds.position))}')"
                raise Refused(422, f"answer '{item.id}': question_id '{item.question_id}' is none of {known}")
        if not items or len({item.id for item in items}) < len(items):
            raise Refused(422, "no answers" if not items else "two answers have the same id")
        return [item.digest for item in items]

    def _kept(self, run: str, attempt: int, items: Sequence[Item], digests: Sequence[bytes]) -> list[Kept] | None:
        """What these items were given before; None where they are new."""
        found = self._store.answers(run, attempt, [item.id for item in items])
        for item, digest in zip(items, digests, strict=True):
            if item.id in found and found[item.id].text != digest:
                raise Refused(409, f"answer '{item.id}' was scored with another text; an id stands for one answer")
        if found and len(found) < len(items):
            new = next(item.id for item in items if item.id not in found)
            raise Refused(409, f"answer '{new}' is new and others of its part are not; send a part again as it was")
        return [found[item.id] for item in items] if found else None

    def _over(self, part: Part) -> ServedRound | None:
        """The round of a part that it has missed; None where it may open one."""
        last = self._store.last(part.run)
        if last is None or (part.attempt, part.round) > (last[0].attempt, last[0].round):
            return None
        closed = self._store.round(part.run, part.attempt, part.round)
        if part.attempt < last[0].attempt or closed is None or closed.exact:
            over = f"round {part.round} of attempt {part.attempt} of run '{part.run}' is over"
            raise Refused(409, f"{over}; a trainer that goes back sends attempt {last[0].attempt + 1}")
        return closed

    def _opened(self, key: tuple[str, int, int], part: Part) -> _Batch:
        batch = _Batch(part.size, part.parts, time.monotonic() + DEADLINE_SECONDS, _promise())
        batch.timer = asyncio.get_running_loop().call_later(DEADLINE_SECONDS, self._begin, key, batch)
        self._batches[key] = batch
        return batch

    def _fitting(self, batch: _Batch, part: Part, digests: list[bytes]) -> _Held:
        """The part, once it is known to fit to those that are there."""
        said = f"{batch.size} answers in {batch.parts} parts"
        if (batch.size, batch.parts) != (part.size, part.parts):
            raise Refused(409, f"round {part.round}: another part says {said}, this one {part.size} in {part.parts}")
        total, others = len(part.items) + batch.count(without=part.part), set(batch.held) - {part.part}
        if total > batch.size or (len(others) + 1 == batch.parts and total < batch.size):
            raise Refused(422, f"round {part.round}: its parts have {total} answers, and {batch.size} were announced")
        ids = {item.id for number in others for item in batch.held[number].part.items}
        if both := ids.intersection(item.id for item in part.items):
            raise Refused(422, f"round {part.round}: two parts have an answer '{min(both)}'")
        return _Held(part, digests)

    def _begin(self, key: tuple[str, int, int], batch: _Batch) -> None:
        """Close a batch, complete or not."""
        if batch.closing is None and not batch.done.done():
            assert batch.timer is not None
            batch.timer.cancel()
            batch.closing = asyncio.get_running_loop().create_task(self._finish(key, batch))

    async def _finish(self, key: tuple[str, int, int], batch: _Batch) -> None:
        held = [batch.held[part] for part in sorted(batch.held)]
        try:
            if not any(one.waiting for one in held):  # its trainer has gone, and may come back with other answers
                raise Refused(503, "nobody waits for this round", retry_after=0.0)
            if batch.count() < batch.size:
                there = ", ".join(map(str, sorted(batch.held)))
                log.warning("run %s, round %s: only parts %s of %s came in time", key[0], key[2], there, batch.parts)
            given = [pair for one in held for pair in zip(one.part.items, one.digests, strict=True)]
            batch.done.set_result(await self.in_turn(self._rounds.batch, *key, given, batch.count() == batch.size))
        except Refused as refused:
            batch.done.set_exception(refused)
        finally:
            self._batches.pop(key, None)

    # --- stream ---

    async def stream(self, run: str, items: Sequence[Item]) -> Scored:
        """The rewards of answers that trainers send one by one or in any number, soon.

        Raises:
            Refused: see there.
        """
        digests = self._checked(items)
        found = [self._joined(run, item, digest) for item, digest in zip(items, digests, strict=True)]
        with self._waiting(len(items), *found):
            answers = await asyncio.gather(*(asyncio.shield(one.done) for one in found))
        last = self._store.last(run)
        return Scored(round_after(last), False, tuple(answers), metrics(last[0] if last else None))

    async def sample(self, run: str, question_id: str, completion: str) -> Scored:
        """The same of one answer of an engine that names none: while it has not had the reward, it asks again."""
        stream, digest = self._streams.setdefault(run, _Stream()), Item("", question_id, completion).digest
        known = [name for name, of in stream.samples.items() if of.digest == digest]
        known += self._store.undelivered(run, digest)
        name = next((one for one in known if one not in stream.owned | stream.delivered), uuid.uuid4().hex)
        stream.owned.add(name)
        try:
            scored = await self.stream(run, [Item(name, question_id, completion)])
            stream.delivered.add(name)
            return scored
        finally:
            stream.owned.discard(name)

    def _joined(self, run: str, item: Item, digest: bytes) -> _Sample:
        """The sample of this id, which may be scored, on its way, or new."""
        stream, last = self._streams.setdefault(run, _Stream()), self._store.last(run)
        sample = stream.samples.get(item.id, _Sample(item, digest, _promise()))
        if sample.digest != digest:
            raise Refused(409, f"answer '{item.id}' is there with another text; an id stands for one answer")
        if item.id in stream.samples:
            return sample
        if (kept := self._kept(run, last[0].attempt if last else 0, [item], [digest])) is not None:
            sample.done.set_result(kept[0].answer)
            return sample
        stream.samples[item.id] = sample
        stream.gathered.append(sample)
        if stream.task is None:
            stream.task = asyncio.get_running_loop().create_task(self._gather(run, stream))
        return sample

    async def _gather(self, run: str, stream: _Stream) -> None:
        """Ask the groups about what is there, until nothing more has come meanwhile."""
        await asyncio.sleep(GATHER_SECONDS)
        while stream.gathered:
            async with self._turn:
                pass  # more gathers while other runs are scored
            batch, stream.gathered = stream.gathered, []
            delivered, stream.delivered = stream.delivered, set()
            try:
                given = [(sample.item, sample.digest) for sample in batch]
                answers = await self.in_turn(self._rounds.samples, run, given, delivered)
                for sample, answer in zip(batch, answers, strict=True):
                    sample.done.set_result(answer)
            except Refused as refused:
                stream.delivered |= delivered
                for sample in batch:
                    sample.done.set_exception(refused)
            for sample in batch:
                del stream.samples[sample.item.id]
        stream.task = None

    # --- both ---

    def status(self, run: str) -> dict[str, Any]:
        """What a run has done and waits for.

        Raises:
            Refused: nobody has sent anything by this name.
        """
        last, batches = self._store.last(run), [(key, of) for key, of in self._batches.items() if key[0] == run]
        if last is None and not batches and run not in self._streams:
            raise Refused(404, f"no run '{run}'; there are: {', '.join(self._store.runs()) or 'none'}")
        waiting = [
            {
                **{"round": key[2], "attempt": key[1], "parts": sorted(of.held), "of_parts": of.parts},
                **{"answers": of.count(), "size": of.size, "seconds_left": max(0.0, of.deadline - time.monotonic())},
            }
            for key, of in batches
        ]
        shown = ("round", "attempt", "exact", "seconds", "group_seconds", "missing_groups")
        known = last[0].model_dump(mode="json", include=set(shown)) if last else {**dict.fromkeys(shown), "attempt": 0}
        counts = {"rounds": round_after(last) - 1, "open_answers": len(self._store.open(run))}
        more = {"rounds_missed": self._store.missed(run), "open_rounds": waiting}
        return {"run": run, **counts, **known, **more, "metrics": metrics(last[0] if last else None)}

    @contextmanager
    def _waiting(self, count: int, *of: _Awaited) -> Iterator[None]:
        """Room for so many answers that wait, while their trainer does."""
        if self._num_waiting + count > MOST_WAITING:
            raise Refused(429, f"{self._num_waiting} answers wait already", retry_after=BUSY_SECONDS)
        self._num_waiting += count
        for one in of:
            one.waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= count
            for one in of:
                one.waiting -= 1

    async def in_turn(self, work: Callable[..., Any], *given: Any) -> Any:
        """Do what the groups are asked for in the thread, after what came before it.

        Raises:
            Refused: too few groups answered, or it could not be done at all.
        """
        async with self._turn:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._worker, work, *given)
            except Refused:
                raise
            except UserError as error:
                raise Refused(503, str(error), retry_after=RETRY_SECONDS) from error
            except Exception as error:
                self._broken(error)
                raise Refused(503, f"the service has failed ({type(error).__name__})") from error


def _promise() -> asyncio.Future[Any]:
    """A result to come, which perhaps nobody waits for."""
    promise = asyncio.get_running_loop().create_future()
    promise.add_done_callback(lambda done: done.cancelled() or done.exception())
    return promise


def _stopping() -> Refused:
    return Refused(503, "the service stops; what was scored is kept", retry_after=RETRY_SECONDS)


def _scored(record: ServedRound | None, kept: Sequence[Kept]) -> Scored:
    assert record is not None  # written with the answers
    return Scored(record.round, record.exact, tuple(one.answer for one in kept), metrics(record))


def _missed(record: ServedRound, part: Part) -> Scored:
    """The answer to a part that came too late: no reward, which is not a reward of 0."""
    reason = f"round {record.round} was closed at its deadline, before part {part.part} came"
    answer: dict[str, Any] = {"reward": None, "valid": False, "failure_reason": reason, "components": {}}
    return Scored(record.round, False, (answer,) * len(part.items), metrics(record))
