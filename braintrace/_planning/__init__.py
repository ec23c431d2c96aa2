"""Memory and operations of a learner, computed before allocation."""

from .plan import Change as Change
from .plan import Plan as Plan
from .plan import plan as plan
