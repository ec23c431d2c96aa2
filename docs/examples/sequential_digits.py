"""Train a recurrent network online to read handwritten digits.

Each image of scikit-learn's ``load_digits`` (8 x 8 pixels) is a sequence with one row of pixels per
time step, or one pixel with ``--pixels``. The network answers at the last step. Eligibility traces
are carried forward with the hidden states, so the gradient is ready with the answer. ``--algorithm
bptt`` trains the same network with backpropagation through time.

    python docs/examples/sequential_digits.py
    python docs/examples/sequential_digits.py --model gru --compare

A second start compiles nothing if JAX caches all compiled programs:

    export JAX_COMPILATION_CACHE_DIR=~/.cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
"""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import braintrace

CLASSES = 10
TRAINING_IMAGES = 1437  # four fifths of the data set
LEARNING_RATE = 3e-3
NAMES = {"d_rtrl": "D_RTRL", "es_d_rtrl": "ES_D_RTRL", "bptt": "BPTT"}
OPTIONS = {"d_rtrl": {}, "es_d_rtrl": {"decay_or_rank": 0.9}}


# --- data --------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Image sequences ``(samples, steps, pixels per step)`` and labels ``(samples,)``."""

    train_images: np.ndarray
    test_images: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray


def load_sequences(one_pixel_per_step=False):
    """Load the digits, scaled to [-1, 1]; the held-out fifth is the same for every seed."""
    images, labels = load_digits(return_X_y=True)
    shape = (64, 1) if one_pixel_per_step else (8, 8)
    images = (images / 8 - 1).astype(np.float32).reshape(-1, *shape)
    return Digits(*train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0))


# --- models ------------------------------------------------------------------------------


def fan_in(*shape):
    """Return random weights without callbacks, so that JAX can cache the program."""
    return jax.nn.initializers.lecun_normal()(brainstate.random.split_key(), shape)


class Layer(brainstate.nn.Module):
    """Base of the models: the weights and state of a recurrent layer, and a readout.

    The weights inside ``braintrace.matmul`` learn through eligibility traces. The readout is
    an ordinary matrix product without memory: the gradient of the current step is exact.
    """

    gates = 1
    recurrent_scale = 1.0

    def __init__(self, inputs, hidden, steps):
        super().__init__()
        self.hidden = hidden
        # Time constants up to the length of the sequence, as in a brain area.
        self.leak = jnp.geomspace(1 / steps, 0.5, hidden)
        orthogonal = brainstate.nn.init.Orthogonal(scale=self.recurrent_scale)
        recurrent = [orthogonal((hidden, hidden)) for _ in range(self.gates)]
        self.w_in = brainstate.ParamState(fan_in(inputs, self.gates * hidden))
        self.w_rec = brainstate.ParamState(jnp.concatenate(recurrent, axis=1))
        self.bias = brainstate.ParamState(jnp.zeros(self.gates * hidden))
        self.w_out = brainstate.ParamState(fan_in(hidden, CLASSES))
        self.b_out = brainstate.ParamState(jnp.zeros(CLASSES))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.hidden)))

    def reset_state(self, batch_size):
        for state in self.states(brainstate.HiddenState).values():
            state.value = jnp.zeros((batch_size, self.hidden))

    def currents(self, x, feedback):
        from_input = braintrace.matmul(x, self.w_in.value, self.bias.value)
        return from_input, braintrace.matmul(feedback, self.w_rec.value)

    def readout(self):
        return self.h.value @ self.w_out.value + self.b_out.value


class LeakyRNN(Layer):
    """Leaky tanh neurons."""

    def update(self, x):
        h = self.h.value
        from_input, from_recurrent = self.currents(x, h)
        self.h.value = h + self.leak * (jnp.tanh(from_input + from_recurrent) - h)
        return self.readout()


