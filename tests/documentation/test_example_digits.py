"""The digits example does what it says on a small scale, and reaches its accuracy on its own."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import example_scripts
import numpy as np
import places
import pytest

pytestmark = pytest.mark.nightly

SMALL = ["--epochs", "1", "--hidden", "8", "--batch-size", "64"]


@pytest.fixture(scope="module")
def example():
    # Loaded here and not at the top: what the examples need is not installed everywhere where
    # these tests are only collected.
    return example_scripts.load("sequential_digits")


@pytest.fixture
def run(example, tmp_path, capsys):
    """Run the example with arguments; return what it prints and the picture it draws."""

    def run(*arguments):
        picture = tmp_path / "digits.png"
        picture.unlink(missing_ok=True)
        example.main([*arguments, "--out", str(picture)])
        return capsys.readouterr(), picture.read_bytes()

    return run


def accuracy(output):
    pattern = r"learning curves: (.*)\ntest accuracy: [01]\.\d{3}\n"
    found = re.fullmatch(pattern, output)
    assert found, output
    assert pathlib.Path(found[1]).read_bytes().startswith(b"\x89PNG")
    return float(output.split()[-1])


# Comparing trains the other model with each of the algorithms.
CHOICES = [
    pytest.param(*row, marks=[] if row == ("lif", "d_rtrl") else pytest.mark.nightly)
    for row in itertools.product(["gru", "lif"], ["es_d_rtrl", "d_rtrl", "bptt"])
]


@pytest.mark.parametrize(("model", "algorithm"), CHOICES)
def test_every_choice_learns(run, model, algorithm):
    printed, picture = run(*SMALL, "--hidden", "32", "--model", model, "--algorithm", algorithm)
    assert accuracy(printed.out) > 0.2  # twice what guessing gets
    assert "loss=" in printed.err
    assert "accuracy=" in printed.err
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reached"),
    [(["--epochs", "8"], 0.87), pytest.param([], 0.93, marks=pytest.mark.nightly)],
    ids=["in a quarter of the epochs", "as they are"],
)
def test_defaults_reach_their_accuracy(run, arguments, reached):
    printed, _ = run(*arguments)
    assert accuracy(printed.out) >= reached


@pytest.mark.nightly
def test_same_seed_same_numbers(example):
    def curves(seed):
        options = example.parse_options([*SMALL, "--seed", seed])
        return example.train("d_rtrl", example.load_sequences(), options)

    first = curves("1")
    assert curves("1") == first
    assert curves("2") != first


COUNTED = """
import collections, example_scripts, jax, sys
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
example_scripts.load("sequential_digits").main(sys.argv[1:])
print(*(events[name] for name in ("compile_requests_use_cache", "cache_hits")))
"""


@pytest.mark.nightly
def test_a_second_start_compiles_nothing(tmp_path):
    arguments = ["--epochs", "1", "--hidden", "8", "--batch-size", "718", "--out"]
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": places.SEARCHED,
    }
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", COUNTED, *arguments, str(tmp_path / "digits.png")]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        counts.append([*map(int, run.stdout.splitlines()[-1].split())])
    (first, found), (second, found_again) = counts
    assert first == second > found, counts
    assert found_again == second, counts


def test_compare_trains_and_draws_all_algorithms(example, run, monkeypatch):
    drawn = {}
    draw = example.draw
    monkeypatch.setattr(example, "draw", lambda of, path: (drawn.update(of), draw(of, path)))
    printed, _ = run(*SMALL, "--hidden", "32", "--compare")
    reached = {name: curves.accuracy[-1] for name, curves in drawn.items()}
    assert set(reached) == {"d_rtrl", "es_d_rtrl", "bptt"}
    assert all(accuracy > 0.2 for accuracy in reached.values())
    assert printed.out.splitlines()[1:] == [
        f"test accuracy of {example.NAMES[name]}: {accuracy:.3f}"
        for name, accuracy in reached.items()
    ]


def test_one_algorithm_or_all(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--compare", "--algorithm", "bptt"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "not allowed with argument" in line


def test_pixels_one_per_step(example):
    rows, pixels = example.load_sequences(), example.load_sequences(one_pixel_per_step=True)
    assert rows.train_images.shape[1:] == (8, 8)
    assert pixels.train_images.shape[1:] == (64, 1)
    np.testing.assert_array_equal(rows.test_images.reshape(360, -1), pixels.test_images[..., 0])


@pytest.mark.nightly
def test_pixels_are_learned_from(run):
    printed, _ = run(*SMALL, "--pixels")
    accuracy(printed.out)


def test_a_fifth_is_held_out(example):
    digits = example.load_sequences()
    assert len(digits.train_images) == len(digits.train_labels) == example.TRAINING_IMAGES
    assert len(digits.test_images) == len(digits.test_labels) == 360
    seen = {image.tobytes() for image in digits.train_images}
    assert not seen & {image.tobytes() for image in digits.test_images}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--algorithm", "rtrl"),
        ("--model", "transformer"),
        ("--hidden", "0"),
        ("--hidden", "many"),
        ("--epochs", "0"),
        ("--epochs", "1.5"),
        ("--batch-size", "-1"),
        ("--batch-size", "1438"),
        ("--seed", "-1"),
        ("--seed", str(2**32)),
        ("--out", "missing/digits.png"),
        ("--out", "digits.doc"),
    ],
)
def test_bad_values_end_with_one_line(example, capsys, option, value):
    with pytest.raises(SystemExit) as stop:
        example.main([option, value])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert f"argument {option}: " in printed.err
    assert value in printed.err
