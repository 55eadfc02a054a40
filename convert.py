"""Checkpoint files: what is in them, reading, sharding, loading, conversion, verification.

Mirrors the vendor's inference/convert.py (Pro release): its command line, `main`, `cast_e2m1fn_to_e4m3fn`,
the files it writes, byte for byte. Deliberate differences:
- It streams: files are mapped, tensors converted and written one at a time. The vendor holds them all.
- It checks first: names, shapes, scales and dtypes against config.json, the number of ranks against each
  dimension, the free disk space. The vendor converts what it finds.
- A file gets its name when it is whole, so a broken run can be started again; whole files of the
  same checkpoint are kept.
- Names are translated component by component. The vendor replaces text anywhere in a name (its mapping).
- The values of FP4 codes are kernel.py's; the vendor has a FP4_TABLE of its own here.
- Shared experts stay whole, as the model has them. The vendor splits them if they are named gate_proj etc.
- The fp4 to fp8 cast refuses a block whose scales are too far apart for it to be lossless.
- wo_a may have dimensions that are no multiples of 128. DSpark draft stages (Flash-0731) are left out.
- config.json and generation_config.json are copied too, so that a converted folder is complete.
- New: `load_weights` (a published folder at any number of ranks, or converted files), --inventory, --verify.

    python convert.py --hf-ckpt-path DIR --save-path OUT --n-experts N --model-parallel N [--expert-dtype fp8]
    python convert.py --hf-ckpt-path DIR --verify OUT
    python convert.py --inventory DIR
"""
from __future__ import annotations

import json
import math
import mmap
import os
import re
import reprlib
import shutil
import struct
import sys
import time
from argparse import ArgumentParser
from typing import IO, TYPE_CHECKING, Callable, Iterator, NamedTuple

# torch and NumPy are imported by the functions that compute: an inventory or a wrong argument needs neither.
if TYPE_CHECKING:
    import numpy as np
    import torch


class CheckpointError(ValueError):
    """A checkpoint, or a request about one, that cannot be used; the message names it and the way out."""


BLOCK = 128         # an FP8 weight has one scale per BLOCK x BLOCK tile
FP4_BLOCK = 32      # an FP4 weight has one scale per row and FP4_BLOCK columns
CHUNK = 1 << 26     # bytes written or compared at a time: what is resident of a tensor that is only copied
PEEK = 1 << 16      # bytes of a tensor by which a restart knows its checkpoint; a norm has fewer
ALIGNED = 64        # bytes; elsewhere MKL's fp32 products, at least of one row, may have other last bits
MAX_HEADER = 100_000_000    # bytes; the safetensors library has the same limit

# Stored dtypes: bytes per element, torch's name. In the order of the safetensors format: wide ones first, so
# that all are aligned. I8 and F4 both hold packed FP4, two values per byte, low nibble first: I8 is what is
# published, F4 what the vendor's conversion makes of it.
DTYPES = {
    "I64": (8, "int64"), "F32": (4, "float32"), "I32": (4, "int32"), "BF16": (2, "bfloat16"),
    "F16": (2, "float16"), "F8_E8M0": (1, "float8_e8m0fnu"), "F8_E4M3": (1, "float8_e4m3fn"),
    "I8": (1, "int8"), "U8": (1, "uint8"), "F4": (1, "float4_e2m1fn_x2"),
}
PACKED = ("I8", "F4")
QUANTISED = ("F8_E4M3", *PACKED)


# ---- What a published checkpoint holds -------------------------------------------------------------------

