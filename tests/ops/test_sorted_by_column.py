"""A sparse matrix whose entries lie with their outputs, in the forms that devices divide."""

import re

import jax.numpy as jnp
import numpy as np
import places
import pytest

from braintrace._etrace_op.sparse import sorted_by_column
from braintrace._etrace_op.sparse.pattern import make_pattern, sparse_pattern

INPUTS, OUTPUTS = 7, 6
RANDOM = np.random.default_rng(0)


def pattern(columns, padding=()):
    rows, columns = RANDOM.integers(0, INPUTS, len(columns)), np.asarray(columns)
    rows[list(padding)], columns[list(padding)] = INPUTS, OUTPUTS
    return make_pattern(rows, columns, (INPUTS, OUTPUTS))


THREE_EACH = np.repeat(np.arange(OUTPUTS), 3)
FIVE_FOR_TWO = np.repeat([0, 2, 4], 5) + RANDOM.integers(0, 2, 15)
PATTERNS = {
    "three each": (pattern(THREE_EACH), 6),
    "three each, padded": (pattern(THREE_EACH, (5, 17)), 6),
    "five for two": (pattern(FIVE_FOR_TWO), 3),
    "five for two, padded": (pattern(FIVE_FOR_TWO, (4, 12)), 3),
}
OTHERS = {
    "in another order": np.roll(THREE_EACH, 1),
    "too many for one": [0, 0, 0, 1, 2, 3, 4, 5],
    "no entries": np.zeros(0, int),
}


@pytest.mark.parametrize("name", OTHERS)
def test_entries_that_cannot_be_divided(name):
    assert pattern(OTHERS[name]).parts == 1


def with_a_zero(array):
    return np.pad(np.asarray(array, np.float64), [*[(0, 0)] * (array.ndim - 1), (0, 1)])


@pytest.mark.parametrize(("name", "lead"), [("three each", (4,))])
def test_products_by_target(name, lead, monkeypatch):
    found, parts = PATTERNS[name]
    assert found.parts == parts
    assert found.has_padding == ("padded" in name)
    x, f = (jnp.asarray(RANDOM.normal(size=(*lead, n)), jnp.float32) for n in (INPUTS, OUTPUTS))
    weight = jnp.asarray(RANDOM.normal(size=found.nnz), jnp.float32)
    of_inputs = with_a_zero(x)[..., found.rows]
    of_outputs = with_a_zero(f)[..., found.columns]
    np.testing.assert_allclose(sorted_by_column.of_entries(f, found), of_outputs)
    dense = np.zeros((found.nnz, OUTPUTS + 1))
    dense[np.arange(found.nnz), found.columns] = 1
    products = (of_inputs * weight) @ dense[:, :OUTPUTS]
    np.testing.assert_allclose(
        sorted_by_column.product(x, weight, found), products, rtol=1e-5, atol=1e-6
    )
    for terms in (sorted_by_column.MOST_TERMS, 2 * parts * x.size // INPUTS) if lead else ():
        monkeypatch.setattr(sorted_by_column, "MOST_TERMS", terms)  # at once, and two at a time
        sums = sorted_by_column.sddmm(x, f, found)
        np.testing.assert_allclose(sums, (of_inputs * of_outputs).sum(0), rtol=1e-5, atol=1e-6)


def test_any_matrix_can_be_put_in_order_as_the_page_shows(capsys):
    page = (places.DOCS / "sharding.md").read_text()
    (block, printed) = re.findall(
        r"```python\n(import jax.numpy.*?)```\n\n```text\n(.*?)```", page, re.S
    )[0]
    names = {}
    exec(block, names)
    assert capsys.readouterr().out == printed
    matrix, connected = names["matrix"], names["connected"]
    assert sparse_pattern(matrix).parts % 8 == 0
    np.testing.assert_array_equal(np.asarray(matrix.todense()) != 0, connected)
