"""The code of the README runs and prints the stored output."""

import re

import brainstate
import places
import pytest

README = (places.ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what they save
    names = {}
    for block in blocks("python"):
        exec(block, names)
        weights = names["learner"].algorithm.model.states(brainstate.ParamState)
        assert set(names["gradients"]) == set(names.get("params", weights))
    losses, report = capsys.readouterr().out.split("\n", 1)
    stored = [float(loss) for loss in blocks("text")[0].split()]
    assert [float(loss) for loss in losses.split()] == pytest.approx(stored, abs=0.005)
    assert "w_rec" in report


def test_it_is_short():
    assert len(README.splitlines()) <= 110


def test_links_lead_somewhere():
    root = places.ROOT
    pages = [root / name for name in ("README.md", "CONTRIBUTING.md", "docs/README.md")]
    for page in pages:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == []
