"""Construction of a learner from a model."""

from collections.abc import Mapping
from typing import Any

import brainstate
import jax

from .._errors import in_words
from .._rules import Rule
from .._runtime.stepping import first_step
from .by_path import choose_by_path
from .learner import Learner
from .names import algorithm_of, options_of


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
        Options of the algorithm; ``window``, ``strict``, ``unroll_limit``, ``mark`` and
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
    filters = None if rules is None else algorithm_options.pop("readout_filters", None)
    if seed is not None and "seed" in options_of(chosen):
        algorithm_options["seed"] = seed
    learner = chosen(model, **algorithm_options)
    if rules is not None:
        choose_by_path(learner, rules, filters)
    example = first_step(example_arguments)
    mapped = mapped_size(example, batch_size) if vmap else None
    size = None if vmap else batch_size
    learner.samples_of_model = size
    if seed is not None:
        brainstate.random.seed(seed)
    initialise(model, size)
    learner.compile_graph(*example, batch_size=mapped)
    if mapped is not None:
        states = learner.states_of_model
        for path, value in learner.initial_values(states, mapped).items():
            states[path].value = value
    return learner


def initialise(model: brainstate.nn.Module, batch_size: int | None) -> None:
    """Initialise a model's States."""
    given = {} if batch_size is None else {"batch_size": batch_size}
    what = f"`init_state` of `{type(model).__name__}` fails with `batch_size` {batch_size}"
    with in_words(lambda: what):
        brainstate.nn.init_all_states(model, **given)


def mapped_size(example: tuple[Any, ...], batch_size: int | None) -> int:
    """Return the size of the batch over which a model for one sample is mapped."""
    sizes = (size for leaf in jax.tree.leaves(example) for size in jax.numpy.shape(leaf)[:1])
    return next(sizes, 1) if batch_size is None else batch_size
