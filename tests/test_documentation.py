"""The code of the pages runs, and the reference has every public name."""

import ast
import json
import operator
import re
import subprocess
import sys

import brainstate
import pytest
from repository import DOCS, LAYERS, PUBLIC, ROOT, public_names

import braintrace

README = ROOT / "README.md"
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if "```python" in path.read_text())
SEED_NOTEBOOK = ROOT.parent / "shared" / "acceptance" / "seed_notebook.py"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
SURROGATES = [
    name
    for name in public_names(braintrace.nn.surrogate)
    if getattr(braintrace.nn.surrogate, name).__module__ == "braintrace.nn.surrogate"
]


def blocks(path, language):
    found = rf"^```{language}\n(.*?)^```"
    return re.findall(found, path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_of_a_page_run(page, monkeypatch, tmp_path, request):
    """From top to bottom, with the names of the blocks before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {"__name__": "__main__"}
    request.addfinalizer(lambda: brainstate.environ.pop("dt", None))
    for number, block in enumerate(blocks(DOCS / f"{page}.md", "python")):
        exec(compile(block, f"block {number} of {page}.md", "exec"), names)


def test_the_program_of_the_readme_prints_its_losses(capsys):
    names = {}
    (program,), (output,) = blocks(README, "python"), blocks(README, "text")
    exec(program, names)
    weights = names["learner"].module.states(brainstate.ParamState)
    assert set(names["gradients"]) == set(weights)
    losses = [float(loss) for loss in capsys.readouterr().out.split()]
    assert losses == pytest.approx([float(loss) for loss in output.split()], abs=0.005)


def test_links_of_files_outside_of_the_site():
    for page in (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_rules_name_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / "rules.md").read_text())
    assert len(named) > 15
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_the_summary_for_language_models_has_every_page():
    linked = set(re.findall(r"\((\w+)\.html\)", (DOCS / "llms.txt").read_text()))
    pages = {path.stem for path in (*DOCS.glob("*.md"), *DOCS.glob("*.rst"))}
    assert linked == pages - {"index"}


def test_the_gallery_has_a_card_with_a_picture_for_every_example():
    _, *cards = (DOCS / "gallery.md").read_text().split(":::{grid-item-card}")
    pictures = [re.search(r"^:img-top: (.+)$", card, flags=re.MULTILINE)[1] for card in cards]
    assert [picture for picture in pictures if not (DOCS / picture).exists()] == []
    shown = {name for card in cards for name in re.findall(r"\(examples/(\w+)\.py\)", card)}
    assert shown == {path.stem for path in (DOCS / "examples").glob("*.py")}


@pytest.mark.parametrize("name", [*PUBLIC, *LAYERS, *SURROGATES])
def test_the_reference_has_every_public_name(name):
    entry = rf"^   {name}$|``{name}``"
    found = re.findall(entry, (DOCS / "api.rst").read_text(), flags=re.MULTILINE)
    assert len(found) == 1, "once, in a group"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_executed_from_top_to_bottom(path):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not re.search(r"/(tmp|home|root|work|Users)/[\w.-]+|ipykernel", json.dumps(outputs))


@pytest.mark.parametrize("path", sorted((DOCS / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_scripts_use_names_that_exist(path):
    tree = ast.parse(path.read_text())
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name in names:
        if re.fullmatch(r"braintrace(\.\w+)+", name):
            assert operator.attrgetter(name.partition(".")[2])(braintrace)


@pytest.mark.skipif(
    not SEED_NOTEBOOK.exists(), reason="the notebook lies beside the repository, and not everywhere"
)
def test_every_cell_of_the_notebook_that_fixes_the_interface_prints_what_is_stored():
    # A process of its own, because the notebook registers operations.
    result = subprocess.run([sys.executable, SEED_NOTEBOOK], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "21 of 21 cells agree"
