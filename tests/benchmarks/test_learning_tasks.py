"""Tasks of `python -m benchmarks learning`: right answers, splits apart, chance as it is stated."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from benchmarks.learning import tasks
from benchmarks.learning.tasks import chaos, characters, draws, recordings, series

RECORDINGS = ("JapaneseVowels", "BasicMotions", "GunPoint")
SIZE = 3


def load(name):
    if name in RECORDINGS:
        pytest.importorskip(
            "aeon", reason='needs the extra `evidence`: pip install -e ".[evidence]"'
        )
    return tasks.load(name)


@functools.cache
def drawn():
    """A batch of every task that is made up, as NumPy arrays; one compilation for all."""
    names = (*tasks.CORE[1:4], "evidence accumulation", "delayed match-to-sample", "memory chain")
    draw = jax.jit(lambda key: {name: tasks.load(name).sample(key, 200, "train") for name in names})
    return jax.tree.map(np.asarray, draw(jax.random.key(3)))


@pytest.mark.by_day("digits by rows", "digits by pixels", "real series")
@pytest.mark.parametrize("name", tasks.ALL)
def test_a_task_is_what_it_states(name):
    task = load(name)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    for split in tasks.SPLITS:
        batch = jax.eval_shape(jax.vmap(lambda key, s=split: task.sample(key, SIZE, s)), keys)
        steps = (2, task.length, SIZE)
        last = {"classes": (), "values": (task.outputs,), "rewards": (2,)}[task.kind]
        assert batch.inputs.shape == (*steps, task.features)
        assert batch.targets.shape == steps + last
        assert batch.weights.shape == steps
        types = (batch.inputs.dtype, batch.weights.dtype, batch.targets.dtype)
        assert types == ("float32", "float32", "int32" if task.kind == "classes" else "float32")
    assert 1 <= task.truncations[0] < task.truncations[1] < task.length
    assert task.chance < task.threshold < 1


@pytest.mark.by_day("digits by rows", "digits by pixels", "real series")
@pytest.mark.parametrize("name", tasks.ALL)
def test_chance_is_what_an_answer_without_looking_gets(name):
    task = load(name)
    batch = task.held_out("test")
    shape = (*batch.weights.shape, task.outputs)
    if task.kind == "classes":
        answers = np.eye(task.outputs, dtype=np.float32)
    else:
        answers = np.zeros((1, task.outputs), np.float32)
    score = jax.jit(lambda answer: task.score(jnp.broadcast_to(answer, shape), batch))
    scores = [float(score(answer)) for answer in answers]
    assert max(scores) == pytest.approx(task.chance, abs=0.05)
    counted = float(jnp.mean(jnp.sum(batch.weights, axis=0)))
    assert counted == pytest.approx(task.counted, rel=0.02)


def test_losses_and_scores_of_all_kinds():
    classes, values = tasks.load("copy with lag"), tasks.load("adding problem")

    @jax.jit
    def found(of_classes, of_values):
        sure = 20 * jax.nn.one_hot(of_classes.targets, classes.outputs)
        right = classes.score(sure, of_classes), values.score(of_values.targets, of_values)
        wrong = classes.score(-sure, of_classes)
        off = values.losses(of_values.targets + 2, of_values.targets)
        return right, wrong, off, classes.losses(sure, of_classes.targets)

    right, wrong, off, small = found(drawn()["copy with lag"], drawn()["adding problem"])
    np.testing.assert_allclose(right, (1, 1), rtol=1e-6)
    assert wrong == 0 and small.max() < 1e-3
    np.testing.assert_allclose(off, np.full(off.shape, 4.0), rtol=1e-6)


def test_the_agents_gradient_is_that_of_what_it_did():
    task = tasks.load("memory chain")
    logits, value = np.array([0.3, -0.5], np.float32), np.float32(0.2)
    outputs = jnp.array([*logits, value])
    probability = np.exp(logits) / np.exp(logits).sum()
    gradient = jax.jit(jax.grad(task.losses))
    for drawn, action in ((0.1, 0), (0.9, 1)):
        for wanted in (0, 1):
            reward = 1.0 if action == wanted else -1.0
            found = gradient(outputs, jnp.array([wanted, drawn]))
            policy = -(reward - value) * (np.eye(2)[action] - probability)
            np.testing.assert_allclose(found, [*policy, value - reward], rtol=1e-5)


# --- working memory ----------------------------------------------------------------------


def test_copies_are_of_what_was_seen():
    batch = drawn()["copy with lag"]
    symbols = batch.inputs.argmax(axis=-1)
    np.testing.assert_array_equal(batch.targets[6:], symbols[:-6])
    np.testing.assert_array_equal(batch.weights, (np.arange(40) >= 6)[:, None] * np.ones((1, 200)))


def test_sums_are_of_the_marked_numbers():
    batch = drawn()["adding problem"]
    numbers, marks = (batch.inputs[..., 0] + 1) / 2, batch.inputs[..., 1]
    assert (marks.reshape(2, 20, -1).sum(axis=1) == 1).all()
    expected = ((numbers * marks).sum(axis=0) - 1) * np.sqrt(6)
    np.testing.assert_allclose(batch.targets[-1, :, 0], expected, rtol=1e-4, atol=1e-5)
    assert expected.std() == pytest.approx(1, abs=0.15)
    assert (batch.weights[:-1] == 0).all() and (batch.weights[-1] == 1).all()


def test_the_side_with_more_cues_is_the_answer():
    batch = drawn()["evidence accumulation"]
    cues = batch.inputs[:21:3, :, :2].round()
    np.testing.assert_array_equal(cues.sum(axis=-1), 1)
    np.testing.assert_array_equal(batch.targets[-1], cues.sum(axis=0).argmax(axis=-1))
    np.testing.assert_array_equal(batch.inputs[..., 2].round(), batch.weights)
    np.testing.assert_array_equal(batch.inputs[21:, :, :2].round(), 0)


def test_signs_differ_or_not():
    batch = drawn()["delayed XOR"]
    seen = batch.inputs[..., 0].round()
    assert (np.abs(seen).sum(axis=0) == 4).all()
    signs = seen[:5].sum(axis=0), seen[13:18].sum(axis=0)
    np.testing.assert_array_equal(batch.targets[-1], signs[0] != signs[1])
    assert set(batch.targets[-1]) == {0, 1}


def test_the_second_stimulus_is_the_first_or_not():
    batch = drawn()["delayed match-to-sample"]
    first, second = (batch.inputs[t, :, :4].argmax(axis=-1) for t in (0, 14))
    np.testing.assert_array_equal(batch.targets[-1], first == second)
    np.testing.assert_array_equal(batch.inputs[2:14].round(), 0)
    assert set(batch.targets[-1]) == {0, 1}


def test_the_sign_is_seen_at_first_alone():
    batch = drawn()["memory chain"]
    np.testing.assert_array_equal(batch.inputs[0, :, 0] > 0, batch.targets[-1, :, 0] > 0)
    assert (batch.inputs[1:, :, 0] == 0).all()
    assert (batch.inputs[..., 1] == batch.weights).all()


# --- windows of series -------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 7])
def test_what_counts_of_a_window_is_in_its_split(first):
    total, length, washout, ahead = 211, 20, 8, 3
    starts = draws.windows_in_time(total, length, washout, ahead, first)
    said = {
        split: [s + t + ahead for s in found for t in range(washout, length)]
        for split, found in starts.items()
    }
    seen = {split: [s + t for s in found for t in range(length)] for split, found in starts.items()}
    border = first + (total - first) * 3 // 5
    assert max(said["train"]) < border <= min(said["validation"]) - ahead
    assert max(said["validation"]) < min(said["test"]) - ahead < max(said["test"]) < total
    assert min(seen["train"]) >= first
    for split in ("validation", "test"):
        assert len(set(said[split])) == len(said[split])


def test_windows_are_of_the_series():
    values = np.arange(50, dtype=np.float32)
    measured = values != 30
    starts = {split: np.array([10, 20]) for split in tasks.SPLITS}
    _, held_out = draws.of_windows(values[:, None], -values[:, None], starts, 15, 4, measured)
    batch = held_out("test")
    expected = np.arange(15)[:, None] + [10, 20]
    np.testing.assert_array_equal(batch.inputs[..., 0], expected)
    np.testing.assert_array_equal(batch.targets[..., 0], -expected)
    counts = (np.arange(15) >= 4)[:, None] & (expected != 30)
    np.testing.assert_array_equal(batch.weights, counts)


def test_series_are_solutions_of_their_equations():
    from scipy.integrate import solve_ivp

    found = chaos.lorenz_series(20, every=2)

    def lorenz(_, p):
        return [10 * (p[1] - p[0]), p[0] * (28 - p[2]) - p[1], p[0] * p[1] - 8 / 3 * p[2]]

    times = np.arange(20) * 0.02
    exact = solve_ivp(lorenz, (0, 1), found[0], t_eval=times, rtol=1e-9, atol=1e-9).y.T
    np.testing.assert_allclose(found, exact, atol=1e-4)

    fine = chaos.mackey_glass_series(4000, every=1)
    now, before = fine[170:-1], fine[:-171]
    slope = (fine[171:] - fine[169:-2]) / 0.2
    expected = 0.2 * before / (1 + before**10) - 0.1 * now
    np.testing.assert_allclose(slope, expected, atol=2e-3)
    assert 0.2 < fine.min() < fine.max() < 1.6


def test_predictions_are_of_later_values():
    batch = tasks.load("Mackey-Glass").held_out("validation")
    np.testing.assert_array_equal(batch.inputs[5:], batch.targets[:-5])


def test_real_series_are_said_by_their_changes():
    values = np.cumsum(np.random.default_rng(0).normal(size=400))
    values[100] = np.nan
    part = series._part(series.Series(values, 12), 1)
    change = np.diff(values)
    own = part.starts["train"]
    scale = np.nanstd(change[11 : own[-1] + series.LENGTH - 1])
    for t in (150, 390):
        assert part.targets[t, 0] * scale == pytest.approx(change[t], abs=0.2)
        assert part.inputs[t, 1] * scale == pytest.approx(change[t - 1], abs=0.2)
        np.testing.assert_array_equal(part.inputs[t, 2:], [0, 1, 0])
    np.testing.assert_array_equal(np.flatnonzero(~part.measured[:-1]), [99, 100])


def test_symbols_of_text():
    found = characters.encoded(b"Ab 7\xff!")
    names = [characters.SYMBOLS[i] if i < len(characters.SYMBOLS) else None for i in found]
    assert names == ["a", "b", " ", "0", None, None]


@pytest.mark.nightly
def test_the_next_character_is_asked_for():
    batch = tasks.load("characters").held_out("validation")
    np.testing.assert_array_equal(batch.inputs.argmax(axis=-1)[1:], batch.targets[:-1])


# --- recordings --------------------------------------------------------------------------


def recorded(lengths, labels, seed):
    random = np.random.default_rng(seed)
    return [random.normal(3, 2, (2, n)) for n in lengths], np.array(labels)


TRAIN = recorded([5, 3, 4, 5, 4, 5, 3], ["b", "b", "b", "a", "a", "a", "a"], 0)
TEST = recorded([7, 2], ["a", "b"], 1)


def test_recordings_are_split_padded_and_scaled():
    found = recordings.split(TRAIN, TEST)
    assert {split: len(own.labels) for split, own in found.items()} == {
        "train": 5,
        "validation": 2,
        "test": 2,
    }
    np.testing.assert_array_equal(found["validation"].labels, [1, 0])  # the third of each
    np.testing.assert_array_equal(found["test"].lengths, [7, 2])
    assert (found["test"].inputs[1, 2:] == 0).all()
    chosen = [TRAIN[0][i] for i in (0, 1, 3, 4, 6)]
    seen = np.concatenate(chosen, axis=1)
    mean, deviation = seen.mean(axis=1), seen.std(axis=1)
    expected = (TEST[0][0].T - mean) / deviation
    np.testing.assert_allclose(found["test"].inputs[0], expected, rtol=1e-5)
    thinned = recordings.split(TRAIN, TEST, every=2)["test"]
    np.testing.assert_allclose(thinned.inputs[0], expected[::2], rtol=1e-5)
    np.testing.assert_array_equal(thinned.lengths, [4, 1])


def test_a_task_of_recordings_counts_their_last_step(monkeypatch):
    datasets = types.ModuleType("aeon.datasets")
    datasets.load_japanese_vowels = lambda split: TRAIN if split == "train" else TEST
    monkeypatch.setitem(sys.modules, "aeon", types.ModuleType("aeon"))
    monkeypatch.setitem(sys.modules, "aeon.datasets", datasets)
    task = recordings.japanese_vowels()
    assert (task.features, task.outputs, task.length, task.chance) == (2, 2, 7, 0.5)
    batch = task.held_out("test")
    np.testing.assert_array_equal(batch.weights.argmax(axis=0), [6, 1])
    np.testing.assert_array_equal(batch.targets[0], [0, 1])


def test_missing_recordings_tell_what_to_install(monkeypatch):
    for name in ("aeon", "aeon.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(braintrace.MissingPackageError, match=r'pip install -e "\.\[evidence\]"'):
        recordings.gun_point()
