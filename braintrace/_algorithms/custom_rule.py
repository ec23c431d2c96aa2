"""Algorithm for a user-defined `Rule`."""

import functools
from typing import Any, ClassVar

from .._graph import TraceMethod
from .._rules import Rule, check_rule, method_of, rule_in_words
from .algorithm import ETraceAlgorithm


class OwnRule(ETraceAlgorithm):
    """Online learning by a `Rule`; `of_rule` creates a subclass for each rule."""

    learning_rule: ClassVar[Rule]

    @property
    def rule(self) -> str:
        """The rule with its options, ``"Decaying(decay=0.9)"``."""
        return rule_in_words(self.learning_rule)

    @property
    def method(self) -> TraceMethod:
        """The rule as a trace method."""
        return method_of(self.learning_rule)


def of_rule(rule: Rule) -> type[ETraceAlgorithm]:
    """Return the algorithm of a rule; equal rules have the same algorithm.

    Raises
    ------
    OptionError
        If the rule is not a frozen dataclass, or has an unknown ``jacobian``.
    """
    check_rule(rule)
    hashable: Any = rule
    return _class_of(hashable)


@functools.lru_cache(maxsize=256)
def _class_of(rule: Any) -> type[ETraceAlgorithm]:
    own = type(rule)
    return type(own.__name__, (OwnRule,), {"learning_rule": rule, "__module__": own.__module__})
