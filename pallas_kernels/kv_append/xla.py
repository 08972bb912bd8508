"""The production path on CPU."""

from jaxinfer.pallas_kernels.kv_append.reference import kv_append

__all__ = ["kv_append"]
