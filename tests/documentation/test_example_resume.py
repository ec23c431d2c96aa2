"""The example that goes on where it was stopped does so, and learns what it says."""

import signal

import example_scripts
import numpy as np
import pytest
from drivers import compiled_once

pytestmark = pytest.mark.nightly


@pytest.fixture
def example():
    return example_scripts.load("resume")


def test_it_goes_on_where_it_was_stopped(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "PART", 60)
    monkeypatch.setattr(example, "LOG_EVERY", 20)
    monkeypatch.setattr(example, "build", compiled_once(example.build))
    arguments = ["--folder", str(tmp_path / "stopped"), "--steps", "120"]
    tell, told = example.tell, []

    def told_and_stopped(step, metrics):
        tell(step, metrics)
        told.append(step)
        if len(told) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(example, "tell", told_and_stopped)
    stopped = len(example.main(arguments))
    assert 60 < stopped <= 120
    assert f"{stopped} steps are saved" in capsys.readouterr().out
    losses = example.main(arguments)
    assert f"going on after {stopped} steps" in capsys.readouterr().out
    whole = example.train(tmp_path / "whole", 120)
    np.testing.assert_array_equal(losses, whole)


@pytest.mark.nightly
def test_it_learns(example, tmp_path):
    losses = example.train(tmp_path, 20_000)
    assert losses[:10].mean() > 1  # that of a network which says nothing
    assert losses[-1000:].mean() < 0.1
