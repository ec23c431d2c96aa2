"""Projection: several populations on one synapse."""

from typing import Any

import brainstate

from ..._errors import ShapeError


class Projection(brainstate.nn.Module):
    r"""Projection of several populations to one synapse, which adds their inputs.

    .. math:: g \leftarrow f(g, \sum_p W_p(x_p))

    with a weight layer :math:`W_p` for each population and the step f of the synapse. Each weight
    has its own traces; the populations share the state of the synapse.

    Parameters
    ----------
    weights : dict of str to module
        The weight layer of each population by its name: `Linear`, `SparseLinear`, `SignedWLinear`,
        … Their outputs must have one shape.
    synapse : module
        The synapse that receives the sum: `Expon`, `Alpha`, `DualExpon`, …
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> from braintrace import nn
    >>> weights = {
    ...     "input": nn.Linear(3, 2, w_init=jnp.ones((3, 2)), b_init=None),
    ...     "recurrent": nn.Linear(2, 2, w_init=jnp.ones((2, 2)), b_init=None, w_sign=[1, -1]),
    ... }
    >>> projection = nn.Projection(weights, nn.Expon(2, g_initializer=0.0))
    >>> _ = brainstate.nn.init_all_states(projection)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     projection({"input": jnp.ones(3), "recurrent": jnp.ones(2)})
    Array([3., 3.], dtype=float32)
    """

    def __init__(self, weights: Any, synapse: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.weights = dict(weights)
        self.synapse = synapse

    def update(self, inputs: Any) -> Any:
        """Advance the synapse by one step and return its output.

        Parameters
        ----------
        inputs
            A dict with the input from each population, ``(..., its size)``.

        Raises
        ------
        ShapeError
            If a population is missing or unknown.
        """
        if set(inputs) != set(self.weights):
            raise ShapeError(
                f"`Projection`: expected the populations {list(self.weights)}, got {list(inputs)}."
            )
        total, *rest = (layer(inputs[name]) for name, layer in self.weights.items())
        for y in rest:
            total = total + y
        return self.synapse(total)
