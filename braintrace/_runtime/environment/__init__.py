"""What a model runs in: attributes and settings that it reads, threads, meshes, memory."""
