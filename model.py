"""DeepSeek-V4: the MoE / MLA / DSA stack, to be read beside the vendor's inference/model.py (Pro release).

Classes, their order, and the names of parameters and arguments are the vendor's, so the tensor names of a
published checkpoint are our parameter names. In shapes b is batch, s tokens, h heads, d features, hc residual
streams, r compressed rows, g groups of heads. Where the vendor's releases differ we follow Pro:
- the shared expert clamps with swiglu_limit (the first Flash release: no limit there);
- act_quant(inplace=True) rounds through FP8 (the first Flash release: through bf16 only).

Deliberate differences from the vendor:
- ModelArgs has no default for anything that a checkpoint's config says; from_config reads both its forms.
- Dtypes come from the checkpoint's tensors, so there are no arguments dtype, expert_dtype, scale_dtype. The
  vendor's globals default_dtype, scale_dtype, scale_fmt, and set_dtype, are Mode and run_mode here, so that
  models do not share them.
- forward takes any number of tokens at any start_pos. The vendor: a whole prompt at 0, else one token.
- The window's ring buffer has room for a chunk, so that whole prompt, chunk and single token take one way
  through Attention: write the rows, then attend. Long inputs are cut into chunks of max_chunk tokens.
- Compressor has one way, too: what waits in its state and what is new are pooled together. A pass at
  start_pos 0 resets that state; the vendor's second conversation starts with what the first one left there.
- The indexer scores tiles of queries; the vendor holds [b, s, heads, rows] at once.
- On a GPU all routed experts of a layer run together (kernel.routed_experts); the loop is their reference.
- A pass must continue where the last one ended; snapshot and restore go back to an earlier end. One model of
  a process runs at a time: Mode is global, as the vendor's settings are.
- Activations are bf16, or fp32 for exact comparison, and each of the four ROUND_TRIPS can be switched off
  (without "act" a quantised weight is dequantised and multiplied as it is).
- Transformer takes the dtype of activations and the round trips; RMSNorm's eps and ParallelHead's norm_eps
  and hc_eps have no defaults; ColumnParallelLinear.forward is Linear's.
- Caches and states are allocated by reset_caches, after loading; the vendor's are buffers made in __init__.
- On a CPU weights are held as they are stored, in mapped files: BF16 where fp32 is declared, wo_a in FP8. On
  a GPU loading widens them, gate.weight too (the vendor's is bf16, converted at each use), and dequantises
  wo_a. tid2eid is int64; only the last position goes through the head; no Linear can have a bias.
- Experts that do not fit on a GPU can stay in host memory, with a bounded cache of copies on the device.
- precompute_freqs_cis, get_window_topk_idxs and get_compress_topk_idxs take a device; the first a start_pos,
  the second a ring size, too.
- Scales are an argument of linear(): deepcopy and load_state_dict(assign=True) lose a weight.scale attribute.
- Rotary tables hold the positions of a pass; the vendor computes max_seq_len of them at the start.
- Token ids outside the vocabulary are an error where they come on the CPU; split embeddings and hash layers
  would take them silently.
- fp32 sums over streams, experts and shards may run in another order than the vendor's.
"""

import json
import math
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import NamedTuple, Optional, Tuple

import torch
from torch import nn
import torch.nn.functional as F
import torch.distributed as dist

from kernel import (act_quant, fp4_act_quant, fp8_gemm, fp4_gemm, sparse_attn, hc_split_sinkhorn,
                    hadamard_transform, plain_linear, plain_weight, wide_linear, grouped_linear, index_score,
                    routed_experts, expert_table, stamp_of, ExpertTable, WeightCache, weight_cache)


world_size = 1
rank = 0
block_size = 128
fp4_block_size = 32

# What the trained model expects. Each can be switched off; without them arithmetic is exact, to compare with.
ROUND_TRIPS = (
    "kv",          # FP8 rounding of the non-rope dims of window rows and compressed rows
    "index",       # FP4 rounding of the indexer's queries and compressed keys
    "hadamard",    # Hadamard rotation of both before that (changes no exact product, spreads outliers)
    "act",         # FP8 rounding of the input of every linear whose weight is stored as FP8 or FP4
)

INDEX_TILE = 1 << 22    # index scores that exist at a time


class Mode(NamedTuple):
    """What holds while a model runs; scale_fmt is "ue8m0" (powers of two) or None (fp32 scales)."""
    dtype: torch.dtype
    round_trips: Tuple[str, ...]
    scale_fmt: Optional[str]

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.scale_fmt is None else torch.float8_e8m0fnu


mode = Mode(torch.bfloat16, ROUND_TRIPS, "ue8m0")


@contextmanager
def run_mode(new: Mode):
    """Sets `mode` and torch's default dtype, in which the GEMM kernels return, and restores both on exit."""
    global mode
    saved, saved_dtype = mode, torch.get_default_dtype()
    mode = new
    torch.set_default_dtype(new.dtype)
    try:
        yield
    finally:
        mode = saved
        torch.set_default_dtype(saved_dtype)


