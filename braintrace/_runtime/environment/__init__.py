"""What a model runs in: settings that it reads, threads, meshes, memory of the device."""
