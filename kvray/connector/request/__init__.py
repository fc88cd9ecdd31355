"""What TensorRT-LLM says of one request: salt, adapter, media, priorities; read, never changed."""