def parameters(config: dict, mtp: bool = True) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The model's parameters as (name, kind, shape), from the keys of a published config.json.

    Kinds "linear" and "expert" are what a quantised checkpoint quantises, each its way; others are dtypes.
    """
    check_config(config)
    dim, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "embed.weight", "BF16", (vocab, dim)
    for i in range(layers):
        yield from _block(config, f"layers.{i}.", i)
    yield "norm.weight", "BF16", (dim,)
    yield "head.weight", "BF16", (vocab, dim)
    yield from _hc_head(config, "")
    if mtp and not has_dspark(config):
        for i in range(config["num_nextn_predict_layers"]):
            yield from _mtp(config, f"mtp.{i}.", layers + i)


def _mtp(config: dict, prefix: str, layer_id: int):
    dim = config["hidden_size"]
    yield from _block(config, prefix, layer_id)
    yield prefix + "e_proj.weight", "linear", (dim, dim)
    yield prefix + "h_proj.weight", "linear", (dim, dim)
    yield prefix + "enorm.weight", "BF16", (dim,)
    yield prefix + "hnorm.weight", "BF16", (dim,)
    yield prefix + "norm.weight", "BF16", (dim,)
    yield from _hc_head(config, prefix)


def _hc_head(config: dict, prefix: str):
    hc = config["hc_mult"]
    yield prefix + "hc_head_fn", "F32", (hc, hc * config["hidden_size"])
    yield prefix + "hc_head_base", "F32", (hc,)
    yield prefix + "hc_head_scale", "F32", (1,)


def _block(config: dict, prefix: str, layer_id: int):
    dim, hc = config["hidden_size"], config["hc_mult"]
    mix = (2 + hc) * hc     # pre, post and the hc x hc comb
    yield from _attention(config, prefix + "attn.", config["compress_ratios"][layer_id])
    yield from _moe(config, prefix + "ffn.", hashed=layer_id < config["num_hash_layers"])
    for part in ("attn", "ffn"):
        yield f"{prefix}{part}_norm.weight", "BF16", (dim,)
        yield f"{prefix}hc_{part}_fn", "F32", (mix, hc * dim)
        yield f"{prefix}hc_{part}_base", "F32", (mix,)
        yield f"{prefix}hc_{part}_scale", "F32", (3,)


def _attention(config: dict, prefix: str, ratio: int):
    dim, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    yield prefix + "attn_sink", "F32", (heads,)
    yield prefix + "wq_a.weight", "linear", (q_rank, dim)
    yield prefix + "q_norm.weight", "BF16", (q_rank,)
    yield prefix + "wq_b.weight", "linear", (heads * head_dim, q_rank)
    yield prefix + "wkv.weight", "linear", (head_dim, dim)
    yield prefix + "kv_norm.weight", "BF16", (head_dim,)
    yield prefix + "wo_a.weight", "linear", (groups * o_rank, heads * head_dim // groups)
    yield prefix + "wo_b.weight", "linear", (dim, groups * o_rank)
    if ratio:
        yield from _compressor(dim, prefix + "compressor.", ratio, head_dim)
    if ratio == 4:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        yield prefix + "indexer.wq_b.weight", "linear", (index_heads * index_dim, q_rank)
        yield prefix + "indexer.weights_proj.weight", "BF16", (index_heads, dim)
        yield from _compressor(dim, prefix + "indexer.compressor.", ratio, index_dim)


def _compressor(dim: int, prefix: str, ratio: int, head_dim: int):
    width = head_dim * (2 if ratio == 4 else 1)     # groups of ratio 4 overlap: a row has two halves
    yield prefix + "ape", "F32", (ratio, width)
    yield prefix + "wkv.weight", "BF16", (width, dim)
    yield prefix + "wgate.weight", "BF16", (width, dim)
    yield prefix + "norm.weight", "BF16", (head_dim,)


def _moe(config: dict, prefix: str, hashed: bool):
    dim, inter, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield prefix + "gate.weight", "BF16", (experts, dim)
    if hashed:
        yield prefix + "gate.tid2eid", "I64", (config["vocab_size"], config["num_experts_per_tok"])
    else:
        yield prefix + "gate.bias", "F32", (experts,)
    for expert, kind in [(f"experts.{i}", "expert") for i in range(experts)] + [("shared_experts", "linear")]:
        yield f"{prefix}{expert}.w1.weight", kind, (inter, dim)
        yield f"{prefix}{expert}.w2.weight", kind, (dim, inter)
        yield f"{prefix}{expert}.w3.weight", kind, (inter, dim)


def inventory(config: dict, mtp: bool = True) -> dict[str, dict]:
    """{name: {"dtype", "shape"}} of a published checkpoint, from its config.json alone.

    Linears are BF16 without a quantization_config; with one they are FP8, and routed experts what
    expert_dtype says. Without it they are fp4: a Flash config may leave it out, while Base says "fp8" (and
    has F32 expert scales). Only this table assumes: loading and conversion go by the dtypes in the files.
    """
    check_config(config)
    quant = config.get("quantization_config")
    expert_dtype = "fp4" if config.get("expert_dtype") is None else config["expert_dtype"]
    formats = {}
    if quant:
        dense_scale = "F8_E8M0" if quant.get("scale_fmt") == "ue8m0" else "F32"
        formats["linear"] = "F8_E4M3", dense_scale
        formats["expert"] = ("I8", "F8_E8M0") if expert_dtype == "fp4" else ("F8_E4M3", "F32")
    table = {}
    for name, kind, shape in parameters(config, mtp):
        if kind in formats:
            dtype, scale_dtype = formats[kind]
            shape, scale_shape = quantised_shapes(dtype, shape)
            table[scale_of(name)] = {"dtype": scale_dtype, "shape": list(scale_shape)}
        else:
            dtype = "BF16" if kind in ("linear", "expert") else kind
        table[name] = {"dtype": dtype, "shape": list(shape)}
    return table


def quantised_shapes(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Stored shapes of a quantised [out, in] weight and its scale; a last, smaller block has a scale too."""
    rows, cols = shape
    if dtype in PACKED:
        return (rows, -(-cols // 2)), (rows, -(-cols // FP4_BLOCK))
    return (rows, cols), (-(-rows // BLOCK), -(-cols // BLOCK))


def scale_of(name: str) -> str:
    """Where the scale of a weight is, if it has one."""
    return name.removesuffix("weight") + "scale"


def weight_of(name: str) -> str:
    """The weight that a scale belongs to; any other tensor is its own."""
    return name.removesuffix("scale") + "weight" if name.endswith(".scale") else name


# ---- config.json -----------------------------------------------------------------------------------------

CONFIG_KEYS = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim", "q_lora_rank",
    "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "num_hash_layers",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "num_nextn_predict_layers", "compress_ratios",
)
MAY_BE_0 = ("num_hash_layers", "num_nextn_predict_layers")
DSPARK_STAGES = 3       # draft stages of Flash-0731, after its layers
PARALLEL_KEYS = ("n_routed_experts", "num_attention_heads", "o_groups", "vocab_size", "index_n_heads")


def read_config(folder: str, required: bool = True) -> dict:
    """The folder's config.json ({} where there is none and none is required), unless of a foreign model."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder: give the folder that holds the checkpoint")
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        if required:
            raise CheckpointError(f"{folder} has no config.json: copy it from the published checkpoint")
        return {}
    config = _read_json(path)
    refuse_foreign(config)
    check_types(config)
    return config


def _read_json(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: download it again")
    return value


def refuse_foreign(config: dict) -> None:
    """Names the relatives that would load wrongly or not at all."""
    # as text, since nothing is known yet about the types of these values
    if "DeepseekV41ForCausalLM" in _text(config.get("architectures")) or "text_config" in config:
        raise CheckpointError("this checkpoint is DeepSeek-V4.1 (DeepseekV41ForCausalLM), another "
                              "architecture: use a DeepSeek-V4 checkpoint")
    model_type = config.get("model_type", "deepseek_v4")
    if model_type != "deepseek_v4":
        raise CheckpointError(f"config.json says model_type {reprlib.repr(model_type)}: use a deepseek_v4 "
                              "checkpoint")
    if "nvfp4" in _text(config.get("quantization_config")).lower():
        raise CheckpointError(NVFP4)


def _text(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:      # nested almost too deeply to be read; check_types shows it shortened
        return ""


NVFP4 = ("this checkpoint is NVFP4 (experts in FP4 with an FP8 scale per 16 and a global one), which is not "
         "supported: use the one that DeepSeek published")


def check_types(config: dict) -> None:
    """Refuses values of a wrong type, of those keys that this file uses and the config has."""
    def refuse(key: str, value: object, wish: str):
        raise CheckpointError(f"config.json says {key} {reprlib.repr(value)}: it must be {wish}")

    for key in CONFIG_KEYS:
        least = 0 if key in MAY_BE_0 else 1
        if key in config and key != "compress_ratios" and not _is_int(config[key], least):
            refuse(key, config[key], f"a whole number, {least} or more")
    ratios = config.get("compress_ratios", [])
    if not isinstance(ratios, list) or not all(_is_int(ratio) for ratio in ratios):
        refuse("compress_ratios", ratios, "a list of whole numbers, 0 or more")
    names = [] if config.get("architectures") is None else config["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("architectures", names, "a list of names")
    quant = {} if config.get("quantization_config") is None else config["quantization_config"]
    if not isinstance(quant, dict):
        refuse("quantization_config", quant, "an object, or left out")
    if quant.get("scale_fmt") not in (None, "ue8m0"):
        refuse("scale_fmt", quant["scale_fmt"], "'ue8m0' or null")
    if config.get("expert_dtype") not in (None, "fp4", "fp8"):
        refuse("expert_dtype", config["expert_dtype"], "'fp4' or 'fp8'")


def _is_int(value: object, least: int = 0, end: int = 1 << 31) -> bool:
    return type(value) is int and least <= value < end      # True is an instance of int, but its type is bool


def check_config(config: dict) -> None:
    """Refuses a config that the inventory cannot be read from."""
    check_types(config)
    missing = [key for key in CONFIG_KEYS if key not in config]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}: it must be the published config.json "
                              "(the vendor's inference/config.json has other keys)")
    layers, ratios = config["num_hidden_layers"], len(config["compress_ratios"])
    drafts = DSPARK_STAGES if has_dspark(config) else config["num_nextn_predict_layers"]
    if ratios != layers + drafts:
        raise CheckpointError(f"config.json has {ratios} compress_ratios, but {layers} layers and {drafts} "
                              f"more need {layers + drafts}: take it from the published checkpoint")
    if config["n_shared_experts"] != 1:
        raise CheckpointError(f"config.json says n_shared_experts {config['n_shared_experts']}: it must be 1")


def has_dspark(config: dict) -> bool:
    """Whether mtp.* are DSpark draft stages (Flash-0731) and not MTP blocks."""
    return any(key.startswith("dspark_") for key in config)


def check_parallel(config: dict, mp: int) -> None:
    """Refuses a number of ranks that does not divide everything that they share."""
    sizes = {key: config[key] for key in PARALLEL_KEYS if key in config}
    odd = [f"{key} {size}" for key, size in sizes.items() if mp < 1 or size % mp]
    if odd:
        largest = math.gcd(*sizes.values())
        fits = ", ".join(str(n) for n in range(1, largest + 1) if largest % n == 0)
        raise CheckpointError(f"model parallel {mp} does not divide {', '.join(odd)}: choose one of {fits}")


# ---- Files -----------------------------------------------------------------------------------------------

class MappedFile:
    """A safetensors file, mapped: a page is read when it is first touched, a write stays in this process."""

    # Linux counts a private mapping as memory to come, and refuses files larger than the machine's unless it
    # is told not to reserve any. Python names that flag from 3.13 on.
    FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

    def __init__(self, path: str):
        self.path, self.header = path, read_header(path)
        with open(path, "rb") as f:
            self.map = mmap.mmap(f.fileno(), 0, flags=self.FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def forget(self) -> None:
        """Lets go of the pages read so far, to bound the memory of reading on; a touch reads them again."""
        self.map.madvise(mmap.MADV_DONTNEED)


class Stored(NamedTuple):
    """Where a tensor lies. `shape` is in stored elements, `cut` a rank's share: dimension, first, count."""
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    cut: tuple[int, int, int] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.cut is None:
            return self.shape
        dim, _, count = self.cut
        return self.shape[:dim] + (count,) + self.shape[dim + 1:]

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.dtype, self.local_shape)

    def tensor(self) -> torch.Tensor:
        """The rank's share as a view of the mapping."""
        import torch
        size, dtype = DTYPES[self.dtype]
        source, offset = self.file.map, self.offset
        count = math.prod(self.shape)
        if offset % size:   # left unaligned by a foreign writer, which torch does not promise to read
            source, offset = bytearray(source[offset:offset + size * count]), 0
        flat = torch.frombuffer(source, dtype=getattr(torch, dtype), count=count, offset=offset)
        whole = flat.view(self.shape)
        return whole if self.cut is None else whole.narrow(*self.cut)


Tensors = dict[str, Stored]
Header = dict[str, tuple[str, tuple[int, ...], int]]    # name: (dtype, stored shape, offset in the file)


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype][0] * math.prod(shape)


def read_header(path: str) -> Header:
    """What a safetensors file holds, after checking that the file is whole."""
    try:
        with open(path, "rb") as f:
            size, start = os.path.getsize(path), f.read(8)
            if start == b"version ":
                raise CheckpointError(f"{path} is a Git LFS pointer and not the file: run `git lfs pull`")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise CheckpointError(f"{path} is no whole safetensors file ({size} bytes): download it")
            raw = f.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check that it is there") from None
    try:
        header = {name: _header_entry(path, name, entry, 8 + length)
                  for name, entry in json.loads(raw).items() if name != "__metadata__"}
    except CheckpointError:
        raise
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file (it has no such header): download it") from None
    end, gaps = 8 + length, False
    # each where the last one ended; an empty one may share its place with the next
    for offset, count in sorted((offset, stored_bytes(dtype, shape))
                                for dtype, shape, offset in header.values()):
        gaps |= offset != end
        end = offset + count
    if gaps or end != size:
        fault = f"{size} bytes where its header describes {end}"
        if end == size:
            fault = "by its header tensors overlap or leave gaps"
        raise CheckpointError(f"{path} is cut or damaged, {fault}: download it again")
    return header


def _header_entry(path: str, name: str, entry: dict, base: int) -> tuple[str, tuple[int, ...], int]:
    keys = ("dtype", "shape", "data_offsets")
    dtype, shape, offsets = map(entry.get, keys) if isinstance(entry, dict) else (None, None, None)
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    # a name that cannot be printed would break each message that mentions it
    if not (isinstance(dtype, str) and all(_is_int(n, end=1 << 63) for n in numbers) and len(offsets) == 2
            and name.isprintable()):
        raise CheckpointError(f"{path} is no safetensors file (its header has {reprlib.repr(name)}: "
                              f"{reprlib.repr(entry)}): download it")
    first, last = offsets
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {reprlib.repr(dtype)[1:-1]}, which no DeepSeek-V4 "
                              "checkpoint holds: use the published one")
    whole, stored_shape = True, tuple(shape)
    if dtype == "F4":       # the format counts values, we count bytes of two
        whole = shape != [] and shape[-1] % 2 == 0
        stored_shape = (*shape[:-1], *(n // 2 for n in shape[-1:]))
    if not whole or last - first != stored_bytes(dtype, stored_shape):
        raise CheckpointError(f"{path}: {name} has {last - first} bytes for {dtype} {reprlib.repr(shape)}: "
                              "the file is damaged, download it again")
    return dtype, stored_shape, base + first


CONVERTED = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
INDEX = "model.safetensors.index.json"


def published_files(folder: str) -> list[str]:
    """The files of a published checkpoint: those its index names, else all that no conversion made."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))
                if name.endswith(".safetensors") and not CONVERTED.fullmatch(name)]
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} has no weight_map of file names: download it again")
    names = sorted(set(shards.values()))
    # any other path could lead out of the folder
    odd = [reprlib.repr(name) for name in names
           if name != os.path.basename(name) or name in ("", ".", "..") or not name.isprintable()]
    if odd:
        raise CheckpointError(f"{index} names {_some(odd)}, where it may only name files beside it: download "
                              "it again")
    absent = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise CheckpointError(f"{folder} lacks {_some(absent)}, which its {INDEX} names: download them")
    return [os.path.join(folder, name) for name in names]


def read_published(folder: str) -> Tensors:
    """Every tensor of a published folder under its plain name."""
    files = published_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no published *.safetensors: give the folder of the checkpoint")
    tensors = read_files(files)
    if any(name.endswith(("weight_scale_2", "input_scale")) for name in tensors):
        raise CheckpointError(NVFP4)
    return tensors


def read_files(paths: list[str]) -> Tensors:
    tensors: Tensors = {}
    for path in paths:
        file = MappedFile(path)
        for stored_name, entry in file.header.items():
            name = plain_name(stored_name)
            if name in tensors:
                raise CheckpointError(f"{name} is in {tensors[name].file.path} and again in {path}: remove "
                                      "the file that does not belong to the checkpoint")
            tensors[name] = Stored(file, *entry)
    return tensors


def read_checkpoint(folder: str, rank: int, world: int) -> Tensors:
    """What one rank holds: the file converted for it, or its share of a published folder."""
    found = {(int(m[1]), int(m[2])) for m in map(CONVERTED.fullmatch, os.listdir(folder)) if m}
    sizes = sorted({size for _, size in found})
    if (rank, world) in found:
        return read_files([os.path.join(folder, f"model{rank}-mp{world}.safetensors")])
    if world in sizes:
        raise CheckpointError(f"{folder} lacks model{rank}-mp{world}.safetensors: run the conversion again, "
                              "it makes the files that are missing")
    if sizes and not published_files(folder):
        made = " and ".join(map(str, sizes))
        raise CheckpointError(f"{folder} was converted for {made}, started with {world}: start with torchrun "
                              f"--nproc-per-node {sizes[0]}, or convert with --model-parallel {world}")
    return shard(read_published(folder), rank, world)


# ---- Names and shards ------------------------------------------------------------------------------------

# The other name space, as the vendor's conversion translates it. Its names for V3's attention (q_proj, o_proj
# and so on) belong to no part of this model: such tensors are reported as unexpected.
PLAIN_NAMES = {
    "self_attn": "attn", "mlp": "ffn", "weight_scale_inv": "scale", "e_score_correction_bias": "bias",
    "embed_tokens": "embed", "lm_head": "head", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b",
    "kv_a_layernorm": "kv_norm", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}

# The dimension of a module's weight and scale that the ranks share. Of the routed experts each rank has some,
# whole; of everything else, all.
SPLIT_DIM = {"embed": 0, "head": 0, "wq_b": 0, "wo_a": 0, "wo_b": 1, "attn_sink": 0, "weights_proj": 0}

EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")


def plain_name(name: str) -> str:
    return ".".join(PLAIN_NAMES.get(part, part) for part in name.removeprefix("model.").split("."))


def shard(tensors: Tensors, rank: int, world: int) -> Tensors:
    """What `rank` of `world` holds. Conversion and the loading of published folders share this rule."""
    if world == 1:
        return tensors
    experts = len({match[1] for match in map(EXPERT.search, tensors) if match})
    if experts % world:
        raise CheckpointError(f"{world} ranks cannot share {experts} routed experts: use a divisor of that")
    part = {}
    for name in sorted(tensors, key=lambda name: name.endswith(".scale")):      # of a pair, blame the weight
        stored = tensors[name]
        module = name.split(".")[-2 if name.endswith((".weight", ".scale")) else -1]
        if expert := EXPERT.search(name):
            if int(expert[1]) * world // experts == rank:
                part[name] = stored
        elif SPLIT_DIM.get(module, math.inf) < len(stored.shape):   # one of fewer dimensions is refused later
            part[name] = stored._replace(cut=_share(name, stored, SPLIT_DIM[module], rank, world))
        else:
            part[name] = stored
    return part


def _share(name: str, stored: Stored, dim: int, rank: int, world: int) -> tuple[int, int, int]:
    size, block = stored.shape[dim], BLOCK if stored.dtype == "F8_E4M3" else 1
    if size % (world * block):
        blocks = f" in the blocks of {BLOCK} that a scale covers" if block > 1 else ""
        raise CheckpointError(f"{world} ranks cannot share the {size} {('rows', 'columns')[dim]} of {name}"
                              f"{blocks}: use fewer ranks")
    count = size // world
    return dim, rank * count, count


def select_mtp(tensors: Tensors, config: dict, wanted: bool, quiet: bool = False) -> Tensors:
    """Drops mtp.* if not wanted, its copies of embedding and head, and DSpark's draft stages (saying so)."""
    blocks = config.get("num_nextn_predict_layers", 1)
    mtp = {name for name in tensors if name.startswith("mtp.")}
    draft = {name for name in tensors if "dspark" in name}
    draft |= {name for name in mtp if int(re.match(r"mtp\.(\d{0,9})", name)[1] or 0) >= max(1, blocks)}
    if draft or has_dspark(config):     # then mtp.0 is a draft stage as well
        dropped = draft | mtp
        if dropped and not quiet:
            print(f"left out: {len(dropped)} tensors of DSpark draft stages (Flash-0731)", file=sys.stderr)
    elif wanted:
        dropped = {name for name in mtp if "emb" in name or name.endswith("head.weight")}
    else:
        dropped = mtp
    return {name: stored for name, stored in tensors.items() if name not in dropped}


def check_tensors(folder: str, tensors: Tensors, shapes: dict[str, tuple[int, ...]],
                  linears: set[str]) -> None:
    """Compares tensors with a model's shapes; only linears may be quantised. One error names all faults."""
    faults: dict[str, list[str]] = {}
    scales = set()

    def expect(name: str, shape: tuple[int, ...]) -> None:
        if tensors[name].local_shape != shape:
            found = f"{name} {list(tensors[name].local_shape)} in place of {list(shape)}"
            faults.setdefault("of the wrong shape", []).append(found)

    for name, shape in shapes.items():
        if name not in tensors:
            faults.setdefault("missing", []).append(name)
        elif name not in linears or tensors[name].dtype not in QUANTISED:
            expect(name, shape)
        else:
            weight_shape, scale_shape = quantised_shapes(tensors[name].dtype, shape)
            expect(name, weight_shape)
            scales.add(scale := scale_of(name))
            if scale not in tensors:
                faults.setdefault("quantised without a scale", []).append(name)
            elif tensors[scale].dtype not in ("F8_E8M0", "F32"):
                faults.setdefault("a scale of a foreign dtype", []).append(f"{scale} {tensors[scale].dtype}")
            else:
                expect(scale, scale_shape)
    for name in tensors.keys() - shapes.keys() - scales:
        orphan = name.endswith(".scale") and weight_of(name) in shapes
        faults.setdefault("a scale without a quantised weight" if orphan else "unexpected", []).append(name)
    _raise_faults(folder, faults)


def _raise_faults(folder: str, faults: dict[str, list[str]]) -> None:
    if faults:
        listed = "; ".join(f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items())
        raise CheckpointError(f"{folder} does not fit the model ({listed}): check that the download is "
                              "whole, and that config.json is this checkpoint's own")


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:10]) + (", ..." if len(names) > 10 else "")


