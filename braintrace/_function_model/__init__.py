"""Models from pure functions of parameters and state."""

from .model import FunctionModel as FunctionModel
from .model import from_function as from_function
from .model import gradients_by_path as gradients_by_path
from .model import gradients_for as gradients_for
