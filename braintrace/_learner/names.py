"""Rules by name, by class, or for a `Rule` of the user; and other rules for some weights."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import brainstate

from .._checks import path_filter, shown
from .._errors import CompilationError, OptionError
from .._graph import ETraceGraph, HiddenParamOpRelation, TraceMethod
from .._graph.diagnostics import quoted
from .._rules import ComposedTraces, Rule, check_rule, method_of, rule_in_words
from .._typing import Path, path_name
from .learner import Learner


@functools.lru_cache(maxsize=256)
def _class_of(rule: Any) -> type[Learner]:
    own, method = type(rule), method_of(rule)
    told = {"method": method, "told_rule": rule_in_words(rule), "__module__": own.__module__}
    return type(own.__name__, (Learner,), told)


def algorithms_by_name() -> dict[str, type[Learner]]:
    """Return every defined algorithm, in this package or elsewhere, by its names.

    If a name is defined again, as in a notebook, the last definition counts.
    """
    algorithms = _subclasses(Learner)
    return {name.lower(): each for each in algorithms for name in vars(each).get("names", ())}


def algorithm_of(given: Any, option: str) -> type[Learner]:
    """Return the algorithm for a class, a name or a `Rule`.

    Raises
    ------
    OptionError
        If there is none; the message contains the option.
    """
    if isinstance(given, type) and issubclass(given, Learner):
        return given
    if isinstance(given, Rule) and not isinstance(given, type):
        check_rule(given)
        hashable: Any = given
        return _class_of(hashable)
    by_name = algorithms_by_name()
    if isinstance(given, str) and given.lower() in by_name:
        return by_name[given.lower()]
    raise OptionError(
        f"`{option}` is {shown(given)}; expected one of {', '.join(map(repr, by_name))}, a class "
        "such as `braintrace.D_RTRL` or a `braintrace.Rule`."
    )


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


# --- by the path of a parameter


@dataclasses.dataclass(frozen=True)
class Part:
    """One rule, the name of its traces, and the parameters that it applies to."""

    kind: type[Learner]
    method: TraceMethod
    rule: str
    filters: bool
    fits: Callable[[Path], bool]
    name: str = ""

    @property
    def identity(self) -> Any:
        """What equal rules have in common, and so the same traces."""
        return self.kind, self.method, self.filters


@dataclasses.dataclass(frozen=True)
class ByPath:
    """Selection of the rule of an operation: the first one that fits its parameters."""

    parts: tuple[Part, ...]

    def __call__(self, relation: HiddenParamOpRelation) -> str:
        """Return the name of the rule.

        Raises
        ------
        CompilationError
            If the parameters of one operation have several rules.
        """
        by_path = {path: self.of_path(path).name for path in relation.parameter_paths}
        if len(set(by_path.values())) > 1:
            listed = ", ".join(f"'{path_name(path)}': {rule}" for path, rule in by_path.items())
            raise CompilationError(
                f"`{relation.primitive.name}` ({relation.source}) has parameters with several "
                f"`rules` ({listed}). An operation has one rule: use the same rule for its "
                "parameters."
            )
        return next(iter(by_path.values()))

    def of_path(self, path: Path) -> Part:
        """Return the first part that fits a parameter."""
        return next(part for part in self.parts if part.fits(path))


class TracesByPath(ComposedTraces):
    """The traces of all rules."""

    chosen: ByPath

    def check(self, graph: ETraceGraph) -> None:
        """Refuse also a rule without filters for a parameter of a filtered readout."""
        super().check(graph)
        for readout in graph.traced.readouts:
            for part, path in ((self.chosen.of_path(p), p) for p in readout.parameter_paths):
                if not part.filters:
                    raise CompilationError(
                        f"The gradient of parameter '{path_name(path)}' of the linear readout "
                        f"'{readout.state}' is exact by filters, which "
                        f"`{part.kind.__name__}` does not have. Use a rule with filters, "
                        "or compile with `readout_filters=False`."
                    )


def choose_by_path(learner: Learner, rules: Mapping[Any, Any], filters: bool | None) -> None:
    """Give a learner other rules for some weights; see `braintrace.compile`.

    ``filters`` is the user's ``readout_filters``.

    Raises
    ------
    OptionError
        If a key of ``rules`` fits no parameter, or the rules cannot be combined.
    """
    paths = list(learner.module.states(brainstate.ParamState))
    parts = [_part(learner.module, paths, given, rule) for given, rule in rules.items()]
    parts = _named([*parts, _part_of(learner, lambda path: True)])
    _check_jacobians(parts)
    learner.readout_filters = any(p.filters for p in parts) if filters is None else filters
    methods = {part.name: part.method for part in parts}
    if len(methods) > 1:
        chosen, told = ByPath(tuple(parts)), dict[str, list[str]]()
        for path in paths:
            told.setdefault(chosen.of_path(path).rule, []).append(path_name(path))
        learner.told_rule = "; ".join(f"{rule} of {quoted(names)}" for rule, names in told.items())
        learner.method = TracesByPath(methods, chosen)


def _part(model: brainstate.nn.Module, paths: list[Path], given: Any, rule: Any) -> Part:
    (algorithm, options), fits = rule_and_options(rule), path_filter(given)
    for option in {*options_of(Learner), "readout_filters"} & set(options):
        raise OptionError(
            f"`rules[{shown(given)}]` has `{option}`, which applies to all weights of a model: "
            "pass it to `compile`."
        )
    if not any(map(fits, paths)):
        raise OptionError(
            f"`rules` has {shown(given)}, which matches no parameter of "
            f"`{type(model).__name__}`; its parameters are {quoted(list(map(path_name, paths)))}."
        )
    return _part_of(algorithm_of(algorithm, f"rules[{shown(given)}]")(model, **options), fits)


def _part_of(learner: Learner, fits: Callable[[Path], bool]) -> Part:
    return Part(type(learner), learner.method, learner.rule, learner.readout_filters, fits)


def _named(parts: list[Part]) -> list[Part]:
    """Return the parts with the names of their classes, numbered if rules differ."""
    different = list(dict.fromkeys(part.identity for part in parts))
    names = [(kind.names or (kind.__name__,))[0] for kind, *_ in different]
    numbered = {
        one: name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}"
        for i, (one, name) in enumerate(zip(different, names, strict=True))
    }
    return [dataclasses.replace(part, name=numbered[part.identity]) for part in parts]


def _check_jacobians(parts: list[Part]) -> None:
    """Refuse rules that treat a weight differently on the path back from a state."""
    ways = {part.method.jacobian for part in parts} - {"none"}
    if len({part.name for part in parts}) > 1 and ways - {"elementwise"}:
        listed = ", ".join(f"{p.kind.__name__} ({p.method.jacobian})" for p in parts)
        raise OptionError(
            f"`rules` combines incompatible algorithms: {listed}. All weights of a model share the "
            "paths between states: use algorithms of the kind 'elementwise', with or without "
            "`Immediate` ('none')."
        )
