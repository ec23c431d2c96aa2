"""The agent of the example learns what to remember, which its opponents do not."""

import example_scripts
import numpy as np
import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("gymnax", reason="needs the extra `rl`: pip install braintrace[rl]")
    return example_scripts.load("actor_critic")


def test_a_sign_is_remembered(example):
    """A short one, in a short life; it is never guessed so well."""
    world = example.memory_chain(length=6, steps=1200)
    (curve,) = example.train(world, example.AGENTS["d_rtrl"], 1)
    assert curve[-1] > 0.9


@pytest.mark.nightly
def test_margins(example, tmp_path, capsys):
    """Means over three seeds, of the second half of their lives."""
    picture = tmp_path / "actor_critic.png"
    (_, chain), (_, pole) = example.main(["--out", str(picture)])
    found = {name: example.score(curves) for name, curves in chain.items()}
    assert found["d_rtrl"].min() > 0.9
    assert found["bptt1"].mean() < 0.6
    assert np.abs(found["forgetful"]).max() < 0.2
    found = {name: example.score(curves).mean() for name, curves in pole.items()}
    assert found["d_rtrl"] > 1.5 * found["bptt1"]
    assert found["d_rtrl"] > 4 * found["forgetful"]
    printed = capsys.readouterr().out
    assert all(agent.name in printed for agent in example.AGENTS.values())
    assert picture.read_bytes().startswith(b"\x89PNG")
