"""Whole sequences: gradients, evolution and prediction, compiled once per shape."""

from .build import compile as compile
from .learner import Learner as Learner
