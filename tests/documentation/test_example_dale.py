"""Neurons that keep their signs learn to compare over a delay, as the example says."""

import brainstate
import example_scripts
import numpy as np
import pytest
import saiunit as u

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def example():
    return example_scripts.load("dale")


def obeys_the_law(example, found):
    """Tell whether no neuron has another sign, and no connection is new."""
    before, after = map(np.asarray, found.matrices)
    signs = np.sign(after) * example.SIGNS[:, None]
    return (signs >= 0).all() and not after[before == 0].any() and (after != before).any()


def test_one_cue_alone_says_nothing(example):
    xs, answers = example.make_trials(np.random.default_rng(0), 50)
    trials = xs.reshape(50, example.STEPS, example.BATCH, 2, -1)
    seen = [trials[:, :20].sum((1, 4)), trials[:, -20:].sum((1, 4))]
    first, second = (spikes.argmax(-1) for spikes in seen)
    np.testing.assert_array_equal(first == second, answers)
    for alone in (first, second):
        assert abs(np.mean(alone == answers) - 0.5) < 0.06


def loss(example, logits, answers):
    """Return the mean cross-entropy of the steps that count."""
    late = logits[-example.ANSWER :]
    of_answers = np.take_along_axis(late, answers[None, :, None], axis=-1)[..., 0]
    return np.mean(np.log(np.exp(late).sum(-1)) - of_answers)


def test_it_learns_and_signs_stay(example, monkeypatch):
    """A single batch of short trials is soon known better."""
    short = {"DELAY": 10, "STEPS": 2 * example.CUE + 10, "PART": 1, "TRIALS": 1}
    for name, value in short.items():
        monkeypatch.setattr(example, name, value)
    trials = example.make_trials(np.random.default_rng(0), 1)
    monkeypatch.setattr(example, "make_trials", lambda rng, count: trials)
    with brainstate.environ.context(dt=1.0 * u.ms):
        found = example.run(example.METHODS["D_RTRL"], seed=0, updates=20)
    answers = trials[1][0]
    before, after = (loss(example, logits, answers) for logits, _ in (found.before, found.after))
    assert after < 0.85 * before
    assert obeys_the_law(example, found)


@pytest.mark.nightly
def test_margins(example, tmp_path, capsys):
    """Three seeds: more right answers than with fixed weights, and far more than without a past."""
    picture = tmp_path / "dale.png"
    runs = example.main(["--out", str(picture)])
    learned, fixed, immediate = (
        np.array([found.accuracy for found in runs[name]])
        for name in ("D_RTRL", "recurrent fixed", "Immediate")
    )
    assert len(learned) == 3
    assert (learned > fixed + 0.02).all()
    assert learned.mean() > fixed.mean() + 0.05
    assert learned.mean() > immediate.mean() + 0.2
    assert all(obeys_the_law(example, found) for found in runs["D_RTRL"])
    assert "recurrent fixed" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
