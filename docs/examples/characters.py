"""Predict the characters of a text stream in one pass: the sources of Python's standard library.

A recurrent network reads four places of the text at once, one character each per step. It predicts
the next characters, observes them, and trains by eligibility traces with an update at every eighth
step. It corrects counts of 5-grams. The baselines are counts alone, with the memory of all its
parameters, traces, optimizer and counts, and truncated backpropagation through time of the same
model in windows of 16 steps.

    python docs/examples/characters.py --folder /tmp/characters
    python docs/examples/characters.py --folder /tmp/characters --full

Half way through, the learner is saved, rebuilt and restored. After an interrupt, the same command
continues from the last checkpoint.

The short form, 30,000 steps with three seeds, takes two and a half minutes on two cores; the full
one, a million steps, eleven minutes.
"""

import argparse
import functools
import sysconfig
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import braintrace

SYMBOLS = 97  # printable ASCII, the end of a line, and everything else
EMBEDDED, HIDDEN, STREAMS = 24, 64, 4
EVERY, WINDOW = 8, 16  # steps per update
RATE = 8e-3  # better than half of it for both methods
ZERO = brainstate.nn.init.ZeroInit()
SHORT, FULL = 30_000, 1_000_000
PARTS = 10
COUNTED, ORDER = 2_000_000, 4
ORDERS = (2, 3, 4, 5)
DISCOUNT, LARGEST = 0.6, 65535
FACTORS = [jnp.uint32(n) for n in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)]


# --- data --------------------------------------------------------------------------------


