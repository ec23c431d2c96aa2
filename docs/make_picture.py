"""Draw the picture of the README: a network as the compiler sees it, and how it learns.

python docs/make_picture.py    # about a minute; writes docs/_static/learning.png
"""

import pathlib
import sys

import brainstate
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import pyplot

import braintrace

matplotlib.use("agg")
DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS / "examples"))

import sequential_digits as digits  # noqa: E402


def curves():
    """Train the network of the example by each algorithm; return its learning curves."""
    options = digits.parse_options([])
    images = digits.load_sequences()
    return {name: digits.train(name, images, options).accuracy for name in digits.NAMES}


def draw(accuracies, path):
    """Write the compiled network next to its learning curves."""
    brainstate.random.seed(0)
    rows = jnp.zeros((32, 8))
    learner = braintrace.compile(digits.LeakyRNN(8, 128, 8), "d_rtrl", rows, batch_size=32)
    pyplot.rcParams.update({"font.size": 8})
    figure = pyplot.figure(figsize=(10, 3), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=[2.1, 1])
    learner.plot(left)
    for name, accuracy in accuracies.items():
        label = f"{digits.NAMES[name]}: {accuracy[-1]:.3f}"
        right.plot(np.arange(1, len(accuracy) + 1), accuracy, label=label)
    right.set(xlabel="epoch", ylabel="accuracy on new images", ylim=(0.5, 1))
    right.set_title("Handwritten digits, one row per step", fontsize=9)
    right.grid(alpha=0.3)
    right.spines[["top", "right"]].set_visible(False)
    right.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(curves(), DOCS / "_static" / "learning.png")
