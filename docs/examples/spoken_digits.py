"""Train a recurrent spiking network on spoken digits: D-RTRL, e-prop, windows and BPTT.

With a folder of the *Spiking Heidelberg Digits* (SHD) or *Spiking Speech Commands* (SSC, Cramer et
al. 2020), the network has the size of the literature: 700 inputs, 512 recurrent ALIF neurons, and
20 or 35 outputs. Without one, a generator writes files of the same format with fewer words: each of
20 classes is a pattern of latencies on 700 channels, with jitter, deletion and noise spikes. Half
of the classes are the others backwards, so the order of spikes matters.

    pip install h5py
    python docs/examples/spoken_digits.py                           # two minutes on two cores
    python docs/examples/spoken_digits.py --delays 10               # inputs with learned delays
    python docs/examples/spoken_digits.py --data FOLDER             # shd_train.h5, shd_test.h5
    python docs/examples/spoken_digits.py --data FOLDER --set ssc   # ssc_train.h5, ssc_test.h5
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import brainstate
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
from matplotlib.figure import Figure

import braintrace
from braintrace import nn

CHANNELS, CLASSES, DURATION = 700, 20, 1.4  # seconds
WINDOW = 20


class Method(NamedTuple):
    """A rule, its window, and whether errors return by a random matrix."""

    rule: str
    window: int | None = None
    has_random_feedback: bool = False


METHODS = {
    "D-RTRL": Method("d_rtrl"),
    "e-prop, random feedback": Method("eprop", has_random_feedback=True),
    f"D-RTRL, windows of {WINDOW}": Method("d_rtrl", WINDOW),
    "BPTT": Method("immediate", -1),  # one window for all steps
}


# --- data --------------------------------------------------------------------------------


def write_words(path, rng, count):
    """Write words as SHD has them: times in seconds and channels of the spikes, and labels."""
    patterns = np.random.default_rng(0)
    phases = patterns.uniform(0, 2 * np.pi, (CLASSES // 2, 3, 1))
    waves = np.arange(1, 4)[:, None] * np.arange(CHANNELS) * 2 * np.pi / CHANNELS
    latency = 0.5 + 0.12 * np.sin(waves + phases).sum(axis=1)  # of a word of one second
    latency = np.concatenate([latency, 1 - latency])
    is_active = patterns.random((CLASSES // 2, CHANNELS)) < 0.4
    is_active = np.concatenate([is_active, is_active])
    labels = rng.integers(CLASSES, size=count)
    with h5py.File(path, "w") as file:
        file["labels"] = labels.astype(np.uint16)
        times = file.create_dataset("spikes/times", count, h5py.vlen_dtype(np.float16))
        units = file.create_dataset("spikes/units", count, h5py.vlen_dtype(np.uint16))
        for word, label in enumerate(labels):
            own = np.flatnonzero(is_active[label] & (rng.random(CHANNELS) > 0.3))
            noise = rng.integers(CHANNELS, size=40)
            at = latency[label][own] * rng.uniform(0.9, 1.2) + rng.normal(0.0, 0.03, own.size)
            at = np.concatenate([at, rng.uniform(0, 1.2, noise.size)]).clip(0, DURATION)
            order = np.argsort(at)
            times[word], units[word] = at[order], np.concatenate([own, noise])[order]


class Words(NamedTuple):
    """Spikes of each word as time bins and channels, and labels ``(words,)``."""

    bins: list
    units: list
    labels: np.ndarray

    def batch(self, words, steps):
        """Return spike counts ``(steps, words, channels)`` and labels."""
        xs = np.zeros((steps, len(words), CHANNELS), np.float32)
        for place, word in enumerate(words):
            np.add.at(xs[:, place], (self.bins[word], self.units[word]), 1.0)
        return xs, self.labels[words]


def read_words(path, steps):
    """Read a file of SHD or SSC; a time bin is the duration divided by the steps."""
    with h5py.File(path) as file:
        times, units, labels = (
            file[name][:] for name in ("spikes/times", "spikes/units", "labels")
        )
    bins = [
        np.minimum(t.astype(np.float32) / DURATION * steps, steps - 1).astype(int) for t in times
    ]
    return Words(bins, [unit.astype(int) for unit in units], labels.astype(int))


# --- the network -------------------------------------------------------------------------


class Network(brainstate.nn.Module):
    """Recurrent neurons with adaptive thresholds and a leaky readout."""

    def __init__(self, hidden, classes, spikes_per_step, has_random_feedback, delays):
        super().__init__()
        draw = np.random.default_rng(0)

        def weights(inputs, scale, delays=0):
            values = draw.normal(0.0, scale, (inputs, hidden)).astype(np.float32) * u.mA
            if delays:  # each channel has a delay that learns, up to this number of steps
                return nn.DelayedLinear(inputs, hidden, delays, values, per_input=True)
            return nn.Linear(inputs, hidden, w_init=values, b_init=None)

        self.input = weights(CHANNELS, 5.0 / spikes_per_step**0.5, delays)
        self.recurrent = weights(hidden, 1.0 / hidden**0.5)
        self.neurons = nn.ALIF(hidden, tau=60.0 * u.ms, tau_a=500.0 * u.ms, beta=0.3 * u.mV)
        self.readout = nn.LeakyRateReadout(hidden, classes, tau=60.0 * u.ms)
        if has_random_feedback:
            self.readout.W = nn.FeedbackLinear(hidden, classes)

    def update(self, x):
        current = self.input(x) + self.recurrent(self.neurons.get_spike())
        return self.readout(self.neurons(current))


# --- learning ----------------------------------------------------------------------------


class Result(NamedTuple):
    """Test accuracy after each epoch, seconds and MB of temporary memory of an update."""

    accuracy: list
    seconds: float
    megabytes: float


def find_delays(weights):
    return {path: path[-1] == "delay" for path in weights}


def train(method, words, options):
    """Train with one update per batch; words that fill no batch are left out."""
    (train_words, test_words), steps, size = words, options.steps, options.batch
    xs, labels = train_words.batch(np.arange(size), steps)
    classes = int(train_words.labels.max()) + 1
    spikes = xs.sum(axis=-1).mean()
    brainstate.random.seed(0)
    sizes = options.hidden, classes, spikes, method.has_random_feedback, options.delays
    network = Network(*sizes)
    window = steps if method.window == -1 else method.window
    with brainstate.environ.context(dt=1000 * DURATION / steps * u.ms):
        learner = braintrace.compile(network, method.rule, xs[0], batch_size=size, seed=0)
        batches = len(train_words.labels) // size
        rates = optax.cosine_decay_schedule(options.rate, batches * options.epochs)
        # Delays are numbers of steps, and learn faster than weights.
        of_delays = optax.chain(optax.adam(rates), optax.scale(10.0))
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.multi_transform({True: of_delays, False: optax.adam(rates)}, find_delays),
        )
        learner.init_optimizer(optimizer)
        pure = learner.functional()

        def step_fn(x, labels):
            logits = learner(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def update(state, xs, labels):
            sequences, online = (xs, jnp.broadcast_to(labels, xs.shape[:2])), {"every": steps}
            online |= {"step_fn": step_fn, "optimizer": optimizer, "window": window}
            state, losses = pure.online(state, *sequences, **online)
            return pure.reset(state), losses.mean()

        def answer(state, xs):
            return pure.predict(state, xs)[1].mean(axis=0).argmax(axis=-1)

        state = pure.reset(pure.state())
        program = jax.jit(update).lower(state, xs, labels).compile()
        answer, rng = jax.jit(answer), np.random.default_rng(1)
        accuracy, seconds = [], []
        for _ in range(options.epochs):
            order = rng.permutation(len(train_words.labels))
            for batch in range(batches):
                xs, labels = train_words.batch(order[batch * size : (batch + 1) * size], steps)
                start = time.perf_counter()
                state, _ = jax.block_until_ready(program(state, xs, labels))
                seconds.append(time.perf_counter() - start)
            hits = []
            for batch in range(len(test_words.labels) // size):
                xs, labels = test_words.batch(np.arange(batch * size, (batch + 1) * size), steps)
                hits.append(np.mean(answer(state, xs) == labels))
            accuracy.append(float(np.mean(hits)))
    memory = program.memory_analysis().temp_size_in_bytes / 1e6
    return Result(accuracy, float(np.median(seconds)), memory)


# --- figure ------------------------------------------------------------------------------


def draw(words, results, options):
    figure = Figure(figsize=(10, 3), layout="constrained")
    raster, curves = figure.subplots(1, 2, width_ratios=[1, 1.4])
    xs, labels = words[0].batch(np.arange(1), options.steps)
    raster.plot(*np.nonzero(xs[:, 0]), "k.", ms=1)
    raster.set(xlabel="step", ylabel="channel", title=f"class {labels[0]}")
    for name, result in results.items():
        curves.plot(np.arange(1, options.epochs + 1), result.accuracy, ".-", label=name)
    curves.set(xlabel="epoch", ylabel="accuracy on new words", ylim=(0, 1))
    curves.legend(frameon=False, fontsize=8)
    figure.savefig(options.out, dpi=100)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with files of SHD or SSC")
    parser.add_argument("--set", choices=["shd", "ssc"], default="shd")
    parser.add_argument("--hidden", type=int, help="neurons: 512 with data, else 64")
    parser.add_argument("--epochs", type=int, help="20 with data, else 10")
    parser.add_argument("--steps", type=int, default=100, help="time bins, a multiple of 20")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, help="learning rate: 0.005 with data, else 0.015")
    parser.add_argument("--words", type=int, default=640, help="words that the generator writes")
    parser.add_argument("--delays", type=int, default=0, help="longest delay of an input, in steps")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", default="spoken_digits.png", help="file of the figure")
    options = parser.parse_args()
    options.hidden = options.hidden or (512 if options.data else 64)
    options.epochs = options.epochs or (20 if options.data else 10)
    options.rate = options.rate or (0.005 if options.data else 0.015)
    return options


def main():
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            rng = np.random.default_rng(2)
            write_words(Path(folder, "shd_train.h5"), rng, options.words)
            write_words(Path(folder, "shd_test.h5"), rng, options.words // 4)
        data = options.data or Path(folder)
        parts = (f"{options.set}_{part}.h5" for part in ("train", "test"))
        words = [read_words(data / name, options.steps) for name in parts]
    print(
        f"{len(words[0].labels)} words, {CHANNELS}-{options.hidden} neurons, {options.steps} steps"
    )
    results = {}
    for name in options.methods:
        results[name] = result = train(METHODS[name], words, options)
        accuracy = f"accuracy {result.accuracy[-1]:.3f} (best {max(result.accuracy):.3f})"
        print(f"{name:24} {accuracy}  {result.seconds:.2f} s  {result.megabytes:6.0f} MB an update")
    draw(words, results, options)


if __name__ == "__main__":
    main()
