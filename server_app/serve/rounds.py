"""Trainers' answers made rounds of the rule, and each answer's reward kept: the service without HTTP.

A rule works on a batch (`aggregation.rule.Past`); a process of a trainer brings a part of one, and most engines bring
one answer a request. `exact` holds answers until all parts of a batch are there, and makes one message a group and one
round of the rule of them. `stream` scores what gathers within a moment, with history, lead and fairness frozen at the
last closed round, and closes a round after so many answers.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation import Result, Rule, State
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import training_reward
from appa_flwr.run.records import ServedRound
from appa_flwr.run.served import Kept, ServedRuns
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.group_rewards import Groups, aggregated_reward, group_means

FloatArray = npt.NDArray[np.float64]

MOST_WAITING = 16_384  # answers that wait at once, of all runs
BUSY_SECONDS, RETRY_SECONDS = 5.0, 10.0  # after which a refused trainer may come again

log = logging.getLogger("appa.server")


class Refused(Exception):
    """A request that gets no rewards, and why.

    Attributes:
        status: as HTTP has it: 409 contradicts what was sent before, 422 is wrong in itself, 429 too many wait, 503 too
            few groups answered or the service stops.
        retry_after: seconds after which the same request may succeed; None where it never will.
    """

    def __init__(self, status: int, reason: str, *, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Item:
    """An answer to be scored; `id` is its trainer's, by which a retry is told from another answer."""

    id: str
    question_id: str
    completion: str

    @property
    def digest(self) -> bytes:
        """Of question and completion."""
        return hashlib.sha256(json.dumps([self.question_id, self.completion]).encode()).digest()


@dataclass(frozen=True)
class Part:
    """A process's share of a batch of `size` answers; `part` counts from 0.

    `round` rises with every batch of a run. A trainer that goes back to a lower one, as from its checkpoint, raises
    `attempt`: what it did since is given up, and the rule's state is that before the round.
    """

    run: str
    round: int
    attempt: int
    size: int
    part: int
    parts: int
    items: Sequence[Item]


@dataclass(frozen=True)
class Scored:
    """Answers with their rewards, in the order in which they were sent.

    Attributes:
        round: that they are of.
        exact: whether the rule has seen the whole batch.
        items: of each its reward, None where it is not valid, why not, and its components.
        metrics: of the round; in stream mode of the last closed one.
    """

    round: int
    exact: bool
    items: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, Any]


