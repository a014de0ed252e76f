"""`appa eval` at an OpenAI-compatible address, whose answers this test gives."""

import json
from types import SimpleNamespace

import httpx
import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.launch import evaluate as evaluation
from appa_flwr.reward_client import client

QUESTIONS = [{"question_id": name, "prompt": f"say {name}", "options": ["x", "y"]} for name in ("Q0", "Q1", "Q2")]


class Judge:
    """A served run that keeps what it is sent last."""

    async def ask(self, method, path, body=None):
        self.body = body
        return {"questions": QUESTIONS, "answer_tokens": 7}


@pytest.fixture
def endpoint(monkeypatch):
    """What answers at the address; `asked` holds requests, `faults` status codes that come first."""
    found = SimpleNamespace(asked=[], faults=[])

    def answer(request):
        body = json.loads(request.content)
        found.asked.append((request.url.path, body, request.headers["Authorization"]))
        status = found.faults.pop(0) if found.faults else 200
        if status != 200:
            return httpx.Response(status, json={"error": "why"})
        chat = "messages" in body
        text = f"to {body['messages'][0]['content'] if chat else body['prompt']}"
        return httpx.Response(200, json={"choices": [{"message": {"content": text}} if chat else {"text": text}]})

    monkeypatch.setattr(client, "_client", lambda url: httpx.AsyncClient(transport=httpx.MockTransport(answer)))
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(evaluation, "AT_ONCE", 1)
    return found


def evaluated(**keys):
    judge = Judge()
    evaluation.evaluate(judge, "n", model="m", endpoint="http://there/v1", **keys)
    return judge.body


@pytest.mark.parametrize(("plain", "path"), [(False, "/v1/chat/completions"), (True, "/v1/completions")])
def test_what_it_writes(endpoint, monkeypatch, plain, path):
    monkeypatch.setenv(evaluation.KEY, "secret")
    assert evaluated(plain=plain) == {"answers": {f"Q{n}": f"to say Q{n}" for n in range(3)}}
    asked_path, asked, key = endpoint.asked[0]
    assert (asked_path, key) == (path, "Bearer secret")
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 7)


def test_it_asks_again_while_that_can_help(endpoint, monkeypatch):
    endpoint.faults = [200, 503, 429, 200, 502]
    assert len(evaluated()["answers"]) == 3
    assert len(endpoint.asked) == 3 + 3
    monkeypatch.setattr(evaluation, "PATIENCE", -1.0)
    endpoint.faults = [503]
    with pytest.raises(UserError, match=r"no answer .*503"):
        evaluated()


@pytest.mark.parametrize(("status", "says"), [(400, "400: .*why"), (404, "404"), (201, "gives no answer .*why")])
def test_a_request_that_is_refused_is_not_sent_again(endpoint, status, says):
    endpoint.faults = [status]
    with pytest.raises(UserError, match=says):
        evaluated()
    assert len(endpoint.asked) <= len(QUESTIONS)  # none twice
