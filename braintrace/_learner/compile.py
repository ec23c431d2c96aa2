"""Construction of a learner: by the name or class of its rule, by rules per weight, on a mesh.

`compile_etrace_graph` analyses a model without a learner.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
from jax.sharding import AxisType, Mesh

from .._brainstate import initialise
from .._checks import in_words, path_filter, path_name, quoted, shown
from .._compiler import CompilerOptions, compile_model
from .._ended import OPTIONS
from .._errors import OptionError
from .._graph.graph import ETraceGraph
from .._rules.by_path import ComposedTraces, Part
from .._rules.custom_rules import method_of
from .._rules.d_rtrl import ParameterTraces
from .._rules.late import late_traces
from .._rules.protocol import Rule, check_rule, rule_in_words
from ..sharding import DataAxis
from .arguments import first_step
from .learner import Learner


def compile(
    model: brainstate.nn.Module,
    algorithm: str | type[Learner] | Rule,
    *example_arguments: Any,
    batch_size: int | None = None,
    vmap: bool = False,
    rules: Mapping[Any, Any] | None = None,
    seed: int | None = None,
    **algorithm_options: Any,
) -> Learner:
    """Initialise a model's states, analyse one step, and return a learner.

    Parameters
    ----------
    model
        A brainstate module; its ``update`` is one time step. `from_function` converts a function to
        a module, and so a model of Flax or Equinox.
    algorithm
        A class, or one of its ``names``, in any case: ``'d_rtrl'``, ``'es_d_rtrl'``, ``'snap'`` and
        so on, including your subclasses of `Learner`. Or an instance of your own `Rule`.
    *example_arguments
        Example arguments of ``update`` for one step; only structure, shapes and units matter.
    batch_size
        Argument of the model's ``init_state``; ``None``: the model has no batch axis.
    vmap
        The model is written for one sample and is mapped over a batch axis. This is the first axis
        of arguments and states, and the second axis of sequences, after time.
    rules
        Other algorithms for some weights: ``{"conv": "es_d_rtrl"}``. A key selects parameters: a
        path or the start of a path (``"cell/w"``, ``("cell", "w")``), or a predicate of a path; the
        first matching key applies. A value is an algorithm, or a pair of an algorithm and its
        options: ``("ottt", {"decay": 0.9})``. The gradient of each weight is the gradient of its
        algorithm alone; equal algorithms count as one. All algorithms must truncate the same paths,
        as `D_RTRL`, `ES_D_RTRL` and `OTTT` do, with or without `Immediate`.
    seed
        Seed of ``brainstate.random`` before the states are initialised, and of an algorithm that
        draws numbers (`UORO`, `KF_RTRL`); ``None``: the keys of ``brainstate.random`` continue.
    **algorithm_options
        Options of the algorithm; ``window``, ``strict``, ``mark`` and
        ``trace_dtype`` apply to all algorithms. With a ``window``, gradients are backpropagation
        through time in windows of that many steps, plus the traces before them; see
        `Learner.etrace_grad`. If no ETP operation reaches a hidden state, the compiler marks the
        model's parameters; see `compile_etrace_graph`.

    Raises
    ------
    OptionError
        For an unknown algorithm, or ``rules`` that fit no parameter or cannot be combined.
    ShapeError
        With ``vmap``, if the arguments have no common first axis of size ``batch_size``.
    CompilationError, DtypeError, UnitError
        See `compile_etrace_graph`.

    Notes
    -----
    One step is traced once, as with ``jax.jit``. Values that ``update`` reads from anything but its
    arguments and States (attributes of a module, ``brainstate.environ``) are fixed now. Pass values
    that change from step to step, such as the time, as arguments, or store them in a State. Flags
    and strings of ``brainstate.environ``, such as ``fit``, select a compiled step; a changed number
    (a time step) takes effect after ``compile_graph``.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> xs = jnp.ones((3, 1, 2))
    >>> learner = braintrace.compile(Leaky(), "d_rtrl", xs[0], batch_size=1)
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")
    >>> float(gradients[("w",)][0, 0])
    4.25
    """
    chosen = algorithm_of(algorithm, "algorithm")
    for option in algorithm_options.keys() & OPTIONS.keys():
        raise OptionError(f"`compile` has no option `{option}`: {OPTIONS[option]}.")
    if seed is not None and "seed" in options_of(chosen):
        algorithm_options["seed"] = seed
    learner = chosen(model, **algorithm_options)
    if rules is not None:
        choose_by_path(learner, rules)
    example, mapped = first_step(example_arguments), None
    if vmap:
        mapped = batch_size or len(jax.tree.leaves(example)[0])
    options, samples = learner.compiler_options, None if vmap else batch_size
    learner.compiler_options = dataclasses.replace(options, samples=samples)
    if seed is not None:
        brainstate.random.seed(seed)
    given = {} if vmap or batch_size is None else {"batch_size": batch_size}
    size = f"`batch_size={batch_size}`" if given else "no `batch_size`"
    with in_words(lambda: f"`compile` called `init_state` of `{type(model).__name__}` with {size}"):
        initialise(model, **given)
    learner.compile_graph(*example, batch_size=mapped)
    return learner


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *arguments: Any,
    batch_size: int | None = None,
    strict: bool = False,
    mark: Any = None,
) -> ETraceGraph:
    """Analyse one step of a model.

    Parameters
    ----------
    model
        A brainstate module with initialised states, whose ``update`` is one step.
    *arguments
        Example arguments of ``update``; their values do not matter.
    batch_size
        ``None``: the model is analysed unchanged. A number: the model is written for one sample,
        and is analysed mapped over a leading batch axis of that size.
    strict
        Raise instead of warning if a part of the gradient is truncated.
    mark
        The parameters that learn online. ``None``: the parameters that the model marks; if no ETP
        operation with a parameter reaches a hidden state, the same as ``'auto'``. ``'explicit'``:
        the parameters that the model marks, and a model without marks is refused. ``'auto'``: all
        parameters whose operations have an ETP form: products and convolutions of any layout, with
        their biases, and elementwise operations. Existing marks stay. A path, the start of a path
        (``"cell/w"``, ``("cell", "w")``) or a function of a path: only these parameters are marked.

    Returns
    -------
    ETraceGraph
        Frozen and printable.

    Raises
    ------
    CompilationError
        If the model has no hidden states, complex ones, no weight that learns on the path to one,
        or (with ``strict``) a path that a trace cannot follow; or if JAX or brainstate do not
        support an operation of ``update``.
    OptionError
        If ``model`` or an option has a value that is not accepted.
    NotInitializedError
        If ``init_state`` has not been called.
    UnitError
        If physical units are incompatible in ``update``.
    DtypeError
        If a parameter of an ETP operation is not floating-point, or is not finite, or if an
        argument is not a JAX type.

    Warns
    -----
    ApproximationWarning
        Once for every diagnostic of level ``'warning'``.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = brainstate.nn.init_all_states(braintrace.nn.IndRNN(2, 3), batch_size=1)
    >>> graph = braintrace.compile_etrace_graph(model, jnp.ones((1, 2)))
    >>> [relation.printed_paths for relation in graph.hidden_param_op_relations]
    [('u',), ('W/weight',)]
    """
    options = CompilerOptions(strict=strict, mark=mark)
    return compile_model(model, arguments, batch_size, options, ParameterTraces(late_traces))[0]


def shard(learner: Learner, mesh: Mesh, data: str = "data") -> None:
    """Shard a learner's arrays over the devices of a mesh.

    Samples are sharded over one axis of the mesh: states, traces and arguments along their batch
    axis. Parameters that you have placed on the mesh keep their sharding; all other arrays are
    replicated. All calls work as before with the same results, and arrays keep their placement,
    also after `reset_state` and `restore`. Arguments may be on any devices.

    Parameters
    ----------
    learner
        The learner, possibly in the middle of a sequence.
    mesh
        The devices, along ``Auto`` axes. They may belong to several processes; all of these must
        then call the same methods.
    data
        Axis of the mesh over which samples are sharded.

    Raises
    ------
    OptionError
        If the mesh has an ``Explicit`` axis, or if the arguments have no batch.
    ShapeError
        If the batch size is not a multiple of the number of parts.
    NotCompiledError
        If the learner has not been compiled.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 4)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((8, 2)), batch_size=8)
    >>> auto = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    >>> braintrace.shard(learner, mesh)
    >>> gradients = learner.etrace_grad(
    ...     jnp.ones((5, 8, 2)), step_fn=lambda x: (learner(x) ** 2).mean()
    ... )
    """
    if AxisType.Explicit in (mesh.axis_types or ()):
        raise OptionError(
            "`mesh` has `Explicit` axes; expected `Auto` ones: "
            "`jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
        )
    learner.divide(DataAxis(mesh, data))


# --- rules by name


@functools.lru_cache(maxsize=256)
def _class_of(rule: Any) -> type[Learner]:
    told = {"method": method_of(rule), "rule": rule_in_words(rule)}
    return type(type(rule).__name__, (Learner,), told | {"__module__": type(rule).__module__})


def algorithms_by_name(of: type[Learner] = Learner) -> dict[str, type[Learner]]:
    """Return every defined algorithm, in this package or elsewhere, by its names.

    If a name is defined again, as in a notebook, the last definition counts.
    """
    found: dict[str, type[Learner]] = {}
    for each in of.__subclasses__():
        found |= {name.lower(): each for name in vars(each).get("names", ())}
        found |= algorithms_by_name(each)
    return found


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


def options_of(algorithm: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters that the constructor of an algorithm declares."""
    return inspect.signature(algorithm.__init__).parameters


