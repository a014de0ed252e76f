"""`appa eval --model FOLDER` answers as a run's own evaluation does."""

import numpy as np
from fakes import catalogue_of
from small import CHOSEN

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from server_app import evaluation
from server_app.inputs import PolicyInputs, RunInputs
from server_app.loaded import LocalModel
from server_app.policy import base, tiny
from server_app.policy.tiny import TinyRecipe

TOKENS = 12


def test_a_folder_s_model_answers_as_in_a_run(tmp_path):
    catalogue = catalogue_of([2, 3, 4, 2, 5], train=[False] * 5)
    recipe = TinyRecipe("dpa", steps=1, batch_size=8, hidden_size=32, num_layers=1, num_heads=2)
    model, tokenizer = tiny.build(recipe, catalogue.questions)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = Config.load({**CHOSEN, "model": str(tmp_path), "ppo.response-length": TOKENS})
    found = base.prepare(config, [])
    all_J = np.arange(5)
    inputs = PolicyInputs(found, [found.prompt_ids(config, question) for question in catalogue.questions], all_J, all_J)
    model, run = base.load_model(config, found.source, quantized=False), RunInputs(config, None, None, catalogue)
    expected = evaluation.greedy_answers(run, model, inputs, all_J).texts
    asked = LocalModel(str(tmp_path))
    prompts = [formats.prompt("dpa", q.text, q.options, style="compact") for q in catalogue.questions]
    assert tuple(asked.answers(prompts, answer_tokens=TOKENS)) == expected