# config.json as published -> the vendor's names, which ModelArgs has
PUBLISHED_KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers", "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": "n_mtp_layers", "num_attention_heads": "n_heads",
    "n_routed_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts", "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale", "swiglu_limit": "swiglu_limit", "q_lora_rank": "q_lora_rank",
    "head_dim": "head_dim", "qk_rope_head_dim": "rope_head_dim", "rms_norm_eps": "norm_eps",
    "o_groups": "o_groups", "o_lora_rank": "o_lora_rank", "sliding_window": "window_size",
    "compress_ratios": "compress_ratios", "compress_rope_theta": "compress_rope_theta",
    "rope_theta": "rope_theta", "index_n_heads": "index_n_heads", "index_head_dim": "index_head_dim",
    "index_topk": "index_topk", "hc_mult": "hc_mult", "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
}
YARN_KEYS = {"original_max_position_embeddings": "original_seq_len", "factor": "rope_factor",
             "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
# published keys that may have one value only: the vendor's code does nothing else
FIXED_KEYS = {"model_type": "deepseek_v4", "attention_bias": False, "hidden_act": "silu",
              "norm_topk_prob": True, "num_key_value_heads": 1, "tie_word_embeddings": False,
              "topk_method": "noaux_tc"}
# keys that don't change what a forward pass computes (dtypes of weights are read off the tensors)
IDLE_KEYS = {"architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
             "use_cache", "initializer_range", "max_position_embeddings", "torch_dtype", "dtype",
             "transformers_version", "expert_dtype", "scale_dtype", "_name_or_path"}
# what the vendor's inference/config.json leaves to the defaults in the vendor's code
VENDOR_UNSAID = {"n_mtp_layers": 1, "norm_eps": 1e-6, "hc_eps": 1e-6}
DSPARK_STAGES = 3       # Flash-0731: compress_ratios goes on for three draft stages, which are not loaded


@dataclass(kw_only=True)
class ModelArgs:
    """Hyperparameters under the vendor's names. Only what a config cannot know has a default."""
    max_batch_size: int = 4
    max_seq_len: int = 4096
    max_chunk: int = 1024       # tokens that run through the layers at a time
    scale_fmt: Optional[str]
    vocab_size: int
    dim: int
    moe_inter_dim: int
    n_layers: int
    n_hash_layers: int
    n_mtp_layers: int
    n_heads: int
    # moe
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    score_func: str
    route_scale: float
    swiglu_limit: float
    # mqa
    q_lora_rank: int
    head_dim: int
    rope_head_dim: int
    norm_eps: float
    o_groups: int
    o_lora_rank: int
    window_size: int
    compress_ratios: Tuple[int, ...]
    # yarn
    compress_rope_theta: float
    original_seq_len: int
    rope_theta: float
    rope_factor: float
    beta_fast: int
    beta_slow: int
    # index
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    # hc
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    @classmethod
    def from_config(cls, config, **runtime) -> "ModelArgs":
        """From a config.json (path or dict), published or the vendor's; `runtime` sets max_seq_len and such.

        ValueError names the key that is missing, unknown, or has a value that this architecture has not."""
        if not isinstance(config, dict):
            with open(config, encoding="utf-8") as f:
                config = json.load(f)
        values = _read_vendor_config(config) if "dim" in config else _read_published_config(config)
        missing = [f.name for f in fields(cls) if f.name not in values and f.name not in RUNTIME_KEYS]
        if missing:
            names = {ours: theirs for theirs, ours in (PUBLISHED_KEYS | YARN_KEYS).items()}
            missing = [n if "dim" in config else names[n] for n in missing]
            raise ValueError(f"config: {', '.join(missing)} missing; nothing is assumed, take the value from "
                             "the checkpoint's own config.json")
        unknown = set(runtime) - {*RUNTIME_KEYS, "n_mtp_layers"}
        if unknown:
            raise TypeError(f"from_config sets {RUNTIME_KEYS} and n_mtp_layers, not {', '.join(unknown)}")
        if not isinstance(values["compress_ratios"], (list, tuple)):
            raise ValueError(f"config: compress_ratios is {values['compress_ratios']!r}, expected a list")
        n_mtp_layers = runtime.pop("n_mtp_layers", None)
        args = cls(**values | {"compress_ratios": tuple(values["compress_ratios"])} | runtime)
        dspark = any(key.startswith("dspark_") for key in config)
        args.check(dspark)
        if dspark:      # the draft stages are no MTP blocks
            args.n_mtp_layers = 0
        if n_mtp_layers is not None:
            args.n_mtp_layers = min(n_mtp_layers, args.n_mtp_layers)
        return args

    def check(self, dspark: bool = False):
        """What would otherwise fail late, or not at all."""
        for f in fields(self):
            value = getattr(self, f.name)
            kind = {int: int, float: (int, float), str: str}.get(f.type)
            if kind is None:
                continue
            least = 1 if f.type is int and f.name not in MAY_BE_0 else 0
            wrong = not isinstance(value, kind) or isinstance(value, bool)
            if wrong or (kind is not str and not least <= value < math.inf):
                of = "" if kind is str else f" of {least} or more"
                raise ValueError(f"config: {f.name} is {value!r}, expected a {f.type.__name__}{of}")
        if not all(type(ratio) is int and ratio >= 0 for ratio in self.compress_ratios):
            raise ValueError(f"config: compress_ratios {self.compress_ratios} are not all whole numbers")
        expected = self.n_layers + (DSPARK_STAGES if dspark else self.n_mtp_layers)
        if len(self.compress_ratios) != expected:
            raise ValueError(f"config: compress_ratios has {len(self.compress_ratios)} entries, expected "
                             f"{expected}: {self.n_layers} layers and {expected - self.n_layers} more")
        if self.score_func not in SCORE_FUNCS:
            raise ValueError(f"config: score_func {self.score_func!r}, known: {', '.join(SCORE_FUNCS)}")
        if self.scale_fmt not in ("ue8m0", None):
            raise ValueError(f"config: scale_fmt {self.scale_fmt!r} is neither ue8m0 nor null")
        if self.n_shared_experts != 1:
            raise ValueError(f"config: n_shared_experts is {self.n_shared_experts}, the architecture has 1")
        if self.n_heads % self.o_groups:
            raise ValueError(f"config: n_heads {self.n_heads} is no multiple of o_groups {self.o_groups}")
        if self.n_activated_experts > self.n_routed_experts:
            raise ValueError(f"config: {self.n_activated_experts} active experts of {self.n_routed_experts}")
        if self.rope_head_dim % 2 or self.rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError(f"config: rope_head_dim {self.rope_head_dim} is odd, or more than a head has")
        if (self.head_dim - self.rope_head_dim) % 64:
            raise ValueError(f"config: head_dim {self.head_dim} less rope_head_dim {self.rope_head_dim} is "
                             "no multiple of 64, in which KV is rounded")
        if self.index_head_dim % fp4_block_size or self.index_head_dim & (self.index_head_dim - 1):
            raise ValueError(f"config: index_head_dim {self.index_head_dim} is no power of two of 32 or more")


RUNTIME_KEYS = ("max_batch_size", "max_seq_len", "max_chunk")
MAY_BE_0 = ("n_hash_layers", "n_mtp_layers", "original_seq_len")
SCORE_FUNCS = {"softmax": lambda x: x.softmax(dim=-1), "sigmoid": torch.sigmoid,
               "sqrtsoftplus": lambda x: F.softplus(x).sqrt()}


def _read_vendor_config(config: dict) -> dict:
    """The vendor's inference/config.json -> ModelArgs fields."""
    known = {f.name for f in fields(ModelArgs)}
    _refuse_unknown(set(config) - known - IDLE_KEYS)
    if config.get("scale_fmt", "ue8m0") is None and config.get("scale_dtype") != "fp32":
        raise ValueError("config: scale_fmt null goes with scale_dtype fp32; other scales are powers of two")
    return VENDOR_UNSAID | {key: value for key, value in config.items() if key in known}


def _read_published_config(config: dict) -> dict:
    """A published config.json -> ModelArgs fields."""
    model_type = config.get("model_type")
    if model_type != "deepseek_v4":
        raise ValueError(f"config: model_type is {model_type!r}; this engine runs deepseek_v4 only")
    for key, value in FIXED_KEYS.items():
        if config.get(key, value) != value:
            raise ValueError(f"config: {key} is {config[key]!r}; this architecture has {value!r}")
    known = {"rope_scaling", "quantization_config", *PUBLISHED_KEYS, *FIXED_KEYS, *IDLE_KEYS}
    _refuse_unknown({key for key in set(config) - known if not key.startswith("dspark_")})
    values = {PUBLISHED_KEYS[key]: value for key, value in config.items() if key in PUBLISHED_KEYS}

    for key in ("rope_scaling", "quantization_config"):
        if not isinstance(config.get(key, {}), (dict, type(None))):
            raise ValueError(f"config: {key} is {config[key]!r}, expected an object")
    yarn = dict(config.get("rope_scaling") or {})
    if yarn.pop("type", None) != "yarn":
        raise ValueError("config: rope_scaling of type yarn missing; without it the model loses far recall")
    _refuse_unknown({f"rope_scaling.{key}" for key in set(yarn) - set(YARN_KEYS)})
    values |= {YARN_KEYS[key]: value for key, value in yarn.items()}

    # A checkpoint without quantised weights still rounds KV, in the scale format of every published one.
    quant = config.get("quantization_config") or {"scale_fmt": "ue8m0"}
    expected = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [block_size, block_size]}
    for key, value in quant.items():
        if key != "scale_fmt" and value != expected.get(key, value):
            raise ValueError(f"config: quantization_config.{key} is {value!r}, known is {expected[key]!r}")
    _refuse_unknown({f"quantization_config.{key}" for key in set(quant) - set(expected) - {"scale_fmt"}})
    if "scale_fmt" not in quant:
        raise ValueError("config: quantization_config.scale_fmt missing")
    return values | {"scale_fmt": quant["scale_fmt"]}


