"""Replies that no honest node makes, as Flower's own Grid fetches and reads them: that node's reply is lost, alone."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, Metadata, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from server_app.federation import grid as ours
from server_app.federation.grid import OverlapGrid

ASKED = "m" * 64


class Junk(Array):
    """What describes the array is no JSON."""

    __qualname__ = "Array"

    def deflate(self):
        head, _, body = super().deflate().partition(b"\0")
        return head + b"\0" + b"x" * len(body)


class Bomb(Array):
    """A kilobyte that is named a million times."""

    __qualname__ = "Array"

    def deflate(self):
        head, _, body = super().deflate().partition(b"\0")
        body = json.dumps(json.loads(body) | {"arraychunk_ids": [0] * 1_000_000}).encode()
        return b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\0" + body


class SuperLink:
    """What Flower's Grid asks, with one reply; `absent` objects of it never come."""

    def __init__(self, array, absent=b"nothing"):
        metadata = Metadata(1, "", 5, 1, ASKED, "", time.time(), 100.0, "train")
        message = Message(metadata=metadata, content=RecordDict({"arrays": ArrayRecord()}))
        message.content["arrays"]["weights"] = array  # which its constructor would copy
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
        self.absent = {key for key, content in self.objects.items() if content.startswith(absent)}
        self.tree, self.message = get_object_tree(message), message_to_proto(remove_content_from_message(message))

    def PullMessages(self, request):
        return PullAppMessagesResponse(messages_list=[self.message], message_object_trees=[self.tree])

    def PullObject(self, request):
        there = request.object_id not in self.absent
        content = self.objects[request.object_id] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


def replies(superlink):
    flower = HttpGrid(token="token")
    flower._client, flower._run = superlink, Run.create_empty(1)
    asked = {ASKED: 5}
    found = OverlapGrid(flower)._reply_to(ASKED, asked)
    assert asked == {}
    return found


def test_an_honest_reply_is_read():
    (reply,) = replies(SuperLink(Array(np.arange(3.0))))
    assert reply.content["arrays"]["weights"].numpy().tolist() == [0, 1, 2]


def test_a_reply_that_flower_cannot_read_does_not_end_the_run():
    assert not any(reply.has_content() for reply in replies(SuperLink(Junk(np.arange(3.0)))))


@pytest.mark.parametrize("array", [Bomb(np.arange(128.0)), Array(np.arange(30_000.0))])
def test_a_reply_that_would_fill_the_server_s_memory_is_not_put_together(array, monkeypatch):
    monkeypatch.setattr(ours, "LARGEST_REPLY", 10_000_000 if isinstance(array, Bomb) else 100_000)
    (reply,) = replies(SuperLink(array))
    assert not reply.has_content()
    assert "unavailable" in reply.error.reason


def test_parts_that_never_come_are_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(ours, "UPLOAD_SECONDS", 0.0)
    (reply,) = replies(SuperLink(Array(np.arange(3.0)), absent=b"ArrayChunk"))
    assert "objects are unavailable" in reply.error.reason
