"""Adapt a trained network online: two factors learn next to each frozen weight (LoRA).

A recurrent network is trained to read the digits of scikit-learn, row by row. Then the offset of
each column of the sensor drifts. A stream of rows follows: low-rank products ``A B``, added to the
frozen weights, get one update for every row with a label. Eligibility traces replace
backpropagation through the image. Without the factors, the network has its original weights. The
baselines are the unchanged network, a trained readout, and training of all weights.

    python docs/examples/lora_adaptation.py           in a minute on two cores, with three seeds
    python docs/examples/lora_adaptation.py --full    three times the images, in two minutes
"""

import argparse
import time
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import braintrace
from braintrace import nn

ROWS, PIXELS, CLASSES, HIDDEN, RANK, BATCH = 8, 8, 10, 64, 4, 32
PRETRAINING, TESTING = 900, 360  # images; the rest is the stream
EPOCHS = 50
DRIFT = np.array([0.0, 0.4, -0.4, -1.3, -0.7, -1.5, 0.1, 2.0], np.float32)  # pixels: -1 to 1
WIDTH = 100  # of the running mean in the plot
BLIND = 4  # rows without a loss


class Images(NamedTuple):
    """Rows ``(images, ROWS, PIXELS)`` and labels."""

    rows: np.ndarray
    labels: np.ndarray


def load(seed):
    """Return images for pretraining, adaptation and test, in random order."""
    pixels, labels = load_digits(return_X_y=True)
    rows = (pixels / 8 - 1).astype(np.float32).reshape(-1, ROWS, PIXELS)
    order = np.random.default_rng(seed).permutation(len(labels))
    parts = np.split(order, [PRETRAINING, len(order) - TESTING])
    return [Images(rows[part], labels[part]) for part in parts]


def drifted(images):
    """Return images with drifted offsets of each column."""
    return Images(images.rows + DRIFT, images.labels)


# --- models ------------------------------------------------------------------------------


class Reader(brainstate.nn.Module):
    """Leaky neurons with time constants up to the length of an image, and a readout."""

    def __init__(self):
        super().__init__()
        leak = jnp.geomspace(1 / ROWS, 0.5, HIDDEN)
        self.cell = nn.LeakyRNN(PIXELS, HIDDEN, alpha=leak, activation="tanh")
        self.readout = nn.Linear(HIDDEN, CLASSES)

    def update(self, row):
        return self.readout(self.cell(row))


def frozen(layer):
    """Freeze a layer: only a ParamState learns."""
    layer.weight = brainstate.LongTermState(layer.weight.value)
    return layer


def with_factors(layer):
    """Freeze a layer, and add two factors whose product starts at zero."""
    inputs, outputs = layer.in_size[-1], layer.out_size[-1]
    zero = brainstate.nn.init.ZeroInit()
    return nn.LoRA(inputs, RANK, outputs, base_module=frozen(layer), lora_b_init=zero)


class Method(NamedTuple):
    """A learning rule with its options, a learning rate, and the trained parameters."""

    rule: str
    options: dict
    rate: float
    learns: str


METHODS = {
    "LoRA, ES_D_RTRL": Method("es_d_rtrl", {"decay_or_rank": 0.8}, 1e-3, "factors"),
    "LoRA, D_RTRL": Method("d_rtrl", {}, 1e-3, "factors"),
    "readout only": Method("immediate", {}, 3e-3, "readout"),
    "everything": Method("d_rtrl", {}, 5e-4, "everything"),
}


def optimizer_of(method):
    """Return an optimizer that averages over many images."""
    adam = optax.adam(method.rate, b1=0.99)
    if method.learns != "readout":
        return adam
    parts = {"readout": adam, "cell": optax.set_to_zero()}
    return optax.multi_transform(parts, lambda parameters: {path: path[0] for path in parameters})


# --- learning ----------------------------------------------------------------------------


def stream(images, batch):
    """Return rows ``(steps, batch, PIXELS)``, labels, first rows, and weights of their losses."""
    count = len(images.labels) // batch
    rows = images.rows[: count * batch].reshape(count, batch, ROWS, PIXELS)
    labels = images.labels[: count * batch].reshape(count, batch)
    row = np.tile(np.arange(ROWS), count)
    over_time = rows.swapaxes(1, 2).reshape(-1, batch, PIXELS), np.repeat(labels, ROWS, axis=0)
    return *over_time, row == 0, (row >= BLIND).astype(np.float32)


def learn(learner, images, optimizer, batch=1, every=1):
    """Train on a stream of images; return which were correct before their label.

    The answer counts after the first row with a label, before its update.
    """
    rows, labels, first, counts = stream(images, batch)

    def step_fn(row, label):
        logits = learner(row)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        return loss, logits.argmax(-1) == label

    _, is_right = learner.etrace_online(
        rows,
        labels,
        step_fn=step_fn,
        optimizer=optimizer,
        every=every,
        mask=counts,
        reset=first,
        has_aux=True,
    )
    return np.asarray(is_right)[BLIND::ROWS]


