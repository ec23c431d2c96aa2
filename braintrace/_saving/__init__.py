"""What a learner is, in a folder."""

from .checkpoint import restore as restore
from .checkpoint import save as save
