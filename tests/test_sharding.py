"""A learner that is divided over a mesh gives what one device gives, and stays divided."""

import json
import os
import pathlib
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

TESTS = pathlib.Path(__file__).parent


def run(program, *arguments, flags=()):
    """Return what a program prints that has eight devices: numbers by case."""
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(["--xla_force_host_platform_device_count=8", *flags]),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    command = [sys.executable, str(TESTS / program), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    counts = [json.loads(line) for line in lines if line.startswith("{")]
    return dict(line.split() for line in lines if not line.startswith("{")), counts


@pytest.mark.core
def test_a_divided_learner_gives_what_one_device_gives():
    """Every driver, divided between two calls; also after resets, saved, and restored elsewhere.

    And what it sends; see `check_messages`.
    """
    deviations, counts = run("collectives_program.py", "day")
    assert len(deviations) == 5
    assert all(float(value) < 2e-6 for value in deviations.values()), deviations
    assert len(counts) == 4
    for found in counts:
        check_messages(**found)


@pytest.mark.nightly
def test_what_every_divided_learner_sends():
    _, counts = run("collectives_program.py", "night")
    assert len(counts) > 200
    for found in counts:
        check_messages(**found)


WHOLE = ("by_source",)
"""Models that are not divided along ``model``: entries by their inputs."""
RECURRENT = ("recurrent", "masked", "by_target", "padded", "mixed", "gru")
"""Models whose traces read all units, in arrays of their own: joined to inputs, they are there."""
GATED = ("gru", "lstm")
"""Models with a weight and a bias of several gates, which lie whole, and so do their gradients."""


def check_messages(case, bytes, messages):
    """Nothing is exchanged or permuted, traces stay, and gradients are summed once a sequence."""
    everything = sum((Counter(k) for found in messages.values() for k in found.values()), Counter())
    assert everything["all-to-all"] == everything["collective-permute"] == 0, (case, messages)
    data, model = case["mesh"]
    is_whole = case["model"] in WHOLE
    if case["rule"] == "d_rtrl":
        assert bytes["traces"] == bytes["on a device"] * (data if is_whole else data * model), case
    is_recurrent = case["model"] in RECURRENT and model > 1
    once = Counter({"all-gather": 1 * is_recurrent})  # all units as inputs, of the whole chunk
    if "traces" in messages and case["rule"] == "d_rtrl":
        update = Counter(messages["traces"]["once"]) - Counter(messages["model"]["once"])
        assert update <= once, (case, messages)
        assert messages["traces"]["by step"] == messages["model"]["by step"], (case, messages)
    gradient = messages["gradient"]
    assert "all-reduce" not in gradient["by step"], (case, messages)
    gathered = once["all-gather"] + 2 * (case["model"] in GATED and model > 1)
    assert gradient["once"].get("all-gather", 0) <= gathered, (case, messages)
    # The first factor of a low-rank product meets all outputs, in both kinds of products.
    most = (data > 1) + (model > 1) * (2 if case["model"] == "lora" else 1)
    assert gradient["once"].get("all-reduce", 0) <= most, (case, messages)


@pytest.mark.nightly
def test_every_divided_learner():
    deviations, _ = run("sharding_program.py", "night")
    assert len(deviations) > 1000
    far = {case: value for case, value in deviations.items() if float(value) > 1e-5}
    assert not far


def learner():
    model = braintrace.nn.IndRNN(2, 4)
    return braintrace.compile(model, "d_rtrl", jnp.ones((8, 2)), batch_size=8)


def mesh(*names):
    return jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape([1] * len(names)), names)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (lambda: (learner(), mesh("a", "b")), {}, "`data` is 'data', .* axes 'a', 'b'"),
        (lambda: (learner(), mesh("data")), {"model": "m"}, "`model` is 'm', .* axes 'data'"),
        (lambda: (learner(), mesh("data")), {"model": "data"}, "both 'data'"),
        (lambda: (learner(), "cpu"), {}, "`mesh` is 'cpu'"),
        (lambda: (learner().algorithm, mesh("data")), {}, "`learner` is .*D_RTRL"),
    ],
)
def test_wrong_arguments(arguments, options, words):
    with pytest.raises(braintrace.OptionError, match=words):
        braintrace.shard(*arguments(), **options)


def test_a_learner_that_is_not_compiled():
    algorithm = braintrace.D_RTRL(braintrace.nn.IndRNN(2, 4))
    with pytest.raises(braintrace.NotCompiledError, match="`compile_graph` of its D_RTRL"):
        braintrace.shard(braintrace.Learner(algorithm), mesh("data"))


def test_inside_a_transformation():
    own = learner()
    with pytest.raises(braintrace.OptionError, match="inside a transformation"):
        jax.jit(lambda x: braintrace.shard(own, mesh("data")))(1.0)