# ---- Loading ---------------------------------------------------------------------------------------------

def load_weights(model: torch.nn.Module, ckpt_path: str, device: torch.device | str | None = None,
                 progress: Callable[[int, int], None] | None = None,
                 expert_device: torch.device | str | None = None, tensors: Tensors | None = None) -> None:
    """Fills a Transformer that was built on the meta device, from a published or a converted folder.

    Rank and world size are torch.distributed's. The scale of an FP8 or FP4 weight becomes `module.scale`. On
    a CPU all stays as stored, in the mapped files. On a GPU, which would pay at each token, wo_a is
    dequantised and the rest gets its declared dtype. expert_device: where routed experts go, if not to
    `device`. tensors: what read_checkpoint returned, if it was called. progress(done, total) counts bytes.
    CheckpointError unless every parameter and every tensor is used.
    """
    import torch.distributed as dist
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    config = read_config(ckpt_path, required=False)
    check_parallel(config, world)
    mtp = len(getattr(model, "mtp", ())) > 0
    tensors = tensors or read_checkpoint(ckpt_path, rank, world)
    tensors = select_mtp(tensors, config, wanted=mtp, quiet=rank > 0)
    if mtp and not any(name.startswith("mtp.") for name in tensors):
        raise CheckpointError(f"{ckpt_path} has no MTP block: build the model without one")

    # named_modules meets the embedding and head that an MTP block shares once, under their own names
    places = {f"{path}.{leaf}".removeprefix("."): (module, leaf, param)
              for path, module in model.named_modules()
              for leaf, param in module.named_parameters(recurse=False) if leaf != "scale"}
    params = {name: param for name, (_, _, param) in places.items()}
    linears = {name for name, (module, leaf, _) in places.items()
               if leaf == "weight" and hasattr(module, "in_features")}
    check_tensors(ckpt_path, tensors, {name: tuple(param.shape) for name, param in params.items()}, linears)
    _check_casts(ckpt_path, tensors, params)

    done, total = 0, sum(stored.nbytes for stored in tensors.values())
    for name, (module, leaf, param) in places.items():
        scale = tensors.get(scale_of(name))
        place = expert_device if expert_device is not None and EXPERT.search(name) else device
        _fill(module, leaf, param.dtype, tensors[name], scale, name.endswith("wo_a.weight"), place)
        done += tensors[name].nbytes + (scale.nbytes if scale else 0)
        if progress:
            progress(done, total)


