"""The tensor API: for people who hold KV tensors instead of an engine."""

from kvray.errors import needs

with needs("engine"):
    from kvray.tensor_cache.cache import TensorCache
    from kvray.tensor_cache.layout import KV, TensorLayout, TensorMetadata

__all__ = ["KV", "TensorCache", "TensorLayout", "TensorMetadata"]