def _refuse_unknown(keys: set):
    if keys:
        raise ValueError(f"config: unknown {', '.join(sorted(keys))}; a key that this engine does not know "
                         "could change the model, so it refuses to guess")


def parameter(*shape: int, dtype: Optional[torch.dtype] = None) -> nn.Parameter:
    """A place for a tensor of the checkpoint; without a dtype that of activations."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class ParallelEmbedding(nn.Module):
    """Token embedding, its vocabulary split over the ranks: each adds 0 for the tokens of the others."""
    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        assert vocab_size % world_size == 0, f"vocab_size {vocab_size} is not divisible by {world_size} ranks"
        self.part_vocab_size = vocab_size // world_size
        self.vocab_start_idx = rank * self.part_vocab_size
        self.vocab_end_idx = self.vocab_start_idx + self.part_vocab_size
        self.weight = parameter(self.part_vocab_size, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if world_size == 1:
            return F.embedding(x, self.weight).to(mode.dtype)                       # [b,s,d]
        foreign = (x < self.vocab_start_idx) | (x >= self.vocab_end_idx)
        y = F.embedding((x - self.vocab_start_idx).masked_fill(foreign, 0), self.weight).to(mode.dtype)
        y.masked_fill_(foreign.unsqueeze(-1), 0)
        dist.all_reduce(y)
        return y


def linear(x: torch.Tensor, weight: torch.Tensor, scale: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x @ weight^T. A quantised weight has a scale, and then x is rounded to FP8 first (round trip "act").
    Any other weight may be stored in a narrower dtype than x's; the product is in fp32 then."""
    if scale is None:
        return plain_linear(x, weight) if weight.dtype == x.dtype else wide_linear(x, weight)
    if "act" not in mode.round_trips:
        return plain_linear(x, plain_weight(weight, scale, x.dtype))
    x, s = act_quant(x, block_size, mode.scale_fmt, mode.scale_dtype)
    gemm = fp4_gemm if weight.dtype == torch.float4_e2m1fn_x2 else fp8_gemm
    return gemm(x, s, weight, scale, mode.scale_dtype)


class Linear(nn.Module):
    """A linear layer whose stored format the checkpoint decides: BF16 or FP32 alone, FP8 or FP4 with a scale.

    Built with a plain weight [out, in]; loading replaces it, and sets `scale` where the tensor is quantised.
    FP8: e4m3 [out, in], scale [out/128, in/128]. FP4: packed e2m1 [out, in/2], scale [out, in/32]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype=None):
        super().__init__()
        assert not bias, "no linear of this architecture has a bias"
        self.in_features = in_features
        self.out_features = out_features
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.scale)


def wide(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """A layer whose product is in fp32, whatever the activations are; a quantised weight has its scale."""
    return wide_linear(x, layer.weight) if layer.scale is None else layer(x.float())


class ColumnParallelLinear(Linear):
    """Output features split over the ranks; each keeps its part."""
    def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype=None):
        assert out_features % world_size == 0, f"{out_features} outputs do not divide by {world_size} ranks"
        self.part_out_features = out_features // world_size
        super().__init__(in_features, self.part_out_features, bias, dtype)


class RowParallelLinear(Linear):
    """Input features split over the ranks; the partial results are summed, in fp32."""
    def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype=None):
        assert in_features % world_size == 0, f"{in_features} inputs are not divisible by {world_size} ranks"
        self.part_in_features = in_features // world_size
        super().__init__(self.part_in_features, out_features, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.scale)
        if world_size > 1:
            y = y.float()
            dist.all_reduce(y)
        return y.type_as(x)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.dim = dim
        self.eps = eps
        # multiplied in fp32; BF16 in the checkpoint
        self.weight = parameter(dim, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).type_as(x)


@lru_cache(8)
def precompute_freqs_cis(dim, seqlen, original_seq_len, base, factor, beta_fast, beta_slow, device,
                         start_pos=0):
    """Rotations e^(i p f), complex [seqlen, dim/2], of positions p for frequencies f_j = base^(-2j/dim).

    YaRN (original_seq_len > 0): a frequency that turns less than beta_slow times in the original context is
    divided by `factor`, one that turns more than beta_fast times is kept; between them a ramp over j blends
    the two. The magnitude stays 1: the vendor applies none of YaRN's attention scaling."""
    j = torch.arange(dim // 2, dtype=torch.float32, device=device)
    freqs = 1.0 / base ** (2 * j / dim)                                             # [dim/2]
    if original_seq_len > 0:
        def index_of(turns):        # the j at which a frequency makes so many turns in the original context
            return dim * math.log(original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))
        low = max(math.floor(index_of(beta_fast)), 0)
        high = min(math.ceil(index_of(beta_slow)), dim - 1)
        keep = 1 - ((j - low) / max(high - low, 0.001)).clamp(0, 1)
        freqs = freqs / factor * (1 - keep) + freqs * keep
    positions = torch.arange(start_pos, start_pos + seqlen, dtype=torch.float32, device=device)
    angles = torch.outer(positions, freqs)                                          # [seqlen,dim/2]
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotates x [b,s,(h,)d] by freqs_cis [s,d/2] in place, or back; pairs are neighbours (2j, 2j+1)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))                 # [b,s,(h,)d/2]
    if inverse:
        freqs_cis = freqs_cis.conj()
    if x.ndim == 4:
        freqs_cis = freqs_cis.unsqueeze(1)                                          # [s,1,d/2]
    return x.copy_(torch.view_as_real(pairs * freqs_cis).flatten(-2))               # [b,s,(h,)d]


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """Hadamard rotation of the last dim: spreads an outlier over all dims before FP4 rounding."""
    return hadamard_transform(x, scale=x.size(-1) ** -0.5)


