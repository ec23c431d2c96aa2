"""Sizes that no machine holds are refused by name, and plans take no memory for them."""

import re

import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u

import braintrace
from braintrace import _most_memory, nn

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)
MILLION = 10**6


def neurons(size):
    with brainstate.environ.context(dt=1.0 * u.ms):
        return nn.LIF(size)


TOO_LARGE = {
    "MGUCell": (
        lambda: nn.MGUCell(1, 10**9),
        "State 'Wf/weight' would have shape (1000000001, 1000000000) and dtype float32",
    ),
    "other names": (
        lambda: nn.MGUCell(in_size=1, out_size=10**9),
        "`MGUCell`: State 'Wf/weight' would have shape",
    ),
    "Linear": (lambda: nn.Linear(10**18, 10**18), "`Linear`: State 'weight' would have shape"),
    "Conv2d": (
        lambda: nn.Conv2d((9, 9, 3), 10**9, (10**5, 10**5)),
        "`Conv2d`: State 'weight' would have shape",
    ),
    "LoRA": (lambda: nn.LoRA(10**8, 10**6, 10**8), "`LoRA`: State 'weight' would have shape"),
    "more than can be counted": (
        lambda: nn.MGUCell(1, 10**10),
        "`MGUCell`: `__init__` fails for `num_in` = 1, `num_out` = 10000000000",
    ),
    "units": (
        lambda: neurons(10**13).init_state(),
        "`LIF`: State 'V' would have shape (10000000000000,)",
    ),
    "batch": (
        lambda: nn.GRUCell(3, 4).init_state(10**12),
        "`GRUCell`: State 'h' would have shape (1000000000000, 4)",
    ),
    "batch of all": (
        lambda: brainstate.nn.init_all_states(nn.GRUCell(3, 4), batch_size=10**12),
        "`GRUCell`: State 'h' would have shape",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_no_machine_holds_is_refused(name):
    make, message = TOO_LARGE[name]
    with pytest.raises(braintrace.OptionError, match=re.escape(message)):
        make()


@pytest.fixture
def small_machine(monkeypatch):
    """A machine of one megabyte, on which sizes of any kind are looked at."""
    monkeypatch.setattr(_most_memory, "most_bytes", lambda: 2**20)
    monkeypatch.setattr(_most_memory, "HARMLESS", 0)


@pytest.mark.usefixtures("small_machine")
def test_what_fits_is_made_as_it_is_elsewhere():
    brainstate.random.seed(3)
    weight = nn.Linear(300, 800).weight.value["weight"]  # 960,000 bytes
    key = brainstate.random.DEFAULT.value
    with pytest.raises(braintrace.OptionError, match=r"'weight'.*\(300, 900\).*1,080,000 bytes"):
        nn.Linear(300, 900)
    assert brainstate.random.DEFAULT.value is key
    assert weight.shape == (300, 800)
    brainstate.random.seed(3)
    nn.Linear(300, 800)
    assert jnp.array_equal(brainstate.random.DEFAULT.value, key)


@pytest.mark.usefixtures("small_machine")
def test_weights_that_depend_on_numbers_are_made():
    def drawn(shape):
        found = brainstate.random.randn(*shape)
        return found if float(found[0, 0]) < 1e9 else -found

    assert nn.Linear(300, 400, w_init=drawn).weight.value["weight"].shape == (300, 400)


def test_an_unknown_memory_refuses_only_what_cannot_be_counted(tmp_path, monkeypatch):
    assert _most_memory._of_host(tmp_path / "meminfo") is None
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nSwapTotal: 50 kB\n")
    assert _most_memory._of_host(tmp_path / "meminfo") == 150 * 1024
    monkeypatch.setattr(_most_memory, "MEMINFO", tmp_path / "none")
    _most_memory.most_bytes.cache_clear()
    try:
        assert _most_memory.most_bytes() == 2**63 - 1
    finally:
        _most_memory.most_bytes.cache_clear()


RULES = {
    "d_rtrl": {},
    "es_d_rtrl": {"decay_or_rank": 0.9},
    "uoro": {},
    "kf_rtrl": {},
    "snap": {"n": 1},
    "immediate": {},
}
METHODS = ("etrace_grad", "etrace_online", "etrace_evolve", "predict")


@pytest.mark.by_day(
    "d_rtrl-etrace_grad", "es_d_rtrl-etrace_online", "kf_rtrl-predict", "uoro-etrace_grad"
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_a_plan_takes_no_memory_for_a_million_units(rule, method):
    options = {"batch_size": 2, "method": method, "steps": 10, **RULES[rule]}
    found = braintrace.plan(lambda: nn.MGUCell(3, MILLION), rule, X, **options)
    assert found.parameters == 4 * 2 * (MILLION * (MILLION + 3) + MILLION)  # 8 terabytes


def test_a_plan_that_needs_tables_says_so():
    with pytest.raises(braintrace.CompilationError, match=r"Jacobian.*\(1000000, 1000000\)"):
        braintrace.plan(lambda: nn.MGUCell(3, MILLION), "snap", X, batch_size=2, n=2)
    with pytest.raises(braintrace.CompilationError, match=r"elements of hidden state 'h'"):
        braintrace.plan(lambda: nn.IndRNN(3, 10**11), "d_rtrl", X, batch_size=2)
