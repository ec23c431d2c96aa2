"""Comparisons that say which parameter is off, and by how much."""

import jax
import numpy as np


def deviations(actual, expected):
    """Largest difference of each leaf, relative to the leaf's largest expected entry.

    Both arguments are {parameter: array or dict of arrays}. A leaf that should be zero is
    compared with the largest entry of all leaves.
    """
    actual, expected = _leaves(actual), _leaves(expected)
    if actual.keys() != expected.keys():
        raise AssertionError(f"parameters {sorted(actual)} found, {sorted(expected)} expected")
    overall = max(np.abs(leaf).max() for leaf in expected.values())
    return {name: _deviation(name, actual[name], leaf, overall) for name, leaf in expected.items()}


def assert_gradients_close(actual, expected, tolerance, context=""):
    """Every parameter's gradient agrees to a relative tolerance, and is not all zero."""
    if not any(np.any(leaf) for leaf in _leaves(expected).values()):
        raise AssertionError(f"{context}: all expected gradients are zero")
    off = {k: v for k, v in deviations(actual, expected).items() if not v <= tolerance}
    if off:
        listed = ", ".join(f"{name} by {value:.2e}" for name, value in off.items())
        raise AssertionError(f"{context}: relative deviation above {tolerance:.0e}: {listed}")


def assert_gradients_differ(actual, expected, threshold, context=""):
    """At least one parameter's gradient is off by more than the threshold."""
    found = deviations(actual, expected)
    if max(found.values()) <= threshold:
        raise AssertionError(f"{context}: no deviation above {threshold:.0e}: {found}")


def assert_states_close(actual, expected, context=""):
    """States and traces have the same structure and agree up to float32 round-off."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        raise AssertionError(f"{context}: another tree: {actual} instead of {expected}")
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6, err_msg=context)


def assert_same_bits(actual, expected, context=""):
    """Two pytrees have the same structure, shapes, dtypes and values."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        raise AssertionError(f"{context}: another tree: {actual} instead of {expected}")
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        found, wanted = np.asarray(found), np.asarray(wanted)
        if found.dtype != wanted.dtype or not np.array_equal(found, wanted, equal_nan=True):
            raise AssertionError(f"{context}: {found} instead of {wanted}")


def _deviation(name, actual, expected, overall):
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {actual.shape}, expected {expected.shape}")
    scale = np.abs(expected).max() or overall
    return float(np.abs(actual - expected).max() / scale)


def _leaves(gradients):
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradients)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_trees_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)
