"""A group's whole life in a process that can import no more than a group's machine has installed.

Run with a requirements file and a recorded talk: the groups' real ClientApp answers the server's recorded messages
again. Prints as JSON what was answered, whether it differed from the recorded reply, and what was imported for it.
"""

import importlib.metadata as metadata
import json
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def _name(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def installed(lines: Iterable[str]) -> set[str]:
    """The distributions that pip would install for these requirements, by what is installed here."""
    todo = [Requirement(line) for line in lines]
    found: dict[str, set[str]] = {}
    while todo:
        wanted = todo.pop()
        extras = found.setdefault(_name(wanted.name), set())
        fresh = ({"", *wanted.extras}) - extras
        extras |= fresh
        for line in metadata.requires(wanted.name) or [] if fresh else []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in fresh):
                todo.append(needed)
    return set(found)


def forget_all_but(lines: Iterable[str]) -> None:
    """From here on nothing can be imported but this package's client side and what these requirements bring."""
    names = installed(lines) | {"appa-flwr"}  # by --no-deps
    absent = {"server_app", "experiments"}
    for module, owners in metadata.packages_distributions().items():
        if not names & {_name(owner) for owner in owners}:
            absent.add(module)

    class Present:
        def __init__(self, finder: Any) -> None:
            self.finder = finder

        def __getattr__(self, name: str) -> object:
            return getattr(self.finder, name)

        def find_spec(self, name: str, *where: object) -> object:
            return None if name.partition(".")[0] in absent else self.finder.find_spec(name, *where)

    sys.meta_path[:] = [Present(finder) for finder in sys.meta_path]


def live(record: Mapping[str, object]) -> list[dict[str, object]]:
    """Answer every recorded message; one line each."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as MessageBytes
    from nodes import cross, deployed
    from short_waits.on_import import SIZES, set_constants

    set_constants(SIZES)
    from appa_flwr.config import Config
    from appa_flwr.protocol import messages
    from client_app.main import app

    contexts = deployed(Config.load(record["config"]), record["files"])
    lines = []
    for asked, expected in record["messages"]:
        message, before = (message_from_proto(MessageBytes.FromString(data)) for data in (asked, expected))
        kind = message.metadata.message_type
        if kind == messages.ASK:
            kind = messages.unpack_query(message.content)[0].kind
        reply = cross(app(message, contexts[message.metadata.dst_node_id])).message
        same = reply.has_content() and reply.content == before.content
        lines.append({"kind": kind, "same": same, "error": reply.error.reason if reply.has_error() else ""})
    return lines


if __name__ == "__main__":
    requirements, talk = map(Path, sys.argv[1:])
    forget_all_but(line for line in requirements.read_text().splitlines() if line[0] != "#")
    answered = live(pickle.loads(talk.read_bytes()))
    print(json.dumps({"answered": answered, "imported": sorted({name.partition(".")[0] for name in sys.modules})}))
