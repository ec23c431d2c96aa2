"""The site names everything that is public, and its notebooks are committed as they run."""

import json
import pathlib
import re
import warnings

import brainstate
import pytest
from test_package import LAYERS, PUBLIC, public_names

import braintrace

DOCS = pathlib.Path(__file__).parent.parent / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
SURROGATES = [
    name
    for name in public_names(braintrace.nn.surrogate)
    if getattr(braintrace.nn.surrogate, name).__module__ == "braintrace.nn.surrogate"
]
MACHINE = re.compile(r"/(tmp|home|root|work|Users)/[\w.-]+")


def cells(path):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("name", [*PUBLIC, *LAYERS, *SURROGATES])
def test_the_reference_has_every_public_name(name):
    entry = rf"^   {name}$|``{name}``"
    assert re.search(entry, (DOCS / "api.rst").read_text(), flags=re.MULTILINE)


def test_the_index_has_every_notebook():
    listed = re.findall(r"^notebooks/(\w+)$", (DOCS / "index.md").read_text(), flags=re.MULTILINE)
    assert listed == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_executed_from_top_to_bottom(path):
    found = cells(path)
    assert [cell["execution_count"] for cell in found] == [*range(1, len(found) + 1)]
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not MACHINE.search(json.dumps(outputs))
    assert not any("ipykernel" in json.dumps(output) for output in outputs)


def test_notebooks_stay_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 8e6


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dale", "populations", "time_series"])
def test_pages_say_what_their_code_prints(name, capsys):
    """A block of text below one of Python is what this prints."""
    page = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    names = {"__name__": name}
    warnings.simplefilter("ignore", braintrace.ApproximationWarning)
    with brainstate.environ.context():
        for index, (language, block) in enumerate(blocks):
            if language == "python":
                exec(block, names)
                printed, following = capsys.readouterr().out, blocks[index + 1 : index + 2]
                assert printed == (following[0][1] if following[0][0] == "text" else "")
