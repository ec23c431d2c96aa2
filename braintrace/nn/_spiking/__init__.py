"""Spiking neurons, synapses and their readouts."""
