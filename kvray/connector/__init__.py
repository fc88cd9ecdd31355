"""The KV-cache connector that TensorRT-LLM loads, and the base classes it stands on."""
