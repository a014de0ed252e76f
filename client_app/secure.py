"""A node's part in secure sums: its groups' keys, rounds sealed ahead, masked numbers and unmasking.

A group's standing under a rule lies with the server, sealed under a key that the group derives from its own: it counts
only where the sum has come about, and a resumed run gives it back.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import ledger_of
from appa_flwr.owner.owner_policy import OwnerPolicy, owner_policy_of
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.secure import terms
from appa_flwr.secure.member import Member, Remember, pair_secrets
from appa_flwr.secure.messages import Prepared
from appa_flwr.secure.primitives import derive, framed, public_key, seal, unseal
from appa_flwr.secure.refusals import OTHER_WORLD, Refused
from appa_flwr.secure.roster import KEY_SUFFIX, ROSTER_FILE, Roster, own_key, pinned_roster, read_roster
from appa_flwr.secure.terms import Standing
from client_app import protection, state, summands, survey_answers
from client_app.summands import Group, Summand

_STANDING = "<qdd"
_KEPT_STEPS = 16  # of a simulated group, whose rounds nobody but itself could replay


def keys(context: Context) -> tuple[dict[str, bytes], bytes]:
    """Public key of each group here, and the roster's file where the owner keeps it beside the data."""
    config = survey_answers.context_config(context)
    names = survey_answers.my_groups(context)
    path = Path(str(context.node_config.get("data") or "data")).with_name(ROSTER_FILE)
    roster = path.read_bytes() if survey_answers.deployed(context.node_config) and path.is_file() else b""
    return {name: public_key(_private_key(config, context, name)) for name in names}, roster


def prepare(message: Message, context: Context) -> tuple[dict[str, list[Prepared]], Roster]:
    """Seal the pair seeds of rounds that are to come."""
    asked = messages.unpack_ahead(message.content)
    members, roster = _members(context, asked.roster)
    if not 1 <= asked.count <= messages.MOST_AHEAD:
        raise UserError("too many rounds ahead, or none")
    rounds = range(asked.first, asked.first + asked.count)
    return {name: member().prepare(asked.session, rounds) for name, member in members.items()}, roster


def mask(message: Message, context: Context) -> tuple[dict[str, messages.Part], Roster]:
    """Make the numbers of each group here that is asked, and mask them."""
    asked = messages.unpack_asked(message.content)
    members, roster = _members(context, asked.roster)
    config, owner_policy = survey_answers.context_config(context), owner_policy_of(context.node_config)
    protection.check_allowed(config, owner_policy)
    memory, ledger = state.memory_of(context), ledger_of(context.node_config)
    public, parts = state.catalogue(memory), {}
    if asked.world != messages.world_of(config, state.catalogue_digest(memory), state.setup_digest(memory)):
        raise Refused(OTHER_WORLD)
    for name, member in members.items():
        if name not in asked.task.cohort:
            continue
        box = _StandingBox(asked, _private_key(config, context, name), name)
        group = Group(
            context, config, owner_policy, public, name, box.opened(), roster.least(owner_policy.least_cohort)
        )
        found = summands.summand(asked, group)
        masked = member().mask(asked.task, terms.pack(found.terms))
        if ledger is not None:
            ledger.write_masked(asked.task.session, asked.task.round, asked.what)
        parts[name] = messages.Part(masked, box.sealed(found), found.released)
    return parts, roster


def unmask(message: Message, context: Context) -> dict[str, dict[str, bytes]]:
    """Give the shares of the secrets that a sum takes."""
    task, requests, data = messages.unpack_unmasking(message.content)
    members, _ = _members(context, data)
    shares = {name: members[name]().unmask(task, request) for name, request in requests.items() if name in members}
    if shares and (ledger := ledger_of(context.node_config)) is not None:
        ledger.write_answered(task.session, task.round, next(iter(requests.values())).answered)
    return shares


def _members(context: Context, data: bytes) -> tuple[dict[str, Callable[[], Member]], Roster]:
    """The groups of this node, each made when it is needed; the roster, if it is the owner's."""
    config, owner_policy = survey_answers.context_config(context), owner_policy_of(context.node_config)
    roster = pinned_roster(data, pinned=owner_policy.roster) if owner_policy.roster else read_roster(data)
    names = survey_answers.my_groups(context)
    return {name: functools.partial(_member, context, config, owner_policy, name, roster) for name in names}, roster


def _member(context: Context, config: Config, owner_policy: OwnerPolicy, name: str, roster: Roster) -> Member:
    memory, key = state.memory_of(context), f"pairs {name}"
    kept = memory.read(key).config_records[key] if key in memory else None
    if kept is not None and kept["roster"] == roster.sha256:
        pairs = dict(zip(roster.holders(name), messages.boxes_of(kept["secrets"]), strict=True))
    else:
        pairs = pair_secrets(name, _private_key(config, context, name), roster)
        memory.keep(key, ConfigRecord({"roster": roster.sha256, "secrets": list(pairs.values())}))
    ledger = ledger_of(context.node_config)
    remember: Remember = functools.partial(_remember, memory, f"steps {name}") if ledger is None else ledger.remember
    return Member(name, pairs, roster, least_cohort=owner_policy.least_cohort, remember=remember)


def _remember(memory: state.Memory, key: str, step: str, digest: bytes) -> bytes | None:
    """A simulated group's ledger: its last steps."""
    steps: dict[str, bytes] = {}
    if key in memory:
        kept = memory.read(key).config_records[key]
        steps = dict(zip(messages.texts(kept["names"]), messages.boxes_of(kept["digests"]), strict=True))
    if step in steps:
        return steps[step]
    last = [*steps.items(), (step, digest)][-_KEPT_STEPS:]
    memory.keep(key, ConfigRecord({"names": [name for name, _ in last], "digests": [of for _, of in last]}))
    return None


def _private_key(config: Config, context: Context, name: str) -> bytes:
    """A deployed group's own, in a file beside its data; a simulated one's comes from the run's seed.

    Raises:
        UserError: the node hosts several groups, or its file cannot be used.
    """
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return hashlib.sha256(framed("simulated", str(config.seed), name)).digest()
    if len(survey_answers.my_groups(context)) > 1:
        raise UserError("secure sums need one node a group: each has a key of its own")
    return own_key(Path(str(context.node_config.get("data", "")) or ledger.path).with_suffix(KEY_SUFFIX))


class _StandingBox:
    """The box in which a group's standing lies with the server."""

    def __init__(self, asked: messages.Asked, private: bytes, name: str) -> None:
        self._box = asked.standings.get(name, b"")
        self._about = b""
        if asked.what in (messages.REWARDS, messages.WEIGHTS):
            given = messages.unpack_rule_terms(asked.content)
            self._about = framed("standing", given.run, given.rule, name)
        self._key = derive(private, "standing")

    def opened(self) -> Standing:
        """The standing; a new one where there is none, or it is another's."""
        try:
            return Standing(*struct.unpack(_STANDING, unseal(self._key, self._box, self._about)))
        except ValueError:
            return Standing()

    def sealed(self, found: Summand) -> bytes:
        """What the server keeps if the sum comes about."""
        if found.standing is None:
            return b""
        of = found.standing
        return seal(self._key, struct.pack(_STANDING, of.iteration, of.history, of.lead), self._about)