def _check_casts(folder: str, tensors: Tensors, params: dict) -> None:
    """Loading may only widen: refuses floats that the declared dtype would round, and any change of kind."""
    import torch
    faults: dict[str, list[str]] = {}
    for name, param in params.items():
        if scale_of(name) in tensors:
            continue    # quantised, not cast
        dtype, declared = getattr(torch, DTYPES[tensors[name].dtype][1]), param.dtype
        found = f"{name} {tensors[name].dtype}"
        if dtype.itemsize == 1 or dtype.is_floating_point != declared.is_floating_point:
            faults.setdefault(f"not to be read as {str(declared).removeprefix('torch.')}", []).append(found)
        elif dtype.is_floating_point and torch.promote_types(dtype, declared) != declared:
            fault = f"that {str(declared).removeprefix('torch.')} would round, load with float32"
            faults.setdefault(fault, []).append(found)
    _raise_faults(folder, faults)


def _fill(module: torch.nn.Module, leaf: str, dtype: torch.dtype, stored: Stored, scale: Stored | None,
          dequantised: bool, device) -> None:
    """Replaces one parameter, and sets its scale, by what is stored; on a GPU widened or dequantised once."""
    import torch
    from kernel import widened
    mapped = stored.tensor()
    if stored.dtype == "F32" and mapped.data_ptr() % ALIGNED:
        mapped = mapped.clone()             # 0.1% of Flash, most of it hyper-connections
    value = source = mapped.contiguous()    # copies only where ranks share columns
    as_stored = torch.device(device or "cpu").type == "cpu"
    if scale is None:
        # an integer table may stay wider than declared: int64 indices serve where int32 would
        if not (as_stored and source.is_floating_point()):
            value = source.to(torch.promote_types(source.dtype, dtype))
    elif dequantised and not as_stored:
        value = widened(source, scale.tensor(), dtype)
    else:
        if stored.dtype == "I8":
            value = source.view(torch.float4_e2m1fn_x2)
        held_scale = scale.tensor().contiguous().to(device=device)
        module.scale = torch.nn.Parameter(held_scale, requires_grad=False)
    value = value.to(device=device)
    if value.data_ptr() != mapped.data_ptr():
        stored.file.forget()    # copied, so its pages need not stay
    setattr(module, leaf, torch.nn.Parameter(value, requires_grad=False))


