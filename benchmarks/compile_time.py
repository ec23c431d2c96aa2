"""How long does the analysis of a model take, and does it grow with the number of equations?

Stacked leaky layers with element-wise operations between the weight and the state; one layer
has 50 equations or so.

    python benchmarks/compile_time.py
"""

import time

import brainstate
import jax
import jax.numpy as jnp

import braintrace

WIDTH, BATCH = 16, 8


class Layer(brainstate.nn.Module):
    def __init__(self, key):
        super().__init__()
        self.w = brainstate.ParamState(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5)
        self.leak = brainstate.ParamState(jnp.zeros(WIDTH))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, WIDTH)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        for _ in range(20):
            drive = jnp.tanh(1.1 * drive)
        decay = braintrace.element_wise(self.leak.value, jax.nn.sigmoid)
        self.h.value = decay * self.h.value + drive
        return self.h.value


def main():
    print(f"{'layers':>8}{'equations':>11}{'seconds':>9}{'ms per equation':>17}")
    for layers in (1, 2, 5, 10, 20, 50, 100):
        keys = jax.random.split(jax.random.key(0), layers)
        model = brainstate.nn.Sequential(*(Layer(key) for key in keys))
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        start = time.perf_counter()
        graph = braintrace.compile_etrace_graph(model, jnp.ones((BATCH, WIDTH)))
        seconds = time.perf_counter() - start
        equations = len(graph.traced.program.equations)
        print(f"{layers:>8}{equations:>11}{seconds:>9.2f}{1e3 * seconds / equations:>17.2f}")


if __name__ == "__main__":
    main()
