"""A node as its owner runs it, which a test asks: deployed, with a file, a policy and a ledger of its own."""

from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict
from nodes import ClientNode, asked_of, at_home, config_of, deployed

from appa_flwr.config import Config
from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import messages
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.survey.generate import generate
from server_app.questions import build_catalogue

CATALOGUES: dict[str, Catalogue] = {}


def catalogue_once(config: Config) -> Catalogue:
    """The catalogue of a run, made once for the same public questions: most of a node's test would wait for it."""
    key = Path(config.survey).read_text()
    if key not in CATALOGUES:
        CATALOGUES[key] = build_catalogue(config)
    return CATALOGUES[key]


SURVEY = generate(num_questions=160, num_groups=2, seed=3)
GROUP = SURVEY.groups[0]


class Owned(ClientNode):
    """A deployed node of the first group, in its first run."""

    def __init__(self, folder, owner_policy="", *, survey=SURVEY, **changes):
        config, files = at_home(survey, folder, config_of())
        config = Config.load({**config.flat(), **changes})
        super().__init__(next(iter(deployed(config, {GROUP: files[GROUP]}, owner_policy=owner_policy).values())))
        self.ledger = Ledger(files[GROUP].with_suffix(".ledger.sqlite"))
        self.public = catalogue_once(config)
        self.answered = [q.question_id in SURVEY.answers[GROUP] for q in self.public.questions]

    def run(self, number):
        self.context = Context(number, 2, self.context.node_config, RecordDict(), self.context.run_config)

    def cut(self, *, training, held_out):
        """A catalogue with so many of the answered questions, and all that nobody answered."""
        train_Q, kept = self.public.train_Q, ~np.array(self.answered)
        for part_Q, count in ((train_Q, training), (~train_Q, held_out)):
            kept[np.flatnonzero(part_Q & self.answered)[:count]] = True
        rows = np.flatnonzero(kept)
        questions = tuple(self.public.questions[row] for row in rows)
        public = self.public
        names = ("train_Q", "option_QK", "embedding_QKE", "unanswered_Q")
        return Catalogue(questions=questions, **{name: getattr(public, name)[rows] for name in names})

    def take(self, catalogue):
        """Code of the refusal; 0 for an answer."""
        return refused(self.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)))

    def ready(self, **counts):
        """The node with its target tables."""
        return self.prepared(self.cut(**counts))

    def code(self, kind, **changes):
        return refused(self.ask(asked_of(kind, self.catalogue, self.config, **changes)))


def refused(reply: Message) -> int:
    """Code of a refusal; 0 for an answer."""
    return reply.error.code if reply.has_error() else 0