# ---- Conversion ------------------------------------------------------------------------------------------

def cast_e2m1fn_to_e4m3fn(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP4 int8 [out, in/2], a scale per row and 32 columns -> FP8 [out, in], a scale per 128 x 128; lossless.

    A block's scale becomes its largest old one / 2^6, so that the largest value is 6 * 2^6 = 384 (e4m3 ends
    at 448). .5 then stays exact down to e4m3's last step, 2^-9: the old scales of a block may lie 2^14 apart.
    CheckpointError where anything would be lost.
    """
    import torch
    from kernel import e2m1_pairs
    rows, cols = x.size(0), x.size(1) * 2
    assert x.dtype == torch.int8 and rows % BLOCK == 0 and cols % BLOCK == 0
    assert scale.shape == (rows, cols // FP4_BLOCK)
    blocks = (rows // BLOCK, BLOCK, cols // BLOCK, BLOCK // FP4_BLOCK)
    values = e2m1_pairs(x.device)[x.view(torch.uint8).int()] + 0                # [out,in/2,2]; -0 becomes 0
    values = values.view(*blocks, FP4_BLOCK)                                    # [out/128,128,in/128,4,32]
    scale = scale.float().view(*blocks, 1)                                      # [out/128,128,in/128,4,1]
    block_scale = scale.amax(dim=(1, 3), keepdim=True) / 2**6                   # [out/128,1,in/128,1,1]
    shift = scale / block_scale
    new = (values * shift).to(torch.float8_e4m3fn)
    new_scale = block_scale.to(torch.float8_e8m0fnu)
    # Undo it to see that nothing is lost. A scale outside e8m0's range does no harm where all values are 0.
    exact = torch.equal(new.float() / shift, values)
    rounded = new_scale.float() != block_scale
    if not exact or (rounded.any() and values[rounded.expand_as(values)].any()):
        raise CheckpointError("the scales of a 128 x 128 block are too far apart for a lossless cast to FP8: "
                              "use --expert-dtype fp4")
    return new.view(rows, cols), new_scale.view(rows // BLOCK, cols // BLOCK)


def recipe(part: Tensors, name: str, expert_dtype: str | None) -> str:
    """How conversion treats a weight and its scale: "dequantise" and "cast" make one from both, or "copy"."""
    weight = weight_of(name)
    if weight.endswith("wo_a.weight") and part[weight].dtype == "F8_E4M3":
        return "dequantise"
    if expert_dtype == "fp8" and EXPERT.search(weight) and part[weight].dtype in PACKED:
        return "cast"
    return "copy"


Layout = dict[str, tuple[str, tuple[int, ...]]]     # name: (dtype, stored shape)


def converted_layout(part: Tensors, expert_dtype: str | None) -> Layout:
    """What the converted file of a rank holds."""
    layout: Layout = {}
    for name, stored in part.items():
        how, shape = recipe(part, name, expert_dtype), stored.local_shape
        if how == "copy":
            layout[name] = "F4" if stored.dtype == "I8" else stored.dtype, shape
        elif how == "dequantise" and name == weight_of(name):
            layout[name] = "BF16", shape
        elif how == "cast" and name == weight_of(name):
            shape, scale_shape = quantised_shapes("F8_E4M3", (shape[0], shape[1] * 2))
            layout[name], layout[scale_of(name)] = ("F8_E4M3", shape), ("F8_E8M0", scale_shape)
    return layout


def converted_tensors(part: Tensors,
                      expert_dtype: str | None) -> Iterator[tuple[str, torch.Tensor, MappedFile]]:
    """Makes them one at a time, in the order of the source files: name, tensor, the file it is from."""
    import torch
    from kernel import widened
    for name in sorted(part, key=lambda name: (part[name].file.path, part[name].offset)):
        how, stored = recipe(part, name, expert_dtype), part[name]
        if how == "copy":
            yield name, stored.tensor(), stored.file
        elif how == "dequantise" and name == weight_of(name):
            weight = widened(stored.tensor(), part[scale_of(name)].tensor(), torch.bfloat16)
            yield name, weight, stored.file
        elif how == "cast" and name == weight_of(name):
            packed = stored.tensor().view(torch.int8)
            try:
                weight, scale = cast_e2m1fn_to_e4m3fn(packed, part[scale_of(name)].tensor())
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from None
            yield name, weight, stored.file
            yield scale_of(name), scale, stored.file


def layout_header(layout: Layout) -> tuple[bytes, Header]:
    """The first bytes of a safetensors file, as its own library writes them, and what read_header reads."""
    entries, header, end = {}, {}, 0
    for name in sorted(layout, key=lambda name: (list(DTYPES).index(layout[name][0]), name)):
        dtype, shape = layout[name]
        counted = [*shape[:-1], shape[-1] * 2] if dtype == "F4" else list(shape)
        header[name], start, end = (dtype, shape, end), end, end + stored_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": counted, "data_offsets": [start, end]}
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw = struct.pack("<Q", len(raw) + -len(raw) % 8) + raw + b" " * (-len(raw) % 8)
    return raw, {name: (dtype, shape, len(raw) + start) for name, (dtype, shape, start) in header.items()}


def write_file(path: str, part: Tensors, layout: Layout, expert_dtype: str | None) -> None:
    """Streams the file of one rank, each tensor to its place, and gives it its name when it is whole."""
    import torch
    start, header = layout_header(layout)
    done, total = 0, layout_bytes(layout)
    progress, unfinished = Progress(os.path.basename(path)), path + ".part"
    _remove(unfinished)     # what a killed run left; and were it a link, its target would be written over
    with open(unfinished, "xb") as out:
        try:
            out.write(start)
            for name, tensor, source in converted_tensors(part, expert_dtype):
                out.seek(header[name][2])
                for piece in tensor.contiguous().view(torch.uint8).flatten().split(CHUNK):
                    out.write(piece.numpy())
                    source.forget()
                    done += piece.numel()
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())
            if not _has_name(out, unfinished):
                raise CheckpointError(f"{unfinished} was taken by another run: let one at a time convert "
                                      "into a folder")
            os.replace(unfinished, path)
        finally:
            if _has_name(out, unfinished):
                os.remove(unfinished)


def _has_name(file: IO, path: str) -> bool:
    """Whether an open file still has this name, and no second run has made another of that name."""
    return os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _remove(path: str) -> None:
    if os.path.lexists(path):
        os.remove(path)


def layout_bytes(layout: Layout) -> int:
    return sum(stored_bytes(dtype, shape) for dtype, shape in layout.values())


def is_whole(path: str, part: Tensors, layout: Layout, expert_dtype: str | None) -> bool:
    """Whether an earlier run made this file, whole and from this checkpoint.

    Judged by its header, its size, and the first PEEK bytes of the tensors that are only copied: all of the
    norms, sinks, biases. To compare everything would take as long as to convert it.
    """
    try:
        if not os.path.exists(path) or read_header(path) != layout_header(layout)[1]:
            return False
    except CheckpointError:
        return False
    made = read_files([path])
    return all(_same_start(part[name], made[name]) for name in part
               if recipe(part, name, expert_dtype) == "copy")


def _same_start(source: Stored, result: Stored) -> bool:
    """Whether the first rows agree, as many as PEEK bytes have, or one."""
    step = max(1, PEEK * math.prod(source.local_shape[:-1]) // source.nbytes)
    a, b = (next(_byte_rows(stored, step)) for stored in (source, result))
    same = bool((a == b).all())
    source.file.forget()
    result.file.forget()
    return same


COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def main(hf_ckpt_path: str, save_path: str, n_experts: int, mp: int, expert_dtype: str | None) -> None:
    """Converts a published folder into save_path/model{rank}-mp{mp}.safetensors. Refuses before any work."""
    config = read_config(hf_ckpt_path)
    check_config(config)
    if n_experts != config["n_routed_experts"]:
        raise CheckpointError(f"--n-experts {n_experts} contradicts config.json: give its n_routed_experts, "
                              f"{config['n_routed_experts']}")
    check_parallel(config, mp)
    if os.path.realpath(save_path) == os.path.realpath(hf_ckpt_path):
        raise CheckpointError("--save-path is --hf-ckpt-path: choose another folder, the two would mix")
    published = open_published(hf_ckpt_path, config)
    _check_expert_dtype(config, published, expert_dtype)
    parts = [shard(published, rank, mp) for rank in range(mp)]
    layouts = [converted_layout(part, expert_dtype) for part in parts]
    paths = [os.path.join(save_path, f"model{rank}-mp{mp}.safetensors") for rank in range(mp)]
    kept = {path for path, part, layout in zip(paths, parts, layouts)
            if is_whole(path, part, layout, expert_dtype)}

    os.makedirs(save_path, exist_ok=True)
    size = sum(layout_bytes(layout) for path, layout in zip(paths, layouts) if path not in kept)
    free = shutil.disk_usage(save_path).free
    if size > free:
        raise CheckpointError(f"{save_path} has {readable(free)} free and the conversion writes "
                              f"{readable(size)}: make room, or choose another disk")
    largest = max(stored_bytes(*entry) for layout in layouts for entry in layout.values())
    print(f"{len(published)} tensors, {readable(size)} to write into {mp - len(kept)} files; the largest "
          f"tensor, about what this needs in memory, has {readable(largest)}", file=sys.stderr)
    for path, part, layout in zip(paths, parts, layouts):
        if path in kept:
            print(f"kept {path}: it is whole (--verify compares its values)", file=sys.stderr)
        else:
            write_file(path, part, layout, expert_dtype)
    for name in COPIED:
        copy_file(os.path.join(hf_ckpt_path, name), os.path.join(save_path, name))


def copy_file(source: str, target: str) -> None:
    """Copies a file if it is there. A link is replaced, not written through: its target may be the source."""
    if not os.path.exists(source) or (os.path.exists(target) and os.path.samefile(source, target)):
        return
    unfinished = target + ".part"
    _remove(unfinished)
    shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)


def open_published(folder: str, config: dict) -> Tensors:
    """A published folder's tensors, checked against its config; MTP blocks are optional."""
    tensors = select_mtp(read_published(folder), config, wanted=True)
    expected = list(parameters(config, mtp=any(name.startswith("mtp.") for name in tensors)))
    linears = {name for name, kind, _ in expected if kind in ("linear", "expert")}
    check_tensors(folder, tensors, {name: shape for name, _, shape in expected}, linears)
    return tensors


