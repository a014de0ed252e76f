"""docs/paper_map.md and api.md against the code, and the presets against the paper's three hyperparameter tables."""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


# --- the paper's three tables, row by row: names and values as printed, without LaTeX marks and headings ---

ATTENTION = "q_proj,k_proj,v_proj,o_proj"


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        table: SFT (tab:sft-hparams), PPO (tab:ppo-hparams) or APPA (tab:appa-hparams).
        name: its left text.
        says: its right text.
        keys: the keys that say so in the preset `paper`, or the constants that do, and their values; a row without is
            on docs/paper_map.md.
    """

    table: str
    name: str
    says: str
    keys: Mapping[str, Scalar] = field(default_factory=dict)


def as_printed(table: str, name: str, says: str, *keys: str) -> Row:
    """A row whose printed value is that of each of these keys or constants: a number, or the word itself."""
    try:
        value: Scalar = float(says.replace("×10^", "e"))
    except ValueError:
        value = says
    return Row(table, name, says, dict.fromkeys(keys, value))


TWICE_THE_RANK: Mapping[str, Scalar] = {"policy.lora-rank": 16, "server_app.policy.models.ALPHA_PER_RANK": 2}
MODELS = "gemma-2-2b-it{0}, Llama-3.2-3B-Instruct{0}, Qwen3-0.6B-Instruct{0}"
ROWS = (
    Row("SFT", "Base models", MODELS.format(""), {"model": "google/gemma-2-2b-it"}),
    Row("SFT", "Precision", "BF16", {"policy.compute-dtype": "bfloat16"}),
    Row("SFT", "Train/valid split", "80/20%", {"data.test-fraction": 0.2}),
    Row("SFT", "Max sequence length", "500 tokens (prompt + response)", {"policy.max-sequence-length": 500}),
    Row("SFT", "Loss masking", "Response tokens only (query tokens masked)"),
    as_printed("SFT", "Rank (r)", "16", "policy.lora-rank"),
    Row("SFT", "Alpha", "32", TWICE_THE_RANK),
    as_printed("SFT", "Dropout", "0.05", "server_app.policy.sft.LORA_DROPOUT"),
    Row(
        "SFT",
        "Target modules",
        "q,k,v,o_proj, gate,up,down_proj",
        {"policy.sft-targets": f"{ATTENTION},gate_proj,up_proj,down_proj", "policy.tuning": "qlora"},
    ),
    Row("SFT", "Batch size (per device)", "8"),
    Row("SFT", "Gradient accumulation steps", "2"),
    as_printed("SFT", "Effective batch size", "16", "sft.batch-size"),
    as_printed("SFT", "Learning rate", "5×10^-6", "sft.learning-rate"),
    Row("SFT", "Scheduler", "cosine"),
    Row("SFT", "Warmup ratio", "0.1"),
    Row("SFT", "Weight decay", "0.01"),
    Row("SFT", "Epochs", "1 (GLOBALQA) / 4 (OQA)", {"sft.epochs": 1, "sft.steps": 0}),  # no steps: the epochs count
    Row("PPO", "Policy model", MODELS.format(" (SFT)"), {"model": "google/gemma-2-2b-it"}),
    Row("PPO", "Value model", MODELS.format(" (SFT)"), {"model": "google/gemma-2-2b-it"}),
    Row("PPO", "Quantization", "4-bit (nf4, double-quant = True)", {"policy.tuning": "qlora"}),
    Row("PPO", "Compute dtype", "BF16", {"policy.compute-dtype": "bfloat16"}),
    Row("PPO", "Attention implementation", "eager"),
    as_printed("PPO", "Rank (r)", "16", "policy.lora-rank"),
    Row("PPO", "Alpha", "32", TWICE_THE_RANK),
    Row("PPO", "Dropout", "0.05"),
    Row("PPO", "Policy target modules", "q,k,v,o_proj", {"policy.ppo-targets": ATTENTION}),
    Row("PPO", "Value target modules", "q,k,v,o_proj + score", {"policy.ppo-targets": ATTENTION}),
    Row("PPO", "Per-device train batch size", "4", {"ppo.micro-batch-tokens": 4 * 500}),  # 4 rows at full length
    Row("PPO", "Gradient accumulation steps", "24"),
    Row("PPO", "Effective batch size", "96", {"ppo.batch-size": 96, "ppo.num-mini-batches": 1}),
    as_printed("PPO", "Learning rate", "1×10^-5", "ppo.learning-rate"),
    Row("PPO", "Optimizer", "AdamW"),
    Row("PPO", "Weight decay", "0.0"),
    Row("PPO", "Scheduler", "linear"),
    Row("PPO", "Training epochs", "5", {"server_app.ppo_phase.TRAINING_EPOCHS": 5, "ppo.num-iterations": 0}),
    as_printed("PPO", "PPO epochs", "2", "ppo.epochs"),
    Row("PPO", "Mini-batches", "8"),
    Row("PPO", "Per-device eval batch size", "64"),
    Row("PPO", "Response length", "60 tokens", {"ppo.response-length": 60}),
    as_printed("PPO", "Temperature", "0.6", "ppo.temperature"),
    as_printed("PPO", "KL coefficient", "0.05", "ppo.kl-coefficient"),
    as_printed("PPO", "Clip range", "0.2", "ppo.clip-range"),
    as_printed("PPO", "Clip range (value)", "0.2", "ppo.clip-range"),
    as_printed("PPO", "Value loss coefficient (v_f)", "0.2", "server_app.policy.losses.VALUE_COEFFICIENT"),
    as_printed("PPO", "Discount factor (gamma)", "1.0", "server_app.policy.ppo.DISCOUNT"),
    as_printed("PPO", "GAE lambda (lambda_GAE)", "0.95", "server_app.policy.ppo.GAE_LAMBDA"),
    Row("PPO", "Reward whitening", "Per rollout (before PPO update)"),
    as_printed("APPA", "EMA decay (lambda)", "0.8", "appa.ema-decay"),
    as_printed("APPA", "Softmax temperature (T)", "0.1", "appa.temperature"),
    as_printed("APPA", "Fairness Index threshold (tau)", "0.99", "appa.fairness-threshold"),
    Row("APPA", "Initial historical alignment reward (h_g^0)", "0 (all groups)"),
    as_printed("APPA", "Alignment weight (omega)", "0.85", "appa.alignment-weight"),
    Row("APPA", "Min. mean threshold (mu_min)", "1×10^-6"),
    Row("APPA", "Max. CoV cap (CoV_max)", "10.0"),
)


def resolve(name: str) -> object:
    """The module, or what is in it, that a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


