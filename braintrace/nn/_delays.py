r"""Delays: of values, and of connections that learn when they deliver.

The line of a connection has the newest value first. With real-valued delays :math:`d_{ij}`,

.. math:: y_{bj} = \sum_i W_{ij} \big((1 - r_{ij})\, x_{b,i}^{t - l_{ij}} + r_{ij}\,
    x_{b,i}^{t - l_{ij} - 1}\big), \qquad l_{ij} = \lfloor d_{ij} \rfloor, \quad
    r_{ij} = d_{ij} - l_{ij},

a product of the line and a kernel ``(slots, in, out)`` with two entries per connection. Entry
``(i, j)`` of weights and delays reaches :math:`y_j` only, so each has a trace of the shape of the
weight.
"""

import functools
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from brainstate.nn import init

from .._errors import OptionError
from .._etrace_op import quantities
from .._etrace_op.dense import outer_terms
from .._etrace_op.primitive import ETPPrimitive, register_forms
from .._etrace_op.registry import Arrays
from ._states import Initializers, Population, Stateful


class Delay(Population):
    r"""Deliver values some steps later: :math:`y^t = x^{t - d}`.

    Gradients pass it exactly. Unlike ``brainstate.nn.Delay``, it has one output and counts steps.

    Parameters
    ----------
    size : int or tuple of int
        Shape of one input and one output.
    steps : int or array of int
        The delay d, for all elements or for each of them. With 0, an element has its own value.
    state_init : callable or array, optional
        Values ``(max(steps), *size)`` before the first step, newest first. Default 0.0. Inputs with
        a unit need values with this unit, such as ``0.0 * u.mA``.
    name : str, optional
        Name of the module.

    Attributes
    ----------
    line : brainstate.ShortTermState
        The last values ``(batch, max(steps), *size)``, newest first.

    Raises
    ------
    OptionError
        If a delay is negative or no whole number.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> late = braintrace.nn.Delay(2, [1, 2])
    >>> late.init_state()
    >>> [late(jnp.full(2, t)).tolist() for t in (1.0, 2.0, 3.0)]
    [[0.0, 0.0], [1.0, 0.0], [2.0, 1.0]]
    """

    _kind = brainstate.ShortTermState  # without weights in front of it, its values are data

    def __init__(
        self, size: Any, steps: Any, state_init: Any = 0.0, name: str | None = None
    ) -> None:
        super().__init__(size, name)
        self.steps, self.state_init = np.asarray(steps), state_init
        if not np.issubdtype(self.steps.dtype, np.integer) or self.steps.min() < 0:
            raise OptionError(f"`steps` is {steps!r}; expected whole numbers of steps, from 0.")
        self.steps = np.broadcast_to(self.steps, self.in_size)

    def _initializers(self) -> Initializers:
        return {"line": (self.state_init, (int(self.steps.max()), *self.in_size))}

    def update(self, x: Any) -> Any:
        """Return the delayed values ``(..., *size)``, and store ``x`` of the same shape."""
        axis, old = -1 - self.steps.ndim, self.line.value
        line = _pushed(x, old, axis)
        slots = line.shape[axis] - 1
        self.line.value = jax.tree.map(lambda v: jax.lax.slice_in_dim(v, 0, slots, axis=axis), line)
        # Late values come from the old line: the compiler sees that they do not depend on x.
        is_late = bool(self.steps.min() > 0)
        steps, last = self.steps - is_late, slots - is_late

        def read(values: jax.Array) -> jax.Array:
            if (steps == last).all():
                return jax.lax.index_in_dim(values, last, axis, keepdims=False)
            index = np.broadcast_to(steps, (*values.shape[:axis], 1, *steps.shape))
            return jnp.take_along_axis(values, index, axis).squeeze(axis)

        return jax.tree.map(read, old if is_late else line)


def _pushed(x: Any, line: Any, axis: int) -> Any:
    """Return a line with one value more, in front."""
    return saiunit.math.concatenate([saiunit.math.expand_dims(x, axis), line], axis)


