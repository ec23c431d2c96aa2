"""A plugin of pytest that puts one more model at the beginning of each catalogue.

    PYTHONPATH=$PWD:tests pytest -p more_models --collect-only

`test_by_day.py` compares what is collected with what is collected without it.
"""

import dataclasses

import cases
import nn_models
import zoo

NAME = "OneMoreModel"


def pytest_configure():
    for catalogue in (cases.ALL, cases.DIAGONAL, cases.RECURRENT, nn_models.MODELS, zoo.MODELS):
        catalogue.insert(0, dataclasses.replace(catalogue[0], name=NAME))