def _check_expert_dtype(config: dict, published: Tensors, expert_dtype: str | None) -> None:
    stored = {published[name].dtype for name in published if EXPERT.search(name) and name == weight_of(name)}
    if expert_dtype and not stored <= {*PACKED, *(("F8_E4M3",) if expert_dtype == "fp8" else ())}:
        raise CheckpointError(f"--expert-dtype {expert_dtype} cannot be had, the experts are stored as "
                              f"{_some([*stored])}: leave the option out")
    sizes = {key: config[key] for key in ("hidden_size", "moe_intermediate_size") if config[key] % BLOCK}
    if expert_dtype == "fp8" and stored & {*PACKED} and sizes:
        raise CheckpointError(f"--expert-dtype fp8 needs multiples of {BLOCK}, but there is {sizes}: use fp4")


# ---- Verification ----------------------------------------------------------------------------------------
# Decodes each format by its formula, in NumPy, so that it shares no arithmetic with the conversion.

def verify(hf_ckpt_path: str, converted: str) -> int:
    """Compares converted files with the original, prints every tensor that differs, returns their number."""
    config = read_config(hf_ckpt_path)
    published = open_published(hf_ckpt_path, config)
    if not os.path.isdir(converted):
        raise CheckpointError(f"{converted} is not a folder: give the --save-path of a conversion")
    sizes = sorted({int(m[2]) for m in map(CONVERTED.fullmatch, os.listdir(converted)) if m})
    if len(sizes) != 1:
        found = " and ".join(map(str, sizes)) or "none"
        raise CheckpointError(f"{converted} must hold one conversion, and holds {found}: give another folder")
    world, different = sizes[0], 0
    check_parallel(config, world)
    for rank in range(world):
        part, made = shard(published, rank, world), read_checkpoint(converted, rank, world)
        names = sorted(part.keys() | made.keys())
        progress = Progress(f"verify rank {rank} of {world}")
        for i, name in enumerate(names):
            if fault := _difference(name, part, made):
                different += 1
                print(f"model{rank}-mp{world}.safetensors: {name} {fault}")
            for stored in filter(None, (part.get(name), made.get(name))):
                stored.file.forget()
            progress(i + 1, len(names))
    print(f"{different} tensors differ" if different else "every tensor agrees")
    return different


