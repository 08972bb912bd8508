"""GPUs by their published limits, as the GpuTargetConfig text from which XLA compiles for a chip that is not attached.

Limits per compute capability: CUDA C++ Programming Guide, "Features and Technical Specifications per Compute
Capability". SM counts, L2, memory, bandwidth and clocks: NVIDIA's architecture whitepapers and datasheets. None of
them decides whether a kernel of ours is accepted, except the compute capability and the shared memory.
"""

from typing import NamedTuple


class GpuChip(NamedTuple):
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    bandwidth: float  # bytes per second
    l2_bytes: int
    clock_ghz: float


class Limits(NamedTuple):
    """Of one compute capability."""

    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # with opt-in
    threads_per_sm: int
    fpus_per_sm: int


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LIMITS = {
    (8, 0): Limits(164 * KIB, 163 * KIB, 2048, 64),
    (8, 9): Limits(100 * KIB, 99 * KIB, 1536, 128),
    (9, 0): Limits(228 * KIB, 227 * KIB, 2048, 128),
    (10, 0): Limits(228 * KIB, 227 * KIB, 2048, 128),
    (12, 0): Limits(100 * KIB, 99 * KIB, 1536, 128),
}
TARGETS = {
    "a100": GpuChip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * GIB, 2.039e12, 40 * MIB, 1.41),
    "l4": GpuChip("NVIDIA L4", (8, 9), 58, 24 * GIB, 300e9, 48 * MIB, 2.04),
    "h100": GpuChip("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, 3.35e12, 50 * MIB, 1.98),
    "h200": GpuChip("NVIDIA H200", (9, 0), 132, 141 * GIB, 4.8e12, 50 * MIB, 1.98),
    "b200": GpuChip("NVIDIA B200", (10, 0), 148, 180 * GIB, 7.672e12, 126 * MIB, 1.965),
    "rtx5090": GpuChip("NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * GIB, 1.792e12, 96 * MIB, 2.41),
}


def config_text(target: GpuChip) -> str:
    """The GpuTargetConfig of a target in protobuf's text form."""
    major, minor = target.compute_capability
    limits = LIMITS[target.compute_capability]
    capability = f"major: {major}"
    if minor:
        capability += f" minor: {minor}"
    if major >= 9:  # sm_90a and its like: WGMMA and tcgen05 are "accelerated features"
        capability += " feature_extension: ACCELERATED_FEATURES"
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {limits.shared_bytes_per_sm}
  threads_per_core_limit: {limits.threads_per_sm}
  core_count: {target.num_sms}
  fpus_per_core: {limits.fpus_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.bandwidth)}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  shared_memory_per_block_optin: {limits.shared_bytes_per_block}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "{target.name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{target.name}"
"""
