"""The service's HTTP: who is let in, and what a request may be."""

import asyncio
import json
import logging

import pytest
from fastapi.testclient import TestClient
from runs import MEAN_OF_TWO, TWO, TWO_QUESTIONS
from small import cases

from server_app.serve import app
from server_app.serve.rounds import MOST_WAITING

TOKEN = "a-token-that-nobody-guesses"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client(served, monkeypatch):
    monkeypatch.setattr(app, "BODY_MIB", 1)
    with TestClient(app.web_app(served.rounds, None, TOKEN), headers=HEADERS) as client:
        yield client


def body(texts=TWO, questions=TWO_QUESTIONS, **fields):
    items = [
        {"id": f"1/0/{n}", "question_id": question, "completion": text}
        for n, (question, text) in enumerate(zip(questions, texts, strict=True))
    ]
    return {"run": "r", "round": 1, "items": items, **fields}


def test_the_native_endpoint(client, served):
    given = client.post("/v1/score", json=body(size=2, resumed=False))
    assert given.status_code == 200
    found = given.json()
    assert (found["run"], found["round"]) == ("r", 1)
    assert [item["reward"] for item in found["items"]] == pytest.approx(MEAN_OF_TWO)
    assert [item["id"] for item in found["items"]] == ["1/0/0", "1/0/1"]
    assert found["items"][0]["components"] == {"alignment": pytest.approx(0.8), "format": 1.0}
    assert found["metrics"]["weight/A"] == 0.5
    assert found["metrics"]["group/A"] == pytest.approx(0.75)
    assert client.post("/v1/score", json=body()).json() == found
    assert client.post("/v1/score", json=body(TWO[::-1])).status_code == 409


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b'{"run": "\xff"}', 400, "body"),
        (json.dumps(body(["\ud800"], ["Q0"])).encode(), 422, "completion"),
        (b"[" * 100_000, 400, "body"),
        (body(["x" * 10 * 2**20], ["Q0"]), 413, "1 MiB"),
        (body(size=MOST_WAITING + 1), 422, "size"),
        *((body() | change, status, says) for change, status, says in cases("wrong_inputs")["requests"]["rows"]),
    ],
)
def test_a_bad_request_gets_one_clear_answer(client, served, sent, status, says):
    content = sent if isinstance(sent, bytes) else json.dumps(sent)
    given = client.post("/v1/score", content=content, headers={"Content-Type": "application/json"})
    assert given.status_code == status
    assert says in str(given.json()["detail"])
    assert len(given.content) < 2000
    assert served.node.asked == []


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer " + TOKEN[:-1]}],
)
def test_without_the_token_there_is_nothing(client, served, headers, caplog):
    caplog.set_level(logging.DEBUG)
    client.headers = headers
    assert client.get("/docs").status_code == 200
    for given in (client.post("/v1/score", content=b"{"), client.get("/v1/held-out"), client.get("/other")):
        assert given.status_code == 401
        assert given.headers["www-authenticate"] == "Bearer"
    assert served.node.asked == []
    assert TOKEN not in "".join(r.getMessage() for r in caplog.records if r.name.startswith(("appa", "uvicorn")))


@pytest.mark.anyio
async def test_a_client_that_goes_away_mid_round_leaves_no_trace_of_waiting(served):
    application = app.web_app(served.rounds, None, TOKEN)
    sent = json.dumps(body(size=4)).encode()
    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/score", "query_string": b"", "headers": headers}
    messages, answered = iter([{"type": "http.request", "body": sent}]), []

    async def receive():
        return next(messages, {"type": "http.disconnect"})

    async def send(message):
        answered.append(message)

    await application(scope, receive, send)
    await asyncio.sleep(0)
    assert answered[0]["status"] == 499
    assert served.rounds._open == {}
