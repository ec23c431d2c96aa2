"""Tools for any jaxpr, independent of models and eligibility traces."""

from .bodies import RunBody as RunBody
from .bodies import loop_of as loop_of
from .bodies import rebuilt as rebuilt
from .components import components as components
from .components import reached as reached
from .equal import equal_values as equal_values
from .equal import equal_with_derivatives as equal_with_derivatives
from .equal import merged as merged
from .evaluate import Rule as Rule
from .evaluate import Rules as Rules
from .evaluate import evaluate as evaluate
from .evaluate import evaluate_all as evaluate_all
from .evaluate import evaluate_inlined as evaluate_inlined
from .evaluate import inlined as inlined
from .evaluate import interpret as interpret
from .probes import Place as Place
from .probes import evaluate_probed as evaluate_probed
from .program import Program as Program
from .program import carries_derivative as carries_derivative
from .program import program_of as program_of
