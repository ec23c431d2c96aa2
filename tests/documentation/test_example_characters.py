"""The example's counts are those of n-grams, its network improves on them, and it can be ended."""

import shutil

import brainstate
import example_scripts
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def example():
    return example_scripts.load("characters")


def probabilities_by_dictionary(text, order, symbols, discount):
    """Interpolated absolute discounting of one stream ``(T, order + 1, symbols)``."""
    seen, found = {}, []
    for t in range(len(text)):
        for k in range(order + 1):
            if t >= k:
                row = seen.setdefault((k, *text[t - k : t]), np.zeros(symbols))
                row[text[t]] += 1
        p, by_order = np.full(symbols, 1 / symbols), []
        for k in range(order + 1):
            n = seen.get((k, *text[t + 1 - k : t + 1]) if t + 1 >= k else None, np.zeros(symbols))
            if n.sum():
                p = (np.maximum(n - discount, 0) + discount * (n > 0).sum() * p) / n.sum()
            by_order.append(p)
        found.append(by_order)
    return np.array(found)


def test_counts_are_those_of_ngrams(example):
    """All but the few that fall on the place of another n-gram with the same check."""
    text = example.load_text(120, streams=1)
    counts = example.Counts(9_000_000, 2)
    counts.init_state(1)
    probabilities, _ = brainstate.transform.for_loop(counts, jnp.asarray(text))
    found = np.asarray(probabilities)[:, 0]
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-3)
    expected = probabilities_by_dictionary(
        text[:, 0].tolist(), 2, example.SYMBOLS, example.DISCOUNT
    )
    assert np.isclose(found, expected, rtol=1e-3).mean() > 0.999


@pytest.mark.parametrize("name", ["Network", pytest.param("Corrector", marks=pytest.mark.nightly)])
def test_a_run_that_was_ended_goes_on_to_the_last_bit(example, tmp_path, monkeypatch, name):
    """And learns more than the frequencies of single characters."""
    save, make = braintrace.save, getattr(example, name)

    def save_and_copy(folder, learner, extra):
        save(folder, learner, extra=extra)
        if len(extra) == len(text) // 2:
            shutil.copytree(folder, tmp_path / "half")

    monkeypatch.setattr(braintrace, "save", save_and_copy)
    monkeypatch.setattr(example, "HIDDEN", 32)
    monkeypatch.setattr(example, "PARTS", 2)
    text = example.load_text(2400)
    bits, _ = example.online_bits(make, text, tmp_path / "whole", 0)
    again, _ = example.online_bits(make, text, tmp_path / "half", 0)
    np.testing.assert_array_equal(bits, again)
    frequencies = np.bincount(text.ravel()) / text.size
    frequencies = frequencies[frequencies > 0]
    entropy = -(frequencies * np.log2(frequencies)).sum()
    assert bits[1200:].mean() < entropy - 0.8


@pytest.mark.nightly
def test_margins(example, tmp_path, capsys):
    """Fewer bits than the best counts of as many bytes, with each of three seeds."""
    picture = tmp_path / "characters.png"
    found = example.main(["--out", str(picture), "--folder", str(tmp_path / "saved")])
    of = {name.split(" (")[0]: np.atleast_2d(rows).mean(axis=1) for name, rows in found.items()}
    assert len(of["counts and network, D_RTRL"]) == 3
    corrected = of["counts and network, D_RTRL"].max()
    assert corrected < 0.86 * min(of[f"{order + 1}-grams"] for order in example.ORDERS)
    assert corrected < 0.7 * of["network, D_RTRL"].min()
    assert corrected < 1.08 * of["counts and network, BPTT(16)"].min()
    printed = capsys.readouterr().out
    assert all(name in printed for name in found)
    assert picture.read_bytes().startswith(b"\x89PNG")
