"""Tables as text and as HTML, and everything that a notebook shows by them."""

import html.parser
import re

import catalogue
import jax.numpy as jnp
import pytest
from drivers import build_learner

import braintrace
from braintrace._tables import Table, as_html, as_text

ODD = "<script>alert('a & b')</script> \"quoted\" <lambda>"
VOID = {"br", "hr", "img", "input", "meta"}


class Page(html.parser.HTMLParser):
    """Which elements a page has, and the cells of its tables; complains of what is not closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.rows, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] in ("h4", "p"):
            self.words.append(data)

    def error(self, message):
        raise AssertionError(message)


def test_text_is_aligned_in_columns():
    rows = [["a", "1.25", "long words"], ["b c", "", ""]]
    table = Table("title", ["name", "number", "rest"], rows)
    assert as_text([table, "and this"]) == (
        "title\n  name  number  rest\n  a     1.25    long words\n  b c\nand this"
    )
    ruled = Table("title", ["n", "no"], [["12", "3"]], numbers=[1], is_ruled=True, indent="")
    assert as_text([ruled]) == "title\nn   no\n--  --\n12   3"


@pytest.mark.parametrize("width", [40, 60, 200])
def test_text_fits_the_terminal_and_loses_no_word(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [["cell/w", "a long text about the state (2, 3, 4) and more of it", "1,234"]] * 2
    text = as_text([Table("title", ["name", "message", "bytes"], rows, numbers=[2])])
    assert max(map(len, text.split("\n"))) <= width
    assert text.count("(2, 3, 4)") == 2, "a shape stays on one line"
    given = ["title", "name", "message", "bytes", *rows[0], *rows[1]]
    assert sorted(text.split()) == sorted(word for entry in given for word in entry.split())


@pytest.mark.parametrize("name", ["ALIFLateThreshold", "TwoLayers"])
def test_a_report_fits_the_terminal(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    learner = build_learner(catalogue.BY_NAME[name])
    assert max(map(len, str(learner.report()).split("\n"))) <= 80


def test_a_learner_prints_as_one_line():
    learner = build_learner(catalogue.BY_NAME["TwoLayers"])
    size = learner.report().carried_bytes
    algorithm = f"D_RTRL({type(learner.module).__name__})"
    assert repr(learner.algorithm) == algorithm
    assert repr(learner) == f"Learner({algorithm}, {size:,} bytes of traces)"
    fresh = braintrace.D_RTRL(catalogue.BY_NAME["TwoLayers"].build())
    assert repr(braintrace.Learner(fresh)) == f"Learner({algorithm}, not compiled)"


def test_html_is_well_formed_and_escaped():
    table = Table(ODD, ["a", ODD], [[ODD, "1"], ["2", ODD]], numbers=[1])
    page = Page(as_html([table, ODD]))
    assert page.rows == [["a", ODD], [ODD, "1"], ["2", ODD]]
    assert page.words == [ODD, ODD]
    layout = {"div", "style", "h4", "p"}
    assert set(page.tags) == layout | {"table", "thead", "tbody", "tr", "th", "td"}


def test_html_brings_no_colours_of_its_own():
    """The page's own stay, light or dark; lines are grey and half transparent."""
    style = re.search("<style>(.*)</style>", as_html([]), flags=re.DOTALL)[1]
    assert not re.findall(r"#[0-9a-f]{3,6}|background|(?<!-)color: (?!inherit)", style)
    assert "overflow-x: auto" in style


def shown():
    learner = build_learner(catalogue.BY_NAME["Leaky"])
    check = braintrace.GradientCheck("<D_RTRL>", 3, ())
    primitive = braintrace.check_primitive(
        braintrace.etp_mm_p, jnp.ones((2, 3)), jnp.ones((3, 5)), has_bias=False
    )
    return {
        "graph": learner.graph,
        "report": learner.report(),
        "gradient": check,
        "rules": primitive,
    }


def test_everything_that_a_notebook_shows_is_of_one_kind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for name, value in shown().items():
        text, page = str(value), value._repr_html_()
        parsed = Page(page)
        assert page.startswith('<div class="braintrace"><style>'), name
        for row in parsed.rows:
            assert all(cell in text for cell in row), name
        for words in parsed.words:
            assert words in text, name


def test_graph_and_report_show_the_same_tables():
    found = shown()
    assert Page(found["graph"]._repr_html_()).rows == Page(found["report"]._repr_html_()).rows
    assert str(found["graph"]) in str(found["report"])