def load_text(steps, streams=STREAMS):
    """Return symbols ``(steps + 1, streams)``, each stream from another part of the sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if "-packages" not in str(p))
    np.random.default_rng(0).shuffle(paths)
    symbol = np.full(256, SYMBOLS - 1)
    symbol[32:127], symbol[10] = np.arange(95), 95
    parts, found, wanted = [], 0, streams * (steps + 1)
    while found < wanted:
        if not paths:
            raise SystemExit(f"{root} has {found:,} characters of sources, expected {wanted:,}.")
        parts.append(np.frombuffer(paths.pop().read_bytes(), np.uint8))
        found += len(parts[-1])
    text = symbol[np.concatenate(parts)].astype(np.int32)
    return text[:wanted].reshape(streams, -1).T


# --- n-grams -----------------------------------------------------------------------------


class Counts(brainstate.nn.Module):
    """Counts of the symbols after the last ``order`` symbols, in a table of fixed size.

    The table contains counts (16 bits) and a byte that distinguishes n-grams with the same hash. An
    n-gram on an occupied entry decrements its count, and takes the entry at zero. Each order is
    interpolated with the next lower one by absolute discounting,

    .. math:: p_k(c) = (\\max(n_k(c) - d, 0) + d\\, |\\{n_k > 0\\}|\\, p_{k-1}(c)) / \\sum n_k.
    """

    def __init__(self, memory, order):
        super().__init__()
        self.places, self.order = memory // 3, order

    def init_state(self, batch_size):
        history = jnp.full((self.order, batch_size), SYMBOLS, jnp.uint32)
        self.history = brainstate.ShortTermState(history)
        self.counts = brainstate.ShortTermState(jnp.zeros(self.places, jnp.uint16))
        self.checks = brainstate.ShortTermState(jnp.zeros(self.places, jnp.uint8))

    def update(self, symbols):
        """Count the symbols ``(streams,)`` and predict the next ones.

        Returns
        -------
        probabilities, seen
            Predictions of each order ``(streams, order + 1, symbols)``, and the counts of its
            context ``(streams, order + 1)``.
        """
        self.count(symbols)
        _, _, counts = self.found(jnp.arange(SYMBOLS, dtype=jnp.uint32)[:, None])
        n = counts.astype(jnp.float32)
        totals, kinds = n.sum(axis=1), (n > 0).sum(axis=1)
        p, by_order = jnp.full(n.shape[1:], 1 / SYMBOLS), []
        for number, total, some in zip(n, totals, kinds, strict=True):
            kept = jnp.maximum(number - DISCOUNT, 0) + DISCOUNT * some * p
            p = jnp.where(total > 0, kept / jnp.maximum(total, 1), p)
            by_order.append(p)
        return jnp.stack(by_order).transpose(2, 0, 1), totals.T

    def count(self, symbols):
        seen = symbols[None].astype(jnp.uint32)
        place, check, own = (a[:, 0] for a in self.found(seen))
        before = self.counts.value[place]
        after = jnp.where(own > 0, own + (own < LARGEST), jnp.where(before > 0, before - 1, 1))
        free = (before == 0) & (own == 0)
        kept = self.checks.value[place]
        self.counts.value = self.counts.value.at[place].set(after.astype(jnp.uint16))
        self.checks.value = self.checks.value.at[place].set(jnp.where(free, check, kept))
        self.history.value = jnp.concatenate([seen, self.history.value[:-1]])

    def found(self, symbols):
        """Return entries, checks and counts ``(order + 1, symbols, streams)`` after the history."""
        context, number = jnp.zeros(self.history.value.shape[1:], jnp.uint32), []
        for order in range(self.order + 1):
            if order:
                context = (context ^ (self.history.value[order - 1] + order)) * FACTORS[0]
                context ^= context >> 15
            mixed = context + jnp.uint32(7919 * order) + symbols * FACTORS[1]
            mixed = (mixed ^ (mixed >> 16)) * FACTORS[2]
            mixed = (mixed ^ (mixed >> 13)) * FACTORS[3]
            number.append(mixed ^ (mixed >> 16))
        number = jnp.stack(number)
        place, check = ((number >> 8) % self.places).astype(jnp.int32), number.astype(jnp.uint8)
        is_own = self.checks.value[place] == check
        return place, check, jnp.where(is_own, self.counts.value[place], 0)


@functools.partial(jax.jit, static_argnames=("memory", "order"))
def ngram_bits(text, memory, order):
    """Return bits per character ``(T,)`` of counts alone."""
    counts = Counts(memory, order)
    counts.init_state(text.shape[1])
    return brainstate.transform.for_loop(
        lambda seen, following: bits_of(jnp.log(counts(seen)[0][:, -1]), following),
        text[:-1],
        text[1:],
    )


# --- the network -------------------------------------------------------------------------


class Network(brainstate.nn.Module):
    """A gated recurrent network that predicts the next characters."""

    def __init__(self):
        super().__init__()
        self.table = brainstate.nn.Embedding(SYMBOLS, EMBEDDED)
        self.cell = braintrace.nn.GRUCell(EMBEDDED, HIDDEN)
        self.readout = brainstate.nn.Linear(HIDDEN, SYMBOLS, w_init=ZERO)

    def update(self, symbols):
        return self.readout(self.cell(self.table(symbols)))


class Corrector(brainstate.nn.Module):
    """A network that corrects counts by weights of each order."""

    def __init__(self):
        super().__init__()
        self.network, self.counts = Network(), Counts(COUNTED, ORDER)
        highest = jnp.zeros(ORDER + 1).at[-1].set(1.0)
        self.trust = brainstate.nn.Linear(
            HIDDEN + ORDER + 1, ORDER + 1, w_init=ZERO, b_init=highest
        )

    def update(self, symbols):
        correction = self.network(symbols)
        probabilities, seen = self.counts(symbols)
        known = jnp.concatenate([self.network.cell.h.value, jnp.log1p(seen) / 10], axis=1)
        trust = self.trust(known)[..., None]
        return correction + (trust * jnp.log(probabilities)).sum(axis=1)


def bits_of(logits, symbols):
    """Return bits per character, the mean over streams."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, symbols)
    return losses.mean() / np.log(2)


def make_optimizer(every):
    """Return Adam with a learning rate that falls with the root of the steps so far."""
    schedule = lambda updates: RATE / jnp.sqrt(1 + every * updates / 10_000)  # noqa: E731
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def build(make, seed):
    brainstate.random.seed(seed)
    example = jnp.zeros(STREAMS, jnp.int32)
    return braintrace.compile(make(), "d_rtrl", example, batch_size=STREAMS)


def online_bits(make, text, folder, seed, stop=None):
    """Resume from a folder, train to the end of the text or to a step, and save ten times.

    Returns
    -------
    bits, memory
        Bits per character of every step, predicted before the update, and the bytes of the
        learner.
    """
    steps = len(text) - 1
    learner, optimizer = build(make, seed), make_optimizer(EVERY)

    def step_fn(seen, following):
        return bits_of(learner(seen), following)

    learner.init_optimizer(optimizer)
    try:
        bits = braintrace.restore(folder, learner)
    except braintrace.NoCheckpointError:
        bits = np.zeros(0, np.float32)
    for end in steps * np.arange(1, PARTS + 1) // PARTS:
        if len(bits) < end <= (stop or steps):
            part = text[len(bits) : end + 1]
            found = learner.etrace_online(
                part[:-1], part[1:], step_fn=step_fn, optimizer=optimizer, every=EVERY
            )
            bits = np.concatenate([bits, found])
            braintrace.save(folder, learner, extra=bits)
            print(f"{folder.name}: {end:,} steps, {found.mean():.3f} bits", flush=True)
    return bits, memory_of(learner)


