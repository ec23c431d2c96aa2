"""User-defined learning rules: the public `Rule`, its sites, and their trace methods."""

from ..._graph import TraceMethod
from .by_operation import RuleTraces
from .by_state import FullRuleTraces
from .protocol import Rule as Rule
from .protocol import check_rule as check_rule
from .protocol import rule_in_words as rule_in_words
from .site import Site as Site


def method_of(rule: Rule) -> TraceMethod:
    """Return the trace method of a rule."""
    passes_weights = rule.jacobian in ("layered", "full")
    return FullRuleTraces(rule) if passes_weights else RuleTraces(rule)
