"""APPA on Flower: surveys, aggregation rules, scores and finished runs. The public names are in `__all__`.

Each name is imported on first use, since a group's machine lacks the libraries of the other parties.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "Run": "appa_flwr.public",
    "Answer": "appa_flwr.loaded",
    "Policy": "appa_flwr.loaded",
    "Predictor": "appa_flwr.loaded",
    "load_run": "appa_flwr.public",
    "fairness_index": "appa_flwr.analysis.equations",
    "alignment_scores": "appa_flwr.analysis.alignment",
    "read_survey": "appa_flwr.survey.sources",
    "UserError": "appa_flwr.core.errors",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
