"""The environment variables that hilore reads, with what each does: for `hilore --help`, `hilore doctor` and the README."""

from __future__ import annotations

VARIABLES = {
    "HILORE_DEVICE": "where commands run, as --device: cpu or cuda; hilore profile also takes a device model",
    "HILORE_THREADS": "CPU threads of torch, as --threads",
    "HILORE_CACHE": "folder of unpacked weights (default: ~/.cache/hilore)",
}

OF_TESTS = {
    "HILORE_ALL_FAMILIES": "1: the tests also run the model families with scans, and those that are built as others (two minutes more)",
    "HILORE_ALL_KERNELS": "1: the tests also compile every variant of every kernel for GPUs (forty minutes of CPU time)",
}
COMPILER_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""torch's own switches under which no layer can be captured."""
