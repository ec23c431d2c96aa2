"""What surrounds a model: settings, threads, devices."""
