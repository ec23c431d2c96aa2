"""Pytree structures with a path for every leaf that becomes a State."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import is_quantity, shown
from .._errors import ShapeError
from .._jax import strongly_typed
from .._typing import Path, PyTree, path_name


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The structure of a pytree, with paths; brainstate does not traverse it.

    Attributes
    ----------
    numbers
        The pytree, with the number of each leaf as the leaf.
    paths
        Paths by number; ``None`` for a leaf that does not change.
    fixed
        The leaves that do not change, by number.
    """

    numbers: PyTree
    paths: tuple[Path | None, ...]
    fixed: Mapping[int, Any]

    def of(self, by_path: Mapping[Path, Any], fixed: bool = True) -> PyTree:
        """Return the pytree with other leaves; a missing leaf is ``None``.

        Parameters
        ----------
        by_path
            Leaves by path.
        fixed
            Whether the result includes the leaves that do not change.
        """

        def leaf(number: int) -> Any:
            path = self.paths[number]
            return by_path.get(path) if path else self.fixed[number] if fixed else None

        return jax.tree.map(leaf, self.numbers)

    def leaves(self, tree: PyTree, what: str, gaps: bool = False) -> dict[Path, Any]:
        """Return the leaves of a pytree of this structure by path.

        Parameters
        ----------
        tree
            The pytree.
        what
            Beginning of an error message.
        gaps
            Whether a leaf may be ``None``.

        Raises
        ------
        ShapeError
            If it has another structure, or another value for a leaf that does not change.
        """

        def is_leaf(value: Any) -> bool:
            return is_quantity(value) or (gaps and value is None)

        numbers, expected = jax.tree.flatten(self.numbers, is_leaf=is_leaf)
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        if structure != expected:
            raise ShapeError(f"{what} {self._unlike(tree)}")
        by_path = {}
        for number, leaf in zip(numbers, leaves, strict=True):
            if leaf is None:
                continue
            path = None if number is None else self.paths[number]
            if path is not None:
                by_path[path] = leaf
            elif number is None or not _is_same(leaf, self.fixed[number]):
                raise ShapeError(f"{what} {shown(leaf)} in a place without an array.")
        return by_path

    def _unlike(self, tree: PyTree) -> str:
        """Describe how a pytree differs from this one."""
        root = next(path[0] for path in self.paths if path)
        expected = set(map(path_name, _paths(root, self.numbers)))
        leaves = jax.tree.leaves(tree, is_leaf=is_quantity)
        actual = dict(zip(map(path_name, _paths(root, tree)), leaves, strict=True))
        missing = [f"no '{name}'" for name in sorted(expected - actual.keys())]
        more = [f"'{name}', {shown(actual[name])}" for name in sorted(actual.keys() - expected)]
        if missing or more:
            wanted = ", ".join(map(repr, sorted(expected)))
            return f"{', '.join([*more, *missing])}; expected {wanted}, as it was given."
        structures = map(jax.tree.structure, (tree, self.numbers))
        return "the structure {}; expected {}, as it was given.".format(*structures)


def tree_of(
    root: str, tree: PyTree, is_kept: Callable[[Any], bool]
) -> tuple[Tree, dict[Path, Any]]:
    """Return the structure of a pytree, and the values of its leaves by path.

    Parameters
    ----------
    root
        First part of the paths.
    tree
        The pytree.
    is_kept
        Tells whether the value of a leaf may change.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantity)
    paths = _paths(root, tree)
    changes = list(map(is_kept, leaves))
    made = Tree(
        jax.tree.unflatten(structure, range(len(leaves))),
        tuple(path if is_state else None for path, is_state in zip(paths, changes, strict=True)),
        {
            n: leaf
            for n, (leaf, is_state) in enumerate(zip(leaves, changes, strict=True))
            if not is_state
        },
    )
    pairs = zip(made.paths, leaves, strict=True)
    return made, {path: as_value(leaf) for path, leaf in pairs if path is not None}


def _paths(root: str, tree: PyTree) -> list[Path]:
    """Return the path of every leaf of a pytree.

    The name ``value``, which Flax uses in a box around a single array, is left out. Leaves with the
    same path are numbered.
    """
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantity)]
    paths = [(root, *(jax.tree_util.keystr((key,), simple=True) for key in path)) for path in keys]
    sizes = collections.Counter(path[:-1] for path in paths)
    short = [p[:-1] if p[-1] == "value" and p[1:] and sizes[p[:-1]] == 1 else p for p in paths]
    times = collections.Counter(short)
    return [path if times[path] == 1 else (*path, str(n)) for n, path in enumerate(short)]


def as_value(leaf: Any) -> Any:
    """Return a leaf as the value of a State: a copy, without a weak type."""
    return strongly_typed(jax.tree.map(lambda array: jnp.array(array, copy=True), leaf))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
