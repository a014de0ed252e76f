"""A node and what it speaks for: its config, its owner's policy and ledger, its groups and their private answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, ledger_of
from appa_flwr.owner.owner_policy import OwnerPolicy, owner_policy_of
from appa_flwr.protocol import refusals
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.masks import Member
from appa_flwr.secure.roster import (
    KEY_SUFFIX,
    LEAST_GROUPS,
    ROSTER_FILE,
    Roster,
    own_key,
    read_file,
    read_roster,
)
from appa_flwr.survey import store
from appa_flwr.survey.types import FloatArray, Question, Survey
from client_app.memory import Memory, memory_of

Answers = Mapping[str, FloatArray]

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Party:
    """A node; `ledger` is None in a simulation, which has no owners."""

    node: Mapping[str, object]
    run_id: str
    config: Config
    policy: OwnerPolicy
    ledger: Ledger | None
    memory: Memory

    @classmethod
    def of(cls, context: Context) -> Party:
        """The node that a message meets.

        Raises:
            UserError: its config, its owner's policy or the run's config cannot be used.
        """
        items = context.run_config.items()
        config = Config.load({key: value for key, value in items if isinstance(value, bool | int | float | str)})
        node = context.node_config
        return cls(node, str(context.run_id), config, owner_policy_of(node), ledger_of(node), memory_of(context))

    @property
    def hosted(self) -> tuple[str, ...]:
        """The groups this node speaks for.

        In a simulation node `partition-id` of `num-partitions` hosts every `num-partitions`-th group of the run's
        survey; deployed, the node's own config names its group or groups (`group = "Kenya"`, several separated by
        semicolons).

        Raises:
            UserError: the node's config names none, or the run's survey cannot be read.
        """
        if self.ledger is not None:
            return tuple(name for part in str(self.node["group"]).split(";") if (name := part.strip()))
        if "partition-id" not in self.node:
            raise UserError(
                'node-config lacks `group`: start the SuperNode with --node-config \'group="..." data="..."\''
            )
        return self.survey.groups[int(str(self.node["partition-id"])) :: int(str(self.node["num-partitions"]))]

    @cached_property
    def survey(self) -> Survey:
        """A deployed node's own file, which only its owner names (`data`); a simulation's in the run's folder.

        Raises:
            UserError: it cannot be read.
            Refused: a simulated node has not been greeted.
        """
        path = str(self.node.get("data", ""))
        if self.ledger is None:
            path = self.remembered("survey").decode()
        elif not path:
            raise UserError("node-config lacks `data`: name the group's own survey file, as `appa survey` writes it")
        try:
            return _read(path, Path(path).stat().st_mtime_ns)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None

    def answers(self, groups: Sequence[str], public: Sequence[Question]) -> dict[str, Answers | UserError]:
        """These groups' answers to the public questions; one counts if its options are the public ones, in their order.

        Returns:
            Each group's answers, or why it has none that can be used.
        """
        wanted, survey = {question.question_id: question.options for question in public}, self.survey
        same = {q.question_id for q in survey.questions if wanted.get(q.question_id) == q.options}
        if reordered := sum(q.question_id in wanted for q in survey.questions) - len(same):
            log.warning("%d questions are left out: their options differ from the server's public ones", reordered)
        known = ", ".join(survey.groups)
        return {
            group: {key: shares for key, shares in survey.answers[group].items() if key in same}
            if group in survey.answers
            else UserError(f"group '{group}' is not in the survey file, which has {known}")
            for group in groups
        }

    def remembered(self, name: str) -> bytes:
        """An entry of the node's memory.

        Raises:
            Refused: it is not there, as after a loss of the node's files.
        """
        try:
            return self.memory[name]
        except KeyError:
            raise Refused(refusals.FORGOTTEN) from None

    def facts(self) -> AbstractContextManager[MutableMapping[str, bytes]]:
        """What the node must not forget of secure sums: in its ledger, in one transaction."""
        return nullcontext(self.memory) if self.ledger is None else self.ledger.facts()

    @cached_property
    def roster(self) -> Roster:
        """The roster beside the group's data, if it is the one that its owner has pinned.

        Raises:
            Refused: none is pinned.
            UserError: it cannot be read, or is another one.
        """
        if not self.policy.roster:
            raise Refused(refusals.NO_ROSTER)
        path = Path(str(self.node.get("data", ""))).with_name(ROSTER_FILE)
        roster = read_roster(read_file(path), source=str(path), pinned=self.policy.roster)
        if roster.sha256 != self.policy.roster:
            raise UserError(f"{path}: is not the roster that the owner's policy pins; run appa group pin again")
        return roster

    def member(self, group: str) -> Member:
        """The group's part in secure sums.

        Raises:
            Refused: no roster is pinned, or the node hosts several groups.
            UserError: the roster or the private key cannot be used.
        """
        roster = self.roster
        if len(self.hosted) > 1:
            raise Refused(refusals.SEVERAL_GROUPS)
        key = own_key(Path(str(self.node.get("data", ""))).with_suffix(KEY_SUFFIX))
        least = self.policy.least_cohort or max(LEAST_GROUPS, len(roster.names) - 1)
        return Member(group, key, roster, least=least, changes=self.policy.cohort_changes, facts=self.facts)


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Survey:
    return store.read(path)
