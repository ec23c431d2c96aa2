"""Values of States as plain arrays; units of losses and gradients."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._errors import OptionError
from .._typing import Path, PyTree


def raw(value: PyTree) -> PyTree:
    """Return the value of a State as arrays, with the data of random keys instead of keys."""
    if isinstance(value, jax.Array):
        return jax.random.key_data(value) if _is_key(value) else value

    def of_leaf(leaf: PyTree) -> PyTree:
        if _is_key(leaf):
            return jax.random.key_data(leaf)
        return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf

    return jax.tree.map(of_leaf, value)


def like_current(value: PyTree, held: PyTree) -> PyTree:
    """Return a value with random keys instead of their data, like the current value."""
    if isinstance(held, jax.Array) and not _is_key(held):
        return value

    def of_leaf(held: PyTree, leaf: PyTree) -> PyTree:
        return (
            jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(held))
            if _is_key(held)
            else leaf
        )

    return jax.tree.map(of_leaf, held, value)


def holds_keys(value: PyTree) -> bool:
    """Test whether a value contains random keys."""
    return any(map(_is_key, jax.tree.leaves(value)))


def by_path(value: PyTree, start: Path = ()) -> dict[Path, jax.Array]:
    """Return the leaves of a pytree by paths that are the same in every process.

    If a dict is keyed by paths, as gradients are, the parts of these paths are parts of the leaf's
    path.
    """
    result = jax.tree_util.tree_leaves_with_path(raw(value))
    return {(*start, *_parts(keys)) or ("state",): leaf for keys, leaf in result}


def like_leaves(held: PyTree, leaves: Mapping[Path, jax.Array], start: Path = ()) -> PyTree:
    """Return a pytree with the structure of another one, from leaves by path."""
    tree = jax.tree.structure(held)
    result = [leaves[path] for path in by_path(held, start)]
    return like_current(jax.tree.unflatten(tree, result), held)


def same_type(found: PyTree, expected: PyTree) -> bool:
    """Test whether two pytrees have the same structure, shapes, and dtypes as JAX has them."""
    if isinstance(found, jax.Array) and isinstance(expected, (jax.ShapeDtypeStruct, jax.Array)):
        return found.shape == expected.shape and _same_dtype(found, expected)
    leaves, tree = jax.tree.flatten(found)
    others, other = jax.tree.flatten(expected)
    return bool(tree == other) and all(
        getattr(leaf, "shape", None) == wanted.shape and _same_dtype(leaf, wanted)
        for leaf, wanted in zip(leaves, others, strict=True)
    )


def _same_dtype(found: Any, expected: Any) -> bool:
    """Test whether dtypes are equal in JAX, where a NumPy array may lose its double precision."""
    if found.dtype == expected.dtype:
        return True
    known = functools.partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return bool(known(found.dtype) == known(expected.dtype))


def _parts(keys: tuple[Any, ...]) -> Path:
    parts: list[str] = []
    for key in keys:
        name = getattr(key, "key", None)
        if isinstance(name, tuple):
            parts += map(str, name)
        else:
            parts.append(jax.tree_util.keystr((key,), simple=True))
    return tuple(parts)


def _is_key(leaf: PyTree) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


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
