"""The paper's three hyperparameter tables, copied row by row, and what the preset `paper` makes of each row.

Names and values are the printed ones without LaTeX marks; the headings inside the tables are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from appa_flwr.config import Scalar

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
