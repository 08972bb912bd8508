"""Which options of `LLM` programs are compiled for, and which the engine does not have yet."""

from typing import Any

# Defaults of LLM; tests/jaxinfer/test_aot.py compares them.
DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "quantize": None,
    "max_model_len": None,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_pages": None,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": None,
    "page_size": "auto",
    "implementation": "auto",
    "matmul_precision": None,
    "decode_steps": 8,
}
# option -> why a value of it is refused
UNBUILT = {
    "tensor_parallel_size": "sharding is not built yet: compile for one device, and leave it out",
    "kv_cache_dtype": "quantized pages are not built yet: pages have the dtype of the model; leave it out",
}
