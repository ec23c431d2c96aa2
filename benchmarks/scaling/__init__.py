r"""How fast online learning is on many devices, by arithmetic: ``python -m benchmarks.scaling``.

A step of `etrace_online` takes a device

.. math:: t = \max(F / f, M / b) + t_{data} + t_{model},

where operations are hidden behind memory and messages behind nothing. :math:`F` operations and
:math:`M` bytes are those of the program that `braintrace.plan` reads for a device of the mesh, and
:math:`f`, :math:`b` the published rates of a device. For an update after every :math:`k` steps

.. math:: M = (A + R) / k + [k > 1] \, (2 P + 2 C / k),

with its arguments :math:`A` (parameters, optimizer, states, traces, inputs) and results :math:`R`,
each moved once an update; within a block, the parameters :math:`P` are read at every step, forwards
and backwards, and what is recorded of the block, :math:`C`, is written and read. It is the least
that can be moved without caches: a compiler that does not fuse moves more, and what fits into a
cache less.

An all-reduce of :math:`S` bytes over :math:`n` devices takes, as a ring,

.. math:: 2 \frac{n - 1}{n} \frac{S}{\beta} + 2 \lceil \log_2 n \rceil \, m \alpha,

an all-gather of which every device then has :math:`S` bytes half of that, with :math:`\beta` the
rate at which a device sends, :math:`m` messages and a latency :math:`\alpha` for each of the
rounds that a tree of devices needs. Devices of one host come first, over their own links; then each
of them adds up or collects its part with those that have its place in the other hosts. Messages and
their bytes are counted in programs that XLA has compiled for eight simulated devices: over ``data``
gradients are added up once an update, over ``model`` units are gathered at every step. Their bytes
are taken for a sum of multiples of those of the activity (of all units, for the samples of a device
and the steps of an update), of those of the parameters with traces, and of those of a readout
without; four sizes of a network give them, and what is left of losses and outputs.
"""
