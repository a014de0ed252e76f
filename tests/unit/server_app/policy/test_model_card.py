"""The aligned policy's card: the hub reads its front matter, a person its scores and how to load it."""

from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from report_runs import row
from small import keys_of

from appa_flwr.config import Config
from appa_flwr.run.records import SummaryRow
from server_app.policy.model_card import model_card

ROWS = [
    SummaryRow(**row(method, avg, avg - 0.01, metric=metric, against=against))
    for method, metric, against, avg in (
        ("ppo", "js", "survey", 0.9126),
        ("uniform", "js", "predictions", 0.821),
        ("ppo", "cosine", "survey", 0.1234),
    )
]


def card(**keys):
    base = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), stop_ids=(2, 7))
    origin = "poll.csv (sha256 0123456789ab)"
    return model_card(Config.load(keys_of(keys)), ROWS, ["A", "B C"], base, survey=origin, prompt="Which?")


@pytest.mark.parametrize(
    ("tuning", "dtype", "library"),
    [("full", "float32", "transformers"), ("lora", "bfloat16", "peft"), ("qlora", "bfloat16", "peft")],
)
def test_the_hub_reads_it_and_a_policy_scored_in_four_bits_is_loaded_in_four_bits(tuning, dtype, library, tmp_path):
    text = card(policy__tuning=tuning, policy__compute_dtype=dtype, sft__learning_rate=1e-3, model="org/name")
    data = ModelCard(text).data
    assert (data.library_name, data.base_model) == (library, "org/name")
    assert "appa-flwr" in data.tags
    assert (f'bnb_4bit_compute_dtype="{dtype}"' in text) == (tuning == "qlora")
    assert ModelCard(card()).data.base_model is None  # the tiny policy is from no hub
    assert ModelCard(card(model=str(tmp_path), sft__learning_rate=1e-3)).data.base_model is None
    smollm2 = card(model="smollm2", sft__learning_rate=1e-3)
    assert ModelCard(smollm2).data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_scores_of_the_training_metric_beside_the_baselines():
    text = card()
    assert "| ppo | survey | 0.9126 | 0.9026 | 0.9876 | 0.9500 |" in text
    assert "| uniform | predictions | 0.8210 | 0.8110 | 0.9876 | - |" in text
    assert "0.123" not in text  # of another metric
    assert "A, B C" in text
    assert "poll.csv (sha256 0123456789ab)" in text
