"""An LRU, or a GRU with windows, predicts an oscillator better than a GRU, as on its page."""

import example_scripts
import pytest

pytestmark = pytest.mark.nightly


def test_an_oscillator_needs_a_cell_that_learns_a_long_memory():
    example = example_scripts.load("cells")
    cells = example.CELLS
    lru, gru = (example.error(cells[name], "oscillator", 0) for name in ("LRU", "GRU"))
    windows = example.error(cells["GRU"], "oscillator", 0, example.WINDOW)
    assert lru < 0.5 < 0.6 < gru < 1
    assert windows < 0.8 * gru
