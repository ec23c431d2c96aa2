"""A sparse net of 100,000 neurons on eight simulated devices equals the net on one device.

`docs/sharding.md` has the bytes of this net. Every neuron has 100 inputs; synapses and their traces
are sharded with their target neurons, in float64, where rounding changes no spike.
"""

import pytest
from sharded_programs import run

DEVICES, DOUBLE = 8, 8
SMALL = 40, 5, 8, 2
LARGE = 100_000, 100, 8, 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "neuron", "sizes"),
    [("d_rtrl", "ALIF", SMALL), ("d_rtrl", "ALIF", LARGE), ("es_d_rtrl", "LIF", LARGE)],
)
def test_a_sparse_net_is_sharded_over_eight_devices(rule, neuron, sizes):
    _, (found,) = run("divided_net_program.py", rule, neuron, *map(str, sizes))
    assert max(found["deviation"].values()) < 1e-9
    stored = {name: sum(found[name]["held"].values()) for name in ("one", "every")}
    if rule == "d_rtrl":
        assert stored["every"] == stored["one"] / DEVICES
    if sizes == LARGE:  # small programs consist of buffers of collectives
        programs = found["every"]["programs"]
        for method, plan in found["plans"].items():
            assert programs[method]["total"] <= 1.2 * plan["total"]
        spikes = DOUBLE * sizes[0] * sizes[3]
        assert programs["etrace_online"].get("bytes a step", 0) <= 2.01 * spikes
    assert found["peak bytes"] < 12 * 2**30
