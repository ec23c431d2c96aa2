"""What a learner will take, before anything of it is allocated."""

from .plan import Change as Change
from .plan import Plan as Plan
from .plan import plan as plan
