"""Factors beside frozen weights learn while the network runs, and can be taken off again."""

import brainstate
import example_scripts
import numpy as np
import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def example():
    return example_scripts.load("lora_adaptation")


def test_factors_learn_and_nothing_else(example):
    brainstate.random.seed(0)
    before, seen, test = example.load(0)
    shuffle = np.random.default_rng(0).permutation
    weights = example.pretrained(before, [shuffle(len(before.labels)) for _ in range(8)])
    as_it_is = example.as_it_is(weights, seen, test)
    adapted = example.adapted(weights, example.METHODS["LoRA, ES_D_RTRL"], seen, test)
    assert adapted.before == as_it_is.before > 0.6
    assert adapted.drifted > as_it_is.drifted + 0.15
    assert adapted.parameters < 0.2 * sum(
        value.size for w in weights.values() for value in w.values()
    )


def test_images_are_in_one_part_only(example):
    parts = [{row.tobytes() for row in images.rows} for images in example.load(0)]
    assert [len(part) for part in parts] == [900, 537, 360]
    assert not (parts[0] & parts[1] or parts[1] & parts[2] or parts[0] & parts[2])


@pytest.mark.nightly
def test_margins(example, tmp_path, capsys):
    """Three seeds: far better than the frozen network, and better than its readout alone."""
    picture = tmp_path / "lora.png"
    runs = example.main(["--out", str(picture)])
    reached = {name: np.array([found[name].drifted for found in runs]) for name in runs[0]}
    for name in ("LoRA, D_RTRL", "LoRA, ES_D_RTRL"):
        assert len(reached[name]) == 3
        assert (reached[name] > reached["as it is"] + 0.35).all()
        assert reached[name].mean() > reached["readout only"].mean() + 0.03
    for found in runs:
        assert found["LoRA, D_RTRL"].before == found["as it is"].before
        assert found["everything"].before < found["as it is"].before - 0.1
        assert found["LoRA, ES_D_RTRL"].trace_bytes < 0.05 * found["everything"].trace_bytes
    assert "readout only" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
