"""Ahead-of-time lowering of a learner's programs.

A program that is lowered and compiled here is reused by the method afterwards: JAX finds it by the
same function and the same types of arguments.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import check_option, check_tree, one_of
from .._brainstate import values_of
from .._core.zero import examples
from .._errors import OptionError
from .._runtime.changes import current_step
from .._runtime.step_data import unwrap
from .._typing import PyTree
from .calls.options import METHODS, complaint, options_of
from .calls.parts import HasParts, LearnerParts
from .calls.request import request_of
from .driver import lower_request


def lower(learner: HasParts, method: str, *arguments: PyTree, **options: Any) -> jax.stages.Lowered:
    """Return the program of a method call without running it.

    Its ``compile()`` has ``cost_analysis()`` and ``memory_analysis()``. A later call of the method
    does not compile the program again.

    Parameters
    ----------
    method
        ``'etrace_grad'``, ``'etrace_online'``, ``'etrace_evolve'``, ``'predict'``, or ``'update'``
        for one step (a call of the learner itself).
    *arguments, **options
        As for the method; arrays may be `jax.ShapeDtypeStruct`. An ``optimizer`` is initialised.

    Returns
    -------
    jax.stages.Lowered
        The program for the current States and traces (zero or not).

    Raises
    ------
    OptionError
        For an unknown method or option.
    BraintraceError
        All errors that the call would raise before it runs.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> model = braintrace.nn.IndRNN(2, 3)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> xs = jax.ShapeDtypeStruct((10, 1, 2), jnp.float32)
    >>> compiled = learner.lower("predict", xs).compile()
    >>> compiled.memory_analysis().output_size_in_bytes >= 10 * 3 * 4
    True
    """
    check_option("method", method, one_of(*METHODS, "update"))
    parts = learner.parts
    wrong = complaint(options, METHODS.get(method, frozenset()))
    if wrong is not None:
        given = ", ".join(["...", *(f"{name}=..." for name in options)])
        raise OptionError(f"`lower('{method}', {given})` {wrong}")
    check_tree("arguments", arguments, "`lower`: ")
    sequences = jax.tree.map(_stand_in, arguments)
    if method == "update":
        return _lower_step(parts, sequences)
    read = options_of(method, options)
    request = request_of(parts, method, sequences, read)
    if read.optimizer is None:
        return lower_request(parts, request)
    with parts.held_optimizer.begun(read.optimizer, parts.parameters_for_optimizer):
        return lower_request(parts, request)


def _lower_step(learner: LearnerParts, arguments: tuple[PyTree, ...]) -> jax.stages.Lowered:
    algorithm = learner.algorithm
    compiled, states = current_step(algorithm)
    step = unwrap(arguments)
    inputs = compiled.inputs(states, values_of(states.values()), step)
    traces = algorithm.traces.carried.read()
    if algorithm.window_of() is not None:
        window = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], step)
        return compiled.window.trace(inputs, traces, window).lower()
    return compiled.single_step.trace(inputs, traces).lower()


def _stand_in(leaf: Any) -> Any:
    """Return an array that takes no memory instead of a shape."""
    return examples(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
