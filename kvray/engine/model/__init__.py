"""What is known of an engine's model and of its KV cache, whichever engine it is."""
