"""The smallest Flower app: messages that hold nothing, to see what Flower takes for one."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from server_app.federation.grid import OverlapGrid

client = ClientApp()
server = ServerApp()


@client.query()
def answer(message: Message, context: Context) -> Message:
    """Nothing."""
    return Message(RecordDict(), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send one message a round to each node, computing in between; write the seconds that every round waited."""
    keys = context.run_config
    ours, waited = OverlapGrid(grid), []
    while len(nodes := list(ours.get_node_ids())) < int(keys["nodes"]):
        time.sleep(0.5)
    for number in range(int(keys["rounds"])):
        time.sleep(float(keys["seconds"]))
        messages = [ours.create_message(RecordDict(), "query", node, str(number)) for node in nodes]
        replies = ours.send_and_receive(messages)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError("a node could not answer")
        waited.append(ours.seconds_waited)
    Path(str(keys["result"])).write_text(json.dumps(waited))
