"""Secure sums by the groups' real ClientApp, and a server that tries to learn more than the sums.

Legend: G groups, J answers.
"""

import numpy as np
from client_node import Node, catalogue_once, config_of, home_files, uniform_request, weights
from in_process import FEW, pinned

from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask, Task
from appa_flwr.secure import rule_sums
from appa_flwr.secure.roster import ROSTER_FILE, own_key, public_key, roster_file
from appa_flwr.survey.generate import generate
from client_app.numbers import MOST_ITERATIONS

SURVEY = generate(num_questions=60, num_groups=5, seed=3)
EVERYBODY = SURVEY.groups


class Circle:
    """Five groups that have pinned their roster, as a server meets them."""

    def __init__(self, folder, *, owner_policy=FEW, **changes) -> None:
        keys = {"data__num_groups": 5, "run__sums": "secure", "appa__fairness_threshold": 1.1, **changes}
        self.config, self.files = home_files(SURVEY, folder, config_of(**keys))
        contexts = pinned(self.config, self.files, owner_policy=owner_policy)
        self.nodes = dict(zip(self.files, map(Node, contexts.values()), strict=True))
        self.catalogue, self.round = catalogue_once(self.config), 0
        for node in self.nodes.values():
            node.prepared(self.catalogue)
        self.world = asks.world_of(
            self.config,
            messages.digest(messages.pack_catalogue(self.catalogue)),
            messages.digest(messages.pack_weights(weights(self.config))),
        )
        self.roster = next(iter(self.nodes.values())).hello().fields["roster"]

    def task(self, asked: Ask, cohort=EVERYBODY, *, run="run", number=0) -> Task:
        self.round += 1
        request = asks.request_digest(asked, self.world)
        return Task(run, number or self.round, tuple(cohort), request, self.roster)

    def mask(self, asked: Ask, task: Task, group: str):
        """A group's words; the code of a refusal."""
        reply = self.nodes[group].send(messages.ASK, messages.pack_ask(asked, task))
        if reply.has_error():
            return reply.error.code
        return messages.unpack_reply(reply.content, numbers=(np.uint64, 1)).numbers

    def open(self, task: Task, group: str):
        """A group's seed; the code of a refusal."""
        reply = self.nodes[group].send(messages.OPEN, messages.pack_open(task))
        return (
            reply.error.code if reply.has_error() else messages.unpack_reply(reply.content, seed=bytes).fields["seed"]
        )

    def opened(self, asked: Ask, cohort=EVERYBODY) -> Task:
        """A task that all its groups have masked and opened."""
        task = self.task(asked, cohort)
        for step in (lambda group: self.mask(asked, task, group), lambda group: self.open(task, group)):
            assert not any(isinstance(step(group), int) for group in cohort)
        return task

    def terms(self, reference: float, completed=()) -> Ask:
        request = uniform_request(self.catalogue)
        size = len(request.question_J)
        return request.ask(
            asks.TERMS,
            arrays={"format": np.ones(size), "parsed": np.ones(size, dtype=bool)},
            rule="appa",
            reference=reference,
            completed=list(completed),
        )


def test_a_roster_that_the_server_has_made_is_refused(tmp_path):
    """It could hold keys of the server's own beside one group's."""
    circle = Circle(tmp_path)
    group, *others = EVERYBODY
    forged = {name: public_key(own_key(tmp_path / f"{name}.key")) for name in others[:2]}
    path = circle.files[group].with_name(ROSTER_FILE)
    before = path.read_text()
    path.write_text(roster_file({group: public_key(own_key(circle.files[group].with_suffix(".sums.key"))), **forged}))
    asked = Ask(asks.VOTES)
    assert circle.mask(asked, circle.task(asked, (group, *others[:2])), group) == refusals.FAILED
    path.write_text(before)
    assert circle.mask(asked, circle.task(asked, (group, "Nobody", others[0])), group) == refusals.STRANGERS


def test_a_runs_sums_are_over_groups_as_the_owner_says(tmp_path):
    circle = Circle(tmp_path, owner_policy=f"{FEW}\ncohort-changes = 1\nleast-cohort = 3")
    asked = [uniform_request(circle.catalogue, draw=0).ask(asks.REWARDS, more=n) for n in range(4)]
    circle.opened(asked[0])
    circle.opened(asked[1], EVERYBODY[1:])
    circle.opened(asked[2])  # one of the two again
    for cohort, why in ((EVERYBODY[:4], refusals.CHANGES), (EVERYBODY[:2], refusals.FEW)):
        assert circle.mask(asked[3], circle.task(asked[3], cohort), EVERYBODY[1]) == why
    circle = Circle(tmp_path / "default")  # the roster but one
    for number, why in ((3, True), (4, False)):
        few = circle.mask(asked[0], circle.task(asked[0], EVERYBODY[:number]), EVERYBODY[0])
        assert (few is refusals.FEW) == why


def test_an_iteration_has_one_reference_and_no_history_comes_back(tmp_path):
    """Of the rules' own checks, that the node makes them."""
    circle = Circle(tmp_path)
    state = rule_sums.first("appa", circle.config.appa, 5)
    first = circle.opened(circle.terms(state.reference)).digest.hex()
    asked = circle.terms(state.reference + 1.0, [first])
    assert not isinstance(circle.mask(asked, circle.task(asked), EVERYBODY[0]), int)
    for reference, completed, why in (
        (state.reference + 2.0, [first], refusals.OTHER_REFERENCE),
        (state.reference, [], refusals.PAST),
    ):
        asked = circle.terms(reference, completed)
        assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == why


def test_another_rule_metric_or_side_or_a_temperature_under_the_owners_is_no_term(tmp_path):
    """At a low temperature the term is nearly the worst-off group's reward."""
    circle = Circle(tmp_path / "low", appa__temperature=0.05, owner_policy=f"{FEW}\nleast-temperature = 0.06")
    asked = circle.terms(0.0)
    assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == refusals.LOW_TEMPERATURE
    circle = Circle(tmp_path)
    too_long = {"completed": ["00"] * MOST_ITERATIONS}
    for change in ({"rule": "alpha"}, {"metrics": ["cosine"]}, {"sides": ["truth"]}, too_long):
        asked = circle.terms(0.0)
        asked.settings.update(change)
        assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == refusals.BAD_REQUEST
    for wrong in (-0.01, 1.01, np.nan):  # sums of cut rewards would bend at each group's reward
        asked = circle.terms(0.0)
        asked.arrays["format"][3] = wrong
        assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == refusals.BAD_REQUEST


def test_a_run_has_one_name(tmp_path):
    """Under a second one the limits on cohorts and references would begin anew."""
    circle = Circle(tmp_path, owner_policy=f"{FEW}\ncohort-changes = 0\nleast-cohort = 3")
    asked = [uniform_request(circle.catalogue, draw=0).ask(asks.REWARDS, more=n) for n in range(2)]
    circle.opened(asked[0])
    for run, why in (("run", refusals.CHANGES), ("another", refusals.BAD_REQUEST)):
        assert circle.mask(asked[1], circle.task(asked[1], EVERYBODY[1:], run=run), EVERYBODY[1]) == why
    assert circle.open(circle.task(asked[0], run="another"), EVERYBODY[1]) == refusals.BAD_REQUEST
