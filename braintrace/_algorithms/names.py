"""Registry of algorithms by name; each class declares its names."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import brainstate

from .._arguments import did_you_mean, shown, wrong_names
from .._errors import OptionError
from .._rules import Rule
from .algorithm import ETraceAlgorithm
from .custom_rule import of_rule


def algorithms_by_name() -> dict[str, type[ETraceAlgorithm]]:
    """Return every defined algorithm, in this package or elsewhere, by its names.

    If a class is defined again, as in a notebook, the last definition counts.

    Raises
    ------
    OptionError
        If two different classes declare the same name, or ``names`` is not a tuple of strings.
    """
    found: dict[str, type[ETraceAlgorithm]] = {}
    for algorithm in _subclasses(ETraceAlgorithm):  # type: ignore[type-abstract]
        for name in _names(algorithm):
            other = found.setdefault(name, algorithm)
            if _full_name(other) != _full_name(algorithm):
                raise OptionError(
                    f"`{_full_name(other)}` and `{_full_name(algorithm)}` both have the name "
                    f"'{name}'. Change `names` of one of them, or pass the class to `compile`."
                )
            found[name] = algorithm
    return found


def algorithm_of(given: Any, option: str) -> type[ETraceAlgorithm]:
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
    near = did_you_mean(given.lower(), by_name) if isinstance(given, str) else ""
    raise OptionError(
        f"`{option}` is {shown(given)}; {near}"
        f"expected one of {', '.join(map(repr, by_name))}, a class such as `braintrace.D_RTRL` or "
        f"a `braintrace.Rule`."
    )


def _is_algorithm(given: object) -> TypeGuard[type[ETraceAlgorithm]]:
    is_class = isinstance(given, type) and issubclass(given, ETraceAlgorithm)
    return is_class and not inspect.isabstract(given)


def made(
    algorithm: type[ETraceAlgorithm], model: brainstate.nn.Module, options: Mapping[str, Any]
) -> ETraceAlgorithm:
    """Return an instance of an algorithm with some options.

    Raises
    ------
    OptionError
        If the algorithm does not accept them, or needs others.
    """
    try:
        return algorithm(model, **options)
    except TypeError as error:
        raise OptionError(
            f"{algorithm.__name__} {_complaint(algorithm, options, error)}"
        ) from error


def _complaint(
    algorithm: type[ETraceAlgorithm], options: Mapping[str, Any], error: TypeError
) -> str:
    """Return the reason why an algorithm refuses some options, as text."""
    needed = {name: o.default is o.empty for name, o in options_of(algorithm).items()}
    return wrong_names(options, needed) or f"cannot be made: {error}."


def options_of(algorithm: type) -> dict[str, inspect.Parameter]:
    """Return the options of an algorithm, starting with the ones that its class declares."""
    parameters = inspect.signature(algorithm).parameters.items()
    return {name: p for name, p in parameters if name != "model" and p.kind is not p.VAR_POSITIONAL}


def rule_and_options(rule: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a rule that may be given as a pair of the rule and its options, with its options."""
    has_options = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Mapping)
    return rule if has_options else (rule, {})


def _names(algorithm: type[ETraceAlgorithm]) -> list[str]:
    names = vars(algorithm).get("names", ())
    if isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names):
        return [name.lower() for name in names]
    raise OptionError(
        f"`names` of `{_full_name(algorithm)}` is {shown(names)}; expected a tuple of strings."
    )


def _subclasses(of: type[ETraceAlgorithm]) -> Iterator[type[ETraceAlgorithm]]:
    for algorithm in of.__subclasses__():
        if not inspect.isabstract(algorithm):
            yield algorithm
        yield from _subclasses(algorithm)


def _full_name(algorithm: type) -> str:
    return f"{algorithm.__module__}.{algorithm.__qualname__}"
