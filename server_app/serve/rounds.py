"""Trainers' answers as rounds of the rule: gathered, scored by the groups, written to served.jsonl, only then returned.

A rule works on a batch (`aggregation.Past`), but a process of a trainer brings a part of one, and most engines
bring one answer a request. Answers to a numbered round wait until all of it are there; a round of answers without a
number is what comes within `GATHER_SECONDS`, or the first `GATHER_SIZE`. Errors are HTTP's: 409 contradicts what was
sent before, 422 is wrong in itself, 429 and 503 say when the same request may succeed.

Axis letter: J answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import HTTPException

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines
from appa_flwr.protocol.asks import TARGET_SIDE
from appa_flwr.run import served
from appa_flwr.run.records import ServedRound
from appa_flwr.run.served import ServedAnswer, ServedLine, ServedRun
from server_app.federation.answers import parse_answers
from server_app.federation.reward_rule import RewardRule
from server_app.inputs import RunInputs
from server_app.serve.requests import Item, ScoreRequest

GATHER_SECONDS, GATHER_SIZE = 2.0, 96
MOST_WAITING = 16_384  # answers that wait at once, of all runs
RETRY_SECONDS = 5  # after which a refused trainer may come again
STOPPING = "the service stops; what was scored is kept"


@dataclass(eq=False)
class Batch:
    """Answers, by id, that the groups are asked about together.

    `requests` counts those that wait for it, `full` ends its own wait for more answers, `refusal` says why the groups
    are not asked.
    """

    round: int | None
    size: int
    items: dict[str, Item] = field(default_factory=dict)
    requests: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: HTTPException | None = None
    scored: asyncio.Task[Mapping[str, ServedAnswer]] = field(init=False)


@dataclass
class Run:
    """A trainer's run.

    Attributes:
        past: what was scored.
        asked: batch that the groups are being asked about.
        open: batch that takes more answers.
        lost: digest -> ids of answers whose engine gives none, and may not have had the reward.
    """

    past: ServedRun = field(default_factory=ServedRun)
    asked: Batch | None = None
    open: Batch | None = None
    lost: dict[str, list[str]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of the last round that the groups were asked about."""
        return self.past.number if self.asked is None else self.asked.round or self.past.number + 1

    def sent(self, name: str) -> Item | ServedAnswer | None:
        """The answer of a round that is over or being scored, by its id."""
        return self.asked.items.get(name) if self.asked and name in self.asked.items else self.past.kept.get(name)

    def has_place(self, request: ScoreRequest, items: Mapping[str, Item]) -> bool:
        """Whether answers can be of the open round, or of one that follows."""
        if (request.round and request.round <= self.number) or any(self.sent(name) for name in items):
            return False
        if self.open is None:
            return True
        there, same = self.open.items, self.open.round == request.round
        if request.round:
            same = same and self.open.size == request.total and len(there.keys() | items.keys()) <= request.total
        return same and all(there.get(name, item).digest == item.digest for name, item in items.items())

    def refuse(self, status: int, reason: str) -> None:
        """Let the open batch go, and with it whoever waits for it."""
        if self.open:
            self.open.refusal = _later(status, reason)
            self.open.scored.cancel()
            self.open = None


