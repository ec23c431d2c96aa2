"""Draw the pictures of the pages into docs/_static/pages.

python docs/make_pictures.py              # all, in about three minutes
python docs/make_pictures.py lags step    # some
"""

import base64
import dataclasses
import io
import json
import pathlib
import statistics
import sys

import brainstate
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import patches, pyplot

import braintrace
from braintrace import nn

matplotlib.use("agg")
DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS / "examples"), str(DOCS.parent)]
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 9,
    "legend.frameon": False,
}


# --- drawings -------------------------------------------------------------------------------------


def canvas(width, height):
    figure, ax = pyplot.subplots(figsize=(width, height))
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.axis("off")
    return figure, ax


def box(ax, x, y, text, color="white", width=1.3, height=0.5):
    corner = (x - width / 2, y - height / 2)
    look = {"boxstyle": "round,pad=0,rounding_size=0.08", "fc": color, "ec": "0.3", "lw": 0.8}
    ax.add_patch(patches.FancyBboxPatch(corner, width, height, **look))
    ax.text(x, y, text, ha="center", va="center")


def arrow(ax, start, end, color="0.3", style="-", text="", offset=(0, 0.14)):
    look = {"arrowstyle": "-|>", "color": color, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=look)
    middle = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
    ax.text(*middle, text, color=color, ha="center", va="center", fontsize=8)


def step():
    """One step of a model, with the trace that a learner carries next to the state."""
    figure, ax = canvas(8, 2.9)
    blue, green = "#dbe9f6", "#e2f0d9"
    box(ax, 1, 2.2, "old state $h$", blue)
    box(ax, 1, 0.7, "old trace $E$", green)
    box(ax, 4, 2.2, "update(x)", width=1.6)
    box(ax, 4, 0.7, "$E' = J\\,E + F\\,x$", green, width=1.9)
    box(ax, 7, 2.2, "new state $h'$", blue)
    box(ax, 7, 0.7, "new trace $E'$", green)
    arrow(ax, (1.65, 2.2), (3.2, 2.2))
    arrow(ax, (4.8, 2.2), (6.35, 2.2))
    arrow(ax, (1.65, 0.7), (3.05, 0.7))
    arrow(ax, (4.95, 0.7), (6.35, 0.7))
    arrow(ax, (4, 1.95), (4, 0.95), text="Jacobian $J$,\nlocal part $F$", offset=(0.65, 0))
    arrow(ax, (7, 1.95), (7, 0.95), "C3", text="loss  $\\partial L/\\partial h'$", offset=(0.7, 0))
    arrow(ax, (2.6, 2.75), (3.5, 2.45), text="input x", offset=(-0.65, 0.15))
    ax.text(7, 0.2, "gradient $= \\partial L/\\partial h' \\cdot E'$", color="C3", ha="center")
    ax.text(1, 0.2, "derivative of $h$ by the weights", ha="center", fontsize=8)
    return figure


def names():
    """The eight names of the reference, from a model to its gradients."""
    figure, ax = canvas(8, 2.6)
    blue, green = "#dbe9f6", "#e2f0d9"
    box(ax, 1.1, 1.9, "module of\nbrainstate", width=1.8, height=0.7)
    box(ax, 1.1, 0.7, "step of Flax,\nEquinox, plain JAX", width=1.8, height=0.7)
    box(ax, 4, 1.9, "model", blue, height=0.7)
    box(ax, 6.6, 1.9, "Learner", green, width=2.2, height=0.7)
    arrow(ax, (2.0, 1.9), (3.35, 1.9), text="(mark)")
    arrow(ax, (2.0, 0.7), (3.5, 1.55), text="from_function", offset=(-0.25, 0.3))
    arrow(ax, (4.65, 1.9), (5.5, 1.9), text="compile")
    ax.text(6.6, 2.42, "etrace_grad, etrace_online, predict", ha="center", fontsize=8)
    arrow(ax, (4, 1.55), (4, 0.75), text="compare_rules,\ngradient_check", offset=(0.75, -0.12))
    ax.text(4, 0.55, "tables", ha="center", va="center")
    arrow(ax, (6.3, 1.55), (6.3, 0.95), text="save", offset=(-0.25, 0))
    arrow(ax, (6.9, 0.95), (6.9, 1.55), text="restore", offset=(0.38, 0))
    box(ax, 6.6, 0.7, "folder", width=1.3)
    return figure


