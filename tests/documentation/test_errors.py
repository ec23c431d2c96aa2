"""The page on errors explains every class, by an example that raises it and a fix that works."""

import re
import sys
import warnings

import places
import pytest

import braintrace
from braintrace import _errors

PAGE = (places.DOCS / "errors.md").read_text()
HEAD, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
BY_CLASS = {section.partition("\n")[0].strip("`"): section for section in SECTIONS}
KINDS = (braintrace.BraintraceError, braintrace.Interrupted, Warning)
CLASSES = [
    name
    for name, found in vars(braintrace).items()
    if isinstance(found, type) and issubclass(found, KINDS)
]


def blocks(text):
    """Return the code of a section, in the order of the page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_every_class_has_a_section():
    assert sorted(BY_CLASS) == sorted(CLASSES)
    own = {name for name, found in vars(_errors).items() if isinstance(found, type)}
    assert own <= set(CLASSES), "an error that users cannot name"


@pytest.mark.by_day(
    "BraintraceError", "NotInitializedError", "LostTracesError", "ShapeError", "OptionError"
)
@pytest.mark.parametrize("name", sorted(BY_CLASS))
def test_the_example_raises_the_error_and_the_fix_does_not(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if name == "MissingPackageError":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    expected, names = getattr(braintrace, name), {"__name__": "errors"}
    (setup,), (example, *fixes) = blocks(HEAD), blocks(BY_CLASS[name])
    exec(setup, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error", expected if issubclass(expected, Warning) else UserWarning)
        with pytest.raises(expected) as raised:
            exec(example, names)
        if name != "BraintraceError":
            assert raised.type is expected
        names["learner"].reset_state()
        for fix in fixes:
            exec(fix, names)
