"""Sparsity pattern: rows and columns of a sparse matrix, as a hashable constant."""

import functools
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._errors import DtypeError
from .._jax import is_tracer

FEWEST_NEAR, NEAR_PER_LINE = 2**16, 2.5
"""Size of a block of entries: at least this number, and a multiple of the number of columns (or
rows) that they scatter to. The elements that a block reads from one factor then fit a cache, and
it reads the other factor in order. With 10^4 columns 2^16 was the best power of two, with 10^5
2^18."""


@dataclass(frozen=True, eq=False, repr=False)
class SparsePattern:
    """Row and column of every entry; equal and hashed by content.

    Attributes
    ----------
    rows, columns : numpy array ``(nnz,)`` of int32
        Read-only. An entry at row ``in`` and column ``out`` is padding: it contributes nothing.
    shape : tuple of int
        ``(in, out)``.
    columns_are_sorted : bool
        Whether ``columns`` never decreases.
    digest : str
        Hash of the content, so that the arrays need not be compared.
    """

    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]
    columns_are_sorted: bool
    digest: str

    @functools.cached_property
    def has_padding(self) -> bool:
        """Whether some entry contributes nothing."""
        return bool((self.rows == self.shape[0]).any())

    @functools.cached_property
    def by_column(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Entries sorted by column, the start of each column, and their rows; no padding."""
        order = np.argsort(self.columns, kind="stable").astype(np.int32)
        pointers = np.searchsorted(self.columns[order], np.arange(self.shape[1] + 1))
        order = order[: pointers[-1]]
        return order, pointers.astype(np.int32), self.rows[order]

    @functools.cached_property
    def by_block(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns of entries sorted within blocks, and each entry's new place.

        They are sorted by the index that the order of the entries scatters.
        """
        scattered = self.rows if self.columns_are_sorted else self.columns
        size = max(FEWEST_NEAR, int(NEAR_PER_LINE * max(self.shape)))
        starts = range(0, self.nnz, size)
        sorted_blocks = (np.argsort(scattered[start : start + size]) + start for start in starts)
        order = np.concatenate([*sorted_blocks]).astype(np.int32)
        places = np.empty_like(order)
        places[order] = np.arange(self.nnz, dtype=np.int32)
        return self.rows[order], self.columns[order], places

    @property
    def nnz(self) -> int:
        """Number of entries, padding included."""
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparsePattern):
            return NotImplemented
        return self.shape == other.shape and self.digest == other.digest

    def __hash__(self) -> int:
        return hash((self.shape, self.digest))

    def __repr__(self) -> str:
        return f"sparse {self.shape[0]}x{self.shape[1]} nnz={self.nnz}"


def sparse_pattern(matrix: Any) -> SparsePattern:
    """Return the pattern of a CSR, CSC, COO, BCOO or BCSR matrix of any library.

    Raises
    ------
    DtypeError
        If it is of a different type.
    """
    if isinstance(matrix, SparsePattern):
        return matrix
    # By class name: brainevent is not a dependency, and its classes only need to look alike.
    classes = (base.__name__ for base in type(matrix).__mro__)
    kind = next((name for name in classes if name in _READERS), None)
    if kind is None:
        raise DtypeError(
            f"`sparse_matmul`: `sparse_mat` must be a CSR, CSC, COO, BCOO or BCSR matrix, got "
            f"{type(matrix).__name__}."
        )
    shape = (int(matrix.shape[0]), int(matrix.shape[1]))
    names, read = _READERS[kind]
    indices = [getattr(matrix, name) for name in names]
    if not all(isinstance(array, jax.Array) and not is_tracer(array) for array in indices):
        return make_pattern(*read(*indices), shape)
    key = (kind, shape, *map(id, indices))
    if key not in _known:
        _known[key] = make_pattern(*read(*indices), shape)
        for array in indices:
            weakref.finalize(array, _known.pop, key, None).atexit = False
    return _known[key]


_known: dict[tuple[Any, ...], SparsePattern] = {}
"""Patterns by the identity of index arrays that are alive: every trace of a model needs them."""


def make_pattern(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> SparsePattern:
    padding = (rows >= shape[0]) | (columns >= shape[1])
    rows = np.where(padding, shape[0], rows).astype(np.int32)
    columns = np.where(padding, shape[1], columns).astype(np.int32)
    rows.setflags(write=False)
    columns.setflags(write=False)
    digest = hashlib.sha256(rows.tobytes() + columns.tobytes()).hexdigest()
    return SparsePattern(rows, columns, shape, bool(np.all(np.diff(columns) >= 0)), digest)


def _concrete(indices: Any) -> np.ndarray:
    return np.asarray(indices).astype(np.int64)


def read_compressed(indices: Any, pointers: Any) -> tuple[np.ndarray, np.ndarray]:
    counts = np.diff(_concrete(pointers))
    minor = _concrete(indices)
    major = np.full(len(minor), len(counts))  # entries beyond the last pointer are padding
    major[: counts.sum()] = np.repeat(np.arange(len(counts)), counts)
    return major, minor


def _read_csc(indices: Any, pointers: Any) -> tuple[np.ndarray, np.ndarray]:
    columns, rows = read_compressed(indices, pointers)
    return rows, columns


def _read_coo(rows: Any, columns: Any) -> tuple[np.ndarray, np.ndarray]:
    return _concrete(rows), _concrete(columns)


def _read_bcoo(indices: Any) -> tuple[np.ndarray, np.ndarray]:
    places = _concrete(indices)
    return places[:, 0], places[:, 1]


_READERS: dict[str, tuple[tuple[str, ...], Callable[..., tuple[np.ndarray, np.ndarray]]]] = {
    "CSR": (("indices", "indptr"), read_compressed),
    "CSC": (("indices", "indptr"), _read_csc),
    "COO": (("row", "col"), _read_coo),
    "BCOO": (("indices",), _read_bcoo),
    "BCSR": (("indices", "indptr"), read_compressed),
}
