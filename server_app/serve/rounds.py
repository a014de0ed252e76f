"""Score trainers' answers in rounds of the rule: gather answers, ask the groups, write served.jsonl, then reply.

A rule needs a batch (`rules.RuleContext`), but each process of a trainer sends a part of a batch, and most engines
send one answer per request. A numbered round waits until all its answers have arrived. A round without a number takes
the answers that arrive within `GATHER_SECONDS`, or ends at `GATHER_SIZE` answers. HTTP errors: 409 contradicts earlier
requests, 422 is invalid, 429 and 503 tell when the same request may succeed.

Axis letter: J answers.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from appa_flwr.core.errors import UserError
from appa_flwr.protocol.queries import TARGET_REFERENCE
from appa_flwr.run.records import ServedAnswer, ServedLine, ServedRound
from appa_flwr.run.schema import SERVED
from appa_flwr.run.served import ServedRun, read_runs
from server_app import log
from server_app.federation.responses import parse_responses
from server_app.inputs import RunInputs
from server_app.reward_rule import RewardRule

GATHER_SECONDS, GATHER_SIZE = 2.0, 96
MOST_WAITING = 16_384  # most answers that wait at once, over all runs
RETRY_SECONDS = 5  # wait of a refused trainer before its next try
STOPPING = "the service stops; what was scored is kept"


RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(max_length=2**25)]  # with a limit, pydantic refuses lone surrogates
Count = Annotated[int, Field(ge=1, lt=2**53)]


class Item(BaseModel):
    """An answer to be scored; `id` tells a retry from a new answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    id: Name
    question_id: Name
    completion: Text

    @property
    def digest(self) -> str:
        """Hash of question and completion."""
        return hashlib.sha256(json.dumps([self.question_id, self.completion]).encode()).hexdigest()[:32]


class ScoreBody(BaseModel):
    """The body of POST /v1/score: answers of a training run.

    Attributes:
        round: number of the round of these answers; numbers rise from round to round. None = the next round.
        size: number of all answers in a numbered round; None if this request has all of them.
        resumed: whether the trainer starts at this round, perhaps from a checkpoint. This round and later rounds are
            then discarded, and waiting answers of another round of this run are refused.
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
        if not len(self.items) <= self.total <= MOST_WAITING:  # a larger round would never be full
            raise ValueError(f"size is {self.total}; it must be from {len(self.items)} (the items) to {MOST_WAITING}")
        return self

    @property
    def total(self) -> int:
        """Number of answers in the round."""
        return self.size or len(self.items)


Relation = Literal["repeated", "pending", "next", "back", "contradiction"]
Scored = tuple[ServedRound, Mapping[str, ServedAnswer]]
"""A scored round, and scored answers by id, including those of the round."""


@dataclass(eq=False)
class Batch:
    """Answers of a trainer's run, by id, that the groups score together."""

    run: str  # name of the trainer's run
    round: int | None  # None = the next number, chosen when the groups are asked
    size: int  # number of answers of a full batch
    items: dict[str, Item] = field(default_factory=dict)
    requests: int = 0  # number of requests that wait for the batch
    parts: int = 0  # number of requests that brought answers
    notice: str = ""  # for the replies
    full: asyncio.Event = field(default_factory=asyncio.Event)  # set to end the wait for more answers
    refusal: HTTPException | None = None  # for the waiting requests if the groups are not asked
    scored: asyncio.Task[Scored] = field(init=False)

    def takes(self, request: ScoreBody) -> bool:
        """True if all answers of the request fit into this batch, which may already hold some."""
        if self.round != request.round or any(self.items.get(item.id, item) != item for item in request.items):
            return False
        return self.round is None or self.size == request.total >= len(self.items) + self.num_new(request)

    def num_new(self, request: ScoreBody) -> int:
        """Number of answers of the request that this batch lacks."""
        return sum(item.id not in self.items for item in request.items)


