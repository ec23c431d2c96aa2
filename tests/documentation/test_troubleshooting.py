"""The page on what goes wrong has every error and every warning of the library, and no others."""

import ast
import re

import places
from public_names import SOURCES

import braintrace
from braintrace import _errors

PAGE = places.DOCS / "troubleshooting.md"
ERRORS = {name for name in vars(_errors) if name.endswith(("Error", "Warning", "Interrupted"))}
VARIES = "…"


def told_by(source):
    """Yield what each error and warning in a file says, with dots for what varies."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called in {*ERRORS, "warnings.warn", "super().__init__"}:
                yield node.lineno, " ".join(words_of(node.args[0], constants).split())


def words_of(node, constants):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp):
        return words_of(node.left, constants) + words_of(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return words_of(constants[node.id], {})
    return VARIES


def messages():
    """Return ``{file:line: message}`` of all that are raised or warned of in words of their own."""
    found = {}
    for path in SOURCES:
        text = path.read_text()
        if any(f"{name}(" in text for name in ERRORS):
            told = told_by(text)
            found |= {f"{path.name}:{line}": words for line, words in told}
    return {place: words for place, words in found.items() if re.search(r"\w", words)}


def entries():
    """Return what the page explains: the code in front of the dash of every entry."""
    page = " ".join(PAGE.read_text().split("\n"))
    found = re.findall(r" - (`.+?`)\s+— ", page)
    return [code.strip() for entry in found for _, code in re.findall(r"(`+)(.+?)\1(?!`)", entry)]


def pattern(entry):
    parts = (re.escape(" ".join(part.split())) for part in entry.split(VARIES))
    return re.compile(".*".join(parts))


def test_every_message_is_explained():
    patterns = [pattern(entry) for entry in entries()]
    missing = {p: w for p, w in messages().items() if not any(e.search(w) for e in patterns)}
    assert not missing, "add an entry to docs/troubleshooting.md"


def test_everything_that_is_explained_is_said():
    said = list(messages().values())
    for entry in entries():
        assert hasattr(braintrace, entry) or any(pattern(entry).search(words) for words in said), (
            entry
        )


def test_every_kind_of_error_is_named():
    page = PAGE.read_text()
    public = [
        name for name in dir(braintrace) if name.endswith(("Error", "Warning", "Interrupted"))
    ]
    assert [name for name in public if name not in page] == []
