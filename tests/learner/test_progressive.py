"""Every sample of a stream is forecast, then validated, then learned."""

import copy
import functools
import itertools

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
import saiunit as u
from drivers import compiled_once

import braintrace

LENGTH, FEATURES = 12, 2
XS = np.random.default_rng(0).normal(size=(LENGTH, FEATURES)).astype(np.float32)
YS = XS.sum(axis=1)
OPTIMIZER = optax.sgd(0.1)


def loss_fn(output, y):
    return ((output - y) ** 2).mean()


def build():
    brainstate.random.seed(0)
    model = braintrace.nn.IndRNN(FEATURES, 1)
    return braintrace.compile(model, "d_rtrl", XS[:1], batch_size=1)


@functools.cache
def learner_and_step():
    """A learner and what is learned by it as if it were new; step functions compile once."""
    begin = compiled_once(build)
    learner = begin()
    return begin, lambda x, y: loss_fn(learner(x), y)


def built():
    """The learner as if it were new; there is one, so that the next call begins anew."""
    return learner_and_step()[0]()


def parameters(learner):
    return learner.functional().state().parameters


def validated(stream, **options):
    learner = built()
    validation = braintrace.ProgressiveValidation(
        learner, stream, loss_fn, optimizer=OPTIMIZER, **options
    )
    return list(validation), validation.metrics, parameters(learner)


@functools.cache
def of_arrays(delay=0):
    return validated((XS, YS), delay=delay)


def learnt_at_once(mask=None):
    learner = built()
    losses = learner.etrace_online(
        XS[:, None],
        YS[:, None, None],
        step_fn=learner_and_step()[1],
        optimizer=OPTIMIZER,
        mask=mask,
    )
    return np.asarray(losses), parameters(learner)


def close(found, expected):
    for path, value in expected.items():
        for name, leaf in (value if isinstance(value, dict) else {"": value}).items():
            other = found[path][name] if name else found[path]
            np.testing.assert_allclose(other, leaf, rtol=1e-5, err_msg=str(path))


STREAMS = {
    "arrays": lambda: (XS, YS),
    "pandas": lambda: (pandas.DataFrame(XS), pandas.Series(YS)),
    "a generator": lambda: ((x[None], y) for x, y in zip(XS, YS, strict=True)),
    "pairs": lambda: list(zip(XS, YS, strict=True)),
}


@pytest.mark.parametrize("kind", ["arrays", "pandas", "a generator"])
def test_metrics_are_the_losses_of_a_stream(kind):
    forecasts, metrics, found = validated(STREAMS[kind]())
    losses, expected = learnt_at_once()
    means = np.cumsum(losses) / np.arange(1, LENGTH + 1)
    np.testing.assert_allclose([f.metrics["loss"] for f in forecasts], means, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], means[-1], rtol=1e-5)
    assert [f.sample for f in forecasts] == [*range(LENGTH)]
    close(found, expected)


def test_missing_and_late_labels():
    labels = [None, *YS[1:4], np.nan, *YS[5:]]
    mask = np.isin(np.arange(LENGTH), [0, 4], invert=True).astype(np.float32)
    stream = zip(XS, labels, strict=True)
    own = {"error": lambda output, y: abs(output - y).max()}
    forecasts, metrics, found = validated(stream, delay=2, metrics=own)
    close(found, learnt_at_once(mask)[1])
    errors = [abs(f.output - f.label).max() for f in forecasts if f.label is not None]
    assert len(errors) == LENGTH - 2
    np.testing.assert_allclose(metrics["error"], np.mean(errors), rtol=1e-5)
    assert np.isnan(forecasts[2].metrics["error"])
    np.testing.assert_allclose(forecasts[3].metrics["error"], errors[0], rtol=1e-5)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_stream_may_use_its_arrays_again(delay):
    x, y = XS[0].copy(), np.zeros((1, 1), np.float32)

    def stream():
        for x[:], y[:] in zip(XS, YS, strict=True):
            yield x, y

    _, metrics, found = validated(stream(), delay=delay)
    _, own, expected = of_arrays(delay)
    np.testing.assert_allclose(metrics["loss"], own["loss"], rtol=1e-5)
    close(found, expected)


