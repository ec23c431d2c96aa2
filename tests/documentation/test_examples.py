"""The shorter examples do what their pages say; the longer ones have files of their own."""

import signal

import brainstate
import example_scripts
import numpy as np
import pytest
from drivers import compiled_once

pytestmark = pytest.mark.nightly


def test_an_oscillator_needs_a_cell_that_learns_a_long_memory():
    """An LRU, or a GRU with windows, predicts an oscillator better than a GRU."""
    example = example_scripts.load("cells")
    cells = example.CELLS
    lru, gru = (example.error(cells[name], "oscillator", 0) for name in ("LRU", "GRU"))
    windows = example.error(cells["GRU"], "oscillator", 0, example.WINDOW)
    assert lru < 0.5 < 0.6 < gru < 1
    assert windows < 0.8 * gru


def test_conductances_learn_to_keep_a_cue_and_the_baseline_does_not():
    example = example_scripts.load("conductances")
    before, after = example.train("d_rtrl")
    assert before < 0.7 and after > 0.9
    assert example.train("immediate")[1] < 0.75


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forecasts_of_a_live_stream_are_better_than_persistence(seed):
    network, persistence = example_scripts.load("live_stream").run(seed=seed)
    assert network < 0.6 * persistence


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_agents_of_other_frameworks_remember_and_the_baseline_does_not(framework):
    pytest.importorskip({"nnx": "flax"}.get(framework, framework))
    example = example_scripts.load("agent_in_flax")
    brainstate.random.seed(0)
    learned = example.returns(framework, "d_rtrl")
    baseline = example.returns(framework, "immediate")
    assert learned.min() > 0.9
    assert baseline.mean() < 0.6


# --- an actor and a critic


@pytest.fixture(scope="module")
def actor_critic():
    pytest.importorskip("gymnax", reason="needs the extra `rl`: pip install braintrace[rl]")
    return example_scripts.load("actor_critic")


def test_a_sign_is_remembered(actor_critic):
    """A short one, in a short life; it is never guessed so well."""
    world = actor_critic.memory_chain(length=6, steps=1200)
    (curve,) = actor_critic.train(world, actor_critic.AGENTS["d_rtrl"], 1)
    assert curve[-1] > 0.9


def test_margins_of_the_agent(actor_critic, tmp_path, capsys):
    """Means over three seeds, of the second half of their lives."""
    picture = tmp_path / "actor_critic.png"
    (_, chain), (_, pole) = actor_critic.main(["--out", str(picture)])
    found = {name: actor_critic.score(curves) for name, curves in chain.items()}
    assert found["d_rtrl"].min() > 0.9
    assert found["bptt1"].mean() < 0.6
    assert np.abs(found["forgetful"]).max() < 0.2
    found = {name: actor_critic.score(curves).mean() for name, curves in pole.items()}
    assert found["d_rtrl"] > 1.5 * found["bptt1"]
    assert found["d_rtrl"] > 4 * found["forgetful"]
    printed = capsys.readouterr().out
    assert all(agent.name in printed for agent in actor_critic.AGENTS.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- a run that goes on


@pytest.fixture
def resume():
    return example_scripts.load("resume")


def test_it_goes_on_where_it_was_stopped(resume, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(resume, "PART", 60)
    monkeypatch.setattr(resume, "LOG_EVERY", 20)
    monkeypatch.setattr(resume, "build", compiled_once(resume.build))
    arguments = ["--folder", str(tmp_path / "stopped"), "--steps", "120"]
    tell, told = resume.tell, []

    def told_and_stopped(step, metrics):
        tell(step, metrics)
        told.append(step)
        if len(told) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(resume, "tell", told_and_stopped)
    stopped = len(resume.main(arguments))
    assert 60 < stopped <= 120
    assert f"{stopped} steps are saved" in capsys.readouterr().out
    losses = resume.main(arguments)
    assert f"going on after {stopped} steps" in capsys.readouterr().out
    np.testing.assert_array_equal(losses, resume.train(tmp_path / "whole", 120))


def test_a_run_that_can_be_resumed_learns(resume, tmp_path):
    losses = resume.train(tmp_path, 20_000)
    assert losses[:10].mean() > 1  # that of a network which says nothing
    assert losses[-1000:].mean() < 0.1
