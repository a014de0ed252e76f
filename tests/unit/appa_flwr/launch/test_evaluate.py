"""`appa eval` at an OpenAI-compatible address, which a small server of this test stands for."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.launch import evaluate as evaluation
from appa_flwr.trainers import client

QUESTIONS = [{"question_id": name, "prompt": f"say {name}", "options": ["x", "y"]} for name in ("Q0", "Q1", "Q2")]


class Judge:
    """A served run that keeps what it is sent."""

    tokens = 7

    async def ask(self, method, path, body=None):
        if method == "GET":
            return {"questions": QUESTIONS, "answer_tokens": self.tokens}
        self.path, self.body = path, body
        return {}


@pytest.fixture
def endpoint(monkeypatch):
    """A server; `asked` holds requests, `faults` status codes that come first."""
    monkeypatch.setattr(evaluation, "PAUSES", (0.0, 0.0))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body, self.headers.get("Authorization")))
            status = server.faults.pop(0) if server.faults else 200
            prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            text = f"to {prompt}, {body.get('seed')}"
            choice = {"message": {"content": text}} if "messages" in body else {"text": text}
            content = json.dumps({"choices": [choice]} if status == 200 else {"error": "why"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.faults = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def evaluated(server, **keys):
    judge, said = Judge(), []
    given = {
        "model": "m",
        "endpoint": server.url,
        "say": said.append,
        "concurrency": 1,
    }
    evaluation.evaluate(judge, "n", **given | keys)
    return judge.body, said


def test_what_it_writes(endpoint, monkeypatch):
    monkeypatch.setenv(evaluation.KEY, "secret")
    body, _ = evaluated(endpoint)
    assert body == {"answers": {f"Q{n}": [f"to say Q{n}, None"] for n in range(3)}}
    path, asked, key = endpoint.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 7)


def test_an_endpoint_of_this_machine_is_asked_without_a_proxy_and_its_silence_said(endpoint, monkeypatch, capsys):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setattr(client, "FIRST_WORD", 0.0)
    monkeypatch.setattr(evaluation, "PAUSES", (0.3, 0.0))
    endpoint.faults[:] = [503]
    assert len(evaluated(endpoint)[0]["answers"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{endpoint.url}/chat/completions: no answer for ")
    assert "503" in line


def test_samples_are_drawn_apart_and_greedy_ones_refused(endpoint):
    body, said = evaluated(endpoint, temperature=0.5, samples=2)
    assert body["answers"]["Q1"] == ["to say Q1, 0", "to say Q1, 1"]
    assert endpoint.asked[0][1]["temperature"] == 0.5
    assert not any("the same" in line for line in said)
    with pytest.raises(UserError, match="greedy answers are all the same"):
        evaluated(endpoint, samples=2)


def test_plain_text_for_models_without_a_chat_template(endpoint):
    body, _ = evaluated(endpoint, plain=True)
    path, asked, _ = endpoint.asked[0]
    assert (path, asked["prompt"]) == ("/v1/completions", "say Q0")
    assert body["answers"]["Q2"] == ["to say Q2, None"]


def test_it_asks_again_while_that_can_help(endpoint):
    endpoint.faults = [200, 503, 429, 200, 500, 408]
    assert len(evaluated(endpoint)[0]["answers"]) == 3
    assert len(endpoint.asked) == 3 + 4
    endpoint.faults = [500, 500, 500]
    with pytest.raises(UserError, match=r"no answer .500"):
        evaluated(endpoint)


def test_a_request_that_is_refused_is_not_sent_again(endpoint):
    endpoint.faults = [404]
    with pytest.raises(UserError, match=r"404: .*why"):
        evaluated(endpoint)
    assert len(endpoint.asked) == 1
