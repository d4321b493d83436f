"""Compile the codecs' kernels for GPUs that need not be here, and print as one JSON document what came out.

    python tests/compile_kernels.py cover                       each pair of properties once: a selection
    python tests/compile_kernels.py all --part 1/8              every codec, dtype and target, with and without a tail; in parts, if you like

What is compiled is what the launcher would: `triton.py`'s own compress and decompress run on CPU tensors with a recorder in place of each kernel, which keeps
types, alignments, compile-time arguments and options. Triton's interpreter has to be off, hence a process of its own; no GPU, driver or CUDA is needed.
It does NOT run a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from hilore_cli.codecs import CODECS, get_codec
from hilore_cli.codecs import triton as kernels
from hilore_cli.codecs.formats import GroupedCodec, RowwiseCodec

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
NUMELS = {"even": 4 * kernels.NUMEL, "tail": 2 * kernels.NUMEL + 80, "ragged": 2 * kernels.NUMEL + 83}
"""A whole number of programs; not, but a multiple of 16 as most tensors are; not even that. All of them are whole numbers of programs or not for masks, too."""
KERNELS = ("encode_kernel", "decode_kernel", "pack_kernel", "unpack_kernel")
SEED = 2**40 + 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel as it would be launched."""

    direction: str
    """compress or decompress"""
    codec: str
    dtype: str
    end: str
    target: str

    def properties(self) -> dict[str, Any]:
        """What a covering selection pairs up."""
        codec = get_codec(self.codec)
        own: dict[str, Any] = {"dtype": self.dtype, "end": self.end, "target": self.target}
        if self.direction == "compress":
            own["stochastic"] = codec.stochastic
        if isinstance(codec, GroupedCodec):
            return own | {"kind": (codec.kind, codec.asymmetric), "group": codec.group, "wide": codec.wide}
        return own | {"kind": self.codec.removesuffix("-sr")}


def list_variants(ends: Iterable[str]) -> list[Variant]:
    """All of them; how a codec rounds makes no other decompression."""
    variants = []
    for direction, codec, end, target in product(("compress", "decompress"), CODECS.values(), ends, TARGETS):
        if isinstance(codec, RowwiseCodec) or (direction == "decompress" and codec.stochastic):
            continue
        variants += [Variant(direction=direction, codec=codec.name, dtype=str(dtype).removeprefix("torch."), end=end, target=target) for dtype in codec.dtypes]
    return variants


