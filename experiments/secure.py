"""What a lying server reads from secure sums, beside what it reads from single replies.

    python -m experiments.secure

The attacks are those of `experiments.attacks`, with no owner's limit on PluralLLM, through the groups' real ClientApps
and the server's real half of the sums: the server takes the groups' mean for the victim's own numbers, which is the
best that it can do. Then it breaks the rules of the sums.

Axis letters: G groups, N answered questions, K options.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, cast

import numpy as np
import numpy.typing as npt
import typer
from flwr.app import Message, MetricRecord, RecordDict
from scipy.optimize import least_squares

from appa_flwr.analysis.aggregation import sums
from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import sum_messages, wire
from appa_flwr.secure import member, shamir, summing, terms
from appa_flwr.secure.fixed_point import encode
from appa_flwr.secure.member import Member, pair_secrets
from appa_flwr.secure.messages import Task
from appa_flwr.secure.primitives import KEY_BYTES, private_key, public_key, stream, unseal
from appa_flwr.secure.roster import KEY_SUFFIX, own_key, read_roster, roster_file
from client_app import scoring, state
from client_app.main import app
from experiments import entry, study
from experiments.attacks import ATTACKS, NOTHING_LIMITED, OPTIONS, Victim, error
from experiments.pluralllm.federation import flower_task
from pluralllm.scores import summed
from server_app.federation.groups import Federation
from server_app.federation.secure_sums import SecureSums
from server_app.federation.summed_scores import scores
from server_app.predictor.summed_training import SummedTraining

FloatArray = npt.NDArray[np.float64]
Lie = Callable[["InSums"], None]

GROUPS = 5
READ = ("train: one question, one step of SGD", "evaluate: one question, 3 messages", "targets: one question, two runs",
        "scores: ten questions, 3 of each prediction")  # fmt: skip
PLAIN, SECURE, UNIFORM = "plain", "secure", "uniform answers"


class Circle:
    """The groups of a roster as `SecureSums` knows them, each its ClientApp in this process."""

    def __init__(self, victims: Mapping[int, Victim]) -> None:
        self.victims, self.silent = victims, set[str]()
        self.setup: dict[str, RecordDict] = {}
        self.min_groups, self.grid = 1, SimpleNamespace(seconds_waited=0.0)
        self.groups = self.present = tuple(victim.name for victim in victims.values())

    @property
    def reachable(self) -> tuple[str, ...]:
        """Those that are asked."""
        return tuple(name for name in self.groups if name not in self.silent)

    def hosted(self, node: int) -> list[str]:
        """The group at a node."""
        return [self.victims[node].name]

    def nodes_of(self, groups: Collection[str]) -> tuple[int, ...]:
        """Of these groups."""
        return tuple(node for node, victim in self.victims.items() if victim.name in groups)

    def readmit(self) -> None:
        """Nobody comes back."""

    def why_refused(self) -> str:
        """Not kept here."""
        return ""

    def setup_digest(self, kind: str) -> str:
        """See `Federation.setup_digest`."""
        return wire.digest(self.setup[kind]) if kind in self.setup else ""

    def ask_each(self, kind: str, contents: Mapping[int, RecordDict], **_: object) -> list[Message]:
        """The replies that are no errors."""
        replies = [app(Message(of, node, kind), self.victims[node].context) for node, of in contents.items()]
        return [reply for reply in replies if reply.has_content()]


@dataclass
class InSums(Victim):
    """A group whose owner has pinned a roster; asked for its own numbers, a server has the mean over the roster.

    Attributes:
        others: the roster's other groups.
        lie: what the server does before each sum.
        difference: it asks for the sum without the group too.
        collusion: the others tell it theirs.
    """

    others: Sequence[Victim] = ()
    lie: Lie | None = None
    difference: bool = False
    collusion: bool = False

    def ask(self, kind: str, content: RecordDict) -> RecordDict | None:
        """See `Victim.ask`; None where the groups refuse."""
        if kind in (wire.CATALOGUE, wire.TARGETS):
            if kind == wire.CATALOGUE:
                self.circle = Circle({2 + n: victim for n, victim in enumerate((self, *self.others))})
                for other in self.others:
                    other.runs = self.runs
                    other.enter()
            self.circle.setup[kind] = content
            for victim in self.circle.victims.values():
                Victim.ask(victim, kind, content)
            if kind == wire.CATALOGUE:
                self.public = wire.unpack_catalogue(content)
                self.secure = SecureSums(cast(Federation, self.circle), self.config)
                self.secure.start()
                return None
        if self.lie and kind == wire.SCORE:
            self.lie(self)
        try:
            return {
                "train": self._training,
                "evaluate": self._errors,
                wire.TARGETS: self._sums,
                wire.SCORE: self._scores,
            }[kind](content)
        except UserError:
            return None

    def _training(self, content: RecordDict) -> RecordDict:
        return SummedTraining(self.secure, self.public, self.config).trained(content)

    def _errors(self, content: RecordDict) -> RecordDict:
        return SummedTraining(self.secure, self.public, self.config).validated(content)

    def _sums(self, _: RecordDict) -> RecordDict:
        total = self.secure.total(sum_messages.PREDICTOR_SCORES, RecordDict(), {"scores": (2, len(summed()))})
        mean_L = len(self.public.questions) * total.mean("scores")[0]
        return RecordDict(
            {"sums": MetricRecord({f"0|{'|'.join(of)}": float(m) for of, m in zip(summed(), mean_L, strict=True)})}
        )

    def _scores(self, content: RecordDict) -> RecordDict:
        request = wire.unpack_score_request(content)
        ((_, found),) = scores(self.secure, request).items()
        own_J = found.mean_J
        if self.difference:
            self.circle.silent = {self.name}
            ((_, without),) = scores(self.secure, request).items()
            own_J = found.reward_J - without.reward_J
        if self.collusion:
            own_J = found.reward_J - sum(self._told(other, request) for other in self.others)
        return RecordDict({"rewards": wire.arrays_record({"0|cosine|targets": own_J})})

    @staticmethod
    def _told(other: Victim, request: wire.ScoreRequest) -> FloatArray:
        memory = state.memory_of(other.context)
        target_QK, public = state.targets(memory, other.name), state.catalogue(memory)
        return scoring.score(request, target_QK, public.option_QK)["cosine"]


def in_sums(
    read: str, seed: int, *, lie: Lie | None = None, difference: bool = False, collusion: bool = False, least: int = 3
) -> float:
    """An attack's error where the group's numbers are in sums over `GROUPS` groups."""
    (attack,) = (one for one in ATTACKS if one.name == read)
    answer_GNK = np.random.default_rng([seed, 1]).dirichlet(np.ones(OPTIONS), size=(GROUPS, attack.number))
    answer_GNK[0] = attack.answers(seed)
    with tempfile.TemporaryDirectory() as root, flower_task():
        folders = [Path(root) / str(g) for g in range(GROUPS)]
        keys = {}
        for g, folder in enumerate(folders):
            folder.mkdir()
            keys[f"g{g}"] = public_key(own_key(folder / f"g{KEY_SUFFIX}"))
        roster = read_roster(roster_file(keys).encode())
        policy = NOTHING_LIMITED.model_copy(update={"roster": roster.sha256, "least_cohort": least})
        settings: dict[str, Scalar] = {**attack.settings, "run.sums": "secure"}
        others = [Victim(folders[g], answer_GNK[g], policy, settings, f"g{g}") for g in range(1, GROUPS)]
        victim = InSums(folders[0], answer_GNK[0], policy, settings, "g0", 0, others, lie, difference, collusion)
        return error(attack.read(victim), answer_GNK[0])


_scored = partial(in_sums, READ[-1])


def invented(victim: InSums) -> None:
    """Most of the roster's groups are the server's own."""
    keys = {**{f"i{n}": public_key(private_key()) for n in range(GROUPS)}, **victim.secure.roster.key_of}
    victim.secure._data = roster_file(keys).encode()


def swapped(victim: InSums) -> None:
    """All keys but the group's own are the server's."""
    keys = {name: public_key(private_key()) for name in victim.secure.roster.names}
    victim.secure._data = roster_file({**keys, "g0": victim.secure.roster.key_of["g0"]}).encode()


def replayed(victim: InSums) -> None:
    """The round has been masked before, with another answer; what is asked again in the next one is a sum like all."""
    scores(victim.secure, wire.ScoreRequest(np.array([0]), np.eye(OPTIONS)[:1], ("cosine",)))
    victim.secure._round -= 1


def late(seed: int) -> float:
    """A group's words come once it counts as missing, when the server has the seeds of its pairs."""
    rng = np.random.default_rng(seed)
    answer_GNK = rng.dirichlet(np.ones(OPTIONS), size=(GROUPS, 10))
    key_of = {f"g{g}": private_key() for g in range(GROUPS)}
    roster = read_roster(roster_file({name: public_key(key) for name, key in key_of.items()}).encode())
    members = {
        name: Member(name, pair_secrets(name, key, roster), roster, least_cohort=3, remember=_memory())
        for name, key in key_of.items()
    }
    task = Task("s", 1, roster.names, "r", answer_GNK[0].size)
    prepared = {name: one.prepare("s", [1])[0] for name, one in members.items()}
    masked = {
        name: one.mask(task, encode(answer_NK.ravel()))
        for (name, one), answer_NK in zip(members.items(), answer_GNK, strict=True)
    }
    mine = masked.pop("g0")
    requests = summing.unmasking(roster, task, prepared, masked)
    shares = {name: members[name].unmask(task, request) for name, request in requests.items()}
    key = shamir.join({roster.point_of[name]: of["g0"] for name, of in shares.items()})
    seeds = unseal(key, prepared["g0"].sealed_seeds, member.about(member.PAIR_SEEDS, "s", 1, "g0"))
    left = mine.words
    for place, _ in enumerate(roster.neighbours("g0")):  # the first of the roster adds all its pairs' masks
        left = left - stream(seeds[KEY_BYTES * place :][:KEY_BYTES], member.nonce(task.digest(roster)), task.count)
    found_NK = np.abs(left.view(np.int64).astype(float)).reshape(answer_GNK[0].shape)
    return error(found_NK / found_NK.sum(1, keepdims=True), answer_GNK[0])