class Rounds:
    """Scores answers for any number of runs, one round at a time.

    Its coroutines belong to one event loop; a thread of its own asks the groups and writes the lines.

    Args:
        inputs: of the run whose groups score, and whose folder keeps what comes of it.
        closed: called with each trainer's run and round, once it is written.

    Attributes:
        failed: an error that no later request can be spared, if there was one.

    Raises:
        UserError: what earlier sessions have written cannot be read.
    """

    def __init__(self, inputs: RunInputs, *, closed: Callable[[str, ServedRound], None]) -> None:
        self.failed: Exception | None = None
        self._inputs, self._closed = inputs, closed
        self._rule = RewardRule(inputs.groups.names, inputs.config)
        self._position = {question.question_id: q for q, question in enumerate(inputs.catalogue.questions)}
        self._turn, self._worker = asyncio.Lock(), ThreadPoolExecutor(1, "rewards")
        self._num_asked, self._stopped = 0, False
        keep_lines(inputs.folder.path / served.SERVED_FILE)
        self._runs = {name: Run(past) for name, past in served.read_runs(inputs.folder.path).items()}
        for run in self._runs.values():  # a kill may have come before the last reply
            for answer in list(run.past.kept.values())[-run.past.rounds[-1].size :]:
                run.lost.setdefault(answer.digest, []).append(answer.id)

    async def close(self) -> None:
        """Refuse whoever waits, and let the groups answer what they have been asked."""
        self._stopped = True
        for run in self._runs.values():
            run.refuse(503, STOPPING)
        await asyncio.to_thread(self._worker.shutdown)

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """Rewards, once they are written.

        An answer without an id is another sample than an equal one, unless that one's client went away before it had
        the reward.

        Returns:
            body of the reply: run, the last round with its metrics, and of each item id, reward and components.

        Raises:
            HTTPException: see above; nothing of a refused request is queued.
        """
        if self._stopped:
            raise _later(503, STOPPING)
        for item in request.items:
            if item.question_id not in self._position:
                known = next(iter(self._position))
                raise HTTPException(422, f"answer '{item.id}': no question_id '{item.question_id}' (one is '{known}')")
        run = self._runs.setdefault(request.run, Run())
        items = {item.id or (run.lost.get(item.digest) or [uuid.uuid4().hex]).pop(): item for item in request.items}
        try:
            batch = self._batch(run, request, items)
            scored = {name: run.past.kept[name] for name in items if name in run.past.kept}
            if batch is not None:
                scored |= await _result(run, batch)
        except BaseException:
            for name, item in items.items():
                if item.id is None and (run.sent(name) or (run.open and name in run.open.items)):
                    run.lost.setdefault(item.digest, []).append(name)
            raise
        last, replies = run.past.rounds[-1], [scored[name].model_dump(exclude={"digest"}) for name in items]
        return {"run": request.run, "round": last.round, "metrics": _metrics(last), "items": replies}

    async def in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do what the groups are asked for in the thread, after what came before it.

        Raises:
            HTTPException: too few groups answered, or it could not be done at all.
        """
        async with self._turn:
            return await self._in_thread(work, *arguments)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopped:
            raise _later(503, STOPPING)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)
        except HTTPException:
            raise
        except UserError as error:
            raise _later(503, str(error)) from error
        except Exception as error:
            self.failed = error
            raise _later(503, f"the service has failed ({type(error).__name__})") from error

    def _batch(self, run: Run, request: ScoreRequest, items: Mapping[str, Item]) -> Batch | None:
        """The batch in which a request waits, which new answers join; None where all have their rewards."""
        number = request.round if request.round and request.resumed else 0  # to which the trainer may go back
        repeated = all((sent := run.sent(name)) and sent.digest == item.digest for name, item in items.items())
        if repeated and not 0 < number < run.number:
            return run.asked if run.asked and items.keys() & run.asked.items.keys() else None
        fits = run.has_place(request, items)
        if not (fits or number):
            waiting = len(run.open.items) if run.open else 0
            state = f"run '{request.run}' is at round {run.number}, and {waiting} answers to the next wait"
            raise HTTPException(409, f"{state}, which these contradict; a trainer that goes back sends resumed = true")
        more = items.keys() - (run.open.items.keys() if run.open and fits else ())
        waiting = sum(len(batch.items) for one in self._runs.values() for batch in (one.asked, one.open) if batch)
        if waiting + len(more) > MOST_WAITING:
            raise _later(429, f"{waiting} answers wait already")
        if not fits:
            if run.asked and number <= run.number:
                raise _later(503, f"the groups are being asked about round {run.number} of run '{request.run}'")
            run.past.go_back(number)
            run.refuse(409, "a trainer of this name has begun anew")
        if run.open is None:
            run.open = Batch(request.round, request.total if request.round else GATHER_SIZE)
            run.open.scored = asyncio.get_running_loop().create_task(self._answers(request.run, run, run.open))
            run.open.scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
        run.open.items |= items
        if len(run.open.items) >= run.open.size:
            run.open.full.set()
        return run.open

    async def _answers(self, name: str, run: Run, batch: Batch) -> Mapping[str, ServedAnswer]:
        """A batch's answers by id, once they are scored and written."""
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), None if batch.round else GATHER_SECONDS)
        async with self._turn:  # until then, a batch without a number takes more answers
            run.asked, run.open = batch, None
            last = run.past.rounds[-1] if run.past.rounds else None
            try:
                line: ServedLine = await self._in_thread(self._scored, name, batch, last)
                run.past.add(line)
            finally:
                run.asked = None
        return {answer.id: answer for answer in line.answers}

    def _scored(self, name: str, batch: Batch, last: ServedRound | None) -> ServedLine:
        """Ask the groups, apply the rule to its state after the last round, and write this one."""
        config, catalogue, groups = self._inputs.config, self._inputs.catalogue, self._inputs.groups
        ids = sorted(batch.items)  # in whichever order processes have sent them
        items = [batch.items[key] for key in ids]
        question_J = np.array([self._position[item.question_id] for item in items], dtype=np.int64)
        answers = parse_answers(config.task, [item.completion for item in items], question_J, catalogue)
        self._num_asked, started = self._num_asked + 1, time.monotonic()
        state = self._rule.restored(vars(last)) if last else self._rule.first()
        ask = self._rule.ask(state, answers, self._num_asked if config.pluralllm.fresh_contexts else 0)
        replies = groups.ask(ask)
        reward_J, after, fields = self._rule.result(state, answers, replies)
        held_out = bool(catalogue.held_out_Q[question_J].any())  # nothing is learned from such a round
        record = ServedRound(
            iteration=last.iteration + 1 if last else 1,
            round=batch.round or (last.round + 1 if last else 1),
            size=len(items),
            held_out=held_out,
            seconds=time.monotonic() - started,
            **(fields | self._rule.saved(state if held_out else after)),
        )
        alignment_J = replies.mean(f"{config.reward_metric} {TARGET_SIDE} reward")
        numbers_J = np.array((reward_J, alignment_J, answers.format_score_J)).T.tolist()
        scored = (
            ServedAnswer(id=key, digest=item.digest, reward=row[0], components={"alignment": row[1], "format": row[2]})
            for key, item, row in zip(ids, items, numbers_J, strict=True)
        )
        line = ServedLine(run=name, round=record, answers=tuple(scored))
        served.append(self._inputs.folder.path, line)
        self._closed(name, record)
        return line


async def _result(run: Run, batch: Batch) -> Mapping[str, ServedAnswer]:
    """A batch's answers, once they are scored."""
    batch.requests += 1
    try:
        await asyncio.wait({batch.scored})
        if batch.refusal is not None:
            raise batch.refusal
        return batch.scored.result()
    finally:
        batch.requests -= 1
        if not batch.requests and run.open is batch:  # the trainer has gone, and may come back with other answers
            run.refuse(503, "nobody waits for these answers")


def _metrics(last: ServedRound) -> dict[str, Any]:
    """What a trainer logs of a round; groups that are missing have no number."""
    metrics = last.model_dump(include={"fairness_index", "fell_back", "format_score"})
    metrics |= {f"weight/{name}": weight for name, weight in last.weights.items()}
    metrics |= {f"group/{name}": mean for name, mean in last.rewards.items() if mean is not None}
    return {**metrics, "missing_groups": len(last.missing_groups)}


def _later(status: int, reason: str) -> HTTPException:
    """A refusal of a request that may succeed after some seconds."""
    return HTTPException(status, reason, {"Retry-After": str(RETRY_SECONDS)})