def forward():
    """Backpropagation through time, and traces that go forward."""
    figure, ax = canvas(8, 2.9)
    for row, name in ((2.2, "BPTT"), (0.8, "online")):
        ax.text(0.1, row, name, va="center", weight="bold")
        for t in range(5):
            box(ax, 1.6 + 1.45 * t, row, f"$h_{t}$", "#dbe9f6", width=0.7)
            if t:
                arrow(ax, (1.5 + 1.45 * (t - 1) + 0.45, row), (1.25 + 1.45 * t, row))
    for t in range(4, 0, -1):
        arrow(ax, (1.6 + 1.45 * t - 0.2, 1.9), (1.6 + 1.45 * (t - 1) + 0.2, 1.9), "C3")
        arrow(ax, (1.6 + 1.45 * (t - 1) + 0.3, 0.45), (1.6 + 1.45 * t - 0.3, 0.45), "C2")
    for t in range(5):
        ax.text(1.6 + 1.45 * t, 0.4, f"$E_{t}$", color="C2", ha="center", va="center")
    ax.text(4.5, 1.6, "backward, after the last step: stores all", color="C3", ha="center")
    ax.text(4.5, 0.1, "forward, with every step: stores the last", color="C2", ha="center")
    return figure


def resets():
    """Three sequences in one array, by padding and by resets."""
    figure, ax = canvas(8, 2.3)
    colors = {"a": "#dbe9f6", "b": "#e2f0d9", "c": "#fde9d9"}
    ax.text(0.05, 1.85, "padded batch,\nloss weights 0", va="center", fontsize=8)
    for row, (name, length) in enumerate({"a": 5, "b": 3, "c": 2}.items()):
        for t in range(5):
            color, text = (colors[name], name) if t < length else ("0.93", "0")
            box(ax, 1.9 + 0.5 * t, 2.1 - 0.3 * row, text, color, 0.46, 0.26)
    ax.text(0.05, 0.7, "one long stream,\nreset=starts", va="center", fontsize=8)
    for t, name in enumerate("aaaaabbbcc"):
        box(ax, 1.9 + 0.5 * t, 0.7, name, colors[name], 0.46, 0.26)
        if t in (0, 5, 8):
            arrow(ax, (1.67 + 0.5 * t, 0.25), (1.67 + 0.5 * t, 0.55), "C3")
            ax.text(1.67 + 0.5 * t, 0.13, "reset", color="C3", ha="center", fontsize=8)
    return figure


def processes():
    """Samples, states and traces of a batch on the devices of two processes."""
    figure, ax = canvas(6, 3)
    for process in range(2):
        box(ax, 1.5 + 3 * process, 1.5, "", "0.95", 2.8, 2.6)
        ax.text(1.5 + 3 * process, 2.55, f"process {process}", ha="center")
        for device in range(2):
            x, first = 0.85 + 3 * process + 1.3 * device, 16 * (2 * process + device)
            box(ax, x, 1.9, f"samples\n{first} to {first + 15}", "#dbe9f6", 1.2, 0.7)
            box(ax, x, 1.1, "traces", "#e2f0d9", 1.2, 0.4)
    arrow(ax, (1.5, 0.6), (4.5, 0.6), "C3", text="gradients: all-reduce", offset=(0, -0.2))
    arrow(ax, (4.5, 0.6), (1.5, 0.6), "C3")
    return figure


# --- compiled models ------------------------------------------------------------------------------


def compiled(model, inputs, **options):
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((4, inputs)), batch_size=4, **options)
    figure, ax = pyplot.subplots(figsize=(8, 2.6))
    learner.plot(ax)
    return figure


def plot_gru():
    return compiled(nn.GRUCell(3, 5, reset_after=False), 3)


def plot_lstm():
    return compiled(brainstate.nn.Sequential(nn.LSTMCell(3, 8), brainstate.nn.Linear(8, 2)), 3)


# --- measurements ---------------------------------------------------------------------------------