def _memory() -> member.Remember:
    known: dict[str, bytes] = {}

    def remember(step: str, digest: bytes) -> bytes | None:
        before = known.get(step)
        known.setdefault(step, digest)
        return before

    return remember


def as_a_set(groups: int, seed: int, *, answers: int = 8) -> dict[str, float]:
    """Mean error of so many groups' rewards without their names, from what rule appa sums in its first iteration."""
    config, rng = Config.load({}), np.random.default_rng(seed)
    reward_GJ = rng.uniform(0.3, 1.0, (groups, answers))
    public = sums.first("appa", config.appa, groups)

    def total(reward_GJ: FloatArray) -> FloatArray:
        of = [
            terms.terms("appa", config.appa, public, terms.Standing(), r_J, 0.85 * r_J + 0.15)[0] for r_J in reward_GJ
        ]
        return np.array([sum(one[name] for one in of) for name in ("reward", "square", "term")])

    found_GJ, true_3J = np.empty_like(reward_GJ), total(reward_GJ)
    for j in range(answers):
        fits = [
            least_squares(
                lambda r_G, j=j: 1e4 * (total(r_G[:, None]) - true_3J[:, [j]]).ravel(), rng.uniform(0.3, 1.0, groups),
                xtol=1e-15, ftol=1e-15, gtol=1e-15,
            )
            for _ in range(8)
        ]  # fmt: skip
        found_GJ[:, j] = min(fits, key=lambda fit: fit.cost).x
    off = np.abs(np.sort(found_GJ, axis=0) - np.sort(reward_GJ, axis=0)).mean()
    guess = np.abs(reward_GJ.mean(axis=0) - reward_GJ).mean()
    return {PLAIN: 0.0, SECURE: float(off), UNIFORM: float(guess)}


