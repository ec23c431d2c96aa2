"""Checkpoints: save a learner to a folder, and restore it."""

from .checkpoint import restore as restore
from .checkpoint import save as save