def cover_pairs(variants: list[Variant]) -> list[Variant]:
    """A subset in which every pair of properties of grouped codecs that occurs anywhere occurs, and every property of each other codec; apart for each direction.

    Greedily the variant that adds most.
    """

    def list_pairs(variant: Variant) -> set[tuple[Any, ...]]:
        properties = variant.properties()
        return {(variant.direction, *pair) for pair in combinations(sorted(properties.items()), 2) if "group" in properties or "kind" in dict(pair)}

    pairs = {variant: list_pairs(variant) for variant in variants}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(variants, key=lambda variant: len(pairs[variant] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


class Recorder:
    """Stands where a kernel stands, and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launches.append((self.kernel, arguments, options))


def record_launch(variant: Variant) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The kernel of a variant, its arguments and its options."""
    codec, dtype, numel = get_codec(variant.codec), getattr(torch, variant.dtype), NUMELS[variant.end]
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    recorders = {name: Recorder(getattr(kernels, name), launches) for name in KERNELS}
    with patch.multiple(kernels, **recorders):
        if variant.direction == "compress":
            kernels.compress(torch.zeros(numel, dtype=dtype), codec, seed=SEED)
        else:
            kernels.decompress(torch.zeros(codec.payload_bytes(numel), dtype=torch.uint8), codec, dtype=dtype, numel=numel)
    [launch] = launches
    return launch


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: GPUTarget) -> Any:
    """As Triton's launcher specialises: 1 is a constant, what 16 divides is known to be so."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | {name: value for name, value in options.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for number, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (value is not None and not isinstance(value, torch.Tensor) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if address % 16 == 0 and not parameter.do_not_specialize:
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options={name: value for name, value in options.items() if name not in kernel.arg_names})


def examine_ttir(ttir: str) -> dict[str, int]:
    """Pointer arithmetic by anything but 64 bits; bytes that a program reads and writes, as if nothing of it were masked; loops, in which they would be more."""
    offsets = re.findall(r"tt\.addptr .*, (?:tensor<[\dx]*x)?(\w+)>?(?: loc.*)?$", ttir, flags=re.MULTILINE)
    return {
        "pointers": len(offsets),
        "narrow_pointers": sum(width != "i64" for width in offsets),
        "read_bytes": moved_bytes(ttir, "load"),
        "written_bytes": moved_bytes(ttir, "store"),
        "loops": len(re.findall(r"\bscf\.(?:for|while)\b", ttir)),
    }


def moved_bytes(ttir: str, verb: str) -> int:
    shapes = re.findall(rf"tt\.{verb} .* : tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>>", ttir)
    return sum(prod(map(int, shape.split("x"))) * int(bits) // 8 for shape, bits in shapes)


def examine_nvidia(compiled: Any, *, instructions: bool) -> dict[str, Any]:
    """From the PTX and, of the cubin, what the wheel's own cuobjdump and nvdisasm say.

    Triton's floor flushes subnormals to zero, which is let pass: stochastically, -0 and a draw that adds nothing is -1 and a draw that adds 1 for certain.
    """
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run_tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        sass = run_tool(triton.knobs.nvidia.nvdisasm.path, "-c", file.name) if instructions else ""
    [figures] = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, shared, local = map(int, figures)
    return {
        "registers": registers,
        "spilled": stack + local,
        "shared_bytes": shared,
        "loads": sorted(set(re.findall(r"\bld\.global[\w.:]*", ptx))),
        "stores": sorted(set(re.findall(r"\bst\.global[\w.:]*", ptx))),
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "flushing": len(re.findall(r"^(?!.*\bcvt\.rmi\.).*\.ftz\b", ptx, flags=re.MULTILINE)),
        "divisions": len(re.findall(r"\bdiv\.rn\.f32\b", ptx)),
        "approximate": len(re.findall(r"\b(?:div|rcp|sqrt|rsqrt|ex2|lg2)\.(?:approx|full)", ptx)),
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S", sass, flags=re.MULTILINE)) if instructions else None,
    }


def examine_amd(compiled: Any, *, instructions: bool) -> dict[str, Any]:
    """From the LLVM IR and the assembly. A correctly rounded division is itself made of five fused operations and a fix-up: those are not counted."""
    llir, text = compiled.asm["llir"], compiled.asm["amdgcn"]
    divisions = len(re.findall(r"\bv_div_fixup_f32", text))

    def figure(name: str) -> int:
        return int(re.search(rf"{name}:?\s+(\d+)", text).group(1))

    return {
        "registers": figure(r"\.vgpr_count"),
        "spilled": figure(r"\.vgpr_spill_count") + figure(r"\.sgpr_spill_count") + figure(r"\.private_segment_fixed_size"),
        "shared_bytes": figure(r"\.group_segment_fixed_size"),
        "loads": sorted(set(re.findall(r"\b(?:global|buffer|flat)_load_\w+", text))),
        "stores": sorted(set(re.findall(r"\b(?:global|buffer|flat)_store_\w+", text))),
        "fused": len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)\w*_f32", text)) - 5 * divisions,
        "flushing": int(figure(r"\.amdhsa_float_denorm_mode_32") != 3),
        "divisions": divisions,
        "approximate": len(re.findall(r"\bfdiv (?:\w+ )*(?:fast|arcp|afn)|\bfdiv .*!fpmath|llvm\.amdgcn\.rcp", llir)),
        "instructions": len(re.findall(r"^\s+[a-z]+_\w+", text, flags=re.MULTILINE)) if instructions else None,
    }


def run_tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_variants(variants: Iterable[Variant], *, instructions: bool) -> Iterator[dict[str, Any]]:
    """One record a variant."""
    for variant in variants:
        started = time.perf_counter()
        kernel, arguments, options = record_launch(variant)
        target = TARGETS[variant.target]
        compiled = compile_launch(kernel, arguments, options, target)
        examine = examine_amd if target.backend == "hip" else examine_nvidia
        found = examine_ttir(compiled.asm["ttir"]) | examine(compiled, instructions=instructions)
        yield asdict(variant) | {"kernel": kernel.fn.__name__} | found | {"seconds": round(time.perf_counter() - started, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cover", "all"))
    parser.add_argument("--part", default="1/1", help="K/N: every Nth variant, from the Kth on")
    parser.add_argument("--instructions", action="store_true", help="count them, too")
    parser.add_argument("--list", action="store_true", help="only say which variants there are")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        sys.exit("TRITON_INTERPRET is set: the interpreter compiles nothing; run without it")
    part, parts = map(int, options.part.split("/"))
    variants = (cover_pairs(list_variants(NUMELS)) if options.what == "cover" else list_variants(("even", "tail")))[part - 1 :: parts]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache))
        records = [asdict(variant) for variant in variants] if options.list else list(compile_variants(variants, instructions=options.instructions))
    print(json.dumps({"triton": triton.__version__, "seconds": round(time.perf_counter() - started, 1), "kernels": records}, indent=1))


if __name__ == "__main__":
    main()
