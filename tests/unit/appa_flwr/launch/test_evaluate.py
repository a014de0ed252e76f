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


def evaluated(server, folder, **keys):
    judge, said = Judge(), []
    given = {
        "model": "m",
        "endpoint": server.url,
        "kept": folder / "kept.jsonl",
        "say": said.append,
        "concurrency": 1,
    }
    evaluation.evaluate(judge, "n", **given | keys)
    return judge.body, said


def test_what_it_writes(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv(evaluation.KEY, "secret")
    body, _ = evaluated(endpoint, tmp_path)
    assert body == {"answers": {f"Q{n}": [f"to say Q{n}, None"] for n in range(3)}}
    path, asked, key = endpoint.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 7)


def test_an_endpoint_of_this_machine_is_asked_without_a_proxy_and_its_silence_said(
    endpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setattr(client, "FIRST_WORD", 0.0)
    monkeypatch.setattr(evaluation, "PAUSES", (0.3, 0.0))
    endpoint.faults[:] = [503]
    assert len(evaluated(endpoint, tmp_path)[0]["answers"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{endpoint.url}/chat/completions: no answer for ")
    assert "503" in line


def test_samples_are_drawn_apart_and_greedy_ones_refused(endpoint, tmp_path):
    body, said = evaluated(endpoint, tmp_path, temperature=0.5, samples=2)
    assert body["answers"]["Q1"] == ["to say Q1, 0", "to say Q1, 1"]
    assert endpoint.asked[0][1]["temperature"] == 0.5
    assert not any("the same" in line for line in said)
    with pytest.raises(UserError, match="greedy answers are all the same"):
        evaluated(endpoint, tmp_path, samples=2)


def test_plain_text_for_models_without_a_chat_template(endpoint, tmp_path):
    body, _ = evaluated(endpoint, tmp_path, plain=True)
    path, asked, _ = endpoint.asked[0]
    assert (path, asked["prompt"]) == ("/v1/completions", "say Q0")
    assert body["answers"]["Q2"] == ["to say Q2, None"]


def test_it_asks_again_and_goes_on_with_what_it_has(endpoint, tmp_path):
    endpoint.faults = [200, 503, 429, 200, 500, 500, 500]
    with pytest.raises(UserError, match=r"no answer .500"):
        evaluated(endpoint, tmp_path)
    assert len(endpoint.asked) == 7
    body, said = evaluated(endpoint, tmp_path)
    assert len(body["answers"]) == 3
    assert len(endpoint.asked) == 7 + 1  # the third answer
    assert said[0].startswith("n: 3 answers, 2 of them from before")
    evaluated(endpoint, tmp_path, temperature=1.0)  # another temperature's answers are others
    assert len(endpoint.asked) == 8 + 3


def test_answers_of_another_server_or_length_are_others(endpoint, tmp_path, monkeypatch):
    evaluated(endpoint, tmp_path)
    evaluated(endpoint, tmp_path, endpoint=endpoint.url + "/")
    assert len(endpoint.asked) == 3
    other = endpoint.url.replace("127.0.0.1", "localhost")
    evaluated(endpoint, tmp_path, endpoint=other)
    assert len(endpoint.asked) == 6
    monkeypatch.setattr(Judge, "tokens", 8)
    evaluated(endpoint, tmp_path, endpoint=other)
    assert len(endpoint.asked) == 9


def test_answers_of_a_folder_that_has_changed_are_others(tmp_path, monkeypatch):
    asked = []

    def local(jobs, put, **_):
        asked.extend(jobs)
        for key in jobs:
            put(key, "0.5,0.5")

    monkeypatch.setattr(evaluation, "_local", local)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"\0" * 100)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    counts = []
    for changed in (None, None, adapter, base):
        if changed:
            (changed / "model.safetensors").write_bytes(b"\1" * 100)
        kept = tmp_path / "kept.jsonl"
        evaluation.evaluate(Judge(), "n", model=str(adapter), kept=kept, say=print)
        counts.append(len(asked))
    assert counts == [3, 3, 6, 9]
    assert len(set(asked)) == 9


def test_a_request_that_is_refused_is_not_sent_again(endpoint, tmp_path):
    endpoint.faults = [404]
    with pytest.raises(UserError, match=r"404: .*why"):
        evaluated(endpoint, tmp_path)
    assert len(endpoint.asked) == 1


def test_a_file_of_something_else_is_named(endpoint, tmp_path):
    (tmp_path / "kept.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=r"kept\.jsonl: line 1"):
        evaluated(endpoint, tmp_path)