def pretrained(images, epochs):
    """Train a reader with backpropagation through every image; return its weights."""
    reader = Reader()
    options = {"window": ROWS, "batch_size": BATCH}
    learner = braintrace.compile(reader, "immediate", jnp.zeros((BATCH, PIXELS)), **options)
    optimizer = optax.adam(3e-3)
    for order in epochs:
        shuffled = Images(images.rows[order], images.labels[order])
        learn(learner, shuffled, optimizer, BATCH, every=ROWS)
    return {path: state.value for path, state in reader.states(brainstate.ParamState).items()}


def with_weights(weights):
    reader = Reader()
    for path, state in reader.states(brainstate.ParamState).items():
        state.value = weights[path]
    return reader


def reads(reader, images, row=ROWS - 1):
    """Return which images a reader names correctly after a row, without training."""
    brainstate.nn.init_all_states(reader, len(images.labels))
    logits = brainstate.transform.for_loop(reader.update, images.rows.swapaxes(0, 1))
    return np.asarray(logits[row].argmax(-1) == images.labels)


class Result(NamedTuple):
    """Hits along the stream, shares of hits afterwards, and the cost of training."""

    hits: np.ndarray
    drifted: float
    before: float
    parameters: int
    trace_bytes: int


def adapted(weights, method, seen, test):
    """Train a reader on a stream of drifted images."""
    reader = with_weights(weights)
    if method.learns == "factors":
        reader.cell.W, reader.readout = map(with_factors, (reader.cell.W, reader.readout))
    example = jnp.zeros((1, PIXELS))
    learner = braintrace.compile(reader, method.rule, example, batch_size=1, **method.options)
    learning = reader if method.learns != "readout" else reader.readout
    values = [state.value for state in learning.states(brainstate.ParamState).values()]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(values))
    trace_bytes = sum(row.stored_bytes for row in learner.report().relations)
    hits = learn(learner, drifted(seen), optimizer_of(method))[:, 0]
    after = reads(reader, drifted(test)).mean()
    if method.learns == "factors":  # the sensor is repaired: remove the factors
        reader.cell.W, reader.readout = reader.cell.W.base_module, reader.readout.base_module
    return Result(hits, after, reads(reader, test).mean(), parameters, trace_bytes)


def as_it_is(weights, seen, test):
    reader = with_weights(weights)
    hits = reads(reader, drifted(seen), row=BLIND)
    return Result(hits, reads(reader, drifted(test)).mean(), reads(reader, test).mean(), 0, 0)


def run(seed, epochs, passes):
    """Train a reader, and adapt it by every method."""
    brainstate.random.seed(seed)
    before, seen, test = load(seed)
    shuffle = np.random.default_rng(seed).permutation
    weights = pretrained(before, [shuffle(PRETRAINING) for _ in range(epochs)])
    order = np.concatenate([shuffle(len(seen.labels)) for _ in range(passes)])
    seen = Images(seen.rows[order], seen.labels[order])
    results = {"as it is": as_it_is(weights, seen, test)}
    for name, method in METHODS.items():
        results[name] = adapted(weights, method, seen, test)
    return results


# --- pictures and tables -----------------------------------------------------------------


def smooth(hits):
    return np.convolve(hits, np.ones(WIDTH) / WIDTH, mode="valid")


def draw(runs, path):
    """Plot the share of correct images along the stream, of all seeds by name."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(runs[0]):
        curves = np.array([smooth(results[name].hits) for results in runs])
        images = np.arange(curves.shape[1]) + WIDTH
        axes.plot(images, curves.mean(axis=0), color=f"C{number}", label=name)
        axes.fill_between(images, curves.min(0), curves.max(0), color=f"C{number}", alpha=0.15)
    axes.set(xlabel="images since the drift", ylabel="known after five of eight rows", ylim=(0, 1))
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=90)


def tell(runs):
    """Print the shares of correct test images by name."""
    seeds = "".join(f"  seed {seed}" for seed in range(len(runs)))
    print(f"{'test images':16}{seeds}    mean  repaired  parameters  trace bytes")
    for name in runs[0]:
        of_seeds = [results[name] for results in runs]
        accuracies = [found.drifted for found in of_seeds]
        cells = "".join(f"  {accuracy:6.3f}" for accuracy in (*accuracies, np.mean(accuracies)))
        before = np.mean([found.before for found in of_seeds])
        sizes = f"{of_seeds[0].parameters:11,} {of_seeds[0].trace_bytes:12,}"
        print(f"{name:16}{cells}  {before:8.3f} {sizes}")


def main(arguments=None):
    """Run the example; return the results of every seed by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="show the stream ten times, not three")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of training before")
    parser.add_argument("--seeds", type=int, default=3, help="networks")
    parser.add_argument("--out", default="lora_adaptation.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    passes = 10 if options.full else 3
    runs = [run(seed, options.epochs, passes) for seed in range(options.seeds)]
    tell(runs)
    draw(runs, options.out)
    print(f"{time.perf_counter() - began:.0f} seconds")
    return runs


if __name__ == "__main__":
    main()