SCORED = READ[-1]
SETS = {f"{groups} groups: their rewards of an answer, without names": groups for groups in (3, 4, 6)}
LIES: Mapping[str, Callable[[int], float]] = {
    "scores: the rest of the roster is invented": partial(_scored, lie=invented),
    "scores: with swapped keys": partial(_scored, lie=swapped),
    "scores: a round replayed with other answers": partial(_scored, lie=replayed),
    "a late reply of a group that counted as missing": late,
    "scores: a second sum, without the group": partial(_scored, difference=True),
    "the same, where owners say least-cohort = 5": partial(_scored, difference=True, least=GROUPS),
    "scores: all other groups work with the server": partial(_scored, collusion=True),
}


def learned(setting: study.Setting, seed: int) -> dict[str, float]:
    """An attack's errors."""
    (name,) = setting
    if name in SETS:
        return as_a_set(SETS[str(name)], seed)
    (one,) = (of for of in ATTACKS if of.name == (name if name in READ else SCORED))
    plain = one.error(NOTHING_LIMITED, seed=seed)
    return {
        PLAIN: plain,
        SECURE: (LIES.get(str(name)) or partial(in_sums, one.name))(seed),
        UNIFORM: one.guess(seed=seed),
    }


def main(
    seeds: study.Seeds = 3,
    output: Annotated[Path, typer.Option(help="Folder of the tables and single numbers.")] = Path("runs/secure"),
) -> None:
    """Measure what a lying server reads from secure sums."""
    logging.getLogger("appa").setLevel(logging.CRITICAL)  # of refusals, which the table has
    study.study(
        "secure",
        ("attack",),
        [(name,) for name in (*READ, *LIES, *SETS)],
        range(seeds),
        learned,
        [study.StudyColumn(name, name, partial(study.spread, ddof=0)) for name in (PLAIN, SECURE, UNIFORM)],
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
