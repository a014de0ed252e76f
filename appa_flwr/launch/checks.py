"""Checks before a run starts: survey, rules and groups, model and address."""

import json
import subprocess
import sys

from appa_flwr.analysis.rule_choice import check_rules
from appa_flwr.config import TINY_MODEL, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_cache
from appa_flwr.core.ports import listening
from appa_flwr.launch import bundle
from appa_flwr.launch.terminal import USER_ERROR, RunFailed, show
from appa_flwr.run.resume import rule_values
from appa_flwr.run.schema import SURVEY_FILE
from appa_flwr.survey import sources
from appa_flwr.survey.split import split_questions, too_few
from appa_flwr.survey.types import Survey


def read_survey(config: Config) -> Survey:
    """Read the survey of a new or resumed run, check that the config fits it, and print which groups cannot be scored.

    Raises:
        UserError: the survey cannot be read, a group has no usable answer, the source has changed since the run began,
            there are too few questions for a split, or `check_rules` or `rule_values` rejects the config.
    """
    survey = sources.kept_survey(config, config.run_folder / SURVEY_FILE) if config.run.resume else None
    survey = survey or sources.read_run(config)
    rule_values(config, check_rules(config, survey.groups or config.group_names))
    split_questions(survey.questions, test_fraction=config.data.test_fraction, seed=config.seed)
    show(too_few(survey, test_fraction=config.data.test_fraction, seed=config.seed) or None)
    return survey


def check_server(config: Config) -> None:
    """Check the cache, the address of a serving run, and tracker and model, by the server's code.

    Raises:
        UserError: one of them cannot be used.
        RunFailed: the server's code cannot be started.
    """
    check_cache()
    if config.run.phases == "serve":
        listening(config.serve.host, config.serve.port).close()
    if config.model == TINY_MODEL and not config.run.tracker:
        return
    command = [sys.executable, "-m", "server_app.preflight"]
    # Progress, such as of a download, is shown on stderr; the message of an error comes on stdout.
    done = subprocess.run(
        command, cwd=bundle.APP_FOLDER, input=json.dumps(config.flat()), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == USER_ERROR:
        raise UserError(done.stdout.strip())
    if done.returncode:
        raise RunFailed(f"the server's code in {bundle.APP_FOLDER} cannot be started; what it said stands above")
