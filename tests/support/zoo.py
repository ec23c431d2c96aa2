"""Brainstate models as users write them, with what the compiler should find in each."""

import zoo_paths  # noqa: F401 (adds its models)
import zoo_rate  # noqa: F401
import zoo_spiking  # noqa: F401
import zoo_structure  # noqa: F401
import zoo_weights  # noqa: F401
from zoo_record import MODELS as MODELS
from zoo_record import ZooModel as ZooModel

BY_NAME = {model.name: model for model in MODELS}
