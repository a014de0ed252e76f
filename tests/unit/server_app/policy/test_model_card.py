"""The aligned policy's card: the hub reads its front matter, a person its scores and how to load it."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from appa_flwr.config import Config
from appa_flwr.run.records import ScoreRecord, SummaryRow
from server_app.policy.model_card import model_card

ROWS = [
    SummaryRow(
        method=method,
        metric=metric,
        avg_as=avg,
        min_as=avg - 0.01,
        fi=0.998,
        fi_readable=None if method == "uniform" else 0.876,
        skill=100 * (1 - (1 - avg) / (1 - 0.821)),
        readable=0.4 if method == "base" else 1.0,
        per_group={},
        format_score=score,
        survey=ScoreRecord(fi=0.876, avg_as=avg - 0.1, min_as=avg - 0.2, per_group={}),
    )
    for method, metric, avg, score in (
        ("ppo", "js", 0.9126, 0.97),
        ("base", "js", 0.049, 0.117),
        ("uniform", "js", 0.821, None),
        ("ppo", "cosine", 0.1234, 0.9),
    )
]


def card(**keys):
    return model_card(
        Config.load({key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}),
        ROWS,
        ["A", "B C"],
        survey="poll.csv (sha256 0123456789ab)",
    )


@pytest.mark.parametrize(("tuning", "library"), [("full", "transformers"), ("lora", "peft")])
def test_the_hub_reads_it(tuning, library):
    data = ModelCard(card(policy__tuning=tuning, sft__learning_rate=1e-3, model="org/name")).data
    assert (data.library_name, data.base_model) == (library, "org/name")
    assert "appa-flwr" in data.tags
    assert ModelCard(card()).data.base_model is None  # the tiny policy is from no hub
    assert (
        ModelCard(card(model="smollm2", sft__learning_rate=1e-3)).data.base_model
        == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_scored_in_four_bits_is_loaded_in_four_bits(dtype):
    keys = {"model": "org/name", "policy__compute_dtype": dtype}
    packed = f'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="{dtype}"'
    assert packed in card(policy__tuning="qlora", **keys)
    assert "BitsAndBytesConfig" not in card(policy__tuning="lora", **keys)


@pytest.mark.parametrize(
    ("survey", "name"),
    [("/data/globalqa.jsonl", "globalqa"), ("Anthropic/llm_global_opinions", "Anthropic/llm_global_opinions")],
)
def test_the_hub_s_index_has_the_policy_s_scores_on_every_metric_and_target(survey, name):
    scores = {"predictions": (0.9126, 0.9026, 0.998), "survey answers": (0.8126, 0.7126, 0.876)}
    cosine = {"predictions": (0.1234, 0.1134, 0.998), "survey answers": (0.0234, -0.0766, 0.876)}
    results = ModelCard(card(survey=survey)).data.eval_results
    found = {
        (result.dataset_type, result.dataset_config, result.dataset_name, result.metric_type): result.metric_value
        for result in results
    }
    assert found == {
        (name, target.replace(" ", "-"), f"{name}, held-out questions, against the {target}", f"{kind}_{metric}"): value
        for metric, values in (("js", scores), ("cosine", cosine))
        for target, three in values.items()
        for kind, value in zip(("avg_as", "min_as", "fi"), three, strict=True)
    }
    assert len(results) == len(found) == 12
    assert {result.dataset_split for result in results} == {"held-out"}
    assert {(r.metric_type, r.metric_name) for r in results} >= {("avg_as_js", "Avg AS (js)"), ("fi_js", "FI (js)")}


def test_scores_of_the_training_metric_beside_the_baselines():
    text = card()
    assert "| ppo | 0.913 | 0.903 | 51.2 | 0.9980 | 0.8760 | 0.970 |" in text  # 100 (1 - .0874 / .179)
    assert "| uniform | 0.821 | 0.811 | 0.0 | 0.9980 | - | - |" in text
    assert "| base (mostly unreadable) | 0.049 |" in text
    assert "0.123" not in text.rpartition("---\n")[2]  # another metric, which only the index of the hub has
    assert "A, B C" in text
    assert "poll.csv (sha256 0123456789ab)" in text
