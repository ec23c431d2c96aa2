"""Input filters of ES_D_RTRL, for operations that are nonlinear in their input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class InputFilter:
    r"""Functions for a low-pass filter of some function of an operation's input.

    ES_D_RTRL carries :math:`\epsilon_x \leftarrow \alpha\, \epsilon_x + \phi(x)`, and pulls factors
    back to the weights with :math:`\epsilon_x` instead of the input. With :math:`\phi(x) = x`, this
    is correct if ``xy_to_dw`` is linear in ``x``. For any other operation choose :math:`\phi` so
    that the derivative of the operation is linear in it: ``sin(x)`` for ``sin(x) @ w``, and for an
    embedding ``w[x]`` the number of times that each row was looked up.

    Parameters
    ----------
    init : callable
        ``init(x_var, y_var, **static_params) -> trace``: zeros, one array of floating-point dtype;
        the batch axis first for batched primitives. The variables have an ``aval`` with ``shape``
        and ``dtype``.
    add : callable
        ``add(trace, x, **static_params) -> trace``: :math:`\epsilon_x + \phi(x)`, in the shape and
        dtype of ``trace``. It need not build :math:`\phi(x)`: an embedding adds one to some rows.
    pull_back : callable
        ``pull_back(trace, hidden_dim, weights, **static_params) -> gradients``: like ``xy_to_dw``,
        with :math:`\phi(x)` instead of ``x``. A gradient is linear in ``trace``, or does not depend
        on it (a bias).
    add_steps : callable, optional
        ``add_steps(trace, x, factors, **static_params) -> trace``: :math:`\epsilon_x + \sum_s f^s
        \phi(x^s)`, for the inputs of several steps, time first, and a factor for each of them (and
        for each sample of a batched primitive). It pays for a filter that is much larger than its
        inputs: a chunk of steps then updates it once, and the factors of the outputs are filtered
        instead. It is used only if all gradients are linear in ``trace``.

    Examples
    --------
    An embedding ``w[x]`` of a batch of integers, with a table of 10 rows:

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> look_ups = braintrace.InputFilter(
    ...     init=lambda x, y: jnp.zeros((*x.aval.shape, 10)),
    ...     add=lambda trace, x: trace.at[jnp.arange(len(x)), x].add(1),
    ...     pull_back=lambda trace, f, weights: {'weight': trace.T @ f},
    ... )
    """

    init: Callable[..., Any]
    add: Callable[..., Any]
    pull_back: Callable[..., Any]
    add_steps: Callable[..., Any] | None = None
