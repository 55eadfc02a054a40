"""What the vendor writes as GPU kernels: rounding to FP8 and FP4, products of quantised matrices, attention
over chosen rows, Sinkhorn. Mirrors the vendor's kernel.py (TileLang, Pro release): same names, signatures and
results. Each function states its formula and computes it in torch, in fp32, on any device.

It is a drop-in: the vendor's unchanged model.py runs over this file. Deliberate differences from the vendor:
- act_quant takes any float dtype (the vendor: bf16 only); in place it returns that dtype.
- act_quant(inplace=True) rounds through FP8, as Pro does; the first Flash release: through bf16 only.
- A GEMM takes activation and weight scales of different dtypes: each is read in the dtype it has.
- sparse_attn rounds the softmax weights to q's dtype before P.V: bf16 as in the vendor; fp32 stays exact. It
  rounds exp(s - final max); the vendor rounds exp(s - running max) in blocks of 64 keys.
- sparse_attn gives 0 for a query whose indices are all -1, where the vendor's running maximum gives NaN.
- A NaN makes its whole quantisation block NaN, so that it cannot vanish in a maximum.
- hadamard_transform stands here; the vendor imports fast_hadamard_transform.
- weight_dequant is added: the stored weight as plain numbers.
"""

from functools import lru_cache
from typing import Optional

import torch
import torch.nn.functional as F


FP8_MAX = 448.0                     # largest e4m3 number
FP4_MAX = 6.0                       # largest e2m1 number
FP32_MAX = torch.finfo(torch.float32).max
WEIGHT_BLOCK = 128                  # an FP8 weight has one scale per 128 x 128 block
FP4_BLOCK = 32                      # an FP4 weight has one scale per row and 32 columns
WEIGHT_TILE = 1 << 22               # weights that a GEMM holds dequantised at a time: 16 MiB of fp32
SCORE_TILE = 1 << 20                # scores that sparse_attn holds at a time

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)     # by code 0..7; code 8 + i is -E2M1[i]


def round_scale(amax: torch.Tensor, max_inv: float) -> torch.Tensor:
    """The smallest power of two >= amax * max_inv (vendor: fast_round_scale); log2 and exp2 are not exact."""
    bits = (amax * max_inv).view(torch.int32)
    scale = (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)       # any mantissa bit: one exponent more
    return torch.where(amax.isnan(), amax, scale)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: Optional[str] = None,
    scale_dtype: torch.dtype = torch.float32, inplace: bool = False,
):
    """FP8 rounding in blocks of the last dim: s = max(amax|x|, 1e-4) / 448, y = e4m3(clamp(x / s)).

    With a scale_fmt ("ue8m0") s is first rounded up to a power of two. Returns y [..., n], and s [..., n/block]
    in scale_dtype; inplace: writes y * s back into x, in x's dtype, and returns x."""
    assert x.size(-1) % block_size == 0, f"last dim {x.size(-1)} is no multiple of block_size {block_size}"
    blocks = x.unflatten(-1, (-1, block_size)).float()                  # [..., n/block, block]
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(1e-4, FP32_MAX)
    s = round_scale(amax, 1 / FP8_MAX) if scale_fmt is not None else amax * (1 / FP8_MAX)
    y = (blocks / s).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if inplace:
        return x.copy_((y.float() * s).flatten(-2))                     # [..., n]
    return y.flatten(-2), s.squeeze(-1).to(scale_dtype)                 # [..., n], [..., n/block]


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The e2m1 number nearest to fp32 x, |x| <= 6, ties to the even code: steps of 0.5 below 2, 1 below 4, then 2."""
    exponent = x.abs().clamp_(min=1).view(torch.int32) & 0x7F800000
    step = exponent.view(torch.float32) / 2                             # half the power of two at or below |x|
    return (x / step).round_().mul_(step)                               # an even multiple has an even code


def fp4_act_quant(x: torch.Tensor, block_size: int = 32, inplace: bool = False):
    """FP4 rounding in blocks of the last dim: s = 2^ceil(log2(amax|x| / 6)), y = e2m1(clamp(x / s)).

    Returns packed y [..., n/2], low nibble first, and s e8m0 [..., n/block]; inplace: writes y * s back into
    x, in x's dtype, and returns x."""
    assert x.size(-1) % block_size == 0, f"last dim {x.size(-1)} is no multiple of block_size {block_size}"
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