def learning():
    """A network as the compiler sees it, and its learning curves on handwritten digits."""
    import sequential_digits as digits

    options = digits.parse_options([])
    images = digits.load_sequences()
    brainstate.random.seed(0)
    rows = jnp.zeros((32, 8))
    learner = braintrace.compile(digits.LeakyRNN(8, 128, 8), "d_rtrl", rows, batch_size=32)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3), width_ratios=[2.1, 1])
    learner.plot(left)
    for name in digits.NAMES:
        accuracy = digits.train(name, images, options).accuracy
        label = f"{digits.NAMES[name]}: {accuracy[-1]:.3f}"
        right.plot(np.arange(1, len(accuracy) + 1), accuracy, label=label)
    right.set(xlabel="epoch", ylabel="accuracy on new images", ylim=(0.5, 1))
    right.set_title("Handwritten digits, one row per step", fontsize=9)
    right.legend(loc="lower right")
    return figure


def rule_comparison():
    """The comparison of the page *Which rule*."""
    xs = np.random.default_rng(0).normal(size=(64, 8, 3)).astype("float32")
    ys = np.roll(xs[..., :1], 5, axis=0)

    def step_fn(model, step):
        x, y = step
        return jnp.mean((model(x)[:, :1] - y) ** 2)

    model = nn.LeakyRNN(3, 32, alpha=0.05)
    table = braintrace.compare_rules(model, (xs, ys), step_fn=step_fn, batch_size=8, progress=False)
    figure, ax = pyplot.subplots(figsize=(8, 3.2))
    table.plot(ax)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def lags():
    """Cosine of each rule to BPTT over the lag between a cue and the loss."""
    noise, cues, units, steps, batch = 4, 4, 32, 120, 4
    draws = np.random.default_rng(0)
    background = draws.standard_normal((steps, batch, noise))
    cue = draws.standard_normal((batch, cues))
    target = jnp.asarray(draws.standard_normal((batch, 3)), jnp.float32)

    def sequence(lag):
        shown = np.zeros((steps, batch, cues))
        shown[-1 - lag] = cue
        return jnp.asarray(np.concatenate([background, shown], axis=-1), jnp.float32)

    def of_cue(gradients):
        (weight,) = (value for path, value in gradients.items() if "W" in path)
        return np.ravel(weight["weight"][noise : noise + cues])

    def gradient(rule, **options):
        brainstate.random.seed(0)
        cell = nn.LeakyRNN(noise + cues, units, alpha=0.05, activation="tanh")
        model = brainstate.nn.Sequential(cell, nn.Linear(units, 3))
        learner = braintrace.compile(model, rule, sequence(0)[0], batch_size=batch, **options)
        pure, mask = learner.functional(), jnp.zeros(steps).at[-1].set(1.0)

        def step_fn(x):
            return jnp.sum((learner(x) - target) ** 2)

        @jax.jit
        def run(xs):
            return pure.grad(pure.reset(pure.state()), xs, step_fn=step_fn, mask=mask)[1]

        return lambda lag: of_cue(run(sequence(lag)))

    rules = {
        "RTRL, BPTT": ("rtrl", {}, "k-"),
        "D_RTRL, window=20": ("d_rtrl", {"window": 20}, "C0--"),
        "D_RTRL, EProp": ("d_rtrl", {}, "C0-"),
        "ES_D_RTRL": ("es_d_rtrl", {"decay_or_rank": 0.95}, "C2-"),
        "truncated BPTT, 20 steps": ("immediate", {"window": 20}, "C1--"),
        "KF_RTRL, one draw": ("kf_rtrl", {}, "C3-"),
        "UORO, one draw": ("uoro", {}, "C3:"),
    }
    at = [1, 2, 5, 10, 20, 35, 50, 100]
    exact = {}
    figure, ax = pyplot.subplots(figsize=(7, 3))
    for name, (rule, options, look) in rules.items():
        found = gradient(rule, **options)
        cosines = []
        for lag in at:
            vector = found(lag)
            reference = exact.setdefault(lag, vector)
            size = np.linalg.norm(vector) * np.linalg.norm(reference)
            cosines.append(vector @ reference / max(size, 1e-30))
            if lag == 10:  # the page has this number
                error = np.linalg.norm(vector - reference) / np.linalg.norm(reference)
                print(f"{name}: deviation {error:.1f} at a lag of 10 steps")
        ax.plot(at, cosines, look, label=name)
    ax.set(xscale="log", xlabel="lag between cue and loss (steps)", ylabel="cosine to BPTT")
    figure.legend(loc="outside right center")
    return figure


