"""From a model to a learner in one call."""

from typing import Any

import brainstate
import jax

from .._algorithms import (
    D_RTRL,
    ES_D_RTRL,
    ETraceAlgorithm,
    all_states,
    first_step,
    fresh_values,
)
from .._errors import OptionError, ShapeError
from .learner import Learner

ALGORITHMS: dict[str, type[ETraceAlgorithm]] = {
    "d_rtrl": D_RTRL,
    "es_d_rtrl": ES_D_RTRL,
    "pp_prop": ES_D_RTRL,
}


def compile(
    model: brainstate.nn.Module,
    algorithm: str | type[ETraceAlgorithm],
    *example_arguments: Any,
    batch_size: int | None = None,
    vmap: bool = False,
    **algorithm_options: Any,
) -> Learner:
    """Initialise a model's states, analyse one step, and return a learner.

    Parameters
    ----------
    model
        A brainstate module; its ``update`` is one time step.
    algorithm
        A class, or a name: ``'d_rtrl'``, ``'es_d_rtrl'`` or ``'pp_prop'``.
    *example_arguments
        Example arguments of ``update`` for one step; only structure, shapes and units matter.
    batch_size
        Given to the model's ``init_state``; ``None``: the model has no batch axis.
    vmap
        The model is written for one sample and is mapped over a batch axis, which leads in
        the arguments, in the states and (behind time) in the sequences.
    **algorithm_options
        Given to the algorithm.

    Raises
    ------
    OptionError
        For an unknown algorithm or option.
    ShapeError
        With ``vmap``, if the arguments have no common leading axis of ``batch_size``.
    CompilationError, DtypeError
        See `compile_etrace_graph`.

    Notes
    -----
    One step is traced once, as ``jax.jit`` does it. What ``update`` takes from elsewhere than its
    arguments and States (attributes of a module, ``brainstate.environ``) stays as it is now: give
    what changes from step to step, such as the time, as an argument, or keep it in a State. A
    value of ``brainstate.environ`` that ``update`` reads and that has changed raises an error.

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
    chosen = _algorithm(algorithm)
    try:
        instance = chosen(model, **algorithm_options)
    except TypeError as error:
        raise OptionError(
            f"{chosen.__name__} does not accept the options "
            f"{', '.join(sorted(algorithm_options))}: {error}."
        ) from error
    example = first_step(example_arguments)
    mapped = _mapped_size(example, batch_size) if vmap else None
    size = None if vmap else batch_size
    brainstate.nn.init_all_states(model, **({} if size is None else {"batch_size": size}))
    instance.compile_graph(*example, batch_size=mapped)
    if mapped is not None:
        states = all_states(model)
        for path, value in fresh_values(model, mapped, None, {}).items():
            states[path].value = value
    return Learner(instance)


def _algorithm(algorithm: str | type[ETraceAlgorithm]) -> type[ETraceAlgorithm]:
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    if isinstance(algorithm, type) and issubclass(algorithm, ETraceAlgorithm):
        return algorithm
    raise OptionError(
        f"`algorithm` is {algorithm!r}; expected one of {', '.join(map(repr, ALGORITHMS))} or a "
        "subclass of `braintrace.ETraceAlgorithm`."
    )


def _mapped_size(example: tuple[Any, ...], batch_size: int | None) -> int:
    shapes = [tuple(jax.numpy.shape(leaf)) for leaf in jax.tree.leaves(example)]
    sizes = {shape[0] if shape else None for shape in shapes}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    if size is None or batch_size not in (None, size):
        raise ShapeError(
            f"With `vmap=True` every argument leads with the batch axis; the example arguments "
            f"have shapes {', '.join(map(str, shapes))} and `batch_size` is {batch_size}."
        )
    return size
