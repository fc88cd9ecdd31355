"""The engine's memory, on the host or a GPU, and the copies between it and the arena's slots."""
