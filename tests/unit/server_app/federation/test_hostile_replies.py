"""Replies that no honest node makes, as Flower's own Grid fetches and reads them: that node's reply is lost, alone."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, Metadata, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from server_app.federation.grid import OverlapGrid

ASKED = "m" * 64


class Junk(Array):
    """What describes the array is no JSON."""

    __qualname__ = "Array"

    def deflate(self):
        head, _, body = super().deflate().partition(b"\0")
        return head + b"\0" + b"x" * len(body)


class SuperLink:
    """What Flower's Grid asks, with one reply."""

    def __init__(self, array):
        metadata = Metadata(1, "", 5, 1, ASKED, "", time.time(), 100.0, "train")
        message = Message(metadata=metadata, content=RecordDict({"arrays": ArrayRecord()}))
        message.content["arrays"]["weights"] = array  # which its constructor would copy
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
        self.tree, self.message = get_object_tree(message), message_to_proto(remove_content_from_message(message))

    def PullMessages(self, request):
        return PullAppMessagesResponse(messages_list=[self.message], message_object_trees=[self.tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


def replies(superlink):
    flower = HttpGrid(token="token")
    flower._client, flower._run = superlink, Run.create_empty(1)
    asked = {ASKED: 5}
    read = OverlapGrid(flower)._pull([ASKED], asked)
    assert asked == {}
    return read


def test_an_honest_reply_is_read():
    reply = replies(SuperLink(Array(np.arange(3.0))))[5]
    assert reply["arrays"]["weights"].numpy().tolist() == [0, 1, 2]


def test_a_reply_that_flower_cannot_read_does_not_end_the_run():
    assert replies(SuperLink(Junk(np.arange(3.0)))) == {}
