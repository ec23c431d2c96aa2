"""Algorithms by name, by class, or for a `Rule` of the user; each class declares its names."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from .._checks import shown
from .._errors import OptionError
from .._rules import Rule, check_rule, method_of, rule_in_words
from .learner import Learner


def of_rule(rule: Rule) -> type[Learner]:
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
def _class_of(rule: Any) -> type[Learner]:
    own, method = type(rule), method_of(rule)
    told = {"method": method, "told_rule": rule_in_words(rule), "__module__": own.__module__}
    return type(own.__name__, (Learner,), told)


def algorithms_by_name() -> dict[str, type[Learner]]:
    """Return every defined algorithm, in this package or elsewhere, by its names.

    If a class is defined again, as in a notebook, the last definition counts.

    Raises
    ------
    OptionError
        If two different classes declare the same name.
    """
    found: dict[str, type[Learner]] = {}
    for algorithm in _subclasses(Learner):
        for name in map(str.lower, vars(algorithm).get("names", ())):
            other = found.setdefault(name, algorithm)
            if _full_name(other) != _full_name(algorithm):
                raise OptionError(
                    f"`{_full_name(other)}` and `{_full_name(algorithm)}` both have the name "
                    f"'{name}'. Change `names` of one of them, or pass the class to `compile`."
                )
            found[name] = algorithm
    return found


def algorithm_of(given: Any, option: str) -> type[Learner]:
    """Return the algorithm for a class, a name or a `Rule`.

    Raises
    ------
    OptionError
        If there is none; the message contains the option.
    """
    if _is_algorithm(given):
        return given
    if isinstance(given, Rule) and not isinstance(given, type):
        return of_rule(given)
    by_name = algorithms_by_name()
    if isinstance(given, str) and given.lower() in by_name:
        return by_name[given.lower()]
    raise OptionError(
        f"`{option}` is {shown(given)}; expected one of {', '.join(map(repr, by_name))}, a class "
        "such as `braintrace.D_RTRL` or a `braintrace.Rule`."
    )


def _is_algorithm(given: object) -> TypeGuard[type[Learner]]:
    return isinstance(given, type) and issubclass(given, Learner) and given is not Learner


def options_of(algorithm: type) -> dict[str, inspect.Parameter]:
    """Return the options that the constructor of an algorithm declares."""
    parameters = inspect.signature(algorithm.__init__).parameters.items()  # type: ignore[misc]
    return {name: p for name, p in parameters if p.kind is p.KEYWORD_ONLY}


def rule_and_options(rule: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a rule that may be given as a pair of the rule and its options, with its options."""
    has_options = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Mapping)
    return rule if has_options else (rule, {})


def _subclasses(of: type[Learner]) -> Iterator[type[Learner]]:
    for algorithm in of.__subclasses__():
        yield algorithm
        yield from _subclasses(algorithm)


def _full_name(algorithm: type) -> str:
    return f"{algorithm.__module__}.{algorithm.__qualname__}"
