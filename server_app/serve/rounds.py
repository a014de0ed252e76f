"""Trainers' answers made rounds of the rule: gathered, scored by the groups, written to served.jsonl, only then given.

A rule works on a batch (`aggregation.rule.Past`), but a process of a trainer brings a part of one, and most engines
bring one answer a request. Answers to a numbered round wait until all of it are there; a round of answers without a
number is what comes within `GATHER_SECONDS`, or the first `GATHER_SIZE`. Errors are HTTP's: 409 contradicts what was
sent before, 422 is wrong in itself, 429 and 503 say when the same request may succeed.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from server_app.federation.reward_rule import RuleState, reward_rule
from server_app.inputs import RunInputs
from server_app.serve.requests import Item, ScoreRequest

GATHER_SECONDS, GATHER_SIZE = 2.0, 96
MOST_WAITING = 16_384  # answers that wait at once, of all runs
MOST_KEPT = 65_536  # answers of a run that get the same reward when they are sent again
BUSY_SECONDS, RETRY_SECONDS = 5, 10  # after which a refused trainer may come again


@dataclass(eq=False)
class Batch:
    """Answers, by id, that the groups are asked about together; `round` is None where the trainer gives none."""

    round: int | None
    size: int
    done: asyncio.Future[Mapping[str, ServedAnswer]]
    items: dict[str, Item] = field(default_factory=dict)
    asked: bool = False

    def takes(self, new: Mapping[str, Item], size: int) -> bool:
        """Whether these answers are of this round, or can be."""
        same = all(self.items.get(name, item).digest == item.digest for name, item in new.items())
        total = len(self.items.keys() | new.keys())
        return same and self.size == size and total <= (len(self.items) if self.asked else size)


@dataclass
class Run(ServedRun):
    """A trainer's run.

    Attributes:
        kept: scored answers by id.
        batches: that wait or are being scored.
        lost: digest -> ids of answers whose engine gives none, and may not have had the reward.
    """

    kept: dict[str, ServedAnswer] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    lost: dict[str, list[str]] = field(default_factory=dict)

    def add(self, line: ServedLine) -> None:
        """Take in the next line."""
        if line.round.round <= self.number:  # the trainer has gone back, and gives ids anew
            self.kept.clear()
        super().add(line)
        self.kept |= {answer.id: answer for answer in line.answers}
        for name in list(self.kept)[:-MOST_KEPT]:
            del self.kept[name]


class Rounds:
    """Scores answers for any number of runs, one round at a time.

    Its coroutines belong to one event loop; a thread of its own asks the groups and writes the lines.

    Args:
        run: whose groups score, and whose folder keeps what comes of it.
        closed: called with each trainer's run and round, once it is written.

    Attributes:
        failed: an error that no later request can be spared, if there was one.

    Raises:
        UserError: what earlier sessions have written cannot be read.
    """

    def __init__(self, run: RunInputs, *, closed: Callable[[str, ServedRound], None]) -> None:
        self.failed: Exception | None = None
        self._groups, self._catalogue, self._config = run.groups, run.catalogue, run.config
        self._folder, self._closed = run.folder.path, closed
        self._rule = reward_rule(run.groups, run.config)
        self._position = {question.question_id: q for q, question in enumerate(run.catalogue.questions)}
        self._turn, self._worker = asyncio.Lock(), ThreadPoolExecutor(1, "rewards")
        self._num_waiting, self._num_asked, self._stopped = 0, 0, False
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps none alive
        self._runs: dict[str, Run] = {}
        keep_lines(self._folder / served.SERVED_FILE)
        for line in served.read_lines(self._folder):
            known = self._runs.setdefault(line.run, Run())
            known.add(line)
            known.lost = {}
            for answer in line.answers:  # a kill may have come before they were given
                known.lost.setdefault(answer.digest, []).append(answer.id)

    async def close(self) -> None:
        """Refuse whoever waits, and let the groups answer what they have been asked."""
        self._stopped = True
        for batch in (batch for run in self._runs.values() for batch in run.batches):
            if not batch.asked:
                batch.done.set_exception(_stopping())
        await asyncio.to_thread(self._worker.shutdown)

    async def score(self, asked: ScoreRequest) -> dict[str, Any]:
        """Rewards, once they are written.

        Returns:
            body of the reply: run, the last round with its metrics, and of each item id, reward and components.

        Raises:
            HTTPException: see above; nothing of a refused request is queued.
        """
        if self._stopped:
            raise _stopping()
        if self._num_waiting + len(asked.items) > MOST_WAITING:
            raise _later(429, f"{self._num_waiting} answers wait already", BUSY_SECONDS)
        self._check(asked)
        run = self._runs.setdefault(asked.run, Run())
        kept = self._kept(run, asked)
        batches = self._batches(run, asked, {item.id: item for item in asked.items if item.id not in kept})
        self._num_waiting += len(asked.items)
        try:
            for batch in batches:
                kept |= await asyncio.shield(batch.done)
        finally:
            self._num_waiting -= len(asked.items)
            mine = set(map(id, asked.items))
            for batch in batches:
                if batch.round and not batch.asked:  # the trainer has gone, and may come back with other answers
                    batch.items = {name: item for name, item in batch.items.items() if id(item) not in mine}
            run.batches = [batch for batch in run.batches if batch.items]
        items = [_reply(kept[item.id]) for item in asked.items]
        return {"run": asked.run, "round": run.number, "metrics": _metrics(run.rounds[-1]), "items": items}

    async def sample(self, name: str, question_id: str, completion: str) -> dict[str, Any]:
        """Reward and components of one answer of an engine that gives no id.

        An equal answer is another sample, unless the earlier one's engine went away before it had the reward.
        """
        run = self._runs.setdefault(name, Run())
        item = Item(id=uuid.uuid4().hex, question_id=question_id, completion=completion)
        if lost := run.lost.get(item.digest):
            item = item.model_copy(update={"id": lost.pop()})
        try:
            reply: dict[str, Any] = (await self.score(ScoreRequest(run=name, items=[item])))["items"][0]
            return reply
        except BaseException:
            if item.id in run.kept or any(item.id in batch.items for batch in run.batches):
                run.lost.setdefault(item.digest, []).append(item.id)
            raise

    async def in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do what the groups are asked for in the thread, after what came before it.

        Raises:
            HTTPException: too few groups answered, or it could not be done at all.
        """
        async with self._turn:
            return await self._in_thread(work, *arguments)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopped:
            raise _stopping()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)
        except HTTPException:
            raise
        except UserError as error:
            raise _later(503, str(error), RETRY_SECONDS) from error
        except Exception as error:
            self.failed = error
            raise _later(503, f"the service has failed ({type(error).__name__})", RETRY_SECONDS) from error

    def _check(self, asked: ScoreRequest) -> None:
        for item in asked.items:
            if item.question_id not in self._position:
                known = next(iter(self._position))
                raise HTTPException(422, f"answer '{item.id}': no question_id '{item.question_id}' (one is '{known}')")
        if len({item.id for item in asked.items}) < len(asked.items):
            raise HTTPException(422, "items: two have the same id")

    def _kept(self, run: Run, asked: ScoreRequest) -> dict[str, ServedAnswer]:
        """Those of the answers that have their rewards."""
        kept = {item.id: run.kept[item.id] for item in asked.items if item.id in run.kept}
        same = all(kept[item.id].digest == item.digest for item in asked.items if item.id in kept)
        if asked.round is None or asked.round > run.number:
            if not same:
                raise HTTPException(409, "items: an id that was given to another answer")
            return kept
        if same and len(kept) == len(asked.items) and (asked.round == run.number or not asked.resumed):
            return kept
        if not asked.resumed:
            over = f"round {asked.round} of run '{asked.run}' is over, with other answers"
            raise HTTPException(409, f"{over}; a trainer that goes back to it sends resumed = true")
        return {}

    def _batches(self, run: Run, asked: ScoreRequest, new: dict[str, Item]) -> set[Batch]:
        """The batches that new answers wait in, which they join."""
        there = [batch for batch in run.batches if bool(batch.round) == bool(asked.round)]
        size = (asked.size or len(asked.items)) if asked.round else GATHER_SIZE
        if new and asked.round and there and not (there[0].round == asked.round and there[0].takes(new, size)):
            self._give_up(run, there[0], asked)
            there = []
        joined = set()
        for batch in there:
            for name in batch.items.keys() & new.keys():
                if batch.items[name].digest != new[name].digest:
                    raise HTTPException(409, f"items: id '{name}' is that of another answer, which waits")
                batch.items[name] = new.pop(name)
                joined.add(batch)
        if new:
            batch = next((batch for batch in there if not batch.asked), None) or self._opened(run, asked, size)
            before, batch.items = len(batch.items), batch.items | new
            joined.add(batch)
            if before < batch.size <= len(batch.items):
                self._begin(asked.run, run, batch, 0.0)
        return joined

    def _give_up(self, run: Run, batch: Batch, asked: ScoreRequest) -> None:
        """Have a trainer that begins anew take the place of the one whose round waits."""
        there = f"{len(batch.items)} of {batch.size} answers to round {batch.round} of run '{asked.run}' wait"
        if not asked.resumed:
            raise HTTPException(409, f"{there}, and these do not fit; does another trainer use the name?")
        run.batches.remove(batch)
        if not batch.asked:
            batch.done.set_exception(HTTPException(409, f"{there} no more: a trainer of this name has begun anew"))

    def _opened(self, run: Run, asked: ScoreRequest, size: int) -> Batch:
        batch = Batch(asked.round, size, asyncio.get_running_loop().create_future())
        batch.done.add_done_callback(lambda done: done.exception())  # perhaps nobody waits for it
        run.batches.append(batch)
        if asked.round is None:
            self._begin(asked.run, run, batch, GATHER_SECONDS)
        return batch

    def _begin(self, name: str, run: Run, batch: Batch, seconds: float) -> None:
        """Have a batch scored after some seconds, when its turn comes, if it is whole then."""

        async def ask() -> None:
            await asyncio.sleep(seconds)
            async with self._turn:  # more gathers while other rounds are scored
                whole = batch.items and (batch.round is None or len(batch.items) >= batch.size)
                if batch.asked or batch.done.done() or not whole:
                    return
                batch.asked = True
                try:
                    line = await self._in_thread(self._scored, name, run, batch)
                    run.add(line)
                    batch.done.set_result({answer.id: answer for answer in line.answers})
                except HTTPException as refused:
                    batch.done.set_exception(refused)
                finally:
                    run.batches = [other for other in run.batches if other is not batch]

        task = asyncio.get_running_loop().create_task(ask())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _scored(self, name: str, run: Run, batch: Batch) -> ServedLine:
        """Ask the groups, apply the rule, and write the round."""
        config = self._config
        items = [batch.items[key] for key in sorted(batch.items)]  # in whichever order processes have sent them
        question_J = np.array([self._position[item.question_id] for item in items], dtype=np.int64)
        answers = parse_answers(config.task, [item.completion for item in items], question_J, self._catalogue)
        self._num_asked, started = self._num_asked + 1, time.monotonic()
        last = run.last(before=batch.round or math.inf)
        state = self._state(last)
        ask = self._rule.ask(state, answers, self._num_asked if config.pluralllm.fresh_contexts else 0)
        answer = self._groups.ask(ask, label=self._num_asked)
        scored = self._rule.result(state, answers, answer)
        held_out = bool(self._catalogue.held_out_Q[question_J].any())  # nothing is learned from such a round
        after = self._rule.saved(state if held_out else scored.state)
        record = ServedRound(
            iteration=1 + (last.iteration if last else 0),
            round=batch.round or 1 + run.number,
            size=len(items),
            held_out=held_out,
            fairness_index=scored.fairness_index,
            fell_back=scored.fell_back,
            weights=scored.weights,
            history=after["history"],
            answered=tuple(name for name, answered in after["answered"].items() if answered),
            lead=after["lead"],
            rewards=scored.rewards,
            reward=float(scored.aggregate_J.mean()),
            format_score=float(answers.format_score_J.mean()),
            missing_groups=scored.missing,
            seconds=time.monotonic() - started,
            group_seconds=dict(self._groups.seconds),
        )
        alignment_J = answer.mean(f"{config.reward_metric} {TARGET_SIDE} reward")
        columns = (scored.aggregate_J, alignment_J, answers.format_score_J)
        numbers = (
            dict(zip(("reward", "alignment", "format"), row, strict=True)) for row in np.array(columns).T.tolist()
        )
        given = (ServedAnswer(id=item.id, digest=item.digest, **row) for item, row in zip(items, numbers, strict=True))
        line = ServedLine(run=name, round=record, answers=tuple(given))
        served.append(self._folder, line)
        self._closed(name, record)
        return line

    def _state(self, last: ServedRound | None) -> RuleState:
        """The rule's state after a round; a group that is new since has never answered."""
        if last is None:
            return self._rule.first()
        answered = {name: name in last.answered for name in self._groups.names}
        return self._rule.restored({"history": last.history, "answered": answered, "lead": last.lead})


def _reply(kept: ServedAnswer) -> dict[str, Any]:
    components = {"alignment": kept.alignment, "format": kept.format}
    return {"id": kept.id, "reward": kept.reward, "components": components}


def _metrics(closed: ServedRound) -> dict[str, Any]:
    """What a trainer logs of a round; groups that are missing have no number."""
    found = closed.model_dump(include={"fairness_index", "fell_back", "format_score"})
    found |= {f"weight/{name}": weight for name, weight in closed.weights.items()}
    found |= {f"group/{name}": mean for name, mean in closed.rewards.items() if mean is not None}
    return {**found, "missing_groups": len(closed.missing_groups)}


def _later(status: int, reason: str, seconds: int) -> HTTPException:
    """A refusal of a request that may succeed after some seconds."""
    return HTTPException(status, reason, {"Retry-After": str(seconds)})


def _stopping() -> HTTPException:
    return _later(503, "the service stops; what was scored is kept", RETRY_SECONDS)
