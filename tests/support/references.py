"""What the oracles say about the catalogue, computed once per test run and always in float64."""

import functools

import jax
import numpy as np
import oracles

LENGTH = 6


def arguments(case, batch=2, length=LENGTH, dtype=np.float64):
    """Parameters, initial states, inputs and targets of a case."""
    xs, targets = case.sequences(batch, length, dtype)
    return case.params(dtype), case.initial_states(batch, dtype), xs, targets


def _in_float64(oracle):
    """oracle(case, ...arrays, **options) -> the same as a function of case, batch and length."""

    @functools.cache
    def reference(case, batch=2, length=LENGTH, **options):
        with jax.enable_x64(True):
            gradients = oracle(case, *arguments(case, batch, length), **options)
            return jax.tree.map(np.asarray, gradients)

    return reference


bptt = _in_float64(oracles.bptt)
dense_d_rtrl = _in_float64(oracles.dense_d_rtrl)
dense_es_d_rtrl = _in_float64(oracles.dense_es_d_rtrl)
dense_ottt = _in_float64(oracles.dense_ottt)
dense_multi_step = _in_float64(oracles.dense_multi_step)
dense_online = _in_float64(oracles.dense_online)