def memory():
    """Temporary memory of gradients over the length of a sequence."""
    batch, inputs, lengths = 16, 32, [64, 128, 256, 512, 1024]
    model = brainstate.nn.Sequential(
        nn.LeakyRNN(inputs, 128, activation="tanh"), brainstate.nn.Linear(128, 10)
    )
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((batch, inputs)), batch_size=batch)
    pure = learner.functional()
    start = pure.state()

    def bptt(parameters, xs):
        state = dataclasses.replace(start, parameters=parameters)
        return jnp.mean((pure.predict(state, xs)[1] - 1) ** 2)

    def online(xs, chunk):
        def step_fn(x):
            return jnp.mean((learner(x) - 1) ** 2)

        return pure.grad(pure.reset(start, like=start), xs, step_fn=step_fn, chunk_size=chunk)

    def mebibytes(function, *arguments):
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    figure, ax = pyplot.subplots(figsize=(7, 2.6))
    xs = [jnp.ones((steps, batch, inputs)) for steps in lengths]
    ax.plot(lengths, [mebibytes(jax.grad(bptt), start.parameters, x) for x in xs], label="BPTT")
    name, chunk = "D_RTRL, chunk_size=16", 16
    ax.plot(lengths, [mebibytes(lambda v: online(v, chunk), x) for x in xs], label=name)
    ax.set(xlabel="steps", ylabel="temporary memory (MiB)", ylim=0)
    ax.legend()
    return figure


def jacobian():
    """The Jacobian of a recurrent layer with two states a neuron, and the part in its traces."""
    size = 6
    rng = np.random.default_rng(0)
    w = 0.4 * rng.normal(size=(size, size))

    def advance(flat, coupled):
        v, a = flat.reshape(size, 2).T
        drive = jnp.tanh((v if coupled else jax.lax.stop_gradient(v)) @ w)
        new = 0.8 * v - 0.3 * a + drive
        return jnp.stack([new, 0.9 * a + 0.1 * new], axis=1).ravel()

    state = jnp.asarray(rng.normal(size=2 * size), jnp.float32)
    full, kept = (jax.jacobian(advance)(state, coupled) for coupled in (True, False))
    figure, axes = pyplot.subplots(1, 3, figsize=(8, 2.7))
    titles = ("full: RTRL", "elementwise: D_RTRL", "truncated by D_RTRL")
    for ax, values, title in zip(axes, (full, kept, full - kept), titles, strict=True):
        ax.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        ax.set(title=title, xticks=[], yticks=[], xlabel="old state")
    axes[0].set_ylabel("new state")
    return figure


def resume():
    """Losses of a run, and of the same run in two parts with a checkpoint between them."""
    import tempfile

    import optax

    xs = np.random.default_rng(0).choice([-1.0, 1.0], (2000, 16, 1)).astype("float32")
    ys = np.roll(xs, 3, axis=0)

    def new_learner():
        brainstate.random.seed(0)
        model = brainstate.nn.Sequential(nn.GRUCell(1, 32), brainstate.nn.Linear(32, 1))
        return braintrace.compile(model, "d_rtrl", xs[0], batch_size=16)

    def train(learner, part):
        return learner.etrace_online(
            xs[part],
            ys[part],
            step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2),
            optimizer=optimizer,
        )

    optimizer = optax.adam(3e-3)
    whole = train(new_learner(), slice(None))
    folder = tempfile.mkdtemp()
    first, second = new_learner(), new_learner()
    parts = [train(first, slice(0, 1000))]
    braintrace.save(folder, first)
    second.init_optimizer(optimizer)
    braintrace.restore(folder, second)
    parts.append(train(second, slice(1000, None)))
    assert np.array_equal(np.concatenate(parts), whole)
    figure, ax = pyplot.subplots(figsize=(7, 2.2))
    for start, losses, name in (
        (0, parts[0], "first process"),
        (1000, parts[1], "second process"),
    ):
        smooth = np.convolve(losses, np.ones(20) / 20, mode="valid")
        ax.plot(start + np.arange(len(smooth)), smooth, label=name)
    ax.axvline(1000, color="0.4", linestyle=":")
    ax.text(1010, 1.1, "save, restore", fontsize=8)
    ax.set(xlabel="step", ylabel="loss")
    ax.legend(loc="upper right")
    return figure


