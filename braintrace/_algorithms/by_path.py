"""Different learning rules for different weights, selected by parameter path."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import brainstate

from .._checks import path_filter, shown
from .._errors import CompilationError, OptionError
from .._graph import ETraceGraph, FilteredReadout, HiddenParamOpRelation, TraceMethod
from .._graph.diagnostics import quoted
from .._rules import ComposedTraces
from .._typing import Path, path_name
from .algorithm import ETraceAlgorithm
from .names import algorithm_of, options_of, rule_and_options

SHARED = (*options_of(ETraceAlgorithm), "readout_filters")
"""Options of the whole model."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One algorithm, and the parameters that it applies to.

    Attributes
    ----------
    name
        Name of its traces.
    algorithm, options
        Its class, and the arguments of its constructor.
    given, fits
        The user's filter of parameters, and the same as ``path -> bool``.
    """

    name: str
    algorithm: type[ETraceAlgorithm]
    options: tuple[tuple[str, Any], ...]
    given: Any
    fits: Callable[[Path], bool]

    def instance(self, model: brainstate.nn.Module) -> ETraceAlgorithm:
        """Return an instance of the algorithm for a model."""
        return self.algorithm(model, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class ByPath:
    """Selection of the algorithm of a relation: the first one that fits its parameters."""

    parts: tuple[Part, ...]

    def __call__(self, relation: HiddenParamOpRelation) -> str:
        """Return the name of the algorithm.

        Raises
        ------
        CompilationError
            If the parameters of one operation have several algorithms.
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
        """Return the first algorithm that fits a parameter."""
        return next(part for part in self.parts if part.fits(path))


class RulesByPath(ETraceAlgorithm):
    """Several algorithms in one model; created by `braintrace.compile` with ``rules``.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    elsewhere
        The algorithm of all other weights.
    rules
        See `braintrace.compile`.
    **options
        Options of `ETraceAlgorithm` and of ``elsewhere``.

    Raises
    ------
    OptionError
        If one of the keys of ``rules`` fits no parameter, or if the rules cannot be combined.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        elsewhere: type[ETraceAlgorithm],
        rules: Mapping[Any, Any],
        **options: Any,
    ) -> None:
        shared = {name: value for name, value in options.items() if name in SHARED}
        filters = shared.pop("readout_filters", None)
        super().__init__(model, **shared)
        own = {name: value for name, value in options.items() if name not in SHARED}
        parts = [_part(given, rule) for given, rule in rules.items()]
        parts.append(Part("", elsewhere, tuple(own.items()), None, lambda path: True))
        made_ones = [part.instance(model) for part in parts]
        self._parts = _with_names(parts, made_ones)
        self._check_paths()
        names = [part.name for part in self._parts]
        instances = dict(zip(names, made_ones, strict=True))
        methods = {name: instance.method for name, instance in instances.items()}
        self._by_path = ByPath(self._parts)
        self._composed = ComposedTraces(methods, self._by_path)
        self._filtering = {name for name, one in instances.items() if one.readout_filters}
        self.readout_filters = bool(self._filtering) if filters is None else filters
        self._check_jacobians()
        self._rule = self._in_words(instances)

    @property
    def rule(self) -> str:
        """The rules as text, each with its parameters."""
        return self._rule

    @property
    def method(self) -> TraceMethod:
        """The traces of all algorithms; if all are equal, the traces of the one algorithm."""
        methods = self._composed.rules
        return self._composed if len(methods) > 1 else next(iter(methods.values()))

    def check_model(self, graph: ETraceGraph) -> None:
        """Let every algorithm check the graph of its weights."""
        own = self._composed.graphs_by_rule(graph)
        for part in {part.name: part for part in self._parts}.values():
            if part.name in own:
                part.instance(self.model).check_model(own[part.name])
        for readout in graph.traced.readouts:
            for path in readout.parameter_paths:
                self._check_filtered(readout, path)

    def _check_filtered(self, readout: FilteredReadout, path: Path) -> None:
        """Refuse a rule without filters for a parameter of a filtered readout."""
        part = self._by_path.of_path(path)
        if part.name not in self._filtering:
            raise CompilationError(
                f"The gradient of parameter '{path_name(path)}' of the linear readout "
                f"'{readout.state}' is exact by filters, which `{part.algorithm.__name__}` does "
                "not have. Use a rule with filters, or compile with `readout_filters=False`."
            )

    def _in_words(self, instances: Mapping[str, ETraceAlgorithm]) -> str:
        found: dict[str, list[str]] = {}
        for path in self.model.states(brainstate.ParamState):
            rule = instances[self._by_path.of_path(path).name].rule
            found.setdefault(rule, []).append(path_name(path))
        if len(instances) == 1:
            return next(iter(found))
        return "; ".join(f"{rule} of {quoted(names)}" for rule, names in found.items())

    def _check_paths(self) -> None:
        paths = list(self.model.states(brainstate.ParamState))
        for part in self._parts[:-1]:
            if not any(map(part.fits, paths)):
                raise OptionError(
                    f"`rules` has {shown(part.given)}, which matches no parameter of "
                    f"`{type(self.model).__name__}`; its parameters are "
                    f"{quoted([path_name(path) for path in paths])}."
                )

    def _check_jacobians(self) -> None:
        """Refuse rules that treat a weight differently on the path back from a state."""
        found = {part.name: self._composed.rules[part.name].jacobian for part in self._parts}
        ways = set(found.values()) - {"none"}
        if len(found) == 1:
            return
        if ways - {"elementwise"}:
            listed = ", ".join(
                f"{part.algorithm.__name__} ({found[part.name]})" for part in self._parts
            )
            raise OptionError(
                f"`rules` combines incompatible algorithms: {listed}. All weights of a model "
                "share the paths between states: use algorithms of the kind 'elementwise', with or "
                "without `Immediate` ('none')."
            )


def _part(given: Any, rule: Any) -> Part:
    algorithm, options = rule_and_options(rule)
    name = f"rules[{shown(given)}]"
    for option in set(SHARED) & set(options):
        raise OptionError(
            f"`{name}` has `{option}`, which applies to all weights of a model: pass it to "
            "`compile`."
        )
    return Part(
        "", algorithm_of(algorithm, name), tuple(options.items()), given, path_filter(given)
    )


def _with_names(parts: list[Part], instances: list[ETraceAlgorithm]) -> tuple[Part, ...]:
    """Return the parts with names: the names of their classes, numbered if rules differ.

    Parts with equal rules have one name, and so the same traces.
    """
    different: list[ETraceAlgorithm] = []
    for instance in instances:
        if not any(_are_equal(instance, other) for other in different):
            different.append(instance)
    names = [(type(one).names or (type(one).__name__,))[0] for one in different]
    numbered = [
        name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    ]
    return tuple(
        dataclasses.replace(part, name=name)
        for part, instance in zip(parts, instances, strict=True)
        for other, name in zip(different, numbered, strict=True)
        if _are_equal(instance, other)
    )


def _are_equal(one: ETraceAlgorithm, other: ETraceAlgorithm) -> bool:
    """Test whether two algorithms of a model have equal traces and gradients for all weights."""
    return (
        type(one) is type(other)
        and one.method == other.method
        and one.readout_filters == other.readout_filters
    )