def rule_and_options(rule: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a rule that may be given as a pair of the rule and its options, with its options."""
    has_options = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Mapping)
    return rule if has_options else (rule, {})


# --- by the path of a parameter


def choose_by_path(learner: Learner, rules: Mapping[Any, Any]) -> None:
    """Give a learner other rules for some weights; see `braintrace.compile`.

    Raises
    ------
    OptionError
        If a key of ``rules`` fits no parameter, or the rules cannot be combined.
    """
    model, parts = learner.module, []
    paths = list(model.states(brainstate.ParamState))
    for given, rule in rules.items():
        (algorithm, options), fits = rule_and_options(rule), path_filter(given)
        where = f"rules[{shown(given)}]"
        if common := options.keys() & options_of(Learner).keys():
            raise OptionError(
                f"`{where}` has {quoted(sorted(common))}, for all weights of a model: pass this to "
                "`compile`."
            )
        if not any(map(fits, paths)):
            raise OptionError(
                f"`{where}` matches no parameter of `{type(model).__name__}`; its parameters are "
                f"{quoted(list(map(path_name, paths)))}."
            )
        other = algorithm_of(algorithm, where)(model, **options)
        parts.append(Part(other.rule, other.method, fits))
    parts.append(Part(learner.rule, learner.method, lambda path: True))
    composed = ComposedTraces(tuple(parts))
    if len(composed.rules) == 1:
        return
    if {rule.jacobian for rule in composed.rules.values()} - {"none", "elementwise"}:
        listed = ", ".join(f"{name} ({rule.jacobian})" for name, rule in composed.rules.items())
        raise OptionError(
            f"`rules` combines incompatible algorithms: {listed}. Use algorithms of the kind "
            "'elementwise', or `Immediate`."
        )
    learner.method, names = composed, dict[str, list[str]]()
    for path in paths:
        names.setdefault(composed.of_path(path).name, []).append(path_name(path))
    learner.rule = "; ".join(f"{rule} of {quoted(own)}" for rule, own in names.items())