def test_a_stream_is_read_one_sample_at_a_time():
    """Forecasts come before their labels are learned, and an endless stream can be left."""
    learner = built()
    endless = itertools.cycle(zip(XS, YS, strict=True))
    validation = iter(
        braintrace.ProgressiveValidation(learner, endless, loss_fn, optimizer=OPTIMIZER)
    )
    start = parameters(learner)
    next(validation)
    close(parameters(learner), start)
    list(itertools.islice(validation, 2 * LENGTH))
    with pytest.raises(AssertionError):
        close(parameters(learner), start)


def test_columns_of_different_dtypes_are_numbers():
    xs = pandas.DataFrame({"count": np.arange(LENGTH) % 3, "is_open": np.arange(LENGTH) > 4})
    found = validated((xs, YS))[1]
    assert found == validated((xs.to_numpy("float32"), YS))[1]
    with pytest.raises(braintrace.DtypeError, match=r"`stream` is a DataFrame.*to_numpy"):
        validated((xs.assign(name="x"), YS))


def test_arrays_are_read_again_by_a_second_pass():
    learner = built()
    validation = braintrace.ProgressiveValidation(
        learner, (XS[:3], YS[:3]), loss_fn, optimizer=OPTIMIZER
    )
    assert len(list(validation)) == len(list(validation)) == 3


def test_the_loss_of_a_pair_is_its_first_part():
    options = {"optimizer": OPTIMIZER, "has_aux": True}
    found = braintrace.ProgressiveValidation(
        built(), (XS, YS), lambda output, y: (loss_fn(output, y), output), **options
    )
    assert [f.metrics for f in found] == [f.metrics for f in of_arrays()[0]]


def test_labels_keep_their_units():
    pairs = [(x, y * u.volt) for x, y in zip(XS, YS / 1000, strict=True)]
    found = braintrace.ProgressiveValidation(
        built(), pairs, lambda output, y: loss_fn(output, y / u.mV), optimizer=OPTIMIZER
    )
    losses = [f.metrics["loss"] for f in found]
    expected = [f.metrics["loss"] for f in of_arrays()[0]]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_labels_of_another_shape_are_left_as_they_are():
    learner = braintrace.compile(braintrace.nn.IndRNN(2, 3), "d_rtrl", XS[:1], batch_size=1)
    labels = [0, 2]
    found = braintrace.ProgressiveValidation(
        learner, list(zip(XS, labels, strict=False)), lambda logits, y: -logits[0, y]
    )
    assert next(iter(found)).label == 0


def test_a_label_of_the_size_of_the_output_takes_the_shape_of_the_output():
    learner = braintrace.compile(braintrace.nn.IndRNN(2, 3), "d_rtrl", XS[:1], batch_size=1)
    label = np.arange(3.0)
    stream = [(XS[0], label)]
    (found,) = braintrace.ProgressiveValidation(learner, stream, loss_fn, optimizer=OPTIMIZER)
    np.testing.assert_array_equal(found.label, label[None], strict=True)


def test_what_is_not_a_pair_or_a_number_is_named():
    with pytest.raises(braintrace.OptionError, match=r"Sample 0 of `stream` is .*a pair of inputs"):
        validated([(XS[0], YS[0], 1)])
    with pytest.raises(braintrace.OptionError, match=r"Metric `both` returned .*expected a number"):
        validated((XS, YS), metrics={"both": lambda output, y: np.ones(2)})


def test_other_streams_are_refused():
    learner = built()
    for stream in (3, "xs", {"x": 1}):
        with pytest.raises(braintrace.OptionError, match="`stream`"):
            braintrace.ProgressiveValidation(learner, stream, loss_fn, optimizer=OPTIMIZER)
    with pytest.raises(braintrace.ShapeError):
        braintrace.ProgressiveValidation(learner, (XS, YS[1:]), loss_fn, optimizer=OPTIMIZER)
    with pytest.raises(braintrace.OptionError, match="`delay`"):
        braintrace.ProgressiveValidation(learner, (XS, YS), loss_fn, delay=-1)


def features():
    return [dict(zip("ab", map(float, x), strict=True)) for x in XS]


