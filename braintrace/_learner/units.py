"""Physical units of losses and gradients.

Derivatives are taken of mantissas. A gradient then has the container, and so the unit, of its
parameter; as a quantity it has the unit of the loss over the unit of the parameter.
"""

from typing import Any

import jax
import saiunit

from .._errors import OptionError
from .._typing import PyTree


def split_loss(loss: PyTree, unit_aware: bool) -> tuple[PyTree, PyTree]:
    """Return the mantissa and the unit of a loss.

    Raises
    ------
    OptionError
        If the loss has a unit and ``unit_aware`` is False.
    """
    mantissa, unit = saiunit.split_mantissa_unit(loss)
    if not unit_aware and unit != saiunit.UNITLESS:
        raise OptionError(
            f"`step_fn` returned a loss in {unit}. Divide it by its unit, or pass "
            "`unit_aware=True` to get gradients in that unit over the parameter's."
        )
    return mantissa, unit


def with_units(gradients: PyTree, loss_unit: Any) -> PyTree:
    """Convert gradients in the containers of their parameters to their physical units."""

    def converted(leaf: PyTree) -> PyTree:
        mantissa, unit = saiunit.split_mantissa_unit(leaf)
        return with_unit(mantissa, loss_unit / unit)

    return jax.tree.map(converted, gradients, is_leaf=lambda x: isinstance(x, saiunit.Quantity))


def with_unit(mantissa: PyTree, unit: Any) -> PyTree:
    """Return a quantity, or a plain array if there is no unit."""
    return mantissa if unit == saiunit.UNITLESS else saiunit.Quantity(mantissa, unit=unit)
