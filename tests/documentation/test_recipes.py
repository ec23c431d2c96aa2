"""The code of the recipes runs from top to bottom."""

import re

import matplotlib
import places
import pytest


def test_recipes_run():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    matplotlib.use("agg")
    page = (places.DOCS / "recipes.md").read_text()
    names = {"__name__": "recipes"}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        exec(block, names)