@pytest.mark.parametrize("delay", [None, 2])
def test_the_evaluation_of_river(delay):
    """A delay of 2 in river is 1 here: river passes the label before the next forecast."""
    between = delay - 1 if delay else 0
    evaluate = pytest.importorskip("river.evaluate", reason="the extra `river` is not installed")
    metrics = pytest.importorskip("river.metrics")
    learner = built()
    model = braintrace.river_regressor(learner, loss_fn, max_delay=between, optimizer=OPTIMIZER)
    dataset = list(zip(features(), map(float, YS), strict=True))
    found = evaluate.progressive_val_score(dataset, model, metrics.MSE(), delay=delay)
    learnt = parameters(learner)
    _, expected, twin = of_arrays(between)
    np.testing.assert_allclose(found.get(), expected["loss"], rtol=1e-5)
    close(learnt, twin)


def test_calls_of_river_in_another_order():
    pytest.importorskip("river", reason="the extra `river` is not installed")
    first, second = built(), build()
    one, other = (
        braintrace.river_regressor(learner, loss_fn, optimizer=OPTIMIZER)
        for learner in (first, second)
    )
    for x, y in zip(features(), YS, strict=True):
        assert one.predict_one(x) == one.predict_one(x)
        one.learn_one(x, y)
        other.learn_one(x, y)
    close(parameters(first), parameters(second))


def test_late_labels_of_river_need_their_delay():
    pytest.importorskip("river", reason="the extra `river` is not installed")
    model = braintrace.river_regressor(built(), loss_fn, optimizer=OPTIMIZER)
    first, second, *_ = features()
    model.predict_one(first)
    model.predict_one(second)
    with pytest.warns(UserWarning, match="give `max_delay`"):
        model.learn_one(first, 1.0)


@pytest.mark.parametrize("copied", [lambda model: model.clone(), copy.copy, copy.deepcopy])
def test_copies_for_river_would_share_a_learner(copied):
    pytest.importorskip("river", reason="the extra `river` is not installed")
    model = braintrace.river_regressor(built(), loss_fn, optimizer=OPTIMIZER)
    with pytest.raises(braintrace.OptionError, match="would share its learner"):
        copied(model)


def test_a_scaler_of_river_learns_during_the_prediction():
    evaluate = pytest.importorskip("river.evaluate", reason="the extra `river` is not installed")
    compose, metrics, preprocessing = (
        pytest.importorskip(f"river.{name}") for name in ("compose", "metrics", "preprocessing")
    )
    dataset, error = list(zip(features(), map(float, YS), strict=True)), metrics.MSE()
    scaler = preprocessing.StandardScaler
    model = braintrace.river_regressor(built(), loss_fn, optimizer=OPTIMIZER)
    with compose.learn_during_predict():
        evaluate.progressive_val_score(dataset, scaler() | model, error)
    own, rows = scaler(), []
    for x in features():
        own.learn_one(x)
        rows.append(list(own.transform_one(x).values()))
    expected = validated((np.array(rows, np.float32), YS))[1]["loss"]
    np.testing.assert_allclose(error.get(), expected, rtol=1e-4)
    model = scaler() | braintrace.river_regressor(built(), loss_fn, optimizer=OPTIMIZER)
    with pytest.warns(UserWarning, match="learn_during_predict"):
        evaluate.progressive_val_score(dataset[:2], model, error)


def test_features_of_river_stay_the_same():
    pytest.importorskip("river", reason="the extra `river` is not installed")
    model = braintrace.river_regressor(built(), loss_fn, optimizer=OPTIMIZER)
    with pytest.raises(braintrace.ShapeError):
        model.predict_one({"a": 1.0, "b": 2.0, "c": 3.0})
    model.predict_one({"a": 1.0, "b": 2.0})
    with pytest.raises(braintrace.OptionError, match="no features \\['b'\\]"):
        model.predict_one({"a": 1.0})


def test_without_river_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "river.base", None)
    with pytest.raises(braintrace.MissingPackageError, match=r"\[river\]"):
        braintrace.river_regressor(built(), loss_fn)


def test_a_batch_axis_is_added_only_where_it_is_missing():
    learner = built()
    outputs = [
        forecast.output
        for forecast in braintrace.ProgressiveValidation(
            learner, [(jnp.asarray(XS[0]), None), (XS[:1], None)], loss_fn, optimizer=OPTIMIZER
        )
    ]
    assert [output.shape for output in outputs] == [(1, 1), (1, 1)]