class GRU(Layer):
    """A gated recurrent unit with the reset gate after the recurrent product."""

    gates = 3

    def update(self, x):
        h = self.h.value
        from_input, from_recurrent = self.currents(x, h)
        reset_in, update_in, new_in = jnp.split(from_input, 3, axis=-1)
        reset_rec, update_rec, new_rec = jnp.split(from_recurrent, 3, axis=-1)
        reset = jax.nn.sigmoid(reset_in + reset_rec)
        update = jax.nn.sigmoid(update_in + update_rec)
        new = jnp.tanh(new_in + reset * new_rec)
        self.h.value = h + update * (new - h)
        return self.readout()


@jax.custom_jvp
def spike(v):
    """Return one at or above the threshold of zero, with a surrogate derivative."""
    return (v >= 0).astype(v.dtype)


@spike.defjvp
def spike_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + jnp.abs(v)) ** 2


class LIF(Layer):
    """Leaky integrate-and-fire neurons; the readout sees their low-pass filtered spikes."""

    # Spikes are binary: at full scale, their feedback dominates the input.
    recurrent_scale = 0.3

    def init_state(self, batch_size):
        super().init_state(batch_size)
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, self.hidden)))

    def update(self, x):
        fired = spike(self.v.value - 1)
        from_input, from_recurrent = self.currents(x, fired)
        decay = 1 - self.leak
        self.v.value = decay * (self.v.value - fired) + from_input + from_recurrent
        self.h.value = decay * self.h.value + spike(self.v.value - 1)
        return self.readout()


MODELS = {"leaky": LeakyRNN, "gru": GRU, "lif": LIF}


# --- gradients ---------------------------------------------------------------------------


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def online_gradients(model, algorithm, batch_size, steps, pixels):
    """Return gradients by eligibility traces, as a function of sequences and labels."""
    example = jnp.zeros((batch_size, pixels))
    learner = braintrace.compile(
        model, algorithm, example, batch_size=batch_size, **OPTIONS[algorithm]
    )
    last_step_only = np.arange(steps) == steps - 1

    def step(x, labels):
        logits = learner(x)
        return cross_entropy(logits, labels), logits

    def gradients(xs, labels):
        learner.reset_state(batch_size)
        every_step = jnp.broadcast_to(labels, (steps, batch_size))
        grads, losses, logits = learner.etrace_grad(
            xs, every_step, step_fn=step, mask=last_step_only, has_aux=True, return_value=True
        )
        return grads, losses[-1], logits[-1]

    return gradients


def bptt_gradients(model, batch_size):
    """Return gradients by backpropagation through time."""
    brainstate.nn.init_all_states(model, batch_size)

    def sequence_loss(xs, labels):
        logits = brainstate.transform.for_loop(model.update, xs)[-1]
        return cross_entropy(logits, labels), logits

    def gradients(xs, labels):
        brainstate.nn.reset_all_states(model, batch_size)
        weights = model.states(brainstate.ParamState)
        return brainstate.transform.grad(sequence_loss, weights, has_aux=True, return_value=True)(
            xs, labels
        )

    return gradients


# --- training ----------------------------------------------------------------------------


def make_train_step(model, gradients, total_steps):
    """One update of the weights: ``(sequences, labels) -> loss, accuracy``, compiled."""
    weights = model.states(brainstate.ParamState)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, total_steps))
    moments = brainstate.State(optimizer.init({path: w.value for path, w in weights.items()}))

    @brainstate.transform.jit
    def train_step(xs, labels):
        grads, loss, logits = gradients(xs, labels)
        changes, moments.value = optimizer.update(grads, moments.value)
        for path, weight in weights.items():
            weight.value = weight.value + changes[path]
        return loss, jnp.mean(logits.argmax(-1) == labels)

    return train_step


def make_accuracy(model):
    """The share of sequences that the model reads correctly, compiled."""

    @brainstate.transform.jit
    def accuracy(xs, labels):
        brainstate.nn.reset_all_states(model, labels.size)
        logits = brainstate.transform.for_loop(model.update, xs)[-1]
        return jnp.mean(logits.argmax(-1) == labels)

    return accuracy


