"""Trainers' answers as rounds of the rule: gathered, scored by the groups, written to served.jsonl, only then returned.

A rule works on a batch (`aggregation.Past`), but a process of a trainer brings a part of one, and most engines
bring one answer a request. Answers to a numbered round wait until all of it are there; a round of answers without a
number is what comes within `GATHER_SECONDS`, or the first `GATHER_SIZE`. Errors are HTTP's: 409 contradicts what was
sent before, 422 is wrong in itself, 429 and 503 say when the same request may succeed.

Axis letter: J answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np
from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from appa_flwr.core.errors import UserError
from appa_flwr.protocol.asks import TARGET_SIDE
from appa_flwr.run.records import ServedAnswer, ServedLine, ServedRound
from appa_flwr.run.run_files import SERVED
from appa_flwr.run.served import ServedRun, read_runs
from server_app.federation.answers import parse_answers
from server_app.federation.reward_rule import RewardRule
from server_app.inputs import RunInputs

GATHER_SECONDS, GATHER_SIZE = 2.0, 96
MOST_WAITING = 16_384  # answers that wait at once, of all runs
RETRY_SECONDS = 5  # after which a refused trainer may come again
STOPPING = "the service stops; what was scored is kept"

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(max_length=2**25)]  # with a limit, pydantic refuses half a surrogate pair
Count = Annotated[int, Field(ge=1, lt=2**53)]


class Item(BaseModel):
    """An answer to be scored; by `id` a retry is told from another answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    id: Name
    question_id: Name
    completion: Text

    @property
    def digest(self) -> str:
        """Of question and completion."""
        return hashlib.sha256(json.dumps([self.question_id, self.completion]).encode()).hexdigest()[:32]


