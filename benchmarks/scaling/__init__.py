r"""Model of the time of a step on many devices: ``python -m benchmarks.scaling``.

A step of `etrace_online` takes

.. math:: t = \max(F / f, M / b) + t_{data} + t_{model}.

Compute overlaps with memory traffic; communication overlaps with nothing. :math:`F` operations and
:math:`M` bytes come from the program that `braintrace.plan` reads for a device of the mesh.
:math:`f` and :math:`b` are the published rates of a device. For an update after :math:`k` steps

.. math:: M = (A + R) / k + [k > 1] \, (2 P + 2 C / k).

Arguments :math:`A` (parameters, optimizer, states, traces, inputs) and results :math:`R` move once
per update. Within a block, every step reads the parameters :math:`P` twice, and the residuals
:math:`C` are written and read. The model assumes full fusion and no caches.

A ring all-reduce of :math:`S` bytes over :math:`n` devices takes

.. math:: 2 \frac{n - 1}{n} \frac{S}{\beta} + 2 \lceil \log_2 n \rceil \, m \alpha,

with the send rate :math:`\beta` of a device, :math:`m` messages and a latency :math:`\alpha` per
round of a tree. An all-gather to :math:`S` bytes takes half of that. Devices of one host
communicate first, over their own links, then each with its counterparts in the other hosts.
Messages and bytes are counted in programs that XLA compiles for eight simulated devices, with four
sizes of each network, and fitted by multiples of three sizes: the activity of all units, the
parameters with traces, and the readout.
"""