@lru_cache
def e2m1_pairs(device: torch.device) -> torch.Tensor:
    """The two numbers in each byte of packed e2m1, low nibble first: [256, 2] fp32."""
    values = torch.tensor(E2M1, dtype=torch.float32, device=device)
    values = torch.cat([values, -values])                               # [16]
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)


def weight_dequant(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A stored weight as fp32 [n,k]: e4m3, a scale per 128 x 128, or packed e2m1, one per row and 32."""
    scale = scale.float()
    if weight.dtype == torch.float4_e2m1fn_x2:
        w = e2m1_pairs(weight.device)[weight.view(torch.uint8).int()].flatten(-2)       # [n,k]
        return w.unflatten(-1, (-1, FP4_BLOCK)).mul_(scale.unsqueeze(-1)).flatten(-2)   # [n,k]
    n, k = weight.shape
    scale = scale.repeat_interleave(WEIGHT_BLOCK, dim=0)[:n].repeat_interleave(WEIGHT_BLOCK, dim=1)[:, :k]
    return weight.float().mul_(scale)


def _scaled_gemm(a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, rows: int):
    """(a * a_s) @ (b * b_s)^T, the weight dequantised tile by tile; `rows` rows of b share a row of b_s.

    Scales multiply the operands and not each block's sum: powers of two commute with rounding, so the
    products are those of the vendor's kernel, and only the order of their fp32 sum differs."""
    k, n = a.size(-1), b.size(0)
    blocks = a.float().unflatten(-1, (a_s.size(-1), -1))                # [..., k/block, block]
    a = (blocks * a_s.float().unsqueeze(-1)).flatten(-2)                # [..., k]
    c = a.new_empty(*a.shape[:-1], n, dtype=torch.get_default_dtype())
    step = max(WEIGHT_TILE // k // WEIGHT_BLOCK, 1) * WEIGHT_BLOCK
    for i in range(0, n, step):
        w = weight_dequant(b[i:i + step], b_s[i // rows:-(-min(i + step, n) // rows)])
        c[..., i:i + step] = F.linear(a, w)
    return c


def fp8_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """C[..., n] = A[..., k] @ B[n, k]^T of e4m3: the fp32 sum over blocks of (A_blk @ B_blk^T) * a_s * b_s.

    a_s is [..., k/128], b_s [n/128, k/128]. Returns torch's default dtype, as the vendor's does."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn, f"fp8_gemm multiplies e4m3, not {a.dtype} by {b.dtype}"
    return _scaled_gemm(a, a_s, b, b_s, WEIGHT_BLOCK)


def fp4_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same for A e4m3 with a scale per 128 and B packed e2m1 [n, k/2] with one per row and 32 columns."""
    assert a.dtype == torch.float8_e4m3fn and b.dtype == torch.float4_e2m1fn_x2, (
        f"fp4_gemm multiplies e4m3 by packed e2m1, not {a.dtype} by {b.dtype}")
    return _scaled_gemm(a, a_s, b, b_s, 1)


def sparse_attn(
    q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, topk_idxs: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Each query attends the kv rows that its indices name (-1: none); k = v, one KV head for all heads of q.

    o = sum_i exp(s_i) kv_i / (sum_i exp(s_i) + exp(attn_sink)), s_i = softmax_scale * q . kv_i
    q [b,m,h,d], kv [b,n,d], attn_sink [h] fp32, topk_idxs [b,m,topk] int -> o [b,m,h,d]."""
    b, m, h, d = q.shape
    n, topk = kv.size(1), topk_idxs.size(-1)
    o = torch.empty_like(q)
    # A tile of t queries scores the union of their rows: at most n, and at most t * topk of them.
    t = max(SCORE_TILE // (h * n), int((SCORE_TILE / (h * max(topk, 1))) ** 0.5), 1)
    for i in range(b):
        for j in range(0, m, t):
            o[i, j:j + t] = _attend(q[i, j:j + t], kv[i], attn_sink, topk_idxs[i, j:j + t], softmax_scale)
    return o


def _attend(q: torch.Tensor, kv: torch.Tensor, attn_sink: torch.Tensor, idxs: torch.Tensor, scale: float):
    """sparse_attn for a tile of queries [t,h,d] of one sequence: a product with the union of their rows."""
    rows, place = idxs.clamp(min=0).unique(return_inverse=True)         # [u], [t,topk]
    rows = kv[rows].float()                                             # [u,d]
    # how often a query names a row; the logarithm is -inf for never, 0 for once, and serves repeated indices
    count = rows.new_zeros(idxs.size(0), rows.size(0)).scatter_add_(1, place, (idxs >= 0).float())
    s = torch.matmul(q.float() * scale, rows.T).add_(count.log_().unsqueeze(1))     # [t,h,u]
    s_max = s.amax(dim=-1, keepdim=True).clamp(min=-1e30)               # finite where no row is attended
    p = s.sub_(s_max).exp_()
    # where no row is attended the sink's share is exp(sink + 1e30) = inf, and o is 0
    total = p.sum(dim=-1, keepdim=True) + torch.exp(attn_sink.unsqueeze(-1) - s_max)
    return (torch.matmul(p.to(q.dtype).float(), rows) / total).to(q.dtype)      # [t,h,d]


def hc_split_sinkhorn(
    mixes: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor, hc_mult: int = 4,
    sinkhorn_iters: int = 20, eps: float = 1e-6,
):
    """Splits mixes [b,s,(2+hc)*hc] into pre and post [b,s,hc] and comb [b,s,hc,hc], fp32.

    Of m * scale + base: pre = sigmoid(.) + eps, post = 2 sigmoid(.), comb = softmax(.) + eps over its last
    dim, then Sinkhorn: columns, (rows, columns) iters - 1 times, each divided by (its sum + eps)."""
    b, s, _ = mixes.shape
    hc = hc_mult
    pre = torch.sigmoid(mixes[..., :hc] * hc_scale[0] + hc_base[:hc]) + eps
    post = 2 * torch.sigmoid(mixes[..., hc:2 * hc] * hc_scale[1] + hc_base[hc:2 * hc])
    comb = mixes[..., 2 * hc:] * hc_scale[2] + hc_base[2 * hc:]         # [b,s,hc*hc]
    comb = comb.unflatten(-1, (hc, hc)).softmax(dim=-1) + eps           # [b,s,hc,hc]
    # tokens last: each of the many small sums then runs over whole vectors
    comb = comb.view(b * s, hc, hc).permute(1, 2, 0).contiguous()       # [hc,hc,b*s]
    eps = mixes.new_tensor(eps)                                         # a tensor: not converted at each step
    comb /= comb.sum(dim=0, keepdim=True) + eps
    for _ in range(sinkhorn_iters - 1):
        comb /= comb.sum(dim=1, keepdim=True) + eps
        comb /= comb.sum(dim=0, keepdim=True) + eps
    return pre, post, comb.permute(2, 0, 1).reshape(b, s, hc, hc)


@lru_cache
def hadamard_matrix(n: int, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix [n,n] of +1 and -1: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    assert n & (n - 1) == 0, f"a Hadamard transform needs a power of two, not {n}"
    h = torch.ones(1, 1, dtype=torch.float32, device=device)
    while h.size(0) < n:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale * H x over the last dim, in fp32, returned in x's dtype."""
    h = hadamard_matrix(x.size(-1), x.device)
    return (F.linear(x.float(), h) * scale).to(x.dtype)