class ScoreRequest(BaseModel):
    """The body of POST /v1/score.

    Attributes:
        run: a name for the training.
        round: that the answers are of, rising from one to the next; None = the next.
        size: of a numbered round, its answers in all; None if these are all.
        resumed: whether the trainer begins with this round, perhaps from a checkpoint: the round and those after it are
            given up, and so is what another round of this name waits for.
        items: the answers.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    run: RunName
    round: Count | None = None
    size: Count | None = None
    resumed: bool = False
    items: Annotated[list[Item], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len({item.id for item in self.items}) < len(self.items):
            raise ValueError("two items have the same id")
        if self.size is not None and self.size < len(self.items):
            raise ValueError(f"size is {self.size}, and there are {len(self.items)} items")
        return self

    @property
    def total(self) -> int:
        """Answers of the round."""
        return self.size or len(self.items)


Scored = tuple[ServedRound, Mapping[str, ServedAnswer]]
"""A round, and answers by id, its own among them."""


@dataclass(eq=False)
class Batch:
    """Answers of a trainer's run, by id, that the groups are asked about together.

    Attributes:
        run: the trainer's.
        round: its number; None = the next, once the groups are asked.
        size: answers with which it is full.
        requests: how many wait for it.
        full: ends its own wait for more answers.
        refusal: why the groups are not asked.
    """

    run: str
    round: int | None
    size: int
    items: dict[str, Item] = field(default_factory=dict)
    requests: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: HTTPException | None = None
    scored: asyncio.Task[Scored] = field(init=False)

    def takes(self, request: ScoreRequest) -> bool:
        """Whether all answers can be of this batch, which may have some of them."""
        if self.round != request.round or any(self.items.get(item.id, item) != item for item in request.items):
            return False
        num_new = sum(item.id not in self.items for item in request.items)
        return self.round is None or (self.size == request.total and len(self.items) + num_new <= self.size)


class Rounds:
    """Scores answers for any number of runs, one round at a time.

    Its coroutines belong to one event loop; the groups are asked, and lines written, in a thread beside it.

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
        self._turn, self._num_asked, self._stopped = asyncio.Lock(), 0, False
        self._runs = read_runs(inputs.folder.path)
        self._open: dict[str, Batch] = {}  # run -> batch that takes more answers
        self._asked: Batch | None = None  # that the groups are being asked about

    async def close(self) -> None:
        """Refuse whoever waits, and let the groups answer what they have been asked."""
        self._stopped = True
        for run in list(self._open):
            self._refuse(run, 503, STOPPING)
        async with self._turn:
            pass

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """Rewards, once they are written.

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
        past = self._runs.setdefault(request.run, ServedRun())
        batch = self._batch(request, past)
        last, answers = await self._result(batch) if batch else (past.rounds[-1], past.kept)
        replies = [answers[item.id].model_dump(exclude={"digest"}) for item in request.items]
        return {"run": request.run, "round": last.round, "metrics": _metrics(last), "items": replies}

    async def in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do what the groups are asked for in a thread, after what came before it.

        Raises:
            HTTPException: too few groups answered, or it could not be done at all.
        """
        async with self._turn:
            return await self._in_thread(work, *arguments)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopped:
            raise _later(503, STOPPING)
        try:
            return await asyncio.to_thread(work, *arguments)
        except HTTPException:
            raise
        except UserError as error:
            raise _later(503, str(error)) from error
        except Exception as error:
            self.failed = error
            raise _later(503, f"the service has failed ({type(error).__name__})") from error

    def _batch(self, request: ScoreRequest, past: ServedRun) -> Batch | None:
        """The batch in which a request waits, which new answers join; None where all have their rewards."""
        asked = self._asked if self._asked and self._asked.run == request.run else None
        there = self._open.get(request.run)
        number = asked.round if asked and asked.round else past.number  # of the last round that is no longer open
        sent = [(asked and asked.items.get(item.id)) or past.kept.get(item.id) for item in request.items]
        same = all(old and old.digest == item.digest for old, item in zip(sent, request.items, strict=True))
        if same and not (request.resumed and request.round and request.round < number):
            return asked if asked and any(item.id in asked.items for item in request.items) else None
        fits = not any(sent) and (request.round is None or request.round > number)
        fits = fits and (there is None or there.takes(request))
        if not fits and not (request.resumed and request.round):
            waiting = len(there.items) if there else 0
            state = f"run '{request.run}' is at round {number}, and {waiting} answers to the next wait"
            raise HTTPException(409, f"{state}, which these contradict; a trainer that goes back sends resumed = true")
        batches = [*self._open.values(), *([self._asked] if self._asked else [])]
        known = there.items if there and fits else {}
        num_new = sum(item.id not in known for item in request.items)
        if (waiting := sum(len(batch.items) for batch in batches)) + num_new > MOST_WAITING:
            raise _later(429, f"{waiting} answers wait already")
        if not fits and request.round:
            if asked:
                raise _later(503, f"the groups are being asked about round {number} of run '{request.run}'")
            past.go_back(request.round)
            self._refuse(request.run, 409, "a trainer of this name has begun anew")
        batch = self._open.get(request.run) or self._opened(request)
        batch.items |= {item.id: item for item in request.items}
        if len(batch.items) >= batch.size:
            batch.full.set()
        return batch

    def _opened(self, request: ScoreRequest) -> Batch:
        """A new batch, for the request's answers and others."""
        batch = Batch(request.run, request.round, request.total if request.round else GATHER_SIZE)
        batch.scored = asyncio.create_task(self._answers(batch))
        batch.scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
        self._open[request.run] = batch
        return batch

    def _refuse(self, run: str, status: int, reason: str) -> None:
        """Let an open batch go, and with it whoever waits for it."""
        if batch := self._open.pop(run, None):
            batch.refusal = _later(status, reason)
            batch.full.set()

    async def _result(self, batch: Batch) -> Scored:
        """A batch's answers, once they are scored; where no request waits for more of them, the trainer has gone."""
        batch.requests += 1
        try:
            await asyncio.wait({batch.scored})
            return batch.scored.result()
        finally:
            batch.requests -= 1
            if not batch.requests and self._open.get(batch.run) is batch:  # it may come back with other answers
                self._refuse(batch.run, 503, "nobody waits for these answers")

    async def _answers(self, batch: Batch) -> Scored:
        """A batch's answers, once they are scored and written."""
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), None if batch.round else GATHER_SECONDS)
        async with self._turn:  # until then, a batch without a number takes more answers
            if batch.refusal:
                raise batch.refusal
            past = self._runs[batch.run]
            batch.round = number = batch.round or past.number + 1
            self._asked = self._open.pop(batch.run)
            try:
                line = await self._in_thread(self._scored, batch, number, past.rounds[-1] if past.rounds else None)
                past.add(line)
            finally:
                self._asked = None
        return line.round, past.kept

    def _scored(self, batch: Batch, number: int, last: ServedRound | None) -> ServedLine:
        """Ask the groups, apply the rule to its state after the last round, and write this one."""
        config, catalogue, groups = self._inputs.config, self._inputs.catalogue, self._inputs.groups
        items = sorted(batch.items.values(), key=lambda item: item.id)  # in whichever order processes have sent them
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
            round=number,
            size=len(items),
            held_out=held_out,
            seconds=time.monotonic() - started,
            **(fields | self._rule.saved(state if held_out else after)),
        )
        alignment_J = replies.mean(f"{config.reward_metric} {TARGET_SIDE} reward")
        numbers_J = zip(reward_J.tolist(), alignment_J.tolist(), answers.format_score_J.tolist(), strict=True)
        scored = (
            ServedAnswer(id=item.id, digest=item.digest, reward=reward, components={"alignment": mean, "format": score})
            for item, (reward, mean, score) in zip(items, numbers_J, strict=True)
        )
        line = ServedLine(run=batch.run, round=record, answers=tuple(scored))
        self._inputs.folder.append(SERVED, line)
        self._closed(batch.run, record)
        return line


def _metrics(last: ServedRound) -> dict[str, Any]:
    """What a trainer logs of a round; groups that are missing have no number."""
    metrics = last.model_dump(include={"fairness_index", "fell_back", "format_score"})
    metrics |= {f"weight/{name}": weight for name, weight in last.weights.items()}
    metrics |= {f"group/{name}": mean for name, mean in last.rewards.items() if mean is not None}
    return {**metrics, "missing_groups": len(last.missing_groups)}


def _later(status: int, reason: str) -> HTTPException:
    """A refusal of a request that may succeed after some seconds."""
    return HTTPException(status, reason, {"Retry-After": str(RETRY_SECONDS)})