def _difference(name: str, part: Tensors, made: Tensors) -> str | None:
    """What is wrong with one converted tensor, or None."""
    if name not in part:
        return "is not in the original"
    weight, how = weight_of(name), "copy"
    dtypes = (part[weight].dtype, made[weight].dtype) if weight in made else ()
    if weight.endswith("wo_a.weight") and dtypes == ("F8_E4M3", "BF16"):
        how = "dequantise"
    elif EXPERT.search(weight) and dtypes in [(packed, "F8_E4M3") for packed in PACKED]:
        how = "cast"
    if how != "copy" and name != weight:    # a scale counts with its weight
        return "is left over, its weight is BF16" if how == "dequantise" and name in made else None
    if name not in made:
        return "is missing"
    source, result, shape = part[name], made[name], part[name].local_shape
    if how == "cast":
        shape = (shape[0], shape[1] * 2)
        scale = made.get(scale_of(name))
        if scale is None or (scale.dtype, scale.shape) != ("F8_E8M0", quantised_shapes("F8_E4M3", shape)[1]):
            return "has no scale that fits"
    same = how != "copy" or source.dtype == result.dtype or {source.dtype, result.dtype} == {*PACKED}
    if not same or shape != result.shape:
        return f"was {source.dtype} {list(source.local_shape)} and is {result.dtype} {list(result.shape)}"
    wrong = sum(int((a != b).sum()) for a, b in _row_pairs(how, name, part, made))
    return f"differs in {wrong} of its {'bytes' if how == 'copy' else 'values'}" if wrong else None