def online_bits_in_two_runs(make, text, folder, seed):
    """Stop half way through, and continue with a rebuilt learner."""
    online_bits(make, text, folder, seed, stop=len(text) // 2)
    return online_bits(make, text, folder, seed)


def memory_of(learner):
    """Return the bytes of a learner: parameters, states, traces, optimizer."""
    return sum(array.nbytes for array in jax.tree.leaves(learner.functional().state()))


def bptt_bits(make, text, seed):
    """Return bits per character by backpropagation through windows, with an update after each."""
    brainstate.random.seed(seed)
    model = make()
    brainstate.nn.init_all_states(model, STREAMS)
    weights = model.states(brainstate.ParamState)
    windows = (len(text) - 1) // WINDOW
    optimizer = make_optimizer(WINDOW)
    moments = brainstate.State(optimizer.init({path: w.value for path, w in weights.items()}))

    def window_loss(seen, following):
        losses = jax.vmap(bits_of)(brainstate.transform.for_loop(model.update, seen), following)
        return losses.mean(), losses

    def learn(seen, following):
        gradients = brainstate.transform.grad(window_loss, weights, has_aux=True)
        changes, losses = gradients(seen, following)
        changes, moments.value = optimizer.update(changes, moments.value)
        for path, weight in weights.items():
            weight.value = optax.apply_updates(weight.value, changes[path])
        return losses

    @brainstate.transform.jit
    def learn_all(seen, following):
        return brainstate.transform.for_loop(learn, seen, following)

    used = windows * WINDOW
    cut = (a[:used].reshape(windows, WINDOW, STREAMS) for a in (text[:-1], text[1:]))
    return np.asarray(learn_all(*map(jnp.asarray, cut))).ravel()


# --- results -----------------------------------------------------------------------------


def compare(text, folder, seeds):
    """Return bits per character by name, ``(T,)`` of counts and ``(seeds, T)`` of networks."""

    def learn_online(make):
        places = [folder / f"{make.__name__}_{len(text) - 1}_{seed}" for seed in seeds]
        runs = [online_bits_in_two_runs(make, text, *it) for it in zip(places, seeds, strict=True)]
        rows, memory = zip(*runs, strict=True)
        return np.stack(rows), memory[0]

    alone, less = learn_online(Network)
    corrected, memory = learn_online(Corrector)
    counted = {order: np.asarray(ngram_bits(text, memory, order)) for order in ORDERS}
    return {
        f"network, D_RTRL ({less // 1000} kB)": alone,
        **{f"{order + 1}-grams ({memory // 1000} kB)": bits for order, bits in counted.items()},
        f"counts and network, D_RTRL ({memory // 1000} kB)": corrected,
        f"counts and network, BPTT({WINDOW})": np.stack(
            [bptt_bits(Corrector, text, seed) for seed in seeds]
        ),
    }


def tell(found):
    print(f"{'bits per character':40}{'of all':>8}{'of the last half':>18}")
    for name, rows in found.items():
        for row in np.atleast_2d(rows):
            print(f"{name:40}{row.mean():8.3f}{row[len(row) // 2 :].mean():18.3f}")


def draw(found, path):
    """Plot bits per character along the text."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(found.items()):
        mean = np.atleast_2d(rows).mean(axis=0)
        pieces = mean[: len(mean) // 40 * 40].reshape(40, -1)
        characters = STREAMS * pieces.shape[1] * np.arange(1, 41)
        axes.plot(characters, pieces.mean(axis=1), color=f"C{index}", lw=1.2, label=name)
    axes.set(xlabel="characters read", ylabel="bits per character")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right", fontsize="small")
    figure.savefig(path, dpi=100)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--folder", type=Path, default=Path("characters"), help="where the learners are saved")
    add("--full", action="store_true", help=f"{FULL:,} steps in place of {SHORT:,}")
    add(
        "--seeds",
        type=int,
        help="networks with other initial weights; else 3, or 1 of the full form",
    )
    add("--out", default="characters.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    text = load_text(FULL if options.full else SHORT)
    found = compare(text, options.folder, range(options.seeds or (1 if options.full else 3)))
    tell(found)
    draw(found, options.out)
    return found


if __name__ == "__main__":
    main()
