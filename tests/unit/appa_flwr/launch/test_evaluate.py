"""`appa eval` at an OpenAI-compatible address, which a small server of this test stands for."""

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
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(evaluation, "AT_ONCE", 1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body, self.headers.get("Authorization")))
            status = server.faults.pop(0) if server.faults else 200
            prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            text = f"to {prompt}"
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
    judge = Judge()
    evaluation.evaluate(judge, "n", model="m", endpoint=server.url, **keys)
    return judge.body


@pytest.mark.parametrize(("plain", "path"), [(False, "/v1/chat/completions"), (True, "/v1/completions")])
def test_what_it_writes(endpoint, monkeypatch, plain, path):
    monkeypatch.setenv(evaluation.KEY, "secret")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")  # none stands between this machine and itself
    assert evaluated(endpoint, plain=plain) == {"answers": {f"Q{n}": f"to say Q{n}" for n in range(3)}}
    asked_path, asked, key = endpoint.asked[0]
    assert (asked_path, key) == (path, "Bearer secret")
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 7)


def test_it_asks_again_while_that_can_help(endpoint, monkeypatch):
    endpoint.faults = [200, 503, 429, 200, 502]
    assert len(evaluated(endpoint)["answers"]) == 3
    assert len(endpoint.asked) == 3 + 3
    monkeypatch.setattr(evaluation, "PATIENCE", -1.0)
    endpoint.faults = [503]
    with pytest.raises(UserError, match=r"no answer .*503"):
        evaluated(endpoint)


@pytest.mark.parametrize(("status", "says"), [(400, "400: .*why"), (404, "404"), (201, "gives no answer .*why")])
def test_a_request_that_is_refused_is_not_sent_again(endpoint, status, says):
    endpoint.faults = [status]
    with pytest.raises(UserError, match=says):
        evaluated(endpoint)
    assert len(endpoint.asked) == 1
