"""A node and the groups that it speaks for: its config, its owner's policy and ledger, and the groups' private answers.

Axis letters: Q public questions, K options.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, ledger_of
from appa_flwr.owner.owner_policy import OwnerPolicy, owner_policy_of
from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import Catalogue, Masks
from appa_flwr.protocol.refusals import Refused
from appa_flwr.survey import store
from appa_flwr.survey.split import LEAST_HELD_OUT
from appa_flwr.survey.types import Question, Survey
from client_app.memory import Memory, memory_of, read_array, survey_path
from pluralllm.data import GroupData, known_answers

Answers = Mapping[str, FloatArray]

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Node:
    """A node; `ledger` is None in a simulation, which has no owners."""

    context: Context
    config: Config
    policy: OwnerPolicy
    ledger: Ledger | None
    memory: Memory

    @classmethod
    def of(cls, context: Context) -> "Node":
        """The node that receives a message; UserError if its config, its owner's policy or the run's cannot be used."""
        config, node = Config.load(context.run_config), context.node_config
        ledger = ledger_of(node)
        if ledger is None and "partition-id" not in node:
            raise UserError(
                'node-config lacks `group`: start the SuperNode with --node-config \'group="..." data="..."\''
            )
        return cls(context, config, owner_policy_of(node), ledger, memory_of(context))

    # --- its survey -------------------------------------------------------------------------------------------------

    @property
    def hosted(self) -> tuple[str, ...]:
        """The groups this node speaks for.

        In a simulation node `partition-id` of `num-partitions` hosts every `num-partitions`-th group of the run's
        survey; deployed, the node's own config names its group (`group = "Kenya"`).
        """
        node = self.context.node_config
        if self.ledger is not None:
            return (str(node["group"]).strip(),)
        return self.survey.groups[int(str(node["partition-id"])) :: int(str(node["num-partitions"]))]

    @cached_property
    def survey(self) -> Survey:
        """The survey in a deployed node's own file, which its owner names (`data`), or in a simulated run's folder.

        Raises:
            UserError: the file cannot be read.
            Refused: a simulated node has not been greeted.
        """
        path = survey_path(self.context) if self.ledger is None else str(self.context.node_config["data"])
        if not path:
            raise Refused(refusals.FORGOTTEN)
        try:
            return _read(path, Path(path).stat().st_mtime_ns)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None

    def answers(self, group: str, public: Sequence[Question]) -> Answers:
        """A group's answers to the public questions, if question text and options are the same as the public ones.

        Raises:
            UserError: the survey does not have the group.
        """
        if group not in self.survey.answers:
            known = ", ".join(self.survey.groups)
            raise UserError(f"group '{group}' is not in the survey file, which has {known}")
        wanted = {question.question_id: question for question in public}
        shared = [question for question in self.survey.questions if question.question_id in wanted]
        same = {question.question_id for question in shared if question.matches(wanted[question.question_id])}
        if others := len(shared) - len(same):
            log.warning("%d questions are left out: text or options differ from the server's public ones", others)
        scaled = [q for q in shared if q.question_id in same and q.ordinal != wanted[q.question_id].ordinal]
        if scaled:
            log.warning("%d questions have another `ordinal` than the server's, which is used", len(scaled))
        return {key: shares for key, shares in self.survey.answers[group].items() if key in same}

    # --- what it remembers of the run -------------------------------------------------------------------------------

    def remembered(self, name: str) -> bytes:
        """An entry of the node's memory; Refused if it is missing, for example after a loss of the node's files."""
        try:
            return self.memory[name]
        except KeyError:
            raise Refused(refusals.FORGOTTEN) from None

    @cached_property
    def public(self) -> Catalogue:
        """The public questions; Refused where the server has sent none."""
        return messages.unpack_catalogue(messages.from_bytes(self.remembered("public")))

    @cached_property
    def masks(self) -> Masks:
        """The masks of the public questions, without their texts and features, which scoring does not need."""
        mask_QN = read_array(self.remembered("masks"))
        return Masks(mask_QN[:, 0], mask_QN[:, 1:])

    @property
    def groups(self) -> list["Group"]:
        """Those of the node's groups that take part; Refused where the server has sent no catalogue."""
        return [Group(self, name) for name in self.remembered("groups").decode().split("\n")]

    @property
    def context_hash(self) -> str:
        """See `appa_flwr.protocol.queries.context_hash`."""
        catalogue = self.remembered("catalogue").decode()
        return queries.context_hash(self.config, catalogue, self.memory.get("targets", b"").decode())


@dataclass(frozen=True, eq=False)
class Group:
    """A group of a node in a run, with its private answers."""

    node: Node
    name: str

    @cached_property
    def truth_QK(self) -> FloatArray:
        """All of the group's own answers, rows of NaN where it has none."""
        return read_array(self.node.remembered(f"truth {self.name}"))

    @property
    def data(self) -> GroupData:
        """The group's training answers, the only answers that become context."""
        return known_answers(self.name, self.truth_QK).only(self.node.masks.train_Q)

    @property
    def held_out(self) -> GroupData:
        """The group's answers to held-out questions; none on a deployed node that has fewer than `LEAST_HELD_OUT`."""
        answers = known_answers(self.name, self.truth_QK).only(~self.node.masks.train_Q)
        return answers if self.node.ledger is None or len(answers) >= LEAST_HELD_OUT else answers.first(0)

    def targets(self, context_seed: int = 0) -> FloatArray:
        """The group's target table (Q, K), or one from a fresh context if `context_seed` is not 0.

        Raises:
            Refused: the node has no table yet.
            ValueError: a fresh context, in a run whose config has one context for all answers.
        """
        node = self.node
        node.remembered("targets")
        if not context_seed:
            return read_array(node.remembered(f"targets {self.name}"))
        if not node.config.pluralllm.fresh_contexts:
            raise ValueError("the run scores all answers against one table")
        from client_app import predictor

        weight_P = messages.unpack_weights(messages.from_bytes(node.remembered("weights")))
        ours = predictor.load(node.config, weight_P, node.public)
        return ours.targets(self.data, context_seed=context_seed)

    def reference(self, reference: str, context_seed: int) -> FloatArray:
        """Distributions that answers are compared with, (Q, K); rows of NaN where there is none."""
        if reference == queries.TARGET_REFERENCE:
            return self.targets(context_seed)
        masks = self.node.masks
        if not self.node.policy.may(queries.TRUTH_REFERENCE):
            return np.full(masks.option_QK.shape, np.nan)
        # Answers are compared only with held-out answers: training answers are D_g, and enough rewards tell them.
        return np.where(masks.train_Q[:, None], np.nan, self.truth_QK)


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> Survey:
    return store.read(path)
