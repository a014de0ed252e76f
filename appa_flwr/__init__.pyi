from appa_flwr.analysis.alignment import alignment_scores as alignment_scores
from appa_flwr.analysis.equations import fairness_index as fairness_index
from appa_flwr.core.errors import UserError as UserError
from appa_flwr.loaded import Answer as Answer
from appa_flwr.loaded import Policy as Policy
from appa_flwr.loaded import Predictor as Predictor
from appa_flwr.public import Run as Run
from appa_flwr.public import load_run as load_run
from appa_flwr.survey.sources import read_survey as read_survey

__version__: str
