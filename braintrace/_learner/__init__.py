"""Whole sequences: gradients, evolution and prediction, compiled once per shape."""

from .build import compile as compile
from .check import GradientCheck as GradientCheck
from .check import gradient_check as gradient_check
from .learner import Learner as Learner
