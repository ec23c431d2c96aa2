"""Train on the devices of several processes, on one machine or on many.

Every process runs this program, reads its samples of each batch, and trains on all samples: the
handwritten digits, row by row, or the stream of `resume.py`. The learner is saved after each part,
so the same command resumes after an interrupt, with any number of processes.

    python docs/examples/processes.py 2 docs/examples/multi_host.py digits --devices 2
    srun --kill-on-bad-exit=1 python docs/examples/multi_host.py digits --cluster
"""

import argparse
import contextlib
import os
import re
import socket
import sys
import threading

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import resume
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import braintrace

SECONDS_WITHOUT_A_SIGN = 20
"""Seconds without a heartbeat after which JAX ends all processes."""


# --- tasks, with the samples of this process ----------------------------------------------------


def own(batch):
    """Return the samples of this process in a batch."""
    return np.array_split(batch, jax.process_count())[jax.process_index()]


class Digits:
    """Digits: a part is an epoch, with an answer and an update for each batch of eight steps.

    Network and loss are from `sequential_digits.py`.
    """

    PARTS, BATCH, HIDDEN = 30, 32, 128

    def __init__(self):
        import sequential_digits  # imports packages that a stream does not need

        self.network, self.loss = sequential_digits.LeakyRNN, sequential_digits.cross_entropy
        self.data = sequential_digits.load_sequences()
        self.steps, self.pixels = self.data.train_images.shape[1:]

    def build(self):
        brainstate.random.seed(0)
        model = self.network(self.pixels, self.HIDDEN, self.steps)
        example = np.zeros((self.BATCH, self.pixels), np.float32)
        return braintrace.compile(model, "d_rtrl", example, batch_size=self.BATCH)

    def part(self, number):
        """Return the inputs of this process in a part, and the options of training."""
        images, labels = self.data.train_images, self.data.train_labels
        order = np.random.default_rng(number).permutation(len(labels))
        batches = order[: len(order) // self.BATCH * self.BATCH].reshape(-1, self.BATCH)
        mine = np.stack([own(batch) for batch in batches])
        xs = images[mine].swapaxes(1, 2).reshape(-1, mine.shape[1], self.pixels)
        step = np.arange(len(xs)) % self.steps
        options = {"every": self.steps, "reset": step == 0, "mask": step == self.steps - 1}
        return (xs, np.repeat(labels[mine], self.steps, axis=0)), options


class Stream:
    """Stream of `resume.py`: a part has a thousand steps, with an update at each."""

    PARTS = 20

    build = staticmethod(resume.build)

    @staticmethod
    def loss(output, target):
        return jnp.mean((output - target) ** 2)

    def part(self, number):
        """Return the inputs of this process in a part, and the options of training."""
        sequences = map(np.asarray, resume.stream(number * resume.PART))
        return [np.stack([own(batch) for batch in over_time]) for over_time in sequences], {}


TASKS = {"digits": Digits, "stream": Stream}


# --- training: the same with one process and with many -------------------------------------------


def together(mesh, samples):
    """Return a global array, time first, from the samples of this process."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    return jax.make_array_from_process_local_data(sharding, samples)


def tell(words):
    """Print in process 0 only."""
    if jax.process_index() == 0:
        print(words, flush=True)


def train(task, folder, parts):
    """Train on the remaining parts; return the learner, and the losses of all parts."""
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    learner, optimizer = task.build(), optax.adam(3e-3)
    braintrace.shard(learner, mesh)

    def step_fn(x, target):
        return task.loss(learner(x), target)

    learner.init_optimizer(optimizer)
    try:
        losses = braintrace.restore(folder, learner)
        tell(f"going on after {len(losses)} parts, which are saved in {folder}")
    except braintrace.NoCheckpointError:
        losses = []
    for number in range(len(losses), parts):
        sequences, options = task.part(number)
        sequences = [together(mesh, samples) for samples in sequences]
        found = learner.etrace_online(*sequences, step_fn=step_fn, optimizer=optimizer, **options)
        losses.append(np.asarray(found)[options.get("mask", slice(None))])
        braintrace.save(folder, learner, extra=losses)
        tell(f"part {number + 1} of {parts}: loss {losses[-1].mean():.4f}")
    return learner, np.concatenate(losses)


# --- command line --------------------------------------------------------------------------------


def connect(options):
    """Connect to the other processes, before any other use of JAX."""
    if options.devices is not None:
        jax.config.update("jax_num_cpu_devices", options.devices)
    patience = {
        "heartbeat_timeout_seconds": SECONDS_WITHOUT_A_SIGN,
        "initialization_timeout": 2 * options.wait,  # the timeout of JAX names no cause
    }
    if options.cluster:
        try:
            with limited(options):
                jax.distributed.initialize(**patience)
        except ValueError as error:
            raise SystemExit(
                f"--cluster: JAX finds no scheduler around this process ({error}). Start it by one "
                "(srun, mpirun), or give --coordinator, --processes and --process."
            ) from error
    elif options.coordinator is not None:
        if options.process == 0:
            check_port(options)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        processes = options.processes, options.process
        with limited(options):
            jax.distributed.initialize(options.coordinator, *processes, **patience)


def host_and_port(options):
    host, _, port = options.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def check_port(options):
    """Raise an error for an occupied port, before JAX fails."""
    _, port = host_and_port(options)
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise SystemExit(
            f"--coordinator {options.coordinator}: process 0 cannot listen at port {port} "
            f"({error}). Give all processes another port."
        ) from error


@contextlib.contextmanager
def limited(options):
    """End this process if the others are not found in time."""

    def give_up():
        print(missing(options), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(options.wait, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def missing(options):
    """Return the missing processes and the fix."""
    if options.cluster:
        return (
            f"--cluster: the processes have not found each other within {options.wait} seconds. "
            "See whether all tasks of the job are running, or give a longer --wait."
        )
    words = (
        f"process {options.process} of {options.processes} has not found all others within "
        f"{options.wait} seconds: "
    )
    try:
        socket.create_connection(host_and_port(options), timeout=2).close()
    except OSError as error:
        return (
            f"{words}nothing listens at {options.coordinator} ({error}). Start process 0, and give "
            "the address of its machine as --coordinator to every process."
        )
    return (
        f"{words}a server answers at {options.coordinator}. If it is process 0, another process is "
        f"missing: start processes 0 to {options.processes - 1} with this --coordinator, each with "
        "its own --process, or give a longer --wait."
    )


def at_least(least):
    """Return a parser of integers with an error message."""

    def whole_number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of {least} or more, got {text!r}"
            )
        return int(text)

    return whole_number


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("task", choices=list(TASKS))
    add("--folder", help="where the learner is saved, for all processes to see")
    add("--parts", type=at_least(1), help="how much is learned")
    add("--devices", type=at_least(1), help="devices that each process makes of its processors")
    add("--cluster", action="store_true", help="ask the scheduler (SLURM, MPI) for the processes")
    add("--coordinator", metavar="ADDRESS:PORT", help="otherwise: where process 0 is found")
    add("--processes", type=at_least(1), help="how many there are")
    add("--process", type=at_least(0), help="which one this is, from 0")
    add("--wait", type=at_least(1), default=300, help="seconds to find the other processes in")
    options = parser.parse_args(arguments)
    if complaint := wrong_connection(options):
        parser.error(complaint)
    return options


def wrong_connection(options):
    """Return the error of the options about other processes, or ``None``."""
    of_one = options.coordinator, options.processes, options.process
    if all(option is None for option in of_one):
        return None
    if options.cluster:
        return "--cluster asks the scheduler for what --coordinator, --processes and --process say"
    if any(option is None for option in of_one):
        return "--coordinator, --processes and --process belong together: give all three or none"
    if (
        not re.fullmatch(r".+:\d+", options.coordinator, re.ASCII)
        or host_and_port(options)[1] >= 2**16
    ):
        return f"--coordinator: expected ADDRESS:PORT, got {options.coordinator!r}"
    if options.process >= options.processes:
        return (
            f"--process: the {options.processes} processes are counted from 0 to "
            f"{options.processes - 1}, got {options.process}"
        )
    return None


def main(arguments=None):
    options = parse_options(arguments)
    connect(options)
    task = TASKS[options.task]()
    return train(task, options.folder or options.task, options.parts or task.PARTS)


if __name__ == "__main__":
    main()