def gains():
    """What each rule learns over its memory, from the stored runs of benchmarks/learning."""
    from benchmarks.learning import formats, rows, runs
    from benchmarks.learning.results import sort

    results = sort(rows.read(rows.FILE))
    core = results.where(lambda run: runs.is_core(*run.key[:2]) and "rmsprop" not in run.key[2])
    families = {
        "bptt": ("immediate", "tbptt-short", "tbptt-long", "bptt"),
        "d_rtrl": ("d_rtrl", "d_rtrl-short", "d_rtrl-long", "bptt"),
        "es_d_rtrl": ("es_d_rtrl", "es_d_rtrl-short", "es_d_rtrl-long", "bptt"),
    }
    needed = {name for names in families.values() for name in names}
    pairs = [pair for pair in core.pairs() if all(core.find(*pair, name) for name in needed)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    for family, methods in families.items():
        memory, gain = [], []
        for method in methods:
            places = [(*pair, method) for pair in pairs]
            costs = [core.relative_cost(*p, "peak_bytes", "trace_bytes") or 0.0 for p in places]
            memory.append(statistics.median(costs))
            gain.append(statistics.median(core.gain(*p) or 0.0 for p in places))
        title, color, marker = formats.METHODS[family]
        label = title.replace("`", "") + (" (truncated)" if family == "bptt" else "")
        left.plot(range(4), gain, color=color, marker=marker, label=label)
        right.plot(memory, gain, marker, color=color)
    left.set(xlabel="window", ylabel=f"relative gain, {len(pairs)} networks")
    left.set_xticks(range(4), ["none", "short", "long", "whole"])
    right.set(xscale="log", xlabel="temporary memory and traces, BPTT is 1")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.legend(loc="lower right")
    return figure


def spoken_digits():
    """The learning curves of the notebook, as it stores them."""
    notebook = json.loads((DOCS / "notebooks" / "spoken_digits.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", ())]
    image = pyplot.imread(io.BytesIO(base64.b64decode(pictures[2])))
    figure = pyplot.figure(figsize=(image.shape[1] / 130, image.shape[0] / 130), layout="none")
    figure.add_axes((0, 0, 1, 1), frameon=False, xticks=[], yticks=[]).imshow(image)
    return figure


# --- examples that print a table ------------------------------------------------------------------


def bars(groups, label):
    """Draw a group of bars for each row of a table."""
    figure, ax = pyplot.subplots(figsize=(6, 3))
    names = list(next(iter(groups.values())))
    for number, (group, values) in enumerate(groups.items()):
        width = 0.8 / len(groups)
        at = np.arange(len(names)) + width * (number - (len(groups) - 1) / 2)
        ax.bar(at, [values[name] for name in names], width, label=group)
    ax.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
    ax.set(ylabel=label)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(groups))
    return figure


def conductances():
    import conductances as example

    names = {"d_rtrl": "D-RTRL", "immediate": "no traces"}
    found = {name: example.train(rule) for rule, name in names.items()}
    parts = ("before training", "after")
    groups = {part: {n: v[i] for n, v in found.items()} for i, part in enumerate(parts)}
    return bars(groups, "correct answers")


def live_stream():
    import live_stream as example

    found = {f"seed {seed}": example.run(seed=seed) for seed in range(3)}
    parts = ("the network", "persistence")
    groups = {part: {n: v[i] for n, v in found.items()} for i, part in enumerate(parts)}
    return bars(groups, "error of a forecast")


def agent_in_flax():
    import agent_in_flax as example

    found = {rule: example.returns("nnx", rule) for rule in ("d_rtrl", "immediate")}
    groups = {
        rule: {f"seed {i}": float(v) for i, v in enumerate(values)}
        for rule, values in found.items()
    }
    return bars(groups, "return, at best 1")


def cells():
    import cells as example

    groups = {
        name: {cell: example.error(make, name, 0) for cell, make in example.CELLS.items()}
        for name in example.STREAMS
    }
    return bars(groups, "error, a constant has 1")


PICTURES = {
    function.__name__: function
    for function in (
        *(step, names, forward, resets, processes, plot_gru, plot_lstm),
        *(learning, rule_comparison, lags, memory, jacobian, resume, gains, spoken_digits),
        *(conductances, live_stream, agent_in_flax, cells),
    )
}


if __name__ == "__main__":
    pyplot.rcParams.update(STYLE)
    for name in sys.argv[1:] or PICTURES:
        brainstate.random.seed(0)
        figure = PICTURES[name]()
        figure = getattr(figure, "figure", figure)
        figure.savefig(DOCS / "_static" / "pages" / f"{name}.png", dpi=130)
        print(name, flush=True)
