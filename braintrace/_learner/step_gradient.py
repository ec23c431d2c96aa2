"""The value and gradient of one step, with parameters of a constant-zero gradient left out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import is_var, jaxpr_as_fun
from .._jaxpr import program_of
from .pure_step import PureStep


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one differentiated step yields.

    Attributes
    ----------
    live
        Gradient leaves of the parameters that the step's loss depends on outside the traces.
    signal
        Derivative of the scaled loss with respect to the probes.
    written
        New values of the States that the step writes.
    loss, aux, records
        What the function returned; the loss is not scaled.
    """

    live: list[jax.Array]
    signal: Any
    written: list[Any]
    loss: jax.Array
    aux: Any
    records: Any


class StepGradient:
    """A step of ``(probes, *inputs)`` that returns ``(loss, aux, records)``, differentiated.

    Parameters
    ----------
    step
        The step.
    parameters
        Values of its parameters.
    example
        Example arguments; the first one is the probes.
    """

    def __init__(self, step: PureStep, parameters: list[Any], example: tuple[Any, ...]) -> None:
        def scaled_loss(
            parameters: Any, probes: Any, others: Any, inputs: Any, scale: Any
        ) -> tuple[Any, Any]:
            written, (loss, aux, records) = step(parameters, others, probes, *inputs)
            return loss * scale, (written, loss, aux, records)

        differentiate = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)

        def differentiated(*arguments: Any) -> Any:
            (_, results), (gradients, signal) = differentiate(*arguments)
            return jax.tree.leaves(gradients), (signal, results)

        others = [state.value for state in step.others]
        closed, shapes = jax.make_jaxpr(differentiated, return_shape=True)(
            parameters, example[0], others, example[1:], jnp.ones(())
        )
        self._run = jaxpr_as_fun(closed)
        self._tree = jax.tree.structure(shapes)
        # The gradient of a parameter without a path to the loss outside the traces is a
        # constant zero: it depends on no input of the step, not even on the loss's scale.
        program = program_of(closed)
        inputs = set(program.in_vars)
        leaves = program.out_atoms[: len(shapes[0])]
        self._live = [is_var(a) and bool(program.depends_on([a]) & inputs) for a in leaves]

    def __call__(
        self, parameters: list[Any], others: list[Any], arguments: tuple[Any, ...], scale: Any
    ) -> StepResult:
        """Run one step on the values of parameters and other States."""
        flat = jax.tree.leaves((parameters, arguments[0], others, arguments[1:], scale))
        outputs = jax.tree.unflatten(self._tree, self._run(*flat))
        gradients, (signal, (written, loss, aux, records)) = outputs
        live = [g for g, is_live in zip(gradients, self._live, strict=True) if is_live]
        return StepResult(live, signal, written, loss, aux, records)

    def zero_gradients(self, parameters: list[Any]) -> list[jax.Array]:
        """Return zeros for the parameters that have a gradient outside the traces."""
        leaves = zip(jax.tree.leaves(parameters), self._live, strict=True)
        return [jnp.zeros_like(leaf) for leaf, is_live in leaves if is_live]

    def add(self, gradients: list[Any], live: list[jax.Array]) -> list[Any]:
        """Add the gradients outside the traces to the full list of gradients."""
        leaves, tree = jax.tree.flatten(gradients)
        rest = iter(live)
        total = [
            leaf + next(rest) if is_live else leaf
            for leaf, is_live in zip(leaves, self._live, strict=True)
        ]
        return jax.tree.unflatten(tree, total)
