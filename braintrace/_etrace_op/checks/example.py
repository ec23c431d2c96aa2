r"""Random examples of an operation, with their automatic derivatives.

Two steps of an elementwise recurrence distinguish a correct rule from a wrong one. With random
factors :math:`f^1, f^2, d` and signal :math:`l`, all shaped like the output,

.. math::
    \epsilon^1 = f^1 \otimes x^1, \quad \epsilon^2 = d\,\epsilon^1 + f^2 \otimes x^2, \quad
    \nabla w = l \cdot \epsilon^2

must be the VJP of the implementation, :math:`l d f^1` at :math:`x^1` plus :math:`l f^2` at
:math:`x^2`.

A filter of inputs adds :math:`x^1`, grows by a factor :math:`c` and adds :math:`x^2`. It must pull
:math:`f^1` back to :math:`c` times the gradient at :math:`x^1` alone, plus the gradient at
:math:`x^2`. The factor is large, to reveal a rule that saturates.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import rules
from ..primitive import ETPPrimitive, get_primitive_spec
from ..registry import Arrays
from ..spec import ETPPrimitiveSpec
from .validate import Variable, validate_rules

GROWTH = 100
"""Growth of a filter between two inputs."""


@dataclass(frozen=True)
class Example:
    """An operation with random numbers, and both sides of each check of its rules.

    ``draws`` contains the arrays: the operands, the inputs ``x1, x2`` of two steps, ``x3`` that
    differs from ``x1`` in every element, the factors ``f1, f2``, the decay ``d`` and the
    ``signal``.
    """

    primitive: ETPPrimitive
    params: Mapping[str, Any]
    draws: dict[str, Any]

    @property
    def layout(self) -> dict[str, int]:
        return self.spec.resolve_trainable_invars(self.params)

    @property
    def spec(self) -> ETPPrimitiveSpec:
        """The declaration of the operation."""
        return get_primitive_spec(self.primitive)

    @property
    def weights(self) -> dict[str, Any]:
        return {name: self.draws["operands"][index] for name, index in self.layout.items()}

    def run(self, method: Callable[["Example"], Any]) -> Any:
        return jax.jit(lambda draws: method(replace(self, draws=draws)))(self.draws)

    def autodiff(self, x: str, cotangent: Any) -> Arrays:
        x_index = self.spec.x_invar_index

        def forward(weights: Arrays) -> Any:
            values = list(self.draws["operands"])
            if x_index is not None:
                values[x_index] = self.draws[x]
            for name, index in self.layout.items():
                values[index] = weights[name]
            return self.primitive.implementation(*values, **self.params)

        (gradients,) = jax.vjp(forward, self.weights)[1](cotangent)
        result: Arrays = gradients
        return result

    def validate(self) -> Arrays:
        x = self.draws["x1"]
        x_var = None if x is None else Variable(x)
        weight_vars = {name: Variable(weight) for name, weight in self.weights.items()}
        y_var = Variable(self.draws["signal"])
        validate_rules(self.primitive, self.params, x_var, y_var, weight_vars)
        return self.zero_gradients()

    def zero_gradients(self) -> Arrays:
        return {name: jnp.zeros_like(weight) for name, weight in self.weights.items()}

    def pulled_back(self) -> Arrays:
        draws = self.draws
        xs = None if draws["x1"] is None else jnp.stack([draws["x1"], draws["x2"]])
        factors = jnp.stack([draws["f1"], draws["f2"]])
        return rules.pull_back(self.primitive, self.params, xs, factors, self.weights)

    def expected_pull_back(self) -> Arrays:
        first = self.autodiff("x1", self.draws["f1"])
        return add(first, self.autodiff("x2", self.draws["f2"]))

    def term(self, x: str, factor: str) -> Arrays:
        steps = None if self.draws[x] is None else self.draws[x][None]
        factors = self.draws[factor][None]
        return rules.accumulate(self.primitive, self.params, steps, factors, self.weights)

    def contracted(self, signal: Any, trace: Arrays) -> Arrays:
        return rules.contract(self.primitive, self.params, signal, trace, self.weights)

    def one_step(self) -> Arrays:
        return self.contracted(self.draws["signal"], self.term("x1", "f1"))

    def expected_one_step(self) -> Arrays:
        return self.autodiff("x1", self.draws["signal"] * self.draws["f1"])

    def two_steps(self) -> Arrays:
        first = self.term("x1", "f1")
        decayed = rules.propagate(self.primitive, self.params, self.draws["d"], first)
        trace = add(decayed, self.term("x2", "f2"))
        return self.contracted(self.draws["signal"], trace)

    def expected_two_steps(self) -> Arrays:
        draws = self.draws
        through_first = self.autodiff("x1", draws["signal"] * draws["d"] * draws["f1"])
        return add(through_first, self.autodiff("x2", draws["signal"] * draws["f2"]))

    def filtered(self) -> Arrays:
        x1, x2 = self.draws["x1"], self.draws["x2"]
        taken_in = functools.partial(rules.add_to_filter, self.primitive)
        zero = rules.zero_filter(
            self.primitive, self.params, Variable(x1), Variable(self.draws["signal"])
        )
        filtered_input = taken_in(GROWTH * taken_in(zero, x1), x2)
        factors = self.draws["f1"][None]
        return rules.pull_back_filtered(
            self.primitive, self.params, filtered_input[None], factors, self.weights
        )

    def expected_filtered(self) -> Arrays:
        first, second, third = (self.autodiff(x, self.draws["f1"]) for x in ("x1", "x2", "x3"))

        def expected(name: str) -> Any:
            # A gradient that does not depend on the input, such as a bias gradient, is not
            # filtered.
            is_free = jnp.all(first[name] == third[name])
            return jnp.where(is_free, first[name], GROWTH * first[name] + second[name])

        return {name: expected(name) for name in first}


def make_example(
    primitive: ETPPrimitive, operands: tuple[Any, ...], params: Mapping[str, Any]
) -> Example:
    """Return an operation with its operands and random numbers."""
    y = jax.eval_shape(lambda *values: primitive.implementation(*values, **params), *operands)
    x_index = get_primitive_spec(primitive).x_invar_index
    x = None if x_index is None else operands[x_index]
    like = {"f1": y, "f2": y, "d": y, "signal": y, "x1": x, "x2": x}
    generator = np.random.default_rng(0)
    draws = {name: None if v is None else _random(generator, v) for name, v in like.items()}
    draws["x3"] = None if x is None else jnp.equal(draws["x1"], 0).astype(x.dtype)
    return Example(primitive, params, {**draws, "operands": operands})


def _random(generator: np.random.Generator, like: Any) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return like
    values = generator.normal(size=(2, *like.shape))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return jnp.asarray(values[0] + 1j * values[1], like.dtype)
    return jnp.asarray(values[0], like.dtype)


def add(left: Arrays, right: Arrays) -> Arrays:
    """Return the sums of arrays with equal names."""
    return {name: left[name] + right[name] for name in left}