class DelayedLinear(Stateful):
    r"""Dense layer whose connections have delays that learn.

    .. math:: y_j^t = \sum_i W_{ij}\, x_i(t - d_{ij})

    Inputs between two steps are interpolated linearly, so delays are real numbers with a gradient
    [1]_. Delays outside of [0, max_delay] count as the nearest bound, with the slope that the
    inputs have there.

    Parameters
    ----------
    n_in, n_out : int
        Number of inputs and of outputs.
    max_delay : int
        Largest delay, in steps, from 1.
    w_init : callable or array, optional
        Weight ``(n_in, n_out)``. Default ``KaimingNormal()``. May carry a unit.
    d_init : callable, array or None, optional
        Delays in steps, without a unit. Default None: uniform in [0, max_delay].
    per_input : bool, optional
        Whether all connections of an input share its delay: the shape is then ``(n_in,)`` instead
        of ``(n_in, n_out)``. Default False.
    state_init : callable or array, optional
        Inputs ``(max_delay, n_in)`` before the first step, newest first. Default 0.0. Inputs with a
        unit need values with this unit, such as ``0.0 * u.mA``.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Attributes
    ----------
    weight, delay : brainstate.ParamState
        The parameters.
    line : brainstate.ShortTermState
        The last inputs ``(batch, max_delay, n_in)``, newest first.

    References
    ----------
    .. [1] I. Hammouamri, I. Khalfaoui-Hassani, T. Masquelier, "Learning delays in spiking neural
       networks using dilated convolutions with learnable spacings", ICLR 2024.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.DelayedLinear(1, 1, 3, w_init=jnp.ones((1, 1)), d_init=1.25)
    >>> layer.init_state()
    >>> [layer(jnp.array([x])).item() for x in (4.0, 0.0, 0.0)]
    [0.0, 3.0, 1.0]
    """

    _kind = brainstate.ShortTermState  # without weights in front of it, its values are data

    def __init__(
        self,
        n_in: int,
        n_out: int,
        max_delay: int,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        d_init: Any = None,
        per_input: bool = False,
        state_init: Any = 0.0,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(name=name)
        if max_delay < 1:
            raise OptionError(f"`max_delay` is {max_delay}; expected at least one step.")
        self.in_size, self.out_size = (n_in,), (n_out,)
        self.max_delay, self.state_init = max_delay, state_init
        shape = (n_in,) if per_input else (n_in, n_out)
        self.weight = param_type(init.param(w_init, (n_in, n_out), allow_none=False))
        d_init = init.Uniform(0.0, float(max_delay)) if d_init is None else d_init
        self.delay = param_type(jnp.broadcast_to(init.param(d_init, shape), shape))

    def _initializers(self) -> Initializers:
        return {"line": (self.state_init, (self.max_delay, *self.in_size))}

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., n_out)`` for an input ``(..., n_in)``."""
        line = _pushed(x, self.line.value, -2)
        self.line.value = line[..., :-1, :]
        weight, w_unit = quantities.split(self.weight.value)
        line, x_unit = quantities.split(line)
        delay = self.delay.value
        delay = jnp.broadcast_to(delay.reshape(delay.shape[0], -1), weight.shape)
        forms = delayed_primitives()
        y = quantities.bind_folded(forms, line, weight, delay, axes_of_sample=2)
        return quantities.attach(y, x_unit * w_unit)


# --- the operation


def _kernel(weight: Any, delay: Any, slots: int) -> Any:
    """Return the weight of every slot ``(slots, in, out)``."""
    inside = delay + jax.lax.stop_gradient(jnp.clip(delay, 0, slots - 1) - delay)
    before = jax.lax.stop_gradient(jnp.clip(jnp.floor(inside), 0, slots - 2))
    part, slot = inside - before, jnp.arange(slots)[:, None, None]
    return weight * jnp.where(slot == before, 1 - part, jnp.where(slot == before + 1, part, 0))


def _impl(line: Any, weight: Any, delay: Any) -> Any:
    kernel = _kernel(weight, delay, line.shape[-2])
    flat = line.reshape(*line.shape[:-2], -1)
    return flat @ kernel.reshape(flat.shape[-1], -1)


def _terms(line: jax.Array, hidden_dim: jax.Array, weights: Arrays, **_: Any) -> Arrays:
    """Return the terms of the traces: those of the kernel, pulled back for each sample."""
    slots = line.shape[-2]
    flat = line.reshape(*line.shape[:-2], -1)
    of_kernel = outer_terms(flat, hidden_dim, weights)["weight"]
    of_kernel = of_kernel.reshape(*flat.shape[1:-1], slots, -1, hidden_dim.shape[-1])
    wide = {name: value.astype(hidden_dim.dtype) for name, value in weights.items()}
    _, pull = jax.vjp(lambda w: _kernel(w["weight"], w["delay"], slots), wide)
    for _axis in flat.shape[1:-1]:
        pull = jax.vmap(pull)
    return pull(of_kernel)[0]


@functools.cache
def delayed_primitives() -> tuple[ETPPrimitive, ETPPrimitive]:
    """Return the primitives, for one sample and for a batch; register them at the first call."""
    axes: Any = {"weight": ("input", "output"), "delay": ("input", "output")}
    names = "etp_delayed_mv", "etp_delayed_mm"
    return register_forms(
        *names, impl=_impl, trace_axes=axes, linear_in_input=True, accumulate=_terms
    )
