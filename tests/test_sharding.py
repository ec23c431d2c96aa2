"""A learner that is divided over a mesh gives what one device gives, and stays divided."""

import os
import pathlib
import subprocess
import sys

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
    return dict(map(str.split, run.stdout.splitlines()))


@pytest.mark.core
def test_a_divided_learner_gives_what_one_device_gives():
    """Every driver, divided between two calls; also after resets, saved, and restored elsewhere."""
    deviations = run("sharding_program.py", "day")
    assert len(deviations) == 7
    assert all(float(value) < 2e-6 for value in deviations.values()), deviations


@pytest.mark.nightly
def test_every_divided_learner():
    deviations = run("sharding_program.py", "night")
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
