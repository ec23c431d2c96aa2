"""Write the NIR graphs of snnTorch and norse that the tests of `braintrace.nn.from_nir` read.

pip install snntorch==1.0.0 norse==1.1.0 nir==1.0.8 nirtorch==2.6 torch==2.13.0
python tests/data/write_nir.py

Beside them it stores input spikes, and the outputs of both packages.
"""

import pathlib

import nir
import norse.torch
import numpy as np
import snntorch
import torch
from snntorch.export_nir import export_to_nir

HERE = pathlib.Path(__file__).parent
STEPS, BATCH, INPUTS, HIDDEN, OUTPUTS = 30, 2, 6, 8, 4
AT_ONCE = {"reset_mechanism": "zero", "reset_delay": False, "init_hidden": True}


def between(low, high, *size):
    return low + (high - low) * torch.rand(size)


class Recurrent(torch.nn.Module):
    """Leaky neurons, neurons with synapses, and recurrent weights."""

    def __init__(self):
        super().__init__()
        beta, threshold = between(0.7, 0.9, 3, HIDDEN), between(0.3, 0.6, 3, HIDDEN)
        self.fc1 = torch.nn.Linear(INPUTS, HIDDEN)
        self.leaky = snntorch.Leaky(beta[0], threshold=threshold[0], **AT_ONCE)
        self.fc2 = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        alpha = between(0.4, 0.7, HIDDEN)
        self.synaptic = snntorch.Synaptic(alpha, beta[1], threshold=threshold[1], **AT_ONCE)
        self.fc3 = torch.nn.Linear(HIDDEN, HIDDEN)
        self.recurrent = snntorch.RLeaky(
            beta[2], linear_features=HIDDEN, threshold=threshold[2], **AT_ONCE
        )
        for layer in (self.fc1, self.fc2, self.fc3):
            layer.weight.data *= 2

    def forward(self, x):
        x = self.synaptic(self.fc2(self.leaky(self.fc1(x))))
        return self.recurrent(self.fc3(x))


class Convolutional(torch.nn.Module):
    """Strided convolution, leaky neurons, and a readout."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.leaky = snntorch.Leaky(
            between(0.7, 0.9, 3, 3, 4), threshold=between(0.2, 0.4, 3, 3, 4), **AT_ONCE
        )
        self.flatten = torch.nn.Flatten()
        self.fc = torch.nn.Linear(36, OUTPUTS)
        self.out = snntorch.Leaky(
            between(0.7, 0.9, OUTPUTS), threshold=between(0.2, 0.4, OUTPUTS), **AT_ONCE
        )

    def forward(self, x):
        return self.out(self.fc(self.flatten(self.leaky(self.conv(x)))))


def of_snntorch(name, net, xs):
    graph = export_to_nir(net, xs[0, :1], ignore_dims=[0])
    nir.write(HERE / f"{name}.nir", graph)
    for module in net.modules():
        if hasattr(module, "reset_hidden"):
            module.reset_hidden()
    with torch.no_grad():
        return torch.stack([net(x) for x in xs])


def of_norse(name, xs):
    net = norse.torch.SequentialState(
        torch.nn.Linear(INPUTS, HIDDEN),
        norse.torch.LIFBoxCell(
            norse.torch.LIFBoxParameters(
                tau_mem_inv=1 / between(0.005, 0.02, HIDDEN),
                v_th=between(0.05, 0.1, HIDDEN),
                v_leak=torch.zeros(HIDDEN),
            )
        ),
        torch.nn.Linear(HIDDEN, OUTPUTS),
        norse.torch.LIBoxCell(
            norse.torch.LIBoxParameters(
                tau_mem_inv=1 / between(0.005, 0.02, OUTPUTS), v_leak=between(-0.1, 0.1, OUTPUTS)
            )
        ),
    )
    nir.write(HERE / f"{name}.nir", norse.torch.to_nir(net, xs[0, 0]))
    outputs, state = [], None
    with torch.no_grad():
        for x in xs:
            output, state = net(x, state)
            outputs.append(output)
    return torch.stack(outputs)


if __name__ == "__main__":
    torch.manual_seed(0)
    spikes = (torch.rand(STEPS, BATCH, INPUTS) < 0.4).float()
    images = (torch.rand(STEPS, BATCH, 2, 6, 8) < 0.3).float()
    arrays = {"spikes": spikes, "images": images}
    arrays["snntorch_recurrent"] = of_snntorch("snntorch_recurrent", Recurrent(), spikes)
    arrays["snntorch_convolutional"] = of_snntorch(
        "snntorch_convolutional", Convolutional(), images
    )
    arrays["norse"] = of_norse("norse", spikes)
    np.savez_compressed(HERE / "nir_outputs.npz", **{k: v.numpy() for k, v in arrays.items()})