def metrics(record: ServedRound | None) -> dict[str, Any]:
    """What a trainer logs of a round; groups that are missing have no number."""
    if record is None:
        return {}
    found: dict[str, Any] = {
        "fairness_index": record.fairness_index,
        "fell_back": record.fell_back,
        "format_score": record.format_score,
        "missing_groups": len(record.missing_groups),
    }
    found |= {f"weight/{name}": weight for name, weight in record.weights.items()}
    return found | {f"group/{name}": mean for name, mean in record.rewards.items() if mean is not None}


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
    done: asyncio.Future[ServedRound]
    held: dict[int, _Held] = field(default_factory=dict)
    closing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def num_items(self) -> int:
        return sum(len(held.part.items) for held in self.held.values())


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
        groups: who scores, through whatever catalogue and targets they were sent.
        rule: how their rewards become one.
        catalogue: the public questions.
        config: task, metric, alignment weight and the keys of [serve].
        store: where rounds and answers are kept.
        broken: called with an error that no later request could be spared.
        closed: called with each run's name and round that has closed.
    """

    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        catalogue: wire.Catalogue,
        config: Config,
        store: ServedRuns,
        *,
        broken: Callable[[Exception], None] = lambda error: None,
        closed: Callable[[str, ServedRound], None] = lambda run, record: None,
    ) -> None:
        self._groups, self._rule, self._catalogue, self._store = groups, rule, catalogue, store
        self._config, self._broken, self._closed = config, broken, closed
        self._position = {question.question_id: q for q, question in enumerate(catalogue.questions)}
        self._batches: dict[tuple[str, int, int], _Batch] = {}
        self._streams: dict[str, _Stream] = {}
        self._turn, self._worker = asyncio.Lock(), ThreadPoolExecutor(1, "rewards")
        self._num_waiting, self._asked, self._stopped = 0, 0, False
        self.messages: Counter[str] = Counter()  # requests to the groups, by run

    async def close(self) -> None:
        """Refuse whoever still waits, once the groups have answered what they were asked."""
        self._stopped = True
        tasks = [batch.closing for batch in self._batches.values()] + [of.task for of in self._streams.values()]
        stopping = Refused(503, "the service stops; what was scored is kept", retry_after=RETRY_SECONDS)
        for batch in list(self._batches.values()):
            if batch.timer:
                batch.timer.cancel()
            if batch.closing is None:
                batch.done.set_exception(stopping)
        self._batches.clear()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        self._worker.shutdown()

    # --- exact ---

    async def score(self, part: Part) -> Scored:
        """The rewards of a part, once its batch is complete or its deadline has passed.

        Raises:
            Refused: see there; nothing is lost by it.
        """
        digests = self._checked(part.run, part.items)
        if not 0 <= part.part < part.parts or len(part.items) > part.size:
            raise Refused(422, f"part {part.part} of {part.parts} with {len(part.items)} of {part.size} answers")
        if (kept := self._kept(part.run, part.attempt, part.items, digests)) is not None:
            record = self._store.round(part.run, part.attempt, kept[0].round)
            return _scored(record, [one.answer for one in kept])
        key = (part.run, part.attempt, part.round)
        batch = self._batches.get(key)
        if batch is None:
            if (late := self._past(part)) is not None:
                return late
            batch = self._opened(key, part)
        if (batch.size, batch.parts) != (part.size, part.parts):
            said = f"{batch.size} answers in {batch.parts} parts"
            raise Refused(409, f"round {part.round}: another part says {said}, this one {part.size} in {part.parts}")
        held = batch.held.get(part.part)
        if held is not None and held.digests != digests and held.waiting:
            raise Refused(
                409,
                f"round {part.round}: part {part.part} is there already with other answers; does another trainer use "
                f"the run name '{part.run}'?",
            )
        if batch.closing is not None and (held is None or held.digests != digests):
            return await self._late(part, batch)
        if held is None or held.digests != digests:
            batch.held[part.part] = held = self._fitting(batch, part, digests)
        with self._place(len(part.items)):
            held.waiting += 1
            try:
                if batch.num_items == batch.size and batch.closing is None:
                    self._begin(key, batch)
                record = await asyncio.shield(batch.done)
            finally:
                held.waiting -= 1
        ids = [item.id for item in part.items]
        answers = self._store.answers(part.run, part.attempt, ids)
        return _scored(record, [answers[name].answer for name in ids])

    def _checked(self, run: str, items: Sequence[Item]) -> list[bytes]:
        """Digests of the items, once these are known to be scorable."""
        if self._stopped:
            raise Refused(503, "the service stops", retry_after=RETRY_SECONDS)
        for item in items:
            if item.question_id not in self._position:
                example = self._catalogue.questions[0].question_id
                raise Refused(
                    422,
                    f"answer '{item.id}': question_id '{item.question_id}' is none of the {len(self._position)} "
                    f"questions (such as '{example}')",
                )
        if not items or len({item.id for item in items}) < len(items):
            raise Refused(422, "no answers" if not items else "two answers have the same id")
        return [item.digest for item in items]

    def _kept(self, run: str, attempt: int, items: Sequence[Item], digests: Sequence[bytes]) -> list[Kept] | None:
        """What these items were given before; None where they are new."""
        found = self._store.answers(run, attempt, [item.id for item in items])
        for item, digest in zip(items, digests, strict=True):
            if item.id in found and found[item.id].text != digest:
                raise Refused(409, f"answer '{item.id}' was scored with another text; an id stands for one answer")
        if not found:
            return None
        if len(found) < len(items):
            new = next(item.id for item in items if item.id not in found)
            raise Refused(409, f"answer '{new}' is new and others of its part are not; send a part again as it was")
        return [found[item.id] for item in items]

    def _past(self, part: Part) -> Scored | None:
        """The answer to a part whose round is closed; None where it may open one."""
        if (last := self._store.last(part.run)) is None:
            return None
        record, again = last[0], f"a trainer that goes back sends attempt {last[0].attempt + 1}"
        if part.attempt < record.attempt:
            raise Refused(
                409, f"attempt {part.attempt} of run '{part.run}' is over: attempt {record.attempt} has begun"
            )
        if part.attempt > record.attempt or part.round > record.round:
            return None
        closed = self._store.round(part.run, part.attempt, part.round)
        if closed is None or closed.exact:
            raise Refused(409, f"round {part.round} of run '{part.run}' is over, as is {record.round}; {again}")
        return _missed(closed, part)

    async def _late(self, part: Part, batch: _Batch) -> Scored:
        return _missed(await asyncio.shield(batch.done), part)

    def _opened(self, key: tuple[str, int, int], part: Part) -> _Batch:
        loop, seconds = asyncio.get_running_loop(), self._config.serve.deadline
        batch = _Batch(part.size, part.parts, time.monotonic() + seconds, loop.create_future())
        batch.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
        batch.timer = loop.call_later(seconds, self._begin, key, batch)
        self._batches[key] = batch
        return batch

    def _fitting(self, batch: _Batch, part: Part, digests: list[bytes]) -> _Held:
        others = {number: held for number, held in batch.held.items() if number != part.part}
        total = len(part.items) + sum(len(held.part.items) for held in others.values())
        if total > batch.size or (len(others) + 1 == batch.parts and total < batch.size):
            raise Refused(422, f"round {part.round}: its parts have {total} answers, and {batch.size} were announced")
        ids = {item.id for held in others.values() for item in held.part.items}
        if both := ids.intersection(item.id for item in part.items):
            raise Refused(422, f"round {part.round}: two parts have an answer '{min(both)}'")
        return _Held(part, digests)

    def _begin(self, key: tuple[str, int, int], batch: _Batch) -> None:
        """Close a batch, complete or not."""
        if batch.closing is not None or batch.done.done():
            return
        if batch.timer:
            batch.timer.cancel()
        batch.closing = asyncio.get_running_loop().create_task(self._finish(key, batch))

    async def _finish(self, key: tuple[str, int, int], batch: _Batch) -> None:
        run, attempt, number = key
        held = [batch.held[part] for part in sorted(batch.held)]
        items = [item for one in held for item in one.part.items]
        digests = [digest for one in held for digest in one.digests]
        if not any(one.waiting for one in held):  # its trainer has gone, and may come back with other answers
            self._batches.pop(key, None)
            batch.done.set_exception(Refused(503, f"round {number}: nobody waits for it", retry_after=0.0))
            return
        exact = len(items) == batch.size
        if not exact:
            there = ", ".join(map(str, sorted(batch.held)))
            log.warning("run %s, round %s: only parts %s of %s came in time", run, number, there, batch.parts)
        try:
            record = await self.in_turn(self._round, run, attempt, number, items, digests, exact)
            batch.done.set_result(record)
        except Refused as refused:
            batch.done.set_exception(refused)
        finally:
            self._batches.pop(key, None)

    def _round(
        self, run: str, attempt: int, number: int, items: Sequence[Item], digests: Sequence[bytes], exact: bool
    ) -> ServedRound:
        """One message a group, one round of the rule, one transaction."""
        last = self._store.last(run)
        if last is not None and (attempt, number) <= (last[0].attempt, last[0].round):
            raise Refused(409, f"round {number} of attempt {attempt} is over: the trainer has gone on without it")
        if last is not None and attempt > last[0].attempt:
            last = self._store.last(run, before=number)
        started = time.monotonic()
        answers, rewards = self._ask(run, items)
        seconds = time.monotonic() - started
        state, metric, config = self._state(last), self._config.reward_metric, self._config
        scored = aggregated_reward(
            self._rule, state, answers, rewards, metric=metric, alignment_weight=config.appa.alignment_weight
        )
        reward_GJ, aggregate_J = scored.reward_GJ, scored.result.aggregate_J
        held_out = bool(self._catalogue.held_out_Q[answers.question_J].any())
        record = self._record(
            reward_GJ, answers.format_score_J, scored.result, last, seconds, held_out=held_out,
            round=number, attempt=attempt, exact=exact, reward=float(aggregate_J.mean()),
        )  # fmt: skip
        kept = [
            Kept(item.id, digest, number, _answer(reward, reward_GJ[:, j], answers.format_score_J[j]))
            for j, (item, digest, reward) in enumerate(zip(items, digests, aggregate_J, strict=True))
        ]
        after = state if held_out else scored.result.state
        self._store.keep(run, attempt, kept, closed=(record, self._kept_state(after)))
        self._closed(run, record)
        return record

    # --- stream ---

    async def stream(self, run: str, items: Sequence[Item]) -> Scored:
        """The rewards of answers that trainers send one by one or in any number, soon.

        Raises:
            Refused: see there.
        """
        digests = self._checked(run, items)
        with self._place(len(items)):
            found = [self._joined(run, item, digest) for item, digest in zip(items, digests, strict=True)]
            for one in found:
                one.waiting += 1
            try:
                answers = await asyncio.gather(*(asyncio.shield(one.done) for one in found))
            finally:
                for one in found:
                    one.waiting -= 1
        last = self._store.last(run)
        return Scored(1 + (last[0].iteration if last else 0), False, tuple(answers), metrics(last[0] if last else None))

    async def sample(self, run: str, question_id: str, completion: str) -> Scored:
        """The same of one answer of an engine that names none: while it has not had the reward, it asks again."""
        stream = self._streams.setdefault(run, _Stream())
        digest = Item("", question_id, completion).digest
        known = [*(name for name, of in stream.samples.items() if of.digest == digest)]
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
        stream = self._streams.setdefault(run, _Stream())
        if (there := stream.samples.get(item.id)) is not None:
            if there.digest != digest:
                raise Refused(409, f"answer '{item.id}' is there with another text; an id stands for one answer")
            return there
        sample = _Sample(item, digest, asyncio.get_running_loop().create_future())
        sample.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        if (kept := self._kept(run, self._attempt(run), [item], [digest])) is not None:
            sample.done.set_result(kept[0].answer)
            return sample
        stream.samples[item.id] = sample
        stream.gathered.append(sample)
        if stream.task is None:
            stream.task = asyncio.get_running_loop().create_task(self._gather(run, stream))
        return sample

    async def _gather(self, run: str, stream: _Stream) -> None:
        """Ask the groups about what is there, until nothing more has come meanwhile."""
        await asyncio.sleep(self._config.serve.gather_seconds)
        while stream.gathered:
            async with self._turn:
                pass  # more gathers while other runs are scored
            batch, stream.gathered = stream.gathered, []
            delivered, stream.delivered = stream.delivered, set()
            try:
                answers = await self.in_turn(self._samples, run, batch, delivered)
                for sample, answer in zip(batch, answers, strict=True):
                    sample.done.set_result(answer)
            except Refused as refused:
                stream.delivered |= delivered
                for sample in batch:
                    sample.done.set_exception(refused)
            for sample in batch:
                del stream.samples[sample.item.id]
        stream.task = None

    def _samples(self, run: str, batch: Sequence[_Sample], delivered: set[str]) -> list[Mapping[str, Any]]:
        """One message a group; and the round's end where it has answers enough."""
        started = time.monotonic()
        answers, rewards = self._ask(run, [sample.item for sample in batch])
        seconds = time.monotonic() - started
        last, config, names = self._store.last(run), self._config, self._groups.groups
        reward_GJ = rewards[config.reward_metric, wire.TARGET_SIDE]
        training_GJ = training_reward(
            reward_GJ, answers.format_score_J, answers.parsed_J, alignment_weight=config.appa.alignment_weight
        )
        state = self._state(last)
        if last is None or all(last[0].rewards.get(name) is None for name in names):
            reward_J = self._rule.apply(state, reward_GJ, training_GJ).aggregate_J
        else:
            mean_G = np.array([_number(last[0].rewards.get(name)) for name in names])
            reward_J = self._rule.between(state, training_GJ, fairness=last[0].fairness_index, mean_G=mean_G)
        iteration = 1 + (last[0].iteration if last else 0)
        kept = list[Kept]()
        for j, sample in enumerate(batch):
            answer = _answer(reward_J[j], reward_GJ[:, j], answers.format_score_J[j])
            by_group = {name: _known(reward) for name, reward in zip(names, reward_GJ[:, j], strict=True)}
            more: dict[str, Any] | None = {"groups": by_group, "parsed": bool(answers.parsed_J[j])}
            if self._catalogue.held_out_Q[answers.question_J[j]]:
                more = None  # it belongs to no round
            kept.append(Kept(sample.item.id, sample.digest, iteration, answer, more, delivered=False))
        attempt, closed = self._attempt(run), None
        new = [one for one in kept if one.rewards is not None]
        if new and self._store.num_open(run) + len(new) >= config.serve.round_size:
            closed = self._closed_stream(run, attempt, [*self._store.open(run), *new], last, seconds)
        self._store.keep(run, attempt, kept, closed=closed, delivered=delivered)
        if closed:
            self._closed(run, closed[0])
        return [one.answer for one in kept]

    def _closed_stream(
        self, run: str, attempt: int, kept: Sequence[Kept], last: tuple[ServedRound, Any] | None, seconds: float
    ) -> tuple[ServedRound, dict[str, Any]]:
        """The round of these answers; a group that missed one of its messages is missing, unless all have."""
        of = [one.rewards for one in kept if one.rewards is not None]
        names = self._groups.groups
        reward_GJ = np.array([[_number(one["groups"].get(name)) for one in of] for name in names])
        missing_GJ = np.isnan(reward_GJ)
        used_J = np.ones(len(of), dtype=bool)
        if missing_GJ.any(axis=1).all():  # the answers that most groups have scored
            used_J = missing_GJ.sum(axis=0) == missing_GJ.sum(axis=0).min()
            used_J &= (missing_GJ == missing_GJ[:, [int(np.argmax(used_J))]]).all(axis=0)
        reward_GJ = reward_GJ[:, used_J]
        reward_GJ[np.isnan(reward_GJ).any(axis=1)] = np.nan
        format_J = np.array([one.answer["components"]["format"] for one in kept])[used_J]
        parsed_J = np.array([one["parsed"] for one in of])[used_J]
        weight = self._config.appa.alignment_weight
        training_GJ = training_reward(reward_GJ, format_J, parsed_J, alignment_weight=weight)
        result = self._rule.apply(self._state(last), reward_GJ, training_GJ)
        iteration, given = 1 + (last[0].iteration if last else 0), [one.answer["reward"] for one in kept]
        record = self._record(
            reward_GJ, format_J, result, last, seconds, held_out=False,
            round=iteration, attempt=attempt, exact=False, reward=float(np.mean(given)),
        )  # fmt: skip
        return record, self._kept_state(result.state)

    # --- both ---

    def status(self, run: str) -> dict[str, Any]:
        """What a run has done and waits for.

        Raises:
            Refused: nobody has sent anything by this name.
        """
        last = self._store.last(run)
        batches = {key: batch for key, batch in self._batches.items() if key[0] == run}
        if last is None and not batches and run not in self._streams:
            raise Refused(404, f"no run '{run}'; there are: {', '.join(self._store.runs()) or 'none'}")
        record = last[0] if last else None
        waiting = [
            {
                "round": number,
                "attempt": attempt,
                "parts": sorted(batch.held),
                "of_parts": batch.parts,
                "answers": batch.num_items,
                "size": batch.size,
                "seconds_left": max(0.0, round(batch.deadline - time.monotonic(), 1)),
            }
            for (_, attempt, number), batch in batches.items()
        ]
        return {
            "run": run,
            "rounds": self._store.count(run),
            "round": record.round if record else None,
            "attempt": record.attempt if record else 0,
            "exact": record.exact if record else None,
            "seconds": record.seconds if record else None,
            "missing_groups": list(record.missing_groups) if record else [],
            "rounds_missed": self._store.missed(run),
            "open_round": waiting,
            "open_answers": self._store.num_open(run),
            "metrics": metrics(record),
        }

    def _attempt(self, run: str) -> int:
        last = self._store.last(run)
        return last[0].attempt if last else 0

    def _place(self, count: int) -> _Place:
        if self._num_waiting + count > MOST_WAITING:
            raise Refused(429, f"{self._num_waiting} answers wait already", retry_after=BUSY_SECONDS)
        return _Place(self, count)

    async def in_turn(self, work: Callable[..., Any], *given: Any) -> Any:
        """Do a round's work in the thread, after those before it.

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

    def _ask(self, run: str, items: Sequence[Item]) -> tuple[Answers, Mapping[tuple[str, str], FloatArray]]:
        question_J = np.array([self._position[item.question_id] for item in items], dtype=np.int64)
        answers = parse_answers(self._config.task, [item.completion for item in items], question_J, self._catalogue)
        self._asked += 1
        self.messages[run] += 1
        fresh = self._config.pluralllm.context_resampling == "every-iteration"
        request = answers.request([self._config.reward_metric], draw=self._asked if fresh else 0)
        return answers, self._groups.score(request, iteration=self._asked)

    def _record(
        self,
        reward_GJ: FloatArray,
        format_J: FloatArray,
        result: Result,
        last: tuple[ServedRound, Any] | None,
        seconds: float,
        **given: Any,
    ) -> ServedRound:
        names = self._groups.groups
        means = group_means(names, reward_GJ)
        return ServedRound(
            iteration=1 + (last[0].iteration if last else 0),
            fairness_index=result.fairness_index,
            fell_back=result.fell_back,
            weights=dict(zip(names, result.weight_G.tolist(), strict=True)),
            history=dict(zip(names, result.state.history_G.tolist(), strict=True)),
            rewards=means,
            format_score=float(format_J.mean()),
            missing_groups=tuple(name for name, mean in means.items() if mean is None),
            size=reward_GJ.shape[1],
            seconds=round(seconds, 4),
            **given,
        )

    def _kept_state(self, state: State) -> dict[str, dict[str, Any]]:
        arrays = {"history": state.history_G, "answered": state.answered_G, "lead": state.lead_G}
        names = self._groups.groups
        return {name: dict(zip(names, values_G.tolist(), strict=True)) for name, values_G in arrays.items()}

    def _state(self, last: tuple[ServedRound, Any] | None) -> State:
        """The rule's state after a round; a group that is new since has never answered."""
        if last is None:
            return self._rule.init(len(self._groups.groups))
        history, answered, lead = (
            np.array([last[1][kind].get(name, 0) for name in self._groups.groups])
            for kind in ("history", "answered", "lead")
        )
        return State(history_G=history, answered_G=answered, lead_G=lead)


class _Place:
    """Room for so many answers that wait."""

    def __init__(self, service: Service, count: int) -> None:
        self._service, self._count = service, count

    def __enter__(self) -> None:
        self._service._num_waiting += self._count

    def __exit__(self, *error: object) -> None:
        self._service._num_waiting -= self._count


def _answer(reward: float, reward_G: FloatArray, format_score: float) -> dict[str, Any]:
    components = {"alignment": float(np.nanmean(reward_G)), "format": float(format_score)}
    return {"reward": float(reward), "valid": True, "failure_reason": None, "components": components}


def _scored(record: ServedRound | None, answers: Sequence[Mapping[str, Any]]) -> Scored:
    assert record is not None  # written together
    return Scored(record.round, record.exact, tuple(answers), metrics(record))


def _missed(record: ServedRound, part: Part) -> Scored:
    """The answer to a part that came too late: no reward, which is not a reward of 0."""
    reason = f"round {record.round} was closed at its deadline, before part {part.part} came"
    answer: dict[str, Any] = {"reward": None, "valid": False, "failure_reason": reason, "components": {}}
    return Scored(record.round, False, (answer,) * len(part.items), metrics(record))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
