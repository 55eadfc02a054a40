"""What the vendor writes as GPU kernels: rounding to FP8 and FP4, products of quantised matrices, attention
over chosen rows, Sinkhorn. Mirrors the vendor's kernel.py (TileLang, Pro release): same names, signatures and
results. For each function x four things stand together: its formula (the docstring of x), the Triton kernel
x_kernel, the wrapper x, and x_ref, the same in plain torch, on any device, in fp32 or where bf16 is as exact.

It is a drop-in: the vendor's unchanged model.py runs over this file. Deliberate differences from the vendor:
- Activations may be of any float dtype (the vendor: bf16 only), and need not be contiguous.
- act_quant(inplace=True) rounds through FP8, as Pro does; the first Flash release: through bf16 only.
- A GEMM reads each scale in the dtype it has, whatever scale_dtype says; the two may differ.
- sparse_attn rounds the softmax weights to q's dtype before P.V: bf16 as in the vendor; fp32 stays exact.
  x_ref rounds exp(s - final max); the vendor and the Triton kernel exp(s - running max), in blocks of keys.
- sparse_attn gives 0 for a query whose indices are all -1, where the vendor's running maximum gives NaN. In
  x_ref a row that is not finite spoils all queries of its tile, in the vendor's only those that name it.
- A NaN makes its whole quantisation block NaN, so that it cannot vanish in a maximum; beside an infinity the
  rest of its block becomes 0, where the vendor's scale is infinite and the block NaN.
- x_ref of hc_split_sinkhorn computes a single token in double: in plain Python, for speed.
- hadamard_transform stands here; the vendor imports fast_hadamard_transform.
- weight_dequant is added: the stored weight as plain numbers; wide_linear multiplies with a weight that stays
  as stored, and weight_cache keeps plain numbers where there is memory for that.
- KERNEL_BACKEND=compile makes one loop of the product of one row with a stored weight (torch.compile).
- index_score and routed_experts are added: the vendor's Indexer uses einsum, its MoE one launch per expert.

The Triton kernels are made for sm_120: 101,376 bytes of shared memory a block, no wgmma. One source runs on
the GPU and, with TRITON_INTERPRET=1, on a CPU. sparse_attn and index_score multiply bf16; there fp32
activations, the exact mode, take x_ref. The other kernels are exact for both.
"""

from __future__ import annotations      # the kernels' annotations need no Triton

import os
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

# oneDNN keeps compiled code for the last 1024 shapes of products, up to 1 MB each: too much for long prompts
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
# a * b + c as one instruction, in every Triton: 3.10 changes the default
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


FP8_MAX = 448.0                     # largest e4m3 number
FP4_MAX = 6.0                       # largest e2m1 number
FP32_MAX = torch.finfo(torch.float32).max
WEIGHT_BLOCK = 128                  # an FP8 weight has one scale per 128 x 128 block
FP4_BLOCK = 32                      # an FP4 weight has one scale per row and 32 columns
WEIGHT_TILE = 1 << 20               # weights that a GEMM holds dequantised at a time: 2 MiB of bf16
WIDE_TILE = 1 << 18                 # weights that are widened at a time: 1 MiB of fp32, for the L2 cache
SCORE_TILE = 1 << 20                # scores that sparse_attn holds at a time
SCORE_ROWS = 64                     # heads of queries that it takes together at least
INDEX_HEADS_TILE = 1 << 22          # index scores before their sum over heads that exist at a time
INDEX_ROWS = 1 << 9                 # rows that are scored at a time
SMALL_M = 64                        # up to so many rows a GEMM takes the tiles for few of them
SPLIT_BLOCKS = 4                    # blocks of 128 columns that a program multiplies at least
SPLIT_KEYS = 64                     # rows that a program attends at least

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)     # by code 0..7; code 8 + i is -E2M1[i]


# ==========================================================================================================
# Which of the two computes
# ==========================================================================================================

def choose_backend() -> Optional[str]:
    """The device type whose tensors Triton takes: "cuda", "cpu" (interpreted), or None: torch does it all.

    A GPU of capability 8.9 or more (older ones have no e4m3) gets Triton, if there is one; anything else gets
    torch. KERNEL_BACKEND=torch|triton overrides that; compile is torch, with what `compiled` marks made into
    one loop. Says what it chose, but not on a plain CPU machine."""
    wish, interpret = os.environ.get("KERNEL_BACKEND"), os.environ.get("TRITON_INTERPRET") == "1"
    gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if gpu else (0, 0)
    if wish not in (None, "torch", "triton", "compile"):
        raise ValueError(f"KERNEL_BACKEND is {wish!r}; it can be torch, triton or compile")
    if wish == "compile" and gpu:
        raise ValueError("KERNEL_BACKEND=compile is for a machine without a GPU: leave it out")
    if wish == "compile" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ValueError("KERNEL_BACKEND=compile needs a C++ compiler: install g++, or set CXX to yours")
    if wish == "triton" and triton is None:
        raise ValueError("KERNEL_BACKEND=triton, but Triton is not installed")
    if wish == "triton" and not (gpu or interpret):
        raise ValueError("KERNEL_BACKEND=triton needs a GPU, or TRITON_INTERPRET=1")
    automatic = triton is not None and capability >= (8, 9) and not interpret
    device = None
    if wish == "triton" or wish is None and automatic:
        device = "cpu" if interpret else "cuda"
    if wish or gpu:
        where = "CPU" + ", interpreted" * (device == "cpu") + ", compiled" * (wish == "compile")
        if gpu and device != "cpu":
            where = f"{torch.cuda.get_device_name()}, capability {capability[0]}.{capability[1]}"
        print(f"kernel: {'triton' if device else 'torch'} on {where}", file=sys.stderr)
    return device


TRITON_DEVICE = choose_backend()
COMPILE = os.environ.get("KERNEL_BACKEND") == "compile"
launches = Counter()        # how often each kernel was started


def jit(kernel):
    """triton.jit, or nothing without Triton. Sizes that change from call to call make no variants."""
    if triton is None:
        return kernel
    sizes = {"M", "TOPK", "ROWS", "BLOCKS", "SPLIT"} & set(kernel.__code__.co_varnames)
    return triton.jit(kernel, do_not_specialize=sorted(sizes))


def compiled(function):
    """With KERNEL_BACKEND=compile one loop, which torch.compile makes for each shape; else as it stands."""
    if not COMPILE:
        return function
    torch._dynamo.config.recompile_limit = 64       # shapes; a model has fewer
    return torch.compile(function, dynamic=False)


def launch(kernel, grid: tuple, *args, **meta):
    launches[kernel.__name__] += 1
    kernel[grid](*args, **meta)


@lru_cache
def processors(device: torch.device) -> int:
    """How many programs keep the GPU busy; in the interpreter a number that makes some launches split."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [rows, n] without a copy: a kernel may write into it. Slices of the last dim are fine."""
    assert x.stride(-1) == 1, f"the last dim must lie together, its stride is {x.stride(-1)}"
    return x.view(-1, x.size(-1))


def raw_scale(s: torch.Tensor) -> torch.Tensor:
    """A scale as a kernel can take it: fp32, or e8m0 as bytes (Triton has no such type)."""
    assert s.is_contiguous(), "scales must be contiguous"
    return s.view(torch.uint8) if s.dtype == torch.float8_e8m0fnu else s


# ==========================================================================================================
# Pieces of kernels. INTERPRET, a compile-time constant, marks what only the interpreter needs
# ==========================================================================================================

INTERPRET = tl and tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@jit
def dot(a, b):
    """a @ b with fp32 sums. The interpreter's own multiplies the bits of bf16 as if they were integers."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@jit
def cast(x, dtype: tl.constexpr):
    """fp32 x in another dtype, to nearest even, saturating in e4m3. The interpreter's own cast truncates."""
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        if dtype == tl.bfloat16:
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        if dtype == tl.float8e4nv:
            a = tl.minimum(tl.abs(x), 448.0)
            e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, -6)
            n = a * ((130 - e) << 23).to(tl.float32, bitcast=True)      # in units of the last bit: below 16
            n = ((n + 8388608.0) - 8388608.0).to(tl.int32)              # 2^23 leaves no room for a fraction
            code = tl.where(x == x, 8 * (e + 6) + n, 127) | tl.where(bits < 0, 128, 0)
            x = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(dtype)


@jit
def e8m0(e):
    """2^(e - 127) for a byte e; NaN for 255. Byte 0 is a subnormal fp32."""
    bits = tl.maximum(e.to(tl.int32) << 23, 0x400000)
    return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def load_scale(ptr, mask):
    """Scales as fp32: stored as such, or as bytes of e8m0."""
    s = tl.load(ptr, mask=mask, other=0)
    if s.dtype == tl.uint8:
        s = e8m0(s)
    return s


@jit
def block_amax(x, least: tl.constexpr):
    """max|x| of each row, at least `least` and finite; NaN where there is one, which tl.max would lose."""
    amax = tl.minimum(tl.maximum(tl.max(tl.abs(x), axis=1), least), 3.4028234663852886e38)
    return tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), amax)


