"""Rules whose Jacobian couples no elements: parameter traces, and filters of inputs."""