def relation(
    request: ScoreBody, kept: Mapping[str, ServedAnswer], last: int, *, asked: Batch | None, opened: Batch | None
) -> Relation:
    """What a request is to its trainer's run: the first row of the table that applies.

    `kept` has the scored answers by id, the groups score the batch `asked` now, the batch `opened` takes more answers,
    and no round up to number `last` does. Answers are "equal" if all were sent before with the same texts, and "new" if
    none was. A request is "back" if it is `resumed` and has a round.

    | answers                    | round                | relation      | what follows                              |
    | -------------------------- | -------------------- | ------------- | ----------------------------------------- |
    | equal, some in `asked`     | not back before last | pending       | wait for `asked`                          |
    | equal                      | not back before last | repeated      | reply with the kept rewards               |
    | new, and `opened` has room | none, or after last  | next          | add to `opened`, or open a batch          |
    | any                        | back                 | back          | drop `opened` and this and later rounds   |
    | any                        | any                  | contradiction | refuse, and change nothing                |
    """
    back = request.round if request.resumed else None
    earlier = [(asked and asked.items.get(item.id)) or kept.get(item.id) for item in request.items]
    equal = all(old and old.digest == item.digest for old, item in zip(earlier, request.items, strict=True))
    if equal and (back is None or back >= last):
        return "pending" if asked and any(item.id in asked.items for item in request.items) else "repeated"
    follows = request.round is None or request.round > last
    if follows and not any(earlier) and (opened is None or opened.takes(request)):
        return "next"
    return "contradiction" if back is None else "back"


