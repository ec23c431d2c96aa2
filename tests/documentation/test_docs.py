"""The site names everything that is public, and its notebooks are committed as they run."""

import importlib.util
import json
import re
import runpy
import tomllib

import places
import pytest
from public_names import LAYERS, PUBLIC, public_names

import braintrace

DOCS = places.DOCS
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
EXECUTED = [*NOTEBOOKS, DOCS / "evidence.ipynb"]
SURROGATES = [
    name
    for name in public_names(braintrace.nn.surrogate)
    if getattr(braintrace.nn.surrogate, name).__module__ == "braintrace.nn.surrogate"
]
MACHINE = re.compile(r"/(tmp|home|root|work|Users)/[\w.-]+")


PAGES = [
    "algorithms",
    "brainstate",
    "dale",
    "from_flax",
    "from_pytorch",
    "gpu",
    "index",
    "one_formula",
    "reinforcement_learning",
    "sequences",
    "sharding",
    "stability",
    "time_series",
    "watching",
    "write_a_rule",
]
"""Those whose code runs from top to bottom."""
WHERE = "https://github.com/Some/thing"


@pytest.fixture(scope="module")
def hosting():
    spec = importlib.util.spec_from_file_location("hosting", DOCS / "hosting.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(path):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("name", [*PUBLIC, *LAYERS, *SURROGATES])
def test_the_reference_has_every_public_name(name):
    entry = rf"^   {name}$|``{name}``"
    found = re.findall(entry, (DOCS / "api.rst").read_text(), flags=re.MULTILINE)
    assert len(found) == 1, "once, in a group"


def test_the_index_has_every_notebook():
    listed = re.findall(r"^notebooks/(\w+)$", (DOCS / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == [path.stem for path in NOTEBOOKS]


def test_the_list_of_pages_has_every_page_of_the_site():
    script = runpy.run_path(str(DOCS / "make_list.py"))
    assert (DOCS / "README.md").read_text() == script["render"](), "run docs/make_list.py"
    contents = [
        path.read_text() for path in DOCS.glob("*.[mr][ds]*")
    ]  # generated pages are below others
    listed = re.findall(r"^ *([\w/]+)$", "\n".join(contents), flags=re.MULTILINE)
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    assert pages - {"README", "index"} <= set(listed)


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_notebooks_are_executed_from_top_to_bottom(path):
    found = cells(path)
    assert [cell["execution_count"] for cell in found] == [*range(1, len(found) + 1)]
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not MACHINE.search(json.dumps(outputs))
    assert not any("ipykernel" in json.dumps(output) for output in outputs)


def test_nobody_invents_where_the_project_is_hosted(hosting):
    assert hosting.repository({}) is None
    server = {"GITHUB_SERVER_URL": "https://github.com"}
    assert hosting.repository({**server, "GITHUB_REPOSITORY": "Some/thing"}) == WHERE
    assert hosting.project_urls(None) == {}
    urls = hosting.project_urls(WHERE)
    assert urls["Documentation"] == "https://some.github.io/thing/"
    assert all(url.startswith("https://") for url in urls.values())
    assert hosting.colab_link("01", None) is None
    assert hosting.colab_link("01", "https://example.org/Some/thing") is None


def test_links_of_the_readme_work_on_the_page_of_a_registry(hosting):
    readme = (DOCS.parent / "README.md").read_text()
    assert hosting.absolute_links(readme, None) == readme
    found = hosting.absolute_links(readme, WHERE)
    assert f"]({WHERE}/raw/HEAD/docs/_static/learning.png)" in found
    assert f"]({WHERE}/blob/HEAD/docs/algorithms.md)" in found
    assert not re.findall(r"\]\((?!https?:|#)", found)
    assert found.replace(f"{WHERE}/raw/HEAD/", "").replace(f"{WHERE}/blob/HEAD/", "") == readme


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_open_in_colab(hosting, path):
    """With a link below the title, and with this package instead of the registry's."""
    notebook = json.loads(path.read_text())
    shown = hosting.with_links(notebook, path.stem, WHERE)["cells"]
    title, line, *_ = shown[0]["source"].split("\n\n")
    assert title.startswith("# ")
    assert "\n" not in title
    assert f"/github/Some/thing/blob/gh-pages/colab/{path.stem}.ipynb" in line
    assert shown[1:] == notebook["cells"][1:]
    without = hosting.with_links(notebook, path.stem, None)["cells"][0]["source"]
    assert "colab.research" not in without
    assert f'"../colab/{path.stem}.ipynb" download' in without
    first, *others = hosting.for_colab(notebook, WHERE, "0a1b")["cells"]
    assert f"@ git+{WHERE}@0a1b" in first["source"]
    assert others == notebook["cells"]
    assert hosting.for_colab(notebook, None) == notebook


def test_pages_name_this_package_and_not_the_one_on_a_registry():
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md"), *EXECUTED]
    commands = [
        (page.name, command)
        for page in pages
        for command in re.findall(r"pip install [^`\n]*", page.read_text())
    ]
    assert commands
    install = (DOCS / "install.md").read_text()
    assert "`pip install braintrace`, with no path and no dot, installs that" in install
    named = {page for page, command in commands if re.search(r"\bbraintrace\b", command)}
    assert named == {"install.md"}
    (author,) = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["authors"]
    assert f"```text\n{author['name']}\n```" in install
    assert author["name"] in (DOCS.parent / "README.md").read_text()


def test_the_pages_have_every_example():
    """The first page has a link to each script, and another page has its command."""
    scripts = {path.stem for path in (DOCS / "examples").glob("*.py")}
    links = re.findall(r"\]\(examples/(\w+)\.py\)", (DOCS / "index.md").read_text())
    assert sorted(links) == sorted(scripts)
    pages = "\n".join(path.read_text() for path in [DOCS.parent / "README.md", *DOCS.glob("*.md")])
    assert scripts == set(re.findall(r"\bpython docs/examples/(\w+)\.py", pages))
    pictures = re.findall(r"^!\[.+\]\((_static/.+)\)", pages, flags=re.MULTILINE)
    assert pictures
    for picture in pictures:
        assert (DOCS / picture).stat().st_size < 150_000


def test_notebooks_stay_small():
    assert sum(path.stat().st_size for path in EXECUTED) < 8e6