@jit
def round_exponent(wanted):
    """e of the smallest power of two 2^(e - 127) >= wanted; 255 for NaN (see round_scale)."""
    bits = wanted.to(tl.int32, bitcast=True)
    return tl.where(wanted == wanted, (bits + 0x7FFFFF) >> 23, 255)


@jit
def inverse_power(e):
    """1 / e8m0(e), which is a power of two again, so that multiplying with it is an exact division."""
    return e8m0(tl.where(e == 255, 255, 254 - e))


# ==========================================================================================================
# Rounding to FP8 and FP4
# ==========================================================================================================

def round_scale(amax: torch.Tensor, max_inv: float) -> torch.Tensor:
    """The smallest power of two >= amax * max_inv (vendor: fast_round_scale); log2 and exp2 are not exact."""
    bits = (amax * max_inv).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)        # any mantissa bit: one exponent more
    return torch.where(amax.isnan(), amax, scale)


@jit
def act_quant_kernel(x_ptr, y_ptr, s_ptr, BLOCKS, row_blocks, x_stride, BLOCK: tl.constexpr,
                     TILE: tl.constexpr, POWER_OF_TWO: tl.constexpr, INPLACE: tl.constexpr):
    """A program rounds TILE blocks. A row of x holds row_blocks of them; y and s are contiguous."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = block < BLOCKS
    column = tl.arange(0, BLOCK)
    x_at = (block // row_blocks).to(tl.int64) * x_stride + block % row_blocks * BLOCK
    x_at = x_at[:, None] + column
    x = tl.load(x_ptr + x_at, mask=there[:, None], other=0.0).to(tl.float32)        # [TILE, BLOCK]
    wanted = block_amax(x, 1e-4) * (1 / 448.0)
    if POWER_OF_TWO:
        e = round_exponent(wanted)
        s = e8m0(e)
        y = x * inverse_power(e)[:, None]
    else:
        s = wanted
        y = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))      # plain / is not correctly rounded
    y = cast(y, tl.float8e4nv)          # saturates: no clamp, which would turn NaN into a number
    if INPLACE:
        y = y.to(tl.float32) * s[:, None]
        tl.store(x_ptr + x_at, cast(y, x_ptr.dtype.element_ty), mask=there[:, None])
    else:
        tl.store(y_ptr + block[:, None].to(tl.int64) * BLOCK + column, y, mask=there[:, None])
        if s_ptr.dtype.element_ty == tl.uint8:
            tl.store(s_ptr + block, e.to(tl.uint8), mask=there)
        else:
            tl.store(s_ptr + block, s, mask=there)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: Optional[str] = None,
    scale_dtype: torch.dtype = torch.float32, inplace: bool = False,
):
    """FP8 rounding in blocks of the last dim: s = max(amax|x|, 1e-4) / 448, y = e4m3(clamp(x / s)).

    With a scale_fmt ("ue8m0") s is first rounded up to a power of two. Returns y [..., n] and s
    [..., n/block] in scale_dtype; inplace: writes y * s back into x, in x's dtype, and returns x."""
    assert x.size(-1) % block_size == 0, f"last dim {x.size(-1)} is no multiple of block_size {block_size}"
    if x.device.type != TRITON_DEVICE:
        return act_quant_ref(x, block_size, scale_fmt, scale_dtype, inplace)
    assert scale_fmt is not None or scale_dtype == torch.float32, "scales in e8m0 must be powers of two"
    rows, row_blocks = as_rows(x), x.size(-1) // block_size
    y, s = x, x     # in place neither is written
    if not inplace:
        y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        s = x.new_empty(*x.shape[:-1], row_blocks, dtype=scale_dtype)
    blocks = rows.size(0) * row_blocks
    launch(act_quant_kernel, (-(-blocks // 8),), rows, y, s if inplace else raw_scale(s), blocks, row_blocks,
           rows.stride(0), block_size, 8, scale_fmt is not None, inplace)
    return x if inplace else (y, s)


def act_quant_ref(
    x: torch.Tensor, block_size: int = 128, scale_fmt: Optional[str] = None,
    scale_dtype: torch.dtype = torch.float32, inplace: bool = False,
):
    blocks = x.unflatten(-1, (-1, block_size)).float()                  # [..., n/block, block]
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_(1e-4, FP32_MAX)
    s = round_scale(amax, 1 / FP8_MAX) if scale_fmt is not None else amax * (1 / FP8_MAX)
    y = (blocks / s).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if inplace:
        return x.copy_((y.float() * s).flatten(-2))                     # [..., n]
    return y.flatten(-2), s.squeeze(-1).to(scale_dtype)                 # [..., n], [..., n/block]


@jit
def fp4_act_quant_kernel(x_ptr, y_ptr, s_ptr, BLOCKS, row_blocks, x_stride, BLOCK: tl.constexpr,
                         TILE: tl.constexpr, INPLACE: tl.constexpr):
    """A program rounds TILE blocks, as in act_quant_kernel."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = block < BLOCKS
    x_at = (block // row_blocks).to(tl.int64) * x_stride + block % row_blocks * BLOCK
    x_at = x_at[:, None] + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + x_at, mask=there[:, None], other=0.0).to(tl.float32)        # [TILE, BLOCK]
    e = round_exponent(block_amax(x, 6 * 2.0 ** -126) * (1 / 6.0))
    a = tl.abs(x * inverse_power(e)[:, None])
    # e2m1 climbs in four steps of 0.5, two of 1 and one of 2; at a midpoint the even code wins: >= or >
    halves = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32)
    halves += (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    ones = (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    twos = (a > 5.0).to(tl.int32)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    if INPLACE:
        y = (0.5 * halves.to(tl.float32) + (ones + 2 * twos).to(tl.float32)) * e8m0(e)[:, None]
        y = (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        tl.store(x_ptr + x_at, cast(y, x_ptr.dtype.element_ty), mask=there[:, None])
    else:
        code = halves + ones + twos + tl.where(sign != 0, 8, 0)
        low, high = tl.split(tl.reshape(code, (TILE, BLOCK // 2, 2)))
        y_at = block[:, None].to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        tl.store(y_ptr + y_at, (low | high << 4).to(tl.uint8), mask=there[:, None])
        tl.store(s_ptr + block, e.to(tl.uint8), mask=there)


def fp4_act_quant(x: torch.Tensor, block_size: int = 32, inplace: bool = False):
    """FP4 rounding in blocks of the last dim: s = 2^ceil(log2(max(amax|x| / 6, 2^-126))), y = e2m1(x / s).

    Returns packed y [..., n/2], low nibble first, and s e8m0 [..., n/block]; inplace: writes y * s back into
    x, in x's dtype, and returns x."""
    assert x.size(-1) % block_size == 0, f"last dim {x.size(-1)} is no multiple of block_size {block_size}"
    if x.device.type != TRITON_DEVICE:
        return fp4_act_quant_ref(x, block_size, inplace)
    rows, row_blocks = as_rows(x), x.size(-1) // block_size
    y = s = x       # in place neither is written
    if not inplace:
        y = x.new_empty(*x.shape[:-1], x.size(-1) // 2, dtype=torch.uint8)
        s = x.new_empty(*x.shape[:-1], row_blocks, dtype=torch.uint8)
    blocks = rows.size(0) * row_blocks
    launch(fp4_act_quant_kernel, (-(-blocks // 32),), rows, y, s, blocks, row_blocks, rows.stride(0),
           block_size, 32, inplace)
    return x if inplace else (y.view(torch.float4_e2m1fn_x2), s.view(torch.float8_e8m0fnu))


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The e2m1 number nearest to fp32 x, |x| <= 6, ties to even codes: steps of 0.5, from 2 on 1, then 2."""
    exponent = x.abs().clamp_(min=1).view(torch.int32) & 0x7F800000
    step = exponent.view(torch.float32) / 2         # half the power of two at or below |x|
    return (x / step).round_().mul_(step)           # an even multiple has an even code


def fp4_act_quant_ref(x: torch.Tensor, block_size: int = 32, inplace: bool = False):
    blocks = x.unflatten(-1, (-1, block_size)).float()                  # [..., n/block, block]
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(FP4_MAX * 2 ** -126, FP32_MAX)
    s = round_scale(amax, 1 / FP4_MAX)
    y = round_e2m1((blocks / s).clamp_(-FP4_MAX, FP4_MAX))
    if inplace:
        return x.copy_((y * s).flatten(-2))                             # [..., n]
    size = y.abs()
    code = torch.where(size <= 2, 2 * size, torch.where(size <= 4, size + 2, 7)) + 8 * y.signbit()
    code = code.to(torch.uint8).flatten(-2)                             # [..., n]
    packed = code[..., 0::2] | code[..., 1::2] << 4                     # [..., n/2]
    return packed.view(torch.float4_e2m1fn_x2), s.squeeze(-1).to(torch.float8_e8m0fnu)


# ==========================================================================================================
# Products of plain numbers
# ==========================================================================================================

def round_up(n: int) -> int:
    """n or a little more: of each power of two, four sizes. For each new shape of a bf16 product oneDNN
    compiles code, which takes some ms and up to 1 MB: sizes that a prompt decides must be few."""
    step = 1 << max(n.bit_length() - 3, 0)
    return -(-n // step) * step


ONEDNN = torch.backends.mkldnn.enabled      # as the program set it before it imported this file


def matrix_vector(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """w [n,k] @ x [k]; sums in fp32. Torch's own loop reads bf16 as fast as memory gives it, oneDNN's product
    takes two to three times as long. The switch is the whole process's; what a thread or an interrupt leaves
    off is on again after the next product."""
    try:
        torch.backends.mkldnn.enabled = False
        return torch.mv(w, x)
    finally:
        torch.backends.mkldnn.enabled = ONEDNN


def plain_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w^T, both of one float dtype; sums in fp32."""
    if x.device.type != "cpu":
        return F.linear(x, w)
    rows = x.reshape(-1, x.size(-1))
    n = len(rows)
    if n == 1:
        y = matrix_vector(w, rows[0])
    else:
        y = F.linear(F.pad(rows, (0, 0, 0, round_up(n) - n)), w)[:n]
    return y.view(*x.shape[:-1], -1)


def wide_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32, of any float dtype. Of bf16 operands a CPU may multiply the bf16, with sums in fp32.

    That is exact: products of bf16 numbers fit into fp32. With AMX it takes less than half the time. The
    switch is the whole process's: another thread must not multiply fp32 meanwhile."""
    precision = torch.backends.mkldnn.matmul
    saved = precision.fp32_precision
    if a.dtype == b.dtype == torch.bfloat16 and a.numel() > 16 * a.size(-1):      # for few rows it is slower
        precision.fp32_precision = "bf16"
    try:
        return torch.matmul(a.float(), b.float())
    finally:
        precision.fp32_precision = saved


# ==========================================================================================================
# Products of quantised matrices
# ==========================================================================================================

@lru_cache
def e2m1_pairs(device: torch.device) -> torch.Tensor:
    """The two numbers in each byte of packed e2m1, low nibble first: [256, 2] fp32."""
    values = torch.tensor(E2M1, dtype=torch.float32, device=device)
    values = torch.cat([values, -values])                               # [16]
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)


@lru_cache
def number_words(stored: torch.dtype, device: torch.device) -> torch.Tensor:
    """The bf16 numbers in any two bytes of e4m3 or packed e2m1, low byte first, as one integer: [65536]."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    packed = stored == torch.float4_e2m1fn_x2
    numbers = e2m1_pairs(device) if packed else codes.view(stored).unsqueeze(-1)
    numbers = numbers.to(torch.bfloat16)                                # [256, numbers in a byte]
    words = torch.cat([numbers.repeat(256, 1), numbers.repeat_interleave(256, dim=0)], dim=-1)
    return words.view(torch.int64 if packed else torch.int32).flatten()


def decode(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored numbers, e4m3 or packed e2m1, times scales [..., blocks], one for each block of the last dim.

    dtype: fp32, or bf16 if near_one(scale). A look-up of two bytes at once takes on a CPU a fraction of the
    time of torch's own conversion of e4m3; bf16 holds every number of both formats."""
    if x.data_ptr() % 2 or x.storage_offset() % 2:
        x = x.clone()       # a mapped file may have bytes at any address, but not two at once
    index = x.view(torch.uint16).int()
    words = number_words(x.dtype, x.device).index_select(0, index.flatten())    # much slower from rows
    numbers = words.view(index.shape).view(torch.bfloat16).to(dtype)    # [..., k]
    numbers = numbers.unflatten(-1, (scale.size(-1), -1))               # [..., blocks, block]
    return numbers.mul_(scale.to(dtype).unsqueeze(-1)).flatten(-2)      # [..., k]


def weight_dequant(weight: torch.Tensor, scale: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """A stored weight as numbers [n,k]: e4m3, a scale per 128 x 128, or packed e2m1, one per row and 32.

    dtype: fp32, or bf16 if near_one(scale), which then loses nothing."""
    if weight.dtype == torch.float4_e2m1fn_x2:
        assert columns(weight) % FP4_BLOCK == 0, f"{columns(weight)} columns are no multiple of {FP4_BLOCK}"
        return decode(weight, scale, dtype)
    n, k = weight.shape
    row_scale = scale.repeat_interleave(WEIGHT_BLOCK, dim=0)[:n]        # [n,k/128]
    if k % WEIGHT_BLOCK:
        weight = F.pad(weight.view(torch.uint8), (0, -k % WEIGHT_BLOCK)).view(weight.dtype)
    return decode(weight, row_scale, dtype)[:, :k]


def near_one(scale: torch.Tensor) -> bool:
    """Whether all scales are powers of two from 2^-40 to 2^40.

    Then a stored number times its scale has at most 4 significant bits and fits bf16, and a product of two
    is a normal fp32 number: bf16 instructions, which take subnormal numbers for 0, multiply exactly."""
    if scale.dtype != torch.float8_e8m0fnu or scale.numel() == 0:
        return False
    low, high = scale.view(torch.uint8).aminmax()
    return bool(low >= 127 - 40) and bool(high <= 127 + 40)


class Kept(NamedTuple):
    """An entry of a WeightCache; stamp: see WeightCache.get."""
    value: Any
    size: int
    of_expert: bool
    stamp: Any


class WeightCache:
    """What was made from weights, at most `limit` bytes of it, so that it need not be made at each use.

    Dense weights are used in turn for every token: were the oldest put out, a pass over more than fits would
    find nothing. So one stays once it is kept, and one that finds no room is not kept. Experts, asked for
    within experts(), make room for dense weights, the least recently used first. An expert takes the place
    of others only if their last use was before its own previous one; with `always`, of any others."""

    def __init__(self, limit: int = 0, always: bool = False):
        self.limit, self.always = limit, always
        self.entries = WeakIdKeyDictionary()        # owner: Kept; an entry goes with its owner
        self.asked = WeakIdKeyDictionary()          # owner: when it was last asked for, by the count of calls
        self.calls = self.hits = 0
        self.of_experts = False

    def resize(self, limit: int):
        """Another limit; what is kept goes, where it would be more."""
        self.limit = limit
        if self.size() > limit:
            self.entries.clear()

    @contextmanager
    def experts(self):
        """Around the use of routed experts."""
        self.of_experts = True
        try:
            yield
        finally:
            self.of_experts = False

    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def get(self, owner, size: int, make: Callable[[], Any], stamp: Any = None) -> Any:
        """make(), or what it made last time; None where it is not kept. Owners are known by identity.

        size: what it has in bytes. stamp: what tells whether the owner has changed since."""
        if not self.limit:
            return None
        self.calls += 1
        before = self.asked.get(owner, 0)
        self.asked[owner] = self.calls
        entry = self.entries.get(owner)
        if entry is not None and entry.stamp == stamp:
            self.hits += 1
            return entry.value
        if entry is not None:
            del self.entries[owner], entry
        if not self._make_room(size, before):
            return None
        value = make()
        self.entries[owner] = Kept(value, size, self.of_experts, stamp)
        return value

    def _make_room(self, size: int, before: int) -> bool:
        """Puts out what must go for `size` bytes, the oldest first; False if too little may: nothing goes."""
        held, victims = self.size(), []
        if held + size > self.limit:
            experts = [(self.asked[owner], owner) for owner, entry in self.entries.items() if entry.of_expert]
            for asked, owner in sorted(experts, key=lambda pair: pair[0]):
                if held + size <= self.limit or self.of_experts and not self.always and asked > before:
                    break
                held -= self.entries[owner].size
                victims.append(owner)
        if held + size > self.limit:
            return False
        for owner in victims:
            del self.entries[owner]
        return True


# Plain numbers of stored weights. Nothing is kept unless the program says how much (generate.load_model).
weight_cache = WeightCache()


def plain_rows(weight: torch.Tensor, scale: Optional[torch.Tensor], first: int, end: int,
               dtype: torch.dtype) -> torch.Tensor:
    """Rows first..end of a stored weight as plain numbers [rows,k]; without a scale they are only widened."""
    if scale is None:
        return weight[first:end].to(dtype)
    per_scale = 1 if weight.dtype == torch.float4_e2m1fn_x2 else WEIGHT_BLOCK
    start = first // per_scale * per_scale      # where the first row of scales begins
    scale = scale[start // per_scale:-(-end // per_scale)]
    exact = dtype == torch.bfloat16 and near_one(scale)
    w = weight_dequant(weight[start:end], scale, torch.bfloat16 if exact else torch.float32)
    return w[first - start:].to(dtype)


def plain_weight(weight: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A stored weight as plain numbers [n,k], whole: from weight_cache or new."""
    kept = kept_weight(weight, scale, dtype)
    return widened(weight, scale, dtype) if kept is None else kept


def plain_tiles(weight: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype,
                step: int) -> Iterator[Tuple[int, int, torch.Tensor]]:
    """The same in tiles of `step` rows: (first, end, rows). A product has the same bits, kept or new."""
    kept = kept_weight(weight, scale, dtype)
    for first in range(0, weight.size(0), step):
        end = min(first + step, weight.size(0))
        yield first, end, plain_rows(weight, scale, first, end, dtype) if kept is None else kept[first:end]


def kept_weight(weight: torch.Tensor, scale: Optional[torch.Tensor],
                dtype: torch.dtype) -> Optional[torch.Tensor]:
    """plain_weight, if weight_cache keeps it, or if it is stored so."""
    if weight.dtype == dtype:
        return weight
    size = weight.size(0) * columns(weight) * dtype.itemsize
    stamp = (dtype, stamp_of(weight, scale)) if weight_cache.limit else None
    return weight_cache.get(weight, size, lambda: widened(weight, scale, dtype), stamp)


def widened(weight: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Plain numbers [n,k], made in tiles to save memory."""
    w = torch.empty(weight.size(0), columns(weight), dtype=dtype, device=weight.device)
    step = max(WIDE_TILE // w.size(1) // WEIGHT_BLOCK, 1) * WEIGHT_BLOCK
    for first in range(0, w.size(0), step):
        w[first:first + step] = plain_rows(weight, scale, first, min(first + step, w.size(0)), dtype)
    return w


def columns(weight: torch.Tensor) -> int:
    return weight.size(1) * (2 if weight.dtype == torch.float4_e2m1fn_x2 else 1)


def stamp_of(*tensors: Optional[torch.Tensor]) -> tuple:
    """What changes when somebody writes into the tensors; not through .data, nor into inference tensors."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None)


def magnitude(code: torch.Tensor, mantissa: int, bias: int) -> torch.Tensor:
    """Codes of a small float without their sign, int32, as fp32: exponent and mantissa go to fp32's places.

    A subnormal 0.m * 2^(1-bias) comes out as 1.m * 2^-bias there, which the minimum puts right."""
    x = ((code << (23 - mantissa)) + ((127 - bias) << 23)).view(torch.float32)
    return torch.minimum(x, 2 * x - 2.0 ** (1 - bias))


def e2m1_numbers(code: torch.Tensor) -> torch.Tensor:
    """The lower four bits of int32 as fp32."""
    x = magnitude(code & 7, 1, 1)
    return torch.where(code & 8 != 0, -x, x)


def e4m3_numbers(code: torch.Tensor) -> torch.Tensor:
    """Bytes in int32 as fp32."""
    x = torch.where(code & 127 == 127, torch.nan, magnitude(code & 127, 3, 7))
    return torch.where(code & 128 != 0, -x, x)


def scale_numbers(scale: torch.Tensor) -> torch.Tensor:
    """Scales as fp32: fp32, or bytes of e8m0, of which 0 is a subnormal and 255 no number."""
    if scale.dtype == torch.float32:
        return scale
    byte = scale.int()
    return torch.where(byte == 255, torch.nan, (byte << 23).clamp(min=0x400000).view(torch.float32))


@compiled
def fp4_row(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A row a [k] times packed e2m1 w [n,k/2] and its scales [n,k/32], both as bytes: fp32 [n]."""
    w = w.unflatten(1, (-1, FP4_BLOCK // 2)).int()                      # [n,k/32,16]
    a = a.view(-1, FP4_BLOCK // 2, 2)                                   # [k/32,16,2]
    terms = e2m1_numbers(w) * a[..., 0] + e2m1_numbers(w >> 4) * a[..., 1]
    return (terms * scale_numbers(scale).unsqueeze(-1)).sum((1, 2))


@compiled
def fp8_row(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A row a [k] times e4m3 w [n,k], as bytes, and its scales [n/128,k/128]: fp32 [n]."""
    w = e4m3_numbers(w.unflatten(1, (-1, WEIGHT_BLOCK)).int())          # [n,k/128,128]
    terms = (w * a.view(-1, WEIGHT_BLOCK)).sum(2)                       # [n,k/128]
    scale = scale_numbers(scale).repeat_interleave(WEIGHT_BLOCK, dim=0)[:w.size(0)]
    return (terms * scale).sum(1)


def row_is_compiled(a: torch.Tensor) -> bool:
    """Whether a [..., k] times a stored weight goes through stored_row."""
    return COMPILE and a.device.type == "cpu" and a.numel() == a.size(-1) and a.numel() % WEIGHT_BLOCK == 0


def stored_row(a: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor) -> torch.Tensor:
    """The one row of fp32 a [..., k] times a stored weight [n,k], in one go: fp32 [..., n]."""
    row = fp4_row if b.dtype == torch.float4_e2m1fn_x2 else fp8_row
    return row(a.flatten(), b.view(torch.uint8), raw_scale(b_s)).view(*a.shape[:-1], -1)


def _scaled_gemm(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor):
    """(a * a_s) @ (b * b_s)^T, the weight dequantised in tiles, or taken from weight_cache.

    Scales multiply the operands and not each block's sum. Powers of two commute with rounding, so the
    products are those of the vendor's kernel; F32 scales round once more, to 2^-24. A CPU multiplies bf16
    where that is exact and the result is bf16 anyway: the sums are of fp32 there, too."""
    k, n, result = a.size(-1), b.size(0), torch.get_default_dtype()
    if row_is_compiled(a):
        return stored_row(decode(a, a_s, torch.float32), b, b_s).to(result)
    half = result == torch.bfloat16 and a.device.type == "cpu" and near_one(b_s)
    dtype = torch.bfloat16 if half else torch.float32
    a = decode(a, a_s, dtype if near_one(a_s) else torch.float32)       # [..., k]
    c = a.new_empty(*a.shape[:-1], n, dtype=result)
    step = max(WEIGHT_TILE // k // WEIGHT_BLOCK, 1) * WEIGHT_BLOCK
    for first, end, w in plain_tiles(b, b_s, dtype, step):
        c[..., first:end] = plain_linear(a, w.to(a.dtype))
    return c


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., k] @ weight^T in fp32; both may be stored in fewer bits."""
    if weight.dtype == torch.float32:
        return plain_linear(x.float(), weight)
    k, n, few = x.size(-1), weight.size(0), x.numel() <= 16 * x.size(-1)
    y = x.new_empty(*x.shape[:-1], n, dtype=torch.float32)
    if few or x.dtype == torch.float32:
        x = x.float()
        for first, end, w in plain_tiles(weight, None, torch.float32, max(WIDE_TILE // k, 1)):
            y[..., first:end] = plain_linear(x, w)
        return y
    step = max(WEIGHT_TILE // k, 1)
    for first in range(0, n, step):
        y[..., first:first + step] = wide_matmul(x, weight[first:first + step].T)
    return y


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, scale: Optional[torch.Tensor]) -> torch.Tensor:
    """Each group of x [b,s,g,d] times its rows of a weight [g*r,d], stored in any format: [b,s,g,r]."""
    groups, rows = x.size(2), weight.size(0) // x.size(2)
    if x.device.type != "cpu":
        w = plain_weight(weight, scale, x.dtype).view(groups, rows, -1)
        return torch.einsum("bsgd,grd->bsgr", x, w)
    y = x.new_empty(*x.shape[:-1], rows)
    if scale is not None and rows % WEIGHT_BLOCK == 0 and row_is_compiled(x[:, :, 0]):
        for group in range(groups):
            w, s = weight.chunk(groups)[group], scale.chunk(groups)[group]
            y[:, :, group] = stored_row(x[:, :, group].float(), w, s)
        return y
    for first, _, w in plain_tiles(weight, scale, x.dtype, rows):       # mv and F.linear are faster than bmm
        group = first // rows
        y[:, :, group] = plain_linear(x[:, :, group], w)
    return y


@jit
def widen_e2m1(w, BN: tl.constexpr):
    """Words of eight e2m1 codes [BN, 16] -> e4m3 [BN, 128], each exactly its value * 2^-6.

    e2m1 is seem and e4m3 seeeemmm: the bits eem fit in the middle of eeeemmm, subnormals included. First four
    codes at a time in 32-bit lanes, then the bytes are put in order; byte by byte it takes far more steps."""
    low = ((w & 0x07070707) << 2) | ((w & 0x08080808) << 4)         # codes 0, 2, 4, 6
    high = ((w >> 2) & 0x1C1C1C1C) | (w & -0x7F7F7F80)              # codes 1, 3, 5, 7
    pair = tl.join(low, high)                                       # [BN, 16, 2 (a code's bit 0)]
    pair = tl.join(pair, pair >> 16)                                # [.., 2 (bit 0), 2 (bit 2)]
    pair = tl.join(pair, pair >> 8)                                 # [.., 2 (bit 0), 2 (bit 2), 2 (bit 1)]
    codes = tl.permute(pair, (0, 1, 3, 4, 2))
    return tl.reshape(codes, (BN, 128)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@jit
def product(a_ptr, as_ptr, row, there, b_ptr, bs_ptr, n, N, K, first, last, BN: tl.constexpr,
            FORMAT: tl.constexpr):
    """A[row] @ B[n : n + BN]^T over blocks first..last of 128 columns, scales applied: fp32 [BM, BN].

    B's FORMAT: "e4m3", with a scale per 128 x 128; or e2m1, with one per 32 columns, which tl.dot_scaled
    applies: "bytes" of two codes, for few rows, or "words" of eight that are widened to e4m3 first."""
    BM: tl.constexpr = row.shape[0]
    WIDTH: tl.constexpr = 128 if FORMAT == "e4m3" else 64 if FORMAT == "bytes" else 16
    col = n + tl.arange(0, BN)
    blocks = K // 128
    a_ptr += row[:, None].to(tl.int64) * K + tl.arange(0, 128)
    as_ptr += row * blocks
    b_ptr += col[:, None].to(tl.int64) * (blocks * WIDTH) + tl.arange(0, WIDTH)
    if FORMAT == "e4m3":
        bs_ptr += n // 128 * blocks                         # BN divides 128: one row of scales for the tile
    else:
        bs_ptr += col[:, None] * (blocks * 4) + tl.arange(0, 4)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(first, last):
        a = tl.load(a_ptr + i * 128, mask=there[:, None], other=0.0)                    # [BM, 128]
        b = tl.load(b_ptr + i * WIDTH, mask=col[:, None] < N, other=0.0)                # [BN, WIDTH]
        if FORMAT == "e4m3":
            s = load_scale(as_ptr + i, there) * load_scale(bs_ptr + i, True)
            acc += dot(a, tl.trans(b)) * s[:, None]
        else:
            b_s = tl.load(bs_ptr + i * 4, mask=col[:, None] < N, other=0)               # [BN, 4]
            if FORMAT == "bytes":
                s = load_scale(as_ptr + i, there)
                acc += tl.dot_scaled(a, None, "e4m3", tl.trans(b), b_s, "e2m1") * s[:, None]
            else:
                same = tl.arange(0, 4) * 0                  # a's scale of 128 columns serves as four of 32
                a_s = tl.load(as_ptr[:, None] + i + same, mask=there[:, None], other=0)     # [BM, 4]
                acc += tl.dot_scaled(a, a_s, "e4m3", tl.trans(widen_e2m1(b, BN)), b_s, "e4m3")
    if FORMAT == "words":
        acc *= 64.0                                         # widen_e2m1's 2^-6
    return acc


@jit
def gemm_tile(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, SPLIT, BM: tl.constexpr, BN: tl.constexpr,
              FORMAT: tl.constexpr):
    """A tile [BM, BN] of C, over SPLIT of the K / 128 blocks; each split writes a C of its own."""
    row, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN
    first = tl.program_id(2) * SPLIT
    last = tl.minimum(first + SPLIT, K // 128)
    acc = product(a_ptr, as_ptr, row, row < M, b_ptr, bs_ptr, n, N, K, first, last, BN, FORMAT)
    col = n + tl.arange(0, BN)
    c_ptr += (tl.program_id(2) * M + row[:, None]).to(tl.int64) * N + col
    tl.store(c_ptr, cast(acc, c_ptr.dtype.element_ty), mask=(row[:, None] < M) & (col < N))


@jit
def split_sum_kernel(p_ptr, c_ptr, SIZE, SPLITS, TILE: tl.constexpr):
    """C = the sum of SPLITS partial results of SIZE numbers each, always in the same order."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE,), tl.float32)
    for split in range(SPLITS):
        acc += tl.load(p_ptr + split * SIZE.to(tl.int64) + i, mask=i < SIZE, other=0.0)
    tl.store(c_ptr + i, cast(acc, c_ptr.dtype.element_ty), mask=i < SIZE)


def launch_gemm(kernel, a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, n: int,
                small: tuple, large: tuple, **meta) -> torch.Tensor:
    """C [..., n] by tiles (BM, BN, warps, stages): `large` ones for a prompt, `small` ones for a few tokens.

    With a few tokens the time goes into reading b, which needs all processors: where n gives too few tiles, K
    is split, too, and a second kernel adds the partial sums."""
    assert a.is_contiguous() and b.is_contiguous(), "a GEMM needs contiguous matrices"
    k = a.size(-1)
    assert k % WEIGHT_BLOCK == 0, f"K is {k}, no multiple of {WEIGHT_BLOCK}"
    m, blocks = a.numel() // k, k // WEIGHT_BLOCK
    bm, bn, warps, stages = small if m <= SMALL_M else large
    tiles = -(-m // bm) * -(-n // bn)
    split = blocks
    if m <= SMALL_M and tiles < processors(a.device):
        split = min(max(blocks * tiles // processors(a.device), SPLIT_BLOCKS), blocks)
    splits = -(-blocks // split)
    c = a.new_empty(*a.shape[:-1], n, dtype=torch.get_default_dtype())
    out = c if splits == 1 else a.new_empty(splits, m, n, dtype=torch.float32)
    launch(kernel, (-(-m // bm), -(-n // bn), splits), a, raw_scale(a_s), b, raw_scale(b_s), out, m, n, k,
           split, bm, bn, num_warps=warps, num_stages=stages, **meta)
    if splits > 1:
        launch(split_sum_kernel, (-(-m * n // 1024),), out, c, m * n, splits, 1024)
    return c


@jit
def fp8_gemm_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, SPLIT, BM: tl.constexpr, BN: tl.constexpr):
    """Programs: M / BM, N / BN, splits of K."""
    gemm_tile(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, SPLIT, BM, BN, "e4m3")


def fp8_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """C[..., n] = A[..., k] @ B[n, k]^T, both e4m3: fp32 sum over blocks of (A_blk @ B_blk^T) * a_s * b_s.

    a_s is [..., k/128], b_s [n/128, k/128]. Returns torch's default dtype, as the vendor's does."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn, f"fp8_gemm multiplies e4m3, not {a.dtype} by {b.dtype}"
    if a.device.type != TRITON_DEVICE:
        return fp8_gemm_ref(a, a_s, b, b_s)
    return launch_gemm(fp8_gemm_kernel, a, a_s, b, b_s, b.size(0), (16, 32, 4, 4), (64, 128, 8, 3))


def fp8_gemm_ref(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor) -> torch.Tensor:
    return _scaled_gemm(a, a_s, b, b_s)


@jit
def fp4_gemm_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, SPLIT, BM: tl.constexpr, BN: tl.constexpr,
                    FORMAT: tl.constexpr):
    """Programs: M / BM, N / BN, splits of K."""
    gemm_tile(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, SPLIT, BM, BN, FORMAT)


def fp4_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same for A e4m3 with a scale per 128 and B packed e2m1 [n, k/2] with one per row and 32 columns."""
    assert a.dtype == torch.float8_e4m3fn and b.dtype == torch.float4_e2m1fn_x2, (
        f"fp4_gemm multiplies e4m3 by packed e2m1, not {a.dtype} by {b.dtype}")
    if a.device.type != TRITON_DEVICE:
        return fp4_gemm_ref(a, a_s, b, b_s)
    assert b_s.dtype == torch.float8_e8m0fnu, f"scales of e2m1 are e8m0, not {b_s.dtype}"
    form = fp4_format(a.numel() // a.size(-1), a_s)
    b = b.view(torch.uint8) if form == "bytes" else b.view(torch.uint8).view(torch.int32)
    large = (64, 128, 8, 3) if form == "words" else (32, 128, 8, 3)     # "bytes" takes more registers
    return launch_gemm(fp4_gemm_kernel, a, a_s, b, b_s, b.size(0), (16, 32, 4, 4), large, FORMAT=form)


def fp4_format(m: int, a_s: torch.Tensor) -> str:
    """How `product` reads e2m1: widening pays for many rows, and needs e8m0 scales on both sides."""
    return "words" if m > SMALL_M and a_s.dtype == torch.float8_e8m0fnu else "bytes"


def fp4_gemm_ref(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor) -> torch.Tensor:
    return _scaled_gemm(a, a_s, b, b_s)


# ==========================================================================================================
# The routed experts of a layer
# ==========================================================================================================

@jit
def expert_rows(tile_ptr, order_ptr, first_expert, BM: tl.constexpr, SORTED: tl.constexpr):
    """This program's expert, counted from the first local one, and its picks (token * topk + place) [BM].

    SORTED: a table says whose each tile is, and which part of `order` it takes. Else each pick is a tile."""
    tile, i = tl.program_id(0), tl.arange(0, BM)
    if SORTED:
        expert = tl.load(tile_ptr + tile * 3)
        place, end = tl.load(tile_ptr + tile * 3 + 1) + i, tl.load(tile_ptr + tile * 3 + 2)
        there = place < end
        pick = tl.load(order_ptr + place, mask=there, other=0)
    else:
        expert = tl.load(tile_ptr + tile) - first_expert
        there = i == 0
        pick = tile.to(tl.int64) + i * 0
    return expert, pick, there


@jit
def expert_product(a_ptr, as_ptr, row, there, table_ptr, n, N, K, BN: tl.constexpr, FORMAT: tl.constexpr):
    """product with a weight that lies, as its scales do, at an address of the table."""
    b_ptr, bs_ptr = tl.load(table_ptr), tl.load(table_ptr + 1)
    if FORMAT == "e4m3":
        b_ptr = b_ptr.to(tl.pointer_type(tl.float8e4nv))
    elif FORMAT == "bytes":
        b_ptr = b_ptr.to(tl.pointer_type(tl.uint8))
    else:
        b_ptr = b_ptr.to(tl.pointer_type(tl.int32))
    b_ptr, bs_ptr = tl.multiple_of(b_ptr, 16), tl.multiple_of(bs_ptr.to(tl.pointer_type(tl.uint8)), 16)
    return product(a_ptr, as_ptr, row, there, b_ptr, bs_ptr, n, N, K, 0, K // 128, BN, FORMAT)


@jit
def experts_up_kernel(x_ptr, xs_ptr, weight_ptr, table_ptr, tile_ptr, order_ptr, y_ptr, first_expert, experts,
                      limit, N, K, TOPK, BM: tl.constexpr, BN: tl.constexpr, FORMAT: tl.constexpr,
                      SORTED: tl.constexpr):
    """y[pick] = weight * silu(min(w1 x, limit)) * clamp(w3 x, limit); programs: tiles, N / BN."""
    expert, pick, there = expert_rows(tile_ptr, order_ptr, first_expert, BM, SORTED)
    if (expert < 0) | (expert >= experts):
        return      # an expert of another rank, or no tile
    n = tl.program_id(1) * BN
    table_ptr += expert * 6
    gate = expert_product(x_ptr, xs_ptr, pick // TOPK, there, table_ptr, n, N, K, BN, FORMAT)
    up = expert_product(x_ptr, xs_ptr, pick // TOPK, there, table_ptr + 4, n, N, K, BN, FORMAT)
    # rounded as the products of a Linear are
    gate = cast(gate, y_ptr.dtype.element_ty).to(tl.float32)
    up = cast(up, y_ptr.dtype.element_ty).to(tl.float32)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))     # a NaN stays one
    gate = tl.where(gate > limit, limit, gate)
    y = tl.load(weight_ptr + pick, mask=there, other=0.0)[:, None] * (gate * tl.sigmoid(gate) * up)
    col = n + tl.arange(0, BN)
    y_ptr += pick[:, None].to(tl.int64) * N + col
    tl.store(y_ptr, cast(y, y_ptr.dtype.element_ty), mask=there[:, None] & (col < N))


@jit
def experts_down_kernel(y_ptr, ys_ptr, table_ptr, tile_ptr, order_ptr, o_ptr, first_expert, experts, N, K,
                        BM: tl.constexpr, BN: tl.constexpr, FORMAT: tl.constexpr, SORTED: tl.constexpr):
    """o[pick] = w2 y[pick]; programs: tiles, N / BN."""
    expert, pick, there = expert_rows(tile_ptr, order_ptr, first_expert, BM, SORTED)
    if (expert < 0) | (expert >= experts):
        return
    n = tl.program_id(1) * BN
    acc = expert_product(y_ptr, ys_ptr, pick, there, table_ptr + expert * 6 + 2, n, N, K, BN, FORMAT)
    col = n + tl.arange(0, BN)
    o_ptr += pick[:, None].to(tl.int64) * N + col
    tl.store(o_ptr, cast(acc, o_ptr.dtype.element_ty), mask=there[:, None] & (col < N))


class ExpertTable(NamedTuple):
    """Where the local experts' w1, w2, w3 and their scales lie on the device."""
    addresses: torch.Tensor     # [local experts, 6] int64
    tensors: list               # what lies there; it must not be freed
    first: int                  # id of the first local expert
    packed: bool                # e2m1, else e4m3
    shape: tuple                # of w1: moe_inter_dim, dim
    swiglu_limit: float


def expert_table(experts: list, device) -> Optional[ExpertTable]:
    """The table for routed_experts; experts: modules with w1, w2, w3, None where another rank has them.

    None where the kernels can't run: another device, or weights that are not quantised with e8m0 scales."""
    if torch.device(device).type != TRITON_DEVICE:
        return None
    local = [(i, e) for i, e in enumerate(experts) if e is not None]
    linears = [w for _, e in local for w in (e.w1, e.w2, e.w3)]
    if any(w.scale is None or w.scale.dtype != torch.float8_e8m0fnu for w in linears):
        return None
    tensors = [t for w in linears for t in (w.weight, w.scale)]
    for t in tensors:   # a GPU reads 16 bytes at a time; a CPU's weights may lie anywhere in a mapped file
        assert t.is_contiguous() and (t.data_ptr() % 16 == 0 or not t.is_cuda), "a weight at an odd address"
    addresses = torch.tensor([t.data_ptr() for t in tensors], device=device).view(-1, 6)
    (first, expert), w1 = local[0], linears[0]
    return ExpertTable(addresses, tensors, first, w1.weight.dtype == torch.float4_e2m1fn_x2,
                       (w1.out_features, w1.in_features), expert.swiglu_limit)


def expert_tiles(indices: torch.Tensor, first: int, experts: int, bm: int):
    """Tiles of up to bm picks of one expert: (expert, begin, end) [tiles, 3], and the picks sorted by expert.

    Nothing waits for the GPU: there are as many tiles as may be needed, the last ones empty, of no expert."""
    expert, order = indices.flatten().sort(stable=True)
    bounds = torch.searchsorted(expert, torch.arange(first, first + experts + 1, device=indices.device))
    ends = ((bounds.diff() + bm - 1) // bm).cumsum(0)                   # tiles up to each expert's last
    tile = torch.arange(indices.numel() // bm + experts, device=indices.device)
    owner = torch.searchsorted(ends, tile, right=True)                  # [tiles], `experts` for empty ones
    before = F.pad(ends, (1, 0))[owner]
    begin = bounds[owner] + (tile - before) * bm
    end = torch.minimum(begin + bm, F.pad(bounds, (0, 1))[owner + 1])
    return torch.stack([owner, begin, end], dim=1), order


def routed_experts(x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, table: ExpertTable,
                   scale_fmt: Optional[str]) -> torch.Tensor:
    """y[n] = sum over the token's local experts of w2(weight * silu(min(w1 x, limit)) * clamp(w3 x, limit)).

    x [n,dim], weights and indices [n,topk] -> fp32 [n,dim]. All of a layer's experts go together: a launch
    for w1 and w3 and one for w2, however tokens are spread. In place of an x_ref: the loop in MoE.forward."""
    (n, topk), (inter, dim), experts = indices.shape, table.shape, table.addresses.size(0)
    bm, bn, warps, stages = (16, 64, 4, 4)      # few picks: each is a tile, nothing needs sorting
    tiles = order = indices.contiguous()
    count = n * topk
    is_sorted = count > SMALL_M
    if is_sorted:
        bm, bn, warps, stages = (32, 128, 8, 3)
        tiles, order = expert_tiles(indices, table.first, experts, bm)
        count = tiles.size(0)
    scale_dtype = torch.float32 if scale_fmt is None else torch.float8_e8m0fnu
    dtype = torch.get_default_dtype()
    x, s = act_quant(x, WEIGHT_BLOCK, scale_fmt, scale_dtype)
    meta = dict(BM=bm, BN=bn, SORTED=is_sorted, num_warps=warps, num_stages=stages,
                FORMAT=fp4_format(n * topk, s) if table.packed else "e4m3")
    y = x.new_empty(n * topk, inter, dtype=dtype)
    limit = table.swiglu_limit if table.swiglu_limit > 0 else float("inf")
    launch(experts_up_kernel, (count, -(-inter // bn)), x, raw_scale(s), weights, table.addresses, tiles,
           order, y, table.first, experts, limit, inter, dim, topk, **meta)
    y, s = act_quant(y, WEIGHT_BLOCK, scale_fmt, scale_dtype)
    o = x.new_zeros(n, topk, dim, dtype=dtype)      # picks of other ranks' experts stay 0
    launch(experts_down_kernel, (count, -(-dim // bn)), y, raw_scale(s), table.addresses, tiles, order, o,
           table.first, experts, dim, inter, **meta)
    return o.sum(dim=1, dtype=torch.float32)


# ==========================================================================================================
# Attention over chosen rows, and the score that chooses them
# ==========================================================================================================

@jit
def attend(q, kv_ptr, kv_stride, idx_ptr, first, last, scale, D: tl.constexpr, BI: tl.constexpr):
    """One query's heads q [BH, BD] over the rows idx[first:last]: the softmax's parts before the division.

    Returns sum_i p_i kv_i [BH, BD], the scores' maximum t [BH], and sum_i p_i [BH]; p_i = exp(s_i - t)."""
    j, d = tl.arange(0, BI), tl.arange(0, q.shape[1])
    acc = tl.zeros(q.shape, tl.float32)
    top = tl.full((q.shape[0],), -1e30, tl.float32)         # finite: exp(-inf - top) is 0 and not NaN
    total = tl.zeros((q.shape[0],), tl.float32)
    idx = tl.load(idx_ptr + first + j, mask=first + j < last, other=-1)
    for i in range(first, last, BI):
        ahead = i + BI + j      # the next indices come along: their rows' addresses must not wait for them
        next_idx = tl.load(idx_ptr + ahead, mask=ahead < last, other=-1)
        chosen = idx >= 0
        kv_at = idx[:, None].to(tl.int64) * kv_stride + d
        kv = tl.load(kv_ptr + kv_at, mask=chosen[:, None] & (d < D), other=0.0)         # [BI, BD]
        s = tl.where(chosen, dot(q, tl.trans(kv)) * scale, float("-inf"))               # [BH, BI]
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp(s - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + dot(cast(p, q.dtype), kv)
        top = new_top
        idx = next_idx
    return acc, top, total


@jit
def sparse_attn_kernel(q_ptr, kv_ptr, sink_ptr, idx_ptr, o_ptr, M, TOPK, kv_batch, kv_stride, scale,
                       H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
                       BI: tl.constexpr):
    """BH heads of one query over all of its rows; programs: b * m, heads / BH."""
    query = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    at = (query * H + h[:, None]) * D + d
    there = (h[:, None] < H) & (d < D)
    q = tl.load(q_ptr + at, mask=there, other=0.0)
    acc, top, total = attend(q, kv_ptr + query // M * kv_batch, kv_stride, idx_ptr + query * TOPK, 0, TOPK,
                             scale, D, BI)
    total += tl.exp(tl.load(sink_ptr + h, mask=h < H, other=0.0) - top)
    total = tl.maximum(total, 1.0)      # it is: the largest weight is 1; but where no row is attended o is 0
    tl.store(o_ptr + at, cast(acc / total[:, None], o_ptr.dtype.element_ty), mask=there)


@jit
def sparse_attn_split_kernel(q_ptr, kv_ptr, idx_ptr, acc_ptr, top_ptr, total_ptr, M, TOPK, SPLIT, kv_batch,
                             kv_stride, scale, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr,
                             BD: tl.constexpr, BI: tl.constexpr):
    """The same over SPLIT of the rows, leaving attend's parts; programs: b * m, heads / BH, splits."""
    query = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    there = (h[:, None] < H) & (d < D)
    q = tl.load(q_ptr + (query * H + h[:, None]) * D + d, mask=there, other=0.0)
    first = tl.program_id(2) * SPLIT
    acc, top, total = attend(q, kv_ptr + query // M * kv_batch, kv_stride, idx_ptr + query * TOPK, first,
                             tl.minimum(first + SPLIT, TOPK), scale, D, BI)
    part = (query * tl.num_programs(2) + tl.program_id(2)) * H + h      # [b * m, splits, h]
    tl.store(acc_ptr + part[:, None] * D + d, acc, mask=there)
    tl.store(top_ptr + part, top, mask=h < H)
    tl.store(total_ptr + part, total, mask=h < H)


@jit
def sparse_attn_combine_kernel(acc_ptr, top_ptr, total_ptr, sink_ptr, o_ptr, SPLITS, H: tl.constexpr,
                               D: tl.constexpr, BD: tl.constexpr):
    """One head of one query: the splits brought to one maximum, added, and divided once, with the sink."""
    query, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BD)
    top = -1e30
    for split in range(SPLITS):
        top = tl.maximum(top, tl.load(top_ptr + (query * SPLITS + split) * H + h))
    acc = tl.zeros((BD,), tl.float32)
    total = tl.exp(tl.load(sink_ptr + h) - top)
    for split in range(SPLITS):
        part = (query * SPLITS + split) * H + h
        share = tl.exp(tl.load(top_ptr + part) - top)
        total += share * tl.load(total_ptr + part)
        acc += share * tl.load(acc_ptr + part * D + d, mask=d < D, other=0.0)
    total = tl.maximum(total, 1.0)
    tl.store(o_ptr + (query * H + h) * D + d, cast(acc / total, o_ptr.dtype.element_ty), mask=d < D)


def sparse_attn(
    q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, topk_idxs: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Each query attends the kv rows that its indices name (-1: none); k = v, one KV head for all heads of q.

    o = sum_i exp(s_i) kv_i / (sum_i exp(s_i) + exp(attn_sink)), s_i = softmax_scale * q . kv_i
    q [b,m,h,d], kv [b,n,d], attn_sink [h] fp32, topk_idxs [b,m,topk] int -> o [b,m,h,d]."""
    if q.device.type != TRITON_DEVICE or q.dtype != torch.bfloat16:
        return sparse_attn_ref(q, kv, attn_sink, topk_idxs, softmax_scale)
    assert kv.dtype == q.dtype and kv.stride(-1) == 1, f"kv is {kv.dtype}, its last stride {kv.stride(-1)}"
    q, topk_idxs = q.contiguous(), topk_idxs.contiguous()
    b, m, h, d = q.shape
    topk = topk_idxs.size(-1)
    o = torch.empty_like(q)
    meta = dict(H=h, D=d, BD=max(triton.next_power_of_2(d), 16), BI=32, num_warps=8, num_stages=2)
    tiles = b * m * -(-h // 16)
    splits = min(processors(q.device) // max(tiles, 1), -(-topk // SPLIT_KEYS))
    if splits <= 1:
        bh = 16 if h <= 16 else 32
        launch(sparse_attn_kernel, (b * m, -(-h // bh)), q, kv, attn_sink, topk_idxs, o, m, topk,
               kv.stride(0), kv.stride(1), softmax_scale, BH=bh, **meta)
        return o
    split = -(-topk // splits)
    splits = -(-topk // split)
    acc = q.new_empty(b * m, splits, h, d, dtype=torch.float32)
    top, total = q.new_empty(2, b * m, splits, h, dtype=torch.float32)
    launch(sparse_attn_split_kernel, (b * m, -(-h // 16), splits), q, kv, topk_idxs, acc, top, total, m, topk,
           split, kv.stride(0), kv.stride(1), softmax_scale, BH=16, **meta)
    launch(sparse_attn_combine_kernel, (b * m, h), acc, top, total, attn_sink, o, splits, h, d, meta["BD"])
    return o


def sparse_attn_ref(
    q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, topk_idxs: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    b, m, h, d = q.shape
    n, topk = kv.size(1), topk_idxs.size(-1)
    o = torch.zeros_like(q)
    if 0 in (b, m, h, n, topk):
        return o
    # A tile of t queries scores the union of their rows. That pays where they share most of them, so where n
    # is small. A power of two: see round_up.
    t = max(SCORE_TILE // (h * n), SCORE_ROWS // h, 1)
    t = 1 << (t.bit_length() - 1)
    for i in range(b):
        for j in range(0, m, t):
            o[i, j:j + t] = _attend(q[i, j:j + t], kv[i], attn_sink, topk_idxs[i, j:j + t], softmax_scale)
    return o


def named_rows(idxs: torch.Tensor, n: int):
    """Rows of n that a tile's indices [t,topk] name: rows [u]; and what is added to their scores [t,1,u]."""
    if len(idxs) == 1:      # one query: its rows as they stand, one that is named twice comes twice
        rows = idxs[0][idxs[0] >= 0]                                    # [u]
        seen = torch.zeros(1, len(rows), device=idxs.device)            # [t,u]
    else:       # how often a query names a row; -1 counts in a column of its own
        count = torch.zeros(len(idxs), 1 + n, device=idxs.device)       # [t,1+n]
        count.scatter_add_(1, idxs.long() + 1, count.new_ones(idxs.shape))
        rows = count[:, 1:].any(dim=0).nonzero()[:, 0]                  # [u]
        # the logarithm is -inf for never, 0 for once, and serves repeated indices
        seen = count[:, rows + 1].log_()                                # [t,u]
    if len(rows):
        more = round_up(len(rows)) - len(rows)      # copies of a row, attended by none
        rows, seen = F.pad(rows, (0, more), value=int(rows[0])), F.pad(seen, (0, more), value=-torch.inf)
    return rows, seen.unsqueeze(1)


def _attend(q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, idxs: torch.Tensor, scale: float):
    """sparse_attn for a tile of queries [t,h,d] of one sequence: a product with the union of their rows."""
    rows, seen = named_rows(idxs, len(kv))
    if len(rows) == 0:
        return torch.zeros_like(q)
    kv = kv[rows]                                                       # [u,d]
    s = torch.add(seen, wide_matmul(q, kv.T), alpha=scale)              # [t,h,u]
    s_max = s.amax(dim=-1, keepdim=True).clamp(min=-1e30)               # finite where no row is attended
    p = s.sub_(s_max).exp_()
    total = p.sum(dim=-1, keepdim=True) + torch.exp(attn_sink.unsqueeze(-1) - s_max)
    total = total.clamp_(min=1)         # it is: the largest weight is 1; but where no row is attended o is 0
    return (wide_matmul(p.to(q.dtype), kv) / total).to(q.dtype)         # [t,h,d]


@jit
def index_score_kernel(q_ptr, k_ptr, w_ptr, visible_ptr, o_ptr, M, ROWS, k_batch, k_stride, H: tl.constexpr,
                       D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
                       BQ: tl.constexpr):
    """BR rows for BQ queries in turn; programs: rows / BR, m / BQ, b. The keys stay, the queries pass."""
    row, h, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BH), tl.arange(0, BD)
    batch, first = tl.program_id(2).to(tl.int64), tl.program_id(1) * BQ
    k_at = batch * k_batch + row[:, None].to(tl.int64) * k_stride + d
    k = tl.load(k_ptr + k_at, mask=(row[:, None] < ROWS) & (d < D), other=0.0)          # [BR, BD]
    for i in range(first, tl.minimum(first + BQ, M)):
        query = batch * M + i
        there = (h[:, None] < H) & (d < D)
        q = tl.load(q_ptr + (query * H + h[:, None]) * D + d, mask=there, other=0.0)    # [BH, BD]
        w = tl.load(w_ptr + query * H + h, mask=h < H, other=0.0).to(tl.float32)
        score = dot(k, tl.trans(q))                                                     # [BR, BH]
        score = tl.sum(tl.where(score < 0, 0.0, score) * w, axis=1)                     # [BR]
        score = tl.where(row < tl.load(visible_ptr + i), score, float("-inf"))
        tl.store(o_ptr + query * ROWS + row, cast(score, o_ptr.dtype.element_ty), mask=row < ROWS)


def index_score(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """score[r] = sum over heads of weights[h] * relu(q[h] . k[r]); -inf for rows that a query may not see.

    q [b,m,h,d], k [b,r,d], weights [b,m,h], visible [m,1]: how many rows it sees -> [b,m,r] in q's dtype."""
    if q.device.type != TRITON_DEVICE or q.dtype != torch.bfloat16:
        return index_score_ref(q, k, weights, visible)
    assert k.dtype == q.dtype and k.stride(-1) == 1, f"k is {k.dtype}, its last stride {k.stride(-1)}"
    q, weights, visible = q.contiguous(), weights.contiguous(), visible.contiguous()
    b, m, h, d = q.shape
    rows = k.size(1)
    o = q.new_empty(b, m, rows)
    launch(index_score_kernel, (-(-rows // 64), -(-m // 16), b), q, k, weights, visible, o, m, rows,
           k.stride(0), k.stride(1), h, d, max(triton.next_power_of_2(h), 16),
           max(triton.next_power_of_2(d), 16), 64, 16)
    return o


def index_score_ref(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    (b, m, h, _), rows = q.shape, k.size(1)
    scores = q.new_empty(b, m, rows)
    tile = max(INDEX_HEADS_TILE // (b * h * INDEX_ROWS), 1)
    for i in range(0, rows, INDEX_ROWS):
        block = k[:, i:i + INDEX_ROWS]
        n = block.size(1)
        block = F.pad(block, (0, 0, 0, round_up(n) - n)).transpose(1, 2)                # [b,d,n]
        seen = torch.arange(i, i + n, device=q.device) < visible                        # [m,n]
        for j in range(0, m, tile):
            here = slice(j, j + tile)
            score = torch.matmul(q[:, here].flatten(1, 2), block)[..., :n].unflatten(1, (-1, h))
            score = torch.matmul(weights[:, here].unsqueeze(2), score.relu_()).squeeze(2)       # [b,tile,n]
            scores[:, here, i:i + n] = score.masked_fill_(~seen[here], -torch.inf)
    return scores


# ==========================================================================================================
# Hyper-connections and the Hadamard rotation
# ==========================================================================================================

@jit
def hc_split_sinkhorn_kernel(mixes_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, M, eps,
                             HC: tl.constexpr, ITERS: tl.constexpr, TILE: tl.constexpr):
    """A program takes TILE tokens through all iterations, comb [TILE, HC, HC] in registers."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, there = token.to(tl.int64), token < M
    j = tl.arange(0, HC)
    mixes_ptr += token[:, None] * ((2 + HC) * HC)
    x = tl.load(mixes_ptr + j, mask=there[:, None], other=0.0)                          # [TILE, HC]
    pre = tl.sigmoid(x * tl.load(scale_ptr) + tl.load(base_ptr + j)) + eps
    x = tl.load(mixes_ptr + HC + j, mask=there[:, None], other=0.0)
    post = 2 * tl.sigmoid(x * tl.load(scale_ptr + 1) + tl.load(base_ptr + HC + j))
    tl.store(pre_ptr + token[:, None] * HC + j, pre, mask=there[:, None])
    tl.store(post_ptr + token[:, None] * HC + j, post, mask=there[:, None])

    jk = j[None, :, None] * HC + j[None, None, :]                                       # [1, HC, HC]
    x = tl.load(mixes_ptr[:, :, None] + 2 * HC + jk, mask=there[:, None, None], other=0.0)
    x = x * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * HC + jk)                    # [TILE, HC, HC]
    comb = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + eps
    comb = comb / (tl.sum(comb, axis=1)[:, None, :] + eps)
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, axis=2)[:, :, None] + eps)
        comb = comb / (tl.sum(comb, axis=1)[:, None, :] + eps)
    tl.store(comb_ptr + token[:, None, None] * (HC * HC) + jk, comb, mask=there[:, None, None])


def hc_split_sinkhorn(
    mixes: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, hc_mult: int = 4,
    sinkhorn_iters: int = 20, eps: float = 1e-6,
):
    """Splits mixes [b,s,(2+hc)*hc] into pre and post [b,s,hc] and comb [b,s,hc,hc], fp32.

    Of m * scale + base: pre = sigmoid(.) + eps, post = 2 sigmoid(.), comb = softmax(.) + eps over its last
    dim, then Sinkhorn: columns, (rows, columns) * (iters - 1) times, each divided by (its sum + eps)."""
    if mixes.device.type != TRITON_DEVICE:
        return hc_split_sinkhorn_ref(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)
    assert mixes.dtype == torch.float32 and mixes.is_contiguous(), "mixes must be contiguous fp32"
    b, s, _ = mixes.shape
    hc = hc_mult
    pre, post, comb = mixes.new_empty(b, s, hc), mixes.new_empty(b, s, hc), mixes.new_empty(b, s, hc, hc)
    launch(hc_split_sinkhorn_kernel, (-(-b * s // 8),), mixes, hc_scale, hc_base, pre, post, comb, b * s, eps,
           hc, sinkhorn_iters, 8, num_warps=1)
    return pre, post, comb


def hc_split_sinkhorn_ref(
    mixes: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, hc_mult: int = 4,
    sinkhorn_iters: int = 20, eps: float = 1e-6,
):
    b, s, _ = mixes.shape
    hc = hc_mult
    pre = torch.sigmoid(mixes[..., :hc] * hc_scale[0] + hc_base[:hc]) + eps
    post = 2 * torch.sigmoid(mixes[..., hc:2 * hc] * hc_scale[1] + hc_base[hc:2 * hc])
    comb = mixes[..., 2 * hc:] * hc_scale[2] + hc_base[2 * hc:]         # [b,s,hc*hc]
    comb = comb.unflatten(-1, (hc, hc)).softmax(dim=-1) + eps           # [b,s,hc,hc]
    sinkhorn = sinkhorn_of_one if b * s == 1 and eps > 0 else sinkhorn_of_many
    return pre, post, sinkhorn(comb.view(b * s, hc, hc), sinkhorn_iters, eps).view(b, s, hc, hc)


def sinkhorn_of_many(comb: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """comb [n,hc,hc]: columns, then (rows, columns) * (iters - 1) times, each divided by (its sum + eps)."""
    # tokens last: each of the many small sums then runs over whole vectors
    comb = comb.permute(1, 2, 0).contiguous()                           # [hc,hc,n]
    eps = comb.new_tensor(eps)                                          # a tensor: not converted at each step
    comb /= comb.sum(dim=0, keepdim=True) + eps
    for _ in range(iters - 1):
        comb /= comb.sum(dim=1, keepdim=True) + eps
        comb /= comb.sum(dim=0, keepdim=True) + eps
    return comb.permute(2, 0, 1).contiguous()                           # [n,hc,hc]


def sinkhorn_of_one(comb: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """The same for comb [1,hc,hc] in plain Python, which takes half the time of torch for 16 numbers."""
    rows = comb[0].tolist()
    for _ in range(2 * iters - 1):
        columns = zip(*rows)
        rows = [[x / total for x in column] for column in columns for total in [sum(column) + eps]]
    return comb.new_tensor([list(zip(*rows))])      # an odd number of steps, each of which turns it round


@lru_cache
def hadamard_matrix(n: int, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix [n,n] of +1 and -1: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    assert n & (n - 1) == 0, f"a Hadamard transform needs a power of two, not {n}"
    h = torch.ones(1, 1, dtype=torch.float32, device=device)
    while h.size(0) < n:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h


@jit
def hadamard_transform_kernel(x_ptr, y_ptr, ROWS, x_stride, scale, N: tl.constexpr, LOG: tl.constexpr,
                              TILE: tl.constexpr):
    """TILE rows, LOG = log2 N butterflies: each pairs neighbours and puts the sums before the differences."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = row[:, None] < ROWS
    row, n = row[:, None].to(tl.int64), tl.arange(0, N)
    x = tl.load(x_ptr + row * x_stride + n, mask=there, other=0.0).to(tl.float32)       # [TILE, N]
    for _ in tl.static_range(LOG):
        a, b = tl.split(tl.reshape(x, (TILE, N // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (TILE, N))
    tl.store(y_ptr + row * N + n, cast(x * scale, y_ptr.dtype.element_ty), mask=there)


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale * H x over the last dim, in fp32, returned in x's dtype."""
    if x.device.type != TRITON_DEVICE:
        return hadamard_transform_ref(x, scale)
    n = x.size(-1)
    assert n & (n - 1) == 0, f"a Hadamard transform needs a power of two, not {n}"
    rows, y = as_rows(x), x.new_empty(x.shape)
    launch(hadamard_transform_kernel, (-(-rows.size(0) // 8),), rows, y, rows.size(0), rows.stride(0), scale,
           n, n.bit_length() - 1, 8)
    return y


def hadamard_transform_ref(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    h = hadamard_matrix(x.size(-1), x.device)
    return (F.linear(x.float(), h) * scale).to(x.dtype)