@lru_cache(2)
def get_window_topk_idxs(window_size: int, bsz: int, seqlen: int, start_pos: int, ring_size: int, device):
    """Where in the ring the rows of p-window+1 .. p lie, for each query p: [b,s,window]; -1 before 0."""
    width = min(window_size, start_pos + seqlen)
    p = torch.arange(start_pos, start_pos + seqlen, device=device).unsqueeze(1)
    positions = p + torch.arange(1 - width, 1, device=device)
    return torch.where(positions < 0, -1, positions % ring_size).expand(bsz, -1, -1)


def visible_rows(ratio: int, seqlen: int, start_pos: int, device) -> torch.Tensor:
    """How many compressed rows are complete for each query p, its own token included: [s,1]."""
    return torch.arange(start_pos + 1, start_pos + seqlen + 1, device=device).unsqueeze(1) // ratio


@lru_cache(2)
def get_compress_topk_idxs(ratio: int, bsz: int, seqlen: int, start_pos: int, offset: int, device):
    """All compressed rows that each query may see: [b,s,rows], -1 for the others."""
    rows = torch.arange((start_pos + seqlen) // ratio, device=device)
    visible = visible_rows(ratio, seqlen, start_pos, device)
    return torch.where(rows < visible, rows + offset, -1).expand(bsz, -1, -1)


class Compressor(nn.Module):
    """Pools `compress_ratio` tokens into one row: per channel, a softmax over the group of gate + ape.

    With overlap (ratio 4) a row pools two groups: the first half of the channels of the group before, the
    second half of its own. Tokens of a group that is not full yet wait in the state, after the last full."""

    def __init__(self, args: ModelArgs, compress_ratio: int = 4, head_dim: int = 512, rotate: bool = False):
        super().__init__()
        self.dim = args.dim
        self.head_dim = head_dim
        self.rope_head_dim = args.rope_head_dim
        self.compress_ratio = compress_ratio
        self.overlap = compress_ratio == 4
        self.rotate = rotate
        coff = 1 + self.overlap

        self.ape = parameter(compress_ratio, coff * head_dim, dtype=torch.float32)
        # multiplied in fp32; BF16 in the checkpoint
        self.wkv = Linear(self.dim, coff * head_dim, dtype=torch.float32)
        self.wgate = Linear(self.dim, coff * head_dim, dtype=torch.float32)
        self.norm = RMSNorm(head_dim, args.norm_eps)
        self.kv_cache: torch.Tensor = None      # [b,rows,d], a part of its owner's cache
        # [b,coff*ratio,coff*d]: with overlap the group before, then the open group
        self.kv_state: torch.Tensor = None
        self.score_state: torch.Tensor = None
        self.freqs_cis: torch.Tensor = None     # from the open group's first position to the pass's last

    def reset_caches(self, kv_cache: torch.Tensor):
        self.kv_cache = kv_cache
        coff = 1 + self.overlap
        shape = kv_cache.size(0), coff * self.compress_ratio, coff * self.head_dim
        self.kv_state = torch.zeros(shape, dtype=torch.float32, device=kv_cache.device)
        self.score_state = torch.full_like(self.kv_state, -torch.inf)

    def overlap_transform(self, tensor: torch.Tensor) -> torch.Tensor:
        """[b,r+1,ratio,2d] -> [b,r,2*ratio,d]: first half of the group before, second half of the group."""
        d = self.head_dim
        return torch.cat([tensor[:, :-1, :, :d], tensor[:, 1:, :, d:]], dim=2)

    def forward(self, x: torch.Tensor, start_pos: int) -> Optional[torch.Tensor]:
        """Takes in x [b,s,dim]; writes rows that this completes to kv_cache, returns them [b,r,d] or None."""
        bsz, seqlen, _ = x.size()
        ratio, rd = self.compress_ratio, self.rope_head_dim
        if start_pos == 0:
            self.kv_state[:bsz] = 0
            self.score_state[:bsz] = -torch.inf     # the first row has no group before it: weight exp(-inf)
        kv = wide(x, self.wkv)                                                      # [b,s,coff*d]
        slots = torch.arange(start_pos, start_pos + seqlen, device=x.device) % ratio
        score = wide(x, self.wgate) + self.ape[slots]                               # [b,s,coff*d]

        waiting = self.overlap * ratio + start_pos % ratio      # rows of the state that are in use
        n_rows = (start_pos % ratio + seqlen) // ratio
        if n_rows == 0:
            self.kv_state[:bsz, waiting:waiting + seqlen] = kv
            self.score_state[:bsz, waiting:waiting + seqlen] = score
            return None
        kv = torch.cat([self.kv_state[:bsz, :waiting], kv], dim=1)
        score = torch.cat([self.score_state[:bsz, :waiting], score], dim=1)
        pooled = n_rows * ratio     # with overlap the last full group is kept, as the next one's group before
        rest = kv.size(1) - pooled
        self.kv_state[:bsz, :rest] = kv[:, pooled:]
        self.score_state[:bsz, :rest] = score[:, pooled:]

        groups = (self.overlap + n_rows) * ratio
        kv = kv[:, :groups].unflatten(1, (-1, ratio))   # [b,overlap+r,ratio,coff*d]
        score = score[:, :groups].unflatten(1, (-1, ratio))
        if self.overlap:
            kv, score = self.overlap_transform(kv), self.overlap_transform(score)   # [b,r,2*ratio,d]
        kv = (kv * score.softmax(dim=2)).sum(dim=2)                                 # [b,r,d]

        first = start_pos // ratio
        kv = self.norm(kv.type_as(x))
        apply_rotary_emb(kv[..., -rd:], self.freqs_cis[:n_rows * ratio:ratio])
        if self.rotate:
            kv = round_index(kv)
        else:
            round_kv(kv[..., :-rd])
        self.kv_cache[:bsz, first:first + n_rows] = kv
        return kv


def round_kv(kv: torch.Tensor) -> torch.Tensor:
    """The FP8 round trip of KV, in place, in blocks of 64; callers leave out the rope dims."""
    if "kv" not in mode.round_trips:
        return kv
    return act_quant(kv, 64, mode.scale_fmt, mode.scale_dtype, True)


def round_index(x: torch.Tensor) -> torch.Tensor:
    """The indexer's round trip, of queries and keys alike: Hadamard rotation, then FP4."""
    if "hadamard" in mode.round_trips:
        x = rotate_activation(x)
    return fp4_act_quant(x, fp4_block_size, True) if "index" in mode.round_trips else x


class Indexer(nn.Module):
    """Chooses for each query the compressed rows worth attending: top-k of a cheap score (lightning indexer).

    score[r] = sum over heads of weight[h] * relu(q[h] . k[r]), with keys from a compressor of its own."""

    def __init__(self, args: ModelArgs, compress_ratio: int = 4):
        super().__init__()
        self.dim = args.dim
        self.n_heads = args.index_n_heads
        self.n_local_heads = args.index_n_heads // world_size
        self.head_dim = args.index_head_dim
        self.rope_head_dim = args.rope_head_dim
        self.index_topk = args.index_topk
        self.q_lora_rank = args.q_lora_rank
        self.wq_b = ColumnParallelLinear(self.q_lora_rank, self.n_heads * self.head_dim)
        self.weights_proj = ColumnParallelLinear(self.dim, self.n_heads)
        self.softmax_scale = self.head_dim ** -0.5
        self.compress_ratio = compress_ratio

        self.compressor = Compressor(args, compress_ratio, self.head_dim, True)
        self.kv_cache: torch.Tensor = None      # [b, max_seq_len / ratio, d]

    def reset_caches(self, kv_cache: torch.Tensor):
        self.kv_cache = kv_cache
        self.compressor.reset_caches(kv_cache)

    def forward(self, x: torch.Tensor, qr: torch.Tensor, start_pos: int, offset: int) -> torch.Tensor:
        """x [b,s,dim], qr [b,s,q_lora_rank] -> chosen rows + offset [b,s,topk], -1 if fewer are visible."""
        bsz, seqlen, _ = x.size()
        ratio, rd = self.compress_ratio, self.rope_head_dim
        end_pos = start_pos + seqlen
        q = self.wq_b(qr).unflatten(-1, (self.n_local_heads, self.head_dim))        # [b,s,h,d]
        apply_rotary_emb(q[..., -rd:], self.compressor.freqs_cis[-seqlen:])
        q = round_index(q)
        self.compressor(x, start_pos)
        weights = self.weights_proj(x) * (self.softmax_scale * self.n_heads ** -0.5)    # [b,s,h]

        k = self.kv_cache[:bsz, :end_pos // ratio]                                  # [b,r,d]
        n_rows = k.size(1)
        visible = visible_rows(ratio, seqlen, start_pos, x.device)                  # [s,1]
        chosen = []
        tile = max(INDEX_TILE // (bsz * max(n_rows, 1)), 1)
        for i in range(0, seqlen, tile):
            here = slice(i, i + tile)
            score = index_score(q[:, here], k, weights[:, here], visible[here])     # [b,s,r]
            if world_size > 1:
                dist.all_reduce(score)
            topk_idxs = score.topk(min(self.index_topk, n_rows), dim=-1)[1]         # [b,s,topk]
            chosen.append(torch.where(topk_idxs < visible[here], topk_idxs + offset, -1))
        return torch.cat(chosen, dim=1)


class Attention(nn.Module):
    """Multi-head latent attention with one KV head, k = v: a sliding window, and compressed rows of all.

    Queries come through a low-rank projection; outputs leave through one per group of heads."""
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.layer_id = layer_id
        self.dim = args.dim
        self.n_heads = args.n_heads
        self.n_local_heads = args.n_heads // world_size
        self.q_lora_rank = args.q_lora_rank
        self.o_lora_rank = args.o_lora_rank
        self.head_dim = args.head_dim
        self.rope_head_dim = args.rope_head_dim
        self.n_groups = args.o_groups
        self.n_local_groups = self.n_groups // world_size
        assert self.n_groups % world_size == 0, f"{self.n_groups} groups do not divide by {world_size} ranks"
        self.window_size = args.window_size
        self.compress_ratio = args.compress_ratios[layer_id]
        self.eps = args.norm_eps

        self.attn_sink = parameter(self.n_local_heads, dtype=torch.float32)
        self.wq_a = Linear(self.dim, self.q_lora_rank)
        self.q_norm = RMSNorm(self.q_lora_rank, self.eps)
        self.wq_b = ColumnParallelLinear(self.q_lora_rank, self.n_heads * self.head_dim)
        self.wkv = Linear(self.dim, self.head_dim)
        self.kv_norm = RMSNorm(self.head_dim, self.eps)
        # FP8 in the checkpoint; dequantised, for a product per group whose input is not rounded to FP8
        self.wo_a = ColumnParallelLinear(self.n_heads * self.head_dim // self.n_groups,
                                         self.n_groups * self.o_lora_rank)
        self.wo_b = RowParallelLinear(self.n_groups * self.o_lora_rank, self.dim)
        self.softmax_scale = self.head_dim ** -0.5
        if self.compress_ratio:
            self.compressor = Compressor(args, self.compress_ratio, self.head_dim)
            self.indexer = Indexer(args, self.compress_ratio) if self.compress_ratio == 4 else None

        # The last window_size - 1 rows before a chunk and the chunk's own find room together.
        self.ring_size = args.window_size + args.max_chunk - 1
        self.kv_cache: torch.Tensor = None      # [b, ring_size + max_seq_len / ratio, d]
        # Pure window layers have no YaRN and their own theta.
        yarn_len, theta = ((args.original_seq_len, args.compress_rope_theta) if self.compress_ratio
                           else (0, args.rope_theta))
        self.precompute_freqs_cis = partial(
            precompute_freqs_cis, self.rope_head_dim, original_seq_len=yarn_len, base=theta,
            factor=args.rope_factor, beta_fast=args.beta_fast, beta_slow=args.beta_slow)

    def reset_caches(self, args: ModelArgs, dtype: torch.dtype, device):
        """Allocates caches. Nothing is written: a CPU's memory is touched only as positions get used."""
        n_rows = args.max_seq_len // self.compress_ratio if self.compress_ratio else 0
        new = partial(torch.empty, dtype=dtype, device=device)
        self.kv_cache = new(args.max_batch_size, self.ring_size + n_rows, self.head_dim)
        if self.compress_ratio:
            self.compressor.reset_caches(self.kv_cache[:, self.ring_size:])
            if self.indexer is not None:
                self.indexer.reset_caches(new(args.max_batch_size, n_rows, self.indexer.head_dim))

    def live_state(self, bsz: int, end_pos: int):
        """The places (cache, rows) that later tokens need and overwrite: ring and compressors' states."""
        window = torch.arange(max(end_pos - self.window_size + 1, 0), end_pos) % self.ring_size
        yield self.kv_cache[:bsz], window
        compressors = [m for m in self.modules() if isinstance(m, Compressor)]
        for compressor in compressors:
            yield compressor.kv_state[:bsz], slice(None)
            yield compressor.score_state[:bsz], slice(None)

    def forward(self, x: torch.Tensor, start_pos: int) -> torch.Tensor:
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        ratio, rd, ring = self.compress_ratio, self.rope_head_dim, self.ring_size
        assert seqlen <= ring - self.window_size + 1, f"{seqlen} tokens at once are more than max_chunk"
        # whole blocks, so that many tokens find their table cached, as all other layers of a kind do
        block = math.lcm(ratio or 1, 128)
        first = start_pos // block * block
        table = self.precompute_freqs_cis(seqlen=-(-end_pos // block) * block - first, start_pos=first,
                                          device=x.device)
        freqs_cis = table[start_pos - first:end_pos - first]
        # q
        qr = self.q_norm(self.wq_a(x))                                              # [b,s,q_lora_rank]
        q = self.wq_b(qr).unflatten(-1, (self.n_local_heads, self.head_dim))        # [b,s,h,d]
        q *= torch.rsqrt(q.square().mean(-1, keepdim=True) + self.eps)
        apply_rotary_emb(q[..., -rd:], freqs_cis)

        # window kv
        kv = self.kv_norm(self.wkv(x))                                              # [b,s,d]
        apply_rotary_emb(kv[..., -rd:], freqs_cis)
        round_kv(kv[..., :-rd])
        self.kv_cache[:bsz, torch.arange(start_pos, end_pos, device=x.device) % ring] = kv
        topk_idxs = get_window_topk_idxs(self.window_size, bsz, seqlen, start_pos, ring, x.device)

        # compressed kv
        n_rows = 0
        if ratio:
            n_rows = end_pos // ratio
            from_group = table[start_pos // ratio * ratio - first:end_pos - first]
            self.compressor.freqs_cis = from_group
            self.compressor(x, start_pos)
            if self.indexer is not None:
                self.indexer.compressor.freqs_cis = from_group
                compress_topk_idxs = self.indexer(x, qr, start_pos, ring)
            else:
                compress_topk_idxs = get_compress_topk_idxs(ratio, bsz, seqlen, start_pos, ring, x.device)
            topk_idxs = torch.cat([topk_idxs, compress_topk_idxs], dim=-1)          # [b,s,topk]

        kv = self.kv_cache[:bsz, :ring + n_rows]
        o = sparse_attn(q, kv, self.attn_sink, topk_idxs.int(), self.softmax_scale)    # [b,s,h,d]
        # k = v carries the key's position; rotating back leaves the distance between query and key
        apply_rotary_emb(o[..., -rd:], freqs_cis, True)

        # o
        o = o.view(bsz, seqlen, self.n_local_groups, -1)                            # [b,s,g,h/g*d]
        o = grouped_linear(o, self.wo_a.weight, self.wo_a.scale)                    # [b,s,g,o_lora_rank]
        return self.wo_b(o.flatten(2))                                              # [b,s,dim]


class Gate(nn.Module):
    """Chooses n_activated_experts per token and their weights: in hash layers by token id, else by score."""
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.dim = args.dim
        self.topk = args.n_activated_experts
        self.score_func = args.score_func
        self.route_scale = args.route_scale
        self.hash = layer_id < args.n_hash_layers
        # scores are computed in fp32; BF16 in the checkpoint
        self.weight = parameter(args.n_routed_experts, args.dim, dtype=torch.float32)
        if self.hash:
            self.tid2eid = parameter(args.vocab_size, self.topk, dtype=torch.int64)
            self.bias = None
        else:
            self.bias = parameter(args.n_routed_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """x [n,dim], input_ids [n] -> weights fp32 and expert ids, both [n,topk]."""
        scores = SCORE_FUNCS[self.score_func](wide_linear(x, self.weight))          # [n,experts]
        if self.hash:
            indices = self.tid2eid[input_ids]
        else:
            # the bias moves the choice, not the weights
            indices = (scores + self.bias).topk(self.topk, dim=-1)[1]               # [n,topk]
        weights = scores.gather(1, indices)
        if self.score_func != "softmax":
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights * self.route_scale, indices


class Expert(nn.Module):
    """SwiGLU: w2(weight * silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)), in fp32 between products."""
    def __init__(self, dim: int, inter_dim: int, dtype=None, swiglu_limit=0):
        super().__init__()
        self.w1 = Linear(dim, inter_dim, dtype=dtype)
        self.w2 = Linear(inter_dim, dim, dtype=dtype)
        self.w3 = Linear(dim, inter_dim, dtype=dtype)
        self.swiglu_limit = swiglu_limit

    def forward(self, x: torch.Tensor, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        gate = self.w1(x).float()                                                   # [n,inter_dim]
        up = self.w3(x).float()
        limit = self.swiglu_limit or torch.inf
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = F.silu(gate) * up
        if weights is not None:
            y = weights * y
        return self.w2(y.type_as(x))

    def size(self) -> int:
        """Bytes of its weights and scales, as stored."""
        return sum(tensor.nbytes for tensor in self.parameters())


def copy_to(expert: Expert, device: torch.device) -> Expert:
    """The same expert with weights of its own on the device."""
    return deepcopy(expert, {id(tensor): nn.Parameter(tensor.to(device, copy=True), requires_grad=False)
                             for tensor in expert.parameters()})


class MoE(nn.Module):
    """Each token's routed experts, summed in fp32, and one shared expert. Ranks split the routed experts."""
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.layer_id = layer_id
        self.dim = args.dim
        self.n_routed_experts = args.n_routed_experts
        assert self.n_routed_experts % world_size == 0, (
            f"{self.n_routed_experts} experts are not divisible by {world_size} ranks")
        self.n_local_experts = args.n_routed_experts // world_size
        self.experts_start_idx = rank * self.n_local_experts
        self.experts_end_idx = self.experts_start_idx + self.n_local_experts
        self.gate = Gate(layer_id, args)
        new_expert = partial(Expert, args.dim, args.moe_inter_dim, swiglu_limit=args.swiglu_limit)
        self.experts = nn.ModuleList([new_expert() if self.is_local(i) else None
                                      for i in range(self.n_routed_experts)])
        self.shared_experts = new_expert()
        self.table: ExpertTable = None      # where reset_caches found the experts' weights, on a GPU
        self.copies: WeightCache = None     # of experts on the device, where they stay in host memory

    def is_local(self, i: int) -> bool:
        return self.experts_start_idx <= i < self.experts_end_idx

    def expert(self, i: int, device: torch.device) -> Expert:
        """A local expert where it computes: itself, or its copy on the device."""
        if self.copies is None:
            return self.experts[i]
        expert = self.experts[i]
        with self.copies.experts():
            return self.copies.get(expert, expert.size(), partial(copy_to, expert, device),
                                   stamp_of(*expert.parameters()))

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        shape = x.size()
        x = x.view(-1, self.dim)                                                    # [n,dim], n = b*s
        weights, indices = self.gate(x, input_ids.flatten())
        if self.table is not None and "act" in mode.round_trips:
            y = routed_experts(x, weights, indices, self.table, mode.scale_fmt)     # fp32 [n,dim]
        else:
            y = torch.zeros_like(x, dtype=torch.float32)
            picks = {}      # of each expert: its tokens, and for each of them which of the [n * topk] choices
            for pick, i in enumerate(indices.flatten().tolist()):
                picks.setdefault(i, {})[pick // indices.size(1)] = pick     # named twice it counts once
            with weight_cache.experts():
                for i in filter(self.is_local, sorted(picks)):
                    idx = torch.tensor(list(picks[i]), device=x.device)
                    chosen = torch.tensor(list(picks[i].values()), device=x.device)
                    y_i = self.expert(i, x.device)(x[idx], weights.view(-1, 1)[chosen])
                    y.index_add_(0, idx, y_i.float())
        if world_size > 1:
            dist.all_reduce(y)
        y += self.shared_experts(x)
        return y.type_as(x).view(shape)                                             # [b,s,dim]


class Block(nn.Module):
    """Attention and MoE, each between the two halves of a hyper-connection over hc_mult residual streams:

        h [b,s,hc,d] --+-- hc_pre: x = sum_j pre[j] h[j] -- norm -- attn / ffn --- x [b,s,d] --+
                       |                                                                       v
                       +-- comb [hc,hc], doubly stochastic ---> y[k] = sum_j comb[j,k] h[j] + post[k] x

    pre, post and comb are computed from h itself, per token. The sum runs over comb's first index."""
    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__()
        self.layer_id = layer_id
        self.norm_eps = args.norm_eps
        self.attn = Attention(layer_id, args)
        self.ffn = MoE(layer_id, args)
        self.attn_norm = RMSNorm(args.dim, self.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, self.norm_eps)
        self.hc_mult = hc_mult = args.hc_mult
        self.hc_sinkhorn_iters = args.hc_sinkhorn_iters
        self.hc_eps = args.hc_eps
        mix_hc = (2 + hc_mult) * hc_mult
        hc_dim = hc_mult * args.dim
        self.hc_attn_fn = parameter(mix_hc, hc_dim, dtype=torch.float32)
        self.hc_ffn_fn = parameter(mix_hc, hc_dim, dtype=torch.float32)
        self.hc_attn_base = parameter(mix_hc, dtype=torch.float32)
        self.hc_ffn_base = parameter(mix_hc, dtype=torch.float32)
        self.hc_attn_scale = parameter(3, dtype=torch.float32)
        self.hc_ffn_scale = parameter(3, dtype=torch.float32)

    def hc_pre(self, x: torch.Tensor, hc_fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor):
        """Streams [b,s,hc,d] -> the sublayer's input [b,s,d]; post [b,s,hc], comb [b,s,hc,hc] for hc_post."""
        streams = x.float()
        mixes = hc_mixes(streams, hc_fn, self.norm_eps)                             # [b,s,(2+hc)*hc]
        pre, post, comb = hc_split_sinkhorn(mixes, hc_scale, hc_base, self.hc_mult, self.hc_sinkhorn_iters,
                                            self.hc_eps)
        y = torch.matmul(pre.unsqueeze(2), streams).squeeze(2)                      # [b,s,d]
        return y.type_as(x), post, comb

    def hc_post(self, x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor):
        """The sublayer's output [b,s,d] and the streams before it [b,s,hc,d] -> the streams after it."""
        # one product in place of a product and a sum: x is appended to the streams, post to comb's rows
        weights = torch.cat([comb, post.unsqueeze(2)], dim=2)                       # [b,s,hc+1,hc]
        streams = torch.cat([residual, x.unsqueeze(2)], dim=2).float()              # [b,s,hc+1,d]
        return torch.matmul(weights.transpose(-1, -2), streams).type_as(x)          # [b,s,hc,d]

    def forward(self, x: torch.Tensor, start_pos: int, input_ids: torch.Tensor) -> torch.Tensor:
        y, post, comb = self.hc_pre(x, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        y = self.attn(self.attn_norm(y), start_pos)                                 # [b,s,d]
        x = self.hc_post(y, x, post, comb)                                          # [b,s,hc,d]
        y, post, comb = self.hc_pre(x, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        y = self.ffn(self.ffn_norm(y), input_ids)                                   # [b,s,d]
        return self.hc_post(y, x, post, comb)                                       # [b,s,hc,d]


def hc_mixes(x: torch.Tensor, hc_fn: torch.Tensor, eps: float) -> torch.Tensor:
    """hc_fn @ (all streams of a token, RMS-normalised without weight): fp32 [b,s,hc,d] -> [b,s,mix]."""
    x = x.flatten(2)                                                                # [b,s,hc*d]
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
    return F.linear(x, hc_fn.float()) * torch.rsqrt(mean_square + eps)


class ParallelHead(nn.Module):
    """Streams -> logits of the last token, fp32; the vocabulary is split over the ranks."""
    def __init__(self, vocab_size: int, dim: int, norm_eps: float, hc_eps: float):
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        self.norm_eps = norm_eps
        self.hc_eps = hc_eps
        self.part_vocab_size = vocab_size // world_size
        # logits are computed in fp32; BF16 in the checkpoint
        self.weight = parameter(self.part_vocab_size, dim, dtype=torch.float32)

    def get_logits(self, x: torch.Tensor) -> torch.Tensor:
        return wide_linear(x[:, -1], self.weight)                                   # [b,vocab]

    def forward(self, x: torch.Tensor, hc_fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor,
                norm: RMSNorm) -> torch.Tensor:
        x = self.hc_head(x[:, -1:], hc_fn, hc_scale, hc_base)                       # [b,1,d]
        logits = self.get_logits(norm(x))
        if world_size > 1:
            all_logits = [torch.empty_like(logits) for _ in range(world_size)]
            dist.all_gather(all_logits, logits)
            logits = torch.cat(all_logits, dim=-1)
        return logits

    def hc_head(self, x: torch.Tensor, hc_fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor):
        """The streams' weighted sum: [b,s,hc,d] -> [b,s,d]. Like hc_pre, without the other two parts."""
        streams = x.float()
        mixes = hc_mixes(streams, hc_fn, self.norm_eps)                             # [b,s,hc]
        pre = torch.sigmoid(mixes * hc_scale + hc_base) + self.hc_eps
        return torch.matmul(pre.unsqueeze(2), streams).squeeze(2).type_as(x)        # [b,s,d]


class MTPBlock(Block):
    """Multi-token prediction: one more block, over the last layer's streams and the next token's embedding.

    forward(streams at positions p, start_pos, ids at p + 1) -> logits of what follows the last id."""

    def __init__(self, layer_id: int, args: ModelArgs):
        super().__init__(layer_id, args)
        self.e_proj = Linear(args.dim, args.dim)
        self.h_proj = Linear(args.dim, args.dim)
        self.enorm = RMSNorm(args.dim, args.norm_eps)
        self.hnorm = RMSNorm(args.dim, args.norm_eps)
        self.norm = RMSNorm(args.dim, args.norm_eps)
        hc_dim = args.hc_mult * args.dim
        self.hc_head_fn = parameter(args.hc_mult, hc_dim, dtype=torch.float32)
        self.hc_head_base = parameter(args.hc_mult, dtype=torch.float32)
        self.hc_head_scale = parameter(1, dtype=torch.float32)
        # all three are the model's own
        self.embed: ParallelEmbedding = None
        self.head: ParallelHead = None
        self.mode: Mode = None

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, start_pos: int, input_ids: torch.Tensor) -> torch.Tensor:
        with run_mode(self.mode):
            e = self.enorm(self.embed(input_ids))                                   # [b,s,d]
            x = self.e_proj(e).unsqueeze(2) + self.h_proj(self.hnorm(x))            # [b,s,hc,d]
            x = super().forward(x, start_pos, input_ids)
            return self.head(x, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.norm)


class Snapshot(NamedTuple):
    """What a model needs to go on from end_pos. Compressed rows are only appended, so they are not copied."""
    end_pos: int
    bsz: int
    saved: list


class Transformer(nn.Module):
    """The whole model: embed -> hc_mult equal streams -> blocks -> head.

    Sets the globals world_size and rank from torch.distributed, as the vendor's does. Build it under
    torch.device("meta"), load it (convert.load_weights), then call reset_caches."""
    def __init__(self, args: ModelArgs, dtype: torch.dtype = torch.bfloat16,
                 round_trips: Tuple[str, ...] = ROUND_TRIPS):
        global world_size, rank
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        unknown = set(round_trips) - set(ROUND_TRIPS)
        if unknown:
            raise ValueError(f"unknown round trip {', '.join(unknown)}; known: {', '.join(ROUND_TRIPS)}")
        super().__init__()
        self.args = args
        self.mode = Mode(dtype, tuple(round_trips), args.scale_fmt)
        self.vocab_size = args.vocab_size
        self.max_seq_len = args.max_seq_len
        self.max_batch_size = args.max_batch_size
        self.end_pos = 0        # positions that the caches hold, None after a pass that was broken off
        self.bsz = 0
        self.hc_mult = args.hc_mult
        with run_mode(self.mode):
            self.embed = ParallelEmbedding(args.vocab_size, args.dim)
            self.layers = nn.ModuleList([Block(layer_id, args) for layer_id in range(args.n_layers)])
            self.norm = RMSNorm(args.dim, args.norm_eps)
            self.head = ParallelHead(args.vocab_size, args.dim, args.norm_eps, args.hc_eps)
            self.mtp = nn.ModuleList()
            for layer_id in range(args.n_mtp_layers):
                self.mtp.append(MTPBlock(args.n_layers + layer_id, args))
                self.mtp[-1].embed, self.mtp[-1].head, self.mtp[-1].mode = self.embed, self.head, self.mode
        hc_dim = args.hc_mult * args.dim
        self.hc_head_fn = parameter(args.hc_mult, hc_dim, dtype=torch.float32)
        self.hc_head_base = parameter(args.hc_mult, dtype=torch.float32)
        self.hc_head_scale = parameter(1, dtype=torch.float32)

    def attentions(self):
        return [block.attn for block in (*self.layers, *self.mtp)]

    def copy_experts(self, limit: int):
        """Experts stay where loading put them; at most `limit` bytes of copies lie where they compute."""
        moes = [block.ffn for block in (*self.layers, *self.mtp)]
        least = max(expert.size() for moe in moes for expert in moe.experts if expert is not None)
        if limit < least:
            raise ValueError(f"{limit / 1e9:g} GB on the device hold no expert: give {least / 1e9:.9g} GB or "
                             "more")
        copies = WeightCache(limit, always=True)
        for moe in moes:
            moe.copies, moe.table = copies, None

    def reset_caches(self, device):
        """Allocates every cache anew, for max_batch_size conversations of max_seq_len tokens."""
        for block in (*self.layers, *self.mtp):
            block.attn.reset_caches(self.args, self.mode.dtype, device)
            if block.ffn.copies is None:
                block.ffn.table = expert_table(block.ffn.experts, device)
        self.end_pos = self.bsz = 0

    def snapshot(self) -> Snapshot:
        """The state at end_pos; valid while the tokens before end_pos are the ones that the model holds."""
        if self.end_pos is None:
            raise ValueError("the last pass was broken off: there is no state to keep")
        saved = [cache[:, rows].clone() for attn in self.attentions()
                 for cache, rows in attn.live_state(self.bsz, self.end_pos)]
        return Snapshot(self.end_pos, self.bsz, saved)

    def restore(self, state: Snapshot):
        """Back to a snapshot's end_pos. Broken off, it leaves the model refusing to go on, as a pass does."""
        end_pos, bsz, saved = state
        self.end_pos = None
        places = [place for attn in self.attentions() for place in attn.live_state(bsz, end_pos)]
        for (cache, rows), kept in zip(places, saved, strict=True):
            cache[:, rows] = kept
        self.end_pos, self.bsz = end_pos, bsz

    def check_input(self, input_ids: torch.Tensor, start_pos: int):
        """ValueError where a pass would compute something that nobody asked for."""
        bsz, seqlen = input_ids.shape
        if seqlen == 0 or not 1 <= bsz <= self.max_batch_size:
            raise ValueError(f"input of {bsz} x {seqlen} tokens; a pass takes 1 to {self.max_batch_size} "
                             "sequences of one token or more")
        if start_pos + seqlen > self.max_seq_len:
            raise ValueError(f"position {start_pos + seqlen} is beyond max_seq_len {self.max_seq_len}")
        if start_pos != 0 and (start_pos, bsz) != (self.end_pos, self.bsz):
            held = "nothing certain: the last pass was broken off" if self.end_pos is None else (
                f"{self.end_pos} positions of {self.bsz} sequences")
            raise ValueError(f"start_pos {start_pos} of {bsz} sequences does not go on from what the caches "
                             f"hold, {held}; restore a snapshot or start at 0")
        if input_ids.device.type == "cpu":      # ids on a GPU are not read back: that would make it wait
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f"token ids {low} to {high}; the vocabulary has 0 to {self.vocab_size - 1}")

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, start_pos: int = 0) -> torch.Tensor:
        """input_ids [b,s] at positions from start_pos -> logits of the last one, fp32 [b,vocab]."""
        self.check_input(input_ids, start_pos)
        self.end_pos, self.bsz = None, input_ids.size(0)
        with run_mode(self.mode):
            for ids in input_ids.to(self.embed.weight.device).split(self.args.max_chunk, dim=1):
                h = self.embed(ids)                                                 # [b,s,d]
                h = h.unsqueeze(2).repeat(1, 1, self.hc_mult, 1)                    # [b,s,hc,d]
                for layer in self.layers:
                    h = layer(h, start_pos, ids)
                start_pos += ids.size(1)
            logits = self.head(h, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.norm)
        self.end_pos = start_pos
        return logits
