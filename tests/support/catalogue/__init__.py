"""Brainstate models as users write them, with what the compiler should find in each."""

import pytest

from . import basic, paths, rate, spiking, structure  # noqa: F401 (each adds its models)
from .layers import LAYERS as LAYERS
from .model import BATCH as BATCH
from .model import INPUTS as INPUTS
from .model import MODELS as MODELS
from .model import OUTPUTS as OUTPUTS
from .model import REFUSED as REFUSED
from .model import Cell as Cell
from .model import H as H
from .model import Model as Model
from .model import described as described
from .model import verdict as verdict

BY_NAME = {model.name: model for model in MODELS}
BASIC = [model for model in MODELS if model.module.__module__ == basic.__name__]
"""Those that most tests run over."""
DIAGONAL = [model for model in BASIC if model.diagonal]
RECURRENT = [model for model in BASIC if not model.diagonal]


def each(models):
    """Parametrise a test over models, named in its output."""
    rows = [pytest.param(model, id=model.name) for model in models]
    return pytest.mark.parametrize("case", rows)
