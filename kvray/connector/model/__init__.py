"""What the engine says of its model and its KV cache, and the set-ups that are refused."""
