#!/usr/bin/env bash
# torch 2.13.0, Dirichlet of two concentrations of .001: a quarter of the draws are exactly .5 and .5, in double
# precision too, since gamma draws that underflow become one tiny number. Expected: nearly all draws near (1, 0) or
# (0, 1), where numpy 2.4.6 has them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import numpy as np
import torch

torch.manual_seed(0)
theirs = torch.distributions.Dirichlet(torch.full((2,), 0.001, dtype=torch.double)).sample((5000,))[:, 0].numpy()
right = np.random.default_rng(0).dirichlet([0.001] * 2, 5000)[:, 0]
variances = {name: round(float(draws.var()), 3) for name, draws in (("torch", theirs), ("numpy", right))}
print("torch", torch.__version__, "exactly .5:", (theirs == 0.5).mean(), "variances", variances, "true", 0.25 / 1.002)
assert abs(variances["numpy"] - 0.25) < 0.005 and ((right > 0.1) & (right < 0.9)).mean() < 0.005
assert 0.2 < (theirs == 0.5).mean() < 0.28, "small concentrations are drawn: mended"
PY
