"""docs/paper_map.md and api.md against the code, and the presets against the paper's three hyperparameter tables."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name as resolve

from appa_flwr.config import KEYS, Scalar
from appa_flwr.config.sources import assemble, preset
from server_app.ppo_phase import num_iterations

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "paper_map.md").read_text(encoding="utf-8")
MODULES = set(re.findall(r"^::: (\S+)$", (REPO / "docs" / "api.md").read_text(), flags=re.MULTILINE))
SPANS = set(re.findall(r"`([^`\n]+)`", PAGE))
NAME = re.compile(r"(?:appa_flwr|pluralllm|server_app|client_app|experiments)(?:\.\w+)+")
NUM_EQUATIONS = 24
WITHOUT_OWN_FUNCTION = {12, 21, 22, 23, 24}  # the standard objective, and the theory
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
PRINTED: dict[str, Scalar] = {
    # SFT table: the preset `paper`, and constants, have what it prints
    "model": "google/gemma-2-2b-it",
    "policy.compute-dtype": "bfloat16",
    "data.test-fraction": 0.2,
    "policy.max-sequence-length": 500,
    "policy.lora-rank": 16,
    "server_app.policy.models.ALPHA_PER_RANK": 2,  # alpha 32
    "server_app.policy.sft.LORA_DROPOUT": 0.05,
    "policy.sft-targets": f"{ATTENTION},gate_proj,up_proj,down_proj",
    "sft.batch-size": 16,
    "sft.learning-rate": 5e-6,
    "sft.epochs": 1,
    "sft.steps": 0,  # so that the epochs count
    # PPO table
    "policy.tuning": "qlora",
    "policy.ppo-targets": ATTENTION,
    "ppo.micro-batch-tokens": 4 * 500,  # 4 rows at full length
    "ppo.batch-size": 96,
    "ppo.num-mini-batches": 1,
    "ppo.learning-rate": 1e-5,
    "server_app.ppo_phase.TRAINING_EPOCHS": 5,
    "ppo.num-iterations": 0,
    "ppo.epochs": 2,
    "ppo.response-length": 60,
    "ppo.temperature": 0.6,
    "ppo.kl-coefficient": 0.05,
    "ppo.clip-range": 0.2,
    "server_app.policy.losses.VALUE_COEFFICIENT": 0.2,
    "server_app.policy.ppo.DISCOUNT": 1.0,
    "server_app.policy.ppo.GAE_LAMBDA": 0.95,
    # APPA table
    "appa.ema-decay": 0.8,
    "appa.temperature": 0.1,
    "appa.fairness-threshold": 0.99,
    "appa.alignment-weight": 0.85,
}


# Of GLOBALQA's 2554 questions 2043 (80 %) are for training, so 5 epochs make 10215 rollouts; each sees 2 PPO epochs.
READINGS = {
    # keys: rollouts an iteration, mini-batches, rollouts a step, iterations, optimizer steps
    "preset=paper": (96, 1, 96, 107, 214),  # 10215 / 96 = 106.4; 107 x 2 x 1
    # 10215 / 768 = 13.3; 14 x 2 x 8
    "preset=paper ppo.batch-size=768 ppo.num-mini-batches=8": (768, 8, 96, 14, 224),
    "preset=paper ppo.num-mini-batches=8": (96, 8, 12, 107, 1712),  # 107 x 2 x 8
}


def test_the_map_s_names_files_equations_and_hyperparameters_are_those_of_the_code_and_the_preset():
    for name in filter(NAME.fullmatch, SPANS - set(KEYS) | MODULES):
        resolve(name)
    assert [span for span in SPANS if span.endswith(".py") and not (REPO / "tests" / span).is_file()] == []
    equations = re.findall(r"^\| (\d+) \|[^|]+\|([^|]+)\|", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _ in equations] == list(range(1, NUM_EQUATIONS + 1))
    for number, code in equations:
        functions = [resolve(name) for name in NAME.findall(code)]
        assert functions
        assert all(map(inspect.isfunction, functions))
        if int(number) not in WITHOUT_OWN_FUNCTION:
            assert re.search(rf"Equations? (\d+ and )?{number}\b", inspect.getdoc(functions[0]) or "")

    # Every row is in the preset, a constant, or explained on the page; set by the preset, as defaults may change.
    given = preset("paper")
    assert {key: resolve(key) if NAME.fullmatch(key) else given.get(key) for key in PRINTED} == PRINTED
    rows = re.findall(r"^\| (?:SFT|PPO|APPA|text): [^|]+\|[^|]+\|([^|]+)\|$", PAGE, flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert set(KEYS) >= explained
    assert explained | PRINTED.keys() >= given.keys()

    found = {}
    for keys in READINGS:
        config = assemble(keys.split(), folder=None)
        size, parts = config.ppo.batch_size, config.ppo.num_mini_batches
        iterations = num_iterations(config, 2043)
        found[keys] = (size, parts, size // parts, iterations, iterations * config.ppo.epochs * parts)
    assert found == READINGS
    # On the page too, beside what each is a reading of.
    numbers = re.findall(r"^\| `(preset=paper[^`]*)` \|[^|]+\|([\d|, ]+)\|$", PAGE, flags=re.MULTILINE)
    named = {keys: tuple(int(number.replace(",", "")) for number in counts.split("|")) for keys, counts in numbers}
    assert named == READINGS