def _row_pairs(how: str, name: str, part: Tensors, made: Tensors) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of the original and of the converted tensor, some at a time, in a form where equal means equal."""
    source, result, scale = part[name], made[name], scale_of(name)
    if how == "dequantise":
        bits = (rows.view("<u2") for rows in _byte_rows(result, BLOCK))
        return zip(map(_bf16_bits, _fp8_rows(source, part[scale])), bits)
    if how == "cast":
        return zip(_fp4_rows(source, part[scale]), _fp8_rows(result, made[scale]))
    step = max(1, CHUNK * math.prod(source.local_shape[:-1]) // source.nbytes)
    return zip(_byte_rows(source, step), _byte_rows(result, step))


def _byte_rows(stored: Stored, step: int) -> Iterator[np.ndarray]:
    """A tensor's bytes, `step` rows at a time."""
    import torch
    rows = stored.tensor().view(torch.uint8)
    rows = rows.reshape(-1, rows.size(-1)).numpy()
    for first in range(0, len(rows), step):
        yield rows[first:first + step]
        stored.file.forget()


def _minifloats(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The value of each code of a small float: sign, biased exponent, mantissa; subnormals, no infinities."""
    import numpy as np
    code = np.arange(2 << (exponent_bits + mantissa_bits))
    bias = 2**(exponent_bits - 1) - 1
    fraction = code % 2**mantissa_bits / 2**mantissa_bits
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    size = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    return np.where(code < len(code) // 2, size, -size)


def _scales(stored: Stored) -> np.ndarray:
    """A scale in float64 [rows, columns]: F32, or a power of two by its biased exponent, where 255 is NaN."""
    import numpy as np
    raw = next(_byte_rows(stored, stored.local_shape[0]))
    if stored.dtype == "F32":
        return np.ascontiguousarray(raw).view("<f4").astype(np.float64)
    return np.where(raw == 255, np.nan, np.ldexp(1.0, raw.astype(np.int32) - 127))


def _fp8_rows(weight: Stored, scale: Stored) -> Iterator[np.ndarray]:
    """FP8 times scale in float64, in which every product is exact, BLOCK rows at a time."""
    table = _minifloats(4, 3)
    table[[0x7F, 0xFF]] = float("nan")
    for codes, row in zip(_byte_rows(weight, BLOCK), _scales(scale)):
        yield table[codes] * row.repeat(BLOCK)[:codes.shape[1]]


def _fp4_rows(weight: Stored, scale: Stored) -> Iterator[np.ndarray]:
    """FP4 times scale in float64, BLOCK rows at a time."""
    import numpy as np
    table, scales = _minifloats(2, 1), _scales(scale)
    for i, packed in enumerate(_byte_rows(weight, BLOCK)):
        values = np.stack([table[packed & 15], table[packed >> 4]], axis=-1).reshape(len(packed), -1)
        yield values * scales[i * BLOCK:(i + 1) * BLOCK].repeat(FP4_BLOCK, axis=1)[:, :values.shape[1]]


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """float64 rounded to float32, and that to bfloat16, as the conversion does; the bits, as uint16."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


# ---- Command line ----------------------------------------------------------------------------------------

def readable(size: int) -> str:
    """Bytes for people: 159.6 GB, 3.7 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


class Progress:
    """Progress of one piece of work on stderr: a bar on a terminal, one line at the end otherwise."""

    def __init__(self, label: str):
        self.label, self.start, self.shown = label, time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty():
            if done == total:
                print(f"{self.label}: done in {now - self.start:.1f} s", file=sys.stderr)
        elif done == total or now - self.shown > 0.1:
            self.shown = now
            bar = "#" * (30 * done // max(total, 1))
            print(f"\r{self.label} [{bar:<30}] {100 * done // max(total, 1):3d}% {now - self.start:.0f} s",
                  end="\n" if done == total else "", file=sys.stderr, flush=True)


def print_inventory(folder: str) -> None:
    """The inventory as JSON, a tensor a line, on stdout; what it adds up to on stderr."""
    table = inventory(read_config(folder))
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(table.items()))
    print("{", ",\n".join(lines), "}", sep="\n")
    sizes: dict[str, list[int]] = {}
    for entry in table.values():
        sizes.setdefault(entry["dtype"], []).append(DTYPES[entry["dtype"]][0] * math.prod(entry["shape"]))
    kinds = ", ".join(f"{dtype} {len(sizes[dtype])}" for dtype in sorted(sizes))
    print(f"{len(table)} tensors, {sum(map(sum, sizes.values()))} bytes: {kinds}", file=sys.stderr)


def command_line(argv: list[str] | None = None) -> int:
    """Runs one of the three commands; the exit code is 1 if --verify found differences, 2 for an error."""
    parser = ArgumentParser(description="Convert, verify or list a DeepSeek-V4 checkpoint.")
    parser.add_argument("--hf-ckpt-path", help="the published checkpoint")
    parser.add_argument("--save-path", help="where the converted files go")
    parser.add_argument("--n-experts", type=int, help="routed experts of the model")
    parser.add_argument("--model-parallel", type=int, help="number of ranks to convert for")
    parser.add_argument("--expert-dtype", choices=["fp8", "fp4"], help="fp8 casts fp4 experts losslessly")
    parser.add_argument("--inventory", metavar="DIR", help="print what a checkpoint with this config holds")
    parser.add_argument("--verify", metavar="CONVERTED", help="compare a folder of converted files")
    args = parser.parse_args(argv)
    needed = ["hf_ckpt_path"] if args.verify else ["hf_ckpt_path", "save_path", "n_experts", "model_parallel"]
    absent = ["--" + name.replace("_", "-") for name in needed if getattr(args, name) is None]
    if absent and not args.inventory:
        parser.error(f"{', '.join(absent)} needed (or --inventory DIR)")
    code = 0
    try:
        if args.inventory:
            print_inventory(args.inventory)
        elif args.verify:
            code = int(verify(args.hf_ckpt_path, args.verify) > 0)
        else:
            main(args.hf_ckpt_path, args.save_path, args.n_experts, args.model_parallel, args.expert_dtype)
        sys.stdout.flush()      # so that a reader who has gone is noticed here
    except BrokenPipeError:     # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, OSError) as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: start again, files that are whole are kept", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(command_line())