class Curves(NamedTuple):
    """Training loss and test accuracy after every epoch."""

    loss: list
    accuracy: list


def time_first(images):
    return images.swapaxes(0, 1)


def train(algorithm, digits, options):
    """Train a fresh network and return its learning curves."""
    brainstate.random.seed(options.seed)
    shuffle = np.random.default_rng(options.seed).permutation
    samples, steps, pixels = digits.train_images.shape
    model = MODELS[options.model](pixels, options.hidden, steps)
    if algorithm == "bptt":
        gradients = bptt_gradients(model, options.batch_size)
    else:
        gradients = online_gradients(model, algorithm, options.batch_size, steps, pixels)

    batches = samples // options.batch_size
    train_step = make_train_step(model, gradients, options.epochs * batches)
    accuracy = make_accuracy(model)
    curves = Curves([], [])
    with tqdm(total=options.epochs * batches, desc=NAMES[algorithm]) as bar:
        for _ in range(options.epochs):
            losses = []
            order = shuffle(samples)[: batches * options.batch_size]
            for batch in order.reshape(batches, -1):
                images, labels = digits.train_images[batch], digits.train_labels[batch]
                loss, hits = train_step(time_first(images), labels)
                losses.append(float(loss))
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{hits:.3f}", refresh=False)
                bar.update()
            curves.loss.append(np.mean(losses))
            test = accuracy(time_first(digits.test_images), digits.test_labels)
            curves.accuracy.append(float(test))
    return curves


def draw(curves_of, path):
    """Plot the learning curves of one or more algorithms."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for algorithm, curves in curves_of.items():
        epochs = np.arange(1, len(curves.loss) + 1)
        label = f"{NAMES[algorithm]} ({curves.accuracy[-1]:.3f})"
        left.plot(epochs, curves.loss, marker=".", label=NAMES[algorithm])
        right.plot(epochs, curves.accuracy, marker=".", label=label)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


# --- command line ------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Answers a bad option with one line, without the usage text in front."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(low, high=None):
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(text):
        number = int(text) if text.isdecimal() else -1
        if low <= number and (high is None or number <= high):
            return number
        limits = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {text!r}")

    return parse


def picture_path(text):
    """Parse the name of a picture that can be written."""
    path = Path(text)
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(f"expected a picture such as digits.png, got {text!r}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no picture can be written to {text!r}")
    return path


def parse_options(arguments=None):
    """Read the command line; a bad value ends the program with status 2."""
    parser = OneLineParser(
        description="Train a recurrent network online to read handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group().add_argument
    which("--algorithm", choices=list(NAMES), default="d_rtrl", help="how to learn")
    which("--compare", action="store_true", help="learn by all three algorithms")
    add("--model", choices=list(MODELS), default="leaky", help="the recurrent network")
    add("--hidden", type=whole_number(1), default=128, help="number of hidden neurons")
    add("--epochs", type=whole_number(1), default=30, help="passes over the training images")
    batch_size = whole_number(1, TRAINING_IMAGES)
    add("--batch-size", type=batch_size, default=32, help="images per update")
    add("--seed", type=whole_number(0, 2**32 - 1), default=0, help="initial weights and order")
    add("--out", type=picture_path, default="digits.png", help="where the learning curves go")
    add("--pixels", action="store_true", help="show one pixel per time step, not one row")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Run the example."""
    options = parse_options(arguments)
    digits = load_sequences(options.pixels)
    algorithms = list(NAMES) if options.compare else [options.algorithm]
    curves_of = {algorithm: train(algorithm, digits, options) for algorithm in algorithms}
    draw(curves_of, options.out)
    print(f"learning curves: {options.out.resolve()}")
    for algorithm, curves in curves_of.items():
        of = f" of {NAMES[algorithm]}" if options.compare else ""
        print(f"test accuracy{of}: {curves.accuracy[-1]:.3f}")


if __name__ == "__main__":
    main()