# What the page explains, and the keys it names for it.
EXPLAINED = {
    name.strip(): set(re.findall(r"`([^`]+)`", keys))
    for what, keys in re.findall(r"^\| ((?:SFT|PPO|APPA|text): [^|]+)\|[^|]+\|([^|]+)\|$", PAGE, flags=re.MULTILINE)
    for name in what.split(";")
}
# Of GLOBALQA's 2554 questions 2043 (80 %) are for training, so 5 epochs make 10215 rollouts; each sees 2 PPO epochs.
READINGS = {
    # keys: rollouts an iteration, mini-batches, rollouts a step, iterations, optimizer steps
    "preset=paper": (96, 1, 96, 107, 214),  # 10215 / 96 = 106.4; 107 x 2 x 1
    "preset=paper ppo.batch-size=768 ppo.num-mini-batches=8": (
        768,
        8,
        96,
        14,
        224,
    ),  # 10215 / 768 = 13.3; 14 x 2 x 8
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

    # Every row is in the preset, a constant, or on the page; set by the preset itself, as defaults may change.
    given, rows = preset("paper"), {f"{row.table}: {row.name}" for row in ROWS}
    for row in ROWS:
        assert {key: resolve(key) if NAME.fullmatch(key) else given.get(key) for key in row.keys} == row.keys
        assert row.keys or f"{row.table}: {row.name}" in EXPLAINED
    assert rows >= {what for what in EXPLAINED if not what.startswith("text: ")}
    explained = set().union(*EXPLAINED.values())
    assert set(KEYS) >= explained
    assert explained.union(*(row.keys for row in ROWS)) >= set(given)

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
