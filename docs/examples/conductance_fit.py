"""Fit the conductances of a neuron with a dendrite to its voltage, online, with braincell.

A soma and a dendrite have the sodium, potassium and leak channels of Hodgkin and Huxley, as written
with braincell. A hidden copy has other conductances in both compartments; a current into the soma
makes it fire. The model sees the two voltages as a stream of sweeps of 20 ms, by exact RTRL with
one update per sweep. As in the synchronisation of chaotic systems, a weak current pulls the model
to the recording, so that its spikes stay close. Sodium and potassium conductances are found to
6 % or better; the leaks of the two compartments can compensate each other.

    pip install "braincell>=0.2"    # needs Python 3.12
    python docs/examples/conductance_fit.py    # a minute on two cores; writes conductance_fit.png
"""

import argparse

import braincell
import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
from braincell import mech
from braincell.filter import AllRegion, RootLocation
from matplotlib.figure import Figure

import braintrace

DT, STEPS, PULL = 0.05, 400, 0.1
CHANNELS = {"leak": "IL", "sodium": "Na_HH1952", "potassium": "K_HH1952"}
HIDDEN = {"leak": [1.5, 0.6], "sodium": [0.8, 1.3], "potassium": [1.2, 0.7]}


# --- the cell ----------------------------------------------------------------------------


def make_cell():
    soma = braincell.Soma.from_lengths(lengths=[20.0] * u.um, radii=[10.0, 10.0] * u.um)
    dendrite = braincell.Dendrite.from_lengths(lengths=[100.0] * u.um, radii=[1.0, 1.0] * u.um)
    morphology = braincell.Morphology.from_root(soma, name="soma")
    morphology.attach(parent="soma", child_branch=dendrite, child_name="dendrite")
    cell, density = braincell.Cell(morphology), u.siemens / u.cm**2
    membrane = mech.CableProperty(
        resting_potential=-65.0 * u.mV,
        membrane_capacitance=1.0 * u.uF / u.cm**2,
        axial_resistivity=100.0 * u.ohm * u.cm,
    )
    mechanisms = [
        membrane,
        mech.Ion("SodiumFixed", name="na", E=50.0 * u.mV),
        mech.Ion("PotassiumFixed", name="k", E=-77.0 * u.mV),
        mech.Channel("IL", name="leak", g_max=0.0003 * density, E=-54.4 * u.mV),
        mech.Channel("Na_HH1952", name="sodium", g_max=0.12 * density),
        mech.Channel("K_HH1952", name="potassium", g_max=0.036 * density),
    ]
    for mechanism in mechanisms:
        cell.paint(AllRegion(), mechanism)
    current = mech.CurrentClamp(delay=1 * u.ms, durations=50 * u.ms, amplitudes=0.3 * u.nA)
    cell.place(RootLocation(0.5), current)
    cell.init_state()
    for name in CHANNELS:
        factor = braincell.trainable.scale(name=name, group_by="cv")  # one per compartment
        cell.channels[name].trainable(g_max=factor)
    cell.reset_state()
    return cell


class Fit(brainstate.nn.Module):
    """The cell, pulled to a recording by a part of the difference in each step."""

    def __init__(self, pull):
        super().__init__()
        self.cell, self.pull = make_cell(), pull

    def factors(self):
        """Return the factors of the conductances ``(compartments,)`` by channel."""
        return {path[-2]: s for path, s in self.cell.states(brainstate.ParamState).items()}

    def update(self, t, recorded):
        self.cell.trainables.materialize()
        with brainstate.environ.context(t=t, dt=DT * u.ms):
            self.cell.update()
        voltage = self.cell.V.value.to_decimal(u.mV)
        self.cell.V.value = (voltage + self.pull * (recorded - voltage)) * u.mV
        return voltage


# --- learning ----------------------------------------------------------------------------


def record(factors):
    """Return the voltages in mV of a sweep ``(STEPS, 1, compartments)`` of a hidden cell."""
    hidden = Fit(pull=0.0)
    for name, state in hidden.factors().items():
        state.value = jnp.asarray(factors[name], state.value.dtype)
    hidden.cell.reset_state()
    zero = jnp.zeros((STEPS, *hidden.cell.V.value.shape))
    return brainstate.transform.for_loop(hidden, np.arange(STEPS) * DT * u.ms, zero)


def fit(recorded, sweeps, rate):
    """Return the model, the mean squared error of each sweep, and the last voltages."""
    model, times = Fit(PULL), np.tile(np.arange(STEPS) * DT, sweeps) * u.ms
    learner = braintrace.compile(model, "rtrl", times[0], recorded[0])

    def step_fn(t, target):
        voltage = learner(t, target)
        return jnp.mean((voltage - target) ** 2), voltage

    errors, voltages = learner.etrace_online(
        times,
        jnp.tile(recorded, (sweeps, 1, 1)),
        step_fn=step_fn,
        optimizer=optax.adam(rate),
        every=STEPS,
        has_aux=True,
        reset=np.tile(np.arange(STEPS) == 0, sweeps),
    )
    return model, np.asarray(errors).reshape(sweeps, STEPS).mean(axis=1), voltages


# --- figure ------------------------------------------------------------------------------


def draw(recorded, errors, voltages, factors, path):
    figure, time = Figure(figsize=(11, 3), layout="constrained"), np.arange(STEPS) * DT
    before, after, error, bars = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.2])
    for axes, voltage, title in (
        (before, voltages[:STEPS], "first sweep, soma"),
        (after, voltages[-STEPS:], "last sweep, soma"),
    ):
        axes.plot(time, recorded[:, 0, 0], "0.7", lw=3, label="recorded")
        axes.plot(time, voltage[:, 0, 0], lw=1, label="model")
        axes.set(title=title, xlabel="time (ms)", ylabel="mV")
    before.legend(frameon=False, fontsize=8)
    error.semilogy(errors)
    error.set(title="error", xlabel="sweep", ylabel="mV²")
    places = np.arange(len(HIDDEN))[:, None] + np.array([-0.2, 0.2])
    bars.bar(places.ravel(), np.ravel([factors[name] for name in HIDDEN]), 0.3, label="learned")
    bars.plot(places.ravel(), np.ravel(list(HIDDEN.values())), "k_", ms=14, label="hidden")
    bars.set(title="factors, in soma and dendrite")
    bars.set_xticks(range(len(HIDDEN)), HIDDEN)
    bars.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sweeps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--out", default="conductance_fit.png", help="file of the figure")
    options = parser.parse_args()
    recorded = record(HIDDEN)
    model, errors, voltages = fit(recorded, options.sweeps, options.rate)
    factors = {name: np.asarray(state.value) for name, state in model.factors().items()}
    print(f"error {errors[0]:.3g} mV² in the first sweep, {errors[-1]:.3g} in the last")
    for name, hidden in HIDDEN.items():
        print(f"{name:10} learned {np.round(factors[name], 2)}, hidden {np.array(hidden)}")
    draw(np.asarray(recorded), errors, np.asarray(voltages), factors, options.out)


if __name__ == "__main__":
    main()