class Rounds:
    """Scores answers for any number of trainers' runs, one round at a time.

    The coroutines run in one event loop; a separate thread asks the groups and writes the lines. `closed` is called
    with the name of a trainer's run and its round, after the round is written. `failed` is an error after which no
    request can succeed, or None.

    Raises:
        UserError: the rounds served earlier cannot be read.
    """

    def __init__(self, inputs: RunInputs, *, closed: Callable[[str, ServedRound], None]) -> None:
        self.failed: Exception | None = None
        self._inputs, self._closed = inputs, closed
        self._rule = RewardRule(inputs.groups.names, inputs.config)
        self._position = {question.question_id: q for q, question in enumerate(inputs.catalogue.questions)}
        self._turn, self._num_asked, self._stopped = asyncio.Lock(), 0, False
        self._runs = read_runs(inputs.folder.path)
        self._open: dict[str, Batch] = {}  # run -> batch that takes more answers
        self._asked: Batch | None = None  # batch that the groups are scoring now
        self._joint = set[str]()  # runs of whose joint rounds log and reply have told

    async def close(self) -> None:
        """Refuse all waiting requests, and wait for the groups' replies to the current one."""
        self._stopped = True
        for run in list(self._open):
            self._refuse(run, 503, STOPPING)
        async with self._turn:
            pass

    async def score(self, request: ScoreBody) -> dict[str, Any]:
        """Score answers; return the body of the reply after the rewards are written.

        Raises:
            HTTPException: see the module's docstring; no answer of a refused request is queued.
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
        notice = {"notice": batch.notice} if batch and batch.notice else {}
        return {"run": request.run, "round": last.round, "metrics": _metrics(last), "items": replies, **notice}

    async def in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run `work`, which asks the groups, in a thread after all earlier ones; every error is an HTTPException."""
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

    def _batch(self, request: ScoreBody, past: ServedRun) -> Batch | None:
        """The batch that a request waits for, with its new answers; None if all its answers have rewards."""
        asked = self._asked if self._asked and self._asked.run == request.run else None
        opened = self._open.get(request.run)
        last = asked.round if asked and asked.round else past.number
        kind = relation(request, past.kept, last, asked=asked, opened=opened)
        if kind == "repeated":
            return None
        if kind == "pending":
            return asked
        if kind == "contradiction":
            waiting = len(opened.items) if opened else 0
            state = f"run '{request.run}' is at round {last}, and {waiting} answers to the next wait"
            sent = {*past.kept, *(asked.items if asked else ()), *(opened.items if opened else ())}
            if again := next((item.id for item in request.items if item.id in sent), ""):
                state += f"; an answer '{again}' has been sent"
            raise HTTPException(409, f"{state}, which these contradict; a trainer that goes back sends resumed = true")
        batches = [*self._open.values(), *([self._asked] if self._asked else [])]
        num_new = opened.num_new(request) if opened and kind == "next" else len(request.items)
        if (waiting := sum(len(batch.items) for batch in batches)) + num_new > MOST_WAITING:
            raise _later(429, f"{waiting} answers wait already")
        if kind == "back" and request.round:
            if asked:
                raise _later(503, f"the groups are being asked about round {last} of run '{request.run}'")
            past.go_back(request.round)
            self._refuse(request.run, 409, "a trainer of this name has begun anew")
        batch = self._open.get(request.run) or self._opened(request)
        if kind == "back" and request.round and last >= request.round:
            self._note(batch, f"goes back from round {last} to {request.round}, as a trainer that begins or resumes")
        batch.parts += num_new > 0
        batch.items |= {item.id: item for item in request.items}
        if len(batch.items) >= batch.size:
            batch.full.set()
        return batch

    def _note(self, batch: Batch, what: str) -> None:
        """Tell log and replies what is right for one trainer, and wrong if two trainers have the run's name."""
        batch.notice = f"run '{batch.run}': {what}; two trainers need two names"
        log.warning(batch.notice)

    def _opened(self, request: ScoreBody) -> Batch:
        """Open a batch for the answers of this request and of later requests."""
        batch = Batch(request.run, request.round, request.total if request.round else GATHER_SIZE)
        batch.scored = asyncio.create_task(self._answers(batch))
        batch.scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # if no request waits
        self._open[request.run] = batch
        return batch

    def _refuse(self, run: str, status: int, reason: str) -> None:
        """Drop the open batch of a run, and refuse all requests that wait for it."""
        if batch := self._open.pop(run, None):
            batch.refusal = _later(status, reason)
            batch.full.set()

    async def _result(self, batch: Batch) -> Scored:
        """Wait for the scores of a batch. An open batch is dropped when the last request that waits for it ends."""
        batch.requests += 1
        try:
            await asyncio.wait({batch.scored})
            return batch.scored.result()
        finally:
            batch.requests -= 1
            if not batch.requests and self._open.get(batch.run) is batch:  # the trainer may return with other answers
                self._refuse(batch.run, 503, "nobody waits for these answers")

    async def _answers(self, batch: Batch) -> Scored:
        """Gather a batch's answers, then score them and write the round."""
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), None if batch.round else GATHER_SECONDS)
        async with self._turn:  # until then, a batch without a number takes more answers
            if batch.refusal:
                raise batch.refusal
            past = self._runs[batch.run]
            batch.round = number = batch.round or past.number + 1
            if batch.parts > 1 and batch.run not in self._joint:
                self._joint.add(batch.run)
                self._note(batch, f"round {number} joins {batch.parts} requests, as of one trainer's processes")
            self._asked = self._open.pop(batch.run)
            try:
                line = await self._in_thread(self._scored, batch, number, past.rounds[-1] if past.rounds else None)
                past.add(line)
            finally:
                self._asked = None
        return line.round, past.kept

    def _scored(self, batch: Batch, number: int, last: ServedRound | None) -> ServedLine:
        """Ask the groups, apply the rule to its state after the last round, and write the new round."""
        config, catalogue, groups = self._inputs.config, self._inputs.catalogue, self._inputs.groups
        items = sorted(batch.items.values(), key=lambda item: item.id)  # the order of arrival must not matter
        question_J = np.array([self._position[item.question_id] for item in items], dtype=np.int64)
        answers = parse_responses(config.task, [item.completion for item in items], question_J, catalogue)
        self._num_asked, started = self._num_asked + 1, time.monotonic()
        state = self._rule.restored(vars(last)) if last else self._rule.first()
        replies = groups.ask(self._rule.query(answers, self._num_asked), history=True)
        reward_J, after, fields = self._rule.result(state, answers, replies)
        held_out = bool(catalogue.held_out_Q[question_J].any())  # such a round leaves the rule's state as it was
        record = ServedRound(
            iteration=last.iteration + 1 if last else 1,
            round=number,
            size=len(items),
            held_out=held_out,
            seconds=time.monotonic() - started,
            **(fields | self._rule.saved(state if held_out else after)),
        )
        alignment_J = replies.each(f"{config.reward_metric} {TARGET_REFERENCE} reward").mean(axis=0)
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
    """Metrics of a round for a trainer's log; missing groups have none."""
    metrics = last.model_dump(include={"fairness_index", "fell_back", "format_score"})
    metrics |= {f"weight/{name}": weight for name, weight in last.weights.items()}
    metrics |= {f"group/{name}": mean for name, mean in last.rewards.items() if mean is not None}
    return {**metrics, "missing_groups": len(last.missing_groups)}


def _later(status: int, reason: str) -> HTTPException:
    """Error for a request that may succeed after `RETRY_SECONDS`."""
    return HTTPException(status, reason, {"Retry-After": str(RETRY_SECONDS)})
