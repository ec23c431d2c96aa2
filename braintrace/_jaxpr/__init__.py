"""Tools on jaxprs that know nothing of eligibility traces or of models."""

from .equal import equal_values as equal_values
from .evaluate import Rule as Rule
from .evaluate import evaluate as evaluate
from .inline import evaluate_inlined as evaluate_inlined
from .linear import Kind as Kind
from .linear import kinds_of as kinds_of
from .linear import kinds_of_outputs as kinds_of_outputs
from .program import Program as Program
from .program import program_of as program_of
