"""Proofs that the engine computes DeepSeek-V4, and the bench where a fault is found.

    pytest test_parity.py                              every proof
    python test_parity.py                              the same, then the parity table
    python test_parity.py traps                        which check catches which mistake
    python test_parity.py copy, needle, select, arms, trace, swap, sharpen, audit, diff
                                                       the lab: where does a port lose its memory? (--help)
    python test_parity.py box                          what the box can do, and what breaks it
    python test_parity.py golden                       writes the logits that guard it anew
    python test_parity.py bench                        speed beside transformers
    python test_parity.py full-size                    memory and time at Flash's size, on files with holes
    python test_parity.py long                         memory and time over the length of a prompt
    python test_parity.py sm120                        compiles the Triton kernels for sm_120, without a GPU
    python test_parity.py kernels                      on a GPU: checks and times them at Flash's shapes
    python test_parity.py vendor --vendor-dir DIR      beside the vendor's model.py, in its inference folder

Every comparison names its oracle. There are four that share no code with the engine:
- the NumPy reference below. It was written from the vendor's files and not from model.py, reads published
  checkpoints by itself and computes all positions at once, without caches;
- Hugging Face transformers, another team's implementation;
- brute force: search over all codes of a format, loops in float64, results worked out by hand;
- the vendor's model.py, run over our kernel.py.
Agreement of the engine with itself (chunks, batches, processes) is labelled as that.

Structure is proven in fp32 with the round trips off; the round trips bit for bit, and layer by layer; bf16 by
the distribution of its errors. Fixtures are random checkpoints in the published format, written by the tests.
"""

import argparse
import ast
import atexit
import collections
import contextlib
import copy
import functools
import hashlib
import html
import importlib.util
import inspect
import io
import itertools
import json
import math
import mmap
import multiprocessing
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import typing
import warnings
import xml.dom.minidom
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")         # read when torch is imported; see generate.py
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # the same for NumPy's threads

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file

import convert
import generate
import kernel
import model
from generate import (Settings, Session, StreamParser, TokenText, encode_messages, encode_prompt,
                      parse_message_from_completion_text, sample)

torch.set_num_threads(1)    # the fixtures are small: a second thread would mostly wait


# ==========================================================================================================
# The oracle: an independent reference of DeepSeek-V4 in NumPy
# ==========================================================================================================
# Written from the vendor's Pro release (inference/model.py, inference/kernel.py), not from the engine under
# test. It reads a published checkpoint by itself and computes all positions at once.
# Deliberate differences from the vendor:
# - no caches, ring buffers or pooling state: causality is a mask, so an error in an engine's state shows;
# - everything in `dtype` (float64): activations are not rounded to bf16 between operations;
# - the FP8, FP4 and Hadamard steps are separate switches; rounded values and discrete choices can be replaced
#   through `settle`;
# - attention is dense over window and compressed rows with a mask, where the vendor gathers rows by index.

E4M3_MAX, E4M3_MIN_EXPONENT, E4M3_MANTISSA = 448.0, -6, 3
E2M1_MAX, E2M1_MIN_EXPONENT, E2M1_MANTISSA = 6.0, 0, 1
ACT_BLOCK, KV_BLOCK, FP4_BLOCK, WEIGHT_BLOCK = 128, 64, 32, 128
REFERENCE_ROUND_TRIPS = {"kv", "index", "hadamard", "act"}
VOCAB_CHUNK = 4096  # rows of head.weight decoded at a time: all 129,280 x 4,096 are 4 GB in float64


# ---- number formats

def decode_bf16(raw):
    """bfloat16 bits (uint16) to float32: the upper half of the same float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _e4m3_table():
    """The 256 values of e4m3 'fn': bias 7, no infinities, NaN only at 0x7f and 0xff."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3_TABLE = _e4m3_table()
E2M1_TABLE = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode_e4m3(raw):
    """float8_e4m3fn bits (uint8) to float32."""
    return E4M3_TABLE[raw]


def decode_e8m0(raw):
    """float8_e8m0fnu bits (uint8) to float32: 2^(bits - 127); 255 is NaN, and 0 a subnormal float32."""
    value = np.ldexp(np.float32(1), np.minimum(raw, 254).astype(np.int32) - 127)
    return np.where(raw == 255, np.float32(np.nan), value)


def decode_e2m1(raw):
    """Packed float4_e2m1 bits (uint8 [..., K/2]) to float32 [..., K]; the low nibble comes first."""
    pairs = np.stack([raw & 15, raw >> 4], axis=-1)  # [...,K/2,2]
    return E2M1_TABLE[pairs].reshape(*raw.shape[:-1], -1)  # [...,K]


def round_bf16(x):
    """Nearest bfloat16, ties to even, returned in x's own dtype."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    kept = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return kept.view(np.float32).astype(x.dtype)


def _quantum(x, largest, min_exponent, mantissa):
    """Distance between neighbours of a small float format at x's magnitude, x being clipped to its range."""
    within = np.clip(np.abs(x), 2.0 ** min_exponent, largest)  # zero and subnormals: the smallest spacing
    return np.ldexp(1.0, np.frexp(within)[1] - 1 - mantissa)


def quantum_e4m3(x):
    """Spacing of e4m3 at x: 2^-9 among the subnormals, 32 at the top."""
    return _quantum(np.asarray(x, float), E4M3_MAX, E4M3_MIN_EXPONENT, E4M3_MANTISSA)


def quantum_e2m1(x):
    """Spacing of e2m1 at x: 0.5 below 2, 1 below 4, then 2."""
    return _quantum(np.asarray(x, float), E2M1_MAX, E2M1_MIN_EXPONENT, E2M1_MANTISSA)


def round_e4m3(x):
    """Nearest e4m3 value, ties to even, saturating at 448 (the vendor clamps before its cast)."""
    x = np.clip(x, -E4M3_MAX, E4M3_MAX)
    quantum = quantum_e4m3(x)  # even multiples of it are the values with an even last bit
    return (np.rint(x / quantum) * quantum).astype(x.dtype)


def round_e2m1(x):
    """Nearest e2m1 value, ties to even, saturating at 6."""
    x = np.clip(x, -E2M1_MAX, E2M1_MAX)
    quantum = quantum_e2m1(x)
    return (np.rint(x / quantum) * quantum).astype(x.dtype)


def _blocks(x, block):
    """Cut the last axis into blocks; zeros fill a short last block, which leaves its amax as it is."""
    short = -x.shape[-1] % block
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return padded.reshape(*x.shape[:-1], -1, block)  # [...,n,block]


def _power_of_two_scale(amax, largest):
    """Smallest power of two >= amax / largest; the product with 1/largest is float32 (fast_round_scale)."""
    ratio = amax.astype(np.float32) * np.float32(1 / largest)
    mantissa, exponent = np.frexp(ratio)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)  # 0.5 is a power of two's mantissa
    return np.ldexp(1.0, exponent)


def act_scales(x, block):
    """act_quant's ue8m0 scale of each block of the last axis (amax not below 1e-4)."""
    amax = np.abs(_blocks(x, block)).max(axis=-1)  # [...,n]
    return _power_of_two_scale(np.maximum(amax, 1e-4), E4M3_MAX).astype(x.dtype)


def fp4_scales(x, block):
    """fp4_act_quant's scale of each block of the last axis (amax not below 6 * 2^-126)."""
    amax = np.abs(_blocks(x, block)).max(axis=-1)  # [...,n]
    return _power_of_two_scale(np.maximum(amax, 6 * 2.0 ** -126), E2M1_MAX).astype(x.dtype)


def _round_trip(x, block, scales, rounded):
    scale = scales(x, block)[..., None]  # [...,n,1]
    y = rounded(_blocks(x, block) / scale) * scale
    return y.reshape(*x.shape[:-1], -1)[..., :x.shape[-1]]


def act_round_trip(x, block):
    """Quantise to e4m3 per block of the last axis and back (kernel: act_quant)."""
    return _round_trip(x, block, act_scales, round_e4m3)


def fp4_round_trip(x, block):
    """Quantise to e2m1 per block of the last axis and back (kernel: fp4_act_quant)."""
    return _round_trip(x, block, fp4_scales, round_e2m1)


# ---- small mathematics

def hadamard(x):
    """Walsh-Hadamard transform of the last axis, Sylvester's order, orthogonal (rotate_activation)."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"Hadamard transform of {size} dims: not a power of two")
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return x @ (matrix * size ** -0.5).astype(x.dtype)


def yarn_frequencies(dim, theta, original_length=0, factor=1.0, beta_fast=32, beta_slow=1):
    """Rotation per position of each pair of rope dims, float32 (precompute_freqs_cis); length 0: no YaRN.

    float32 is part of the model: at position 600 a float64 table would be some 1e-5 rad away from it.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)  # [dim/2]
    frequencies = np.float32(1) / (np.float64(theta) ** exponents).astype(np.float32)
    if not original_length:
        return frequencies

    def pair_turning(times):  # the (fractional) pair that makes this many turns over the original length
        return dim * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(beta_fast)), 0)
    high = min(math.ceil(pair_turning(beta_slow)), dim - 1)
    width = np.float32(high - low or 0.001)
    slow = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    fast = np.float32(1) - slow
    return frequencies / np.float32(factor) * (np.float32(1) - fast) + frequencies * fast


def rope(x, positions, frequencies, inverse=False):
    """Rotate the LAST dims of x [s,d] or [s,h,d] in interleaved pairs (apply_rotary_emb)."""
    dims = 2 * len(frequencies)
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(x.dtype)  # [s,dims/2]
    if x.ndim == 3:
        angle = angle[:, None]  # [s,1,dims/2]
    cos, sin = np.cos(angle), np.sin(-angle if inverse else angle)
    first, second = x[..., -dims::2], x[..., 1 - dims::2]
    y = x.copy()
    y[..., -dims::2] = first * cos - second * sin
    y[..., 1 - dims::2] = first * sin + second * cos
    return y


def softmax(x, axis):
    """Softmax that keeps exact zeros for -inf."""
    y = np.exp(x - x.max(axis=axis, keepdims=True))
    return y / y.sum(axis=axis, keepdims=True)


def sigmoid(x):
    """Logistic function; the tanh form cannot overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def rms(x, eps):
    """Unweighted RMS norm of the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def overlap(groups, missing):
    """Groups [r,ratio,2d] to [r,2*ratio,d]: the group before's first half of channels, this one's second."""
    dim = groups.shape[2] // 2
    before = np.roll(groups[:, :, :dim], 1, axis=0)  # [r,ratio,d]
    before[:1] = missing
    return np.concatenate([before, groups[:, :, dim:]], axis=1)  # [r,2*ratio,d]


def sinkhorn(logits, iterations, eps):
    """hc_split_sinkhorn's comb: softmax of rows, then rows and columns divided by their sums in turn."""
    comb = softmax(logits, axis=-1) + eps
    for step in range(iterations):
        if step:  # the softmax was the first pass over rows
            comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return comb


# ---- checkpoint

STORAGE = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8,
           "I64": np.int64}
DECODE = {"BF16": decode_bf16, "F32": np.asarray, "F8_E4M3": decode_e4m3, "F8_E8M0": decode_e8m0,
          "I8": decode_e2m1, "I64": np.asarray}


class Checkpoint:
    """A folder of safetensors shards, mapped and decoded one tensor at a time."""

    def __init__(self, folder):
        folder = Path(folder)
        self.entries = {}
        shards = sorted({*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors")})
        if not shards:
            raise FileNotFoundError(f"no model*.safetensors in {folder}")
        for path in shards:
            with open(path, "rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if name in self.entries:
                    raise ValueError(f"{name} is in two shards")
                begin, end = entry["data_offsets"]
                place = path, 8 + header_size + begin, end - begin
                self.entries[name] = entry["dtype"], tuple(entry["shape"]), place

    def raw(self, name):
        """The stored bits of a tensor, not yet read."""
        dtype, shape, (path, offset, size) = self.entries[name]
        storage = np.dtype(STORAGE[dtype])
        if size != storage.itemsize * math.prod(shape):
            raise ValueError(f"{name}: {size} bytes do not make {dtype} {shape}")
        return np.memmap(path, storage, "r", offset, shape)

    def quantised(self, name):
        """Whether a weight is stored in FP8 or FP4."""
        return self.entries[name][0] in ("F8_E4M3", "I8")

    def rows(self, name, index):
        """Some rows of an unquantised tensor."""
        if self.quantised(name):
            raise ValueError(f"{name} is quantised: its rows cannot be read alone")
        return DECODE[self.entries[name][0]](np.asarray(self.raw(name)[index]))

    def tensor(self, name, dtype):
        """A whole tensor, with its scales applied when it is quantised."""
        stored, shape, _ = self.entries[name]
        raw, decode = np.asarray(self.raw(name)), DECODE[stored]
        if not self.quantised(name):
            return decode(raw).astype(dtype)
        packed = stored == "I8"
        rows, columns = shape[0], shape[1] * 2 if packed else shape[1]
        height, width = (1, FP4_BLOCK) if packed else (WEIGHT_BLOCK, WEIGHT_BLOCK)
        scale = self.tensor(name.removesuffix(".weight") + ".scale", dtype)
        if scale.shape != (-(-rows // height), -(-columns // width)):
            raise ValueError(f"{name}: scale {scale.shape} does not fit {(rows, columns)}")
        value = np.empty((rows, columns), dtype)
        for row in range(0, rows, WEIGHT_BLOCK):  # by strips: no second array of the full size
            strip = slice(row, row + WEIGHT_BLOCK)
            scales = scale[row // height:strip.stop // height]  # FP8: one row; FP4: one per weight row
            value[strip] = decode(raw[strip])
            value[strip] *= np.repeat(scales, width, axis=1)[:, :columns]
        return value


# ---- the model

class Reference:
    """DeepSeek-V4 over a whole sequence. s tokens, hc streams, d dims, h heads, r compressed rows, e experts.

    round_trips: any of "kv", "index", "hadamard", "act" (what the vendor's kernels round).
    settle(name, own): sees each rounded value and each discrete choice; what it returns is used from there.
    Points without a row (no full group yet) are skipped, except the choices, which are always shown.
    p_bf16: round softmax weights to bf16 before P.V, as sparse_attn does (there relative to a maximum that
    runs over blocks of 64 keys, here to the final one: an error of the same size, not the same bits).
    """
    files = Checkpoint      # what reads the folder

    def __init__(self, folder, round_trips=(), settle=None, dtype=np.float64, p_bf16=False):
        unknown = set(round_trips) - REFERENCE_ROUND_TRIPS
        if unknown:
            raise ValueError(f"unknown round trips {sorted(unknown)}")
        self.checkpoint = self.files(folder)
        self.config = config = json.loads((Path(folder) / "config.json").read_text())
        for key, known in ("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True), ("n_shared_experts", 1):
            if config[key] != known:
                raise ValueError(f"config.json: {key} is {config[key]!r}, only {known!r} is known here")
        self.round_trips, self.settle_with = frozenset(round_trips), settle
        self.dtype, self.p_bf16 = np.dtype(dtype), p_bf16
        self.eps = config["rms_norm_eps"]

    # ---- building bricks

    def settle(self, name, own):
        """Let the caller see, and replace, a rounded value or a choice."""
        if self.settle_with is None:
            return own
        value = np.asarray(self.settle_with(name, own), dtype=own.dtype)
        if value.shape != own.shape:
            raise ValueError(f"settle({name!r}) returned {value.shape} for {own.shape}")
        return value

    def tensor(self, name):
        return self.checkpoint.tensor(name, self.dtype)

    def linear(self, x, name):
        """x W^T; the input of a quantised weight is itself quantised (vendor: linear)."""
        if "act" in self.round_trips and self.checkpoint.quantised(name + ".weight"):
            x = self.settle(name, act_round_trip(x, ACT_BLOCK))
        return x @ self.tensor(name + ".weight").T

    def norm(self, x, name):
        return rms(x, self.eps) * self.tensor(name + ".weight")

    def frequencies(self, ratio):
        """Layers that compress have their own base and YaRN; pure window layers have neither."""
        dim, yarn = self.config["qk_rope_head_dim"], self.config["rope_scaling"]
        if not ratio:
            return yarn_frequencies(dim, self.config["rope_theta"])
        theta, length = self.config["compress_rope_theta"], yarn["original_max_position_embeddings"]
        return yarn_frequencies(dim, theta, length, yarn["factor"], yarn["beta_fast"], yarn["beta_slow"])

    # ---- hyper-connections

    def hc_mixes(self, h, prefix):
        """Mixing logits of each position, from all its streams (Block.hc_pre, ParallelHead.hc_head)."""
        flat = h.reshape(len(h), -1)  # [s,hc*d]
        return rms(flat, self.eps) @ self.tensor(prefix + "_fn").T

    def hc_pre(self, h, prefix):
        """Streams to one input, with the weights that hc_post will need."""
        hc, eps = self.config["hc_mult"], self.config["hc_eps"]
        scale, base = self.tensor(prefix + "_scale"), self.tensor(prefix + "_base")
        logits = self.hc_mixes(h, prefix) * np.repeat(scale, [hc, hc, hc * hc]) + base  # [s,(2+hc)*hc]
        pre = sigmoid(logits[:, :hc]) + eps
        post = 2 * sigmoid(logits[:, hc:2 * hc])
        comb = logits[:, 2 * hc:].reshape(-1, hc, hc)  # [s,hc,hc]
        comb = sinkhorn(comb, self.config["hc_sinkhorn_iters"], eps)
        return np.einsum("sj,sjd->sd", pre, h), post, comb  # [s,d]

    def hc_post(self, x, residual, post, comb):
        """y[k] = post[k] x + sum over j of comb[j,k] residual[j]: comb's FIRST index is summed."""
        mixed = np.matmul(comb.transpose(0, 2, 1), residual)
        return post[:, :, None] * x[:, None] + mixed  # [s,hc,d]

    # ---- attention

    def compress(self, x, prefix, ratio, indexer):
        """Compressor: pool each full group of `ratio` tokens to one row; main rows or the indexer's keys."""
        count = len(x) // ratio
        ape = self.tensor(prefix + ".ape")  # [ratio,d], and 2d where rows overlap
        kv = x[:count * ratio] @ self.tensor(prefix + ".wkv.weight").T
        score = x[:count * ratio] @ self.tensor(prefix + ".wgate.weight").T
        kv = kv.reshape(count, *ape.shape)  # [r,ratio,d]
        score = score.reshape(count, *ape.shape) + ape  # [r,ratio,d]
        if ratio == 4:
            kv, score = overlap(kv, 0), overlap(score, -np.inf)  # the first row has no group before it
        rows = (kv * softmax(score, axis=1)).sum(axis=1)  # [r,d]
        rows = self.norm(rows, prefix + ".norm")
        rows = rope(rows, np.arange(count) * ratio, self.frequencies(ratio))  # at its group's FIRST position
        settle_name = prefix + ".kv"
        return self.index_round_trip(rows, settle_name) if indexer else self.kv_round_trip(rows, settle_name)

    def kv_round_trip(self, kv, name):
        """FP8 round trip of the dims that rope leaves alone."""
        if "kv" not in self.round_trips or not len(kv):
            return kv
        plain = kv.shape[-1] - self.config["qk_rope_head_dim"]
        rounded = act_round_trip(kv[:, :plain], KV_BLOCK)
        return self.settle(name, np.concatenate([rounded, kv[:, plain:]], axis=1))

    def index_round_trip(self, x, name):
        """Hadamard transform and FP4 round trip of the indexer's queries and keys."""
        if "hadamard" in self.round_trips:
            x = hadamard(x)
        if "index" in self.round_trips and len(x):
            x = self.settle(name, fp4_round_trip(x, FP4_BLOCK))
        return x

    def index(self, x, q_lora, prefix, ratio, visible, named):
        """Indexer: the rows that each position attends, as a mask [s,r]."""
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.linear(q_lora, prefix + ".wq_b").reshape(len(x), heads, dim)  # [s,h,d]
        q = rope(q, np.arange(len(x)), self.frequencies(ratio))
        q = self.index_round_trip(q, prefix + ".q")
        keys = self.compress(x, prefix + ".compressor", ratio, indexer=True)
        weights = x @ self.tensor(prefix + ".weights_proj.weight").T * (dim * heads) ** -0.5  # [s,h]
        scores = np.zeros(visible.shape, x.dtype)  # [s,r]
        for head in range(heads):
            scores += np.maximum(q[:, head] @ keys.T, 0) * weights[:, head, None]
        scores = np.where(visible, scores, -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")  # of exact ties the earlier row
        best = order[:, :self.config["index_topk"]]  # [s,k]
        chosen = np.zeros_like(visible)
        np.put_along_axis(chosen, best, True, axis=1)
        chosen = self.settle(prefix + ".topk", chosen & visible)
        named |= {"attn.index_q": q, "attn.index_keys": keys}
        named |= {"attn.index_scores": scores, "attn.topk": chosen}
        return chosen

    def attend(self, q, keys, mask, sink):
        """Softmax attention; keys are the values too, the sink is in the denominator alone (sparse_attn)."""
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = np.where(mask, q[:, head] @ keys.T * q.shape[2] ** -0.5, -np.inf)  # [s,s+r]
            top = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - top)
            total = p.sum(axis=1, keepdims=True) + np.exp(sink[head] - top)
            out[:, head] = (round_bf16(p) if self.p_bf16 else p) @ keys / total
        return out

    def output(self, o, prefix):
        """Grouped low-rank output projection: wo_a within each group of heads, then wo_b over all."""
        groups = self.config["o_groups"]
        wo_a = np.split(self.tensor(prefix + ".wo_a.weight"), groups)  # g times [rank,h*d/g]
        if self.checkpoint.quantised(prefix + ".wo_a.weight"):
            wo_a = [round_bf16(part) for part in wo_a]  # as convert.py stores it: its input is not quantised
        o = np.split(o.reshape(len(o), -1), groups, axis=1)  # g times [s,h*d/g]
        low = np.concatenate([part @ weight.T for part, weight in zip(o, wo_a)], axis=1)  # [s,g*rank]
        return self.linear(low, prefix + ".wo_b")

    def attention(self, x, prefix, ratio, named):
        """One attention sublayer: window rows for all, compressed rows for layers with a ratio."""
        config, positions = self.config, np.arange(len(x))
        heads, dim, frequencies = config["num_attention_heads"], config["head_dim"], self.frequencies(ratio)
        q_lora = self.norm(self.linear(x, prefix + ".wq_a"), prefix + ".q_norm")
        q = self.linear(q_lora, prefix + ".wq_b").reshape(len(x), heads, dim)  # [s,h,d]
        q = rope(rms(q, self.eps), positions, frequencies)
        kv = self.norm(self.linear(x, prefix + ".wkv"), prefix + ".kv_norm")
        kv = self.kv_round_trip(rope(kv, positions, frequencies), prefix + ".kv")
        age = positions[:, None] - positions  # [s,s]
        keys, mask = kv, (age >= 0) & (age < config["sliding_window"])
        named |= {"attn.x": x, "attn.q": q, "attn.kv": kv}
        if ratio:
            rows = np.arange(len(x) // ratio)
            visible = rows < (positions[:, None] + 1) // ratio  # [s,r]: a row is seen once its group is full
            if ratio == 4:
                visible = self.index(x, q_lora, prefix + ".indexer", ratio, visible, named)
            compressed = self.compress(x, prefix + ".compressor", ratio, indexer=False)
            keys, mask = np.concatenate([kv, compressed]), np.concatenate([mask, visible], axis=1)  # [s,s+r]
            named["attn.compressed"] = compressed
        o = self.attend(q, keys, mask, self.tensor(prefix + ".attn_sink"))
        o = rope(o, positions, frequencies, inverse=True)  # values carry rope too: only distances remain
        named["attn.o"] = o
        return self.output(o, prefix)

    # ---- experts

    def gate(self, x, prefix, layer, tokens):
        """Experts of each position, ascending, and their weights (Gate)."""
        logits = x @ self.tensor(prefix + ".weight").T
        scores = np.sqrt(np.logaddexp(0, logits))  # [s,e]
        count = self.config["num_experts_per_tok"]
        if layer < self.config["num_hash_layers"]:
            indices = self.checkpoint.rows(prefix + ".tid2eid", tokens)  # [s,k]
        else:
            biased = scores + self.tensor(prefix + ".bias")  # the bias moves the choice only
            indices = np.argsort(-biased, axis=1, kind="stable")[:, :count]
        indices = self.settle(prefix, np.sort(indices.astype(np.int64), axis=1))
        weights = np.take_along_axis(scores, indices, axis=1)
        return indices, weights / weights.sum(axis=1, keepdims=True) * self.config["routed_scaling_factor"]

    def expert(self, x, prefix, weights=None):
        """SwiGLU with both halves limited; a routed expert is weighted BEFORE w2 (Expert)."""
        gate, up = self.linear(x, prefix + ".w1"), self.linear(x, prefix + ".w3")
        limit = self.config["swiglu_limit"]
        if limit > 0:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        inner = gate * sigmoid(gate) * up
        return self.linear(inner if weights is None else weights * inner, prefix + ".w2")

    def moe(self, x, prefix, layer, tokens, named):
        """Routed experts and the shared one."""
        indices, weights = self.gate(x, prefix + ".gate", layer, tokens)
        y = np.zeros_like(x)
        for expert in np.unique(indices):
            chosen = indices == expert
            rows = np.flatnonzero(chosen.any(axis=1))
            slot = chosen[rows].argmax(axis=1)  # listed twice for one token it counts once, as in MoE.forward
            y[rows] += self.expert(x[rows], f"{prefix}.experts.{expert}", weights[rows, slot, None])
        named |= {"ffn.x": x, "ffn.gate_weights": weights, "ffn.gate_indices": indices, "ffn.routed": y}
        return y + self.expert(x, prefix + ".shared_experts")

    # ---- the whole

    def layer(self, h, prefix, layer, tokens):
        """Block.forward: each sublayer between hc_pre and hc_post; streams and named intermediates."""
        named = {}
        x, post, comb = self.hc_pre(h, prefix + ".hc_attn")
        named |= {"attn.hc_x": x, "attn.hc_post": post, "attn.hc_comb": comb}
        x = self.norm(x, prefix + ".attn_norm")
        x = self.attention(x, prefix + ".attn", self.config["compress_ratios"][layer], named)
        h = self.hc_post(x, h, post, comb)
        named |= {"attn.out": x, "attn.h": h}
        x, post, comb = self.hc_pre(h, prefix + ".hc_ffn")
        named |= {"ffn.hc_x": x, "ffn.hc_post": post, "ffn.hc_comb": comb}
        x = self.norm(x, prefix + ".ffn_norm")
        x = self.moe(x, prefix + ".ffn", layer, tokens, named)
        h = self.hc_post(x, h, post, comb)
        named |= {"ffn.out": x}
        return h, named

    def logits(self, h, prefix):
        """Streams to one, norm, vocabulary (ParallelHead, at every position)."""
        scale, base = self.tensor(prefix + "hc_head_scale"), self.tensor(prefix + "hc_head_base")
        pre = sigmoid(self.hc_mixes(h, prefix + "hc_head") * scale + base) + self.config["hc_eps"]  # [s,hc]
        x = self.norm(np.einsum("sj,sjd->sd", pre, h), prefix + "norm")  # [s,d]
        vocab = self.config["vocab_size"]
        chunks = [slice(i, min(i + VOCAB_CHUNK, vocab)) for i in range(0, vocab, VOCAB_CHUNK)]
        parts = [x @ self.checkpoint.rows("head.weight", chunk).astype(self.dtype).T for chunk in chunks]
        return np.concatenate(parts, axis=1)  # [s,vocab]

    def embed(self, tokens):
        """Token ids [s] to hc equal streams [s,hc,d]."""
        x = self.checkpoint.rows("embed.weight", np.asarray(tokens)).astype(self.dtype)  # [s,d]
        return np.repeat(x[:, None], self.config["hc_mult"], axis=1)  # [s,hc,d]

    def block(self, i, h, tokens):
        """Layer i over the whole sequence: (streams [s,hc,d], its named intermediates)."""
        return self.layer(np.asarray(h, self.dtype), f"layers.{i}", i, np.asarray(tokens))

    def head(self, h):
        """Logits [s,vocab] of every position."""
        return self.logits(np.asarray(h, self.dtype), "")

    def forward(self, tokens):
        """Token ids [s] to logits [s,vocab]."""
        h = self.embed(tokens)
        for i in range(self.config["num_hidden_layers"]):
            h, _ = self.block(i, h, tokens)
        return self.head(h)

    def mtp(self, h, tokens_next):
        """MTPBlock: logits [s,vocab] from the last layer's streams and the ids that follow them."""
        h, tokens = np.asarray(h, self.dtype), np.asarray(tokens_next)
        e = self.norm(self.embed(tokens)[:, 0], "mtp.0.enorm")  # [s,d]
        e = self.linear(e, "mtp.0.e_proj")[:, None]  # [s,1,d]
        h = e + self.linear(self.norm(h, "mtp.0.hnorm"), "mtp.0.h_proj")
        h, _ = self.layer(h, "mtp.0", self.config["num_hidden_layers"], tokens)
        return self.logits(h, "mtp.0.")


# ==========================================================================================================
# Fixtures: random checkpoints in the published format
# ==========================================================================================================

# The published keys. Small, but with everything in it: hash and scored layers, ratios 0, 4 and 128, 16 index
# heads (with fewer, all ReLUs of a token can be 0, and top-k breaks exact ties at random), an MTP block, and
# a top-k and a swiglu_limit that bite.
SMALL = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 512,
    "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 6, "num_hash_layers": 2,
    "num_nextn_predict_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128,
    "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_groups": 4, "o_lora_rank": 64, "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 2.0, "topk_method": "noaux_tc",
    "index_n_heads": 16, "index_head_dim": 128, "index_topk": 32, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
QUANTISED = {"expert_dtype": "fp4", "quantization_config": {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128]}}
# Attention at Flash's size (but for the rank of its output), with little around it.
REAL_ATTENTION = SMALL | {
    "hidden_size": 1024, "num_hidden_layers": 3, "num_hash_layers": 1, "num_attention_heads": 64,
    "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 128, "index_n_heads": 64,
    "index_topk": 512, "compress_ratios": [0, 4, 128, 0], "swiglu_limit": 10.0}
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 127, 128, 129, 200, 300, 600)
N_TOKENS = 600


def random_tensor(name: str, dtype: str, shape: list, config: dict, rng: torch.Generator) -> torch.Tensor:
    """A tensor of the published layout, scaled to keep activations near 1 and to let every part matter."""
    if dtype == "I64":          # tid2eid: distinct experts for each token
        scores = torch.rand(shape[0], config["n_routed_experts"], generator=rng)
        return scores.argsort(dim=-1)[:, :shape[1]].contiguous()
    if dtype == "I8":           # any byte is a pair of e2m1 numbers
        return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)
    x = torch.randn(shape, generator=rng)
    if dtype == "F8_E4M3":
        return (64 * x).to(torch.float8_e4m3fn)
    if name.endswith("norm.weight"):
        x = 1 + 0.1 * x
    elif name.endswith("_scale"):
        x = 1 + 0.2 * x
    elif name.endswith("gate.bias"):
        x = 0.3 * x
    elif not name.endswith(("attn_sink", "ape", "_base", "embed.weight")):
        x = x / shape[-1] ** 0.5
    return x if dtype == "F32" else x.bfloat16()


def random_scale(weight: str, shape: list, rng: torch.Generator) -> torch.Tensor:
    """e8m0 scales, each one of two neighbours, that bring the weight to about 1 / sqrt(its inputs)."""
    packed = weight == "I8"
    inputs = shape[-1] * (32 if packed else 128)
    spread = 2.93 if packed else 64     # standard deviation of the stored numbers
    exponent = round(-math.log2(spread * inputs ** 0.5))
    byte = 127 + exponent - torch.randint(0, 2, shape, generator=rng)
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def write_checkpoint(folder, config: dict, seed: int = 0) -> str:
    """Writes a random published checkpoint. The layout is convert.inventory's, proven by Flash's figures."""
    os.makedirs(folder, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    table = convert.inventory(config)
    tensors = {}
    for name, entry in table.items():
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in table:
            weight = table[name.removesuffix("scale") + "weight"]["dtype"]
            tensors[name] = random_scale(weight, entry["shape"], rng)
        else:
            tensors[name] = random_tensor(name, entry["dtype"], entry["shape"], config, rng)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    return str(folder)


def load(folder, dtype=torch.float32, round_trips=(), **runtime) -> model.Transformer:
    """The engine on a checkpoint folder. Exact unless told otherwise; whole prompts run in one chunk."""
    runtime = {"max_seq_len": 640, "max_chunk": 640} | runtime
    args = model.ModelArgs.from_config(os.path.join(folder, "config.json"), **runtime)
    with torch.device("meta"):
        engine = model.Transformer(args, dtype=dtype, round_trips=round_trips)
    convert.load_weights(engine, folder)
    engine.reset_caches("cpu")
    return engine


def random_tokens(n: int = N_TOKENS, vocab: int = 512, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


@functools.lru_cache
def fixture(kind: str) -> str:
    """The folder of a random checkpoint, written once per run: "bf16", "fp8" (with fp4 experts) or "real"."""
    config = {"bf16": SMALL, "fp8": SMALL | QUANTISED, "real": REAL_ATTENTION}[kind]
    return write_checkpoint(os.path.join(work_folder(), kind), config)


@functools.lru_cache
def work_folder() -> str:
    folder = tempfile.mkdtemp(prefix="parity-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.lru_cache
def reference_logits(kind: str) -> np.ndarray:
    """The reference's logits [600, vocab], round trips off; row n - 1 is what a prompt of n tokens gives."""
    return Reference(fixture(kind)).forward(random_tokens()[0].numpy())


# ==========================================================================================================
# Reporting
# ==========================================================================================================

PROOFS: list[tuple] = []


def relative_error(ours, theirs) -> float:
    """max |ours - theirs| / max |theirs|."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def proof(stage: str, oracle: str, dtype: str, error: float, tolerance: float, blind: str):
    """Records a line of the parity table, then fails if the error is too large. blind: what it cannot see."""
    PROOFS.append((stage, oracle, dtype, error, tolerance, blind))
    assert error <= tolerance, f"{stage} against {oracle}: {error:.2e} is more than {tolerance:.0e}"


def print_proofs(file=sys.stdout):
    print("| stage | oracle | dtype | error | tolerance | what it cannot see |", file=file)
    print("|---|---|---|---|---|---|", file=file)
    for stage, oracle, dtype, error, tolerance, blind in PROOFS:
        print(f"| {stage} | {oracle} | {dtype} | {error:.1e} | {tolerance:.1e} | {blind} |", file=file)


# fp32 keeps 24 bits: 6e-8 a step. Over six layers, and against another order of summation, 1e-6 is normal.
EXACT = 1e-5
REFERENCE = "NumPy reference"
SHARED_BLIND = "a misreading of the vendor's files that two authors share"


# ==========================================================================================================
# kernel.py, bit for bit, against brute force over all codes
# ==========================================================================================================

def nearest_code(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code whose value is nearest to x; of two equally near ones the even code. Tables ascend from 0."""
    distance = np.abs(np.abs(x)[..., None].astype(np.float64) - table.astype(np.float64))
    best = distance.min(axis=-1, keepdims=True)
    candidates = np.where(distance == best, np.arange(len(table)), len(table))
    first = candidates.min(axis=-1)
    tie = (distance == best).sum(axis=-1) == 2
    return np.where(tie & (first % 2 == 1), first + 1, first)


def brute_scale(blocks: np.ndarray, floor: float, largest: float, power_of_two: bool) -> np.ndarray:
    """Per block: max(amax, floor) / largest in fp32, then the smallest power of two at or above, searched."""
    wanted = np.maximum(np.abs(blocks).max(axis=-1), np.float32(floor)) * np.float32(1 / largest)
    if not power_of_two:
        return wanted
    powers = np.ldexp(np.float32(1), np.arange(-126, 128))
    return powers[np.searchsorted(powers, wanted)]


def rounding_inputs(block: int, table: np.ndarray, seed: int) -> np.ndarray:
    """Rows of blocks [n, 4 * block]: random over 30 binades, every code and every midpoint at several scales,
    their fp32 neighbours, zeros, signed zeros, the largest numbers."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((64, block)) * np.exp2(rng.integers(-15, 15, (64, 1)))]
    middle = (table[1:] + table[:-1]) / 2
    for scale in (1.0, 2.0 ** -9, 2.0 ** 5):
        exact = np.concatenate([table, middle]).astype(np.float32) * np.float32(scale)
        below, above = (np.nextafter(exact, np.float32(to)) for to in (0, 9e9))
        points = np.concatenate([exact, below, above])
        points = np.concatenate([points, -points, np.zeros(-2 * len(points) % (block - 1), np.float32)])
        points = points.reshape(-1, block - 1)
        top = np.full((len(points), 1), table[-1] * scale, np.float32)      # fixes the block's scale
        rows.append(np.concatenate([points, top], axis=1))
    rows.append(np.zeros((2, block)))
    rows.append(np.full((1, block), -0.0))
    rows.append(np.concatenate([np.full((1, block - 1), 1e-30), [[3e38]]], axis=1))
    rows = np.concatenate(rows).astype(np.float32)
    rows = np.concatenate([rows, np.zeros((-len(rows) % 4, block), np.float32)])
    return rows.reshape(-1, 4 * block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", None])
def test_act_quant_bit_for_bit(block, scale_fmt):
    """Oracle: search over the 127 finite e4m3 codes, decoded by the reference's table."""
    table = E4M3_TABLE[:127]
    x = rounding_inputs(block, table, block)
    blocks = x.reshape(-1, block)
    scale = brute_scale(blocks, 1e-4, 448, scale_fmt is not None)[:, None]
    code = nearest_code(np.minimum(np.abs(blocks / scale), 448), table)
    value = np.copysign(table[code] * scale, blocks).reshape(x.shape)
    code = (code | np.signbit(blocks) * 128).astype(np.uint8).reshape(x.shape)

    scale_dtype = torch.float8_e8m0fnu if scale_fmt else torch.float32
    y, s = kernel.act_quant(torch.from_numpy(x), block, scale_fmt, scale_dtype)
    assert s.dtype == scale_dtype and np.array_equal(s.float().numpy().ravel(), scale.ravel())
    assert np.array_equal(y.view(torch.uint8).numpy(), code)
    in_place = torch.from_numpy(x.copy())
    assert kernel.act_quant(in_place, block, scale_fmt, scale_dtype, True) is in_place
    assert np.array_equal(in_place.numpy().view(np.uint32), value.view(np.uint32))


def test_fp4_act_quant_bit_for_bit():
    """Oracle: search over the 8 e2m1 codes, decoded by the reference's table."""
    table = E2M1_TABLE[:8]
    x = rounding_inputs(32, table, 3)
    blocks = x.reshape(-1, 32)
    scale = brute_scale(blocks, 6 * 2.0 ** -126, 6, True)[:, None]
    code = nearest_code(np.minimum(np.abs(blocks / scale), 6), table)
    with np.errstate(over="ignore"):        # 6 * 2^126 is inf, in the engine too
        value = np.copysign(table[code] * scale, blocks).reshape(x.shape)
    code = (code | np.signbit(blocks) * 8).astype(np.uint8).reshape(x.shape)

    y, s = kernel.fp4_act_quant(torch.from_numpy(x))
    assert y.dtype == torch.float4_e2m1fn_x2 and s.dtype == torch.float8_e8m0fnu
    assert np.array_equal(s.float().numpy().ravel(), scale.ravel())
    assert np.array_equal(y.view(torch.uint8).numpy(), code[:, ::2] | code[:, 1::2] << 4), "low nibble first"
    in_place = kernel.fp4_act_quant(torch.from_numpy(x.copy()), 32, True)
    assert np.array_equal(in_place.numpy().view(np.uint32), value.view(np.uint32))


@pytest.mark.parametrize("quantise", [functools.partial(kernel.act_quant, scale_fmt="ue8m0", inplace=True),
                                      functools.partial(kernel.act_quant, inplace=True),
                                      functools.partial(kernel.fp4_act_quant, inplace=True)])
def test_quantisers_at_the_edges(quantise):
    """bf16 slices change in place, nothing beside them; NaN marks its block and no other; inf stays huge."""
    x = torch.randn(3, 5, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = x.clone()
    part = whole[..., :256]
    assert not part.is_contiguous()
    alone = quantise(x[..., :256].float().contiguous())
    quantise(part)
    assert torch.equal(whole[..., 256:], x[..., 256:])
    assert torch.equal(part, alone.bfloat16())

    x = torch.ones(1, 512)
    x[0, 7] = torch.nan
    y = quantise(x.clone())
    block = 128 if y[0, 100].isnan() else 32
    assert y[0, :block].isnan().all() and torch.equal(y[0, block:], x[0, block:])
    x[0, 7] = torch.inf
    assert quantise(x.clone())[0, 7] > 3e38


def decoded_fp8(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Bytes of e4m3 [n,k] and e8m0 per 128 x 128 as numbers, by the reference's tables."""
    rows, columns = codes.shape
    scale = decode_e8m0(scale.numpy()).repeat(128, axis=0).repeat(128, axis=1)
    return decode_e4m3(codes.numpy()) * scale[:rows, :columns]


def decoded_fp4(packed: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Bytes of e2m1 [n,k/2] and e8m0 per row and 32 columns as numbers, by the reference's tables."""
    return decode_e2m1(packed.numpy()) * decode_e8m0(scale.numpy()).repeat(32, axis=1)


def test_weight_dequant_every_code():
    """Oracle: the reference's decoders, on every byte of both formats, with blocks that end early."""
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.repeat(300, 2)[:, :300].contiguous()                   # [300,300]: blocks 128, 128, 44
    e4m3[(e4m3 & 127) == 127] = 0
    rng = torch.Generator().manual_seed(0)
    scale = torch.randint(100, 140, (3, 3), generator=rng, dtype=torch.uint8)
    expected, stored = decoded_fp8(e4m3, scale), e4m3.view(torch.float8_e4m3fn)
    scale = scale.view(torch.float8_e8m0fnu)
    assert np.array_equal(kernel.weight_dequant(stored, scale), expected)
    assert np.array_equal(kernel.weight_dequant(stored, scale.float()), expected), "F32 scales, as Base has"

    packed = torch.stack([codes, codes.flip(0)])                        # [2,256] bytes, 512 numbers
    scale = torch.randint(100, 140, (2, 16), generator=rng, dtype=torch.uint8)
    ours = kernel.weight_dequant(packed.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu))
    assert np.array_equal(ours, decoded_fp4(packed, scale))


def test_weight_dequant_every_scale():
    """Oracle: the reference's decoders, on every byte under every scale, NaN and subnormal ones among them.

    And in bf16: wherever near_one lets it be used, nothing is rounded."""
    codes, scale = torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    for half in (codes[:128], codes[128:]):
        rows = half.repeat(256, 1)
        with np.errstate(over="ignore", invalid="ignore"):      # what overflows is inf, in the engine too
            fp4 = decoded_fp4(rows, scale.unsqueeze(-1).repeat(1, 8))
            fp8 = decode_e4m3(rows.numpy()) * decode_e8m0(scale.numpy())[:, None]
        fp4_scale = scale.unsqueeze(-1).repeat(1, 8).view(E8M0)
        ours = kernel.weight_dequant(rows.view(torch.float4_e2m1fn_x2), fp4_scale)
        assert np.array_equal(ours, fp4.astype(np.float32), equal_nan=True)
        for i, power in enumerate(scale.view(E8M0)):
            row = rows[i:i + 1].view(torch.float8_e4m3fn)
            expected = fp8[i:i + 1].astype(np.float32)
            assert np.array_equal(kernel.weight_dequant(row, power.view(1, 1)), expected, equal_nan=True), i
            if kernel.near_one(power):
                assert np.array_equal(kernel.weight_dequant(row, power.view(1, 1), torch.bfloat16).float(),
                                      expected, equal_nan=True), i
        near = slice(127 - 40, 127 + 41)
        assert kernel.near_one(fp4_scale[near]) and not kernel.near_one(fp4_scale[86:100])
        ours = kernel.weight_dequant(rows[near].view(torch.float4_e2m1fn_x2), fp4_scale[near], torch.bfloat16)
        assert np.array_equal(ours.float(), fp4[near])


def assert_rounded_once(ours: torch.Tensor, exact: np.ndarray, order: float = 1e-6):
    """bf16 numbers are `exact`, rounded: half a last place, and what an fp32 sum in any order may add."""
    error = np.abs(ours.double().numpy() - exact)
    power = 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 2.0 ** -126)))
    bound = 2.0 ** -8 * power + order * np.abs(exact).max()
    assert (error <= bound).all(), f"{(error / bound).max():.3f} of the bound"


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("name", ["fp8_gemm", "fp4_gemm"])
def test_gemms_in_bf16_at_extreme_scales(name, m):
    """Where bf16 would lose subnormal numbers fp32 multiplies. Oracle: float64; NaN stays in its rows."""
    rng = torch.Generator().manual_seed(m)
    n, k, packed = 256, 256, name == "fp4_gemm"
    for byte, against in ((127, 127), (86, 127), (30, 200), (1, 227), (240, 20), (168, 60)):
        a = (torch.randint(0, 256, (m, k), generator=rng, dtype=torch.uint8) & 0x9F).view(torch.float8_e4m3fn)
        a_s = torch.full((m, k // 128), against, dtype=torch.uint8)
        codes = torch.randint(0, 256, (n, k // 2 if packed else k), generator=rng, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 0
        b_s = torch.full((n, k // 32) if packed else (n // 128, k // 128), byte, dtype=torch.uint8)
        weight = (decoded_fp4 if packed else decoded_fp8)(codes, b_s)
        b = codes.view(torch.float4_e2m1fn_x2 if packed else torch.float8_e4m3fn)
        activation = a.float().numpy().astype(np.float64) * 2.0 ** (against - 127)
        with model.run_mode(model.Mode(torch.bfloat16, (), "ue8m0")):
            ours = getattr(kernel, name)(a, a_s.view(E8M0), b, b_s.view(E8M0))
            b_s[0, 0] = 255
            spoilt = getattr(kernel, name)(a, a_s.view(E8M0), b, b_s.view(E8M0))
        assert_rounded_once(ours, activation @ weight.astype(np.float64).T)
        first = 1 if packed else 128        # rows that the scale serves
        assert spoilt[:, :first].isnan().all() and not spoilt[:, first:].isnan().any()


@pytest.mark.parametrize("tile", [kernel.WEIGHT_TILE, 1])
@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("name", ["fp8_gemm", "fp4_gemm"])
def test_gemms(monkeypatch, name, m, tile):
    """Oracle: float64 products of the decoded numbers. n = 320 is no multiple of a block or tile."""
    monkeypatch.setattr(kernel, "WEIGHT_TILE", tile)
    rng = torch.Generator().manual_seed(m)
    n, k = 320, 384
    a, a_s = kernel.act_quant(torch.randn(2, m, k, generator=rng), 128, "ue8m0", torch.float8_e8m0fnu)
    random_bytes = functools.partial(torch.randint, generator=rng, dtype=torch.uint8)
    if name == "fp8_gemm":
        codes, b_s = random_bytes(0, 256, (n, k)), random_bytes(120, 130, (3, 3))
        codes[(codes & 127) == 127] = 0
        b, weight = codes.view(torch.float8_e4m3fn), decoded_fp8(codes, b_s)
    else:
        codes, b_s = random_bytes(0, 256, (n, k // 2)), random_bytes(120, 130, (n, k // 32))
        b, weight = codes.view(torch.float4_e2m1fn_x2), decoded_fp4(codes, b_s)
    activation = a.float().numpy() * np.repeat(a_s.float().numpy(), 128, axis=-1)
    expected = activation.astype(np.float64) @ weight.astype(np.float64).T
    gemm, b_s = getattr(kernel, name), b_s.view(torch.float8_e8m0fnu)
    ours = gemm(a, a_s, b, b_s, torch.float8_e8m0fnu)
    assert ours.shape == (2, m, n) and ours.dtype == torch.float32
    assert relative_error(ours, expected) < 1e-6        # an fp32 sum of 384 products
    with model.run_mode(model.Mode(torch.bfloat16, (), "ue8m0")):
        half = gemm(a, a_s, b, b_s, torch.float8_e8m0fnu)
    assert half.dtype == torch.bfloat16, "torch's default dtype is the output's"
    assert_rounded_once(half, expected)
    # F32 scales that are no powers of two, of the activation, and of an FP8 weight as in Base checkpoints
    a_s = a_s.float() * 1.3
    b_s, factor = (b_s.float() * 0.7, 1.3 * 0.7) if name == "fp8_gemm" else (b_s, 1.3)
    assert relative_error(gemm(a, a_s, b, b_s), factor * expected) < 1e-6


def brute_attention(q, kv, sink, idxs, scale, dtype):
    """One query, one head at a time, in float64."""
    o = np.zeros(q.shape)
    for b, m, h in np.ndindex(*q.shape[:3]):
        rows = kv[b][[i for i in idxs[b, m] if i >= 0]]                 # [k,d]
        if not len(rows):
            continue
        s = rows @ q[b, m, h] * scale
        p = np.exp(s - s.max())
        total = p.sum() + np.exp(sink[h] - s.max())
        p = torch.from_numpy(p).to(dtype).double().numpy()
        o[b, m, h] = p @ rows / total
    return o


def test_stored_numbers_by_their_bits():
    """Oracle: torch's conversion of e4m3 and e8m0, and the table of e2m1; of every code, to the bit."""
    code = torch.arange(256, dtype=torch.int32)
    byte = code.to(torch.uint8)
    for ours, exact in ((kernel.e4m3_numbers(code), byte.view(torch.float8_e4m3fn).float()),
                        (kernel.scale_numbers(byte), byte.view(torch.float8_e8m0fnu).float()),
                        (kernel.e2m1_numbers(code & 15), torch.from_numpy(np.tile(E2M1_TABLE, 16)))):
        assert ours[exact.isnan()].isnan().all()
        there = ~exact.isnan()
        assert torch.equal(ours[there].view(torch.int32), exact[there].view(torch.int32))


def compiled_rows():
    """In a process with KERNEL_BACKEND=compile: the errors of compiled rows against the table's way."""
    rng, errors = generator(0), []
    for n, k in ((256, 512), (200, 128)):
        a, a_s = kernel.act_quant(torch.randn(1, k, generator=rng), 128, "ue8m0", torch.float8_e8m0fnu)
        byte = torch.randint(0, 256, (n, k), generator=rng).to(torch.uint8)
        scale = torch.randint(117, 137, (n, k // 32), generator=rng).to(torch.uint8)
        fp8 = (byte & 191).view(torch.float8_e4m3fn), torch.rand(-(-n // 128), k // 128, generator=rng)
        fp4 = (byte[:, :k // 2].contiguous().view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu))
        for gemm, weight in ((kernel.fp8_gemm, fp8), (kernel.fp4_gemm, fp4)):
            kernel.COMPILE = True
            ours = gemm(a, a_s, *weight)
            kernel.COMPILE = False
            errors.append(relative_error(ours, gemm(a, a_s, *weight)))
    print(json.dumps(errors))


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")
def test_compiled_rows():
    """Oracle: the way over a table and a matrix product, which has brute force for an oracle."""
    code = "import test_parity; test_parity.compiled_rows()"
    env = os.environ | {"KERNEL_BACKEND": "compile", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 4 and max(errors) < 1e-6, errors      # fp32 sums in another order


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_wide_matmul_loses_nothing(rows):
    """Oracle: float64. Whatever the CPU multiplies in, only fp32 sums round; and nothing stays switched."""
    rng, before = generator(rows), torch.backends.mkldnn.matmul.fp32_precision
    a, b = torch.randn(rows, 300, generator=rng), torch.randn(300, 70, generator=rng)
    for dtype in (torch.bfloat16, torch.float32):
        exact = a.to(dtype).double() @ b.to(dtype).double()
        ours = kernel.wide_matmul(a.to(dtype), b.to(dtype))
        # 300 terms, each sum rounded to 2^-24; operands rounded to bf16 would be 1e-3 off
        assert ours.dtype == torch.float32 and relative_error(ours, exact) < 1e-6
    with pytest.raises(RuntimeError):
        kernel.wide_matmul(a.bfloat16(), b.bfloat16()[:9])
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_wide_linear(monkeypatch, rows, x_dtype, w_dtype):
    """Oracle: float64, of the numbers as they are stored; in tiles, and with the widened weight kept."""
    monkeypatch.setattr(kernel, "WIDE_TILE", 3 * 256)
    monkeypatch.setattr(kernel, "weight_cache", kernel.WeightCache(1 << 20))
    rng = generator(rows)
    x, w = torch.randn(rows, 256, generator=rng).to(x_dtype), torch.randn(50, 256, generator=rng).to(w_dtype)
    first = kernel.wide_linear(x, w)
    assert first.dtype == torch.float32 and relative_error(first, x.double() @ w.double().T) < 1e-6
    assert torch.equal(kernel.wide_linear(x, w), first)


@pytest.mark.parametrize("tile", [kernel.SCORE_TILE, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, topk", [(1, 1), (3, 7), (16, 40)])
def test_sparse_attn(monkeypatch, heads, topk, dtype, tile):
    """Oracle: a float64 loop. With indices of -1, repeated ones, and rows that are all -1: those give 0."""
    monkeypatch.setattr(kernel, "SCORE_TILE", tile)
    if tile == 1:
        monkeypatch.setattr(kernel, "SCORE_ROWS", 1)
    rng = torch.Generator().manual_seed(topk)
    q = torch.randn(2, 5, heads, 32, generator=rng).to(dtype)
    kv = torch.randn(2, 50, 32, generator=rng).to(dtype)
    sink = torch.randn(heads, generator=rng)
    idxs = torch.randint(-1, 50, (2, 5, topk), generator=rng, dtype=torch.int32)
    idxs[0, 0] = -1
    idxs[1, 1, :] = 7
    ours = kernel.sparse_attn(q, kv, sink, idxs, 0.3)
    exact = (tensor.double().numpy() for tensor in (q, kv, sink))
    expected = brute_attention(*exact, idxs.numpy(), 0.3, dtype)
    assert ours.dtype == dtype and not ours[0, 0].any()
    assert not kernel.sparse_attn(q, kv, sink - torch.inf, idxs, 0.3)[0, 0].any(), "0 without a sink, too"
    assert not kernel.sparse_attn(q, kv, sink, idxs[..., :0], 0.3).any(), "no indices at all"
    kv[:, 0], idxs[idxs == 0] = torch.nan, 1
    assert kernel.sparse_attn(q, kv, sink, idxs, 0.3).isfinite().all(), "-1 names no row, not row 0"
    # fp32: its own rounding. bf16: the result is rounded to 8 bits, and a weight may round to the other side.
    assert relative_error(ours.float(), expected) < (1e-6 if dtype == torch.float32 else 6e-3)


def test_sparse_attn_by_hand():
    """Oracle: two results worked out by hand, from public bug reports (sink, scale, leading -1)."""
    q, kv = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]])
    cases = [([-1] * 64 + [2, 0, 1], 0.5, 1.0, [0.6757639334497018, 0.23093282858404646]),
             ([0, 2], 1.0, 0.5, [0.493519608944346, 0.1863237232258476])]
    for idxs, sink, scale, expected in cases:
        idxs = torch.tensor([[idxs]], dtype=torch.int32)
        ours = kernel.sparse_attn(q, kv, torch.tensor([sink]), idxs, scale)
        assert relative_error(ours.flatten(), expected) < 1e-6


@pytest.mark.parametrize("b, s", [(2, 3), (1, 1)])
@pytest.mark.parametrize("hc, iters", [(4, 20), (4, 1), (2, 3)])
def test_hc_split_sinkhorn(hc, iters, b, s):
    """Oracle: the reference's Sinkhorn in float64, and one comb worked out by hand (public bug report)."""
    rng = torch.Generator().manual_seed(hc)
    mixes = 3 * torch.randn(b, s, (2 + hc) * hc, generator=rng)
    scale, base = torch.randn(3, generator=rng), torch.randn((2 + hc) * hc, generator=rng)
    pre, post, comb = kernel.hc_split_sinkhorn(mixes, scale, base, hc, iters, 1e-6)
    x = mixes.double().numpy() * np.repeat(scale.double().numpy(), [hc, hc, hc * hc]) + base.double().numpy()
    assert relative_error(pre, sigmoid(x[..., :hc]) + 1e-6) < 1e-6
    assert relative_error(post, 2 * sigmoid(x[..., hc:2 * hc])) < 1e-6
    assert relative_error(comb, sinkhorn(x[..., 2 * hc:].reshape(b, s, hc, hc), iters, 1e-6)) < 1e-6


def test_sinkhorn_by_hand():
    logits = torch.tensor([[0.0, 1, 2, 3], [1, 0, 0, 0], [0, 0, 5, 0], [0.5, 0.5, 0.5, -1]])
    mixes = torch.cat([torch.zeros(8), logits.flatten()]).view(1, 1, 24)
    comb = kernel.hc_split_sinkhorn(mixes, torch.ones(3), torch.zeros(24))[2][0, 0]
    # the report gives six decimals
    assert relative_error(comb[0], [0.045468, 0.167838, 0.048091, 0.738681]) < 1e-5
    assert relative_error(comb[1], [0.540639, 0.270094, 0.02847, 0.160878]) < 1e-5


def test_hadamard_transform():
    """Oracle: H[i,j] = (-1)^popcount(i & j). Orthogonal, so products of rotated vectors are unchanged."""
    i = np.arange(128)
    h = (-1.0) ** np.bitwise_count(i[:, None] & i)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    assert relative_error(kernel.hadamard_transform(x, 0.5), 0.5 * x.double().numpy() @ h) < 1e-6
    y = kernel.hadamard_transform(x, 128 ** -0.5)
    assert relative_error(y @ y.T, x @ x.T) < 1e-6
    assert kernel.hadamard_transform(x.bfloat16()).dtype == torch.bfloat16


def test_yarn_table():
    """Oracle: known inverse frequencies of rope dim 64, theta 160000, factor 16, 65536, beta 32 and 1."""
    table = model.precompute_freqs_cis(64, 2, 65536, 160000, 16, 32, 1, torch.device("cpu"))
    ours = table[1].angle()[[0, 8, 15, 16, 20, 24, 31]].double().numpy()
    known = [1, 5.000e-2, 3.636e-3, 2.266e-3, 2.970e-4, 1.953e-5, 5.681e-7]
    assert np.allclose(ours, known, rtol=2e-4, atol=0)      # four digits are known


# ==========================================================================================================
# The whole model in fp32, round trips off
# ==========================================================================================================

@pytest.mark.parametrize("tile", [model.INDEX_TILE, 1])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_prefill(monkeypatch, kind, tile):
    """Also where the indexer scores one query at a time, as it does when rows are many."""
    monkeypatch.setattr(model, "INDEX_TILE", tile)
    monkeypatch.setattr(kernel, "INDEX_HEADS_TILE", tile)
    engine, tokens, theirs = load(fixture(kind)), random_tokens(), reference_logits(kind)
    error = max(relative_error(engine(tokens[:, :n])[0], theirs[n - 1]) for n in LENGTHS)
    stage = f"prefill of 1 to 600 tokens, {kind} weights{'' if tile > 1 else ', the indexer in tiles of 1'}"
    proof(stage, REFERENCE, "fp32", error, EXACT, SHARED_BLIND)


def test_step_by_step():
    engine, tokens, theirs = load(fixture("bf16")), random_tokens(), reference_logits("bf16")
    error = max(relative_error(engine(tokens[:, p:p + 1], p)[0], theirs[p]) for p in range(N_TOKENS))
    proof("600 single tokens", REFERENCE, "fp32", error, EXACT, SHARED_BLIND)


def test_decode_after_prefill():
    """Eight tokens after prompts that end around each edge: a group of 4, the window, a group of 128."""
    engine, tokens, theirs = load(fixture("fp8")), random_tokens(), reference_logits("fp8")
    error = 0
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 31, 126, 127, 128, 129, 131, 255, 256, 257, 300, 590):
        engine(tokens[:, :n])
        for p in range(n, n + 8):
            error = max(error, relative_error(engine(tokens[:, p:p + 1], p)[0], theirs[p]))
    proof("8 tokens after prompts of 1 to 590", REFERENCE, "fp32", error, EXACT, SHARED_BLIND)


@pytest.mark.parametrize("chunk", [1, 3, 4, 64, 127, 128, 130, 257])
def test_chunks(chunk):
    """Chunks that the caller cuts, and chunks that forward cuts itself (max_chunk)."""
    engine, tokens, theirs = load(fixture("bf16")), random_tokens(), reference_logits("bf16")
    n = 300 if chunk > 4 else 150
    error = 0
    for p in range(0, n, chunk):
        piece = tokens[:, p:min(p + chunk, n)]
        error = max(error, relative_error(engine(piece, p)[0], theirs[p + piece.size(1) - 1]))
    engine = load(fixture("bf16"), max_chunk=chunk)
    error = max(error, relative_error(engine(tokens[:, :n])[0], theirs[n - 1]))
    proof(f"chunks of {chunk}", REFERENCE, "fp32", error, EXACT, SHARED_BLIND)


def test_mtp_block():
    """The MTP block, prefill and decode, on the engine's own streams."""
    engine, tokens = load(fixture("fp8")), random_tokens(40)
    streams = []
    engine.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output))
    engine(tokens)
    h, following = streams[0][:, :39], tokens[:, 1:]
    theirs = Reference(fixture("fp8")).mtp(h[0].double().numpy(), following[0].numpy())
    ours = [engine.mtp[0](h[:, :30], 0, following[:, :30])]
    ours += [engine.mtp[0](h[:, p:p + 1], p, following[:, p:p + 1]) for p in range(30, 39)]
    error = relative_error(torch.cat(ours), theirs[29:])
    proof("MTP block", REFERENCE, "fp32", error, EXACT, "whether its drafts are good: nothing uses them yet")


@functools.lru_cache
def transformers_model(kind: str):
    transformers = pytest.importorskip("transformers", reason="requirements-test.txt has it")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        fixture(kind), dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def test_transformers():
    """Oracle: Hugging Face transformers, another team's code, on the same files."""
    theirs, engine, tokens = transformers_model("bf16"), load(fixture("bf16")), random_tokens()
    logits = theirs(tokens).logits[0]
    error = max(relative_error(engine(tokens[:, :n])[0], logits[n - 1]) for n in LENGTHS)
    proof("prefill of 1 to 600 tokens", "transformers", "fp32", error, EXACT, "FP8 and FP4 rounding")
    engine(tokens[:, :120])
    cache = theirs(tokens[:, :120], use_cache=True).past_key_values
    error = 0
    for p in range(120, 140):
        step = theirs(tokens[:, p:p + 1], cache=cache, use_cache=True).logits[0, -1]
        error = max(error, relative_error(engine(tokens[:, p:p + 1], p)[0], step))
    proof("decode at 120 to 139", "transformers", "fp32", error, EXACT, "FP8 and FP4 rounding")
    quantised = transformers_model("fp8")(tokens[:, :300]).logits[0, -1]
    error = relative_error(load(fixture("fp8"))(tokens[:, :300])[0], quantised)
    proof("prefill of 300, fp8 weights", "transformers", "fp32", error, EXACT, "FP8 rounding of activations")


def test_real_attention_shapes():
    """64 heads x 512, window 128, 64 index heads x 128, top-k 512 at 600 tokens: Flash's attention."""
    engine, tokens = load(fixture("real")), random_tokens()
    theirs = Reference(fixture("real"), dtype=np.float32).forward(tokens[0].numpy())
    ours = engine(tokens[:, :590])
    ours = torch.cat([ours] + [engine(tokens[:, p:p + 1], p) for p in range(590, N_TOKENS)])
    assert np.array_equal(ours.argmax(-1), theirs[589:].argmax(-1)), "same tokens"
    error = relative_error(ours, theirs[589:])
    blind = "the choice of rows: top-k takes all 150"
    proof("attention of Flash's shape, 600 tokens", REFERENCE, "fp32", error, EXACT, blind)


# ==========================================================================================================
# The round trips, on
# ==========================================================================================================

class Recorder:
    """Collects from one layer of the engine what it rounded and chose, under the reference's names."""

    def __init__(self, engine: model.Transformer, monkeypatch):
        self.values: dict[str, np.ndarray] = {}
        self.linear = None
        for name, module in engine.named_modules():
            if isinstance(module, model.Linear):
                module.register_forward_pre_hook(functools.partial(self.enter, name))
            elif isinstance(module, model.Gate):
                module.register_forward_hook(functools.partial(self.gate, name))
            elif isinstance(module, model.Indexer):
                module.register_forward_hook(functools.partial(self.topk, name))
                module.wq_b.register_forward_hook(functools.partial(self.index, name))
        self.act_quant, self.round_index = model.act_quant, model.round_index
        monkeypatch.setattr(model, "act_quant", self.on_act_quant)
        monkeypatch.setattr(model, "round_index", self.on_round_index)

    def enter(self, name, module, args):
        self.linear = name

    def index(self, name, module, args, output):
        self.indexer = name

    def on_act_quant(self, x, block_size, scale_fmt, scale_dtype, inplace=False):
        result = self.act_quant(x, block_size, scale_fmt, scale_dtype, inplace)
        if not inplace:
            y, s = result
            y = y.float() * s.float().repeat_interleave(block_size, dim=-1)
            self.values[self.linear] = y.flatten(0, -2)
        return result

    def on_round_index(self, x):
        result = self.round_index(x)
        name = self.indexer + (".q" if x.ndim == 4 else ".compressor.kv")
        self.values[name] = result[0].clone()
        return result

    def gate(self, name, module, args, output):
        self.values[name] = output[1].sort(dim=-1)[0]

    def topk(self, name, module, args, output):
        x, _, _, offset = args
        chosen = torch.zeros(x.size(1), x.size(1) // module.compress_ratio + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(output[0] < 0, chosen.size(1) - 1, output[0] - offset), True)
        self.values[name + ".topk"] = chosen[:, :-1]

    def run(self, engine, i: int, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Layer i over h, and what it left in its caches."""
        self.values.clear()
        with torch.inference_mode(), model.run_mode(engine.mode):
            out = engine.layers[i](h, 0, tokens)
        attn, n = engine.layers[i].attn, tokens.size(1)
        self.values[f"layers.{i}.attn.kv"] = attn.kv_cache[0, :n].clone()
        if attn.compress_ratio:
            rows = n // attn.compress_ratio
            self.values[f"layers.{i}.attn.compressor.kv"] = attn.compressor.kv_cache[0, :rows].clone()
        return out


class Settle:
    """Compares each rounded value and choice of the reference with the engine's, and goes on with those."""

    def __init__(self, values: dict):
        self.values = values
        self.compared = self.flipped = 0
        self.choices = self.other_choices = 0
        self.seen: set[str] = set()

    def __call__(self, name: str, own: np.ndarray) -> np.ndarray:
        engine = self.values[name].double().numpy().reshape(own.shape)
        self.seen.add(name)
        if name.endswith((".topk", ".gate")):
            self.choices += len(own)
            self.other_choices += (engine != own).reshape(len(own), -1).any(axis=1).sum()
            return engine.astype(own.dtype)
        differs = np.abs(engine - own) > 1e-5 * np.abs(own)
        self.compared += own.size
        self.flipped += differs.sum()
        # a rounding may fall to the other side; then the two are neighbours in the format: one quantum apart
        if "indexer.q" in name or "indexer.compressor" in name:
            scales, quantum, block = fp4_scales, quantum_e2m1, 32
        else:
            scales, quantum, block = act_scales, quantum_e4m3, 64 if name.endswith(".kv") else 128
        larger = np.maximum(np.abs(engine), np.abs(own))
        scale = np.repeat(scales(larger, block), block, axis=-1)[..., :own.shape[-1]]
        step = quantum(larger / scale) * scale
        apart = np.abs(engine - own)[differs] / step[differs]
        assert (apart <= 1.001).all(), f"{name}: up to {apart.max()} quanta apart"
        return engine


@pytest.mark.parametrize("tokens", [5, 130, 300])
def test_round_trips_layer_by_layer(monkeypatch, tokens):
    """fp8 + fp4 weights, all round trips on. A difference of 1e-7 can flip a rounding, and over layers flips
    grow to 10% of the logits. So the reference gets each layer's input and each rounding's result from us."""
    engine, ids = load(fixture("fp8"), round_trips=model.ROUND_TRIPS), random_tokens(tokens)
    recorder = Recorder(engine, monkeypatch)
    with model.run_mode(engine.mode):
        h = engine.embed(ids).unsqueeze(2).repeat(1, 1, 4, 1)
    worst = flipped = compared = choices = other = 0
    for i in range(len(engine.layers)):
        out = recorder.run(engine, i, h, ids)
        settle = Settle(recorder.values)
        reference = Reference(fixture("fp8"), model.ROUND_TRIPS, settle)
        theirs, _ = reference.block(i, h[0].numpy(), ids[0].numpy())
        rounded = {name for name, value in recorder.values.items() if value.numel()}
        assert settle.seen | {f"layers.{i}.attn.indexer.topk"} == rounded | {f"layers.{i}.attn.indexer.topk"}
        worst = max(worst, relative_error(out[0], theirs))
        flipped, compared = flipped + settle.flipped, compared + settle.compared
        choices, other = choices + settle.choices, other + settle.other_choices
        h = out
    assert flipped <= 1e-3 * compared and other <= 1e-3 * choices
    stage = (f"each layer, round trips on, {tokens} tokens ({flipped} of {compared} roundings and {other} of "
             f"{choices} choices fell to the neighbour)")
    proof(stage, REFERENCE, "fp32", worst, EXACT, "how flips add up over layers")


@torch.no_grad()
def test_bf16_distribution():
    """bf16 activations: our error against the exact reference, beside the error of transformers in bf16.
    Both only round; if one lost more than the other, it would be doing something else."""
    tokens, theirs = random_tokens(), reference_logits("bf16")
    engine = load(fixture("bf16"), dtype=torch.bfloat16)
    transformers = pytest.importorskip("transformers", reason="requirements-test.txt has it")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(fixture("bf16"), dtype=torch.bfloat16).eval()
    rounded = rounded(tokens[:, :300]).logits[0].float()
    ours = torch.cat([engine(tokens[:, p:p + 1], p) for p in range(300)])

    def errors(logits):
        error = np.abs(np.asarray(logits, np.float64) - theirs[:300])
        return error.max(axis=1) / np.abs(theirs[:300]).max(axis=1)
    ours, rounded = np.quantile(errors(ours), [0.5, 0.9]), np.quantile(errors(rounded), [0.5, 0.9])
    # 1.25: the quantiles of 300 correlated positions of one random model scatter by about that
    for name, a, b in zip(("median", "90th percentile"), ours, rounded):
        stage = f"300 positions in bf16, {name} (transformers in bf16: {b:.1e})"
        proof(stage, REFERENCE, "bf16", a, 1.25 * b, "any error below bf16's own")


@pytest.mark.parametrize("name, least", [("kv", 1e-2), ("index", 1e-3), ("act", 1e-2), ("hadamard", 0)])
def test_each_round_trip_is_its_own_switch(name, least):
    """Agreement with oneself: one on differs from none, all but one from all. Hadamard alone is exact."""
    tokens = random_tokens(300)
    exact, alone = load(fixture("fp8"))(tokens), load(fixture("fp8"), round_trips=(name,))(tokens)
    error = relative_error(alone, exact)
    assert error > least if least else error < EXACT
    rest = tuple(n for n in model.ROUND_TRIPS if n != name)
    assert relative_error(load(fixture("fp8"), round_trips=rest)(tokens),
                          load(fixture("fp8"), round_trips=model.ROUND_TRIPS)(tokens)) > 1e-3


# ==========================================================================================================
# Agreement with oneself: state
# ==========================================================================================================

def prompt_and_steps(engine, tokens: torch.Tensor, n: int) -> torch.Tensor:
    """Logits [steps, b, vocab]: of a prompt of n tokens, then of the others one by one."""
    steps = [engine(tokens[:, :n])] + [engine(tokens[:, p:p + 1], p) for p in range(n, tokens.size(1))]
    return torch.stack(steps)


def test_one_row_leaves_onednn_on(monkeypatch):
    """After threads at once, and after an interrupt in the middle; the numbers are those of a matrix."""
    w, x = torch.randn(300, 1031).bfloat16(), torch.randn(1, 1031).bfloat16()
    runs = [threading.Thread(target=lambda: [kernel.plain_linear(x, w) for _ in range(50)]) for _ in "ab"]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert torch.backends.mkldnn.enabled == kernel.ONEDNN
    expected = x.double() @ w.double().T
    bf16_step = 2**-8 * expected.abs().max()
    assert (kernel.plain_linear(x, w) - expected).abs().max() <= bf16_step

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, "mv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernel.plain_linear(x, w)
    assert torch.backends.mkldnn.enabled == kernel.ONEDNN


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", [{}, {"dtype": torch.bfloat16, "round_trips": model.ROUND_TRIPS}])
def test_where_tensors_lie_in_a_file_changes_no_bit(tmp_path, kind, mode):
    """Some products' last bits depend on the address: it must not come from the length of a header."""
    tokens, folder = random_tokens(150), fixture(kind)
    expected = prompt_and_steps(load(folder, **mode), tokens, 140)
    for spaces in (8, 24, 48):
        for name in os.listdir(folder):
            raw = Path(folder, name).read_bytes()
            if name.endswith(".safetensors"):
                end = 8 + struct.unpack("<Q", raw[:8])[0]
                raw = struct.pack("<Q", end - 8 + spaces) + raw[8:end] + b" " * spaces + raw[end:]
            (tmp_path / name).write_bytes(raw)
        assert torch.equal(prompt_and_steps(load(str(tmp_path), **mode), tokens, 140), expected)


def test_batch_equals_alone():
    engine = load(fixture("bf16"))
    tokens = torch.cat([random_tokens(150, seed=s) for s in range(3)])
    together = prompt_and_steps(engine, tokens, 140)
    for i in range(3):
        alone = prompt_and_steps(engine, tokens[i:i + 1], 140)
        assert relative_error(together[:, i:i + 1], alone) < EXACT


@pytest.mark.parametrize("n", [1, 2, 3, 4, 130])
def test_second_conversation_equals_first(n):
    """The vendor's process starts a second conversation with the state that the first one left: 0.2 off."""
    engine, tokens = load(fixture("bf16")), random_tokens(n + 8, seed=5)
    first = prompt_and_steps(engine, tokens, n)
    engine(random_tokens(333))
    assert torch.equal(prompt_and_steps(engine, tokens, n), first)


@pytest.mark.parametrize("at", [1, 3, 127, 128, 130, 131, 259])
def test_snapshot(at):
    """Another way is taken from a kept point, across windows; restored, the first way goes on bit for bit."""
    engine = load(fixture("fp8"), torch.bfloat16, model.ROUND_TRIPS, max_chunk=100)
    tokens, other = random_tokens(at + 8), random_tokens(400, seed=9)
    engine(tokens[:, :at])
    kept = engine.snapshot()
    first = [engine(tokens[:, p:p + 1], p) for p in range(at, at + 8)]
    engine.restore(kept)
    engine(other[:, at:], at)
    engine.restore(kept)
    again = [engine(tokens[:, p:p + 1], p) for p in range(at, at + 8)]
    assert torch.equal(torch.cat(again), torch.cat(first))


@pytest.mark.parametrize("kind, mode", [("bf16", {}), ("fp8", dict(dtype=torch.bfloat16,
                                                                   round_trips=model.ROUND_TRIPS))])
def test_rows_that_were_not_written_are_not_read(kind, mode):
    """Caches are allocated without being filled; here with NaN, which would spoil whatever reads it."""
    engine, tokens, logits = load(fixture(kind), max_chunk=64, **mode), random_tokens(208), []
    for fill in (0, torch.nan):
        fill_caches(engine, fill)
        logits.append(prompt_and_steps(engine, tokens, 200))
    assert torch.equal(*logits) and logits[0].isfinite().all()


def test_a_pass_must_go_on():
    engine, tokens = load(fixture("bf16")), random_tokens(20)
    engine(tokens[:, :10])
    for ids, start in ((tokens[:, :1], 9), (tokens[:, :1], 11), (tokens[:, :1], -1),
                       (tokens[:, :1].repeat(2, 1), 10)):
        with pytest.raises(ValueError, match="does not go on"):
            engine(ids, start)
    kept = engine.snapshot()
    with pytest.raises(ValueError):
        engine.restore(kept._replace(saved=kept.saved[:5]))
    with pytest.raises(ValueError, match="broken off"):
        engine(tokens[:, 10:], 10)
    engine.restore(kept)
    engine(tokens[:, 10:], 10)
    engine.layers[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine(tokens[:, :1], 20)
    with pytest.raises(ValueError, match="broken off"):
        engine(tokens[:, :1], 20)
    with pytest.raises(ValueError, match="broken off"):
        engine.snapshot()


@pytest.mark.parametrize("ids, start, message", [
    ([[0, 512]], 0, "vocabulary has 0 to 511"), ([[-1]], 0, "vocabulary has 0 to 511"),
    ([[]], 0, "one token or more"), ([[1]] * 5, 0, "takes 1 to 4 sequences"),
    ([[1] * 641], 0, "beyond max_seq_len 640")])
def test_input_that_is_refused(ids, start, message):
    with pytest.raises(ValueError, match=message):
        load(fixture("bf16"))(torch.tensor(ids, dtype=torch.long), start)


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressed_rows_become_visible_with_their_last_token(ratio):
    """Row r holds tokens r*ratio .. r*ratio+ratio-1; no earlier token may see it. Window indices likewise."""
    for start, n in ((0, 300), (126, 1), (127, 1), (127, 10)):
        idxs = model.get_compress_topk_idxs(ratio, 1, n, start, 1000, torch.device("cpu"))[0]
        for i, p in enumerate(range(start, start + n)):
            rows = [r for r in range((start + n) // ratio) if r * ratio + ratio - 1 <= p]
            assert idxs[i][idxs[i] >= 0].tolist() == [1000 + r for r in rows]
        idxs = model.get_window_topk_idxs(128, 1, n, start, 427, torch.device("cpu"))[0]
        for i, p in enumerate(range(start, start + n)):
            assert idxs[i][idxs[i] >= 0].tolist() == [q % 427 for q in range(max(p - 127, 0), p + 1)]


# ==========================================================================================================
# Several processes
# ==========================================================================================================

def _rank(rank: int, world: int, port: int, folder: str, out: str):
    """One process of a tensor-parallel run."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    logits = {name: prompt_and_steps(load(folder, **mode), random_tokens(150), 140)
              for name, mode in TP_MODES.items()}
    torch.save(logits, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


TP_MODES = {"fp32": {}, "bf16": {"dtype": torch.bfloat16, "round_trips": model.ROUND_TRIPS}}


def run_ranks(world: int, folder: str, out: str) -> list[dict]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (world, port, folder, out), nprocs=world)
    return [torch.load(f"{out}.{rank}") for rank in range(world)]


def test_two_processes_equal_one(tmp_path):
    """Tensor parallel over gloo, from published and from converted files; all ranks see the same logits."""
    folder, tokens = fixture("fp8"), random_tokens(150)
    converted = str(tmp_path / "mp2")
    convert.main(folder, converted, SMALL["n_routed_experts"], 2, None)
    one = prompt_and_steps(load(folder), tokens, 140)
    published = run_ranks(2, folder, str(tmp_path / "published"))
    from_files = run_ranks(2, converted, str(tmp_path / "converted"))
    for run in (published, from_files):
        assert torch.equal(run[0]["fp32"], run[1]["fp32"]) and torch.equal(run[0]["bf16"], run[1]["bf16"])
    assert torch.equal(published[0]["bf16"], from_files[0]["bf16"])
    error = relative_error(published[0]["fp32"], one)
    proof("2 processes over gloo", "1 process", "fp32", error, EXACT, "a mistake of both; nccl")


# ==========================================================================================================
# Configuration
# ==========================================================================================================

VENDOR_CONFIG = {    # the same model as SMALL, as the vendor's inference/config.json says it
    "vocab_size": 512, "dim": 256, "moe_inter_dim": 128, "n_layers": 6, "n_hash_layers": 2, "n_heads": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_activated_experts": 2, "score_func": "sqrtsoftplus",
    "route_scale": 1.5, "swiglu_limit": 2.0, "q_lora_rank": 128, "head_dim": 128, "rope_head_dim": 64,
    "o_groups": 4, "o_lora_rank": 64, "window_size": 128, "original_seq_len": 65536, "rope_theta": 10000,
    "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 32, "hc_mult": 4, "hc_sinkhorn_iters": 20, "dtype": "fp8", "scale_fmt": "ue8m0",
    "expert_dtype": "fp4", "compress_rope_theta": 160000, "compress_ratios": [0, 4, 128, 4, 128, 4, 0]}


def test_the_chat_knows_the_round_trips():
    """generate.py writes their names down once more, in order not to import torch for --help."""
    assert generate.ROUND_TRIPS == model.ROUND_TRIPS


def test_both_configs_say_the_same():
    assert model.ModelArgs.from_config(SMALL | QUANTISED) == model.ModelArgs.from_config(VENDOR_CONFIG)


@pytest.mark.parametrize("config", [SMALL | QUANTISED, VENDOR_CONFIG], ids=["published", "vendor"])
def test_no_key_has_a_silent_default(config):
    """Every key that says something about the model is missed by name when it is left out.

    (Without dim it is not the vendor's form, and the published form has a model_type.)"""
    silent = {"architectures", "norm_topk_prob", "topk_method", "hidden_act", "attention_bias", "torch_dtype",
              "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings", "bos_token_id",
              "eos_token_id", "dtype", "expert_dtype", "quantization_config"}
    for key in set(config) - silent:
        with pytest.raises(ValueError, match=key if key != "dim" else "model_type"):
            model.ModelArgs.from_config({k: v for k, v in config.items() if k != key})
    for key in SMALL["rope_scaling"]:
        yarn = {k: v for k, v in SMALL["rope_scaling"].items() if k != key}
        with pytest.raises(ValueError, match=key if key != "type" else "yarn"):
            model.ModelArgs.from_config(SMALL | {"rope_scaling": yarn})


@pytest.mark.parametrize("change, message", [
    ({"model_type": "deepseek_v3"}, "deepseek_v3"), ({"compress_ratios": [0, 4]}, "compress_ratios has 2"),
    ({"sliding_windows": 64}, "sliding_windows"), ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"scoring_func": "tanh"}, "tanh"),
    ({"n_shared_experts": 2}, "n_shared_experts"), ({"hidden_size": "256"}, "dim is '256'"),
    ({"index_topk": -1}, "index_topk is -1"), ({"hidden_size": True}, "dim is True"),
    ({"rope_scaling": {"type": "linear"}}, "yarn"), ({"rope_scaling": None}, "yarn"),
    ({"rope_scaling": SMALL["rope_scaling"] | {"mscale": 1}}, "rope_scaling.mscale"),
    ({"compress_ratios": None}, "compress_ratios is None"), ({"compress_ratios": [0, "4"]}, "whole numbers"),
    ({"rms_norm_eps": math.nan}, "norm_eps is nan"), ({"swiglu_limit": math.inf}, "swiglu_limit is inf"),
    ({"o_groups": 0}, "o_groups is 0"), ({"sliding_window": 0}, "window_size is 0"),
    ({"num_experts_per_tok": 9}, "9 active experts of 8"), ({"qk_rope_head_dim": 63}, "rope_head_dim 63"),
    ({"head_dim": 160}, "multiple of 64"), ({"index_head_dim": 96}, "power of two"),
    ({"rope_scaling": "yarn"}, "expected an object"), ({"quantization_config": "fp8"}, "expected an object"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "modelopt"),
    ({"quantization_config": {"weight_block_size": [64, 64], "scale_fmt": "ue8m0"}}, "weight_block_size")])
def test_config_that_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        model.ModelArgs.from_config(SMALL | change)


def test_runtime_arguments():
    args = model.ModelArgs.from_config(SMALL, max_seq_len=100, n_mtp_layers=0)
    assert (args.max_seq_len, args.n_mtp_layers) == (100, 0)
    with pytest.raises(TypeError, match="max_seqlen"):
        model.ModelArgs.from_config(SMALL, max_seqlen=100)
    with pytest.raises(ValueError, match="max_chunk is 0"):
        model.ModelArgs.from_config(SMALL, max_chunk=0)


def test_draft_stages_are_no_mtp_blocks():
    """Flash-0731's config: dspark_* keys, and three more compress_ratios than layers."""
    config = SMALL | {"dspark_block_size": 5, "compress_ratios": [0, 4, 128, 4, 128, 4, 0, 0, 0]}
    assert model.ModelArgs.from_config(config).n_mtp_layers == 0


# ==========================================================================================================
# Traps: mistakes that give fluent, wrong output. Each is built into the engine, and must be caught.
# ==========================================================================================================

TRAPS: dict[str, typing.Callable] = {}      # name -> function(engine, monkeypatch) that breaks the engine


def trap(name: str):
    def register(breaks):
        TRAPS[name] = breaks
        return breaks
    return register


def attentions(engine, ratio=None):
    """The attention modules, of one compression ratio or of all."""
    return [layer.attn for layer in engine.layers if ratio is None or layer.attn.compress_ratio == ratio]


def compressors(engine):
    return [module for module in engine.modules() if isinstance(module, model.Compressor)]


def rope_trap(name: str, **change):
    """Another constant in the rotary tables of the layers with a ratio."""
    @trap(name)
    def breaks(engine, monkeypatch):
        for attn in attentions(engine, 4) + attentions(engine, 128):
            attn.precompute_freqs_cis = functools.partial(attn.precompute_freqs_cis, **change)


rope_trap("compress_rope_theta 40000", base=40000)
rope_trap("no YaRN", original_seq_len=0)
rope_trap("rope_factor 40", factor=40)


@trap("YaRN and 160000 on window layers, too")
def _(engine, monkeypatch):
    for attn in attentions(engine, 0):
        attn.precompute_freqs_cis = attentions(engine, 4)[0].precompute_freqs_cis


@trap("YaRN's magnitude scale applied")
def _(engine, monkeypatch):
    for attn in attentions(engine, 4) + attentions(engine, 128):
        table = attn.precompute_freqs_cis
        attn.precompute_freqs_cis = lambda table=table, **kw: table(**kw) * (0.1 * math.log(16) + 1)


@trap("half-split rope")
def _(engine, monkeypatch):
    def rotate(x, freqs_cis, inverse=False):
        freqs_cis = freqs_cis.conj() if inverse else freqs_cis
        pairs = torch.complex(*x.float().chunk(2, dim=-1))
        pairs = pairs * (freqs_cis.unsqueeze(1) if x.ndim == 4 else freqs_cis)
        return x.copy_(torch.cat([pairs.real, pairs.imag], dim=-1))
    monkeypatch.setattr(model, "apply_rotary_emb", rotate)


@trap("output not rotated back")
def _(engine, monkeypatch):
    rotate = model.apply_rotary_emb
    monkeypatch.setattr(model, "apply_rotary_emb", lambda x, f, inverse=False: x if inverse else rotate(x, f))


@trap("no per-head RMS norm of q")
def _(engine, monkeypatch):
    for attn in attentions(engine):
        attn.eps, attn.softmax_scale = 1e12, attn.softmax_scale * 1e6     # q / sqrt(mean + eps) is q * 1e-6


@trap("attention sink ignored")
def _(engine, monkeypatch):
    for attn in attentions(engine):
        attn.attn_sink.fill_(-torch.inf)


@trap("gate.bias used in the weights")
def _(engine, monkeypatch):
    forward = model.Gate.forward

    def biased(gate, x, input_ids):
        weights, indices = forward(gate, x, input_ids)
        if gate.bias is not None:
            scores = torch.nn.functional.softplus(x.float() @ gate.weight.float().T).sqrt() + gate.bias
            weights = scores.gather(1, indices)
            weights = weights / weights.sum(dim=-1, keepdim=True) * gate.route_scale
        return weights, indices
    monkeypatch.setattr(model.Gate, "forward", biased)


@trap("gate.bias not used in the choice")
def _(engine, monkeypatch):
    for layer in engine.layers[SMALL["num_hash_layers"]:]:
        layer.ffn.gate.bias.zero_()


@trap("route_scale 1")
def _(engine, monkeypatch):
    for layer in engine.layers:
        layer.ffn.gate.route_scale = 1.0


@trap("no swiglu limit on the shared expert")
def _(engine, monkeypatch):
    for layer in engine.layers:
        layer.ffn.shared_experts.swiglu_limit = 0


@trap("hyper-connection comb transposed")
def _(engine, monkeypatch):
    def transposed(*args):
        pre, post, comb = kernel.hc_split_sinkhorn(*args)
        return pre, post, comb.transpose(-1, -2)
    monkeypatch.setattr(model, "hc_split_sinkhorn", transposed)


def sinkhorn_trap(iters: int):
    @trap(f"Sinkhorn {iters} iterations")
    def breaks(engine, monkeypatch):
        for layer in engine.layers:
            layer.hc_sinkhorn_iters = iters


sinkhorn_trap(8)
sinkhorn_trap(1)


def window_trap(name: str, change: int):
    @trap(name)
    def breaks(engine, monkeypatch):
        for attn in attentions(engine):
            attn.window_size += change


window_trap("window one short", -1)
window_trap("window one long", 1)


@trap("ape left out")
def _(engine, monkeypatch):
    for compressor in compressors(engine):
        compressor.ape.zero_()


def compressor_trap(name: str):
    """Wraps Compressor.forward: breaks(forward, compressor, x, start_pos) calls it, spoils what it left."""
    def register(breaks):
        @trap(name)
        def patch(engine, monkeypatch):
            forward = model.Compressor.forward
            monkeypatch.setattr(model.Compressor, "forward",
                                lambda compressor, x, start_pos: breaks(forward, compressor, x, start_pos))
        return breaks
    return register


@compressor_trap("decode: ape off by one")
def _(forward, compressor, x, start_pos):
    shift = int(start_pos > 0)
    compressor.ape.copy_(compressor.ape.roll(shift, 0))
    rows = forward(compressor, x, start_pos)
    compressor.ape.copy_(compressor.ape.roll(-shift, 0))
    return rows


@compressor_trap("prefill's remainder saved without ape")
def _(forward, compressor, x, start_pos):
    rows = forward(compressor, x, start_pos)
    ratio, rest = compressor.compress_ratio, x.size(1) % compressor.compress_ratio
    if start_pos == 0 and rest:
        offset = ratio * compressor.overlap
        compressor.score_state[:, offset:offset + rest] -= compressor.ape[:rest]
    return rows


@compressor_trap("prefill's overlap state saved without ape")
def _(forward, compressor, x, start_pos):
    rows = forward(compressor, x, start_pos)
    if start_pos == 0 and compressor.overlap:
        compressor.score_state[:, :compressor.compress_ratio] -= compressor.ape
    return rows


@compressor_trap("prefill's overlap state not saved")
def _(forward, compressor, x, start_pos):
    rows = forward(compressor, x, start_pos)
    if start_pos == 0 and compressor.overlap:
        compressor.score_state[:, :compressor.compress_ratio] = -torch.inf
    return rows


@compressor_trap("overlap state not shifted after a compression")
def _(forward, compressor, x, start_pos):
    ratio, states = compressor.compress_ratio, (compressor.kv_state, compressor.score_state)
    before = [state[:, :ratio].clone() for state in states]
    rows = forward(compressor, x, start_pos)
    if start_pos > 0 and compressor.overlap:
        for state, kept in zip(states, before):
            state[:, :ratio] = kept
    return rows


@compressor_trap("compressed rows rotated at the group's end")
def _(forward, compressor, x, start_pos):
    compressor.freqs_cis = compressor.freqs_cis[compressor.compress_ratio - 1:]
    return forward(compressor, x, start_pos)


@compressor_trap("the same in decode only")
def _(forward, compressor, x, start_pos):
    if start_pos > 0:
        compressor.freqs_cis = compressor.freqs_cis[compressor.compress_ratio - 1:]
    return forward(compressor, x, start_pos)


def overlap_trap(name: str, transform):
    @trap(name)
    def breaks(engine, monkeypatch):
        monkeypatch.setattr(model.Compressor, "overlap_transform", transform)


overlap_trap("the two halves of an overlapping row swapped", lambda self, t: torch.cat(
    [t[:, :-1, :, self.head_dim:], t[:, 1:, :, :self.head_dim]], dim=2))
overlap_trap("first overlap scored 0 in place of -inf", lambda self, t: torch.cat(
    [t[:, :-1, :, :self.head_dim].nan_to_num(neginf=0), t[:, 1:, :, self.head_dim:]], dim=2))


def visible_trap(name: str, shift: int):
    @trap(name)
    def breaks(engine, monkeypatch):
        model.get_compress_topk_idxs.cache_clear()
        visible = model.visible_rows
        monkeypatch.setattr(model, "visible_rows", lambda ratio, seqlen, start_pos, device: visible(
            ratio, seqlen, start_pos + shift, device))


visible_trap("compressed rows visible one early", 1)
visible_trap("compressed rows visible one late", -1)


@trap("every row attended (no top-k)")
def _(engine, monkeypatch):
    for attn in attentions(engine, 4):
        attn.indexer.index_topk = 1 << 20


@trap("indexer without ReLU")
def _(engine, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "relu_", lambda scores: scores)


@trap("indexer with q before q_norm")
def _(engine, monkeypatch):
    for attn in attentions(engine, 4):
        attn.indexer.register_forward_pre_hook(
            lambda indexer, args, attn=attn: (args[0], attn.wq_a(args[0]), *args[2:]))


@trap("ring buffer not rotated after a long prefill")
def _(engine, monkeypatch):
    for attn in attentions(engine):
        def unrotated(attn, args, output):
            x, start_pos = args
            if start_pos == 0 and x.size(1) > attn.window_size:
                window = attn.kv_cache[:, x.size(1) - attn.window_size:x.size(1)]
                window.copy_(window.roll(x.size(1) % attn.window_size, 1))
        attn.register_forward_hook(unrotated)


@trap("decode's window offset one off")
def _(engine, monkeypatch):
    idxs = model.get_window_topk_idxs
    monkeypatch.setattr(model, "get_window_topk_idxs", lambda window, b, seqlen, start_pos, *rest: idxs(
        window, b, seqlen, start_pos - (start_pos > 0), *rest))


@trap("wo_a groups in another order")
def _(engine, monkeypatch):
    for attn in attentions(engine):
        wo_a = kernel.plain_weight(attn.wo_a.weight, attn.wo_a.scale, engine.mode.dtype)
        attn.wo_a.weight = torch.nn.Parameter(wo_a.roll(attn.o_lora_rank, 0), requires_grad=False)
        attn.wo_a.scale = None


@trap("w1 and w3 swapped")
def _(engine, monkeypatch):
    for module in engine.modules():
        if isinstance(module, model.Expert):
            module.w1, module.w3 = module.w3, module.w1


@trap("fp4 nibbles swapped")
def _(engine, monkeypatch):
    for module in engine.modules():
        if isinstance(module, model.Linear) and module.weight.dtype == torch.float4_e2m1fn_x2:
            packed = module.weight.view(torch.uint8)
            packed.copy_(packed >> 4 | packed << 4)


@trap("start_pos one off in decode")
def _(engine, monkeypatch):
    def forward(input_ids, start_pos=0, forward=engine.forward):
        return forward(input_ids, start_pos + (start_pos > 0))
    engine.forward = forward


def run_trap(name: str) -> tuple:
    """Errors that the parity checks see with one trap built in: prompts of 30 and 300, decode at 250 to 265;
    nan: the engine refused to go on."""
    kind = "fp8" if "fp4" in name else "bf16"
    tokens, theirs, engine = random_tokens(), reference_logits(kind), load(fixture(kind))
    for parameter in engine.parameters():       # private copies: files are mapped read-only
        parameter.data = parameter.data.clone()

    def error(logits, position):
        wrong, right = np.abs(logits[0].numpy() - theirs[position]), np.abs(theirs[position])
        return float(np.median(wrong) / np.median(right))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if name:
            with torch.inference_mode():
                TRAPS[name](engine, monkeypatch)
        prompts = [error(engine(tokens[:, :n]), n - 1) for n in (30, 300)]
        try:
            engine(tokens[:, :250])
            decode = np.median([error(engine(tokens[:, p:p + 1], p), p) for p in range(250, 266)])
        except ValueError:
            decode = math.nan
    model.get_compress_topk_idxs.cache_clear()
    return *prompts, float(decode)


def test_the_trap_check_passes_without_a_trap():
    assert max(run_trap("")) < EXACT


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name):
    """The parity checks above fail with the trap: their tolerance is 1e-5, its error at least twice that."""
    prompt_30, prompt_300, decode = run_trap(name)
    refused = math.isnan(decode) and name == "start_pos one off in decode"
    assert refused or max(prompt_30, prompt_300, decode) > 2 * EXACT


def print_traps():
    """Which check sees which mistake, and how large it is there."""
    print("| trap | prompt of 30 | prompt of 300 | decode at 250 to 265 |")
    print("|---|---|---|---|")
    for name in TRAPS:
        cells = ["refused" if math.isnan(error) else f"{error:.1g}" if error > 2 * EXACT else "0"
                 for error in run_trap(name)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def test_softmax_weights_are_rounded_to_bf16():
    """Trap of the quantised side: a sum that is exactly 0 with the rounded weight 179/256, not with 0.7."""
    q, kv = torch.ones(1, 1, 1, 2), torch.tensor([[[0.0, -179 / 256], [math.log(0.7), 1.0]]])
    q[..., 1] = 0
    arguments = torch.tensor([-1e30]), torch.tensor([[[0, 1]]], dtype=torch.int32), 1.0
    exact = kernel.sparse_attn(q, kv, *arguments)[..., 1]
    kv[0, 1, 0] = kv[0, 1, 0].bfloat16()        # exp of it still rounds to 179/256
    rounded = kernel.sparse_attn(q.bfloat16(), kv.bfloat16(), *arguments)[..., 1]
    assert rounded == 0 and exact.abs() > 1e-4


# ==========================================================================================================
# convert.py: files, loading, conversion, verification
# ==========================================================================================================

FLASH = SMALL | {   # the shapes that the published Flash config.json gives
    "hidden_size": 4096, "num_hidden_layers": 43, "vocab_size": 129280, "num_attention_heads": 64,
    "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64,
    "num_hash_layers": 3, "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "quantization_config": QUANTISED["quantization_config"]}
FILES = FLASH | {   # small enough to be written many times
    "hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 64, "num_attention_heads": 4, "head_dim": 128,
    "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "index_n_heads": 16, "index_head_dim": 64,
    "num_hash_layers": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "compress_ratios": [0, 4, 128, 0], "index_topk": 8}
BASE = FILES | {"expert_dtype": "fp8"}
PLAIN = {key: value for key, value in FILES.items() if key != "quantization_config"}


def random_tensors(config, seed=0):
    """Random bytes in every tensor of the inventory, kept to finite floats and to scales near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in convert.inventory(config).items():
        shape, dtype = entry["shape"], entry["dtype"]
        if dtype in ("BF16", "F32"):
            value = torch.randn(shape, generator=generator).abs() + .1
            tensors[name] = value.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
        elif dtype == "I64":
            tensors[name] = torch.randint(0, config["n_routed_experts"], shape, generator=generator)
        elif dtype == "F8_E8M0":
            value = torch.randint(118, 131, shape, generator=generator, dtype=torch.uint8)
            tensors[name] = value.view(torch.float8_e8m0fnu)
        else:
            value = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            if dtype == "F8_E4M3":
                value[value & 0x7F == 0x7F] = 0     # the two NaN codes
            tensors[name] = value.view(torch.int8 if dtype == "I8" else torch.float8_e4m3fn)
    return tensors


def write_folder(folder, config, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(folder)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "published", FILES, random_tensors(FILES), shards=3)


def build(config=FILES, dtype=torch.bfloat16, **runtime):
    with torch.device("meta"):
        return model.Transformer(model.ModelArgs.from_config(dict(config), **runtime), dtype=dtype)


def loaded(folder, config=FILES, **kwargs):
    engine = build(config, **kwargs)
    convert.load_weights(engine, folder)
    return dict(engine.named_parameters())


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def as_rank(monkeypatch, rank, world):
    import torch.distributed as dist
    monkeypatch.setattr(dist, "is_initialized", lambda: world > 1)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)


def refused(folder, config=FILES, **kwargs):
    """The sentence with which loading is refused."""
    with pytest.raises(convert.CheckpointError) as error:
        loaded(str(folder), config, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def run(*args):
    return convert.command_line([str(arg) for arg in args])


def convert_to(folder, out, mp=1, expert_dtype=None, n_experts=4):
    extra = ["--expert-dtype", expert_dtype] if expert_dtype else []
    return run("--hf-ckpt-path", folder, "--save-path", out, "--n-experts", n_experts, "--model-parallel", mp,
               *extra)


def verify(folder, converted):
    return run("--hf-ckpt-path", folder, "--verify", converted)


# ---- inventory

def test_flash_inventory_is_the_published_one():
    table = convert.inventory(FLASH)
    assert len(table) == 69187
    size = {dtype: size for dtype, (size, _) in convert.DTYPES.items()}
    count = sum(size[entry["dtype"]] * int(np.prod(entry["shape"])) for entry in table.values())
    assert count == 159_609_485_896
    assert collections.Counter(entry["dtype"] for entry in table.values()) == {
        "BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34167, "I64": 3, "I8": 33792}
    mtp = {name: entry for name, entry in table.items() if name.startswith("mtp.")}
    assert len(mtp) == 1575
    assert sum(size[entry["dtype"]] * int(np.prod(entry["shape"])) for entry in mtp.values()) == 3_593_787_756
    text = json.dumps(mtp, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "331296a906dd0fdf85384f0f6237602bc49e2e19c285ca19b1946b62cb330561")
    assert convert.inventory(FLASH, mtp=False) == {n: e for n, e in table.items() if not n.startswith("mtp.")}


def test_flash_logical_parameters():
    """Known from the published checkpoint: linears and experts in elements; no scales, no tid2eid tables."""
    counts = {name: int(np.prod(shape)) for name, kind, shape in convert.parameters(FLASH) if kind != "I64"}
    assert sum(counts.values()) == 290_942_289_362
    # the known figure without MTP leaves the 40 gate biases out as well
    backbone = {name: n for name, n in counts.items() if "mtp." not in name and "gate.bias" not in name}
    assert sum(backbone.values()) == 284_332_230_231


def test_inventory_variants():
    def dtypes(config):
        return {entry["dtype"] for entry in convert.inventory(config).values()}

    assert dtypes(PLAIN) == {"BF16", "F32", "I64"}
    assert not any(name.endswith(".scale") for name in convert.inventory(PLAIN))
    base = convert.inventory(BASE)
    assert base["layers.0.ffn.experts.0.w1.weight"] == {"dtype": "F8_E4M3", "shape": [128, 256]}
    assert base["layers.0.ffn.experts.0.w1.scale"] == {"dtype": "F32", "shape": [1, 2]}
    assert base["layers.0.attn.wq_a.scale"]["dtype"] == "F8_E8M0"
    assert convert.inventory(FILES | {"expert_dtype": "fp4"}) == convert.inventory(FILES)
    dspark = FILES | {"dspark_block_size": 4, "compress_ratios": [0, 4, 128, 0, 0, 0]}
    assert not any(name.startswith("mtp.") for name in convert.inventory(dspark))


@pytest.mark.parametrize("change, words", [
    ({"compress_ratios": [0, 4, 128]}, "3 compress_ratios"), ({"head_dim": None}, "lacks head_dim"),
    ({"n_shared_experts": 2}, "n_shared_experts 2"), ({"expert_dtype": "int4"}, "expert_dtype 'int4'")])
def test_config_errors(change, words):
    config = {key: value for key, value in (FILES | change).items() if value is not None}
    with pytest.raises(convert.CheckpointError, match=words):
        convert.inventory(config)


def test_inventory_command_needs_no_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    code = ("import sys, convert; code = convert.command_line(['--inventory', sys.argv[1]]); "
            "sys.exit(code + ('torch' in sys.modules or 'numpy' in sys.modules))")
    done = python("-c", code, tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout) == convert.inventory(FLASH)
    assert done.stderr.startswith("69187 tensors, 159609485896 bytes")


def python(*args):
    env = os.environ | {"PYTHONPATH": os.path.dirname(convert.__file__), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, env=env)


# ---- loading

@pytest.mark.parametrize("config", [FILES, BASE, PLAIN], ids=["fp4", "base", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_load_published(tmp_path, config, shards):
    tensors = random_tensors(config)
    params = loaded(write_folder(tmp_path / "p", config, tensors, shards), config)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            assert params[name].dtype == torch.float4_e2m1fn_x2
            assert same(params[name].view(torch.int8), tensor)
        else:
            assert same(params[name], tensor), name
    assert not any(param.is_meta for param in params.values())


def test_load_exact_mode_and_no_mtp(folder):
    params = loaded(folder, dtype=torch.float32, n_mtp_layers=0)
    assert params["embed.weight"].dtype == torch.bfloat16, "as stored: it is widened at each use"
    assert params["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert not any(name.startswith("mtp.") for name in params)


HF_NAMES = {"attn": "self_attn", "ffn": "mlp", "scale": "weight_scale_inv", "embed": "embed_tokens",
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wq_a": "q_a_proj",
            "q_norm": "q_a_layernorm", "wq_b": "q_b_proj", "kv_norm": "kv_a_layernorm",
            "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def in_other_name_space(name):
    if name.startswith("head."):
        return "lm_head.weight"
    name = name.replace("gate.bias", "gate.e_score_correction_bias")
    return "model." + ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def test_both_name_spaces(tmp_path, folder):
    renamed = {in_other_name_space(name): tensor for name, tensor in random_tensors(FILES).items()}
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv" in renamed
    # Some publishers repeat the shared embedding and head in the MTP block
    renamed["model.mtp.0.embed_tokens.weight"] = renamed["model.embed_tokens.weight"].clone()
    renamed["model.mtp.0.head.weight"] = renamed["lm_head.weight"].clone()
    other = loaded(write_folder(tmp_path / "renamed", FILES, renamed))
    plain = loaded(folder)
    assert plain.keys() == other.keys() and all(same(plain[name], other[name]) for name in plain)
    assert convert_to(tmp_path / "renamed", tmp_path / "a") == convert_to(folder, tmp_path / "b") == 0
    a, b = (tmp_path / x / "model0-mp1.safetensors" for x in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_shared_modules_of_mtp(folder):
    engine = build()
    convert.load_weights(engine, folder)
    assert engine.mtp[0].embed.weight is engine.embed.weight
    assert engine.mtp[0].head.weight is engine.head.weight


@pytest.mark.parametrize("name", [
    "hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight", "layers.0.hc_attn_fn",
    "layers.1.ffn.experts.0.w2.weight", "layers.0.ffn.gate.tid2eid"])
def test_missing(tmp_path, name):
    tensors = random_tensors(FILES)
    del tensors[name]
    message = refused(write_folder(tmp_path / "p", FILES, tensors))
    assert f"1 missing: {name}" in message


def test_many_missing_are_counted(tmp_path):
    tensors = {n: t for n, t in random_tensors(FILES).items() if "layers.1." not in n}
    message = refused(write_folder(tmp_path / "p", FILES, tensors))
    assert " missing: layers.1.attn." in message and ", ...;" not in message.split("missing")[0]
    assert message.count("layers.1.") == 10 and "..." in message


@pytest.mark.parametrize("expert", [0, 1, 3])
def test_quantised_without_scale(tmp_path, expert):
    tensors = random_tensors(FILES)
    del tensors[f"layers.2.ffn.experts.{expert}.w3.scale"]
    message = refused(write_folder(tmp_path / "p", FILES, tensors))
    assert f"1 quantised without a scale: layers.2.ffn.experts.{expert}.w3.weight" in message


def replaced(name, tensor):
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize("change, words", [
    (replaced("layers.9.attn.extra", torch.zeros(2)), "1 unexpected: layers.9.attn.extra"),
    (replaced("norm.weight", torch.zeros(128).bfloat16()), "norm.weight [128] in place of [256]"),
    (replaced("layers.0.attn.wq_a.scale", torch.ones(2, 2)), "wq_a.scale [2, 2] in place of [1, 2]"),
    (replaced("layers.0.attn.wq_a.scale", torch.ones(1, 2).half()), "layers.0.attn.wq_a.scale F16"),
    (replaced("norm.scale", torch.ones(2)), "a scale without a quantised weight: norm.scale"),
    (replaced("layers.0.attn.wq_a.weight", torch.zeros(128, 256).bfloat16()),
     "a scale without a quantised weight: layers.0.attn.wq_a.scale"),
    (replaced("norm.weight", torch.zeros(256).to(torch.float8_e4m3fn)), "read as float32: norm.weight"),
    (replaced("embed.weight", torch.zeros(64, 256)),
     "1 that bfloat16 would round, load with float32: embed.weight F32"),
    (replaced("layers.0.ffn.gate.tid2eid", torch.zeros(64, 2)),
     "1 not to be read as int64: layers.0.ffn.gate.tid2eid F32"),
    (replaced("layers.0.w.weight_scale_2", torch.zeros(1)), "NVFP4"),
])
def test_tensors_that_do_not_fit(tmp_path, change, words):
    tensors = random_tensors(FILES)
    change(tensors)
    assert words in refused(write_folder(tmp_path / "p", FILES, tensors))


def test_one_error_lists_all_kinds(tmp_path):
    tensors = random_tensors(FILES)
    del tensors["norm.weight"], tensors["layers.0.attn.wkv.scale"]
    tensors["zz"] = torch.zeros(1)
    message = refused(write_folder(tmp_path / "p", FILES, tensors))
    assert all(word in message for word in ("1 missing", "1 quantised without a scale", "1 unexpected: zz"))


def test_float32_is_loaded_where_declared(tmp_path):
    tensors = random_tensors(FILES) | {"embed.weight": torch.randn(64, 256)}
    params = loaded(write_folder(tmp_path / "p", FILES, tensors), dtype=torch.float32)
    assert same(params["embed.weight"], tensors["embed.weight"])


def test_int32_table_is_widened(tmp_path):
    tensors = random_tensors(FILES)
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
    params = loaded(write_folder(tmp_path / "p", FILES, tensors))
    assert params["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


def test_wo_a_of_ragged_blocks():
    weight = torch.randint(0, 0x7F, (200, 150), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[.5, 2.], [3., 1e-3]])
    grid = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :150]
    assert same(kernel.widened(weight, scale, torch.bfloat16), (weight.float() * grid).bfloat16())


@pytest.mark.parametrize("change, words", [
    ({"architectures": ["DeepseekV41ForCausalLM"]}, "DeepSeek-V4.1"), ({"text_config": {}}, "DeepSeek-V4.1"),
    ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "NVFP4")])
def test_foreign_models_are_refused_by_name(tmp_path, folder, change, words):
    open(os.path.join(folder, "config.json"), "w").write(json.dumps(FILES | change))
    assert words in refused(folder)
    assert convert_to(folder, tmp_path / "out") == 2


def dspark_folder(path):
    tensors = random_tensors(FILES)
    leaves = ("main_proj.weight", "x.scale")
    stages = {f"mtp.{stage}.{leaf}": torch.zeros(4) for stage in range(3) for leaf in leaves}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")} | stages
    config = FILES | {"dspark_block_size": 4, "compress_ratios": [0, 4, 128, 0, 0, 0]}
    return write_folder(path, config, tensors), config


def test_dspark_is_left_out_with_a_line(tmp_path, capsys):
    folder, config = dspark_folder(tmp_path / "p")
    assert loaded(folder, config)
    assert capsys.readouterr().err == "left out: 6 tensors of DSpark draft stages (Flash-0731)\n"
    assert convert_to(folder, tmp_path / "out") == 0 and verify(folder, tmp_path / "out") == 0
    os.remove(os.path.join(folder, "config.json"))     # known by its tensors, too
    assert "has no MTP block" in refused(folder)


# ---- files

def test_damaged_files(tmp_path, folder):
    shard = os.path.join(folder, "model-00002-of-00003.safetensors")
    whole = open(shard, "rb").read()
    header = struct.pack("<Q", 80)
    for content, words in [
            (whole[:-1], "is cut or damaged"), (whole[:100], "is no whole safetensors file"),
            (whole + b"\0", "is cut or damaged"), (b"", "is no whole safetensors file (0 bytes)"),
            (b"PK\3\4" + bytes(200), "is no whole safetensors file"),
            (header + b"x" * 80, "is no safetensors file"),
            (header + b'["a"]'.ljust(80), "is no safetensors file"),
            (header + b'{"a":{"dtype":"F32","shape":[1]}}'.ljust(80), "is no safetensors file"),
            (header + b'{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,4]}}'.ljust(84), "has dtype Q4"),
            (header + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'.ljust(84), "has 4 bytes for"),
            (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")]:
        open(shard, "wb").write(content)
        message = refused(folder)
        assert words in message and "model-00002-of-00003.safetensors" in message
        assert convert_to(folder, tmp_path / "out") == 2


def test_folder_errors(tmp_path, folder):
    assert "is not a folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no published *.safetensors" in refused(tmp_path / "empty")
    os.rename(os.path.join(folder, "model-00003-of-00003.safetensors"), tmp_path / "gone")
    assert "lacks model-00003-of-00003.safetensors, which its model.safetensors.index" in refused(folder)
    open(os.path.join(folder, "model.safetensors.index.json"), "w").write("{")
    assert "index.json is not JSON" in refused(folder)
    open(os.path.join(folder, "model.safetensors.index.json"), "w").write("{}")
    assert "has no weight_map" in refused(folder)
    os.makedirs(os.path.join(tmp_path, "odd", "model.safetensors"))
    assert "cannot be read (Is a directory)" in refused(tmp_path / "odd")
    open(os.path.join(folder, "config.json"), "w").write("[]")
    assert "does not hold a JSON object" in refused(folder)


def test_duplicates_are_refused(tmp_path):
    tensors = random_tensors(FILES)
    folder = write_folder(tmp_path / "p", FILES, tensors)
    save_file({"model.norm.weight": tensors["norm.weight"]}, os.path.join(folder, "more.safetensors"))
    message = refused(folder)
    assert "norm.weight is in" in message and "more.safetensors" in message


def test_unaligned_file(tmp_path):
    """A writer that neither pads its header nor orders by width."""
    tensors = random_tensors(FILES)
    header, data = {}, b""
    for name in sorted(tensors):
        raw = tensors[name].view(torch.uint8).numpy().tobytes()
        shape, dtype = list(tensors[name].shape), convert.inventory(FILES)[name]["dtype"]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode()
    raw += b" " * (1 - len(raw) % 2)    # an odd length
    folder = write_folder(tmp_path / "p", FILES, {"a": torch.zeros(1)})
    open(os.path.join(folder, "model.safetensors"), "wb").write(struct.pack("<Q", len(raw)) + raw + data)
    params = loaded(folder)
    aligned = loaded(write_folder(tmp_path / "q", FILES, tensors))
    assert all(same(params[name], aligned[name]) for name in aligned)
    assert convert_to(folder, tmp_path / "out", 2) == 0
    assert verify(tmp_path / "q", tmp_path / "out") == 0


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * mmap.PAGESIZE


def sparse_folder(path, config):
    """A checkpoint of zeros, with scales of 1, that takes little disk space."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    table = convert.inventory(config)
    layout = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()}
    start, header = convert.layout_header(layout)
    with open(path / "model.safetensors", "wb") as f:
        f.write(start)
        for name, (dtype, shape, offset) in header.items():
            if dtype == "F8_E8M0":
                f.seek(offset)
                f.write(b"\x7f" * int(np.prod(shape)))
        f.truncate(len(start) + convert.layout_bytes(layout))
    return str(path), convert.layout_bytes(layout)


BIG = FILES | {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 256, "vocab_size": 256}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_maps(tmp_path):
    folder, size = sparse_folder(tmp_path / "big", BIG)
    engine = build(BIG)
    before = resident()
    convert.load_weights(engine, folder)
    grown = resident() - before
    print(f"loaded {size / 1e9:.2f} GB, resident memory grew by {grown / 1e6:.0f} MB")
    assert size > 1.6e9 and grown < 60e6
    with torch.no_grad():       # a write must neither fail nor reach the file
        weight = engine.layers[0].ffn.experts[3].w1.scale
        weight.view(torch.uint8)[0, 0] = 7
    again = convert.read_published(folder)["layers.0.ffn.experts.3.w1.scale"].tensor()
    assert again.view(torch.uint8)[0, 0] == 127


def test_file_larger_than_memory_maps(tmp_path):
    size = 1 << 40
    header = json.dumps({"a": {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "a.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + size)
    assert convert.read_files([str(tmp_path / "a.safetensors")])["a"].tensor()[-1] == 0


# ---- weights that stay as stored, and the two caches

def answers(engine, tokens=None) -> torch.Tensor:
    """Logits of a prompt, of single tokens that route elsewhere, and of a second prompt."""
    tokens = random_tokens(40) if tokens is None else tokens
    logits = [engine(tokens[:, :30])] + [engine(tokens[:, p:p + 1], p) for p in range(30, 40)]
    return torch.cat([*logits, engine(tokens[:, 20:])])


@pytest.fixture
def plain_cache(monkeypatch):
    """A weight cache of the test's own, which nothing limits yet."""
    monkeypatch.setattr(kernel, "weight_cache", kernel.WeightCache())
    monkeypatch.setattr(model, "weight_cache", kernel.weight_cache)
    return kernel.weight_cache


def widen(engine, folder):
    """The engine's weights as loading leaves them on a GPU."""
    places = dict(engine.named_parameters())
    for name, stored in convert.read_published(folder).items():
        if name not in places:
            continue        # the MTP block's
        module = engine.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if name.endswith("wo_a.weight") and stored.dtype == "F8_E4M3":
            weight = kernel.widened(places[name].data, module.scale.data, engine.mode.dtype)
            module.weight, module.scale = torch.nn.Parameter(weight, requires_grad=False), None
        elif stored.dtype == "BF16" and leaf == "weight":
            fp32 = ("norm.weight", "gate.weight", "compressor.wkv.weight", "head.weight")
            declared = torch.float32 if name.endswith(("wgate.weight", *fp32)) else engine.mode.dtype
            setattr(module, leaf, torch.nn.Parameter(places[name].to(declared), requires_grad=False))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stored_weights_give_the_bits_of_widened_ones(kind, dtype):
    """Oracle: the engine with weights as a GPU holds them, widened and dequantised once."""
    engine = load(fixture(kind), dtype, model.ROUND_TRIPS, n_mtp_layers=0)
    stored = answers(engine)
    held = {parameter.dtype for name, parameter in engine.named_parameters() if name.endswith("wo_a.weight")}
    assert held == {torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16}
    widen(engine, fixture(kind))
    assert engine.head.weight.dtype == engine.layers[1].attn.compressor.wkv.weight.dtype == torch.float32
    assert all(block.attn.wo_a.weight.dtype == dtype for block in engine.layers)
    assert torch.equal(answers(engine), stored)


def test_as_stored_on_a_cpu_and_as_declared_elsewhere():
    """The one condition of loading, by dtypes; device "meta" stands for any device that is no CPU."""
    def dtypes(device):
        args = model.ModelArgs.from_config(SMALL | QUANTISED)
        with torch.device("meta"):
            engine = model.Transformer(args)
        convert.load_weights(engine, fixture("fp8"), device=device)
        return {name: parameter.dtype for name, parameter in engine.named_parameters()}
    here, there = dtypes("cpu"), dtypes("meta")
    fp32 = ("norm.weight", "gate.weight", "compressor.wkv.weight", "compressor.wgate.weight", "head.weight")
    for name, dtype in here.items():
        if name.endswith(fp32):
            assert (dtype, there[name]) == (torch.bfloat16, torch.float32), name
        elif name.endswith("wo_a.weight"):
            assert (dtype, there[name]) == (torch.float8_e4m3fn, torch.bfloat16)
        elif name.endswith("wo_a.scale"):
            assert name not in there
        else:
            assert dtype == there[name], name


@pytest.mark.parametrize("kind, dtype", [("fp8", torch.bfloat16), ("fp8", torch.float32),
                                         ("bf16", torch.bfloat16)])
def test_a_weight_cache_changes_no_bit(plain_cache, kind, dtype):
    """None, one that is too small for all, and one that holds all."""
    found, held = [], []
    for limit in (0, 1_000_000, 1 << 30):
        plain_cache.limit = limit
        found.append(answers(load(fixture(kind), dtype, model.ROUND_TRIPS)))
        assert plain_cache.size() <= limit
        held.append(plain_cache.hits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert held[0] == 0 < held[1] < held[2]


def test_a_weight_cache_sees_writes_and_forgets_freed_weights(plain_cache):
    plain_cache.limit = 1 << 20
    x, weight = torch.randn(1, 256), torch.randn(8, 256).bfloat16()
    before = kernel.wide_linear(x, weight)
    assert torch.equal(kernel.wide_linear(x, weight), before) and plain_cache.hits == 1
    weight.mul_(2)
    assert torch.equal(kernel.wide_linear(x, weight), 2 * before) and plain_cache.hits == 1
    assert plain_cache.size() == 8 * 256 * 4
    del weight
    assert plain_cache.size() == 0 and len(plain_cache.asked) == 0


class Owner:
    """Something to be kept for."""


def sweep(cache, owners, experts=False) -> int:
    """Asks for each owner's 10 bytes in turn; how many were there."""
    hits = cache.hits
    for owner in owners:
        with cache.experts() if experts else contextlib.nullcontext():
            cache.get(owner, 10, lambda: bytes(10))
        assert cache.size() <= cache.limit
    return cache.hits - hits


def rewritten(folder, change) -> str:
    """The fp8 fixture with its tensors changed, in the folder."""
    tensors = load_file(os.path.join(fixture("fp8"), "model.safetensors"))
    change(tensors)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    Path(folder, "config.json").write_text(json.dumps(SMALL | QUANTISED))
    return str(folder)


def quantise_compressors(tensors: dict):
    rng = generator(0)
    ends = "compressor.wkv.weight", "compressor.wgate.weight"
    for name in [name for name in tensors if name.endswith(ends)]:
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors[name] = (64 * tensors[name].float()).to(torch.float8_e4m3fn)
        codes = torch.randint(119, 123, blocks, generator=rng).to(torch.uint8)
        tensors[convert.scale_of(name)] = codes.view(torch.float8_e8m0fnu)


def name_experts_twice(tensors: dict):
    for name in tensors:
        if name.endswith("tid2eid"):
            tensors[name][:, 1] = tensors[name][:, 0]


def store_streams_in_bf16(tensors: dict):
    for name in tensors:
        if re.search("hc_[a-z]+_fn$", name):
            tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize("change", [quantise_compressors, name_experts_twice, store_streams_in_bf16])
def test_what_no_published_checkpoint_has_but_loading_takes(tmp_path, change):
    """Oracle: the NumPy reference. Of a token that names an expert twice it counts once."""
    folder, tokens = rewritten(tmp_path, change), random_tokens(40)
    engine = load(folder, n_mtp_layers=0)
    expected = Reference(folder).forward(tokens[0].numpy())
    assert relative_error(engine(tokens)[0], expected[-1]) < EXACT
    assert relative_error(engine(tokens[:, :1])[0], expected[0]) < EXACT


def test_a_kept_weight_is_of_the_dtype_that_is_asked_for(monkeypatch):
    """F32 scales: of bf16 and fp32 each has other numbers."""
    monkeypatch.setattr(kernel, "weight_cache", kernel.WeightCache(1 << 20))
    weight, scale = random_weight(False, 128, 256, "cpu", generator(0))
    scale = scale.float() * 1.1
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for _ in range(2):
            kept = kernel.plain_weight(weight, scale, dtype)
            assert kept.dtype == dtype and torch.equal(kept, kernel.widened(weight, scale, dtype))
    assert kernel.weight_cache.hits == 3


def test_a_lower_limit_frees():
    cache, owners = kernel.WeightCache(40), [Owner() for _ in range(4)]
    sweep(cache, owners)
    cache.resize(50)
    assert cache.size() == 40
    cache.resize(0)
    assert cache.size() == 0 and cache.get(owners[0], 10, lambda: bytes(10)) is None


@pytest.mark.parametrize("flag", ["cache_gb", "device_gb"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1])
def test_limits_that_are_refused(flag, value):
    with pytest.raises(ValueError, match=f"{flag} is .*: give a number of GB"):
        generate.load_model("tiny", device="cpu", **{flag: value})


@pytest.mark.parametrize("experts", [False, True])
def test_a_sweep_over_more_than_fits_still_finds_what_does(experts):
    cache, owners = kernel.WeightCache(45), [Owner() for _ in range(10)]
    assert [sweep(cache, owners, experts) for _ in range(3)] == [0, 4, 4]


def test_experts_make_room_for_dense_weights():
    cache, dense, experts = kernel.WeightCache(40), [Owner() for _ in range(3)], [Owner() for _ in range(4)]
    assert sweep(cache, experts, experts=True) == 0 and sweep(cache, experts, experts=True) == 4
    sweep(cache, dense)
    assert sweep(cache, dense) == 3
    assert sweep(cache, experts[3:], experts=True) == 1, "the newest expert stays"
    assert cache.get(Owner(), 41, lambda: bytes(41)) is None
    assert cache.size() == 40, "nothing goes for nothing"
    assert sweep(cache, [Owner()]) == 0 and sweep(cache, dense) == 3
    others = [Owner(), Owner()]
    assert sweep(cache, others) == 0 and sweep(cache, dense) == 3 and cache.size() == 40


def test_an_expert_that_is_used_again_takes_the_place_of_one_that_is_not():
    cache, (a, b, c) = kernel.WeightCache(20), (Owner(), Owner(), Owner())
    sweep(cache, [a, b, c], experts=True)
    assert sweep(cache, [b, c, b, c], experts=True) == 3, "c took a's place at its second use"


def test_copies_of_experts_are_bounded_and_change_no_bit():
    """The CPU plays both sides. Room for all, for three and for one; a limit below one names the least."""
    folder = fixture("fp8")
    expected = answers(load(folder, torch.bfloat16, model.ROUND_TRIPS, n_mtp_layers=0))
    for experts in (1, 3, 48):
        engine = load(folder, torch.bfloat16, model.ROUND_TRIPS, n_mtp_layers=0)
        size = engine.layers[0].ffn.experts[0].size()
        engine.copy_experts(experts * size)
        engine.reset_caches("cpu")
        copies, most = engine.layers[0].ffn.copies, 0
        allocate = model.copy_to

        def copy_to(expert, device):
            nonlocal most
            most = max(most, copies.size() + size)      # what is held while the copy is made, and the copy
            return allocate(expert, device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "copy_to", copy_to)
            assert torch.equal(answers(engine), expected)
        assert most <= experts * size and (copies.hits > 0) == (experts == 48)
        assert all(block.ffn.table is None for block in engine.layers)
    with pytest.raises(ValueError, match=f"hold no expert: give {size / 1e9:.9g} GB or more"):
        engine.copy_experts(size - 1)


@pytest.mark.parametrize("cache_gb, device_gb, device, expected", [
    (None, None, None, generate.CACHE_GB), (0, None, None, 0), (3.5, None, "cpu", 3.5),
    (None, None, "cuda", 0),
    (None, 1, "cuda", 0), (None, 1, "cpu", 0), (0, 1, "cuda:1", 0), (None, 1, None, "there is no GPU"),
    (1, None, "cuda", "leave it out"), (1, 1, "cpu", "leave it out")])
def test_which_caches_make_sense(cache_gb, device_gb, device, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            generate.cache_of(cache_gb, device_gb, device)
    else:
        assert generate.cache_of(cache_gb, device_gb, device) == expected


def test_load_model_sets_the_caches(plain_cache):
    engine, _ = generate.load_model(BOX, max_seq_len=64, cache_gb=0.5)
    assert plain_cache.limit == 500_000_000
    expected = answers(engine, random_tokens(40, engine.vocab_size))
    assert plain_cache.hits > 0
    engine, _ = generate.load_model(BOX, max_seq_len=64, device="cpu", device_gb=0.001)
    assert plain_cache.limit == 0
    assert torch.equal(answers(engine, random_tokens(40, engine.vocab_size)), expected)


# ---- ranks

@pytest.mark.parametrize("config", [FLASH, FILES], ids=["flash", "small"])
def test_world_sizes(config):
    fits = [1, 2, 4, 8] if config is FLASH else [1, 2]
    for mp in range(1, 33):
        if mp in fits:
            convert.check_parallel(config, mp)
        else:
            with pytest.raises(convert.CheckpointError, match=f"choose one of {', '.join(map(str, fits))}$"):
                convert.check_parallel(config, mp)
    named = [(3, "n_routed_experts 256"), (16, "divide o_groups 8:"), (24, "vocab_size 129280"), (0, "not")]
    for mp, words in named:
        if config is FLASH:
            with pytest.raises(convert.CheckpointError, match=words):
                convert.check_parallel(FLASH, mp)


def test_half_blocks_are_refused(tmp_path):
    config = FILES | {"o_lora_rank": 64}        # wo_a and wo_b: 128, that is 64 for each of two ranks
    folder = write_folder(tmp_path / "p", config, random_tensors(config))
    with pytest.raises(convert.CheckpointError, match="2 ranks cannot share the 128 rows of"):
        convert.main(folder, str(tmp_path / "out"), 4, 2, None)
    assert not (tmp_path / "out").exists()
    assert convert_to(folder, tmp_path / "out", 1) == 0


def with_plain_wo_a(params: dict) -> dict:
    """Parameters with wo_a as conversion stores it, whatever it is stored as."""
    plain = {name: kernel.plain_weight(param, params.get(convert.scale_of(name)), torch.bfloat16)
             for name, param in params.items() if name.endswith("wo_a.weight")}
    return {name: plain.get(name, param) for name, param in params.items() if not name.endswith("wo_a.scale")}


@pytest.mark.parametrize("expert_dtype", [None, "fp8"])
@pytest.mark.parametrize("config", [FILES, BASE, PLAIN], ids=["fp4", "base", "bf16"])
def test_convert_verify_load(tmp_path, monkeypatch, capsys, config, expert_dtype):
    if config is PLAIN and expert_dtype:
        pytest.skip("refused")
    folder = write_folder(tmp_path / "p", config, random_tensors(config), shards=2)
    whole = with_plain_wo_a(loaded(folder, config))
    for world in (1, 2):
        out = tmp_path / f"out{world}"
        assert convert_to(folder, out, world, expert_dtype) == 0
        assert verify(folder, out) == 0
        assert capsys.readouterr().out == "every tensor agrees\n"
        files = [f"model{rank}-mp{world}.safetensors" for rank in range(world)]
        assert sorted(os.listdir(out)) == ["config.json", *files, "tokenizer.json"]
        ranks = []
        for rank in range(world):
            as_rank(monkeypatch, rank, world)
            converted, sliced = (with_plain_wo_a(loaded(str(place), config)) for place in (out, folder))
            assert all(param.is_contiguous() for param in sliced.values())
            ranks.append(sliced)
            assert converted.keys() == sliced.keys()
            for name in sliced:
                if not (expert_dtype and ".experts." in name):
                    assert same(converted[name], sliced[name]), name
        for name in whole:      # the ranks together hold the whole
            parts = [part[name] for part in ranks if name in part]
            raw = [part.view(torch.uint8) for part in parts]
            joined = [torch.cat(raw, dim).view(parts[0].dtype) for dim in range(parts[0].dim())]
            candidates = [parts[0], *joined]
            assert any(same(whole[name], candidate) for candidate in candidates), name
        monkeypatch.undo()


def test_converted_for_another_world_size(tmp_path, folder, monkeypatch):
    assert convert_to(folder, tmp_path / "out", 2) == 0
    message = refused(tmp_path / "out")
    assert "was converted for 2, started with 1" in message and "--nproc-per-node 2" in message
    os.remove(tmp_path / "out" / "model1-mp2.safetensors")
    as_rank(monkeypatch, 1, 2)
    assert "lacks model1-mp2.safetensors" in refused(tmp_path / "out")


# ---- conversion

@pytest.mark.skipif("VENDOR_DIR" not in os.environ, reason="set VENDOR_DIR to the vendor's inference folder")
@pytest.mark.parametrize("config, mp, expert_dtype, rename", [
    (FILES, 1, None, False), (FILES, 1, "fp8", True), (FILES, 2, "fp4", False), (FILES, 2, "fp8", False),
    (BASE, 2, None, False)])
def test_same_bytes_as_the_vendor(tmp_path, config, mp, expert_dtype, rename):
    tensors = random_tensors(config)
    if rename:      # only at mp 1: under these names the vendor splits shared experts, its model does not
        tensors = {in_other_name_space(name): tensor for name, tensor in tensors.items()}
    folder = write_folder(tmp_path / "p", config, tensors, shards=2)
    done = python(os.path.join(os.environ["VENDOR_DIR"], "convert.py"), "--hf-ckpt-path", folder,
                  "--save-path", tmp_path / "theirs", "--n-experts", 4, "--model-parallel", mp,
                  *(["--expert-dtype", expert_dtype] if expert_dtype else []))
    assert done.returncode == 0, done.stderr
    assert convert_to(folder, tmp_path / "ours", mp, expert_dtype) == 0
    for rank in range(mp):
        file = f"model{rank}-mp{mp}.safetensors"
        ours, theirs = ((tmp_path / side / file).read_bytes() for side in ("ours", "theirs"))
        assert ours == theirs       # header included


def test_converted_file_is_as_the_library_writes_it(tmp_path, folder):
    assert convert_to(folder, tmp_path / "out", 2) == 0
    path = tmp_path / "out" / "model1-mp2.safetensors"
    tensors = load_file(path)
    assert tensors["layers.0.ffn.experts.2.w1.weight"].dtype == torch.float4_e2m1fn_x2
    assert "layers.0.ffn.experts.0.w1.weight" not in tensors and "layers.0.attn.wo_a.scale" not in tensors
    save_file(tensors, tmp_path / "again.safetensors")
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_nibble_order():
    for data, byte, values in ("21", 127, [.5, 1.]), ("f8", 128, [0., -12.]), ("07", 120, [.046875, 0.]):
        packed = torch.tensor([int(data, 16)], dtype=torch.uint8).view(torch.int8).repeat(128, 64)
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e8m0fnu).repeat(128, 4)
        weight, new_scale = convert.cast_e2m1fn_to_e4m3fn(packed, scale)
        assert (weight.float() * new_scale.float())[5, 6:8].tolist() == values
        assert weight.dtype == torch.float8_e4m3fn and new_scale.dtype == torch.float8_e8m0fnu


def cast(codes, scales):
    packed = torch.full((128, 64), codes, dtype=torch.uint8).view(torch.int8)
    scale = torch.full((128, 4), 127, dtype=torch.uint8)
    scale[0, :len(scales)] = torch.tensor(scales, dtype=torch.uint8)
    return convert.cast_e2m1fn_to_e4m3fn(packed, scale.view(torch.float8_e8m0fnu))


def test_cast_knows_no_negative_zero():
    """As in the vendor's table: the code of -0 becomes 0, of either nibble and under any scale."""
    packed = torch.full((128, 64), -120, dtype=torch.int8)      # 0x88: -0 twice
    scale = torch.full((128, 4), 130, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight, _ = convert.cast_e2m1fn_to_e4m3fn(packed, scale)
    assert not weight.view(torch.uint8).any()


def test_cast_refuses_what_it_would_lose():
    weight, scale = cast(0x11, [141])       # .5 at 2^14 apart: the last that is exact
    assert (weight.float() * scale.float())[:2, 0].tolist() == [.5 * 2**14, .5]
    with pytest.raises(convert.CheckpointError, match="too far apart"):
        cast(0x11, [142])
    cast(0x22, [142])                       # 1.0 has one step more
    cast(0x00, [142, 255 - 1])              # zeros lose nothing
    with pytest.raises(convert.CheckpointError):
        cast(0x22, [255])                   # a NaN scale


def test_cast_refusal_names_the_tensor(tmp_path, capsys):
    tensors = random_tensors(FILES)
    tensors["layers.1.ffn.experts.0.w2.weight"].fill_(0x11)
    tensors["layers.1.ffn.experts.0.w2.scale"].view(torch.uint8)[3, 1] = 160
    folder = write_folder(tmp_path / "p", FILES, tensors)
    assert convert_to(folder, tmp_path / "out", 1, "fp8") == 2
    assert "layers.1.ffn.experts.0.w2.weight: the scales" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []       # nothing half made is left
    assert convert_to(folder, tmp_path / "out", 1, "fp4") == 0


def test_broken_run_goes_on(tmp_path, folder, capsys, monkeypatch):
    assert convert_to(folder, tmp_path / "once", 2) == 0
    write = convert.write_file

    def break_at_second(path, *args):
        if "model1" in path:
            monkeypatch.setattr(convert, "converted_tensors", lambda *args: iter(()) if 1 / 0 else None)
        write(path, *args)
    monkeypatch.setattr(convert, "write_file", break_at_second)
    with pytest.raises(ZeroDivisionError):
        convert_to(folder, tmp_path / "out", 2)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "out") == ["model0-mp2.safetensors"]
    capsys.readouterr()
    kept = (tmp_path / "out" / "model0-mp2.safetensors").stat().st_mtime_ns
    (tmp_path / "out" / "model1-mp2.safetensors.part").write_bytes(b"of a killed run")
    assert convert_to(folder, tmp_path / "out", 2) == 0
    assert "model0-mp2.safetensors: it is whole" in capsys.readouterr().err
    assert (tmp_path / "out" / "model0-mp2.safetensors").stat().st_mtime_ns == kept
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "once"))
    # a file of another layout, or a cut one, is made again
    (tmp_path / "out" / "model1-mp2.safetensors").write_bytes(b"cut")
    assert convert_to(folder, tmp_path / "out", 2, "fp8") == 0
    assert "is whole" not in capsys.readouterr().err
    assert verify(folder, tmp_path / "out") == 0


@pytest.mark.parametrize("expert_dtype", [None, "fp8"])
def test_verify_finds_one_byte(tmp_path, folder, capsys, expert_dtype):
    out = tmp_path / "out"
    assert convert_to(folder, out, 2, expert_dtype) == 0
    path = out / "model1-mp2.safetensors"
    header, whole = convert.read_header(str(path)), path.read_bytes()
    for name in ("layers.0.attn.wo_a.weight", "layers.1.ffn.experts.3.w1.weight", "hc_head_scale",
                 "layers.1.ffn.experts.3.w1.scale", "layers.0.attn.wo_b.weight", "embed.weight",
                 "mtp.0.e_proj.scale"):
        damaged = bytearray(whole)
        damaged[header[name][2]] ^= 4
        path.write_bytes(damaged)
        capsys.readouterr()
        assert verify(folder, out) == 1
        said = capsys.readouterr().out
        by_weight = expert_dtype == "fp8" and ".experts." in name
        assert (name.replace("scale", "weight") if by_weight else name) + " differs in" in said
        assert "1 tensors differ" in said


def test_verify_names_other_faults(tmp_path, folder, capsys):
    out = tmp_path / "out"
    assert convert_to(folder, out, 1) == 0
    tensors = load_file(out / "model0-mp1.safetensors")
    del tensors["norm.weight"]
    tensors["more"] = torch.zeros(1)
    tensors["hc_head_base"] = torch.zeros(2)
    tensors["layers.0.attn.wkv.weight"] = tensors["layers.0.attn.wkv.weight"].bfloat16()
    save_file(tensors, out / "model0-mp1.safetensors")
    capsys.readouterr()
    assert verify(folder, out) == 1
    said = capsys.readouterr().out
    assert "norm.weight is missing" in said and "more is not in the original" in said
    assert "hc_head_base was F32 [4] and is F32 [2]" in said
    assert "layers.0.attn.wkv.weight was F8_E4M3 [128, 256] and is BF16 [128, 256]" in said
    assert verify(folder, tmp_path) == 2
    assert verify(folder, tmp_path / "none") == 2


def test_request_errors(tmp_path, folder, capsys):
    def said(**kwargs):
        assert convert_to(folder, tmp_path / "out", **kwargs) == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err
    assert "--n-experts 256 contradicts config.json: give its n_routed_experts, 4" in said(n_experts=256)
    assert "model parallel 3 does not divide n_routed_experts 4" in said(mp=3)
    assert "model parallel 4 does not divide o_groups 2" in said(mp=4)
    assert convert_to(folder, folder) == 2 and "--save-path is --hf-ckpt-path" in capsys.readouterr().err
    os.remove(os.path.join(folder, "config.json"))
    assert "has no config.json" in said()


def test_expert_dtype_that_cannot_be_had(tmp_path, capsys):
    base = write_folder(tmp_path / "b", BASE, random_tensors(BASE))
    assert convert_to(base, tmp_path / "out", 1, "fp4") == 2
    assert "--expert-dtype fp4 cannot be had, the experts are stored as F8_E4M3" in capsys.readouterr().err
    plain = write_folder(tmp_path / "q", PLAIN, random_tensors(PLAIN))
    assert convert_to(plain, tmp_path / "out", 1, "fp8") == 2
    narrow = FILES | {"moe_intermediate_size": 64}
    folder = write_folder(tmp_path / "n", narrow, random_tensors(narrow))
    assert convert_to(folder, tmp_path / "out", 1, "fp8") == 2
    assert "needs multiples of 128, but there is {'moe_intermediate_size': 64}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_room(tmp_path, folder, monkeypatch, capsys):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    assert convert_to(folder, tmp_path / "out") == 2 and "make room" in capsys.readouterr().err


def test_command_line(tmp_path, folder):
    script = convert.__file__
    for args, code, words in [
            ([], 2, "--hf-ckpt-path, --save-path, --n-experts, --model-parallel needed"),
            (["--hf-ckpt-path", folder, "--expert-dtype", "fp16"], 2, "invalid choice"),
            (["--inventory", str(tmp_path)], 2, "has no config.json"),
            (["--hf-ckpt-path", str(tmp_path / "x"), "--verify", folder], 2, "is not a folder")]:
        done = python(script, *args)
        assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("expert_dtype", [None, "fp8"])
def test_conversion_streams(tmp_path, expert_dtype):
    """Peak memory above that of the imports, for a checkpoint of .3 GB with tensors of up to 34 MB."""
    experts = 8 if expert_dtype else 32     # the cast and its verification take their time
    config = FILES | {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": experts,
                      "vocab_size": 16384}
    folder, size = sparse_folder(tmp_path / "big", config)
    code = ("import re, sys, torch, numpy, convert, kernel\n"
            "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
            "before = peak()\n"
            "folder, out, *extra = sys.argv[1:]\n"
            "assert convert.command_line(['--hf-ckpt-path', folder, '--save-path', out, *extra]) == 0\n"
            "assert convert.command_line(['--hf-ckpt-path', folder, '--verify', out]) == 0\n"
            "print(peak() - before)")
    done = python("-c", code, folder, tmp_path / "out", "--n-experts", experts, "--model-parallel", 2,
                  *(["--expert-dtype", expert_dtype] if expert_dtype else []))
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1]) / 1e3
    print(f"converted and verified {size / 1e9:.2f} GB, peak {peak:.0f} MB above the imports")
    assert peak < 150 and size > (.1e9 if expert_dtype else .25e9)


# ---- what a restart keeps, and what it never writes through

@pytest.mark.parametrize("name", [
    "norm.weight", "layers.1.ffn.gate.bias", "layers.0.attn.attn_sink", "hc_head_scale",
    "layers.1.attn.compressor.ape", "embed.weight", "layers.0.attn.wq_a.weight",
    "layers.2.ffn.experts.3.w1.weight", "layers.2.ffn.experts.3.w1.scale", "layers.0.ffn.gate.tid2eid"])
def test_another_checkpoint_is_not_kept(tmp_path, folder, capsys, name):
    """One byte of one tensor is enough; the file of the rank that does not hold it is kept."""
    assert convert_to(folder, tmp_path / "out", 2) == 0
    tensors = random_tensors(FILES)
    tensors[name] = tensors[name].clone()
    tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
    other = write_folder(tmp_path / "other", FILES, tensors)
    capsys.readouterr()
    assert convert_to(other, tmp_path / "out", 2) == 0
    one_rank = name in ("embed.weight", "layers.0.attn.attn_sink") or ".experts." in name
    assert capsys.readouterr().err.count("it is whole") == one_rank
    assert verify(other, tmp_path / "out") == 0


def test_a_restart_reads_little(tmp_path, folder, monkeypatch, capsys):
    """Of a large tensor its first rows are compared, of a tensor that was cast or dequantised nothing."""
    monkeypatch.setattr(convert, "PEEK", 100)
    assert convert_to(folder, tmp_path / "out", 2, "fp8") == 0
    read, byte_rows = [], convert._byte_rows

    def recorded(stored, step):
        rows = next(byte_rows(stored, step))
        read.append(rows.nbytes)
        assert rows.nbytes <= max(100, stored.nbytes // np.prod(stored.local_shape[:-1], dtype=int))
        yield rows
    monkeypatch.setattr(convert, "_byte_rows", recorded)
    capsys.readouterr()
    assert convert_to(folder, tmp_path / "out", 2, "fp8") == 0
    assert capsys.readouterr().err.count("it is whole") == 2 and read


def test_the_source_is_never_written_to(tmp_path, folder):
    source, out = tmp_path / "published", tmp_path / "out"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    out.mkdir()
    (out / "config.json").symlink_to(source / "config.json")
    os.link(source / "tokenizer.json", out / "tokenizer.json")
    shard = source / "model-00001-of-00003.safetensors"
    (out / "model0-mp1.safetensors.part").symlink_to(shard)
    (out / "model0-mp1.safetensors").symlink_to(shard)
    assert convert_to(folder, out) == 0 and verify(folder, out) == 0
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not (out / "model0-mp1.safetensors").is_symlink()
    assert sorted(os.listdir(out)) == ["config.json", "model0-mp1.safetensors", "tokenizer.json"]
    # nor any other checkpoint
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}")
    for make in (os.symlink, os.link):
        os.remove(out / "config.json")
        make(foreign, out / "config.json")
        assert convert_to(folder, out) == 0 and foreign.read_text() == "{}"
        assert (out / "config.json").read_bytes() == before["config.json"]


def test_two_runs_into_one_folder(tmp_path, folder, monkeypatch, capsys):
    """The second takes the name: the first must not give the second's unfinished file its name."""
    part, made = tmp_path / "out" / "model0-mp1.safetensors.part", convert.converted_tensors

    def overtaken(*args):
        yield from made(*args)
        part.unlink()
        part.write_bytes(b"the second's")
    monkeypatch.setattr(convert, "converted_tensors", overtaken)
    assert convert_to(folder, tmp_path / "out") == 2
    assert "was taken by another run: let one at a time" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == [part.name] and part.read_bytes() == b"the second's"


# ---- headers, indices and configs that are not what they should be

def with_header(folder, tmp_path, capsys, change):
    """The sentence for a file whose header is changed; loading and conversion say the same."""
    path = os.path.join(folder, "model-00002-of-00003.safetensors")
    raw = open(path, "rb").read()
    length, = struct.unpack("<Q", raw[:8])
    header = change(json.loads(raw[8:8 + length]))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(header)) + header + raw[8 + length:])
    message = refused(folder)
    assert convert_to(folder, tmp_path / "out") == 2 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == f"convert.py: {message}\n" and "model-00002-of-00003" in message
    assert len(message) < 1000
    open(path, "wb").write(raw)
    return message


def first_two(header):
    """The two float32 tensors of a header that come first in the file."""
    names = sorted((name for name in header if header[name]["dtype"] == "F32"),
                   key=lambda name: header[name]["data_offsets"])
    return header[names[0]], header[names[1]]


def overlapping(header):
    a, b = first_two(header)
    b["data_offsets"] = [at - 4 for at in b["data_offsets"]]
    return header


def gappy(header):
    last = max(header.values(), key=lambda entry: entry["data_offsets"])
    last["data_offsets"] = [at + 64 for at in last["data_offsets"]]
    return header


def on_top(header):
    """Two tensors of one size in one place: the sum of the sizes no longer fits, the last end does."""
    entry = next(iter(header.values()))
    return header | {"again": dict(entry)}


def late(header):
    for entry in header.values():
        entry["data_offsets"] = [at + 8 for at in entry["data_offsets"]]
    return header


def test_tensors_must_tile_the_file(tmp_path, folder, capsys):
    for change in (overlapping, gappy, on_top, late):
        assert "is cut or damaged" in with_header(folder, tmp_path, capsys, change)
    assert loaded(folder)


def f32(shape, offsets):
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


WRONG_ENTRIES = [
    *(f32([1], [0, 4]) | {"dtype": dtype} for dtype in ([], None, 5, "F" * 9999)),
    *(f32(shape, [0, 1]) | {"dtype": "F4"} for shape in ([], [3])),
    *(f32(shape, [0, 4]) for shape in ([1.0], [-1, -1], [True], ["1"], [[1]], [None], "1", None, {}, 1)),
    *(f32([1], at) for at in ([0.0, 4.0], [.5, 4.5], [-4, 0], [False, 4], ["0", "4"], [0, 4, 8], [4], [],
                              None, "04", {"0": 4}, [0, float("inf")], [0, None])),
    f32([-1], [4, 0]), f32([10**4000, 10**4000, 0], [0, 0]), {}, None, "x", 5, [1, 2, 3]]


def test_header_entry_of_a_wrong_kind(tmp_path, folder, capsys):
    for entry in WRONG_ENTRIES:
        message = with_header(folder, tmp_path, capsys, lambda header: header | {"odd": entry})
        assert "odd" in message and ("download it" in message or "use the published one" in message), entry


def test_header_of_a_wrong_kind(tmp_path, folder, capsys):
    nothing = f32([0], [0, 0])
    digits = b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
    deep = [b'{"a":' + b"[" * n + b"]" * n + b"}" for n in (10, 500, 900, *range(930, 1000, 5))]
    for header in (b"[" * 200000, b'{"a":' * 100000, b'{"\xff":1}', b"50", b"null", b'"text"', digits, *deep,
                   {"a\nb": nothing}, {"a\ud800": nothing}, {"a\0": nothing}):
        message = with_header(folder, tmp_path, capsys, lambda _: header)
        assert "is no safetensors file" in message, header[:99]


def test_header_that_is_too_long(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "p", FILES, random_tensors(FILES))
    monkeypatch.setattr(convert, "MAX_HEADER", 1000)
    assert "is no whole safetensors file" in refused(folder)


def test_odd_names_are_unexpected(tmp_path):
    """Names with more digits than Python reads, or too few parts; tensors without the dimension to split."""
    names = ["layers.7.ffn.experts." + "9" * 5000 + ".w1.weight", "mtp.", "", "weight", ".scale",
             "layers.7.attn.wo_b.weight"]
    odd = {name: torch.zeros(2) for name in names} | {"layers.7.attn.attn_sink": torch.tensor(0.)}
    folder = write_folder(tmp_path / "p", FILES, random_tensors(FILES) | odd)
    assert "7 unexpected: , .scale, layers.7.attn.attn_sink, layers.7.attn.wo_b.weight" in refused(folder)
    assert odd.keys() <= convert.read_checkpoint(folder, 1, 2).keys() | {names[0]}
    save_file({"mtp." + "9" * 5000 + ".x": torch.zeros(2)}, os.path.join(folder, "more.safetensors"))
    assert "has no MTP block" in refused(folder)     # it counts as a draft stage


WRONG_NUMBERS = ("512", None, [], {}, -1, 1.5, 64.0, True, float("nan"), 1 << 80, 10**4000)


def config_refused(folder, capsys, config):
    """What --inventory and conversion say about a config.json: one sentence, the same."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    said = []
    for command in (lambda: run("--inventory", folder), lambda: convert_to(folder, folder / "out", 2)):
        assert command() == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1 and len(output.err) < 400
        said.append(output.err)
    assert said[0] == said[1]
    return said[0]


def test_config_number_of_a_wrong_kind(tmp_path, capsys):
    for key in convert.CONFIG_KEYS:
        if key != "compress_ratios":
            zero = () if key in ("num_hash_layers", "num_nextn_predict_layers") else (0,)
            for value in (*WRONG_NUMBERS, *zero):
                said = config_refused(tmp_path, capsys, FILES | {key: value})
                assert f"config.json says {key} " in said and "it must be a whole number" in said


@pytest.mark.parametrize("key, values", [
    ("compress_ratios", ("0123", None, 5, {}, True, *([0, 4, bad, 0] for bad in WRONG_NUMBERS))),
    ("architectures", (5, "DeepseekV4ForCausalLM", "", {}, {"a": 1}, True, False, [5], [None])),
    ("quantization_config", ("fp8", "", 5, 0, [], ["fp8"], True, False)),
    ("scale_fmt", ("float", [], 5, "")),
    ("expert_dtype", (5, 0, "", [], {}, True, False, "int4")), ("model_type", (5, None, [], "x" * 9999))])
def test_config_value_of_a_wrong_kind(tmp_path, capsys, key, values):
    for value in values:
        change = {"quantization_config": {key: value}} if key == "scale_fmt" else {key: value}
        assert f"config.json says {key} " in config_refused(tmp_path, capsys, FILES | change)
        with pytest.raises(convert.CheckpointError):
            convert.read_config(str(tmp_path))
        if key != "model_type":
            with pytest.raises(convert.CheckpointError, match=f"says {key} "):
                convert.inventory(FILES | change)


@pytest.mark.parametrize("key", ["architectures", "quantization_config", "vocab_size", "model_type"])
def test_json_that_is_deeply_nested(tmp_path, capsys, key):
    """From what Python reads, where the key is named, to what it does not."""
    text = json.dumps(FILES)[:-1] + f', "{key}": '
    for depth in (10, 500, 900, *range(930, 1000), 3000, 10000, 200000):
        (tmp_path / "config.json").write_text(text + "[" * depth + "]" * depth + "}")
        for command in (lambda: run("--inventory", tmp_path), lambda: convert_to(tmp_path, tmp_path / "out")):
            assert command() == 2
            said = capsys.readouterr().err
            assert f"config.json says {key} [[" in said or (depth > 500 and "is not JSON" in said)
    assert "is not JSON" in said and "download it again" in said and said.count("\n") == 1


def test_config_values_are_checked_where_only_they_are_used(folder):
    """Loading does without most keys, but not with a wrong one."""
    path = os.path.join(folder, "config.json")
    for key in ("n_routed_experts", "num_nextn_predict_layers"):
        open(path, "w").write(json.dumps({"model_type": "deepseek_v4", key: "4"}))
        assert f"says {key} '4': it must be a whole number" in refused(folder)


def test_index_names_files_beside_it(tmp_path, folder, capsys):
    index = os.path.join(folder, "model.safetensors.index.json")
    weight_map = json.load(open(index))["weight_map"]
    for name in ("../x.safetensors", "/etc/x.safetensors", "a/../../x", "a/x.safetensors", "..", ".", "",
                 "./model.safetensors", "a\0b", "a\nb", "a\ud800"):
        open(index, "w").write(json.dumps({"weight_map": weight_map | {"norm.weight": name}}))
        message = refused(folder)
        assert f"names {name!r}, where it may only name files beside it" in message
        assert convert_to(folder, tmp_path / "out") == 2 and message in capsys.readouterr().err


def test_index_that_is_deeply_nested(folder):
    for depth in (500, 200000):
        open(os.path.join(folder, "model.safetensors.index.json"), "w").write('{"weight_map":' + "[" * depth)
        assert "index.json is not JSON" in refused(folder)


def test_verify_names_a_scale_that_does_not_fit(tmp_path, folder, capsys):
    assert convert_to(folder, tmp_path / "out", 1, "fp8") == 0
    path, name = tmp_path / "out" / "model0-mp1.safetensors", "layers.0.ffn.experts.0.w1"
    whole = load_file(path)
    for scale in (torch.ones(7, 5), whole[name + ".scale"].float(), None):
        tensors = {key: tensor for key, tensor in whole.items() if key != name + ".scale"}
        save_file(tensors | ({} if scale is None else {name + ".scale": scale}), path)
        capsys.readouterr()
        assert verify(folder, tmp_path / "out") == 1
        assert f"{name}.weight has no scale that fits" in capsys.readouterr().out


@pytest.mark.parametrize("config", [FLASH, FILES], ids=["in the middle", "at the end"])
def test_reader_that_has_gone(tmp_path, config):
    """`| head -1`: the output stops where a print fails or, when it fits the pipe's buffer, at the end."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, convert.__file__, "--inventory", tmp_path], stdout=write,
                          stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and "rror" not in done.stderr and "pipe" not in done.stderr


# ==========================================================================================================
# generate.py: encoding, parsing, the program
# ==========================================================================================================

CHAT_BOS, CHAT_EOS, CHAT_DSML = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "｜DSML｜"
CHAT_USER, CHAT_ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CHAT_FUZZ = int(os.getenv("CHAT_FUZZ", "3000"))     # texts; 100000 for the full run


# ---- helpers ----

def chat_block(*calls):
    """A tool block as the vendor's encoder writes it, of (name, {parameter: value})."""
    invokes = []
    for name, arguments in calls:
        lines = [f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
                 f'{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>'
                 for key, value in arguments.items()]
        invokes.append(f'<｜DSML｜invoke name="{name}">\n' + "\n".join(lines) + "\n</｜DSML｜invoke>")
    return "<｜DSML｜tool_calls>\n" + "\n".join(invokes) + "\n</｜DSML｜tool_calls>"


def chat_sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def chat_parse(text, thinking_mode="chat"):
    """(content, reasoning, [(name, arguments)], error) of an answer."""
    message = parse_message_from_completion_text(text, thinking_mode)
    calls = [call["function"] for call in message["tool_calls"]]
    return (message["content"], message["reasoning_content"],
            [(call["name"], json.loads(call["arguments"])) for call in calls], message["error"])


def chat_tool(name, **properties):
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": properties}}}


def chat_history(*calls, results=()):
    """A question, an assistant turn with calls (id, name, arguments), results (id, content)."""
    return [{"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]},
            *[{"role": "tool", "tool_call_id": i, "content": c} for i, c in results]]


def chat_tokenizer():
    """One token for each byte, and the control tokens; some not special, as in the published tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([CHAT_BOS, CHAT_EOS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (
        CHAT_USER, CHAT_ASSISTANT, "<think>", "</think>", CHAT_DSML)])
    return tokenizer


class ChatScript(torch.nn.Module):
    """A model that answers by the book: the first (pattern, answer) whose pattern is in the last user turn.

    Holds tokens as Transformer does, and objects to passes that Transformer would object to."""

    def __init__(self, script, tokenizer, max_seq_len=4096, delay=0.0):
        super().__init__()
        self.script, self.tokenizer, self.delay = script, tokenizer, delay
        self.max_seq_len, self.max_batch_size, self.vocab_size = max_seq_len, 1, tokenizer.get_vocab_size()
        self.held, self.passes, self.args = [], [], types.SimpleNamespace(max_chunk=generate.PREFILL_CHUNK)

    def forward(self, input_ids, start_pos=0):
        time.sleep(self.delay)
        assert start_pos in (0, len(self.held)) and start_pos + input_ids.shape[1] <= self.max_seq_len
        self.passes.append((start_pos, input_ids.shape[1]))
        self.held = self.held[:start_pos] + input_ids[0].tolist()
        assistant = self.tokenizer.token_to_id(CHAT_ASSISTANT)
        cue = max((i for i, token in enumerate(self.held) if token == assistant), default=0)
        said = self.tokenizer.decode(self.held[:cue], skip_special_tokens=False).rpartition(CHAT_USER)[2]
        cue += 2        # and <think> or </think>
        answer = next((answer for pattern, answer in self.script if pattern in said), "?")
        ids = self.tokenizer.encode(answer + CHAT_EOS, add_special_tokens=False).ids
        logits = torch.zeros(1, self.vocab_size)
        logits[0, ids[min(max(len(self.held) - cue, 0), len(ids) - 1)]] = 100.0
        return logits

    def snapshot(self):
        return list(self.held)

    def restore(self, state):
        assert self.held[:len(state)] == state
        self.held = list(state)


def chat_folder(path):
    """A checkpoint folder as far as generate.py looks before it imports torch."""
    import struct
    os.makedirs(path, exist_ok=True)
    header = json.dumps({"norm.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    with open(f"{path}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + b"\0\0")
    with open(f"{path}/config.json", "w") as f:
        json.dump({"model_type": "deepseek_v4"}, f)
    chat_tokenizer().save(f"{path}/tokenizer.json")
    return str(path)


def chat_main(script, argv, max_seq_len=4096, delay=0.0):
    """generate.main with a scripted model in place of the folder's."""
    tokenizer = chat_tokenizer()
    generate.load_model = lambda *_, **__: (ChatScript(script, tokenizer, max_seq_len, delay), tokenizer)
    return generate.main(argv)


def chat_run(monkeypatch, capfd, tmp_path, script, *argv, stdin="", max_seq_len=4096, quiet=("--quiet",)):
    """chat_main in this process -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(generate, "load_model", generate.load_model)
    (tmp_path / "stdin").write_text(stdin, encoding="utf-8")
    with open(tmp_path / "stdin", encoding="utf-8") as f:
        monkeypatch.setattr(sys, "stdin", f)
        code = chat_main(script, ["--ckpt-path", chat_folder(tmp_path / "ckpt"), *quiet, *argv], max_seq_len)
    return (code, *capfd.readouterr())


class ChatTerminal:
    """The program on a pseudo-terminal, with a scripted model."""

    def __init__(self, tmp_path, script, *argv, max_seq_len=4096, delay=0.0, **env):
        import pty
        argv = ["--ckpt-path", chat_folder(tmp_path / "ckpt"), *argv]
        # a session whose terminal this is, so that Ctrl-C is a signal; a shell's background jobs ignore it
        code = ("import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
                "signal.signal(signal.SIGINT, signal.default_int_handler); "
                f"sys.path[:0] = {[p for p in sys.path if p]!r}; import {__name__} as t; "
                f"sys.exit(t.chat_main({script!r}, {argv!r}, {max_seq_len}, {delay}))")
        self.fd, child = pty.openpty()
        env = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "", **env}
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child,
                                        env=env, start_new_session=True)
        os.close(child)
        self.data = b""

    def until(self, text, seconds=60):
        """Read until text appears; returns all since the last call."""
        end = time.monotonic() + seconds
        while text.encode() not in self.data:
            seen = self.data.decode("utf-8", "replace")
            assert time.monotonic() < end, f"no {text!r} in {seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.data += os.read(self.fd, 65536)
                except OSError:
                    raise AssertionError(f"ended without {text!r} in {seen!r}") from None
        before, found, self.data = self.data.partition(text.encode())
        return (before + found).decode("utf-8", "replace")

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """The exit code."""
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:         # the other end is closed
            pass
        os.close(self.fd)
        return self.process.wait(20)


# ---- encoding ----

# Oracle: the vendor's four conversations, and the sha256 of the prompts the vendor publishes for them.
CHAT_GOLDEN = [
    ("thinking", "9b366d9d2eac842a6e890594aac0b58648e5623717202b33497afadf03e26540", [
        {
            "role": "system", "content": "You are a helpful assistant.",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "get_weather", "description": "Get the weather for a specific location",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "location": {"type": "string", "description": "The city name"},
                                "unit": {
                                    "type": "string", "enum": ["celsius", "fahrenheit"],
                                    "description": "Temperature unit"}},
                            "required": ["location"]}}},
                {
                    "type": "function",
                    "function": {
                        "name": "search", "description": "Search the web for information",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "query": {"type": "string", "description": "Search query"},
                                "num_results": {
                                    "type": "integer", "description": "Number of results to return"}},
                            "required": ["query"]}}}]},
        {"role": "user", "content": "What's the weather in Beijing?"},
        {
            "role": "assistant",
            "reasoning_content": "The user wants to know the weather in Beijing. "
                                 "I should use the get_weather tool.",
            "tool_calls": [
                {
                    "id": "call_001", "type": "function",
                    "function": {
                        "name": "get_weather",
                        "arguments": "{\"location\": \"Beijing\", \"unit\": \"celsius\"}"}}]},
        {
            "role": "tool", "tool_call_id": "call_001",
            "content": "{\"temperature\": 22, \"condition\": \"sunny\", \"humidity\": 45}"},
        {
            "role": "assistant",
            "reasoning_content": "Got the weather data. Let me format a nice response.",
            "content": "The weather in Beijing is currently sunny with a temperature of 22°C "
                       "and 45% humidity."}]),
    ("thinking", "ca66b01a1ac3a204bb032c928fb607d4877171e998a50f7f89f39fa821b75665", [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant", "reasoning_content": "The user said hello, I should greet back.",
            "content": "Hi there! How can I help you?"},
        {"role": "user", "content": "What is the capital of France?"},
        {
            "role": "assistant",
            "reasoning_content": "The user asks about the capital of France. It is Paris.",
            "content": "The capital of France is Paris."}]),
    ("thinking", "b3b1cd8748b7b90d3c6be6da3f786f12e4d70be073bd445ea162dfad4dc01a64", [
        {"role": "system", "content": "该助手为DeepSeek，由深度求索公司创造。"},
        {"role": "latest_reminder", "content": "2026-02-21,星期六,广州,App,中文"},
        {
            "role": "developer",
            "content": "小柴胡冲剂和布洛芬能一起吃吗？\n\n"
                       "CITATION FORMAT: 【{cursor_id}†L{start_line_id}(-L{end_line_id})?】",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "search", "description": "Web search. Split multiple queries with '||'.",
                        "parameters": {
                            "type": "object",
                            "properties": {"queries": {"type": "string", "description": "query1||query2"}},
                            "required": ["queries"], "additionalProperties": False,
                            "$schema": "http://json-schema.org/draft-07/schema#"}}},
                {
                    "type": "function",
                    "function": {
                        "name": "open", "description": "Batch open IDs (format 【{id}†...】) or URLs.",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "open_list": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "id": {
                                                "description": "ID or URL",
                                                "anyOf": [{"type": "integer"}, {"type": "string"}],
                                                "default": -1},
                                            "cursor": {"type": "integer", "description": "", "default": -1},
                                            "loc": {
                                                "type": "integer", "description": "Start line",
                                                "default": -1},
                                            "num_lines": {
                                                "type": "integer", "description": "", "default": -1},
                                            "view_source": {
                                                "type": "boolean", "description": "", "default": False}},
                                        "additionalProperties": False},
                                    "description": ""}},
                            "required": ["open_list"], "additionalProperties": False,
                            "$schema": "http://json-schema.org/draft-07/schema#"}}},
                {
                    "type": "function",
                    "function": {
                        "name": "find", "description": "Find exact text pattern in pages.",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "find_list": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {
                                            "pattern": {"type": "string", "description": ""},
                                            "cursor": {"type": "integer", "description": "", "default": -1}},
                                        "required": ["pattern"], "additionalProperties": False},
                                    "description": ""}},
                            "required": ["find_list"], "additionalProperties": False,
                            "$schema": "http://json-schema.org/draft-07/schema#"}}}]},
        {
            "role": "assistant", "content": "", "reasoning_content": "用户想知道小柴胡冲剂和布洛芬能否一起服用。",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": "search", "arguments": "{\"queries\": \"小柴胡冲剂 布洛芬 相互作用 一起吃\"}"}}]},
        {"role": "tool", "content": "[0]"},
        {"role": "assistant", "content": "请及时就医。", "reasoning_content": "现在开始组织回答。", "tool_calls": []}]),
    ("chat", "60e1643840ba9e4aeede450feb7b0498fa66ee24e4a939d48855ce04ec6fc375", [
        {"role": "system", "content": "该助手为DeepSeek-V3，由深度求索公司创造。\n今天是2025年10月17日，星期五。"},
        {"role": "latest_reminder", "content": "2024-11-15,上海市,App,中文"},
        {"role": "user", "content": "热海大滚锅是世界著名温泉吗"},
        {
            "role": "assistant",
            "content": (
                "关于热海大滚锅是否是世界著名温泉，可以这样总结：它在**中国乃至全球的地热奇观中占有重要地位**，但“世界著名”的称号更侧重于它作为**独特的地质现象和旅游景点**，而非普遍的温泉"
                "疗养体验。\n\n为了让你快速了解，我整理了一个简要的表格：\n\n| 维度 | 热海大滚锅的地位与特点 |\n| :--- | :--- |\n"
                "| **地质奇观** | **世界罕见**的高温地热系统，泉眼多、水温高、形态多样。 |\n| **国内声誉** | **中国三大地热区之一**，**国家5A级旅游景区**，自古闻"
                "名（徐霞客曾游历并记载）。 |\n| **国际知名度** | 在一些旅游平台被提及为“世界六大温泉”之一，但此说法流传不广，其国际声誉更多建立在地质独特性上。 |\n"
                "| **核心体验** | **观赏地热奇观**（如97℃沸腾的“大滚锅”）、**体验温泉煮鸡蛋**。 |\n\n### 💡 游玩攻略与温馨提示\n"
                "\n如果你计划前往热海大滚锅，这里有一些实用信息供你参考：\n\n- **门票与开放时间**：\n    - **门票**：景区门票约为**50元/人**。如果选择包含温泉沐浴的套"
                "餐，价格会更高，例如约**288元**。\n    - **开放时间**：景区一般**08:00-18:00**开放，但具体时间可能变动，建议提前核实。\n"
                "\n- **特色体验**：\n    - **温泉煮鸡蛋**：这几乎是必试项目。可以在景区门口购买用草绳串起的生鸡蛋（约5-8元/串），然后到“大滚锅”旁的指定区域蒸煮，几分钟便可"
                "熟食，趣味十足。\n    - **金汤足浴**：可以直接用从“大滚锅”流出的温泉水泡脚，缓解旅途疲劳。\n\n- **注意事项**：\n"
                "    - **安全第一**：“大滚锅”水温极高，务必遵守游览规则，在指定区域内观赏，切勿随意触碰泉水。\n    - **规划行程**：建议为热海景区预留**3-4小时**的游览"
                "时间。景区内步道不走回头路，出入口有观光车接送。\n\n希望这些信息能帮助你更好地了解热海大滚锅。如果你对腾冲的其他景点或者行程规划有更多疑问，我很乐意提供进一步的信息。"),
            "mask": 1},
        {"role": "user", "content": "世界著名温泉有哪些", "task": "action"},
        {"role": "assistant", "content": "Search"}]),
]


@pytest.mark.parametrize("thinking_mode, digest, messages", CHAT_GOLDEN)
def test_chat_golden_prompts(thinking_mode, digest, messages):
    """Oracle: the vendor's test_output files, byte for byte. Also cut anywhere into context and the rest."""
    before = copy.deepcopy(messages)
    prompt = encode_messages(messages, thinking_mode)
    assert chat_sha256(prompt) == digest and messages == before
    for cut in range(1, len(messages)):
        if messages[cut]["role"] == "assistant" and messages[cut - 1]["role"] != "latest_reminder":
            rest = encode_messages(messages[cut:], thinking_mode, context=messages[:cut])
            assert prompt.endswith(rest) and not rest.startswith(CHAT_BOS)


def test_chat_golden_answers_parse_back():
    """Every assistant turn of the golden prompts parses to the message it was rendered from."""
    for thinking_mode, _, messages in CHAT_GOLDEN:
        prompt = encode_messages(messages, thinking_mode, drop_thinking=False)
        cue = CHAT_ASSISTANT + ("<think>" if thinking_mode == "thinking" else "</think>")
        turns = [part.partition(CHAT_USER)[0].removeprefix("<｜action｜>") for part in prompt.split(cue)[1:]]
        for turn, message in zip(turns, [m for m in messages if m["role"] == "assistant"], strict=True):
            parsed = parse_message_from_completion_text(turn, thinking_mode)
            assert parsed["error"] is None and parsed["content"] == message.get("content", "")
            assert parsed["reasoning_content"] == message.get("reasoning_content", "")
            assert [call["function"] for call in parsed["tool_calls"]] == [
                call["function"] for call in message.get("tool_calls", [])]


def chat_tools_text(*schemas):
    """The tools section: the golden prompt's own, with other schemas."""
    prompt = encode_messages(CHAT_GOLDEN[0][2], "thinking")
    head, tail = prompt.partition("## Tools")[2].partition(CHAT_USER)[0].split('{"name": "get_weather"')
    return "## Tools" + head + "\n".join(schemas) + tail[tail.index("\n\nYou MUST strictly"):]


CHAT_NOW = '{"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}'
CHAT_Q = CHAT_BOS + CHAT_USER + "q" + CHAT_ASSISTANT + "</think>\n\n"
CHAT_ENCODE_CASES = {       # name: (messages, thinking_mode, prompt)
    "arguments as an object": (
        chat_history(("a", "get_time", {"city": "Oslo"}), results=[("a", "9:00")]), "chat",
        CHAT_Q + chat_block(("get_time", {"city": "Oslo"})) + CHAT_EOS + CHAT_USER
        + "<tool_result>9:00</tool_result>" + CHAT_ASSISTANT + "</think>"),
    "no arguments": (
        chat_history(("a", "now", "{}"), results=[("a", "9:00")]), "chat",
        CHAT_Q + chat_block(("now", {})) + CHAT_EOS + CHAT_USER
        + "<tool_result>9:00</tool_result>" + CHAT_ASSISTANT + "</think>"),
    "types and unicode": (
        chat_history(("a", "f", r'{"t": "h\u00e9\u00e9 \ud83e\udd86 \"q\"\n", "l": ["\u00fc", {"k": null}], '
                      r'"b": true, "n": -0.5, "s": "5", "e": ""}')), "chat",
        CHAT_Q + chat_block(("f", {"t": 'héé 🦆 "q"\n', "l": ["ü", {"k": None}], "b": True, "n": -0.5,
                                   "s": "5", "e": ""})).replace(r"\u00fc", "ü") + CHAT_EOS),
    "results in the other order": (
        chat_history(("a", "f", "{}"), ("b", "g", "{}"), results=[("b", "RB"), ("a", "RA")]), "chat",
        CHAT_Q + chat_block(("f", {}), ("g", {})) + CHAT_EOS + CHAT_USER + "<tool_result>RA</tool_result>\n\n"
        "<tool_result>RB</tool_result>" + CHAT_ASSISTANT + "</think>"),
    "a result before any call": (
        [{"role": "tool", "tool_call_id": "z", "content": "r"}, {"role": "user", "content": "hi"}], "chat",
        CHAT_BOS + CHAT_USER + "<tool_result>r</tool_result>\n\nhi" + CHAT_ASSISTANT + "</think>"),
    "null content": (
        chat_history(("a", "f", "{}"), results=[("a", None)]) + [{"role": "user", "content": None}], "chat",
        CHAT_Q + chat_block(("f", {})) + CHAT_EOS + CHAT_USER + "<tool_result></tool_result>\n\n"
        + CHAT_ASSISTANT + "</think>"),
    "tools on a system message without content": (
        [{"role": "system", "tools": [chat_tool("now")]}, {"role": "user", "content": "q"}], "chat",
        CHAT_BOS + "\n\n" + chat_tools_text(CHAT_NOW) + CHAT_USER + "q" + CHAT_ASSISTANT + "</think>"),
    "tools switched off": (
        [{"role": "system", "content": "S", "tools": []}, {"role": "user", "content": "q"}], "chat",
        CHAT_BOS + "S" + CHAT_USER + "q" + CHAT_ASSISTANT + "</think>"),
    "the spelling of numbers": (
        chat_history(("a", "f", r'{"n": 3.5e-2, "l": [1,2], "z": 1.0, "u": "\u00e9"}')), "chat",
        CHAT_Q + chat_block(("f", {"n": 0.035, "l": [1, 2], "z": 1.0, "u": "é"})) + CHAT_EOS),
    "earlier reasoning is dropped": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "r1"},
         {"role": "user", "content": "c"}], "thinking",
        CHAT_BOS + f"<｜User｜>a<｜Assistant｜></think>b{CHAT_EOS}<｜User｜>c<｜Assistant｜><think>"),
    "with tools reasoning stays": (
        [{"role": "system", "content": "S", "tools": [chat_tool("now")]}, {"role": "user", "content": "a"},
         {"role": "assistant", "content": "b", "reasoning_content": "r1"}, {"role": "user", "content": "c"},
         {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}], "thinking",
        CHAT_BOS + "S\n\n" + chat_tools_text(CHAT_NOW) + f"<｜User｜>a<｜Assistant｜><think>r1</think>b{CHAT_EOS}"
        f"<｜User｜>c<｜Assistant｜><think></think>d{CHAT_EOS}<｜User｜>e<｜Assistant｜><think>"),
    "latest_reminder": (
        [{"role": "system", "content": "S"}, {"role": "latest_reminder", "content": "2026-01-02"},
         {"role": "user", "content": "a"}], "chat",
        f"{CHAT_BOS}S<｜latest_reminder｜>2026-01-02<｜User｜>a<｜Assistant｜></think>"),
    "response_format": (
        [{"role": "system", "content": "S", "response_format": {"type": "object", "properties": {
            "a": {"type": "string"}}}}, {"role": "user", "content": "q"}], "chat",
        CHAT_BOS + "S\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "properties": {"a": {"type": "string"}}}<｜User｜>q<｜Assistant｜></think>'),
    "two assistant turns in a row": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
         {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}], "chat",
        f"{CHAT_BOS}<｜User｜>a<｜Assistant｜></think>b{CHAT_EOS}c{CHAT_EOS}<｜User｜>d<｜Assistant｜></think>"),
    "braces": (
        [{"role": "system", "content": "use {x} and {{y}} and {0}"},
         {"role": "user", "content": "{z} %s"}], "chat",
        f"{CHAT_BOS}use {{x}} and {{{{y}}}} and {{0}}<｜User｜>{{z}} %s<｜Assistant｜></think>"),
    "content as a list of parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}], "chat",
        f"{CHAT_BOS}<｜User｜>a\n\n[Unsupported image_url]<｜Assistant｜></think>"),
    "wo_eos leaves the turn open": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "wo_eos": True}], "chat",
        f"{CHAT_BOS}<｜User｜>a<｜Assistant｜></think>b"),
    "quick instruction": (
        [{"role": "user", "content": "a", "task": "title"}], "thinking", f"{CHAT_BOS}<｜User｜>a<｜title｜>"),
    "action": (
        [{"role": "user", "content": "a", "task": "action"}], "thinking",
        f"{CHAT_BOS}<｜User｜>a<｜Assistant｜><think><｜action｜>"),
}


@pytest.mark.parametrize("case", CHAT_ENCODE_CASES)
def test_chat_encode(case):
    """Oracle: prompts from public bug reports, made by the vendor's encoder where it does not fail."""
    messages, thinking_mode, prompt = CHAT_ENCODE_CASES[case]
    assert encode_messages(messages, thinking_mode) == prompt


def test_chat_encode_refuses():
    """One sentence that names the message; no prompt without a cue."""
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "be brief"}
    for messages, says in [
            ([], "no message"),
            ([user, system], r"message 2 \(system\)"),
            ([system], r"message 1 \(system\)"),
            ([user, {"role": "latest_reminder", "content": "x"}], r"message 2 \(latest_reminder\)"),
            ([{"role": "function", "content": "D"}, {"content": "hi"}], "message 1 has the unknown role"),
            ([user, {"content": "hi"}], "message 2 has the unknown role None"),
            (["hi"], "message 1 is no object"),
            ([{"role": "developer", "content": ""}], r"message 1 \(developer\) is empty"),
            ([{"role": "user", "content": 5}], r"message 1 \(user\): content"),
            ([{"role": "user", "content": [{"text": 5}]}], r"message 1 \(user\): content"),
            ([{"role": "user", "content": "a", "task": "sing"}], "task 'sing'"),
            ([{"role": "assistant", "tool_calls": [{"name": "f"}]}, user], r"\(assistant\): tool_calls"),
            ([{"role": "system", "tools": {"name": "f"}}, user], r"message 1 \(system\): tools")]:
        with pytest.raises(ValueError, match=says):
            encode_messages(messages, "thinking")
    with pytest.raises(ValueError, match=r"message 2 \(assistant\) is a finished answer"):
        generate.prompt_of([user, {"role": "assistant", "content": "b"}], Settings())
    with pytest.raises(ValueError, match="neither chat nor thinking"):
        encode_messages([user], "think")
    with pytest.raises(ValueError, match="'none' is none of low, high, max"):
        encode_messages([user], "thinking", reasoning_effort="none")


def test_chat_reasoning_effort():
    """The text stands once, after BOS, in thinking mode only. Oracle: the texts' sha256."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]
    plain = encode_messages(messages, "thinking").removeprefix(CHAT_BOS)
    absolute = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
    beyond = "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"
    first, flash_0731 = generate.REASONING_EFFORTS, generate.REASONING_EFFORTS_0731
    for efforts, digests in ((first, {"max": absolute, "xhigh": absolute}),
                             (flash_0731, {"max": beyond, "xhigh": beyond, "high": absolute,
                                           "medium": absolute})):
        for effort in (None, "low", "medium", "high", "xhigh", "max"):
            prompt = encode_messages(messages, "thinking", reasoning_effort=effort, efforts=efforts)
            text = prompt.removeprefix(CHAT_BOS).removesuffix(plain)
            assert prompt == CHAT_BOS + text + plain
            assert (chat_sha256(text) if text else None) == digests.get(effort)
            prompt = encode_messages(messages, "chat", reasoning_effort=effort, efforts=efforts)
            assert "Reasoning Effort" not in prompt


def test_chat_typed_control_tokens_are_text():
    """What people and tools write gives no control token, wherever it stands."""
    tokenizer = chat_tokenizer()
    control = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    ids = {token: tokenizer.token_to_id(token) for token in control}
    evil = "".join(control) + f"<<｜User｜>> <thi</think>nk> {CHAT_EOS[:5]}"

    def conversation(text):
        return [{"role": "system", "content": text, "tools": [chat_tool("f", **{text: {"type": text}})],
                 "response_format": {text: text}},
                *chat_history(("a", f"f{text}", {f"k{text}": text, "n": [text]}), results=[("a", text)]),
                {"role": "user", "content": text},
                {"role": "assistant", "content": text, "reasoning_content": text},
                {"role": "user", "content": text}]

    for thinking_mode in ("chat", "thinking"):
        prompt = encode_messages(conversation(evil), thinking_mode)
        tokens = encode_prompt(tokenizer, prompt)
        harmless = encode_prompt(tokenizer, encode_messages(conversation("x"), thinking_mode))
        assert tokens[0] == ids[CHAT_BOS] and tokens.count(ids[CHAT_BOS]) == 1
        assert [t for t in tokens if t in ids.values()] == [t for t in harmless if t in ids.values()]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == prompt
    # two messages whose halves make a token between them
    halves = [{"role": "system", "content": "<｜Us"}, {"role": "system", "content": "er｜>"},
              {"role": "user", "content": "a"}]
    assert encode_prompt(tokenizer, encode_messages(halves, "chat")).count(ids[CHAT_USER]) == 1
    # half a surrogate pair, as JSON can bring it
    typed, meant = ([{"role": "user", "content": text}] for text in ("\ud83e\udd86 \ud83e", "🦆 \ufffd"))
    assert encode_prompt(tokenizer, encode_messages(typed, "chat")) == (
        encode_prompt(tokenizer, encode_messages(meant, "chat")))


def test_chat_harmless_text_tokenises_as_one():
    """Without typed control tokens the ids are the whole prompt's. Oracle: the tokenizer alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([generate.TOOLS_TEMPLATE], trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[CHAT_BOS, CHAT_EOS, CHAT_USER, CHAT_ASSISTANT, "<think>", "</think>", CHAT_DSML]))
    for thinking_mode, _, messages in CHAT_GOLDEN:
        prompt = encode_messages(messages, thinking_mode)
        assert encode_prompt(tokenizer, prompt) == tokenizer.encode(str(prompt), add_special_tokens=False).ids


# ---- parsing ----

def chat_parameter(name, value, string="true"):
    return f'<｜DSML｜parameter name="{name}" string="{string}">{value}</｜DSML｜parameter>'


def chat_around(inner, name="f"):
    """A block with one call, whose inside is given."""
    return (f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>\n'
            f"</｜DSML｜tool_calls>")


CHAT_F = chat_block(("f", {"a": "1"}))
CHAT_ODD_VALUES = {
    "a": 'if a < b && c > d:\n\tprint("<b>\\n</b>")  # 2>&1\n', "b": f"\n</think> {CHAT_EOS} ``` ",
    "c": "<｜DSML｜tool_calls></｜DSML｜tool_calls></｜DSML｜invoke>"}
CHAT_TYPES = {"a": "5", "b": 5, "c": "true", "d": False, "e": [1, "two", {"k": None}], "g": ""}
CHAT_PARSE_CASES = {        # name: (answer, thinking_mode, content, reasoning, calls)
    "text, then a call": (
        "Looking.\n\n" + chat_block(("get_time", {"city": "Oslo"})), "chat", "Looking.", "",
        [("get_time", {"city": "Oslo"})]),
    "no </think> before the block": (
        "I need the clock.\n\n" + CHAT_F, "thinking", "", "I need the clock.", [("f", {"a": "1"})]),
    "neither </think> nor blank line": (
        "I need it." + CHAT_F + "\n", "thinking", "", "I need it.", [("f", {"a": "1"})]),
    "no blank line before the block": ("Ok." + CHAT_F, "chat", "Ok.", "", [("f", {"a": "1"})]),
    "one newline before the block": ("Ok.\n" + CHAT_F, "chat", "Ok.", "", [("f", {"a": "1"})]),
    "three newlines before the block": ("Ok.\n\n\n" + CHAT_F, "chat", "Ok.\n", "", [("f", {"a": "1"})]),
    "no arguments": ("\n\n" + chat_block(("now", {})), "chat", "", "", [("now", {})]),
    "no arguments, no blank line": (
        chat_block(("now", {})).replace("\n\n", "\n"), "chat", "", "", [("now", {})]),
    "odd characters in a value": (
        "\n\n" + chat_block(("w", CHAT_ODD_VALUES)), "chat", "", "", [("w", CHAT_ODD_VALUES)]),
    "types of values": ("\n\n" + chat_block(("f", CHAT_TYPES)), "chat", "", "", [("f", CHAT_TYPES)]),
    "a Python literal": (
        chat_around(chat_parameter("a", "True", "false")), "chat", "", "", [("f", {"a": True})]),
    "a nested Python literal": (
        chat_around(chat_parameter("a", "{'k': [None, (1, 'x')]}", "false")), "chat", "", "",
        [("f", {"a": {"k": [None, [1, "x"]]}})]),
    "a call not closed": (f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{chat_parameter("a", "1")}\n'
        f"</｜DSML｜tool_calls>", "chat", "", "", [("f", {"a": "1"})]),
    "a call not closed before another": (
        f'<｜DSML｜tool_calls><｜DSML｜invoke name="f">{chat_parameter("a", "1")}<｜DSML｜invoke name="g">'
        f"</｜DSML｜invoke></｜DSML｜tool_calls>", "chat", "", "", [("f", {"a": "1"}), ("g", {})]),
    "spaces, order of attributes": (
        f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke  name="f" >\n<｜DSML｜parameter string="true"  name="a" '
        f'>1</｜DSML｜parameter>{chat_parameter("b", 2, "false")}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "chat", "", "", [("f", {"a": "1", "b": 2})]),
    "more spaces, single quotes": (
        "< ｜DSML｜ tool_calls >< ｜DSML｜invoke name = 'f'><｜DSML｜parameter name='a' string='True'> 1 "
        "</ ｜DSML｜ parameter ></｜DSML｜invoke ></｜DSML｜tool_calls>", "chat", "", "", [("f", {"a": " 1 "})]),
    "an answer about the tokens": ("The marker is ｜DSML｜ and </think> ends reasoning.", "chat",
        "The marker is ｜DSML｜ and </think> ends reasoning.", "", []),
    "a quoted tag": ("Write `<｜DSML｜tool_calls>`.", "chat", "Write `<｜DSML｜tool_calls>`.", "", []),
    "a parameter called arguments": (
        chat_around(chat_parameter("arguments", '{"city": "Oslo"}', "false")), "chat", "", "",
        [("f", {"arguments": {"city": "Oslo"}})]),
    "a block in a code fence": (f"Example:\n```xml\n\n{CHAT_F}\n```\nThat is the format.", "chat",
        f"Example:\n```xml\n\n{CHAT_F}\n```\nThat is the format.", "", []),
    "a fence, then a call": (f"Example:\n~~~\n{CHAT_F}\n~~~\nNow:\n\n{CHAT_F}", "chat",
        f"Example:\n~~~\n{CHAT_F}\n~~~\nNow:", "", [("f", {"a": "1"})]),
    "quoted in the reasoning": (f"{CHAT_F}? No.</think>Hi", "thinking", "Hi", f"{CHAT_F}? No.", []),
    "drafted in the reasoning": (
        f'So <｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n...</think>{CHAT_F}', "thinking", "",
        'So <｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n...', [("f", {"a": "1"})]),
    "two blocks": (f"{CHAT_F}\n\n{chat_block(('g', {}))}", "chat", "", "", [("f", {"a": "1"}), ("g", {})]),
}


@pytest.mark.parametrize("case", CHAT_PARSE_CASES)
def test_chat_parse(case):
    """Oracle: answers from public bug reports. With and without the end token; nothing here is an error."""
    text, thinking_mode, content, reasoning, calls = CHAT_PARSE_CASES[case]
    for end in (CHAT_EOS, ""):
        assert chat_parse(text + end, thinking_mode) == (content, reasoning, calls, None)


CHAT_BROKEN_CASES = {       # name: (answer, what the error says)
    "words after the block": (f"\n\n{CHAT_F}\nDone.", "text follows the tool calls"),
    "an unfenced example": (f"So:\n\n{CHAT_F}\nis the format.", "text follows the tool calls"),
    "a closing tag in a value": (
        chat_around(chat_parameter("text", "the tag </｜DSML｜parameter> ends a value")), "'ends a value"),
    "a parameter twice": (
        chat_around(chat_parameter("a", "1") + chat_parameter("a", "2")), "duplicate parameter 'a'"),
    "a parameter not closed": (
        chat_around('<｜DSML｜parameter name="a" string="true">1\n' + chat_parameter("b", "2")),
        "parameter 'a' of 'f' is not closed"),
    "outer tag misspelled": (f"\n\n{CHAT_F}".replace("tool_calls", "toolcalls"), "looks like a tool call"),
    "another outer tag": (f"\n\n{CHAT_F}".replace("tool_calls", "function_calls"), "looks like a tool call"),
    "doubled bars": (f"\n\n{CHAT_F}".replace("｜", "｜｜"), "looks like a tool call"),
    "ASCII bars": (f"\n\n{CHAT_F}".replace("｜", "|"), "looks like a tool call"),
    "bars with blanks": (f"\n\n{CHAT_F}".replace("｜", " ｜ "), "looks like a tool call"),
    "another dialect inside": (
        f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="exec">\n{chat_parameter("command", "ls")}\n'
        " <task>x</task>\n</actions>\n</tool_call>\n</function>", "unexpected '<task>"),
    "a second call without an end": (
        f'\n\n{CHAT_F}'.replace("</｜DSML｜tool_calls>", '<｜DSML｜invoke name="g">\n<｜DSML｜parameter '
        'name="b">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'), "'g'"),
    "cut inside a tag": (
        'Ok.<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜paramete', "the answer ends inside"),
    "no JSON": (chat_around(chat_parameter("a", "Oslo", "false")), "'a' of 'f' is not valid JSON"),
    "not a number": (chat_around(chat_parameter("a", "NaN", "false")), "not valid JSON"),
    "deep JSON": (chat_around(chat_parameter("a", "[" * 100_000, "false")), "not valid JSON"),
    "empty block": ("<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", "looks like a tool call"),
    "call without a block": (CHAT_F.partition("\n")[2], "looks like a tool call"),
    "in a fence that stays open": (f"```\n{CHAT_F}", "looks like a tool call"),
    "good after bad": (f"{chat_around('junk')} and\n\n{CHAT_F}", "unexpected 'junk"),
}


@pytest.mark.parametrize("case", CHAT_BROKEN_CASES)
def test_chat_parse_broken(case):
    """Oracle: public bug reports. Shown as it is, one line of error, nothing runs; also in thinking mode."""
    text, says = CHAT_BROKEN_CASES[case]
    for end, before in itertools.product((CHAT_EOS, ""), ("", "so</think>")):
        content, reasoning, calls, error = chat_parse(before + text + end, "thinking" if before else "chat")
        assert (content, reasoning, calls) == (text, before[:2], []) and says in error and "\n" not in error


def test_chat_parse_call_in_the_reasoning():
    """A call inside closed reasoning is quoted; without an answer the error says so."""
    for answer, error in (("", "a tool call inside the reasoning is not run"), ("Hi", None)):
        text = f"so {CHAT_F}</think>{answer}{CHAT_EOS}"
        assert chat_parse(text, "thinking") == (answer, f"so {CHAT_F}", [], error)


def test_chat_parse_every_cut():
    """An answer that the limit cut anywhere runs nothing, shows everything and says so."""
    full = "Ok.\n\n" + chat_block(("write", {"path": "a.txt", "text": "hello world"}))
    for cut, end in itertools.product(range(len(full)), (CHAT_EOS, "")):
        content, _, calls, error = chat_parse(full[:cut] + end)
        assert content == full[:cut] and calls == []
        if cut > len("Ok.\n\n<"):
            assert re.search("ends inside|looks like|never closed", error), cut
    assert chat_parse("I keep thinking about it", "thinking") == (
        "", "I keep thinking about it", [], "the answer ended inside the reasoning, without </think>")


def test_chat_stream_cuts():
    """The pieces never matter, no piece of a tag is shown, held text comes out."""
    text = "Ok.\n\n" + chat_block(("get_time", {"city": "Oslo"}), ("get_time", {"n": -7})) + CHAT_EOS
    rng = random.Random(70)
    divisions = [[text], *([text[:i], text[i:]] for i in range(len(text))),
                 *([text[i:i + n] for i in range(0, len(text), n)] for n in range(1, 18))]
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text)), k=rng.randrange(1, 30)))
        divisions.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    whole = parse_message_from_completion_text(text, "chat")
    assert whole["content"] == "Ok." and len(whole["tool_calls"]) == 2
    assert [call["id"] for call in whole["tool_calls"]] == ["call_0", "call_1"]
    for pieces in divisions:
        parser = StreamParser("chat")
        shown = "".join(piece for part in pieces for _, piece in parser.feed(part))
        assert shown == "Ok." and parser.close() == whole
    for pieces, content in ((["The rule is 2 <", CHAT_EOS], "The rule is 2 <"),
                            (["a\n", "\n", CHAT_EOS], "a\n\n"),
                            (["x </thi", "s> <｜DS", "x", CHAT_EOS], "x </this> <｜DSx")):
        parser = StreamParser("chat")
        assert "".join(piece for part in pieces for _, piece in parser.feed(part)) == content
        assert parser.close()["content"] == content and parser.close()["error"] is None
    parser = StreamParser("thinking")
    pieces = [parser.feed(part) for part in ("so\n", "</thi", "nk>", "\nHi")]
    assert pieces == [[("reasoning", "so")], [], [("reasoning", "\n")], [("content", "\nHi")]]


def chat_mutate(rng, bases, fragments):
    text = rng.choice(bases)
    for _ in range(rng.randrange(4)):
        at, kind = rng.randrange(len(text) + 1), rng.randrange(5)
        to = min(len(text), at + rng.choice((1, 2, 5, 20, 60)))
        text = text[:at] + ("", rng.choice(fragments) + text[at:], text[to:], text[at:to] + text[at:],
                            rng.choice(bases) + text[at:])[kind]
    return text


def chat_between(text):
    """All that stands between the end of a tag and an end tag of a parameter."""
    ends = [m.start() for m in re.finditer("<\\s*/\\s*" + CHAT_DSML, text)]
    return [text[m.end():end] for m in re.finditer(">", text) for end in ends if end >= m.end()]


def chat_literal(text):
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True}.get(text.strip())


def chat_check(rng, text, thinking_mode):
    """What must hold for any answer whatever."""
    whole = parse_message_from_completion_text(text, thinking_mode)
    parser, shown, at = StreamParser(thinking_mode), {"reasoning": "", "content": ""}, 0
    while at < len(text):
        step = rng.choice((1, 1, 2, 3, 7, 30, 200))
        for channel, piece in parser.feed(text[at:at + step]):
            shown[channel] += piece
        at += step
    assert parser.close() == whole
    assert whole["content"].startswith(shown["content"])
    assert whole["reasoning_content"].startswith(shown["reasoning"])
    assert not (whole["error"] and whole["tool_calls"]) and "\n" not in (whole["error"] or "")
    for call in whole["tool_calls"]:
        assert re.search(rf"""["']{re.escape(call["function"]["name"])}["']""", text)
        for key, value in json.loads(call["function"]["arguments"]).items():
            assert re.search(rf"""["']{re.escape(key)}["']""", text)
            literal = isinstance(value, str) and f">{value}<" in text
            assert literal or value in map(chat_literal, chat_between(text)), text
    if not whole["tool_calls"]:     # then everything is shown
        rebuilt = [whole["reasoning_content"] + middle + whole["content"] for middle in ("", "</think>")]
        rests = [text[len(r):] for r in rebuilt if text.startswith(r)]
        assert any(rest == "" or rest.startswith(CHAT_EOS) for rest in rests), text


def test_chat_parser_fuzz():
    """Random cuts, deletions, insertions of real tool blocks: nothing raises, no call but what is written."""
    bases = [
        "Ok.\n\n" + chat_block(("get_time", {"city": "Oslo"}), ("f", CHAT_TYPES)) + CHAT_EOS,
        "hm</think>Sure.\n\n" + chat_block(("write", {"text": "if a < b:\n\tc > d\n"})) + CHAT_EOS,
        "I need it.\n\n" + chat_block(("now", {})) + CHAT_EOS,
        f"Example:\n```xml\n{CHAT_F}\n```\nDone.\n\n{chat_block(('g', {'a': '2'}))}" + CHAT_EOS,
        f"draft {CHAT_F} hm</think>\n\n{CHAT_F}" + CHAT_EOS,
        "The rule is 2 < 3 and </think> ends; ｜DSML｜ is a token." + CHAT_EOS]
    fragments = [
        "<", "</", ">", "\n", "\n\n", "｜", "｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "True",
        '<｜DSML｜invoke name="h">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="a" string="true">', "</think>",
        "</｜DSML｜parameter>", "<think>", CHAT_EOS, "```", "`", '"', "'", " ", "x", "\\", "日",
        ' string="false"']
    rng = random.Random(4)
    for _ in range(CHAT_FUZZ):
        chat_check(rng, chat_mutate(rng, bases, fragments), rng.choice(("chat", "thinking")))


def test_chat_whole_characters():
    """Bytes of a character split over tokens show nothing until it is whole; no replacement sign."""
    tokenizer = chat_tokenizer()
    for text in ("日本 🦆", "é" * 3, "a｜DSML｜b", "\n\t\x00\x7f \u00ad\u0100"):
        stream = TokenText(tokenizer)
        pieces = [stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    stream = TokenText(tokenizer)
    assert [stream.push(t) for t in tokenizer.encode("🦆").ids[:3]] == ["", "", ""]
    assert TokenText(tokenizer).push(10 ** 6) == ""     # a row of the vocabulary without a token


# ---- sampling and generation ----

def test_chat_sample():
    """Temperature 0 is argmax; draws follow softmax; top_p keeps the nucleus. Oracle: torch.softmax."""
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)
    many = logits.expand(40_000, 4)
    assert sample(many, 0).unique().tolist() == [0]
    for temperature in (0.5, 1.0, 2.0):
        freq = torch.bincount(sample(many, temperature), minlength=4) / len(many)
        assert (freq - (logits / temperature).softmax(-1)).abs().max() < 0.01
    freq = torch.bincount(sample(many, 1.0, top_p=0.7), minlength=4) / len(many)     # .64 + .24
    want = logits.exp() * torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert (freq - want / want.sum()).abs().max() < 0.01
    assert sample(many, 1.0, top_p=0.1).unique().tolist() == [0]


class ChatCounter(torch.nn.Module):
    """Says one more than the sum of a row's tokens, so every token depends on all before it."""
    max_seq_len, max_batch_size, vocab_size = 40, 3, 17
    args = types.SimpleNamespace(max_chunk=4)

    def __init__(self):
        super().__init__()
        self.passes = []

    def forward(self, ids, start_pos=0):
        self.passes.append((start_pos, ids.shape[1]))
        self.sums = ids.sum(1) if start_pos == 0 else self.sums + ids.sum(1)
        return torch.nn.functional.one_hot((self.sums + 1) % self.vocab_size, self.vocab_size) * 100.0


def test_chat_generate_batch():
    """The vendor's batch: each row as alone, ground truth over the model's choice, EOS at the end of each."""
    prompts = [[3, 5, 2, 2, 1], [1] * 11, [4, 4, 4, 4, 4, 4, 4]]
    model = ChatCounter()
    batch = generate.generate(model, prompts, 12, 16, 0)
    assert model.passes[:2] == [(0, 4), (4, 1)]
    for prompt, completion in zip(prompts, batch):
        total, want = sum(prompt), []
        while len(want) < 12 and (not want or want[-1] != 16):
            want.append((total + 1) % 17)
            total += want[-1]
        assert completion == [t for t in want if t != 16] + [16]
        assert generate.generate(ChatCounter(), [prompt], 12, 16, 0) == [completion]
    assert generate.generate(ChatCounter(), [[1] * 40], 5, 16, 0) == [[16]]      # no room left
    for prompts, says in (([[1] * 41], "has 41 tokens, but max_seq_len is 40"),
                          ([[1, 17]], "token id 17 is outside"), ([[-1]], "token id -1"),
                          ([[]], "empty"), ([], "empty"), ([[1]] * 4, "4 prompts")):
        with pytest.raises(ValueError, match=says):
            generate.generate(ChatCounter(), prompts, 5, 16, 0)


def test_chat_session_reuse():
    """A turn computes only what is new and says what a fresh run says."""
    tokenizer = chat_tokenizer()
    eos = tokenizer.token_to_id(CHAT_EOS)
    script = [("one", "first answer"), ("two", "second"), ("three", "third, longer answer")]
    model = ChatScript(script, tokenizer)
    session = Session(model)
    messages, kept = [], []

    def ask(text, thinking_mode="chat"):
        messages.append({"role": "user", "content": text})
        prompt = encode_prompt(tokenizer, encode_messages(messages, thinking_mode))
        model.passes.clear()
        tokens = list(session.stream(prompt, 100, eos, 0, 1.0))
        assert tokens == list(Session(ChatScript(script, tokenizer)).stream(prompt, 100, eos, 0, 1.0))
        computed = sum(n for _, n in model.passes) - (session.stats.decoded - 1)
        assert computed == session.stats.prefilled == len(prompt) - session.stats.reused
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})
        kept.append(len(session.tokens))
        return session.stats.reused

    assert ask("one") == 0
    assert ask("two") == kept[0]                    # goes on where the last turn ended
    del messages[-2:]
    assert ask("three") == kept[0]                  # another second turn: back to the end of the first
    del messages[-1:]
    again = messages.pop()["content"]
    assert ask(again) == len(session.tokens) - session.stats.decoded        # /regen: all but the cue's end
    messages[0]["content"] = "one!"
    assert ask("two") == 0                          # an early change: from the start
    # broken off in the middle of a pass: nothing of it is trusted
    boom = iter([None, None, KeyboardInterrupt()])
    forward = model.forward

    def breaks(*args):
        logits = forward(*args)
        error = next(boom)
        if error:
            raise error
        return logits

    model.forward = breaks
    messages.append({"role": "user", "content": "three"})
    prompt = encode_prompt(tokenizer, encode_messages(messages, "chat"))
    with pytest.raises(KeyboardInterrupt):
        list(session.stream(prompt, 100, eos, 0, 1.0))
    model.forward = forward
    messages.pop()
    assert ask("three") == len(prompt) - 1


def chat_model():
    """A random Transformer in the exact mode, small and with every kind of layer."""
    from model import ModelArgs, Transformer
    args = ModelArgs.from_config({
        "model_type": "deepseek_v4", "vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_hash_layers": 1, "num_nextn_predict_layers": 0, "num_attention_heads": 4,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 64, "head_dim": 80,
        "qk_rope_head_dim": 16, "rms_norm_eps": 1e-6, "o_groups": 2, "o_lora_rank": 32, "sliding_window": 32,
        "compress_ratios": [0, 4, 128], "compress_rope_theta": 160000, "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 1024,
                         "beta_fast": 32, "beta_slow": 1},
        "index_n_heads": 16, "index_head_dim": 128, "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6}, max_seq_len=512, max_batch_size=1, max_chunk=50)
    with torch.device("meta"):
        model = Transformer(args, torch.float32, ())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.normal_(std=1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
        else:
            parameter.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(len(parameter))]))
    model.reset_caches("cpu")
    return model


@torch.inference_mode()
def test_chat_session_reuse_real_model():
    """Turns that go on, go back, or start again say what a fresh run of the same model says. fp32."""
    model, rng, runs = chat_model(), random.Random(16), []
    session = Session(model)
    some = lambda n: [rng.randrange(64) for _ in range(n)]

    def ask(prompt):
        tokens = list(session.stream(prompt, 20, 99, 0, 1.0))
        runs.append((prompt, tokens, session.stats.reused))
        return prompt + tokens

    first = ask(some(150))
    second = ask(first + some(41))
    ask(second + some(3))
    ask(second + some(30))              # another third turn
    ask(second[:-5] + some(9))          # the second answer is not what was said
    ask(first[:149] + some(1))          # the cue differs, as after thinking
    ask(first[:150])
    ask(first[:100] + some(60))
    assert [reused for *_, reused in runs] == [0, 169, 230, 230, 210, 149, 149, 0]
    for prompt, tokens, _ in runs:
        assert list(Session(model).stream(prompt, 20, 99, 0, 1.0)) == tokens


# ---- the program ----

CHAT_CALL = "Ok.\n\n" + chat_block(("get_time", {"city": "Oslo"}))


def test_chat_one_shot(monkeypatch, capfd, tmp_path):
    """--prompt, pipes, --messages: the answer alone on stdout, exit codes."""
    run = lambda script, *argv, **kw: chat_run(monkeypatch, capfd, tmp_path, script, *argv, **kw)
    assert run([("hi", "Hello 🦆")], "--prompt", "hi") == (0, "Hello 🦆\n", "")
    assert run([("hi", "Hello")], stdin="hi\n") == (0, "Hello\n", "")
    assert run([("hi", "Hello")], "--prompt", "-", stdin="hi") == (0, "Hello\n", "")
    thinks = ([("hi", "so</think>Hello")], "--prompt", "hi", "--thinking-mode", "thinking")
    assert run(*thinks) == (0, "Hello\n", "so\n")
    assert run(*thinks, "--hide-thinking") == (0, "Hello\n", "")
    code, out, err = run([("hi", "Hello there")], "--prompt", "hi", "--max-new-tokens", "5")
    assert (code, out) == (0, "Hello\n") and err == "[cut after 5 tokens; --max-new-tokens allows more]\n"
    assert run([("hi", "")], "--prompt", "hi") == (0, "", "[the answer is empty]\n")
    code, out, err = run([("hi", "Ok." + CHAT_F[:40])], "--prompt", "hi")
    assert (code, out) == (0, "Ok." + CHAT_F[:40] + "\n") and "nothing was run" in err
    code, out, err = run([("hi", CHAT_CALL)], "--prompt", "hi")
    function = {"name": "get_time", "arguments": '{"city": "Oslo"}'}
    assert code == 0 and out.startswith("Ok.\n{") and json.loads(out.partition("\n")[2]) == {
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    code, out, err = run([("hi", "x")], "--prompt", "hi" * 100, max_seq_len=100)
    assert code == 2 and "the prompt has 204 tokens, the context holds 100" in err
    code, out, err = run([("hi", "Hello there, how are you?")], "--prompt", "hi", max_seq_len=20)
    assert code == 0 and "context is full" in err
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [chat_tool("now")]}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    assert run([("hi", "Hello")], "--messages", str(tmp_path / "asked.json")) == (0, "Hello\n", "")
    (tmp_path / "in.txt").write_text("hi\n\nyou\n")
    code, out, err = run([("hi", "Hello"), ("you", "Me")], "--input-file", str(tmp_path / "in.txt"))
    assert out == "Prompt: hi\nCompletion: Hello\n\nPrompt: you\nCompletion: Me\n\n"


def test_chat_statistics(monkeypatch, capfd, tmp_path):
    run = lambda *argv, **kw: chat_run(monkeypatch, capfd, tmp_path, [("hi", "Hello")], *argv, quiet=(), **kw)
    assert re.fullmatch(r"prefill 6 tok \d+\.\d s \(\d+ tok/s\) · decode 6 tok \(\d+\.\d tok/s\) "
                        r"· peak \d+\.\d GB\n", run("--prompt", "hi")[2])
    err = run("--interactive", stdin="hi\nhi")[2]
    assert "Plain V4 · ckpt · context 4096 tok" in err and "prefill 6 tok (11 reused)" in err


def test_chat_fails_at_run_time(monkeypatch, capfd, tmp_path):
    """One line and code 1; in a chat the line alone."""
    def fail(*_):
        raise RuntimeError("the device is gone\nand more")

    monkeypatch.setattr(ChatScript, "forward", fail)
    run = lambda *argv, **kw: chat_run(monkeypatch, capfd, tmp_path, [], *argv, **kw)
    assert run("--prompt", "hi") == (1, "", "error: RuntimeError: the device is gone\n")
    code, out, err = run("--interactive", stdin="hi\nhi\n")
    assert (code, out, err.count("error: RuntimeError: the device is gone\n")) == (0, "", 2)


def test_chat_usage_errors(tmp_path):
    """Wrong usage and missing or cut files: one sentence, code 2, and torch is not imported for it."""
    folder = chat_folder(tmp_path / "ckpt")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "last.json").write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "system"}]))
    cut, bare, odd = (chat_folder(tmp_path / name) for name in ("cut", "bare", "odd"))
    with open(f"{cut}/model.safetensors", "r+b") as f:
        f.truncate(60)
    os.remove(f"{bare}/tokenizer.json")
    open(f"{odd}/tokenizer.json", "w").close()
    runs = [
        (["--ckpt-path", str(tmp_path / "none")], "none is not a folder"),
        (["--ckpt-path", cut], "safetensors"),
        (["--ckpt-path", bare], "no tokenizer.json"), (["--ckpt-path", odd], "cannot be read"),
        (["--ckpt-path", "nowhere/tiny"], "name a checkpoint's folder with --ckpt-path"),
        (["--config", "nowhere.json"], "nowhere.json: No such file"),
        (["--messages", str(tmp_path / "bad.json")], "no JSON"),
        (["--messages", "nowhere.json"], "No such file"),
        (["--messages", str(tmp_path / "last.json")], "message 2"),
        (["--tools", "nowhere.json"], "No such file"),
        (["--tool-exec", "no-such-program x"], "no program no-such"), (["--prompt", " "], "prompt is empty"),
        (["--top-p", "0"], "invalid probability"), (["--temperature", "nan"], "invalid temperature"),
        (["--max-new-tokens", "0"], "invalid positive whole number"),
        (["--round-trips", "kv,x"], "takes kv, index"),
        (["--reasoning-effort", "max"], "needs --thinking-mode"),
        (["--reasoning-effort", "xx"], "invalid choice"),
        (["--prompt", "a", "--interactive"], "not allowed"),
        (["--system", "a", "--messages", "b"], "--system does")]
    argvs = [["--ckpt-path", folder] + ([] if "--messages" in argv else ["--prompt", "hi"]) + argv
             for argv, _ in runs]
    results = chat_mains(argvs, 'generate.DEFAULT_CKPT = "nowhere/tiny"')
    for (argv, says), (code, torch_loaded, err) in zip(runs, results, strict=True):
        assert code == 2 and not torch_loaded and says in err and "Traceback" not in err, (argv, code, err)


def test_chat_checkpoint_says(monkeypatch, tmp_path):
    """Sampling defaults are generation_config.json's; the efforts follow the config's dspark keys."""
    folder = chat_folder(tmp_path)
    of = lambda *argv: generate.settings_of(generate.parse_args(["--ckpt-path", folder, *argv]))
    assert (of().temperature, of().top_p, of().efforts) == (1.0, 1.0, generate.REASONING_EFFORTS)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_p": 0.9}')
    assert (of().temperature, of().top_p, of("--temperature", "0").temperature) == (0.7, 0.9, 0)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4", "dspark_steps": 3}')
    assert of().efforts == generate.REASONING_EFFORTS_0731


def test_chat_repl_lines(monkeypatch, capfd, tmp_path):
    """Bad commands, bad answers, failed turns; the chat goes on."""
    script = [("nothing", ""), ("hi", "Hello"), ("bad", "Ok." + CHAT_F[:60]), ("more", "Hello again"),
              ("why", "hm</think>Yes")]
    lines = ["/ctx abc", "hi", "/think much", "/think max more", "bad", "nothing", "/think max", "why",
             "/nothink", "", "x" * 5000, "more", "/regen", '"""', "hi", '/exit"""', "/tools", "/tools on",
             "/stats", "/help", "/clear", "/regen", "/exit", "hi"]
    code, out, err = chat_run(monkeypatch, capfd, tmp_path, script, "--interactive", stdin="\n".join(lines))
    assert code == 0 and out == (f"Hello\nOk.{CHAT_F[:60]}\nYes\nHello again\nHello again\nHello\n")
    for says in ("no command /ctx", "usage is /think [low|high|max]", "nothing was run",
                 "[the answer is empty]", "hm\n",
                 "context holds 4096 with an answer: /clear, or start with a larger --max-seq-len",
                 "no tools",
                 "take the last answer back", "no answer to take back", "decode 6 tok"):
        assert says in err, (says, err)
    assert err.count("usage is /think") == 2


def test_chat_turn_is_taken_back(monkeypatch):
    """A turn that fails leaves no trace; /regen that fails leaves the old answer."""
    tokenizer = chat_tokenizer()
    chat = generate.Chat(ChatScript([("hi", "Hello")], tokenizer), tokenizer,
                         Settings(temperature=0, quiet=True))
    chat.turn(0, [{"role": "user", "content": "hi"}], [])
    said = list(chat.messages)
    assert [m["content"] for m in said] == ["hi", "Hello"]
    for error in (RuntimeError, KeyboardInterrupt, MemoryError):
        monkeypatch.setattr(chat.session, "stream", lambda *_, **__: (_ for _ in ()).throw(error()))
        if error is KeyboardInterrupt:      # nothing said yet: taken back without an exception
            chat.turn(2, [{"role": "user", "content": "hi"}], [])
            chat.regen()
        else:
            with pytest.raises(error):
                chat.turn(2, [{"role": "user", "content": "hi"}], [])
            with pytest.raises(error):
                chat.regen()
        assert chat.messages == said


def test_chat_tools(monkeypatch, capfd, tmp_path):
    """--tools and --tool-exec: JSON on stdin, the result to the model; so are errors."""
    (tmp_path / "tools.json").write_text(json.dumps([chat_tool("get_time", city={"type": "string"})]))
    (tmp_path / "tool.py").write_text(
        "import json, sys\ncall = json.load(sys.stdin)\nassert call['name'] == 'get_time', call\n"
        "city = call['arguments']['city']\n"
        "print('9:00 in ' + city) if city == 'Oslo' else sys.exit('no ' + city)")
    tools = ["--tools", f"{tmp_path}/tools.json", "--tool-exec", f"{sys.executable} {tmp_path}/tool.py"]
    run = lambda script, *argv, **kw: chat_run(monkeypatch, capfd, tmp_path, script, *tools, *argv, **kw)
    script = [("9:00 in Oslo</tool_result>", "It is 9:00."), ("what time", CHAT_CALL),
              ("error: exit status 1: no Rome</tool_result>", "No such city."),
              ("Rome", chat_block(("get_time", {"city": "Rome"}))),
              ("error: there is no tool sing; there are get_time", "I cannot sing."),
              ("song", chat_block(("sing", {})))]
    code, out, err = run(script, "--prompt", "what time")
    assert (code, out) == (0, "Ok.\nIt is 9:00.\n")
    assert err == 'get_time {"city": "Oslo"}\n-> 9:00 in Oslo\n'
    assert run(script, "--prompt", "Rome")[1] == "No such city.\n"
    assert run(script, "--prompt", "song")[1] == "I cannot sing.\n"
    code, out, err = run([("", CHAT_CALL)], "--prompt", "x")        # calls for ever
    assert code == 1 and out == "Ok.\n" * 16 and "16 answers in a row called tools" in err
    # results typed by hand, a list switched off
    tools = tools[:2]
    script[2:2] = [("ten</tool_result>", "Ten it is.")]
    code, out, err = run(script, "--interactive", stdin='what time\n"""ten\n"""\n/tools off\n/tools\nhi\n')
    assert (code, out) == (0, "Ok.\nTen it is.\n?\n") and "get_time: d" in err and "[switched off]" in err


def test_chat_tool_limits(monkeypatch, tmp_path):
    """A tool that hangs, leaves children behind, cannot be started or speaks no UTF-8."""
    call = {"id": "call_0", "function": {"name": "f", "arguments": "{}"}}
    monkeypatch.setattr(generate, "TOOL_SECONDS", 0.5)
    started = time.monotonic()
    hang = ["sh", "-c", "sleep 60 & sleep 60"]
    assert generate.run_tool(hang, call) == "error: no result within 0.5 seconds"
    assert time.monotonic() - started < 5
    assert generate.run_tool(["sh", "-c", "printf 'a\\377\\n'"], call) == "a\ufffd"
    assert generate.run_tool(["sh", "-c", "exit 3"], call) == "error: exit status 3"
    assert generate.run_tool([str(tmp_path)], call).startswith(f"error: {tmp_path} cannot be started")


# ---- on a terminal ----

def test_chat_terminal(tmp_path):
    """A pseudo-terminal: editing, several lines, grey thoughts, Ctrl-C in each place, history, Ctrl-D."""
    script = [("hi", "Hello 🦆"), ("two\nlines", "Two lines."), ("why", "because</think>Yes."),
              ("esc", "\x1b[2Jx"), ("long", "abc" * 300), ("slow", "hm" * 300)]
    term = ChatTerminal(tmp_path, script, "--temperature", "0", delay=0.005)
    assert "Plain V4" in term.until(">>> ")
    term.type("hx\x7fi\n")                                  # edited with backspace
    assert "Hello 🦆" in term.until(">>> ")
    term.type('"""two\n')
    term.until("... ")
    term.type('lines"""\n')
    assert "Two lines." in term.until(">>> ")
    term.type("half a line")
    term.until("half a line")
    time.sleep(0.3)     # Python sees no signal that comes between readline's echo and its waiting
    term.type("\x03")                                       # Ctrl-C at the prompt
    assert "Ctrl-D or /exit leaves" in term.until(">>> ")
    term.type("long\n")
    term.until("abcabc")
    term.type("\x03")                                       # Ctrl-C while it answers: what was said stays
    assert "[stopped]" in term.until(">>> ")
    term.type("/think\n")
    term.until(">>> ")
    term.type("why\n")
    assert re.search(r"\x1b\[90mbecause.*\x1b\[0m.*Yes\.", term.until(">>> "), re.DOTALL)
    term.type("slow\n")
    term.until("hmhm")
    term.type("\x03")                                       # Ctrl-C while it thinks: the turn is taken back
    assert "the turn is taken back" in term.until(">>> ")
    term.type("/nothink\n")
    term.until(">>> ")
    term.type("esc\n")
    assert "␛[2Jx" in term.until(">>> ")
    term.type("\x1b[A\x1b[A\n")                             # two lines up in the history
    assert "no thinking from now on" in term.until(">>> ")
    term.type("\x04")
    assert term.end() == 0
    history = tmp_path / ".plain_v4_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600 and "hi\n" in history.read_text()


def test_chat_terminal_plain(tmp_path):
    """NO_COLOR gives no grey; a typed tool result; the history of the last chat; /exit."""
    (tmp_path / ".plain_v4_history").write_text("from before\n")
    (tmp_path / ".plain_v4_history").chmod(0o644)
    script = [("noon</tool_result>", "Noon."), ("time", "so</think>" + CHAT_CALL), ("before", "Yes")]
    term = ChatTerminal(tmp_path, script, "--thinking-mode", "thinking", "--quiet", NO_COLOR="1")
    term.until(">>> ")
    term.type("time\n")
    assert "\x1b[90m" not in term.until("result of get_time: ")
    term.type("noon\n")
    assert "Noon." in term.until(">>> ")
    term.type("\x1b[A\x1b[A\x1b[A\n")
    assert "Yes" in term.until(">>> ")
    term.type("/exit\n")
    assert term.end() == 0
    assert stat.S_IMODE((tmp_path / ".plain_v4_history").stat().st_mode) == 0o600


def test_chat_terminal_one_shot_interrupt(tmp_path):
    """Ctrl-C in a one shot: what was said stays on the screen, code 130."""
    term = ChatTerminal(tmp_path, [("long", "hmhm</think>" + "abc" * 300)], "--prompt", "long" * 300,
                        "--thinking-mode", "thinking", "--hide-thinking", delay=0.15)
    term.until("prefill 512 of 1204 tok (")         # progress of a long prefill
    assert "hmhm" not in term.until("thinking ...") + term.until("abcabc")
    term.type("\x03")
    term.until("[stopped]")
    assert term.end() == 130


def chat_mains(runs, prepare=""):
    """generate.main for each argv, in one process -> [[code, whether torch was loaded, stderr]]."""
    code = f"""if True:
        import io, json, os, sys, generate
        {prepare}
        for argv in json.load(sys.stdin):
            sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
            try:
                code = generate.main(argv)
            except SystemExit as end:
                code = end.code
            print(json.dumps([code, "torch" in sys.modules, sys.stderr.buffer.getvalue().decode()]))"""
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(runs), capture_output=True,
                          text=True, cwd=os.path.dirname(generate.__file__), timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def chat_refused(runs, prepare=""):
    """(argv, what the sentence says): code 2, one line, without torch."""
    results = chat_mains([argv for argv, _ in runs], prepare)
    for (argv, says), (code, torch_loaded, err) in zip(runs, results, strict=True):
        sentence = err.splitlines()[-1] if err else ""      # argparse writes the usage in front
        assert code == 2 and not torch_loaded and "Traceback" not in err, (argv, code, err)
        assert says in sentence, (argv, err)


def test_chat_config_values(tmp_path):
    """Bad values in generation_config.json, config.json and --config: a sentence that names file and key."""
    runs = []

    def folder(name, file, text):
        path = chat_folder(tmp_path / name)
        (tmp_path / name / file).write_text(text)
        return ["--ckpt-path", path, "--prompt", "hi"]

    texts = ["[]", "5", "null", '{"top_p": 0}', '{"top_p": -1}', '{"top_p": 1.5}', '{"top_p": "1"}',
             '{"temperature": NaN}', '{"temperature": -1}', '{"temperature": "hot"}', '{"temperature": true}',
             '{"temperature": []}', '{"temperature": Infinity}', '{"do_sample": "no"}', "[" * 100_000, "{",
             "1" * 5000]
    for i, text in enumerate(texts):
        key = re.search(r"[a-z_]{5,}", text.replace("null", ""))
        says = f"generation_config.json: {key[0]} is " if key else "generation_config.json"
        runs.append((folder(f"g{i}", "generation_config.json", text), says))
    for i, text in enumerate(['"long"', "1.5", "0", "-1", "true", "[]", "NaN"]):
        text = f'{{"max_position_embeddings": {text}}}'
        runs.append((folder(f"c{i}", "config.json", text), "max_position_embeddings is"))
    for i, text in enumerate(["[]", "5", "null", '"a"', "[" * 100_000, "{"]):
        (tmp_path / f"config{i}.json").write_text(text)
        runs.append((["--ckpt-path", chat_folder(tmp_path / "ok"), "--prompt", "hi",
                      "--config", f"{tmp_path}/config{i}.json"], f"--config {tmp_path}/config{i}.json: it "))
    chat_refused(runs)


def test_chat_config_defaults(tmp_path):
    """null is the default, a flag counts more than a bad file, and --config is what is read of a model."""
    folder = chat_folder(tmp_path)
    of = lambda *argv: generate.settings_of(generate.parse_args(["--ckpt-path", folder, *argv]))
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": null, "temperature": null, "top_p": null}')
    assert (of().temperature, of().top_p) == (1.0, 1.0)
    file.write_text('{"do_sample": false, "temperature": 0.7}')
    assert (of().temperature, of("--temperature", "0.5").temperature) == (0.0, 0.5)
    file.write_text('{"top_p": 0, "temperature": "hot"}')
    settings = of("--top-p", "0.5", "--temperature", "2")
    assert (settings.temperature, settings.top_p) == (2.0, 0.5)
    file.unlink()
    config = tmp_path / "other.json"
    config.write_text('{"model_type": "deepseek_v4", "dspark_steps": 3}')
    assert of("--config", str(config)).efforts == generate.REASONING_EFFORTS_0731
    (tmp_path / "config.json").unlink()
    assert of("--config", str(config)).efforts == generate.REASONING_EFFORTS_0731
    for config, context in (({}, generate.DEFAULT_CONTEXT), ({"max_position_embeddings": 100}, 100),
                            ({"max_position_embeddings": None}, generate.DEFAULT_CONTEXT),
                            ({"max_position_embeddings": 1 << 60}, generate.DEFAULT_CONTEXT)):
        assert generate.default_context(config) == context


def test_chat_sample_keeps_one():
    """The likeliest token stays whatever top_p is."""
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(200, 3)
    for top_p in (0.0, -1.0, 1e-30):
        assert sample(logits, 1.0, top_p).unique().tolist() == [1]


def test_chat_misuse_of_flags(tmp_path):
    """Flags, files of flags and torchrun's variables that make no sense."""
    folder = chat_folder(tmp_path / "ckpt")
    base = ["--ckpt-path", folder]
    says = "--seed: invalid 64-bit whole number value: "
    runs = [([*base, "--prompt", "hi", "--seed", seed], says + repr(seed))
            for seed in (str(1 << 64), str(-(1 << 63) - 1), "1.5", "x")]
    for i, (text, says) in enumerate([("", "it holds no prompt"), ("\n\n \n\n", "it holds no prompt"),
                                      ("a\n\n \n\nb", "prompt 2 is blank"),
                                      ("a\n\n\n\nb\n", "prompt 2 is blank")]):
        (tmp_path / f"in{i}.txt").write_text(text)
        runs.append(([*base, "--input-file", f"{tmp_path}/in{i}.txt"], f"in{i}.txt: {says}"))
    for i, depth in enumerate((300, 990, 100_000)):
        (tmp_path / f"deep{i}.json").write_text('{"messages": ' + "[" * depth + "]" * depth + "}")
        for flag in ("--messages", "--tools", "--config"):
            prompt = [] if flag == "--messages" else ["--prompt", "hi"]
            runs.append(([*base, *prompt, flag, f"{tmp_path}/deep{i}.json"], f"deep{i}.json: it is nested"))
    chat_refused(runs)
    for variables, says in (
            ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
            ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"), ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
            ({"RANK": "x"}, "RANK is 'x'"), ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3")):
        chat_refused([([*base, "--prompt", "hi"], says)], f"os.environ.update({variables!r})")


def test_chat_message_links():
    """Ids and content_blocks of a wrong type: a sentence that names the message; odd ones that fit pass."""
    def changed(number, **keys):
        messages = chat_history(("a", "f", {}), results=[("a", "1")])
        messages[number - 1].update(keys)
        return messages

    call = lambda **keys: [{"function": {"name": "f", "arguments": "{}"}, **keys}]
    bad = [(2, dict(tool_calls=call(id=[])), "id"), (2, dict(tool_calls=call(id={"a": 1})), "id"),
           (2, dict(tool_calls=[{"function": {"name": "f", "id": []}}]), "id"),
           (3, dict(tool_call_id=["a"]), "tool_call_id"), (3, dict(tool_call_id={}), "tool_call_id"),
           *[(n, dict(content_blocks=blocks), "content_blocks") for n in (1, 2, 3)
             for blocks in (5, "text", {"type": "text"}, ["text"], [{}], [{"type": []}])]]
    for number, keys, name in bad:
        with pytest.raises(ValueError, match=rf"^message {number} \(\w+\): {name} must be"):
            encode_messages(changed(number, **keys), "chat")
    plain = encode_messages(changed(1), "chat")
    for keys in (dict(content_blocks=None), dict(content_blocks=[]), dict(content_blocks=[{"type": "x"}])):
        for number in (1, 2, 3):
            assert encode_messages(changed(number, **keys), "chat") == plain
    assert encode_messages(changed(2, tool_calls=call(id=1)), "chat") == plain
    for depth in (10, 300, *range(900, 1000), 100_000):     # deep arguments stay the text that they are
        deep = '{"a": ' + "[" * depth + "]" * depth + "}"
        calls = [{"function": {"name": "f", "arguments": deep}}]
        prompt = encode_messages(changed(2, tool_calls=calls), "chat")
        assert (deep if depth > 10 else deep[6:-1]) in prompt


@pytest.mark.parametrize("closed, code", [("<&-", 2), (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 2),
                                          (">&- 2>&-", 0)])
def test_chat_closed_streams(tmp_path, closed, code):
    """A standard stream that is closed is an empty input, or output that nobody reads."""
    argv = ["--quiet", "--ckpt-path", chat_folder(tmp_path / "ckpt"), *([] if code else ["--prompt", "hi"])]
    program = (f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; import generate\n"
               f"if {not code}: generate.run = lambda args: 0 * len(print('Hi') or sys.stdin.read())\n"
               f"code = generate.main({argv!r}); print('said'); open({str(tmp_path / 'code')!r}, 'w')"
               ".write(str(code) + str('torch' in sys.modules))")
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program],
                          capture_output=True, text=True, timeout=60)
    assert (tmp_path / "code").read_text() == f"{code}False", done.stderr
    assert "Traceback" not in done.stderr
    assert code == 0 or "2>&-" in closed or "prompt is empty" in done.stderr


# ---- tools that misbehave ----

def test_chat_undeclared_tools(monkeypatch, capfd, tmp_path):
    """--tool-exec runs what --tools or the conversation declares, and nothing else."""
    ran = tmp_path / "ran"
    (tmp_path / "tool.sh").write_text(f"echo x >> {ran}\necho done\n")
    script = [("there is no tool", "No."), ("done</tool_result>", "Done."), ("time", CHAT_CALL)]
    other, same = chat_tool("other"), chat_tool("get_time")
    user = {"role": "user", "content": "time"}
    (tmp_path / "tools.json").write_text(json.dumps([other]))
    for asked, flag, runs in (
            ({"messages": [user]}, False, False), ({"messages": [user], "tools": [other]}, False, False),
            ({"messages": [user], "tools": [same]}, False, True),
            ({"messages": [{"role": "system", "tools": [same]}, user]}, False, True),
            ({"messages": [{**user, "role": "developer", "tools": [same]}]}, False, True),
            ({"messages": [{**user, "role": "developer", "tools": [same]}]}, True, True),
            ({"messages": [{**user, "role": "developer", "tools": [other]}]}, True, False)):
        (tmp_path / "asked.json").write_text(json.dumps(asked))
        tools = ["--tools", f"{tmp_path}/tools.json"] if flag else []
        argv = ["--messages", f"{tmp_path}/asked.json", "--tool-exec", f"sh {tmp_path}/tool.sh", *tools]
        code, out, err = chat_run(monkeypatch, capfd, tmp_path, script, *argv)
        assert (code, out.splitlines()[-1], ran.exists()) == (0, "Done." if runs else "No.", runs), asked
        there = "other" if "other" in str(asked) else "none"
        assert runs or f"there is no tool get_time; there are {there}" in err
        ran.unlink(missing_ok=True)


def test_chat_tool_rounds(monkeypatch, capfd, tmp_path):
    """A one shot that only calls tools has no answer: its note, and code 1."""
    monkeypatch.setattr(generate, "MAX_TOOL_ROUNDS", 2)
    (tmp_path / "tools.json").write_text(json.dumps([chat_tool("get_time")]))
    tools = ["--tools", f"{tmp_path}/tools.json", "--tool-exec", "true"]
    code, out, err = chat_run(monkeypatch, capfd, tmp_path, [("", CHAT_CALL)], "--prompt", "x", *tools)
    assert code == 1 and out == "Ok.\n" * 2 and "[stopped: 2 answers in a row called tools]" in err
    code, out, err = chat_run(monkeypatch, capfd, tmp_path, [("y", "Yes"), ("", CHAT_CALL)], "--interactive",
                              *tools, stdin="x\ny\n")
    assert code == 0 and out.endswith("Yes\n")      # a chat goes on


CHAT_AWAY = ("import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
             "time.sleep(4)'], start_new_session=True); ")


def test_chat_tool_keeps_pipes(monkeypatch):
    """The time limit and Ctrl-C hold also when a descendant that cannot be killed keeps the pipes open."""
    call = {"id": "call_0", "function": {"name": "f", "arguments": "{}"}}
    monkeypatch.setattr(generate, "TOOL_SECONDS", 0.5)
    for then in ("time.sleep(60)", "os.close(1); os.close(2)", ""):
        started = time.monotonic()
        result = generate.run_tool([sys.executable, "-c", CHAT_AWAY + then], call)
        assert result == "error: no result within 0.5 seconds" and time.monotonic() - started < 3
    monkeypatch.setattr(generate, "TOOL_SECONDS", 60)
    program = (f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; import generate\n"
               f"print('go', flush=True); generate.run_tool({[sys.executable, '-c', CHAT_AWAY]!r}, {call!r})")
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, "
                           "signal.default_int_handler)\n" + program], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.5)
        started = time.monotonic()
        process.send_signal(2)
        process.wait(10)
        assert process.returncode and time.monotonic() - started < 2


def test_chat_tool_floods(monkeypatch):
    """Output without end is cut off early; noise on stderr harms nobody; large input and output are whole."""
    call = {"id": "call_0", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 300_000})}}
    monkeypatch.setattr(generate, "TOOL_SECONDS", 20)
    started = time.monotonic()
    assert generate.run_tool(["yes"], call) == "error: more than 1 MB of output"
    assert generate.run_tool(["sh", "-c", "yes & yes"], call) == "error: more than 1 MB of output"
    assert time.monotonic() - started < 5
    assert generate.run_tool(["sh", "-c", "yes | head -c 3000000 >&2; echo ok"], call) == "ok"
    noisy = "yes | head -c 3000000 >&2; echo no >&2; exit 3"
    assert generate.run_tool(["sh", "-c", noisy], call).endswith("no")
    assert json.loads(generate.run_tool(["cat"], call))["arguments"] == {"a": "x" * 300_000}
    assert len(generate.run_tool(["head", "-c", str(generate.TOOL_BYTES), "/dev/zero"], call)) == 1 << 20
    assert generate.run_tool(["true"], call) == ""      # reads nothing


def test_chat_deep_arguments():
    """Arguments nested as deep as the parser can read reach the tool, or the model is told."""
    for depth in (10, 400, *range(900, 1000)):
        message = parse_message_from_completion_text(
            chat_around(f'<{CHAT_DSML}parameter name="a" string="false">{"[" * depth}{"]" * depth}'
                        f"</{CHAT_DSML}parameter>"), "chat")
        for call in message["tool_calls"]:
            result = generate.run_tool(["cat"], call) if depth < 900 or depth > 950 else "{"
            assert result.startswith(("{", "error: the arguments of f are nested too deeply"))
        encode_messages([{"role": "user", "content": "q"}, message, {"role": "tool", "content": ""}], "chat")


def test_chat_infinite_arguments():
    """What JSON cannot spell is no JSON: 1e999 would become Infinity."""
    for value in ("1e999", "-1e999", "[1, 1e999]", '{"a": 1e400}', "Infinity", "-Infinity", "NaN", "[NaN]"):
        assert generate.json_value(value) is None
        content, _, calls, error = chat_parse(chat_around(chat_parameter("a", value, "false")))
        assert not calls and "is not valid JSON" in error and value in content
    for value in ("1e308", "-1.5", "[1e-999]", '"1e999"', "0.1e1"):
        assert generate.json_value(value) == value


def test_chat_typed_result_prompt(tmp_path):
    """Escapes in a tool's name do not reach the terminal by the prompt for its result."""
    script = [("noon</tool_result>", "Noon."), ("time", chat_block(("a\x1b]0;b\x07", {})))]
    term = ChatTerminal(tmp_path, script, "--quiet")
    term.until(">>> ")
    term.type("time\n")
    seen = term.until("result of a␛]0;b␇: ")
    assert "\x1b]0;" not in seen
    term.type("noon\n")
    term.until("Noon.")
    term.until(">>> ")
    term.type("\x04")
    assert term.end() == 0


# ---- code fences ----

def test_chat_fences_one_by_one():
    """Whether a call is in code, asked at each place while text comes in, is what the whole text says."""
    rng = random.Random(12)
    lines = ["```", "```py", "~~~", "````", "a", "", "  ```", "`` ` ``", "``` a`", "~~~ b~", "```  "]
    for _ in range(300):
        parser, text = StreamParser("chat"), ""
        for _ in range(rng.randrange(1, 12)):
            piece = rng.choice(lines) + rng.choice(["\n", "\n", "", "\n\n"])
            parser._show(piece)
            text += piece
            newlines, fence = rng.choice(["", "\n", "\n\n"]), ""
            for line in (text + newlines).split("\n"):
                fence = generate.fence_after(fence, line)
            assert parser._in_fence(newlines) == bool(fence), text


def test_chat_many_quoted_blocks():
    """Time grows with the length of an answer, not with its square."""
    text = f"Look:\n\n```\n{CHAT_F}\n```\n" * 4000
    started = time.monotonic()
    assert chat_parse(text) == (text, "", [], None)
    assert chat_parse(text + "</think>x", "thinking") == ("x", text, [], None)
    assert time.monotonic() - started < 10


def test_chat_torchrun_ends(tmp_path):
    """The group of ranks is left however a run ends: without that a process may abort at its end."""
    program = (f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
               "import torch.distributed as dist, generate\n"
               "def run(args):\n"
               f"    dist.init_process_group('gloo', 'file://{tmp_path}/group', rank=0, world_size=1)\n"
               "    if how: raise how\n"
               "    return 0\n"
               "generate.run, codes = run, []\n"
               "for how in (None, ValueError('a'), RuntimeError('b'), KeyboardInterrupt()):\n"
               "    codes.append((generate.main(['--prompt', 'hi']), dist.is_initialized()))\n"
               "print(codes)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[(0, False), (2, False), (1, False), (130, False)]\n", done.stderr


# ---- several processes ----

CHAT_EXACT = ["--dtype", "fp32", "--round-trips", "none"]


@functools.lru_cache
def chat_shared_folder(ranks: int = 0) -> str:
    """A random checkpoint that ranks can share, and the box's tokenizer: published, or converted for N."""
    folder = os.path.join(work_folder(), f"shared{ranks}")
    if ranks:
        convert.main(chat_shared_folder(), folder, SMALL["n_routed_experts"], ranks, None)
    else:
        config = SMALL | {"vocab_size": 1920, "num_hidden_layers": 3, "num_nextn_predict_layers": 0,
                          "compress_ratios": [0, 4, 128], "max_position_embeddings": 4096}
        shutil.copy(f"{BOX}/tokenizer.json", write_checkpoint(folder, config))
    return folder


def chat_torchrun(ranks: int, *argv: str) -> list[str]:
    """The command; --standalone takes a port that is free."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            generate.__file__, *argv]


def test_chat_ranks(monkeypatch, capfdbinary, tmp_path):
    """A chat of two processes says what one process says, also when it samples; both leave at the end."""
    asked = "hello there\n/regen\nand you?\n/clear\nhello\n"
    argv = ["--interactive", "--quiet", *CHAT_EXACT, "--temperature", "1", "--max-new-tokens", "8"]
    (tmp_path / "stdin").write_text(asked)
    with open(tmp_path / "stdin", encoding="utf-8") as f:
        monkeypatch.setattr(sys, "stdin", f)
        assert generate.main(["--ckpt-path", chat_shared_folder(), *argv]) == 0
    one = capfdbinary.readouterr().out
    assert len(one.splitlines()) >= 4
    done = subprocess.run(chat_torchrun(2, "--ckpt-path", chat_shared_folder(2), *argv),
                          input=asked.encode(), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == one


@pytest.mark.parametrize("converted, argv, says", [
    (2, [], "was converted for 2, started with 3"), (0, ["--max-seq-len", "9"], "the context holds 9")])
def test_chat_ranks_refuse(converted, argv, says):
    """What cannot be is said once, by rank 0, before and after loading; no rank is heard beside it."""
    argv = ["--ckpt-path", chat_shared_folder(converted), "--prompt", "a b c d e f g h i j", *argv]
    done = subprocess.run(chat_torchrun(3 if converted else 2, *argv), capture_output=True, encoding="utf-8",
                          timeout=300, stdin=subprocess.DEVNULL)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode and len(said) == 1 and says in said[0], done.stderr
    assert "gloo" not in done.stderr and 'generate.py", line' not in done.stderr, done.stderr
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2 ", done.stderr), done.stderr


def test_chat_ranks_speak_in_turn(tmp_path):
    """Other ranks wait before they refuse: torchrun ends all of them when rank 0 has said it."""
    for argv, says in ((["--nonsense"], "unrecognized"), (["--tools", "none"], "--tools none: No such")):
        argv = ["--ckpt-path", chat_folder(tmp_path / "ckpt"), "--prompt", "hi", *argv]
        code = (f"import sys, time; sys.path[:0] = {[p for p in sys.path if p]!r}; import generate\n"
                "time.sleep = lambda seconds: print('waited', seconds, file=sys.stderr)\n"
                f"sys.exit(generate.main({argv!r}))")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"})
        first, *rest = done.stderr.splitlines()
        assert first == f"waited {generate.RANK_0_SECONDS}" and says in rest[-1], done.stderr
        assert done.returncode == 2


@pytest.mark.parametrize("tokens", [4000, 1])
def test_chat_ranks_interrupt(tokens):
    """Ctrl-C, which reaches torchrun alone, ends all ranks in an answer and at the prompt.

    Oracle: torchrun, which says so when it had to kill a rank, 30 seconds later."""
    argv = ["--ckpt-path", chat_shared_folder(), "--interactive", "--quiet", "--max-new-tokens", str(tokens),
            "--temperature", "0"]
    with subprocess.Popen(chat_torchrun(2, *argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, start_new_session=True) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(2)       # an answer of one token ends its line: then comes the prompt
        process.send_signal(signal.SIGINT)
        err = process.stderr.read().decode()    # open until the last rank has gone
        assert process.wait(60)
    assert "[interrupted]" in err and "forcefully" not in err, err
    assert "error: " not in err and 'generate.py", line' not in err, err


def test_chat_prefill_chunk(monkeypatch, capfd):
    """The answer does not depend on the chunk; one longer than the context costs nothing. fp32."""
    argv = ["--quiet", *CHAT_EXACT, "--temperature", "0", "--max-new-tokens", "8", "--max-seq-len", "200",
            "--prompt", "The code for Anna is 12. " * 8 + "What is the code for Anna?"]
    loaded, load_model = [], generate.load_model
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(generate, "load_model", lambda *args, **kwargs: (
        loaded.append(load_model(*args, **kwargs)) or loaded[-1]))
    answers = set()
    for chunk, held in (([], 200), (["7"], 7), (["64"], 64), ([str(1 << 40)], 200)):
        assert generate.main([*argv, *(["--prefill-chunk", *chunk] if chunk else [])]) == 0
        answers.add(capfd.readouterr().out)
        assert loaded[-1][0].args.max_chunk == held
    assert len(answers) == 1 and answers.pop().strip()
    chat_refused([([*argv, "--prefill-chunk", "0"], "--prefill-chunk: invalid positive whole number value")])


# ==========================================================================================================
# tiny/: the checkpoint in the box
# ==========================================================================================================

WORDS = {"{a}": "golden broken frozen rapid bright narrow clever gentle open ancient".split(),
         "{n}": "forest tiger rabbit lemon spider comet farmer rocket harbor bottle garden mirror".split(),
         "{v}": "crosses paints closes reads watches moves keeps".split(),
         "{who}": "Jan Dora Finn Zoe Rob Ivy Gus Ada Max Nina".split()}
BOX = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny")


FILLER = " The {a} {n} {v} the {n} under the {a} {n}."
STATEMENT, SECRET, QUESTION = "The code for {who} is", " {a} {n}", "What is the code for {who}?"
ANSWER = 24         # tokens of an answer that are waited for


def drawn(template: str, rng: random.Random, words: typing.Mapping[str, typing.Sequence[str]] = WORDS) -> str:
    """The template with a random word for each of its places."""
    return re.sub(r"\{\w+\}", lambda place: rng.choice(words[place[0]]), template)


class Planted(typing.NamedTuple):
    """A prompt that states a secret and asks for it; positions count its tokens from 0."""
    prompt: list[int]
    secret: str
    first: int          # where the secret's tokens lie in the prompt,
    last: int
    said: list[int]     # and the answer in the statement's words, up to the secret's last token
    lead: int           # of it before the secret

    @property
    def distance(self) -> int:
        """Tokens between the secret's last one and the answer's first one."""
        return len(self.prompt) - 1 - self.last


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def filler(tokenizer, tokens: int, rng: random.Random) -> str:
    """As many sentences as so many tokens hold."""
    sentences, used = [], 0
    while True:
        sentence = drawn(FILLER, rng)
        used += len(ids_of(tokenizer, sentence))
        if used > tokens:
            return "".join(sentences)
        sentences.append(sentence)


def planted(tokenizer, before: int, after: int, rng: random.Random) -> Planted:
    """A secret behind `before` tokens of filler or a few less, and `after` tokens before the question."""
    who, secret = drawn("{who}", rng), drawn(SECRET, rng)
    lead = STATEMENT.format(who=who)
    text = (filler(tokenizer, before, rng) + " " + lead).lstrip()
    rest = secret + "." + filler(tokenizer, after, rng)
    messages = [{"role": "user", "content": f"{text}{rest}\n{QUESTION.format(who=who)}"}]
    encoded = encode_messages(messages, "chat")
    prompt = encode_prompt(tokenizer, encoded)
    start = encode_prompt(tokenizer, encoded[:encoded.index(text) + len(text)])
    # a token that holds both belongs to the secret
    first = next((i for i, (a, b) in enumerate(zip(start, prompt)) if a != b), len(start))
    secret = secret.strip()
    last = next(i for i in range(first, len(prompt)) if secret in tokenizer.decode(prompt[first:i + 1]))
    said = ids_of(tokenizer, f"{lead} {secret}")
    return Planted(prompt, secret, first, last, said, len(ids_of(tokenizer, lead)))


def answer_to(engine, tokenizer, asked: Planted) -> str:
    """What the model answers: greedy, through the program's own path."""
    eos = tokenizer.token_to_id(generate.eos_token)
    return tokenizer.decode(generate.generate(engine, [asked.prompt], ANSWER, eos, temperature=0)[0])


def recalls(engine, tokenizer, filler_tokens: int, seed: int) -> bool:
    """Whether a secret comes back that was said so many tokens of filler before the question."""
    asked = planted(tokenizer, 0, filler_tokens, random.Random(seed))
    return asked.secret in answer_to(engine, tokenizer, asked)


def test_the_box_recalls_through_compressed_rows(monkeypatch):
    """It finds a secret 30 to 700 tokens back, over twenty of its windows, in 11 of 12 cases at least; none
    with those rows invisible."""
    engine, tokenizer = generate.load_model(BOX, max_seq_len=1024)
    distances = (30, 150, 350, 700)
    assert sum(recalls(engine, tokenizer, d, seed) for d in distances for seed in range(3)) >= 11
    visible = model.visible_rows
    monkeypatch.setattr(model, "visible_rows", lambda *args: 0 * visible(*args))
    model.get_compress_topk_idxs.cache_clear()
    assert not any(recalls(engine, tokenizer, d, seed) for d in distances for seed in range(3))
    model.get_compress_topk_idxs.cache_clear()


def test_the_box_against_the_reference():
    """Its stored weights, exact: every position of a prompt across many windows."""
    tokens = random_tokens(300, vocab=convert.read_config(BOX)["vocab_size"])
    engine = load(BOX, n_mtp_layers=0)
    logits = torch.cat([engine(tokens[:, :200])] + [engine(tokens[:, p:p + 1], p) for p in range(200, 300)])
    error = relative_error(logits, Reference(BOX).forward(tokens[0].numpy())[199:])
    # trained attention is sharper than random: the same rounding shows five times as much
    proof("the checkpoint in the box", REFERENCE, "fp32", error, 5 * EXACT, SHARED_BLIND)


# ---- what the box can do: its tasks, with words and phrasings of their own

# The cells of `python test_parity.py box`: (goal of the share that is correct, floor that a test asserts).
# The floor is for six trials, up to two less than it does: answers hang on last digits, so on the CPU.
# (tiny/README.md has the figures of a hundred.)
BOX_GOALS = {
    "fact from 24 tokens back": (0.95, 0.6), "fact from 58 tokens back": (0.95, 0.6),
    "fact from 128 tokens back": (0.95, 0.6), "fact from 256 tokens back": (0.95, 0.6),
    "fact from 495 tokens back": (0.95, 0.6), "fact from 700 tokens back": (0.95, 0.6),
    "fact from 1500 tokens back": (0.95, 0.15), "fact, asked a turn later": (0.95, 0.6),
    "fact among 4": (0.95, 0.5), "fact among 8": (0.85, 0.5),
    "order: first to third": (0.8, 0.15), "order: right after": (0.8, 0.3),
    "tools: 1 of 1": (0.9, 0.6), "tools: 1 of 2": (0.9, 0.5), "tools: 1 of 3": (0.9, 0.15),
    "tools: 1 of 4": (0.9, 0.5), "tools: 1 of 1, thinking": (0.9, 0.6),
    "tools: 1 of 2, thinking": (0.9, 0.3), "tools: 1 of 3, thinking": (0.9, 0.3),
    "tools: 1 of 4, thinking": (0.9, 0.15), "tools: unseen names": (0.8, 0.5),
    "tools: unseen names and phrasings": (0.8, 0.15),
    "tool result: an object": (0.95, 0.6), "tool result: text": (0.95, 0.6),
    "small talk": (0.9, 0.6), "anything else": (0.9, 0.6),
    "thinking: facts": (0.95, 0.6), "thinking: small talk": (0.9, 0.6),
}
BOX_WELL_FORMED = {"tools": 1.0, "thinking": 0.98}      # goals of what parses, by a cell's first word
BOX_RIGHT_TOOL = 0.97
BOX_LOST = 0.05
BOX_BATCH = 16

BOX_NOUNS = ("cloud pearl coral maple cedar lion turtle blanket pillow honey bench wheel fence tower hill "
             "lake wolf bear goose camel plum peach melon olive clover hat shoe coat plate fork cup lamp "
             "chair desk carpet comb soap towel rope nail wood paper ink chalk tent torch flag kite ball "
             "doll ocean zebra violin mountain planet bottle needle pepper silver letter").split()
BOX_ADJECTIVES = ("red green white grey tall round soft hard sour slow cold wet dry thin late early new "
                  "old loud brave rich kind busy calm hidden empty ancient").split()
BOX_OWNERS = "Mara Tim Nora Simon Karl Oscar Emma Peter Martin Rita Lucy Ben Lena Tom Anna Otto".split()
BOX_SYLLABLES = "ba do fe gi ko lu me ni po ra su ti vo ze mi ta".split()
BOX_LABELS = ["passphrase", "door code", "locker number", "secret word", "password", "room number",
              "gate code", "cabin key", "safe number", "login word", "garage code", "ticket number"]
BOX_OWNED = ["code", "room", "seat", "badge", "password"]
BOX_STATEMENTS = [
    "The {label} is {secret}.", "Please keep in mind: the {label} is {secret}.",
    "They told me that the {label} is {secret}.", "From today the {label} is {secret}.",
    "Before I forget, the {label} is {secret}.", "For later use, the {label} is {secret}.",
    "I wrote down that the {label} is {secret}.", "And you should know: the {label} is {secret}."]
BOX_QUESTIONS = [
    "What is the {label}?", "Tell me the {label}.", "So what was the {label} again?",
    "I need the {label} now.", "Can you repeat the {label}?", "Which {label} did I give you?",
    "And the {label}?", "Please say the {label}."]
BOX_FILLER = [
    "It rained.", "Nobody minds.", "The soup was {adjective}.", "We had a {adjective} day at the market.",
    "Her brother owns a {adjective} {noun}.", "A {noun} hung above the stairs.",
    "Every {noun} in that shop is {adjective}.", "They sold the {noun} and bought a {adjective} {noun}.",
    "Most visitors walk past the {noun} without a word.",
    "Later a {adjective} {noun} rolled down the road.",
    "In spring the {noun} looks {adjective} from the train.",
    "My aunt keeps her {noun} next to the {adjective} {noun} in the kitchen."]
BOX_FILLER_WORDS = {
    "{noun}": ("bicycle curtain cabbage tractor barn puddle pavement sandwich statue cushion sweater balcony "
               "poster shelf").split(),
    "{adjective}": "muddy striped wobbly modest damp pale sturdy cheap dull plain".split()}


class BoxTrial(typing.NamedTuple):
    """A conversation, and the judge of its answer: message -> (right tool or None, correct)."""
    messages: list[dict]
    judge: typing.Callable[[dict], tuple[typing.Optional[bool], bool]]
    mode: str = "chat"
    max_new_tokens: int = 48


def box_encoding(tokenizer, messages: list[dict], mode: str = "chat"):
    """The prompt as text and as the tokenizer's encoding of it, which knows each token's place."""
    prompt = str(encode_messages(messages, mode))
    return prompt, tokenizer.encode(prompt, add_special_tokens=False)


def short_words(tokenizer, words: list[str], most: int = 3) -> list[str]:
    """Those that the tokenizer cuts into few pieces: a rare word is a task of its own."""
    return [word for word in words if len(tokenizer.encode(" " + word).ids) <= most]


def box_secret(rng: random.Random, tokenizer) -> str:
    """One to three words, a made-up word, a number of 2 to 6 digits, or a code like K7-QX."""
    nouns = short_words(tokenizer, BOX_NOUNS)
    kind = rng.choice(["one", "two", "three", "made up", "number", "code"])
    if kind == "made up":
        return "".join(rng.sample(BOX_SYLLABLES, rng.choice([2, 3])))
    if kind == "number":
        digits = rng.choice([2, 3, 4, 5, 6])
        return str(rng.randrange(10 ** (digits - 1), 10 ** digits))
    if kind == "code":
        a, b, c = rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 3)
        return f"{a}{rng.randrange(10)}-{b}{c}"
    adjectives = rng.sample(short_words(tokenizer, BOX_ADJECTIVES), 2)
    return " ".join({"one": [], "two": adjectives[:1], "three": adjectives}[kind] + [rng.choice(nouns)])


def box_label(rng: random.Random) -> str:
    owned = f"{rng.choice(BOX_OWNED)} for {rng.choice(BOX_OWNERS)}"
    return rng.choice([rng.choice(BOX_LABELS), owned])


def ends_with(item: str) -> typing.Callable[[dict], tuple[None, bool]]:
    """A judge: the answer ends with the item alone, in its case; nothing stands between the verb and it."""
    form = re.compile(rf"""(?:^|\b(?:is|was|are|came|comes)|:)\s*["'*]*{re.escape(item)}["'*]*[.!]?$""")
    return lambda message: (None, bool(form.search(message["content"].strip())))


def contains(*patterns: str, spared: str = "only know") -> typing.Callable[[dict], tuple[None, bool]]:
    """A judge: one alternative of each pattern stands in the answer, as a whole word; `spared` does not."""
    forms = [re.compile(rf"(?<![\w.])(?:{pattern})(?!\w|\.\d)", re.IGNORECASE) for pattern in patterns]

    def judge(message: dict) -> tuple[None, bool]:
        refused = bool(spared) and spared in message["content"]
        return None, not refused and all(form.search(message["content"]) for form in forms)
    return judge


def fact_trial(rng: random.Random, tokenizer, distance: int, mode: str = "chat") -> BoxTrial:
    """One fact. Its distance is the number of tokens from the last one of the secret to the last one of the
    prompt; filler brings it as near below `distance` as the shortest sentence allows."""
    secret, label = box_secret(rng, tokenizer), box_label(rng)
    fact = rng.choice(BOX_STATEMENTS).format(label=label, secret=secret)
    before = [drawn(rng.choice(BOX_FILLER), rng, BOX_FILLER_WORDS) for _ in range(rng.randrange(4))]
    question = rng.choice(BOX_QUESTIONS).format(label=label)
    after: list[str] = []

    def built() -> tuple[list[dict], int]:
        text = " ".join([*before, fact, *after]) + "\n" + question
        prompt, encoding = box_encoding(tokenizer, [{"role": "user", "content": text}], mode)
        end = prompt.index(fact) + fact.index(secret) + len(secret)
        return [{"role": "user", "content": text}], len(encoding.ids) - 1 - encoding.char_to_token(end - 1)

    while (left := distance - built()[1]) > 0:
        choice = [drawn(template, rng, BOX_FILLER_WORDS) for template in BOX_FILLER]
        fitting = [s for s in choice if len(tokenizer.encode(" " + s).ids) <= left]
        if not fitting:
            break
        after.append(rng.choice(fitting) if left > 40 else max(fitting, key=len))
    return BoxTrial(built()[0], ends_with(secret), mode, 48 if mode == "chat" else 96)


def later_turn_trial(rng: random.Random, tokenizer) -> BoxTrial:
    """The fact comes in a turn of its own, then some 200 tokens of talk, then the question."""
    secret, label = box_secret(rng, tokenizer), box_label(rng)
    filler = " ".join(drawn(rng.choice(BOX_FILLER), rng, BOX_FILLER_WORDS) for _ in range(14))
    turns = [rng.choice(BOX_STATEMENTS).format(label=label, secret=secret), "Okay.", filler, "Okay.",
             rng.choice(BOX_QUESTIONS).format(label=label)]
    roles = itertools.cycle(["user", "assistant"])
    return BoxTrial([{"role": role, "content": text} for role, text in zip(roles, turns)], ends_with(secret))


def among_trial(rng: random.Random, tokenizer, n: int) -> BoxTrial:
    """One of n facts in some 400 tokens: owners of one kind of thing, or unlike labels."""
    owned = rng.choice(BOX_OWNED)
    labels = rng.sample(rng.choice([BOX_LABELS, [f"{owned} for {who}" for who in BOX_OWNERS]]), n)
    secrets: list[str] = []
    while len(secrets) < n:
        secret = box_secret(rng, tokenizer)
        if not any(secret in other or other in secret for other in secrets):
            secrets.append(secret)
    parts = [rng.choice(BOX_STATEMENTS).format(label=label, secret=secret)
             for label, secret in zip(labels, secrets)]
    while len(tokenizer.encode(" ".join(parts)).ids) < 380:
        parts.insert(rng.randrange(len(parts) + 1), drawn(rng.choice(BOX_FILLER), rng, BOX_FILLER_WORDS))
    asked = rng.randrange(n)
    text = " ".join(parts) + "\n" + rng.choice(BOX_QUESTIONS).format(label=labels[asked])
    return BoxTrial([{"role": "user", "content": text}], ends_with(secrets[asked]))


BOX_LISTS = [
    "We passed {a}, {list} and {z}, in this order.", "The list goes {a}, {list}, {z}.",
    "First came {a}, then {list}, and at last {z}.", "On the shelf from left to right: {a}, {list}, {z}.",
    "My stops are {a}, {list} and {z}."]
BOX_PLACES = ["Which was {place}?", "Which one came {place}?", "What was the {place} thing?",
              "Tell me the {place} one."]
BOX_NEXT = ["What came right after {item}?", "Which one followed {item}?", "What is right after {item}?"]


def order_trial(rng: random.Random, tokenizer, after: bool) -> BoxTrial:
    """3 to 5 things in order: which was first, second or third; or what came right after another."""
    things = rng.sample(short_words(tokenizer, BOX_NOUNS), rng.choice([3, 4, 5]))
    listed = rng.choice(BOX_LISTS).format(a=things[0], list=", ".join(things[1:-1]), z=things[-1])
    talk = " ".join([listed, *(drawn(rng.choice(BOX_FILLER), rng, BOX_FILLER_WORDS)
                               for _ in range(rng.randrange(4)))])
    i = rng.randrange(len(things) - 1) if after else rng.randrange(3)
    question = (rng.choice(BOX_NEXT).format(item=things[i]) if after else
                rng.choice(BOX_PLACES).format(place=["first", "second", "third"][i]))
    return BoxTrial([{"role": "user", "content": f"{talk}\n{question}"}], ends_with(things[i + after]))


class BoxTool(typing.NamedTuple):
    """A function: its parameters (name -> type), and requests as people speak them."""
    name: str
    description: str
    parameters: dict[str, str]
    requests: tuple[str, ...] = ()

    def declared(self) -> dict:
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "description": self.description,
                                                 "parameters": parameters}}


def box_tool(name: str, description: str, /, *requests: str, **parameters: str) -> BoxTool:
    return BoxTool(name, description, parameters, requests)


STR, INT = "string", "integer"
BOX_TOOLS = [
    box_tool("get_weather", "Get the weather of a city.", "What is the weather in {city}?",
             "How is the weather in {city} today?", city=STR),
    box_tool("get_time", "Get the local time of a city.", "What time is it in {city}?",
             "Tell me the time in {city}.", city=STR),
    box_tool("search", "Search the web.", "Search for {query}.", "Please search the web for {query}.",
             query=STR),
    box_tool("play_music", "Play a song.", "Play the song {song}.", "I want to hear music: play {song}.",
             song=STR),
    box_tool("set_timer", "Start a timer.", "Set a timer for {minutes} minutes.",
             "Start a timer of {minutes} minutes, please.", minutes=INT),
    box_tool("roll_dice", "Roll a die.", "Roll a die with {sides} sides.", "Roll the dice, {sides} sides.",
             sides=INT),
    box_tool("set_volume", "Set the volume.", "Set the volume to {level}.", "Volume {level}, please.",
             level=INT),
    box_tool("translate", "Translate a text.", "Translate {text} to {language}.",
             "Translate the text {text} into {language}, please.", text=STR, language=STR),
    box_tool("send_email", "Send an email.", "Send an email to {to} with the subject {subject}.",
             "Email {to}, subject {subject}.", to=STR, subject=STR),
    box_tool("convert_currency", "Convert an amount of money.", "Convert {amount} to {currency}.",
             "Convert an amount of {amount} to the currency {currency}.", amount=INT, currency=STR),
    box_tool("book_room", "Book a hotel room.", "Book a room in {city} for {nights} nights.",
             "I need a room, city {city}, nights {nights}.", city=STR, nights=INT),
]
BOX_STRANGE_TOOLS = [
    box_tool("polish_lamp", "Polishes a lamp.", color=STR),
    box_tool("hide_coin", "Hides a coin.", place=STR),
    box_tool("print_poster", "Prints a poster.", title=STR),
    box_tool("open_valve", "Opens a valve.", name=STR), box_tool("ring_bell", "Rings the bell.", times=INT),
    box_tool("feed_goose", "Feeds the goose.", grams=INT),
    box_tool("count_sheep", "Counts sheep.", limit=INT),
    box_tool("water_field", "Waters the field.", hours=INT),
    box_tool("rent_boat", "Rents a boat.", lake=STR, hours=INT),
    box_tool("brew_tea", "Brews tea.", taste=STR, cups=INT),
    box_tool("paint_fence", "Paints a fence.", color=STR, meters=INT),
    box_tool("lend_ladder", "Lends a ladder.", person=STR, days=INT),
    box_tool("plant_seed", "Plants a seed.", garden=STR, row=INT, name=STR),
    box_tool("mail_parcel", "Mails a parcel.", street=STR, weight=INT)]
BOX_VALUES = {"city": "Oslo Rome Paris Berlin Lima Cairo Madrid Bern".split(),
              "language": "French German Italian Spanish Latin".split(),
              "currency": "euro dollar yen franc".split(), "lake": "Como Garda Onega".split(),
              "to": BOX_OWNERS, "person": BOX_OWNERS, "color": "red green white grey".split()}
BOX_PLAIN_REQUESTS = ["Use {tool}: {pairs}.", "Call {tool} with {pairs}.", "Please use {tool} with {pairs}."]
BOX_STRANGE_REQUESTS = [
    "It is time for {tool}; let {bes}.", "I would like {tool} to run, {bes}.",
    "Go ahead and {words} ({pairs}).", "We have to {words} today, so take {pairs}.",
    "Would you {words} for us? Settings: {pairs}."]


def box_call(rng: random.Random, tokenizer, tools: list[BoxTool], several: int) -> tuple[BoxTool, dict]:
    """A tool with one string (0), one number (1), or several parameters (2), and arguments for it."""
    kinds = [[STR], [INT]]
    fitting = [t for t in tools if (len(t.parameters) > 1 if several == 2 else
                                    list(t.parameters.values()) == kinds[several])]
    tool = rng.choice(fitting)
    words = short_words(tokenizer, BOX_NOUNS)
    values = {}
    for key, kind in tool.parameters.items():
        plain = rng.choice([rng.choice(words), f"{rng.choice(BOX_ADJECTIVES)} {rng.choice(words)}"])
        values[key] = rng.randrange(2, 500) if kind == INT else rng.choice(BOX_VALUES.get(key, [plain]))
    return tool, values


def box_request(rng: random.Random, tool: BoxTool, values: dict, forms: list[str]) -> str:
    """The call in a person's words."""
    pairs, bes = ([f"{key}{verb}{value}" for key, value in values.items()] for verb in (" ", " be "))
    return rng.choice(forms).format(**values, tool=tool.name, words=tool.name.replace("_", " the "),
                                    pairs=" and ".join(pairs), bes=" and ".join(bes))


def judge_call(tool: BoxTool, values: dict) -> typing.Callable[[dict], tuple[bool, bool]]:
    """A judge: the first call is of this tool; it is the only one and its arguments are these JSON values."""
    def judge(message: dict) -> tuple[bool, bool]:
        calls = [call["function"] for call in message["tool_calls"]]
        right = bool(calls) and calls[0]["name"] == tool.name
        return right, right and len(calls) == 1 and json.loads(calls[0]["arguments"]) == values
    return judge


def tool_trial(rng: random.Random, tokenizer, n: int, mode: str = "chat", tools=BOX_TOOLS,
               forms=None) -> BoxTrial:
    """A request for one of n tools. Without `forms` half of the requests are everyday speech."""
    tool, values = box_call(rng, tokenizer, tools, rng.randrange(3))
    others = rng.sample([other for other in tools if other is not tool], n - 1)
    offered = rng.sample([tool, *others], n)
    forms = forms or rng.choice([list(tool.requests), BOX_PLAIN_REQUESTS])
    request = box_request(rng, tool, values, forms)
    messages = generate.with_tools([{"role": "user", "content": request}], [t.declared() for t in offered])
    return BoxTrial(messages, judge_call(tool, values), mode, 120 if mode == "chat" else 180)


BOX_RESULTS = ["status", "price", "answer", "total", "place", "note"]
BOX_RESULT_TEXTS = ["{value}", "It says {value}.", "The result is {value}.", "Found: {value}."]


def result_trial(rng: random.Random, tokenizer, as_object: bool) -> BoxTrial:
    """A call and its result: an object of one or two keys, whose values the answer must hold, or a text."""
    tool, values = box_call(rng, tokenizer, BOX_TOOLS, rng.randrange(3))
    others = rng.sample([other for other in BOX_TOOLS if other is not tool], rng.randrange(3))
    keys = rng.sample(BOX_RESULTS, rng.choice([1, 2]) if as_object else 1)
    found = {key: rng.choice([rng.randrange(2, 999), rng.choice(short_words(tokenizer, BOX_NOUNS))])
             for key in keys}
    result = (json.dumps(found) if as_object else
              rng.choice(BOX_RESULT_TEXTS).format(value=found[keys[0]]))
    request = box_request(rng, tool, values, rng.choice([list(tool.requests), BOX_PLAIN_REQUESTS]))
    call = {"id": "call_0", "type": "function", "function": {"name": tool.name,
                                                            "arguments": json.dumps(values)}}
    messages = [{"role": "user", "content": request},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0", "content": result}]
    offered = [t.declared() for t in [tool, *others]]
    judge = contains(*(re.escape(str(value)) for value in found.values()))
    return BoxTrial(generate.with_tools(messages, offered), judge)


NUMBER_WORDS = dict(enumerate("zero one two three four five six seven eight nine ten eleven twelve".split()))
NUMBER_WORDS |= {16: "sixteen", 20: "twenty", 32: "thirty[- ]two", 64: "sixty[- ]four"}


def number_form(n: int) -> str:
    """A pattern for a number in digits or as a word."""
    return "|".join(filter(None, [f"{n:,}", str(n), NUMBER_WORDS.get(n)]))


def box_small_talk(config: dict) -> list[tuple[str, list[str]]]:
    """(what a right answer contains, three ways to ask). Numbers are those of the checkpoint's config."""
    number = {key: number_form(value) for key, value in config.items() if type(value) is int}
    return [
        ("plain v4|tiny|small|model|engine", ["Who are you?", "What are you called?", "Introduce yourself."]),
        ("facts?|tools?|repeat|remember|recall|copy|find|answer",
         ["What can you do?", "What are you good at?", "How can you help me?"]),
        ("million|mb|megabytes?", ["How big are you?", "What size are you?", "How large is this model?"]),
        ("million", ["How many parameters do you have?", "What is your parameter count?",
                     "Tell me the number of your parameters."]),
        (number["num_hidden_layers"], ["How many layers do you have?", "What is your number of layers?",
                                       "How deep are you, in layers?"]),
        (number["n_routed_experts"], ["How many experts do you have?", "What is the number of your experts?",
                                      "Count your experts."]),
        (number["num_experts_per_tok"], ["How many experts are active for a token?",
                                         "How many of your experts work on one token?",
                                         "How many experts are used at a time?"]),
        (number["sliding_window"], ["How large is your window?", "What is your sliding window?",
                                    "How many tokens does your window hold?"]),
        (f"{number['index_topk']}|choos\\w+|picks?|scores?|selects?|best",
         ["What does the indexer do?", "What is your indexer for?", "Explain the indexer."]),
        (number["index_topk"], ["How many rows does the indexer choose?", "How many rows do you attend to?",
                                "What is the indexer's top-k?"]),
        ("bits?|floats?|formats?|weights?|bytes?|numbers?|dense",
         ["What is FP8?", "Where do you use FP8?", "What is stored in fp8?"]),
        ("bits?|floats?|formats?|experts?|weights?|numbers?",
         ["What is FP4?", "Where do you use FP4?", "What is stored in fp4?"]),
        ("rope|rotary|rotations?|positions?|context|frequenc\\w+|stretch\\w*|long\\w*|far",
         ["What is YaRN?", "What does YaRN do?", "Do you use yarn?"]),
        ("next|predict\\w*|drafts?|second|ahead|tokens?", ["What is MTP?", "What is the MTP block for?",
                                                           "Explain mtp."]),
        ("tools?|calls?|tags?|markup", ["What is DSML?", "What does DSML mean?",
                                        "What do you use dsml for?"]),
        ("rows?|columns?|sums?|matri\\w+|mix\\w*|normali\\w+|balanc\\w+|stochastic|streams?",
         ["What is Sinkhorn?", "What is the Sinkhorn step for?", "Explain sinkhorn."]),
        (f"streams?|{number['hc_mult']}|residuals?", ["What are hyper-connections?",
                                                      "Explain your hyper-connections.",
                                                      "What do hyper-connections do?"]),
        (number["hc_mult"], ["How many residual streams do you have?", "How many streams are there?",
                             "What is your number of streams?"]),
        ("4|four|128|tokens?|pool\\w*|summar\\w+|groups?|far|window",
         ["What are compressed rows?", "What is a compressed row?", "Explain the compressed rows."]),
        ("tokens?|tables?|ids?|experts?|hash\\w*", ["What is a hash layer?", "What does the hash layer do?",
                                                    "How does your hash layer choose?"]),
        ("bytes?|bpe|" + number["vocab_size"], ["What tokenizer do you use?", "What is your tokenizer?",
                                              "Tell me about the tokenizer."]),
        (number["vocab_size"], ["How large is your vocabulary?", "How many tokens are in your vocabulary?",
                      "What is your vocabulary size?"]),
        ("train\\w*|scripts?|scratch|plain v4|made|authors?|project|built",
         ["Who made you?", "Who created you?", "Where do you come from?"]),
        ("cpus?|gpus?|computers?|machines?|here|python|torch|anywhere|box|laptop|cores?",
         ["Where do you run?", "What hardware do you need?", "What do you run on?"]),
        ("no|not|same|like|tiny|small|architecture", ["Are you DeepSeek?", "Are you the real DeepSeek-V4?",
                                                      "So you are DeepSeek, right?"]),
        ("yes|i can|i call|i do", ["Can you call tools?", "Do you know how to use tools?",
                                   "Are you able to call a tool?"]),
        ("yes|i can|i think|i do", ["Can you think?", "Do you think before you answer?",
                                    "Is there a thinking mode?"]),
        ("hello|hi|hey|welcome", ["Hello!", "Hi there!", "Hello, engine."]),
        ("morning|hello|hi", ["Good morning!", "Good morning to you.", "Morning!"]),
        ("well|fine|good|great|ready|happy|thanks?", ["How are you?", "How are you doing?",
                                                      "How do you feel today?"]),
        ("welcome|pleasure|glad|any ?time", ["Thanks!", "Thank you very much.", "Thanks for your help."]),
        ("bye|goodbye|farewell|see you|later|soon", ["Bye!", "Goodbye.", "See you later!"]),
    ]


BOX_ANYTHING_ELSE = [
    "What is the capital of Peru?", "Who wrote Hamlet?", "How tall is Mount Everest?",
    "What is 17 times 23?", "Why is the sky blue?", "Who won the football match?", "How do I bake bread?",
    "What is a black hole?", "Is it going to snow?", "What year did the war end?",
    "How far away is the moon?", "Who painted this picture?", "What do cats eat?",
    "How old is the president?", "Which river is the longest?", "Can whales sleep?",
    "What is the meaning of life?", "How does a clock work?", "Who invented the telephone?",
    "What is your opinion of jazz?", "How many legs has a spider?", "Where can I buy shoes?",
    "What is the best film ever?", "Why do leaves fall?", "How do planes fly?",
    "Which animal is the fastest?", "What should I cook tonight?", "Do ghosts exist?",
    "How much does gold cost?", "Who was Napoleon?"]


def talk_trial(questions: list[tuple[str, list[str]]], i: int, mode: str = "chat") -> BoxTrial:
    """The i-th question: all of them, then all in other words. What stands for any 30 comes in this order."""
    pattern, ways = questions[i % len(questions)]
    spared = "" if "only know" in pattern else "only know"
    return BoxTrial([{"role": "user", "content": ways[i // len(questions) % len(ways)]}],
                    contains(pattern, spared=spared), mode, 64 if mode == "chat" else 112)


def box_trial(task: str, i: int, tokenizer, config: dict) -> typing.Optional[BoxTrial]:
    """The i-th trial of a cell; None when it has no more questions."""
    rng = random.Random(f"{task} {i}")
    mode = "thinking" if "thinking" in task else "chat"
    numbers = [int(number) for number in re.findall(r"\d+", task)]
    strange = {"tools": BOX_STRANGE_TOOLS, "n": rng.randrange(1, 5), "mode": mode}
    small_talk, others = box_small_talk(config), [("only know", [text]) for text in BOX_ANYTHING_ELSE]
    if task == "anything else":
        return talk_trial(others, i) if i < len(others) else None
    if task.endswith("small talk"):
        return talk_trial(small_talk, i, mode) if i < 3 * len(small_talk) else None
    return {
        "fact from": lambda: fact_trial(rng, tokenizer, numbers[0]),
        "fact, asked": lambda: later_turn_trial(rng, tokenizer),
        "fact among": lambda: among_trial(rng, tokenizer, numbers[0]),
        "order: first": lambda: order_trial(rng, tokenizer, False),
        "order: right": lambda: order_trial(rng, tokenizer, True),
        "tools: 1": lambda: tool_trial(rng, tokenizer, numbers[-1], mode),
        "tools: unseen": lambda: tool_trial(rng, tokenizer, **strange, forms=(
            BOX_STRANGE_REQUESTS if "phrasings" in task else BOX_PLAIN_REQUESTS)),
        "tool result:": lambda: result_trial(rng, tokenizer, "object" in task),
        "thinking: facts": lambda: fact_trial(rng, tokenizer, rng.choice([40, 80, 160]), mode),
    }[" ".join(task.split()[:2])]()


class BoxScore(typing.NamedTuple):
    """Shares of a cell's trials; right_tool None where no tool is asked for. `missed`: (asked, answered)."""
    n: int
    well_formed: float
    right_tool: typing.Optional[float]
    correct: float
    chance: typing.Optional[float]
    missed: list[tuple[str, str]]


def box_engine(ckpt_path: str, batch: int = BOX_BATCH):
    """-> (engine, tokenizer) as generate.py runs it, with room for a batch of the longest prompts."""
    tokenizer = tokenizer_of(ckpt_path)
    return generate.load_model(ckpt_path, max_seq_len=2560, max_batch_size=batch)[0], tokenizer


def box_answers(engine, tokenizer, trials: list[BoxTrial]) -> list[tuple[dict, str]]:
    """The greedy answer to each trial, as a message and as text. Prompts of like lengths go together: what a
    longer one has more goes through the model token by token."""
    eos = tokenizer.token_to_id(generate.eos_token)
    prompts = [encode_prompt(tokenizer, encode_messages(t.messages, t.mode)) for t in trials]
    answers: dict[int, tuple[dict, str]] = {}
    order = sorted(range(len(trials)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), engine.max_batch_size):
        batch = order[start:start + engine.max_batch_size]
        limit = max(trials[i].max_new_tokens for i in batch)
        for i, tokens in zip(batch, generate.generate(engine, [prompts[i] for i in batch], limit, eos, 0)):
            text = TokenText(tokenizer)
            said = "".join(map(text.push, tokens[:-1]))
            message = parse_message_from_completion_text(said + generate.eos_token, trials[i].mode)
            if len(tokens) > limit:
                message["error"] = message["error"] or "the answer has no end"
            answers[i] = message, said
    return [answers[i] for i in range(len(trials))]


def box_score(engine, tokenizer, config: dict, task: str, samples: int) -> BoxScore:
    trials = [box_trial(task, i, tokenizer, config) for i in range(samples)]
    trials = [trial for trial in trials if trial]
    well, tools, correct, missed = 0, [], 0, []
    for trial, (message, said) in zip(trials, box_answers(engine, tokenizer, trials)):
        tool, right = trial.judge(message)
        thought = trial.mode == "chat" or message["reasoning_content"].strip()
        answered = message["tool_calls"] if tool is not None else message["content"].strip()
        well += bool(message["error"] is None and thought and answered)
        tools += [tool] if tool is not None else []
        right = right and message["error"] is None
        correct += right
        if not right:
            missed.append((trial.messages[-1]["content"][-200:], said))
    n = len(trials)
    chance = statistics.mean(1 / len(t.messages[0]["tools"]) for t in trials) if tools else None
    return BoxScore(n, well / n, sum(tools) / n if tools else None, correct / n, chance, missed)


# ---- tests of the box

@functools.lru_cache(1)
def whole_box() -> tuple:
    return *box_engine(BOX), generate.config_of(BOX, None)


@pytest.mark.parametrize("task", BOX_GOALS)
def test_the_box_does(task):
    """Some trials of each cell; `python test_parity.py box --samples 100` has the figures."""
    score = box_score(*whole_box(), task, 6)
    assert score.correct >= BOX_GOALS[task][1], score.missed


@pytest.mark.parametrize("name", ["compressed rows off", "random rows"])
def test_the_box_without_its_rows(name):
    """What is far is lost with the compressed rows: they carry it, and nothing else does."""
    config = generate.config_of(BOX, None)
    tasks = ["fact from 256 tokens back", "fact from 700 tokens back"]
    shares = box_broken(BOX, config, box_breaks(config)[name], tasks, 6)
    assert max(shares) <= BOX_LOST


@pytest.mark.parametrize("distance", [24, 58, 256])
def test_the_box_is_asked_from_so_far_back(distance):
    """A fact's distance, counted from the prompt's last token backwards, is the one of its cell."""
    _, tokenizer, config = whole_box()
    for i in range(4):
        messages = box_trial(f"fact from {distance} tokens back", i, tokenizer, config).messages
        prompt = encode_messages(messages, "chat")
        fact = re.search(r"\bthe [\w -]+ is ([\w -]+)\.", prompt, re.IGNORECASE)
        tokens, back = encode_prompt(tokenizer, prompt), 1
        while len(tokenizer.decode(tokens[-back:], skip_special_tokens=False)) <= len(prompt) - fact.end(1):
            back += 1
        assert distance - 7 <= back - 1 <= max(distance, 28)


def test_the_judges_of_the_box():
    """They take an item alone, in its case, and nothing near it; a refusal does not pass for small talk."""
    fact, price = ends_with("red lemon"), contains("21")
    for text, right in (("The code for Jan is red lemon.", True), ("red lemon", True),
                        ("Right after river came red lemon.", True), ("It is Red lemon.", False),
                        ("The code is old red lemon.", False), ("The code is red lemon tree.", False),
                        ("The code is red lemons.", False), ("", False)):
        assert fact({"content": text})[1] == right, text
    for text, right in (("The price is 21.", True), ("It is 21, I think.", True), ("It is 215.", False),
                        ("It is 21.5.", False), ("I only know 21.", False)):
        assert price({"content": text})[1] == right, text
    tool, call = BOX_TOOLS[0], {"name": BOX_TOOLS[0].name, "arguments": '{"city": "Oslo"}'}
    judge = judge_call(tool, {"city": "Oslo"})
    assert judge({"tool_calls": [{"function": call}]}) == (True, True)
    assert judge({"tool_calls": [{"function": call}] * 2}) == (True, False)
    assert judge({"tool_calls": [{"function": call | {"arguments": '{"city": "oslo"}'}}]}) == (True, False)
    assert judge({"tool_calls": []}) == (False, False)
    config = generate.config_of(BOX, None)
    refusal = {"content": "I only know what you told me, and a little about myself."}
    assert not any(contains(pattern)(refusal)[1] for pattern, _ in box_small_talk(config))


# ==========================================================================================================
# tiny/train.py: how the checkpoint in the box is made
# ==========================================================================================================

def training() -> types.ModuleType:
    """tiny/train.py, which finds lessons.py beside itself."""
    if BOX not in sys.path:
        sys.path.insert(0, BOX)
    return importlib.import_module("train")


def box_weights(config: dict) -> dict[str, torch.Tensor]:
    """What is stored in the box, as the fp32 numbers that training has."""
    files = Reference(BOX).checkpoint
    return {name: torch.from_numpy(files.tensor(name, np.int64 if kind == "I64" else np.float32))
            for name, kind, _ in convert.parameters(config)}


def lesson(length: int, seed: int) -> torch.Tensor:
    """The first conversation of the data that has so many tokens, cut there: [1,length]."""
    batches = training().Batches(generate.load_tokenizer(BOX), seed)
    while len(ids := batches.one(length)[0]) < length:
        pass
    return torch.tensor([ids])


@pytest.mark.parametrize("topk", ["all rows", "real"])
def test_training_forward_is_the_engines(topk):
    """Training's own forward pass, its MTP block too. With the real top-k a tie may be broken in two ways."""
    ids, train = lesson(400, 1), training()
    config = convert.read_config(BOX) | ({"index_topk": 400} if topk == "all rows" else {})
    net = train.Net(config, box_weights(config), torch.float32, real_topk=True)
    net.begin()
    with torch.no_grad():
        streams, _ = net.trunk(ids)
        ours = net.head(streams[0].unsqueeze(1))
        drafts = net.head(net.mtp(streams[:, :-1], ids[:, 1:])[0].unsqueeze(1), "mtp.0.")
    engine = engine_of(config)
    streams = []
    engine.layers[-1].register_forward_hook(lambda layer, args, out: streams.append(out.clone()))
    theirs = torch.cat([engine(ids[:, p:p + 1], p) for p in range(400)])
    theirs_drafts = torch.cat([engine.mtp[0](streams[p], p, ids[:, p + 1:p + 2]) for p in range(399)])
    for name, a, b in (("training's forward pass", ours, theirs), ("its MTP block", drafts, theirs_drafts)):
        errors = [relative_error(x, y) for x, y in zip(a, b)]
        if topk == "all rows":
            # trained attention is sharper than random: the same rounding shows more
            proof(f"{name}, stored weights", "the engine, token by token", "fp32", max(errors), 5 * EXACT,
                  "what both take from convert.py and config.json")
        else:
            assert np.quantile(errors, 0.9) < 5 * EXACT, f"{name}: {np.quantile(errors, 0.9):.1e}"


def engine_of(config: dict) -> model.Transformer:
    """The box's weights under another config, exact."""
    folder = os.path.join(work_folder(), f"box-topk-{config['index_topk']}")
    os.makedirs(folder, exist_ok=True)
    shutil.copy(os.path.join(BOX, "model.safetensors"), folder)
    Path(folder, "config.json").write_text(json.dumps(config))
    return load(folder)


def test_training_rounds_as_the_engine():
    """Bit for bit: activations, KV, index keys, and weights against what is stored."""
    train, rng = training(), torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=rng) * torch.exp2(torch.randint(-9, 9, (64, 1), generator=rng))
    x[0], x[1, :128] = 0, 1e-6
    for block in (64, 128):
        ours = kernel.act_quant(x.clone(), block, "ue8m0", torch.float8_e8m0fnu, True)
        assert torch.equal(train.fp8(x, block), ours)
    assert torch.equal(train.fp4(x), kernel.fp4_act_quant(x.clone(), 32, True))
    config = convert.read_config(BOX)
    shapes = {name: shape for name, _, shape in convert.parameters(config)}
    weights = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    tensors = train.stored(config, weights)
    net = train.Net(config, weights, torch.float32, rounding=("weights",))
    net.begin()
    for name, tensor in tensors.items():
        if net.kinds.get(name) in ("linear", "expert"):
            scale = tensors[convert.scale_of(name)]
            if tensor.dtype == torch.int8:
                tensor = tensor.view(torch.float4_e2m1fn_x2)
            assert torch.equal(kernel.weight_dequant(tensor, scale).float(), net.cast[name]), name


def test_tokenizer_is_made_again():
    """tokenizer.json is what train.py makes; ' word' is cut as 'word' is; any text comes back."""
    train, path = training(), os.path.join(BOX, "tokenizer.json")
    made = train.make_tokenizer(convert.read_config(BOX)["vocab_size"])
    assert json.loads(made.to_str()) == json.loads(Path(path).read_text())
    for word in ("harbor", "Oslo", "xylophone", "Quetzalcoatl"):
        plain, spaced = made.encode(word).tokens, made.encode(" " + word).tokens
        assert [token.replace("Ġ", "") for token in spaced] == plain
    text = "naïve 你好 \t <b>  {\"a\": [1, 23.5]}\r\n"
    assert made.decode(made.encode(text).ids) == text


def test_lessons_are_what_the_parser_reads():
    """Every answer in them comes back from its own text; the same seed gives the same conversations."""
    lessons = training().lessons
    first, second = random.Random(7), random.Random(7)
    calls = 0
    for i in range(300):
        messages, mode = lessons.conversation(first, (256, 640, 1664)[i % 3])
        assert (messages, mode) == lessons.conversation(second, (256, 640, 1664)[i % 3])
        answer = messages.pop()
        prompt = encode_messages(messages, mode)
        text = encode_messages(messages + [answer], mode).removeprefix(prompt)
        read = parse_message_from_completion_text(text, mode)
        assert read["error"] is None and read["content"] == answer["content"]
        thought = answer["reasoning_content"] if mode == "thinking" else ""
        assert (read["reasoning_content"] or "") == thought
        for ours, theirs in zip(read["tool_calls"], answer.get("tool_calls", []), strict=True):
            calls += 1
            assert ours["function"]["name"] == theirs["function"]["name"]
            assert json.loads(ours["function"]["arguments"]) == json.loads(theirs["function"]["arguments"])
    assert calls > 30


def test_lessons_are_not_the_evaluation():
    """Its statements, filler and unusual requests occur in no lesson; plain ones ("The ... is ...") may."""
    lessons, rng = training().lessons, random.Random(7)
    told = [message["content"] for i in range(1500)
            for message in lessons.conversation(rng, (256, 640)[i % 2])[0] if message["role"] == "user"]
    sentences = "\n".join(sentence for text in told for sentence in re.split(r"(?<=[.?!])\s+|\n", text))

    def taught(templates):
        parts = ([re.escape(part) for part in re.split(r"\{\w+\}", template)] for template in templates)
        return [re.search("^" + r"[\w '.,-]{1,60}".join(part) + "$", sentences, re.M) for part in parts]
    assert not any(taught(BOX_FILLER + BOX_STRANGE_REQUESTS))
    assert sum(map(bool, taught(BOX_STATEMENTS))) <= 1
    assert sum(map(bool, taught(BOX_ANYTHING_ELSE))) <= 2


def test_training_goes_on_where_it_stopped(tmp_path):
    """Stopped after a step and started again: the same weights as at one go, and a folder that runs."""
    train = training()
    stages = [("short", 1, (96,), 0, (), False), ("stored", 1, (96,), 1, train.STORED, True),
              ("mtp", 1, (96,), 0, (), True)]
    train.run(str(tmp_path / "whole"), stages, keep=1)
    train.run(str(tmp_path / "broken"), stages, keep=1, steps=1)
    early = torch.load(tmp_path / "broken" / "state.pt")
    train.run(str(tmp_path / "broken"), stages, keep=1)
    whole, broken = (torch.load(tmp_path / name / "state.pt") for name in ("whole", "broken"))
    assert (early["step"], broken["step"], whole["step"]) == (1, 3, 3)
    for name, w in whole["weights"].items():
        assert torch.equal(w, broken["weights"][name]), name
    for name in ("embed.weight", "layers.0.attn.wq_b.weight", "mtp.0.attn.wq_b.weight"):
        assert not torch.equal(whole["weights"][name], early["weights"][name]), name
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]
    engine, tokenizer = generate.load_model(str(tmp_path / "whole"))
    prompt = encode_prompt(tokenizer, encode_messages([{"role": "user", "content": "hello"}], "chat"))
    answer = generate.generate(engine, [prompt], 4, 1, temperature=0)[0]
    assert answer and max(answer) < tokenizer.get_vocab_size()


# ==========================================================================================================
# The Triton kernels
# ==========================================================================================================
# The oracle of each kernel is its fp32 fallback, which is proven above against brute force: agreement of two
# halves of kernel.py. The same checks run interpreted, in a process of their own, and on a GPU.

E8M0 = torch.float8_e8m0fnu
CUDA = torch.cuda.is_available()


# ---- kernel against fallback, on a CPU in the interpreter or on a GPU

CHECKS: dict[str, typing.Callable] = {}

# Two fp32 sums in different orders, of some hundred terms each.
SUM = 2e-6
# A rounding to bf16 that falls to the other side is 2^-8 of the value; softmax weights and o have one each.
BF16 = 2 ** -7


def check(function):
    """Registers a function(device) that yields (case, error, tolerance)."""
    CHECKS[function.__name__.removeprefix("check_")] = function
    return function


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def different(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many numbers differ in a bit. NaN equals NaN."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    same = ours.view(integer) == theirs.view(integer)
    if ours.dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        same |= ours.float().isnan() & theirs.float().isnan()
    return int((~same).sum())


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """relative_error; infinite where one is not finite and the other is."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    finite = theirs.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return float("inf")
    ours, theirs = ours.where(finite, 0), theirs.where(finite, 0)
    return relative_error(ours, theirs) if theirs.any() else float(ours.abs().max())


def far_rows(n: int, device) -> torch.Tensor:
    """Three rows [3, n] 2^30 elements apart, the last beyond int32, in memory that is hardly touched."""
    return torch.empty(2 ** 31 + n, dtype=torch.bfloat16, device=device).as_strided((3, n), (2 ** 30, 1))


@check
def check_act_quant(device):
    for block, fmt in ((64, "ue8m0"), (128, "ue8m0"), (128, None)):
        x = torch.from_numpy(rounding_inputs(block, E4M3_TABLE[:127], block)).to(device)
        x[5, 3] = torch.nan
        for dtype in (torch.float32, torch.bfloat16):
            for scale_dtype in (torch.float32, E8M0)[:2 if fmt else 1]:
                y, s = kernel.act_quant(x.to(dtype), block, fmt, scale_dtype)
                y_ref, s_ref = kernel.act_quant_ref(x.to(dtype), block, fmt, scale_dtype)
                yield f"{block} {fmt} {dtype} {scale_dtype}", different(y, y_ref) + different(s, s_ref), 0
            part = torch.randn(2, 3, 4 * block + 64, generator=generator(0)).to(device, dtype)
            part[..., :-64] *= x[-6:].view(2, 3, -1)
            whole, expected = part.clone(), part.clone()
            kernel.act_quant(whole[..., :-64], block, fmt, inplace=True)
            kernel.act_quant_ref(expected[..., :-64], block, fmt, inplace=True)
            yield f"{block} {fmt} {dtype}, a slice in place", different(whole, expected), 0
    x = far_rows(128, device)
    x[:] = torch.randn(3, 128, generator=generator(1))
    expected = kernel.act_quant_ref(x.clone(), 64, "ue8m0", E8M0, True)
    yield "a row 2^31 elements on", different(kernel.act_quant(x, 64, "ue8m0", E8M0, True), expected), 0
    empty, _ = kernel.act_quant(torch.empty(0, 128, device=device))
    yield "no rows", empty.numel(), 0


@check
def check_fp4_act_quant(device):
    x = torch.from_numpy(rounding_inputs(32, E2M1_TABLE[:8], 3)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        y, s = kernel.fp4_act_quant(x.to(dtype))
        y_ref, s_ref = kernel.fp4_act_quant_ref(x.to(dtype))
        yield f"{dtype}", different(y, y_ref) + different(s, s_ref), 0
        whole = torch.randn(3, 5, 320, generator=generator(0)).to(device, dtype)
        whole[1, 2, 40] = torch.nan
        expected = whole.clone()
        kernel.fp4_act_quant(whole[..., :-64], 32, True)
        kernel.fp4_act_quant_ref(expected[..., :-64], 32, True)
        yield f"{dtype}, a slice in place, with a NaN", different(whole, expected), 0
    x = far_rows(64, device)
    x[:] = torch.randn(3, 64, generator=generator(1))
    expected = kernel.fp4_act_quant_ref(x.clone(), 32, True)
    yield "a row 2^31 elements on", different(kernel.fp4_act_quant(x, 32, True), expected), 0


def random_weight(packed: bool, n: int, k: int, device, rng: torch.Generator, middle: int = 124):
    """A quantised weight [n, k] and its scales."""
    raw = torch.randint(0, 256, (n, k // 2 if packed else k), generator=rng, dtype=torch.uint8)
    if packed:
        s = torch.randint(middle, middle + 4, (n, k // 32), generator=rng, dtype=torch.uint8)
        return raw.to(device).view(torch.float4_e2m1fn_x2), s.to(device).view(E8M0)
    raw[(raw & 127) == 127] = 0
    s = torch.randint(middle, middle + 4, (-(-n // 128), k // 128), generator=rng, dtype=torch.uint8)
    return raw.to(device).view(torch.float8_e4m3fn), s.to(device).view(E8M0)


def gemm_cases(name: str, device):
    """M around the tiles, N no multiple of them, K split or not, scales of both kinds, extreme scales."""
    gemm, reference, packed = getattr(kernel, name), getattr(kernel, f"{name}_ref"), name == "fp4_gemm"
    for m, n, k, fmt in ((1, 72, 1664, "ue8m0"), (3, 320, 384, None), (17, 72, 384, "ue8m0"),
                         (65, 200, 256, "ue8m0"), (65, 136, 256, None), (0, 64, 128, "ue8m0")):
        rng = generator(m + k)
        x = torch.randn(m, k, generator=rng).to(device)
        a, a_s = kernel.act_quant_ref(x, 128, fmt, E8M0 if fmt else torch.float32)
        b, b_s = random_weight(packed, n, k, device, rng)
        ours = gemm(a, a_s, b, b_s)
        assert ours.shape == (m, n)
        if m:
            yield f"{m} x {n} x {k}, {a_s.dtype}", error_of(ours, reference(a, a_s, b, b_s)), SUM
    with model.run_mode(model.Mode(torch.bfloat16, (), "ue8m0")):
        a, a_s = kernel.act_quant_ref(torch.randn(2, 3, 256, generator=rng).to(device), 128, "ue8m0", E8M0)
        b, b_s = random_weight(packed, 96, 256, device, rng)
        yield "bf16 out, [2,3,k]", error_of(gemm(a, a_s, b, b_s), reference(a, a_s, b, b_s)), BF16
        if not packed:
            yield "F32 weight scales", error_of(gemm(a, a_s, b, b_s.float()), reference(a, a_s, b, b_s)), BF16
    # Extreme weight scales, against them the activation's. tl.dot_scaled applies the one before the other, so
    # the numbers are few and small: times 2^127 their sums stay finite.
    for byte, against in ((0, 227), (1, 227), (254, 27)):
        for m in (3, 65):
            a = torch.randint(0, 256, (m, 256), generator=rng, dtype=torch.uint8) & 0x83
            a[:, 8:] = 0
            a = a.to(device).view(torch.float8_e4m3fn)
            a_s = torch.full((m, 2), against, dtype=torch.uint8, device=device).view(E8M0)
            b, b_s = random_weight(packed, 96, 256, device, rng)
            b = (b.view(torch.uint8) & (0xBB if packed else 0xBF)).view(b.dtype)
            b_s = torch.full_like(b_s.view(torch.uint8), byte).view(E8M0)
            yield f"scale byte {byte}, M {m}", error_of(gemm(a, a_s, b, b_s), reference(a, a_s, b, b_s)), SUM


@check
def check_fp8_gemm(device):
    yield from gemm_cases("fp8_gemm", device)


@check
def check_fp4_gemm(device):
    yield from gemm_cases("fp4_gemm", device)


@check
def check_sparse_attn(device):
    """Heads and keys around the tiles; rows without a key, with a single one, with one key many times."""
    for h, d, topk, m in ((1, 128, 1, 2), (8, 128, 7, 2), (16, 512, 70, 2), (64, 128, 333, 1),
                          (128, 64, 40, 1), (4, 208, 130, 3), (1, 64, 8320, 1)):
        rng = generator(topk)
        cache = torch.randn(2, 500, d, generator=rng).to(device, torch.bfloat16)
        kv = cache[:, :400]             # as the model's: batches lie further apart than their rows take
        q = torch.randn(2, m, h, d, generator=rng).to(device, torch.bfloat16)
        sink = torch.randn(h, generator=rng).to(device)
        idxs = torch.randint(-1, 400, (2, m, topk), generator=rng, dtype=torch.int32).to(device)
        idxs[0, 0] = -1
        idxs[1, -1] = -1
        idxs[1, -1, topk // 2] = 7
        if m > 2:
            idxs[1, 0] = 9
        expected = kernel.sparse_attn_ref(q, kv, sink, idxs, d ** -0.5)
        for keys in (32, 10 ** 9):      # split over keys, and not
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernel, "SPLIT_KEYS", keys)
                patch.setattr(kernel, "processors", lambda device: 64)
                ours = kernel.sparse_attn(q, kv, sink, idxs, d ** -0.5)
            what = f"h {h}, d {d}, topk {topk}{', split' if keys == 32 and topk > 32 else ''}"
            yield what, error_of(ours, expected), BF16
            yield what + ", row without keys", float(ours[0, 0].abs().max()), 0
    far = far_rows(128, device)
    far[:] = torch.randn(3, 128, generator=rng)
    q, idxs = q.new_ones(3, 1, 1, 128), torch.zeros(3, 1, 2, dtype=torch.int32, device=device)
    for what, kv in (("batch", far.unsqueeze(1)), ("row", far.expand(3, 3, 128))):
        idxs[..., 1] = kv.size(1) - 1
        ours, theirs = (f(q, kv, sink[:1], idxs, 0.1) for f in (kernel.sparse_attn, kernel.sparse_attn_ref))
        yield f"a {what} 2^31 elements on", error_of(ours, theirs), BF16


@check
def check_index_score(device):
    """Against the fallback in fp32: in bf16 it rounds each head's score, which the kernel does not."""
    for b, m, h, d, rows in ((1, 1, 64, 128, 100), (2, 17, 16, 128, 67), (2, 3, 1, 64, 5), (1, 2, 4, 64, 64)):
        rng = generator(rows)
        q, k = torch.randn(b, m, h, d, generator=rng), torch.randn(b, 2 * rows, d, generator=rng)
        q, k = (kernel.fp4_act_quant_ref(x, 32, True).to(device, torch.bfloat16) for x in (q, k))
        k = k[:, :rows]                 # as the model's: batches lie further apart than their rows take
        weights = torch.randn(b, m, h, generator=rng).to(device, torch.bfloat16)
        visible = torch.arange(rows - m, rows, device=device).unsqueeze(1)
        ours = kernel.index_score(q, k, weights, visible)
        theirs = kernel.index_score_ref(q.float(), k.float(), weights.float(), visible)
        yield f"{m} queries, {h} heads, {rows} rows", error_of(ours, theirs.bfloat16()), BF16
        yield "rows that a query may not see", int((ours.isneginf() != theirs.isneginf()).sum()), 0


@check
def check_hc_split_sinkhorn(device):
    for hc, iters, tokens in ((4, 20, 1), (4, 20, 19), (4, 1, 3), (2, 3, 8)):
        rng = generator(tokens)
        mix = (2 + hc) * hc
        mixes = (3 * torch.randn(1, tokens, mix, generator=rng)).to(device)
        scale, base = (torch.randn(n, generator=rng).to(device) for n in (3, mix))
        ours = kernel.hc_split_sinkhorn(mixes, scale, base, hc, iters, 1e-6)
        theirs = kernel.hc_split_sinkhorn_ref(mixes, scale, base, hc, iters, 1e-6)
        yield f"{tokens} tokens, {hc} streams, {iters} iterations", max(map(error_of, ours, theirs)), SUM


@check
def check_hadamard_transform(device):
    for rows, n in ((1, 128), (19, 128), (3, 32)):
        x = torch.randn(rows, n + 64, generator=generator(rows)).to(device)[:, :n]
        for x, tolerance in ((x, SUM), (x.bfloat16(), BF16)):
            ours = kernel.hadamard_transform(x, n ** -0.5)
            theirs = kernel.hadamard_transform_ref(x, n ** -0.5)
            yield f"{rows} x {n}, {x.dtype}", error_of(ours, theirs), tolerance


@functools.cache
def expert_modules(packed: bool, n: int, device) -> list[model.Expert]:
    """Experts of 256 -> 128 -> 256 with quantised weights, as loading leaves them."""
    rng, experts = generator(n), []
    for _ in range(n):
        expert = model.Expert(256, 128, swiglu_limit=2.0)
        for linear in (expert.w1, expert.w2, expert.w3):
            weight, scale = random_weight(packed, linear.out_features, linear.in_features, device, rng,
                                          121 if packed else 117)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            linear.scale = torch.nn.Parameter(scale, requires_grad=False)
        experts.append(expert)
    return experts


@check
def check_routed_experts(device):
    """Against MoE.forward's loop: a tile per pick, tiles of sorted picks, a rank with part of the experts."""
    for packed, fmt, tokens, absent in ((True, "ue8m0", 1, 0), (True, None, 3, 2), (False, "ue8m0", 5, 2),
                                        (True, "ue8m0", 70, 2), (True, None, 35, 0), (False, "ue8m0", 35, 2)):
        experts = [None] * absent + expert_modules(packed, 5, device) + [None] * absent
        table = kernel.expert_table(experts, device)
        rng = generator(tokens)
        x = torch.randn(tokens, 256, generator=rng).to(device)
        indices = torch.rand(tokens, 5 + 2 * absent, generator=rng).argsort(dim=-1)[:, :2].to(device)
        weights = torch.rand(tokens, 2, generator=rng).to(device)
        for dtype, tolerance in ((torch.float32, EXPERTS), (torch.bfloat16, EXPERTS_BF16)):
            with model.run_mode(model.Mode(dtype, model.ROUND_TRIPS, fmt)):
                ours = kernel.routed_experts(x.to(dtype), weights, indices, table, fmt)
                theirs = torch.zeros_like(ours)
                for i in indices.unique().tolist():
                    if experts[i] is not None:
                        idx, top = torch.where(indices == i)
                        theirs[idx] += experts[i](x[idx].to(dtype), weights[idx, top, None])
            case = f"{'fp4' if packed else 'fp8'} {fmt} {dtype}, {tokens} tokens"
            yield case, error_of(ours, theirs), tolerance


# Between w1, w3 and w2 the values are rounded to e4m3. One in ten thousand falls to the other side because of
# the order of a sum, and is 1/16 off; it is one of 128 terms of an output.
EXPERTS = 1e-2
# ... and in bf16 the products are rounded, too.
EXPERTS_BF16 = 2e-2


def decode_logits(engine, prompt: int, steps: int, device) -> torch.Tensor:
    """Logits after a prompt, and after each of some more tokens."""
    tokens = random_tokens(prompt + steps).to(device)
    logits = [engine(tokens[:, :prompt])]
    return torch.cat(logits + [engine(tokens[:, p:p + 1], p) for p in range(prompt, prompt + steps)])


def engine_on(device, dtype=torch.bfloat16) -> model.Transformer:
    engine = load(fixture("fp8"), dtype, model.ROUND_TRIPS).to(device)
    engine.reset_caches(device)
    return engine


@contextlib.contextmanager
def fallbacks():
    """What the wrappers do where there is no Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "TRITON_DEVICE", None)
        yield


@check
def check_forward(device):
    """The whole tiny model, bf16, round trips on: FP8 and FP4 weights, a prompt and decode steps. Each layer
    from the same input, as closely as one layer allows; then the logits, as closely as six layers do."""
    engine, calls = engine_on(device), []
    hooks = [layer.register_forward_hook(lambda *call: calls.append(call)) for layer in engine.layers]
    with fallbacks():
        engine.reset_caches(device)
        theirs = decode_logits(engine, 10, 2, device)
    for hook in hooks:
        hook.remove()
    engine.reset_caches(device)
    with model.run_mode(engine.mode):
        for layer, arguments, expected in calls:
            yield f"layer {layer.layer_id} at {arguments[1]}", error_of(layer(*arguments), expected), LAYER
    engine.reset_caches(device)
    kernel.launches.clear()
    ours = decode_logits(engine, 10, 2, device)
    assert kernel.launches["experts_up_kernel"] == 3 * len(engine.layers), "the kernels ran"
    for step, (a, b) in enumerate(zip(ours, theirs)):
        yield f"logits, step {step}", error_of(a, b), LOGITS
    repeated = sum(torch.equal(ours[i], ours[i + 1]) for i in range(len(ours) - 1))
    yield "steps that repeat the one before", repeated, 0


# A sum in another order moves one of some ten thousand roundings to its neighbour: in e4m3 1/16 of one of the
# 128 or 256 inputs of a product, in bf16 2^-8 of an output.
LAYER = 2 ** -6
# Over six layers such flips grow to 10% of the logits (test_round_trips_layer_by_layer); bf16 alone makes 5%.
LOGITS = 0.15


def run_checks(device) -> dict[str, list]:
    found = {}
    for name, function in CHECKS.items():
        started = time.time()
        kernel.launches.clear()
        with torch.inference_mode():
            found[name] = list(function(device))
        assert kernel.launches, f"{name}: no kernel ran"
        print(f"{name}: {len(found[name])} cases, {time.time() - started:.1f} s", file=sys.stderr, flush=True)
    return found


@functools.cache
def interpreted() -> dict[str, list]:
    """run_checks in a process of its own: whether kernels are interpreted is decided as they are imported."""
    env = os.environ | {"KERNEL_BACKEND": "triton", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "interpret"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "kernel: triton on CPU, interpreted" in done.stderr
    return json.loads(done.stdout)


needs_triton = pytest.mark.skipif(kernel.triton is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_interpreted(name):
    """Oracle: the kernel's own fallback."""
    cases = interpreted()[name]
    assert cases
    for case, error, tolerance in cases:
        assert error <= tolerance, f"{case}: {error:.2e} is more than {tolerance:.0e}"


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_on_the_gpu(name):
    with torch.inference_mode():
        for case, error, tolerance in CHECKS[name]("cuda"):
            assert error <= tolerance, f"{case}: {error:.2e}"


# ---- which backend runs

@needs_triton
@pytest.mark.parametrize("wish, capability, expected, said", [
    (None, None, None, ""), ("torch", None, None, "kernel: torch on CPU\n"),
    ("compile", None, None, "kernel: torch on CPU, compiled\n"),
    (None, (12, 0), "cuda", "kernel: triton on Card, capability 12.0\n"),
    (None, (12, 1), "cuda", "kernel: triton on Card, capability 12.1\n"),
    (None, (8, 9), "cuda", "kernel: triton on Card, capability 8.9\n"),
    (None, (8, 0), None, "kernel: torch on Card, capability 8.0\n"),
    ("torch", (12, 0), None, "kernel: torch on Card, capability 12.0\n"),
])
def test_backend(monkeypatch, capsys, wish, capability, expected, said):
    monkeypatch.delenv("KERNEL_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if wish:
        monkeypatch.setenv("KERNEL_BACKEND", wish)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert kernel.choose_backend() == expected
    assert capsys.readouterr().err == said


@needs_triton
def test_backend_that_is_refused(monkeypatch):
    monkeypatch.setenv("KERNEL_BACKEND", "cuda")
    with pytest.raises(ValueError, match="torch, triton or compile"):
        kernel.choose_backend()
    monkeypatch.setenv("KERNEL_BACKEND", "compile")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a C.. compiler"):
        kernel.choose_backend()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.raises(ValueError, match="without a GPU"):
        kernel.choose_backend()
    monkeypatch.setenv("KERNEL_BACKEND", "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"):
        kernel.choose_backend()
    monkeypatch.setattr(kernel, "triton", None)
    with pytest.raises(ValueError, match="not installed"):
        kernel.choose_backend()


def test_without_triton():
    """kernel.py where `import triton` fails: silent, and the fallbacks compute."""
    code = ("import sys; sys.modules['triton'] = None\nimport torch, kernel\n"
            "assert kernel.TRITON_DEVICE is None\n"
            "kernel.act_quant(torch.ones(2, 128)); kernel.hadamard_transform(torch.ones(1, 128))")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    env.pop("KERNEL_BACKEND", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (CUDA or not done.stderr), done.stderr


# ---- sm120: compiling without a GPU

SHARED_LIMIT = 101_376      # bytes of shared memory that a block of sm_120 can have
OTHER_TARGETS = (89, 90, 100, 121)


class Build(typing.NamedTuple):
    """A kernel with a tile: its arguments' types in order, its constants, and the ceilings."""
    kernel: str
    tile: str
    types: str
    constants: dict
    warps: int = 4
    stages: int = 3
    registers: int = 64
    shared: int = SHARED_LIMIT
    mma: str = ""           # what every mma instruction must contain
    aligned: bool = True    # integers are multiples of 16, as Flash's sizes are


def builds() -> list[Build]:
    """Every kernel at Flash's shapes, with the tiles that the wrappers choose."""
    attention = "*bf16 *bf16 *fp32 *i32 *bf16 i32 i32 i64 i32 fp32"
    split = "*bf16 *bf16 *i32 *fp32 *fp32 *fp32 i32 i32 i32 i64 i32 fp32"
    index = "*bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i64 i32"
    eight, four = {"BLOCK": 128, "TILE": 8, "POWER_OF_TWO": True, "INPLACE": False}, {"BLOCK": 32, "TILE": 32}
    heads = {"H": 64, "D": 512, "BD": 512, "BI": 32}
    keys = {"H": 64, "D": 128, "BH": 64, "BD": 128, "BR": 64, "BQ": 16}
    bf16 = "bf16.bf16"
    return [
        Build("act_quant", "8 x 128", "*bf16 *fp8e4nv *u8 i32 i32 i32", eight),
        Build("act_quant", "fp32", "*fp32 *fp8e4nv *fp32 i32 i32 i32", eight | {"POWER_OF_TWO": False}),
        Build("act_quant", "in place", "*bf16 *bf16 *bf16 i32 i32 i32",
              eight | {"BLOCK": 64, "INPLACE": True}),
        Build("fp4_act_quant", "32 x 32", "*bf16 *u8 *u8 i32 i32 i32", four | {"INPLACE": False}),
        Build("fp4_act_quant", "in place", "*bf16 *bf16 *bf16 i32 i32 i32", four | {"INPLACE": True}),
        *gemm_builds(), *expert_builds(),
        Build("split_sum", "1024", "*fp32 *bf16 i32 i32", {"TILE": 1024}),
        Build("sparse_attn", "16 heads, 32 keys", attention, heads | {"BH": 16}, 8, 2, 128, 50_304, bf16),
        Build("sparse_attn", "32 heads, 32 keys", attention, heads | {"BH": 32}, 8, 2, 192, 69_632, bf16),
        Build("sparse_attn_split", "16 heads, 32 keys", split, heads | {"BH": 16}, 8, 2, 128, 50_304, bf16),
        Build("sparse_attn_combine", "512", "*fp32 *fp32 *fp32 *fp32 *bf16 i32",
              {"H": 64, "D": 512, "BD": 512}),
        Build("index_score", "64 rows, 64 heads", index, keys, registers=128, mma=bf16),
        Build("hc_split_sinkhorn", "8 tokens", "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 fp32",
              {"HC": 4, "ITERS": 20, "TILE": 8}, 1),
        Build("hadamard_transform", "8 x 128", "*bf16 *bf16 i32 i32 fp32", {"N": 128, "LOG": 7, "TILE": 8}),
    ]


# by kernel.product's FORMAT
MMA = {"e4m3": "e4m3.e4m3", "bytes": "bf16.bf16", "words": "mxf8f6f4.block_scale"}


def gemm_builds() -> typing.Iterator[Build]:
    types = "*fp8e4nv *u8 {} *u8 {} i32 i32 i32 i32"
    small, large = {"BM": 16, "BN": 32}, {"BM": 64, "BN": 128}
    for tile, out in (("16x32x128", "*bf16"), ("16x32x128 split", "*fp32")):
        yield Build("fp8_gemm", tile, types.format("*fp8e4nv", out), small, 4, 4, 96, mma=MMA["e4m3"])
    yield Build("fp8_gemm", "64x128x128", types.format("*fp8e4nv", "*bf16"), large, 8, 3, 176,
                mma=MMA["e4m3"])
    for tile, form, constants, warps, stages, most in (
            ("16x32x128 bytes", "bytes", small, 4, 4, 96), ("64x128x128 words", "words", large, 8, 3, 176),
            ("32x128x128 bytes", "bytes", {"BM": 32, "BN": 128}, 8, 3, 176)):
        weight = "*i32" if form == "words" else "*u8"
        yield Build("fp4_gemm", tile, types.format(weight, "*bf16"), constants | {"FORMAT": form}, warps,
                    stages, most, mma=MMA[form])


def expert_builds() -> typing.Iterator[Build]:
    up = "*fp8e4nv *u8 *fp32 *i64 *i64 *i64 *bf16 i32 i32 fp32 i32 i32 i32"
    down = "*fp8e4nv *u8 *i64 *i64 *i64 *bf16 i32 i32 i32 i32"
    for form, is_sorted in (("bytes", False), ("e4m3", False), ("words", True), ("bytes", True),
                            ("e4m3", True)):
        bm, bn, warps, stages, most = (32, 128, 8, 3, 176) if is_sorted else (16, 64, 4, 4, 96)
        tile = f"{bm}x{bn}x128 {form}{' sorted' if is_sorted else ''}"
        constants = {"BM": bm, "BN": bn, "FORMAT": form, "SORTED": is_sorted}
        for name, arguments in (("experts_up", up), ("experts_down", down)):
            yield Build(name, tile, arguments, constants, warps, stages, most, mma=MMA[form], aligned=False)


def compile_kernel(build: Build, target: int):
    """Triton's result for a target such as 120, and the seconds it took."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    function = getattr(kernel, build.kernel + "_kernel")
    types = iter(build.types.split())
    signature = {name: "constexpr" if name in build.constants else next(types) for name in function.arg_names}
    assert next(types, None) is None, f"{build.kernel}: too many types"
    # what the launcher would find: 16-byte pointers, and sizes that are multiples of 16
    varying = {"first_expert", "experts", "TOPK", *(function.do_not_specialize or ())}
    wide = {"N", "K"} if not build.aligned else set(function.arg_names) - varying
    attrs = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items())
             if kind.startswith("*") or kind in ("i32", "i64") and name in wide}
    started = time.time()
    source = ASTSource(function, signature, build.constants, attrs)
    options = {"num_warps": build.warps, "num_stages": build.stages}
    built = kernel.triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return built, time.time() - started


def resources(built, folder: str) -> dict:
    """Registers, stack and spills, as the wheel's own cuobjdump and ptxas report them."""
    tools = Path(kernel.triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
    cubin.write_bytes(built.asm["cubin"])
    ptx.write_text(built.asm["ptx"])
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    target = re.search(r"\.target (\w+)", built.asm["ptx"]).group(1)
    usage = run([tools / "cuobjdump", "-res-usage", cubin]).stdout
    said = run([tools / "ptxas-blackwell", "-v", "--gpu-name", target, ptx, "-o", os.devnull]).stderr
    return {"registers": int(re.search(r"REG:(\d+)", usage).group(1)),
            "spills": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
            "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
            "shared": built.metadata.shared,
            "mma": sorted(set(re.findall(r"mma\.sync\.\S+", built.asm["ptx"])))}


def complaints(build: Build, found: dict) -> list[str]:
    """Which ceilings a build for sm_120 breaks."""
    most = {"registers": build.registers, "shared": build.shared, "spills": 0, "stack": 0}
    said = [f"{name} {found[name]}" for name in most if found[name] > most[name]]
    if bool(build.mma) != bool(found["mma"]) or any(build.mma not in mma for mma in found["mma"]):
        said.append(f"multiplies with {found['mma']}, not {build.mma}")
    return said


def sm120() -> int:
    """Compiles everything, prints a table, returns 1 if a ceiling is broken."""
    if kernel.triton is None or os.environ.get("TRITON_INTERPRET") == "1":
        print("sm120 needs Triton, and TRITON_INTERPRET unset", file=sys.stderr)
        return 2
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        print("| kernel | tile | warps/stages | registers | spills | stack | shared | mma | seconds |")
        print("|---|---|---|---|---|---|---|---|---|")
        for build in builds():
            built, seconds = compile_kernel(build, 120)
            found = resources(built, folder)
            mma = re.sub(r"mma\.sync\.aligned\.|\.row\.col|\.scale_vec::1X", "", " ".join(found["mma"]))
            print(f"| {build.kernel} | {build.tile} | {build.warps}/{build.stages} | {found['registers']} | "
                  f"{found['spills']} | {found['stack']} | {found['shared']:,} | {mma or '-'} | "
                  f"{seconds:.1f} |", flush=True)
            bad += [f"{build.kernel} {build.tile}: {said}" for said in complaints(build, found)]
        for target in OTHER_TARGETS:
            seconds = sum(compile_kernel(build, target)[1] for build in builds())
            print(f"\nsm_{target}: all {len(builds())} compile, {seconds:.0f} s", flush=True)
    for line in bad:
        print("over the ceiling: " + line, file=sys.stderr)
    return bool(bad)


@needs_triton
def test_sm120():
    env = os.environ | {"KERNEL_BACKEND": "torch", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__, "sm120"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"sm_{target}: all" in done.stdout for target in OTHER_TARGETS)


# ---- kernels: on a GPU, times at Flash's shapes

# n, k
FLASH_LINEARS = {"wq_a": (1024, 4096), "wq_b": (32768, 1024), "wkv": (512, 4096), "wo_b": (4096, 8192)}


class Work(typing.NamedTuple):
    """One call at one of Flash's shapes, and the bytes that it must read and write at least."""
    kernel: str
    shape: str
    run: typing.Callable
    bytes: int


def random_activation(m: int, k: int, device):
    return kernel.act_quant(torch.randn(m, k, device=device, dtype=torch.bfloat16), 128, "ue8m0", E8M0)


def flash_gemms(m: int, device) -> typing.Iterator[Work]:
    rng = generator(0)
    for name, (n, k) in FLASH_LINEARS.items():
        a, b = random_activation(m, k, device), random_weight(False, n, k, device, rng)
        yield Work("fp8_gemm", f"{name}: {m} x {n} x {k}", lambda a=a, b=b: kernel.fp8_gemm(*a, *b),
                   n * k + m * k + 2 * m * n)
    n, k = 2048, 4096
    a, b = random_activation(m, k, device), random_weight(True, n, k, device, rng)
    yield Work("fp4_gemm", f"an expert's w1: {m} x {n} x {k}", lambda: kernel.fp4_gemm(*a, *b),
               n * k * 17 // 32 + m * k + 2 * m * n)


def flash_attention(m: int, device) -> typing.Iterator[Work]:
    """At 4,096 tokens: 128 rows of the window and 512 of 1,024 compressed ones, or all 32 of ratio 128."""
    new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, kv, sink = new(1, m, 64, 512), new(1, 1151 + 1024, 512), torch.zeros(64, device=device)
    for topk in (640, 160):
        idxs = torch.rand(m, kv.size(1), device=device).argsort(dim=-1)[None, :, :topk].int().contiguous()
        rows = min(m * topk, kv.size(1))
        yield Work("sparse_attn", f"{m} queries, 64 heads, {topk} rows",
                   lambda idxs=idxs: kernel.sparse_attn(q, kv, sink, idxs, 512 ** -0.5),
                   2 * (2 * q.numel() + rows * 512) + 4 * idxs.numel())
    q, k, weights = new(1, m, 64, 128), new(1, 1024, 128), new(1, m, 64)
    visible = torch.full((m, 1), 1024, device=device)
    yield Work("index_score", f"{m} queries, 64 heads, 1,024 rows",
               lambda: kernel.index_score(q, k, weights, visible), 2 * (q.numel() + k.numel() + m * 1024))


def flash_small(m: int, device) -> typing.Iterator[Work]:
    new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, kv, q = new(m, 4096), new(1, m, 512), new(1, m, 64, 128)
    mixes, three, base = (torch.randn(n, device=device) for n in ((1, m, 24), (3,), (24,)))
    yield Work("act_quant", f"{m} x 4,096", lambda: kernel.act_quant(x, 128, "ue8m0", E8M0), 3 * x.numel())
    yield Work("act_quant", f"{m} x 448 in place",
               lambda: kernel.act_quant(kv[..., :-64], 64, "ue8m0", E8M0, True), 4 * m * 448)
    yield Work("fp4_act_quant", f"{m} x 64 x 128 in place", lambda: kernel.fp4_act_quant(q, 32, True),
               4 * q.numel())
    yield Work("hadamard_transform", f"{m} x 64 x 128", lambda: kernel.hadamard_transform(q), 4 * q.numel())
    yield Work("hc_split_sinkhorn", f"{m} tokens", lambda: kernel.hc_split_sinkhorn(mixes, three, base),
               8 * mixes.numel())


def flash_experts(m: int, device) -> Work:
    """A layer's 256 experts, 6 for each token. They all have the same bytes, in memory of their own."""
    rng, inter, dim = generator(0), 2048, 4096
    w1, w2 = random_weight(True, inter, dim, device, rng), random_weight(True, dim, inter, device, rng)
    tensors = [t.clone() for _ in range(256) for weight in (w1, w2, w1) for t in weight]
    addresses = torch.tensor([t.data_ptr() for t in tensors], device=device).view(-1, 6)
    table = kernel.ExpertTable(addresses, tensors, 0, True, (inter, dim), 10.0)
    x = torch.randn(m, dim, device=device, dtype=torch.bfloat16)
    indices = torch.rand(m, 256, device=device).argsort(dim=-1)[:, :6].contiguous()
    weights = torch.rand(m, 6, device=device)
    used = indices.unique().numel()
    return Work("routed_experts", f"{m} tokens, 6 of 256 experts",
                lambda: kernel.routed_experts(x, weights, indices, table, "ue8m0"),
                used * 3 * inter * dim * 17 // 32)


def print_times(device: str):
    """Median times, beside the fallback's, and the bytes a second beside those of a copy on this GPU."""
    from triton.testing import do_bench
    seconds = functools.partial(do_bench, return_mode="median")
    big = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = 2 * big.numel() / seconds(lambda: big.clone()) / 1e6         # GB/s
    print(f"\nA copy moves {copy:,.0f} GB/s.\n")
    print("| kernel | shape | us | fallback, us | MB it must move | GB/s | of a copy's |")
    print("|---|---|---|---|---|---|---|")
    for m in (1, 1024):
        works = *flash_small(m, device), *flash_gemms(m, device), *flash_attention(m, device)
        for work in (*works, flash_experts(m, device)):
            ms, slow = seconds(work.run), "-"
            if work.kernel != "routed_experts":     # whose fallback is a loop in model.py
                with fallbacks():
                    slow = f"{1e3 * seconds(work.run):,.0f}"
            rate = work.bytes / ms / 1e6
            print(f"| {work.kernel} | {work.shape} | {1e3 * ms:,.1f} | {slow} | {work.bytes / 1e6:,.2f} | "
                  f"{rate:,.0f} | {rate / copy:.0%} |", flush=True)


def launches_of_a_token(device) -> collections.Counter:
    """How often a decode step of the tiny model starts each of our kernels."""
    engine, tokens = engine_on(device), random_tokens(21).to(device)
    engine(tokens[:, :20])
    kernel.launches.clear()
    engine(tokens[:, 20:], 20)
    return collections.Counter(kernel.launches)


def all_launches_of_a_token(device) -> int:
    """The same with torch's own kernels, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile
    engine, tokens = engine_on(device), random_tokens(22).to(device)
    engine(tokens[:, :20])
    engine(tokens[:, 20:21], 20)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine(tokens[:, 21:], 21)
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.device_type.name == "CUDA")


def kernels() -> int:
    """Checks and times on a GPU; exit code 1 if a check fails, 2 without a GPU."""
    if not CUDA or kernel.TRITON_DEVICE != "cuda":
        print("kernels needs a CUDA GPU of capability 8.9 or more, and Triton; none here", file=sys.stderr)
        return 2
    bad = 0
    print("| kernel | cases | largest error | tolerance |\n|---|---|---|---|")
    for name, cases in run_checks("cuda").items():
        _, errors, tolerances = zip(*cases)
        print(f"| {name} | {len(cases)} | {max(errors):.1e} | {max(tolerances):.1e} |")
        for case, error, tolerance in cases:
            if not error <= tolerance:
                bad += 1
                print(f"{name}, {case}: {error:.2e} is more than {tolerance:.0e}", file=sys.stderr)
    print_times("cuda")
    ours = launches_of_a_token("cuda")
    print(f"\nA decoded token of the tiny model (6 layers): {ours.total()} launches of these kernels, "
          f"{all_launches_of_a_token('cuda')} in all.")
    for name, count in ours.most_common():
        print(f"  {count:4} {name}")
    return int(bad > 0)


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_kernels_command_without_a_gpu(capsys):
    assert kernels() == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_decode_step_as_a_cuda_graph():
    """A step never waits for the GPU: it can be captured, and replayed for another token at its position."""
    engine, tokens = engine_on("cuda"), random_tokens(22).cuda()
    engine(tokens[:, :20])
    state = engine.snapshot()
    token = tokens[:, 20:21].clone()
    engine(token, 20)               # compiles, and fills what is cached
    engine.restore(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = engine(token, 20)
    for other in (tokens[:, 20:21], tokens[:, 21:22]):
        engine.restore(state)
        expected = engine(other, 20)
        engine.restore(state)
        token.copy_(other)
        graph.replay()
        assert torch.equal(logits, expected)


# ==========================================================================================================
# bench: speed beside transformers
# ==========================================================================================================

BENCH = SMALL | {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "n_routed_experts": 16,
    "moe_intermediate_size": 512, "q_lora_rank": 512, "o_lora_rank": 256, "vocab_size": 4096,
    "index_topk": 128, "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0], "swiglu_limit": 10.0}


def seconds(prefill, step, n: int = 512, steps: int = 64) -> tuple[float, float]:
    """One prompt of n tokens, then so many single ones."""
    start = time.perf_counter()
    prefill(n)
    middle = time.perf_counter()
    for p in range(n, n + steps):
        step(p)
    return middle - start, time.perf_counter() - middle


@torch.inference_mode()
def bench_expert(n: int = 2048, k: int = 4096, rounds: int = 3):
    """One expert's w1 in each stored format: the product alone, the formats in turn, medians.

    24 weights of each, one after the other: 0.4 GB of bf16, more than most caches hold."""
    rng, experts = generator(0), 24
    plain = torch.randn(n, k, generator=rng).bfloat16()
    fp8, fp4 = (random_weight(packed, n, k, "cpu", rng) for packed in (False, True))
    weights = {"bf16, mv": [(plain.clone(),) for _ in range(experts)]}
    weights["bf16, linear"] = weights["bf16, mv"]
    for name, stored in (("fp8", fp8), ("fp4", fp4)):
        weights[name] = [tuple(t.clone() for t in stored) for _ in range(experts)]
    print(f"One expert's w1, [{n}, {k}], ms; beside it the time in that of bf16's faster product\n")
    print("| tokens | bf16, mv | bf16, linear | fp8 | | fp4 | |\n|---|---|---|---|---|---|---|")
    for m in (1, 2, 8, 64, 512):
        x, (a, a_s) = torch.randn(m, k, dtype=torch.bfloat16), random_activation(m, k, "cpu")
        runs = {"bf16, mv": lambda w: kernel.matrix_vector(w, x[0]),
                "bf16, linear": lambda w: torch.nn.functional.linear(x, w),
                "fp8": lambda *w: kernel.fp8_gemm(a, a_s, *w), "fp4": lambda *w: kernel.fp4_gemm(a, a_s, *w)}
        if m > 1:
            del runs["bf16, mv"]
        times = {name: [] for name in runs}
        for i in range(1 + rounds * experts if m <= 8 else 1 + experts):    # the first warms up
            for name, run in runs.items():
                start = time.perf_counter()
                run(*weights[name][i % experts])
                times[name].append(1e3 * (time.perf_counter() - start))
        ms = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        least = min(time for name, time in ms.items() if name.startswith("bf16"))
        mv = f"{ms['bf16, mv']:.2f}" if m == 1 else "-"
        print(f"| {m} | {mv} | {ms['bf16, linear']:.2f} | {ms['fp8']:.2f} | {ms['fp8'] / least:.1f} x | "
              f"{ms['fp4']:.2f} | {ms['fp4'] / least:.1f} x |", flush=True)


@torch.inference_mode()
def bench_model(config: dict, kind: str, rounds: int):
    """A random checkpoint, in ours with all round trips, the two engines in turn; medians."""
    import transformers
    kernel.weight_cache.resize(round(1e9 * generate.CACHE_GB))      # as a chat has it
    folder = write_checkpoint(os.path.join(work_folder(), f"bench-{kind}"), config)
    ours = load(folder, torch.bfloat16, model.ROUND_TRIPS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens, cache = random_tokens(576, config["vocab_size"]), {}

    def their_prefill(n):
        cache["kv"] = theirs(tokens[:, :n], use_cache=True, logits_to_keep=1).past_key_values

    def their_step(p):
        theirs(tokens[:, p:p + 1], cache=cache["kv"], use_cache=True)

    times = {"ours": [], "transformers": []}
    for _ in range(rounds + 1):     # the first round warms up
        times["ours"].append(seconds(lambda n: ours(tokens[:, :n]), lambda p: ours(tokens[:, p:p + 1], p)))
        times["transformers"].append(seconds(their_prefill, their_step))
    print(f"\n{torch.get_num_threads()} threads, medians of {rounds} rounds in turn, transformers "
          f"{transformers.__version__}, random weights, {kind}\n")
    print("| | prefill of 512 | 64 tokens decoded |\n|---|---|---|")
    for who, rows in times.items():
        prefill, decode = (statistics.median(column) for column in zip(*rows[1:]))
        print(f"| {who} | {prefill:.2f} s | {decode:.2f} s |")
    pairs = list(zip(times["ours"][1:], times["transformers"][1:]))     # by round: a machine's speed drifts
    ratios = [statistics.median(theirs[i] / ours[i] for ours, theirs in pairs) for i in (0, 1)]
    print(f"| transformers takes | {ratios[0]:.2f} x | {ratios[1]:.2f} x |", flush=True)


def bench(rounds: int = 5):
    """Products of one expert in each format; then two models beside transformers: bf16, and fp8 and fp4.

    Of the second both read the same files; transformers makes bf16 weights of them when it loads."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count())
    with model.run_mode(model.Mode(torch.bfloat16, (), "ue8m0")):
        bench_expert()
    bench_model(BENCH, "bf16", rounds)
    bench_model(BENCH | QUANTISED, "fp8 and fp4", rounds)


# ==========================================================================================================
# full-size and long: what the published size and a long prompt cost, in memory and time
# ==========================================================================================================
# Memory is what Linux says of a process. Anonymous pages are its own: copies, caches, intermediate results.
# File-backed ones are the checkpoint's, mapped: the kernel may drop them and read them again. Each
# measurement is a process of its own, so that what one left in its allocator does not count for the next.

class Memory(typing.NamedTuple):
    """Resident bytes of a process; `most` is the largest anonymous + file-backed memory that it ever had."""
    anonymous: int
    file: int
    most: int


def memory(pid: typing.Union[int, str] = "self") -> Memory:
    """Of a running process; zeros where it has ended."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = (re.search(rf"{key}:\s*(\d+) kB", text) for key in ("RssAnon", "RssFile", "VmHWM"))
    return Memory(*(int(match[1]) * 1024 if match else 0 for match in found))


class Peak(threading.Thread):
    """Looks at a process's memory every 2 ms while a block runs: `peak` has the largest figures seen.

    Linux keeps such a mark of the sum only (VmHWM), in which mapped files would hide what was allocated."""
    def __init__(self, pid: typing.Union[int, str] = "self"):
        super().__init__(daemon=True)
        self.pid, self.ended = pid, threading.Event()
        self.peak = memory(pid)

    def look(self):
        self.peak = Memory(*map(max, self.peak, memory(self.pid)))

    def run(self):
        with contextlib.suppress(OSError):      # the process has ended
            while not self.ended.wait(0.002):
                self.look()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.join()


def fresh(measure: typing.Callable, *args, **keywords):
    """What a function of this file returns, called in a new process that has all cores.

    glibc keeps much of what is freed for later, up to 32 MB a block, and how much depends on the order of
    things: twice as much as is in use was seen. So blocks of 1 MB and more go back at once there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads,
                                 (os.cpu_count(),)) as pool:
            return pool.submit(measure, *args, **keywords).result()


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def table_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def table_head(*cells):
    table_row(*cells)
    print("|---" * len(cells) + "|", flush=True)


# ---- full-size

SHARD = 3_500_000_000       # bytes: makes 46 files of Flash, as published
ROUTES = ("norm.weight", "gate.weight")     # what decides, with some embeddings, which experts are routed to


def flash_of(layers: int) -> dict:
    """Flash's config with its first layers only."""
    return FLASH | {"num_hidden_layers": layers, "compress_ratios": [*FLASH["compress_ratios"][:layers], 0],
                    "num_hash_layers": min(layers, FLASH["num_hash_layers"])}


def in_shards(table: dict) -> list[convert.Layout]:
    """The tensors of an inventory in their order, in files of about SHARD bytes."""
    layout = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()}
    count = -(-convert.layout_bytes(layout) // SHARD)
    limit, size = convert.layout_bytes(layout) / count, 0
    shards = [{} for _ in range(count)]
    for name, entry in layout.items():
        shards[min(int(size / limit), count - 1)][name] = entry
        size += convert.stored_bytes(*entry)
    return shards


def written_rows(name: str, dtype: str, shape: tuple, config: dict, ids: list[int], rng: torch.Generator):
    """(row, tensor) of the few values that are not left 0."""
    if name.startswith("mtp."):
        return
    if name.endswith(ROUTES):
        yield 0, random_tensor(name, dtype, list(shape), config, rng)
    elif name == "embed.weight" or name.endswith("tid2eid"):
        for i in ids:
            yield i, random_tensor(name, dtype, [1, *shape[1:]], config, rng)


def write_sparse(folder: str, config: dict, ids: list[int]) -> tuple[int, int]:
    """A published checkpoint of zeros, in files with holes -> the number of files, their bytes on the disk.

    Not 0 is what decides which experts a token of `ids` is routed to. With weights of 0 each layer adds
    nothing to its input, so that a gate's scores are those of the token's embedding."""
    rng, weight_map = torch.Generator().manual_seed(0), {}
    shards = in_shards(convert.inventory(config))
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, layout in zip(files, shards):
        start, header = convert.layout_header(layout)
        with open(os.path.join(folder, file), "wb") as f:
            f.write(start)
            f.truncate(len(start) + convert.layout_bytes(layout))
            for name, (dtype, shape, offset) in header.items():
                for row, tensor in written_rows(name, dtype, shape, config, ids, rng):
                    f.seek(offset + row * (convert.stored_bytes(dtype, shape) // shape[0]))
                    f.write(tensor.contiguous().view(torch.uint8).numpy())
        weight_map |= dict.fromkeys(layout, file)
    index = {"metadata": {"total_size": sum(map(convert.layout_bytes, shards))}, "weight_map": weight_map}
    Path(folder, convert.INDEX).write_text(json.dumps(index))
    Path(folder, "config.json").write_text(json.dumps(config))
    return len(files), sum(os.stat(os.path.join(folder, file)).st_blocks * 512 for file in files)


def check_room(folder: str, needed: int):
    """ValueError where a folder cannot hold files with holes, or not `needed` bytes more."""
    hint = "set TMPDIR to a folder on another disk"
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()
    if kind == "tmpfs":
        raise ValueError(f"{folder} is in memory (tmpfs), where holes that are read take room: {hint}")
    with tempfile.NamedTemporaryFile(dir=folder) as f:
        os.truncate(f.name, 1 << 26)
        if os.stat(f.name).st_blocks * 512 > 1 << 20:
            raise ValueError(f"{folder} is on a file system without sparse files: {hint}")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"{folder} has {convert.readable(free)} free, and {convert.readable(needed)} are "
                         f"needed: {hint}, or take fewer --layers")


class Stage(typing.NamedTuple):
    """A step of a run: its time, the memory after it and the most in it, the experts touched so far."""
    name: str
    seconds: float
    after: Memory
    peak: Memory
    experts: int


def run_stages(folder: str, ids: list[int], prefill: int, expert_bytes: int, **options) -> list[Stage]:
    """load_model, then ids: a prompt of the first `prefill`, the others one by one. Prints as it goes."""
    stages, touched = [], set()

    def stage(name: str, run: typing.Callable):
        started = time.perf_counter()
        with Peak() as watch:
            result = run()
            took = time.perf_counter() - started
            watch.look()
        stages.append(Stage(name, took, memory(), watch.peak, len(touched)))
        after, peak = stages[-1].after, watch.peak
        table_row(name, f"{took:.1f} s", megabytes(after.anonymous), megabytes(peak.anonymous),
                  megabytes(after.file), f"{len(touched):,}", convert.readable(len(touched) * expert_bytes))
        return result

    stage("before loading", lambda: None)
    engine, _ = stage("load_model", lambda: generate.load_model(folder, **options))
    for i, layer in enumerate(engine.layers):
        layer.ffn.gate.register_forward_hook(lambda gate, inputs, output, i=i: touched.update(
            (i, expert) for expert in output[1].unique().tolist()))
    tokens = torch.tensor([ids])
    stage(f"prefill of {prefill}", lambda: engine(tokens[:, :prefill]))
    for p in range(prefill, len(ids)):
        stage(f"token {p - prefill + 1}", lambda: engine(tokens[:, p:p + 1], p))
    return stages


def run_conversion(folder: str, out: str, config: dict, ranks: int = 2) -> Stage:
    """convert.py, as its user starts it. (wait4's maxrss would begin with the memory of who started it.)"""
    started = time.perf_counter()
    process = subprocess.Popen([
        sys.executable, convert.__file__, "--hf-ckpt-path", folder, "--save-path", out, "--n-experts",
        str(config["n_routed_experts"]), "--model-parallel", str(ranks)])
    with Peak(process.pid) as watch:
        if process.wait():
            raise ChildProcessError(f"convert.py ended with exit code {process.returncode}")
    return Stage("conversion", time.perf_counter() - started, Memory(0, 0, 0), watch.peak, 0)


FULL_SIZE_BLIND = """\
It cannot see: real reads (a hole is a page of zeros at once, without a disk: with real files add the bytes of
the experts that a step is first to touch, at the disk's speed); what a cache of weights gains where text
repeats its experts (here each layer draws them at random for each token); values."""


def full_size(config: dict, prefill: int = 16, steps: int = 4, conversion: bool = False, **options) -> int:
    """Prints what loading, a prompt and single tokens take, or what converting takes; of zeros."""
    if prefill < 1 or steps < 0 or prefill + steps > config["vocab_size"]:
        raise ValueError("--prefill is 1 or more, --steps 0 or more")
    layout = {name: (e["dtype"], tuple(e["shape"])) for name, e in convert.inventory(config).items()}
    size, experts = convert.layout_bytes(layout), "layers.0.ffn.experts.0."
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        gates = sum(convert.stored_bytes(*layout[name]) for name in layout if name.endswith(ROUTES))
        check_room(folder, gates + (1 << 26) + conversion * int(size * 1.05))
        ids = list(range(prefill + steps))
        files, on_disk = write_sparse(folder, config, ids)
        print(f"{config['num_hidden_layers']} layers: {len(layout):,} tensors of {size:,} bytes in {files} "
              f"files, {convert.readable(on_disk)} of them on the disk; {os.cpu_count()} threads\n")
        if conversion:
            table_head("", "time", "most memory", "of it anonymous", "file-backed, at most")
            found = run_conversion(folder, os.path.join(folder, "converted"), config)
            table_row(found.name, f"{found.seconds:.1f} s", megabytes(found.peak.most),
                      megabytes(found.peak.anonymous), megabytes(found.peak.file))
            return 0
        table_head("", "time", "anonymous after", "most", "file-backed after", "experts touched",
                   "their bytes")
        one = sum(convert.stored_bytes(*layout[name]) for name in layout if name.startswith(experts))
        stages = fresh(run_stages, folder, ids, prefill, one, max_seq_len=4096, **options)
        print(f"\nMost anonymous memory: {megabytes(max(s.peak.anonymous for s in stages))}")
        print(FULL_SIZE_BLIND)
    return 0


# ---- long

# The indexer at its real size, one layer of each ratio, and little else. Quantised as what is published: for
# each new shape of a bf16 product oneDNN keeps code, some 50 KB, and plain experts have as many shapes as
# tokens are routed to them.
LONG = SMALL | QUANTISED | {
    "num_hidden_layers": 3, "num_hash_layers": 1, "head_dim": 512, "n_routed_experts": 4, "index_n_heads": 64,
    "index_topk": 512, "compress_ratios": [0, 4, 128, 0], "swiglu_limit": 10.0}
MILLION = 1 << 20
LONG_STEPS = 32             # single tokens after each prompt


class LongRun(typing.NamedTuple):
    """Seconds of a prefill and of one token after it (median); bytes above those after loading."""
    prefill: float
    token: float
    peak: int
    caches: int             # rows of the caches that were written


def cache_bytes(engine: model.Transformer, positions: int) -> int:
    """What one conversation of so many positions has written of the caches."""
    size = 0
    for layer in engine.layers:
        attn, ratio = layer.attn, layer.attn.compress_ratio
        rows = min(positions, attn.ring_size) + (positions // ratio if ratio else 0)
        size += rows * attn.head_dim * attn.kv_cache.itemsize
        if ratio == 4:
            size += positions // ratio * attn.indexer.head_dim * attn.indexer.kv_cache.itemsize
    return size


def load_quietly(folder: str, **options) -> model.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # there is no tokenizer
        return generate.load_model(folder, max_batch_size=1, **options)[0]


def run_long(folder: str, length: int, chunk: int, steps: int = LONG_STEPS) -> LongRun:
    """A prompt in chunks, then single tokens."""
    engine = load_quietly(folder, max_seq_len=length + steps)
    tokens = random_tokens(length + steps, engine.vocab_size)
    before, times = memory(), []
    with Peak() as watch:
        started = time.perf_counter()
        for at in range(0, length, chunk):
            engine(tokens[:, at:min(at + chunk, length)], at)
        prefill = time.perf_counter() - started
        for p in range(length, length + steps):
            started = time.perf_counter()
            engine(tokens[:, p:p + 1], p)
            times.append(time.perf_counter() - started)
    return LongRun(prefill, statistics.median(times), watch.peak.anonymous - before.anonymous,
                   cache_bytes(engine, length + steps))


def stand_at(engine: model.Transformer, position: int):
    """Makes an engine go on from where it never was, over random rows: time does not depend on them."""
    for attn in engine.attentions():
        attn.kv_cache.normal_()
        if attn.compress_ratio == 4:
            attn.indexer.kv_cache.normal_()
    engine.end_pos, engine.bsz = position, 1


def run_decode(folder: str, lengths: list[int], steps: int = LONG_STEPS) -> list[float]:
    """Seconds of a token (median) after each length, one engine each, in turn."""
    times = [[] for _ in lengths]
    engines = [load_quietly(folder, max_seq_len=max(lengths) + steps + 4) for _ in lengths]
    tokens = random_tokens(steps + 4, engines[0].vocab_size)
    for engine, length in zip(engines, lengths):
        stand_at(engine, length)
    for i in range(steps + 4):
        for engine, length, found in zip(engines, lengths, times):
            started = time.perf_counter()
            engine(tokens[:, i:i + 1], length + i)
            found.append(time.perf_counter() - started)
    return [statistics.median(found[4:]) for found in times]       # the first ones warm up


def run_context(folder: str, max_seq_len: int) -> tuple[int, int, int, float]:
    """Bytes of the caches; grown by while loading, and at most during a token at the end; its seconds."""
    before = memory()
    engine = load_quietly(folder, max_seq_len=max_seq_len)
    loaded = memory()
    caches = [cache for attn in engine.attentions() for cache in (
        attn.kv_cache, attn.indexer.kv_cache if attn.compress_ratio == 4 else attn.kv_cache[:0])]
    engine.end_pos, engine.bsz = max_seq_len - 1, 1     # over rows that were never written
    with Peak() as watch:
        started = time.perf_counter()
        engine(torch.zeros(1, 1, dtype=torch.long), max_seq_len - 1)
        took = time.perf_counter() - started
        watch.look()
    return (sum(cache.nbytes for cache in caches), loaded.anonymous - before.anonymous,
            watch.peak.anonymous - loaded.anonymous, took)


def long(lengths: list[int], chunk: int) -> int:
    """Prints what prompts of these lengths take, tokens after a long one, and a context of a million."""
    if chunk < 1 or min(lengths) < 1:
        raise ValueError("--chunk and each of --lengths are 1 or more")
    folder = write_checkpoint(os.path.join(work_folder(), "long"), LONG)
    print(f"{os.cpu_count()} threads, random fp8 and fp4 weights, bf16, round trips on. Ratios 0, 4, 128; 64 "
          f"index heads; chunks of {chunk}\n")
    table_head("prompt", "prefill", "tokens/s", "most memory above loading", "of it caches", "above caches",
               "ms per token after it", "ratio")
    first = None
    for length in lengths:
        found = fresh(run_long, folder, length, chunk)
        first = first or found
        table_row(f"{length:,}", f"{found.prefill:.1f} s", f"{length / found.prefill:,.0f}",
                  megabytes(found.peak), megabytes(found.caches), megabytes(found.peak - found.caches),
                  f"{found.token * 1e3:.1f}", f"{found.token / first.token:.2f}")
    print("\nA token after a long context, the model of `bench`, in turn, over random rows:\n")
    lengths = [1024, 32768]
    times = fresh(run_decode, write_checkpoint(os.path.join(work_folder(), "bench"), BENCH), lengths)
    table_head("context", "ms per token", "ratio")
    for length, took in zip(lengths, times):
        table_row(f"{length:,}", f"{took * 1e3:.1f}", f"{took / times[0]:.2f}")
    print("\nCaches are allocated for the whole context, and resident as they are written:\n")
    table_head("model", "context", "caches", "loading adds", "a token at its end adds at most", "and takes")
    for name, path in (("of this table", folder), ("tiny/", BOX)):
        for context in (4096, MILLION):
            caches, loading, token, took = fresh(run_context, path, context)
            table_row(name, f"{context:,}", megabytes(caches), megabytes(loading), megabytes(token),
                      f"{took:.2f} s")
    return 0


# ---- full-size and long: commands and proofs

MEASURING = ("full-size", "long")


def add_measuring_parsers(commands):
    parser = commands.add_parser("full-size", help="memory and time of a checkpoint of Flash's size")
    parser.add_argument("--layers", type=int, default=43, help="layers of the same shapes (default: 43)")
    parser.add_argument("--prefill", type=int, default=16, help="tokens of the prompt (default: 16)")
    parser.add_argument("--steps", type=int, default=4, help="single tokens after it (default: 4)")
    parser.add_argument("--cache-gb", type=float, help="load_model's cache_gb (default: load_model's own)")
    parser.add_argument("--convert", action="store_true", help="convert it for two ranks, and run nothing")
    parser = commands.add_parser("long", help="memory and time over the length of a prompt")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], metavar="N,N,...",
                        default=[2048, 8192, 32768, 131072], help="tokens (default: 2048,8192,32768,131072)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens in a pass (default: 512)")


def run_measuring(args: argparse.Namespace) -> int:
    """Exit code 2 where it cannot be measured here, 1 where a measured process failed."""
    try:
        if not os.path.exists("/proc/self/status"):
            raise ValueError("memory is read from /proc, which only Linux has")
        if args.command == "long":
            return long(args.lengths, args.chunk)
        if not 1 <= args.layers <= FLASH["num_hidden_layers"]:
            raise ValueError(f"--layers {args.layers}: Flash has 1 to {FLASH['num_hidden_layers']}")
        options = {} if args.cache_gb is None else {"cache_gb": args.cache_gb}
        return full_size(flash_of(args.layers), args.prefill, args.steps, args.convert, **options)
    except KeyboardInterrupt:
        print(f"\n{args.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"{args.command}: {generate.describe(error)}", file=sys.stderr)
        return 1 if isinstance(error, ChildProcessError) else 2
    except BrokenProcessPool:
        print(f"{args.command}: the measured process was killed: too little memory?", file=sys.stderr)
        return 1


def test_flash_in_files_as_published():
    shards = in_shards(convert.inventory(FLASH))
    assert len(shards) == 46 and sum(map(len, shards)) == 69187
    sizes = [convert.layout_bytes(layout) for layout in shards]
    assert sum(sizes) == 159_609_485_896 and max(sizes) < 1.2 * min(sizes)
    assert [name for layout in shards for name in layout] == list(convert.inventory(FLASH))
    assert convert.inventory(flash_of(43)) == convert.inventory(FLASH)


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# some 800 MB, so that holes show; layers of each ratio, hashed and scored
SPARSE = FILES | {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 128,
                  "num_experts_per_tok": 6}


@needs_proc
def test_full_size_on_a_smaller_model(capfd):
    assert full_size(SPARSE, prefill=3, steps=2, cache_gb=0) == 0
    title, *table = capfd.readouterr().out.splitlines()
    rows = [re.split(r" *\| *", line)[1:-1] for line in table if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["before loading", "load_model", "prefill of 3", "token 1", "token 2"]
    memory_of, experts = ([int(re.sub(r"\D", "", row[i])) for row in rows] for i in (2, 5))
    count, on_disk = re.search(r"([\d,]+) bytes in 1 files, ([\d.]+) MB", title).groups()
    assert int(count.replace(",", "")) > 8e8 and float(on_disk) < 8
    # a token has 6 experts in each of 3 layers, and most are its own: no two gates choose alike
    assert experts[:2] == [0, 0] and 45 < experts[2] <= 54 and 75 < experts[4] <= 90
    assert experts[4] > experts[3] > experts[2] and memory_of[2] < memory_of[0] + 300


@needs_proc
def test_conversion_is_watched(tmp_path):
    write_sparse(str(tmp_path), SPARSE, [0])
    found = run_conversion(str(tmp_path), str(tmp_path / "out"), SPARSE)
    assert len(list((tmp_path / "out").glob("model?-mp2.safetensors"))) == 2
    assert 50e6 < found.peak.anonymous < found.peak.most < 1e9
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ChildProcessError, match="exit code 2"):
        run_conversion(str(tmp_path), str(tmp_path / "out"), SPARSE)


@needs_proc
def test_a_peak_is_seen():
    with Peak() as watch:
        block = torch.ones(25_000_000)
        del block
    assert 90e6 < watch.peak.anonymous - memory().anonymous < 200e6


@needs_proc
def test_a_context_of_a_million_is_not_resident():
    """Caches are allocated, and not touched before use; nor is anything else by a token at the end."""
    caches, loading, token, _ = fresh(run_context, BOX, MILLION)
    assert caches > 300e6 and loading < 50e6 and token < 100e6


@pytest.mark.parametrize("argv, says", [
    (["full-size", "--layers", "44"], "Flash has 1 to 43"), (["full-size", "--prefill", "0"], "1 or more"),
    (["full-size", "--layers", "1"], "room"), (["long", "--chunk", "0"], "1 or more")])
def test_measuring_refuses(monkeypatch, capsys, argv, says):
    monkeypatch.setattr(sys, "argv", ["test_parity.py", *argv])
    if says == "room":
        says = "free, and"
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    assert main() == 2
    assert says in capsys.readouterr().err


# ==========================================================================================================
# vendor: the vendor's model.py over our kernel.py
# ==========================================================================================================

def vendor_module(folder: str) -> types.ModuleType:
    """The vendor's model.py, unchanged, with our kernel.py for its own and for fast_hadamard_transform."""
    path = os.path.join(folder, "model.py")
    if not os.path.isfile(path):
        sys.exit(f"{folder} has no model.py: --vendor-dir names a copy of the vendor's inference folder")
    stub = types.ModuleType("fast_hadamard_transform")
    stub.hadamard_transform = kernel.hadamard_transform
    sys.modules["fast_hadamard_transform"] = stub
    spec = importlib.util.spec_from_file_location("vendor_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vendor_model(module: types.ModuleType, folder: str, dtype: torch.dtype):
    """The vendor's Transformer on a folder that convert.py has converted, loaded the vendor's way."""
    quantised = "quantization_config" in json.loads(Path(folder, "config.json").read_text())
    known = inspect.signature(module.ModelArgs).parameters
    config = {key: value for key, value in VENDOR_CONFIG.items() if key in known}
    config |= {"dtype": "fp8" if quantised else "bf16", "expert_dtype": "fp4" if quantised else None}
    with model.run_mode(model.Mode(torch.bfloat16, (), None)):
        theirs = module.Transformer(module.ModelArgs(**config, max_seq_len=640))
        load_model(theirs, os.path.join(folder, "model0-mp1.safetensors"), strict=False)
    if dtype == torch.float32:
        theirs = theirs.float()
    return theirs


@contextlib.contextmanager
def without_round_trips(module: types.ModuleType):
    """The vendor's code has no switch for them: its rounding functions are replaced for a while."""
    saved = module.act_quant, module.fp4_act_quant, module.rotate_activation
    module.act_quant = module.fp4_act_quant = module.rotate_activation = lambda x, *args: x
    try:
        yield
    finally:
        module.act_quant, module.fp4_act_quant, module.rotate_activation = saved


def forget(theirs):
    """What the vendor's code leaves undone before a second conversation."""
    for module in theirs.modules():
        if hasattr(module, "score_state"):
            module.kv_state.zero_()
            module.score_state.fill_(-torch.inf)


def compare_with_vendor(folder: str) -> int:
    """Prefill of several lengths, then decode, in the exact mode and as the model runs; prints a table."""
    module, tokens = vendor_module(folder), random_tokens()
    print("| against the vendor's model.py | dtype | median | 90th percentile | max | same token |")
    print("|---|---|---|---|---|---|")
    healthy = True
    # bf16 keeps 8 bits, over six layers some percent; with fp8 weights flipped roundings add to that
    for kind, dtype, trips, limit in (("bf16", torch.float32, (), EXACT),
                                      ("bf16", torch.bfloat16, model.ROUND_TRIPS, 0.05),
                                      ("fp8", torch.bfloat16, model.ROUND_TRIPS, 0.15)):
        converted = os.path.join(work_folder(), f"{kind}-mp1")
        with contextlib.redirect_stderr(io.StringIO()):     # conversion tells what it does
            convert.main(fixture(kind), converted, SMALL["n_routed_experts"], 1, None)
        theirs, ours = vendor_model(module, converted, dtype), load(fixture(kind), dtype, trips)
        for a, b in zip(ours.layers, theirs.layers):    # the first Flash release has no limit there
            a.ffn.shared_experts.swiglu_limit = b.ffn.shared_experts.swiglu_limit
        off = without_round_trips(module) if not trips else contextlib.nullcontext()
        errors, same = [], []
        with off, torch.inference_mode(), model.run_mode(ours.mode):
            for n in (1, 5, 17, 130, 300):
                forget(theirs)
                for start, end in [(0, n)] + [(p, p + 1) for p in range(n, n + 12)]:
                    a, b = ours(tokens[:, start:end], start)[0], theirs(tokens[:, start:end], start)[0]
                    errors.append(relative_error(a, b))
                    same.append(bool(a.argmax() == b.argmax()))
        median, high = np.quantile(errors, [0.5, 0.9])
        healthy &= bool(high <= limit)
        print(f"| {kind} weights, round trips {'on' if trips else 'off'} | {str(dtype)[6:]} | {median:.1e} | "
              f"{high:.1e} | {max(errors):.1e} | {sum(same)} of {len(same)} |")
    return 0 if healthy else 1


# ==========================================================================================================
# The lab: where does a copy of the model lose its memory?
# ==========================================================================================================

class Heat(typing.NamedTuple):
    """A grid of values from 0 to 1 (None: not measured), drawn as a heat map."""
    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[typing.Optional[float]]]


class Report(typing.NamedTuple):
    """What a lab command found. `healthy` None: it only measures. `blind`: what this result cannot see."""
    question: str
    columns: list[str]
    rows: list[list[str]]
    verdict: str
    blind: str
    healthy: typing.Optional[bool]
    data: dict                  # the same figures as numbers, for --json
    heat: tuple[Heat, ...] = ()


class LabCommand(typing.NamedTuple):
    run: typing.Callable        # parsed arguments -> Report
    help: str
    arguments: dict[str, dict]  # flag -> the keywords of add_argument
    draws: bool                 # whether its reports have heat maps


LAB: dict[str, LabCommand] = {}
SHADES, ASCII_SHADES = " ░▒▓█", " .+*#"


def lab(name: str, help: str, draws: bool = False, **arguments: dict):
    """Registers a lab command; `arguments` are its flags (some_flag: --some-flag; in capitals: a place)."""
    def register(run):
        LAB[name] = LabCommand(run, help, arguments, draws)
        return run
    return register


def add_lab_parser(commands, name: str, command: LabCommand):
    parser = commands.add_parser(name, help=command.help)
    checkpoint = {"default": BOX, "help": "a published checkpoint (default: tiny/)"}
    for flag, keywords in ({"ckpt_path": checkpoint} | command.arguments).items():
        if keywords is not None:    # a command that reads no checkpoint says ckpt_path=None
            parser.add_argument(flag if flag.isupper() else "--" + flag.replace("_", "-"), **keywords)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--svg", metavar="FILE", help="draw the heat maps into FILE")


def run_lab(args: argparse.Namespace) -> int:
    """Prints the report; exit code 1 where a fault was found, 2 where the question cannot be asked."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")    # an answer may have letters that the terminal lacks
    try:
        if args.svg:
            check_svg(args.command, args.svg)
        report = LAB[args.command].run(args)
        if args.json:
            print(json.dumps(finite({"question": report.question, "healthy": report.healthy,
                                     "verdict": report.verdict, "blind": report.blind} | report.data)))
        else:
            print_report(report)
        sys.stdout.flush()      # so that a reader who has gone is noticed here
        if args.svg:
            write_svg(report, args.svg)
    except KeyboardInterrupt:
        print(f"\n{args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:     # whoever read the report has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"{args.command}: {generate.describe(error)}", file=sys.stderr)
        return 2
    return int(report.healthy is False)


def check_svg(command: str, path: str):
    """Before a run that may take long: ValueError where its heat maps cannot be drawn."""
    if not LAB[command].draws:
        raise ValueError(f"{command} has no heat map to draw; leave --svg out")
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise ValueError(f"--svg {path}: no file can be written there; name another")


def write_svg(report: Report, path: str):
    if not report.heat:
        raise ValueError("this run has no heat map to draw; the report is whole, leave --svg out")
    try:
        Path(path).write_text(svg_of(report.heat), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--svg {path}: {error.strerror}; the report is whole, name another file") from None


def finite(value: typing.Any) -> typing.Any:
    """For JSON, which has neither infinity nor NaN: None in their place."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shades() -> str:
    """From 0 to 1, in signs that the output's encoding has."""
    try:
        SHADES.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return ASCII_SHADES
    return SHADES


def print_report(report: Report):
    print(report.question + "\n")
    table = [report.columns, ["---"] * len(report.columns), *report.rows] if report.rows else []
    for row in table:
        print("| " + " | ".join(row) + " |")
    levels = shades()
    for heat in report.heat:
        print(f"\n{heat.title}")
        left = max(map(len, heat.rows))
        wide = max(map(len, heat.columns))
        print(" " * left, *(column.rjust(wide) for column in heat.columns))
        for name, values in zip(heat.rows, heat.values):
            cells = ("?" * wide if v is None else levels[round(v * (len(levels) - 1))] * wide for v in values)
            print(name.rjust(left), *cells)
    print(f"\n{report.verdict}\nIt cannot see: {report.blind}")


def svg_of(heats: typing.Sequence[Heat], cell: int = 36) -> str:
    """Heat maps below one another; dark is 1, white 0, hatched not measured."""
    parts, top, width = [], 0, 0
    for heat in heats:
        left = 12 + 7 * max(map(len, heat.rows))
        parts.append(f'<text x="8" y="{top + 18}" font-weight="bold">{html.escape(heat.title)}</text>')
        for j, column in enumerate(heat.columns):
            parts.append(f'<text x="{left + cell * j + cell / 2}" y="{top + 38}" text-anchor="middle">'
                         f"{html.escape(column)}</text>")
        for i, (name, values) in enumerate(zip(heat.rows, heat.values)):
            y = top + 46 + cell * i
            parts.append(f'<text x="{left - 6}" y="{y + cell / 2 + 4}" text-anchor="end">'
                         f"{html.escape(name)}</text>")
            for j, value in enumerate(values):
                level = 0 if value is None else 255 - round(230 * value)
                fill = "url(#none)" if value is None else f"rgb({level},{level},{level})"
                parts.append(f'<rect x="{left + cell * j}" y="{y}" width="{cell}" height="{cell}" '
                             f'fill="{fill}" stroke="#ccc"/>')
        width = max(width, left + cell * len(heat.columns) + 12, 16 + 8 * len(heat.title))
        top += 64 + cell * len(heat.rows)
    hatch = ('<defs><pattern id="none" width="6" height="6" patternUnits="userSpaceOnUse">'
             '<path d="M0,6 L6,0" stroke="#999"/></pattern></defs>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'font-family="sans-serif" font-size="12">{hatch}{"".join(parts)}</svg>\n')


def lab_output(*argv) -> tuple[int, str, str]:
    """For tests: a command as people run it -> exit code, what it prints, what it complains."""
    out, err = io.StringIO(), io.StringIO()
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          pytest.MonkeyPatch.context() as patch):
        patch.setattr(sys, "argv", ["test_parity.py", *map(str, argv)])
        code = main()
    return code, out.getvalue(), err.getvalue()


def lab_result(*argv) -> tuple[int, dict]:
    """For tests: exit code and figures of a command."""
    code, out, _ = lab_output(*argv, "--json")
    return code, json.loads(out)


# ---- copy, needle, select: what the lab asks a model, and what its indexers did

def whole_numbers(flag: str, text: typing.Optional[str], least: int, most: int, defaults=()) -> list[int]:
    """The numbers of a flag like 58,495, ascending, or the defaults that fit; ValueError for others."""
    if text is None:
        fitting = [n for n in defaults if least <= n <= most]
        if not fitting:
            raise ValueError(f"{flag}: no default fits this checkpoint; give numbers from {least} to {most}")
        return fitting
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,9}", part.strip()) or not least <= int(part) <= most:
            raise ValueError(f"{flag}: {part.strip()!r} is no whole number from {least} to {most}; "
                             "separate them by commas")
    return sorted({int(part) for part in text.split(",")})


class Subject(typing.NamedTuple):
    """The checkpoint that is asked: what to know before it is loaded."""
    tokenizer: typing.Any
    args: model.ModelArgs
    trained: int        # the length it was trained for, before YaRN stretched it
    longest: int        # the longest prompt it has positions for, beside an answer
    shortest: int       # the longest prompt of those without filler


def tokenizer_of(ckpt_path: str):
    """ValueError without one: a wrong tokenizer would ask nonsense."""
    tokenizer = generate.load_tokenizer(ckpt_path)
    if tokenizer is None:
        raise ValueError(f"{ckpt_path} has no tokenizer.json, and nothing can be asked without: copy the one "
                         "that belongs to it there")
    return tokenizer


def subject_of(ckpt_path: str) -> Subject:
    """ValueError where the folder is no checkpoint that can be asked."""
    generate.check_checkpoint(ckpt_path, None)
    config = generate.config_of(ckpt_path, None)
    args = model.ModelArgs.from_config(config)
    tokenizer = tokenizer_of(ckpt_path)
    longest = max(generate.default_context(config), config.get("max_position_embeddings") or 0)
    shortest = max(len(planted(tokenizer, 0, 0, random.Random(seed)).prompt) for seed in range(8))
    if longest < shortest + ANSWER:
        raise ValueError(f"max_position_embeddings is {longest}: too short to ask anything, a question and "
                         f"its answer take {shortest + ANSWER} tokens; correct the config")
    return Subject(tokenizer, args, args.original_seq_len or longest, longest - ANSWER, shortest)


def lab_engine(ckpt_path: str, tokens: int) -> model.Transformer:
    """The engine as generate.py runs it, with room for a prompt of so many tokens and its answer.

    It raises ValueError where its logits are not finite: an answer would mean nothing."""
    engine = generate.load_model(ckpt_path, max_seq_len=tokens + ANSWER, max_batch_size=1)[0]

    def check(head, args, logits):
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: run audit")
    engine.head.register_forward_hook(check)
    return engine


class Indexed:
    """What one layer's indexer had and did, for the queries from a position on; of one sequence."""

    def __init__(self):
        self.q: list[torch.Tensor] = []         # before rotation and rounding, a query [h,d] each
        self.keys: list[torch.Tensor] = []      # the same of all compressed rows, [r,d] a chunk
        self.weights: list[torch.Tensor] = []   # a query [h] each
        self.scores: list[torch.Tensor] = []    # a query [rows] each, -inf where it may not see a row
        self.chosen: list[torch.Tensor] = []    # rows, a query [topk] each, -1 for none


@contextlib.contextmanager
def watched_indexers(engine: model.Transformer, first: int):
    """Yields {layer: Indexed} and fills it, for queries at positions from `first` on.

    ValueError where scores of rows that a query may see are not finite."""
    seen = {attn.layer_id: Indexed() for attn in attentions(engine, 4)}
    now = types.SimpleNamespace(layer=None, number=0, start=0, scored=0)
    round_index, index_score = model.round_index, model.index_score

    def enter(layer, indexer, args):
        now.layer, now.number, now.start, now.scored = seen[layer], layer, args[2], args[2]

    def leave(indexer, args, output):
        rows = torch.where(output[0] < 0, -1, output[0] - args[3])
        now.layer.chosen.extend(rows[max(first - now.start, 0):])

    def on_round_index(x):
        if x.ndim == 4:
            now.layer.q.extend(x[0, max(first - now.start, 0):].clone())
        else:
            now.layer.keys.append(x[0].clone())
        return round_index(x)

    def on_index_score(q, k, weights, visible):
        scores = index_score(q, k, weights, visible)
        if (scores.isnan() | (scores == math.inf)).any():
            raise ValueError(f"layer {now.number}'s index scores are not finite: run audit")
        skipped = max(first - now.scored, 0)
        now.scored += q.size(1)
        now.layer.scores.extend(scores[0, skipped:].clone())
        now.layer.weights.extend(weights[0, skipped:].clone())
        return scores

    hooks = []
    for attn in attentions(engine, 4):
        hooks.append(attn.indexer.register_forward_pre_hook(functools.partial(enter, attn.layer_id)))
        hooks.append(attn.indexer.register_forward_hook(leave))
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(model, "round_index", on_round_index)
            monkeypatch.setattr(model, "index_score", on_index_score)
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


FINE = 0.75         # so much comes back where nothing is wrong; a trained model misses one now and then


def checked_samples(samples: int) -> int:
    if samples < 1:
        raise ValueError(f"--samples {samples}: ask at least once")
    return samples


def first_wrong(tokenizer, asked: Planted, answer: str) -> int:
    """Which of the secret's tokens, from 1, the answer is the first to lose; 0 when it has the secret."""
    if asked.secret in answer:
        return 0
    tokens = asked.said[asked.lead:]
    starts = [tokenizer.decode(tokens[:n]).strip() for n in range(1, len(tokens))]
    return 1 + sum(re.search(rf"\b{re.escape(start)}", answer) is not None for start in starts)


# ---- copy

DISTANCES = 24, 58, 128, 256, 495, 700, 1500


@lab("copy", "does it copy a secret from inside the window, and from beyond?",
     distance=dict(metavar="N,N", help="tokens from secret to answer (default: 24 to 1500)"),
     samples=dict(type=int, default=8, help="prompts for each distance (default: 8)"))
def copy_report(args: argparse.Namespace) -> Report:
    tokenizer, config, _, longest, _ = subject_of(args.ckpt_path)
    shortest = [planted(tokenizer, 0, 0, random.Random(seed)) for seed in range(8)]
    least = max(asked.distance for asked in shortest)
    most = longest + least - max(len(asked.prompt) for asked in shortest)
    distances = whole_numbers("--distance", args.distance, least, most, DISTANCES)
    prompts = {d: [planted(tokenizer, 0, d - least, random.Random(f"{d} {i}"))
                   for i in range(checked_samples(args.samples))] for d in distances}
    engine = lab_engine(args.ckpt_path, max(len(asked.prompt) for row in prompts.values() for asked in row))
    results = [copy_row(engine, tokenizer, d, row) for d, row in prompts.items()]
    inside = [row for row in results if row["reach"] <= config.window_size]
    beyond = [row for row in results if row["reach"] > config.window_size]
    edge = [f"~~~ the window ends: {config.window_size} tokens ~~~", "~", "~", "~", "~"]
    table = [*map(copy_line, inside), edge, *map(copy_line, beyond)]
    reach = max(asked.distance + len(asked.said) for asked in shortest)
    nearest = least if reach <= config.window_size else None
    verdict, healthy = copy_verdict(inside, beyond, config.compress_ratios[:config.n_layers], nearest)
    return Report("Does it copy a secret? Distance: the tokens between the secret's last and the answer's "
                  "first.\nInside the window: all of the secret is still in it while the answer says it.",
                  ["distance asked (true)", "n", "exact match", "first wrong token", "for example"], table,
                  verdict, "a mistake that training made, too; what layers carry on from window to window; "
                  "what is kept from token to token, except while it answers; other words than these",
                  healthy, {"window": config.window_size, "inside": inside, "beyond": beyond})


def copy_row(engine, tokenizer, distance: int, prompts: list[Planted]) -> dict:
    """What came back of secrets at one distance; reach: how far back the answer has to look for all of it."""
    answers = [answer_to(engine, tokenizer, asked) for asked in prompts]
    wrong = [first_wrong(tokenizer, asked, answer) for asked, answer in zip(prompts, answers)]
    example = next(((asked.secret, answer) for asked, answer, at in zip(prompts, answers, wrong) if at), None)
    true = [asked.distance for asked in prompts]
    return {"distance": distance, "true": [min(true), max(true)], "n": len(prompts),
            "reach": max(asked.distance + len(asked.said) for asked in prompts),
            "exact_match": wrong.count(0) / len(wrong), "first_wrong": wrong, "example": example}


def copy_line(row: dict) -> list[str]:
    wrong = collections.Counter(at for at in row["first_wrong"] if at)
    example = "{!r}: {!r}".format(*row["example"]) if row["example"] else ""
    return ["{} ({} to {})".format(row["distance"], *row["true"]), str(row["n"]), f"{row['exact_match']:.2f}",
            ", ".join(f"the {at}. in {n}" for at, n in sorted(wrong.items())) or "none", example]


def copy_verdict(inside: list[dict], beyond: list[dict], ratios: typing.Sequence[int],
                 nearest: typing.Optional[int]) -> tuple[str, bool]:
    """The sentence, and whether all came back; nearest: a distance inside the window, if there is one."""
    near_lost, far_lost = (", ".join(str(row["distance"]) for row in rows if row["exact_match"] < FINE)
                           for rows in (inside, beyond))
    if near_lost:
        return (f"Lost inside the window already (at {near_lost}): the far memory is not to blame, or not "
                "alone. Look elsewhere first: trace.", False)
    if not far_lost:
        return "It copies wherever it was asked: no memory is lost here.", True
    if not inside:
        first = (f"Ask for a distance inside the window first: --distance {nearest}." if nearest is not None
                 else "No question fits into this window. Go on with trace.")
        return (f"Not asked inside the window, lost beyond it (at {far_lost}): maybe it copies nothing. "
                f"{first}", False)
    if not any(ratios):
        why = "no layer compresses, so none sees beyond its window. Look at compress_ratios in the config."
    elif 4 not in ratios:
        why = "the compressed rows, of which no indexer chooses here. Go on with trace."
    else:
        why = "the compressed rows, or the choice among them. Go on with needle."
    return f"Fine inside the window, lost beyond it (at {far_lost}): {why}", False


# ---- needle

WINDOWS = (2, 4, 8, 16, 32)         # lengths asked without --lengths, in windows
DEPTHS = "0,25,50,75,100"


class Sight(typing.NamedTuple):
    """How one layer's indexer sees a needle from a position that must say a token of the secret."""
    rank: int           # rows with a higher score than the needle's best one
    rows: int           # rows that the position may see
    chosen: bool


def needle_rows(asked: Planted, rows: int) -> range:
    """The compressed rows that pool a token of the secret: row r pools tokens 4r-4 to 4r+3."""
    return range(asked.first // 4, min(asked.last // 4 + 2, rows))


def sights(engine: model.Transformer, asked: Planted, token: int) -> dict[int, Sight]:
    """{layer: what it sees from the position that must say a token (from 0) of the secret}, the right answer
    up to there being given."""
    ids = torch.tensor([asked.prompt + asked.said[:asked.lead + token]])
    with watched_indexers(engine, ids.size(1) - 1) as seen:
        engine(ids)
    found = {}
    for layer, indexed in seen.items():
        scores, chosen = indexed.scores[0], set(indexed.chosen[0].tolist())
        rows = int((scores > -math.inf).sum())
        needle = needle_rows(asked, rows)
        rank = int((scores > scores[list(needle)].max()).sum())
        found[layer] = Sight(rank, rows, not chosen.isdisjoint(needle))
    return found


@lab("needle", "at which prompt lengths and depths is a secret found, and did the indexers choose it?",
     draws=True,
     lengths=dict(metavar="N,N", help="prompt lengths in tokens (default: 2 to 32 windows, if trained)"),
     depths=dict(metavar="N,N", default=DEPTHS, help=f"0: at the start, 100: at the end (default: {DEPTHS})"),
     samples=dict(type=int, default=2, help="prompts for each length and depth (default: 2)"))
def needle_report(args: argparse.Namespace) -> Report:
    tokenizer, config, trained, longest, least = subject_of(args.ckpt_path)
    if 4 not in config.compress_ratios[:config.n_layers]:
        raise ValueError("this checkpoint has no layer of ratio 4, so no indexer to watch; use copy")
    lengths = whole_numbers("--lengths", args.lengths, least, longest,
                            [n * config.window_size for n in WINDOWS if n * config.window_size < trained])
    depths = whole_numbers("--depths", args.depths, 0, 100)
    engine = lab_engine(args.ckpt_path, max(lengths))
    cells = []
    for length, depth, i in itertools.product(lengths, depths, range(checked_samples(args.samples))):
        before = (length - least) * depth // 100
        asked = planted(tokenizer, before, length - least - before, random.Random(f"{length} {depth} {i}"))
        wrong = first_wrong(tokenizer, asked, answer_to(engine, tokenizer, asked))
        seen = sights(engine, asked, max(wrong - 1, 0))
        cells.append({"length": length, "depth": depth, "true_length": len(asked.prompt), "found": not wrong,
                      "layers": {layer: sight._asdict() for layer, sight in seen.items()}})
    grid = [[statistics.mean(c["found"] for c in cells if (c["length"], c["depth"]) == (length, depth))
             for depth in depths] for length in lengths]
    verdict, healthy = needle_verdict(cells, grid, lengths, config.index_topk)
    return Report("Is a secret found, by prompt length and depth? For each lost one: the rank of its best "
                  "row in\neach indexer's scores, from the position that must say its first wrong token.",
                  ["length", "depth", "", *(f"layer {layer}, top {config.index_topk}" for layer in seen)],
                  needle_table(cells), verdict, "what becomes of a row once it is chosen (trace shows that); "
                  "which layers would select it in a healthy model, maybe not all", healthy,
                  {"cells": cells},
                  (Heat("found, by prompt length (down) and depth in percent (across)",
                        list(map(str, lengths)), list(map(str, depths)), grid),))


def seen_as(sight: dict) -> str:
    return "selected and not used" if sight["chosen"] else "not selected"


def needle_table(cells: list[dict]) -> list[list[str]]:
    """The lost needles one by one, then the ranks of those that were found."""
    lines = []
    for cell in cells:
        if not cell["found"]:
            ranks = [f"{sight['rank'] + 1} of {sight['rows']}: {seen_as(sight)}"
                     for sight in cell["layers"].values()]
            lines.append([str(cell["length"]), f"{cell['depth']}%", "lost", *ranks])
    found = [cell["layers"] for cell in cells if cell["found"]]
    if found:
        ranks = {layer: [layers[layer] for layers in found] for layer in found[0]}
        lines.append(["all", "all", f"{len(found)} found",
                      *(f"{1 + statistics.median(s['rank'] for s in seen):g} (median), selected in "
                        f"{sum(s['chosen'] for s in seen)}" for seen in ranks.values())])
    return lines


def needle_verdict(cells: list[dict], grid: list[list[float]], lengths: list[int],
                   topk: int) -> tuple[str, bool]:
    n_found = sum(cell["found"] for cell in cells)
    counts = f"{n_found} of {len(cells)} found"
    if all(statistics.mean(row) >= FINE for row in grid):
        return f"{counts}: no memory is lost here.", True
    short = ", ".join(str(length) for length, row in zip(lengths, grid) if statistics.mean(row) < FINE)
    # where every row is selected, selection says nothing
    judged = [cell for cell in cells if any(s["rows"] > topk for s in cell["layers"].values())] or cells
    said, blamed = [], []
    for layer in cells[0]["layers"]:
        of = {found: [cell["layers"][layer]["chosen"] for cell in judged if cell["found"] == found]
              for found in (False, True)}
        missed = {found: chosen.count(False) for found, chosen in of.items()}
        said.append(f"Layer {layer} did not select {missed[False]} of {len(of[False])} lost ones, and "
                    f"{missed[True]} of {len(of[True])} found ones.")
        # by luck a row is among the best now and then, and other layers can make up for one
        if missed[False] >= max(len(of[False]) / 2, 1) or sum(missed.values()) > len(judged) / 2:
            blamed.append(str(layer))
    advice = (f"Not selected, above all in layer {', '.join(blamed)}: its index keys, queries or weights. Go "
              "on with select, and trace that indexer." if blamed else
              "Selected and not used: what the chosen rows hold, or how they are attended. Go on with trace.")
    where = "" if len(judged) == len(cells) else f"Where there are more than {topk} rows to choose from: "
    return "\n".join([f"{counts}, too few at length {short}.", where + said[0], *said[1:], advice]), False


# ---- select

ROW_COUNTS = "64,256,600,2048,8192,32768"
INDEX_SHAPE = {"heads": 64, "dim": 128, "topk": 512}        # Flash's
NEEDLE_STRENGTH = 4         # standard deviations of keys that a needle has more, along its query's direction
LONGEST_RECORDED = 16384    # tokens of a prompt whose index vectors are recorded
OUTLIERS = 4, 16            # channels of a key, and how much larger they are than the others


def rounded_fp8(x: torch.Tensor) -> torch.Tensor:
    return model.act_quant(x, min(128, x.size(-1)), "ue8m0", torch.float8_e8m0fnu, True)


def rounded_fp4(x: torch.Tensor) -> torch.Tensor:
    return model.fp4_act_quant(x, model.fp4_block_size, True)


class IndexFormat(typing.NamedTuple):
    """How an index vector is held: cast, rotated or not, rounded in place; and what NumPy rounds it to."""
    dtype: torch.dtype = torch.bfloat16
    rotated: bool = False
    rounded: typing.Callable = lambda x: x
    oracle: typing.Callable = lambda x: x


FP8 = {"rounded": rounded_fp8, "oracle": lambda x: act_round_trip(x, min(128, x.shape[-1]))}
FP4 = {"rounded": rounded_fp4, "oracle": lambda x: fp4_round_trip(x, FP4_BLOCK)}
INDEX_FORMATS = {"fp32": IndexFormat(torch.float32), "fp32+H": IndexFormat(torch.float32, rotated=True),
                 "bf16": IndexFormat(),
                 "fp8": IndexFormat(**FP8), "fp8+H": IndexFormat(rotated=True, **FP8),
                 "fp4": IndexFormat(**FP4), "fp4+H": IndexFormat(rotated=True, **FP4)}


class IndexCase(typing.NamedTuple):
    """Index vectors in fp32, before rotation and rounding: m queries of h heads over r rows."""
    q: torch.Tensor             # [m,h,d]
    keys: torch.Tensor          # [r,d]
    weights: torch.Tensor       # [m,h]
    visible: torch.Tensor       # [m,1], how many rows each query may see
    topk: int
    needles: list[range]        # the rows that each query looks for; none: an empty range


def random_case(rows: int, outliers: bool, queries: int = 8) -> IndexCase:
    """Gaussian vectors at Flash's shape, and a planted row for each query."""
    rng, (heads, dim, topk) = generator(rows), INDEX_SHAPE.values()
    q = torch.randn(queries, heads, dim, generator=rng)
    weights = torch.randn(queries, heads, generator=rng) / (heads * dim) ** 0.5
    keys = torch.randn(rows, dim, generator=rng)
    if outliers:
        keys[:, :OUTLIERS[0]] *= OUTLIERS[1]
    wanted = torch.nn.functional.normalize(torch.einsum("mhd,mh->md", q, weights), dim=-1)
    keys[:queries] += NEEDLE_STRENGTH * (keys @ wanted.T).std(dim=0)[:, None] * wanted
    return IndexCase(q, keys, weights, torch.full((queries, 1), rows), topk,
                     [range(i, i + 1) for i in range(queries)])


def code_case(rows: int = 32768) -> IndexCase:
    """Vectors of -1, 0 and 1, few weights, all 1: every format holds them and every sum of theirs exactly."""
    rng, (heads, dim, topk) = generator(0), INDEX_SHAPE.values()
    q, keys = ((torch.randn(*shape, generator=rng) / 1.5).round().clamp(-1, 1)
               for shape in ((4, heads, dim), (rows, dim)))
    weights = (torch.rand(4, heads, generator=rng) < 1 / 16).float()
    return IndexCase(q, keys, weights, torch.full((4, 1), rows), topk, [range(0)] * 4)


def recorded_cases(engine: model.Transformer, asked: Planted, queries: int = 8) -> dict[int, IndexCase]:
    """{layer: what its indexer had at a prompt's end}; the last query must say the secret's first token."""
    ids = torch.tensor([asked.prompt + asked.said[:asked.lead]])
    first = ids.size(1) - queries
    with watched_indexers(engine, first) as seen:
        engine(ids)
    visible = model.visible_rows(4, queries, first, "cpu")
    needles = [range(0)] * (queries - 1) + [needle_rows(asked, int(visible[-1]))]
    cases = {}
    for layer, indexed in seen.items():
        q, keys, weights = torch.stack(indexed.q), torch.cat(indexed.keys), torch.stack(indexed.weights)
        cases[layer] = IndexCase(q.float().cpu(), keys.float().cpu(), weights.float().cpu(), visible,
                                 engine.args.index_topk, needles)
    return cases


def exact_scores(case: IndexCase) -> np.ndarray:
    """Brute force in float64, head by head: [m,r], -inf where a query may not see a row."""
    q, keys, weights = (x.double().numpy() for x in (case.q, case.keys, case.weights))
    scores = np.zeros((len(q), len(keys)))
    for head in range(q.shape[1]):
        scores += np.maximum(q[:, head] @ keys.T, 0) * weights[:, head, None]
    return np.where(np.arange(len(keys)) < case.visible.numpy(), scores, -np.inf)


def held(x: torch.Tensor, form: IndexFormat) -> tuple[torch.Tensor, float]:
    """x in a format, and the share of its values that NumPy rounds otherwise."""
    x = x.to(form.dtype)
    if form.rotated:
        x = model.rotate_activation(x)
    expected = form.oracle(x.double().numpy())
    x = form.rounded(x.clone())
    return x, float((x.double().numpy() != expected).mean())


def scored(case: IndexCase, form: IndexFormat) -> tuple[torch.Tensor, float]:
    """The engine's scores [m,r] of vectors held in a format, and the share of other roundings."""
    (q, other_q), (keys, other_keys) = held(case.q, form), held(case.keys, form)
    scores = model.index_score(q[None], keys[None], case.weights.to(form.dtype)[None], case.visible)
    return scores[0].float(), max(other_q, other_keys)


def selection(case: IndexCase, name: str, exact: np.ndarray) -> dict:
    """One format against exact scores: error of the scores, Jaccard of the chosen sets, the needles' fate."""
    scores, other = scored(case, INDEX_FORMATS[name])
    k = min(case.topk, int(case.visible.min()))
    sets = [[set(order[:k].tolist()) for order in orders] for orders in
            (scores.topk(k)[1], np.argsort(-exact, axis=1, kind="stable"))]
    seen = np.isfinite(exact)
    ranks, kept = [], []
    for row, chosen, needle in zip(scores, sets[0], case.needles):
        if needle:
            ranks.append(1 + int((row > row[list(needle)].max()).sum()))
            kept.append(not chosen.isdisjoint(needle))
    # of exact ties either side may take its own: a choice is right when its scores are the best ones
    best = -np.sort(-exact, axis=1)[:, :k]
    right = all(np.array_equal(-np.sort(-row[list(chosen)]), top) for row, chosen, top
                in zip(exact, sets[0], best))
    return {"format": name, "score_error": relative_error(scores.numpy()[seen], exact[seen]),
            "jaccard": statistics.mean(len(a & b) / len(a | b) for a, b in zip(*sets)), "as_exact": right,
            "other_roundings": other, "kept": statistics.mean(kept) if kept else None,
            "rank": statistics.median(ranks) if ranks else None}


def selections(source: str, cases: dict[str, IndexCase]) -> list[dict]:
    """Every format on cases of one row count; a case is a layer, or the only one."""
    found = []
    for layer, case in cases.items():
        exact = exact_scores(case)
        found += [{"source": source, "layer": layer, "rows": len(case.keys)} | selection(case, name, exact)
                  for name in INDEX_FORMATS]
    return found


def lengths_for(subject: Subject, counts: list[int]) -> tuple[list[int], str]:
    """The prompts' lengths that give so many rows, and what is left out and why, or nothing."""
    least, most = -(-subject.shortest // 2), min(subject.longest, LONGEST_RECORDED) // 4
    if 4 not in subject.args.compress_ratios[:subject.args.n_layers]:
        return [], "the checkpoint's own vectors: it has no layer of ratio 4, so no indexer"
    left_out = ", ".join(str(rows) for rows in counts if not least <= rows <= most)
    return ([4 * rows for rows in counts if least <= rows <= most],
            f"the checkpoint's own vectors at {left_out} rows: its prompts have {least} to {most}"
            if left_out else "")


def checkpoint_cases(ckpt_path: str, tokenizer, lengths: list[int]):
    """Yields {layer: IndexCase} for prompts of these lengths."""
    if not lengths:
        return
    engine = lab_engine(ckpt_path, lengths[-1])
    least = len(planted(tokenizer, 0, 0, random.Random(0)).prompt)
    for length in lengths:
        before = (length - least) // 4
        asked = planted(tokenizer, before, length - least - before, random.Random(length))
        yield recorded_cases(engine, asked)


@lab("select", "which rows do index keys in fp32, bf16, fp8 and fp4 choose, and is the needle among them?",
     draws=True,
     rows=dict(metavar="N,N", default=ROW_COUNTS, help=f"rows to choose from (default: {ROW_COUNTS})"))
def select_report(args: argparse.Namespace) -> Report:
    counts = whole_numbers("--rows", args.rows, 16, 1 << 17)
    subject = subject_of(args.ckpt_path)
    lengths, left_out = lengths_for(subject, counts)
    found = [line for cases in checkpoint_cases(args.ckpt_path, subject.tokenizer, lengths)
             for line in selections("checkpoint", cases)]
    for outliers in (False, True):
        source = "{} channels x{}".format(*OUTLIERS) if outliers else "Gaussian"
        for rows in counts:
            found += selections(source, {"": random_case(rows, outliers)})
    codes = selections("codes", {"": code_case()})
    table, heats = select_grids(found)
    verdict, healthy = select_verdict(codes, found)
    blind = ("whether queries and keys themselves are right; other data; a GPU's kernels (vectors are "
             "scored on the CPU)") + (f"; {left_out}" if left_out else "")
    if not lengths:
        verdict += f"\nOf random vectors only. Left out: {left_out}."
    question = ("What do formats of index queries and keys choose? Against float64: error of the scores,\n"
                "Jaccard of the chosen sets, the needle's rank. +H: Hadamard rotation first. Random\n"
                "vectors: {heads} heads x {dim}, top {topk}; a needle has {strength} standard deviations\n"
                "more than other keys along its query's direction. checkpoint: what its indexers had\n"
                "at the end of a prompt with a needle, mean of the layers.")
    question = question.format(strength=NEEDLE_STRENGTH, **INDEX_SHAPE)
    return Report(question, ["source", "rows", *INDEX_FORMATS], table, verdict, blind, healthy,
                  {"codes": codes, "selections": found}, heats)


def select_grids(found: list[dict]) -> tuple[list[list[str]], tuple[Heat, ...]]:
    """A line for each source and row count, and a heat map for each source."""
    table, heats = [], []
    for source in dict.fromkeys(line["source"] for line in found):
        lines = [line for line in found if line["source"] == source]
        counts = sorted({line["rows"] for line in lines})
        cells = [[[line for line in lines if (line["rows"], line["format"]) == (rows, name)]
                  for name in INDEX_FORMATS] for rows in counts]
        table += [[source, str(rows), *map(select_cell, row)] for rows, row in zip(counts, cells)]
        jaccard = [[statistics.mean(line["jaccard"] for line in cell) for cell in row] for row in cells]
        heats.append(Heat(f"{source}: Jaccard with the exact choice, by rows (down) and format (across)",
                          list(map(str, counts)), list(INDEX_FORMATS), jaccard))
    return table, tuple(heats)


def select_cell(lines: list[dict]) -> str:
    """One format at one row count: a mean over layers."""
    error, jaccard, kept, rank = (statistics.mean(line[key] for line in lines)
                                  for key in ("score_error", "jaccard", "kept", "rank"))
    return f"{error:.1%} {jaccard:.3f} #{rank:.0f}" + (f", {1 - kept:.0%} lost" if kept < 1 else "")


def select_verdict(codes: list[dict], found: list[dict]) -> tuple[str, bool]:
    """Held against the engine: codes not chosen exactly, fp32 scores off, roundings unlike NumPy's."""
    inexact = [line["format"] for line in codes if "+H" not in line["format"] and not line["as_exact"]]
    choice = f"{', '.join(inexact)} did not choose as float64" if inexact else "all choose as float64"
    off = {name: max(line["score_error"] for line in found if line["format"] == name)
           for name in ("fp32", "fp32+H")}
    others = {line["format"]: line["other_roundings"] for line in found if line["other_roundings"]}
    rounding = ", ".join(f"{name} rounds {share:.1%} of the values to others than NumPy"
                         for name, share in others.items()) or "every rounding is NumPy's, bit for bit"
    healthy = not inexact and not others and max(off.values()) <= EXACT
    own = [line for line in found if line["format"] == "fp4+H"]
    exact = [line for line in found if line["format"] == "fp32"]
    worst = min(own, key=lambda line: line["jaccard"])
    lost = sum(a["kept"] < b["kept"] for a, b in zip(own, exact))
    return (f"Must agree: on codes that every format holds, over {codes[0]['rows']} rows, {choice}; fp32 "
            f"scores are {off['fp32']:.0e} off, rotated {off['fp32+H']:.0e} (fine: {EXACT:.0e});\n"
            f"{rounding}.\nThe model's own format, fp4+H: Jaccard {worst['jaccard']:.3f} at worst "
            f"({worst['source']}, {worst['rows']} rows); in {lost} of {len(own)} cases it loses needles that "
            "fp32 keeps."
            + (" That is the format's doing, not a fault." if healthy else ""), healthy)


# ---- do copy, needle and select find what is planted, and clear what is healthy?

@pytest.mark.parametrize("argv, words", [
    (("copy", "--distance", "58,x"), "--distance: 'x' is no whole number"),
    (("copy", "--distance", "1"), "--distance: '1' is no whole number from"),
    (("copy", "--distance", "9000000"), "'9000000' is no whole number from"),
    (("copy", "--samples", "0"), "--samples 0"),
    (("copy", "--svg", "heat.svg", "--distance", "58", "--samples", "1"), "no heat map"),
    (("copy", "--ckpt-path", "nowhere"), "nowhere"),
    (("needle", "--depths", "50,101"), "'101' is no whole number from 0 to 100"),
    (("needle", "--lengths", "2"), "--lengths: '2' is no whole number from"),
    (("needle", "--lengths", "9000000"), "'9000000' is no whole number from"),
    (("select", "--rows", "3"), "--rows: '3' is no whole number from 16"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_lab_refuses(argv, words):
    code, _, error = lab_output(*argv)
    assert code == 2 and words in error and error.startswith(argv[0] + ": ") and error.count("\n") == 1


def test_lab_needs_a_tokenizer():
    code, _, error = lab_output("copy", "--ckpt-path", fixture("bf16"))
    assert code == 2 and "has no tokenizer.json" in error


def askable(folder: Path, **change) -> Path:
    """A random checkpoint of two layers that has the box's tokenizer; of ratios 0 and 128 unless changed."""
    vocab = json.loads(Path(BOX, "config.json").read_text())["vocab_size"]
    config = LAB_SMALL | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "compress_ratios": [0, 128],
                          "sliding_window": 32, "vocab_size": vocab} | change
    write_checkpoint(str(folder), config)
    shutil.copy(os.path.join(BOX, "tokenizer.json"), folder)
    return folder


@pytest.mark.parametrize("ratios, says", [([0, 0], "no layer compresses"), ([0, 128], "no indexer chooses"),
                                          ([0, 4], "Go on with needle")])
def test_copy_advises_what_there_is(ratios, says):
    row = {"distance": 30, "exact_match": 1.0}
    lost = row | {"exact_match": 0.0}
    verdict, healthy = copy_verdict([row], [lost], ratios, 17)
    assert not healthy and says in verdict and ("needle" in verdict) == (4 in ratios)
    verdict, healthy = copy_verdict([], [lost], ratios, 17)
    assert not healthy and "--distance 17" in verdict and "needle" not in verdict
    assert "No question fits" in copy_verdict([], [lost], ratios, None)[0]


def test_without_an_indexer(tmp_path, monkeypatch):
    """copy does not send people to needle, which refuses; select says that it judged random vectors only."""
    monkeypatch.setitem(globals(), "code_case", functools.partial(code_case, 1024))
    where = "--ckpt-path", askable(tmp_path / "r128")
    code, found = lab_result("copy", *where, "--distance", "58", "--samples", "1")
    assert code == 1 and "Ask for a distance inside the window first" in found["verdict"]
    assert lab_output("needle", *where)[0] == 2
    code, found = lab_result("select", *where, "--rows", "64")
    assert all("no layer of ratio 4" in found[key] for key in ("verdict", "blind"))
    assert {line["source"] for line in found["selections"]} == {"Gaussian", "4 channels x16"}


def test_select_says_which_rows_no_prompt_reaches(monkeypatch):
    monkeypatch.setitem(globals(), "code_case", functools.partial(code_case, 1024))
    code, found = lab_result("select", "--rows", "4096")
    assert code == 0 and all("own vectors at 4096 rows" in found[key] for key in ("verdict", "blind"))


@pytest.mark.parametrize("command", ["copy", "needle", "select"])
def test_a_context_of_no_length(tmp_path, command):
    """null says nothing about the context; 40 leave no room for a question, which is said."""
    flags = command, "--ckpt-path", askable(tmp_path / "short", max_position_embeddings=40)
    code, _, error = lab_output(*flags)
    assert code == 2 and "max_position_embeddings is 40: too short to ask anything" in error
    path = tmp_path / "short" / "config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    for unsaid in ({}, {"max_position_embeddings": None}):
        path.write_text(json.dumps(config | unsaid))
        assert subject_of(str(tmp_path / "short")).longest == generate.DEFAULT_CONTEXT - ANSWER


@pytest.mark.parametrize("argv", [("copy", "--distance", "58", "--samples", "1"), ("select", "--rows", "64"),
                                  ("needle", "--lengths", "128", "--depths", "0", "--samples", "1")],
                         ids=lambda argv: argv[0])
def test_a_nan_sends_to_audit(monkeypatch, argv):
    """Planted: NaN in the last indexer's keys, then in the norm before the head."""
    planted_fault(monkeypatch, lambda engine: attentions(engine, 4)[-1].indexer.compressor.norm.weight
                  .data.fill_(math.nan))
    code, _, error = lab_output(*argv)
    if argv[0] != "copy":       # which watches no indexer, and its answer may well be finite
        layer = max(layer for layer, ratio in enumerate(subject_of(BOX).args.compress_ratios) if ratio == 4)
        assert code == 2 and f"layer {layer}'s index scores are not finite: run audit" in error
    monkeypatch.undo()
    planted_fault(monkeypatch, lambda engine: engine.norm.weight.data.fill_(math.nan))
    code, _, error = lab_output(*argv)
    assert code == 2 and "logits are not finite: run audit" in error


def test_an_interrupted_command(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt
    monkeypatch.setitem(LAB, "select", LAB["select"]._replace(run=interrupted))
    assert lab_output("select")[::2] == (130, "\nselect: interrupted\n")


def test_a_heat_map_in_ascii(monkeypatch):
    """Five levels that differ, none of them the sign for what was not measured; odd letters become ?."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    heat = Heat("h", ["row"], list("abcdef"), [[0, .25, .5, .75, 1, None]])
    report = Report("é", [], [], "fine", "all", None, {}, (heat,))
    monkeypatch.setitem(LAB, "select", LAB["select"]._replace(run=lambda args: report))
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["test_parity.py", "select"])
        assert main() == 0
    out.seek(0)
    text = out.read()
    assert text.startswith("?\n") and "row   . + * # ?\n" in text


def test_svg_has_the_cells_of_the_terminal(tmp_path, monkeypatch):
    """Valid XML, and a rect for each cell of the printed grids, in their order, as dark as it."""
    monkeypatch.setitem(globals(), "code_case", functools.partial(code_case, 1024))
    code, out, _ = lab_output("select", "--rows", "64,100", "--svg", tmp_path / "heat.svg")
    printed = []
    for block in out.split("\n\n"):
        title, *lines = block.splitlines()
        if "Jaccard with the exact choice" in title:
            columns, wide = lines[0].split(), max(map(len, lines[0].split())) + 1
            left = len(lines[0]) - wide * len(columns) + 1
            printed += [line[left + wide * i] for line in lines[1:] for i in range(len(columns))]
    drawn = xml.dom.minidom.parse(str(tmp_path / "heat.svg")).getElementsByTagName("rect")
    levels = [4 * (255 - int(re.match(r"rgb\((\d+),", rect.getAttribute("fill"))[1])) / 230 for rect in drawn]
    assert code == 0 and len(drawn) == len(printed) == 3 * 2 * len(INDEX_FORMATS)
    assert len({(rect.getAttribute("x"), rect.getAttribute("y")) for rect in drawn}) == len(drawn)
    assert all(abs(level - SHADES.index(sign)) < 0.52 for level, sign in zip(levels, printed))


@pytest.mark.parametrize("path", ["{tmp}/nowhere/heat.svg", "{tmp}"])
def test_svg_path_is_checked_before_the_run(tmp_path, monkeypatch, path):
    monkeypatch.setitem(LAB, "select", LAB["select"]._replace(run=lambda args: pytest.fail("it ran")))
    code, out, error = lab_output("select", "--svg", path.format(tmp=tmp_path))
    assert code == 2 and not out and "no file can be written there; name another" in error


def test_a_report_outlives_its_svg(monkeypatch):
    """A disk that is full shows only when it is written to."""
    monkeypatch.setitem(globals(), "code_case", functools.partial(code_case, 1024))
    code, out, error = lab_output("select", "--rows", "16", "--svg", "/dev/full")
    assert code == 2 and "It cannot see:" in out and "the report is whole, name another file" in error


def test_planted_secrets_lie_where_they_say():
    tokenizer = generate.load_tokenizer(BOX)
    for before, after in ((0, 0), (0, 100), (70, 30)):
        asked = planted(tokenizer, before, after, random.Random(before))
        assert tokenizer.decode(asked.prompt[asked.first:asked.last + 1]).strip() == asked.secret
        assert tokenizer.decode(asked.said[asked.lead:]).strip() == asked.secret
        assert before / 2 <= asked.first <= before + 12 and asked.distance >= after / 2


def test_first_wrong_token():
    tokenizer = generate.load_tokenizer(BOX)
    asked = planted(tokenizer, 0, 0, random.Random(0))
    start = tokenizer.decode(asked.said[asked.lead:-1]).strip()
    assert first_wrong(tokenizer, asked, f"It is {asked.secret}.") == 0
    assert first_wrong(tokenizer, asked, f"It is {start}, I think.") == len(asked.said) - asked.lead
    assert first_wrong(tokenizer, asked, "It is 42.") == 1


def test_indexers_are_watched_where_they_are():
    """What the recorder shows of positions 90 to 149, in chunks of 64, is what the reference has there."""
    tokens, first = random_tokens(150), 90
    engine, reference = load(fixture("bf16"), max_chunk=64), Reference(fixture("bf16"))
    with watched_indexers(engine, first) as seen:
        engine(tokens)
    h, worst = reference.embed(tokens[0].numpy()), 0
    for i in range(len(engine.layers)):
        h, named = reference.block(i, h, tokens[0].numpy())
        if i not in seen:
            continue
        assert len(seen[i].scores) == len(seen[i].chosen) == len(seen[i].q) == len(tokens[0]) - first
        for p, (scores, chosen) in enumerate(zip(seen[i].scores, seen[i].chosen), first):
            visible = (p + 1) // 4
            worst = max(worst, relative_error(scores[:visible], named["attn.index_scores"][p, :visible]))
            assert set(chosen.tolist()) - {-1} == set(np.flatnonzero(named["attn.topk"][p]).tolist())
        keys = torch.cat(seen[i].keys)
        worst = max(worst, relative_error(keys, named["attn.index_keys"]))
        worst = max(worst, relative_error(torch.stack(seen[i].q), named["attn.index_q"][first:]))
    proof("the lab's recorder of indexers", REFERENCE, "fp32", worst, EXACT, SHARED_BLIND)


def test_copy_clears_the_box():
    code, found = lab_result("copy", "--samples", "4")
    assert code == 0 and found["healthy"] and "no memory is lost" in found["verdict"]
    assert found["beyond"] and all(row["reach"] > found["window"] for row in found["beyond"])
    assert all(row["exact_match"] >= FINE for row in found["inside"] + found["beyond"])


def planted_fault(monkeypatch, breaks: typing.Callable):
    """Every model that is loaded from here on is broken: breaks(engine)."""
    load_model = generate.load_model

    def broken(*args, **kwargs):
        engine, tokenizer = load_model(*args, **kwargs)
        breaks(engine)
        return engine, tokenizer
    monkeypatch.setattr(generate, "load_model", broken)


def without_rows(monkeypatch, far_only: bool):
    """Attention leaves out compressed rows that were chosen: all, or those that lie before the window."""
    now = types.SimpleNamespace()
    forward, sparse_attn = model.Attention.forward, model.sparse_attn

    def on_forward(attn, x, start_pos):
        now.attn, now.start = attn, start_pos
        return forward(attn, x, start_pos)

    def on_attend(q, kv, sink, idxs, scale):
        left_out = idxs >= now.attn.ring_size
        if far_only:
            p = now.start + torch.arange(q.size(1)).unsqueeze(1)
            end = (idxs - now.attn.ring_size + 1) * now.attn.compress_ratio
            left_out &= end <= p + 1 - now.attn.window_size
        return sparse_attn(q, kv, sink, idxs.masked_fill(left_out, -1), scale)
    monkeypatch.setattr(model.Attention, "forward", on_forward)
    monkeypatch.setattr(model, "sparse_attn", on_attend)


def test_copy_finds_a_memory_that_ends_with_the_window(monkeypatch):
    without_rows(monkeypatch, far_only=True)
    code, found = lab_result("copy", "--samples", "3")
    assert code == 1 and "Fine inside the window, lost beyond it" in found["verdict"]
    assert found["inside"] and all(row["exact_match"] == 0 for row in found["beyond"])


def test_copy_finds_a_model_that_copies_nothing(monkeypatch):
    monkeypatch.setattr(model, "sparse_attn", lambda q, *rest: torch.zeros_like(q))
    code, found = lab_result("copy", "--samples", "1")
    assert code == 1 and "Look elsewhere first" in found["verdict"]


NEEDLES = "needle", "--lengths", "512", "--depths", "0,30,60,90"


def test_needle_clears_the_box():
    code, found = lab_result(*NEEDLES)
    assert code == 0 and found["healthy"] and len(found["cells"]) == 8
    assert all(any(sight["chosen"] for sight in cell["layers"].values())
               for cell in found["cells"] if cell["found"])


def test_needle_counts_the_rows_before_its_own():
    """Scores that are made up: so many winners, then the needle's first row, then all others."""
    subject = subject_of(BOX)
    topk = subject.args.index_topk
    asked = planted(subject.tokenizer, 8 * topk + 80, 60, random.Random(0))
    engine, index_score = lab_engine(BOX, len(asked.prompt)), model.index_score
    best = needle_rows(asked, len(asked.prompt) // 4)[0]
    assert best > topk
    for winners in (0, 2, topk - 1, topk):
        def made_up(q, k, weights, visible):
            scores = index_score(q, k, weights, visible)
            rows = -torch.arange(scores.size(-1)).float()
            rows[best:best + 1], rows[:winners] = 1, 2
            return rows.where(scores > -math.inf, scores)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "index_score", made_up)
            for sight in sights(engine, asked, 0).values():
                assert (sight.rank, sight.chosen) == (winners, winners < topk)


def test_needle_sees_what_float64_sees():
    """rank and rows, from the recorded index vectors by brute force; the engine in fp32, round trips off."""
    asked = planted(subject_of(BOX).tokenizer, 100, 300, random.Random(3))
    engine = load(BOX, max_seq_len=len(asked.prompt) + len(asked.said))
    seen, cases = sights(engine, asked, 0), recorded_cases(engine, asked)
    assert seen.keys() == cases.keys() and seen
    for layer, case in cases.items():
        scores, needle = exact_scores(case)[-1], list(case.needles[-1])
        rank = int((scores > scores[needle].max()).sum())
        assert (seen[layer].rank, seen[layer].rows) == (rank, np.isfinite(scores).sum())


def test_select_counts_ranks_and_losses():
    """Against float64, where all sums are exact: needles planted at ranks 1, 3, top and the first too low."""
    rows, topk = 200, 16
    order = random.Random(0).sample(range(rows), rows)
    keys = torch.zeros(rows, 128)
    keys[order, 0] = torch.arange(rows, 0, -1).float()      # order[i] has rank i + 1
    q, weights = torch.zeros(4, 2, 128), torch.ones(4, 2)
    q[:, :, 0] = 1
    ranks = [1, 3, topk, topk + 1]
    needles = [range(order[rank - 1], order[rank - 1] + 1) for rank in ranks]
    case = IndexCase(q, keys, weights, torch.full((4, 1), rows), topk, needles)
    exact = exact_scores(case)
    found = selection(case, "fp32", exact)
    counted = [1 + int((row > row[needle[0]]).sum()) for row, needle in zip(exact, needles)]
    assert counted == ranks and found["rank"] == statistics.median(counted)
    assert found["kept"] == 3 / 4 and found["jaccard"] == 1 and found["as_exact"]


def noisy_keys(compressor: model.Compressor, args, output):
    """Hook: the index keys that were just written are noise."""
    x, start_pos = args
    written = compressor.kv_cache[:, start_pos // 4:(start_pos + x.size(1)) // 4]
    written.copy_(torch.randn(written.shape, generator=generator(start_pos)))


def share_chosen(cells: list[dict], layer: str) -> float:
    return statistics.mean(cell["layers"][layer]["chosen"] for cell in cells)


def test_needle_finds_noisy_index_keys(monkeypatch):
    """In all indexed layers: lost, because not selected. In the last one: seen there, and not before."""
    planted_fault(monkeypatch, lambda engine: [attn.indexer.compressor.register_forward_hook(noisy_keys)
                                               for attn in attentions(engine, 4)])
    code, found = lab_result(*NEEDLES)
    assert code == 1 and "Not selected, above all in layer" in found["verdict"]
    monkeypatch.undo()
    planted_fault(monkeypatch, lambda engine: attentions(engine, 4)[-1].indexer.compressor
                  .register_forward_hook(noisy_keys))
    cells = lab_result(*NEEDLES)[1]["cells"]
    first, *_, last = cells[0]["layers"]
    assert share_chosen(cells, first) >= 0.8 and share_chosen(cells, last) <= 0.6


def test_needle_finds_rows_that_are_chosen_and_not_attended(monkeypatch):
    without_rows(monkeypatch, far_only=False)
    code, found = lab_result(*NEEDLES)
    assert code == 1 and share_chosen(found["cells"], next(iter(found["cells"][0]["layers"]))) >= 0.9
    assert "Selected and not used" in found["verdict"] and not any(c["found"] for c in found["cells"])


# From figures that are not this code's: of the exact choice fp4 shared .979, .900, .850 on Gaussian vectors.
FP4_JACCARD = {600: 0.959, 2048: 0.818, 8192: 0.739}


def test_select_clears_the_box():
    code, found = lab_result("select", "--rows", ",".join(map(str, FP4_JACCARD)))
    assert code == 0 and found["healthy"] and "bit for bit" in found["verdict"]
    lines = {(line["source"], line["rows"], line["format"]): line for line in found["selections"]}
    for rows, jaccard in FP4_JACCARD.items():
        assert lines["Gaussian", rows, "fp32"]["jaccard"] >= 0.999
        assert abs(lines["Gaussian", rows, "fp4+H"]["jaccard"] - jaccard) < 0.03
    assert any(line["source"] == "checkpoint" for line in found["selections"])


def test_select_finds_a_wrong_scale(monkeypatch):
    """fp4 scales 8 times too large leave a value or two: the choice collapses, the other formats stay."""
    monkeypatch.setattr(kernel, "FP4_MAX", kernel.FP4_MAX / 8)
    code, found = lab_result("select", "--rows", "2048")
    assert code == 1 and "fp4+H rounds" in found["verdict"] and "fp8 rounds" not in found["verdict"]
    lines = {line["format"]: line for line in found["selections"] if line["source"] == "Gaussian"}
    assert lines["fp4+H"]["jaccard"] < 0.6 and lines["fp8+H"]["jaccard"] > 0.9


def test_select_finds_scores_without_relu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "relu_", lambda scores: scores)
    code, found = lab_result("select", "--rows", "2048")
    assert code == 1 and "fp32, bf16, fp8, fp4 did not choose as float64" in found["verdict"]


def test_select_finds_a_rotation_that_is_none(monkeypatch):
    """It keeps no products: signs are lost. Codes and roundings stay as they must be."""
    monkeypatch.setattr(model, "rotate_activation",
                        lambda x: kernel.hadamard_transform(x, x.size(-1) ** -0.5).abs())
    code, found = lab_result("select", "--rows", "64")
    assert code == 1 and "all choose as float64" in found["verdict"]
    assert "every rounding is NumPy's" in found["verdict"]


@pytest.mark.parametrize("tile", [model.INDEX_TILE, 1])
def test_indexer_over_32768_rows(monkeypatch, tile):
    """Five queries at the end of 131,072 tokens, 64 heads x 128, top 511, against float64. All numbers are
    small whole ones, so scores are exact; each key is there twice, so the choice ends within a tie."""
    monkeypatch.setattr(model, "INDEX_TILE", tile)
    monkeypatch.setattr(kernel, "INDEX_HEADS_TILE", 1 << 22)
    rows, m, rng = 32768, 5, generator(0)
    config = SMALL | {"index_n_heads": 64, "index_topk": 511}
    indexer = model.Indexer(model.ModelArgs.from_config(config))
    q, keys, weights = (torch.randint(-3, 4, shape, generator=rng).float()
                        for shape in ((1, m, 64, 128), (rows // 2, 128), (1, m, 64)))
    keys = keys.repeat(2, 1)[torch.randperm(rows, generator=rng)]
    indexer.kv_cache, indexer.softmax_scale = keys[None], 1 / 8
    indexer.wq_b.forward, indexer.weights_proj.forward = lambda qr: q.flatten(2).clone(), lambda x: weights
    indexer.compressor.forward = lambda x, start_pos: None
    start = 4 * rows - m
    indexer.compressor.freqs_cis = torch.ones(m, 32, dtype=torch.complex64)     # rope leaves q alone
    with model.run_mode(model.Mode(torch.float32, (), "ue8m0")):
        chosen = indexer(torch.zeros(1, m, 256), torch.zeros(1, m, 128), start, 7)[0] - 7
    visible = torch.tensor([[(p + 1) // 4] for p in range(start, start + m)])
    exact = exact_scores(IndexCase(q[0], keys, weights[0] / 64, visible, 511, []))
    for scores, own, seen in zip(exact, chosen.tolist(), visible):
        best = np.sort(scores)[::-1][:511]
        assert len(set(own)) == 511 and max(own) < int(seen)
        assert np.array_equal(np.sort(scores[own])[::-1], best)
        assert (scores == best[-1]).sum() > (best == best[-1]).sum()        # the tie that is cut
    assert int(visible[0]) < rows == int(visible[-1])


# ---- swap

ONE_STEP = 1.01         # a value rounded down or up, not to the nearest; and the rounding of this very sum
FORMAT_KEYS = {"quantization_config", "num_nextn_predict_layers"}       # what a conversion may change
EXPERT_UNIT = re.compile(r"(.*\.(?:experts\.\d+|shared_experts))\.(w[123])\.weight")


class Folder(Checkpoint):
    """A published folder, or one in the vendor's layout (model{rank}-mp{world}): whole tensors, plain names.

    convert.py finds the files and reads their headers. Joining, by shape, and decoding happen here.
    """

    def __init__(self, folder):
        folder = str(folder)
        self.folder, self.config = folder, convert.read_config(folder)
        model.ModelArgs.from_config(copy.deepcopy(self.config))     # names what the config lacks
        convert.check_config(self.config)
        ranks = self.read_ranks()
        self.pieces = collections.defaultdict(list)     # name: what each rank holds of it
        for part in ranks:
            for name, stored in convert.select_mtp(part, self.config, wanted=True, quiet=True).items():
                self.pieces[name].append(stored)
        shapes = {name: shape for name, _, shape in convert.parameters(self.config)}
        self.axes, self.entries, self.wanted = {}, {}, {}
        for name, pieces in self.pieces.items():
            dtype = "I8" if pieces[0].dtype == "F4" else pieces[0].dtype
            odd = {piece.dtype for piece in pieces} - {pieces[0].dtype}
            if odd or dtype not in STORAGE:
                raise ValueError(f"{pieces[0].file.path}: {name} is {' and '.join({dtype, *odd})}, which the "
                                 f"reference does not read; it reads {', '.join(STORAGE)}")
            self.wanted[name] = whole = self.stored_shape(name, shapes)
            self.axes[name] = axis = join_axis([piece.shape for piece in pieces], whole)
            self.entries[name] = dtype, pieces[0].shape if axis is None else whole, None

    def read_ranks(self) -> list[convert.Tensors]:
        """What each rank holds; a published folder is one rank's."""
        worlds = {int(m[2]) for m in map(convert.CONVERTED.fullmatch, os.listdir(self.folder)) if m}
        self.converted = bool(worlds)
        if not worlds:
            return [convert.read_published(self.folder)]
        if len(worlds) > 1 or convert.published_files(self.folder):
            raise ValueError(f"{self.folder} holds more than one checkpoint: give a folder with published "
                             "files alone, or with those of one conversion")
        world = worlds.pop()
        return [convert.read_checkpoint(self.folder, rank, world) for rank in range(world)]

    def stored_shape(self, name, shapes):
        """The whole shape that a tensor has by the config; None if the model has no such tensor."""
        weight = convert.weight_of(name)
        held, shape = self.pieces.get(weight), shapes.get(weight)
        if shape is None or not held or held[0].dtype not in convert.QUANTISED:
            return shape
        return convert.quantised_shapes(held[0].dtype, shape)[name != weight]

    def parts(self, name):
        """What each rank holds of a tensor, not yet read."""
        storage = np.dtype(STORAGE[self.entries[name][0]])
        return [np.memmap(piece.file.path, storage, "r", piece.offset, piece.shape)
                for piece in self.pieces[name]]

    def raw(self, name):
        """The stored bits; those of several ranks joined, which reads them."""
        parts = self.parts(name)
        return parts[0] if self.axes[name] is None else np.concatenate(parts, axis=self.axes[name])

    def check(self):
        """Refuses a folder whose tensors are not those of its config."""
        expected = list(convert.parameters(self.config, mtp=any(map(is_mtp, self.entries))))
        found = {name: types.SimpleNamespace(dtype=dtype, local_shape=shape)
                 for name, (dtype, shape, _) in self.entries.items()}
        linears = {name for name, kind, _ in expected if kind in ("linear", "expert")}
        convert.check_tensors(self.folder, found, {name: shape for name, _, shape in expected}, linears)

    def strips(self, name):
        """A tensor's values in float32, VOCAB_CHUNK rows at a time: embedding and head are large."""
        whole = self.tensor(name, np.float32) if self.quantised(name) else None
        for first in range(0, self.entries[name][1][0], VOCAB_CHUNK):
            rows = slice(first, first + VOCAB_CHUNK)
            yield self.rows(name, rows) if whole is None else whole[rows]

    def grid(self, name, first, count):
        """The scales of `count` rows of a quantised weight, from `first` on, as wide as the rows; or 1."""
        if not self.quantised(name):
            return np.float32(1)
        dtype, (_, columns), _ = self.entries[name]
        height, width, columns = (1, FP4_BLOCK, 2 * columns) if dtype == "I8" else (
            WEIGHT_BLOCK, WEIGHT_BLOCK, columns)
        scale = self.tensor(convert.scale_of(name), np.float32)[first // height:]
        return scale.repeat(height, axis=0)[:count].repeat(width, axis=1)[:, :columns]


# Of each stored format: the nearest value, and the distance of neighbours. A table of ids rounds nothing.
ROUNDING = {
    "BF16": (round_bf16, lambda x: _quantum(x, 3e38, -126, 7)), "F8_E4M3": (round_e4m3, quantum_e4m3),
    "F32": (np.asarray, lambda x: _quantum(x, 3e38, -126, 23)), "I8": (round_e2m1, quantum_e2m1),
    "I64": (np.asarray, np.zeros_like)}


def is_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def join_axis(shapes: list[tuple], whole: typing.Optional[tuple]) -> typing.Optional[int]:
    """The dimension along which pieces make the whole; None where the first is all there is to have."""
    if len(shapes) == 1 or whole is None or shapes[0] == whole:
        return None
    for axis, size in enumerate(whole):
        rest = whole[:axis] + whole[axis + 1:]
        if sum(shape[axis] for shape in shapes) == size and all(
                shape[:axis] + shape[axis + 1:] == rest for shape in shapes):
            return axis
    return None


def config_differences(copied: Folder, original: Folder) -> list[str]:
    """The keys by which the two configs compute something else; another model's config is refused."""
    a, b = (folder.config | {"compress_ratios": folder.config["compress_ratios"]
                             [:folder.config["num_hidden_layers"]]} for folder in (original, copied))
    odd = [key for key in convert.CONFIG_KEYS if a[key] != b[key] and key not in FORMAT_KEYS]
    if odd:
        raise ValueError(f"{copied.folder} and {original.folder} are not the same model ({', '.join(odd)} "
                         "differ): give the checkpoint that it was converted from")
    return sorted(key for key in {*model.PUBLISHED_KEYS, "rope_scaling"} - FORMAT_KEYS
                  if a.get(key) != b.get(key))


class Deviation(typing.NamedTuple):
    """How far a tensor is from the original's. A step is the distance of neighbours in its own format."""
    error: float        # max |a - b| / max |a|
    steps: float        # the farthest value's
    beyond: int         # values that rounding does not explain; values clipped on purpose count
    size: int

    def cells(self) -> list[str]:
        steps = f"{self.steps:.3g}" if self.steps < math.inf else ""
        return [figure(self.error), steps, f"{self.beyond} of {self.size}"]


def figure(error: float) -> str:
    return f"{error:.1e}" if 0 < error < math.inf else "not finite" if error else "0"


@np.errstate(all="ignore")      # what is damaged may divide by 0
def deviation(original: Folder, other: Folder, name: str) -> Deviation:
    """Compares the decoded values, a strip at a time. A NaN that both have is no difference.

    Rounding explains a difference of one step, where the original's value is none of the other's format.
    """
    error = largest = steps = 0.0
    beyond = size = first = 0
    nearest, step = ROUNDING[other.entries[name][0]]
    for a, b in zip(original.strips(name), other.strips(name)):
        size, largest = size + a.size, max(largest, float(np.nanmax(np.abs(a), initial=0)))
        different = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if different.any():
            grid = other.grid(name, first, len(a))
            apart = np.abs(np.float64(a) - b)
            ratio = apart / (step(b / grid) * grid)
            apart, ratio = (np.where(np.isnan(x), np.inf, x)[different] for x in (apart, ratio))
            error, steps = max(error, float(apart.max())), max(steps, float(ratio.max()))
            beyond += int(((ratio > ONE_STEP) | (nearest(a / grid) * grid == a)[different]).sum())
        first += len(a)
    return Deviation(error / largest if largest else error, steps, beyond, size)


class Mixture:
    """Tensors of `base`, but for the weights in `swapped`, which with their scales come from `other`."""

    def __init__(self, base, other, swapped=()):
        self.base, self.other, self.swapped = base, other, frozenset(swapped)

    def source(self, name):
        return self.other if name in self.swapped else self.base

    def quantised(self, name):
        return self.source(name).quantised(name)

    def rows(self, name, index):
        return self.source(name).rows(name, index)

    def tensor(self, name, dtype):
        return self.source(name).tensor(name, dtype)


class FolderReference(Reference):
    """The reference on any Folder."""
    files = Folder

    def __init__(self, folder):
        try:
            super().__init__(folder)
        except KeyError as error:
            raise ValueError(f"{folder}: config.json lacks {error}, which the reference needs") from None
        self.checkpoint.check()


class Swap:
    """The reference on converted weights, some of them replaced by the original's; one prompt."""

    def __init__(self, converted: str, original: str, count: int):
        self.copy, self.original = FolderReference(converted), FolderReference(original)
        self.config_keys = config_differences(self.copy.checkpoint, self.original.checkpoint)
        self.tokens = swap_prompt(self.copy.config, count)
        self.truth, _ = self.run(self.original)
        if not np.isfinite(self.truth).all():
            raise ValueError(f"the answer of {original} is not finite: run audit on it first")
        self.before, self.streams = self.run(self.copy)     # the copy's own answer; streams into each layer

    def run(self, reference, first=-1, h=None):
        """Logits [s,vocab], from layer `first` and its streams h on; and the streams into each layer."""
        streams = []
        with np.errstate(all="ignore"):     # a fault may well overflow
            h = reference.embed(self.tokens) if first < 0 else h
            for i in range(max(first, 0), self.copy.config["num_hidden_layers"]):
                streams.append(h)
                h, _ = reference.block(i, h, self.tokens)
            return reference.head(h), [*streams, h]

    def layer_of(self, name: str) -> int:
        """The first layer that a weight can change: -1 the embedding, the number of layers the head."""
        layer = re.match(r"layers\.(\d+)\.", name)
        return int(layer[1]) if layer else -1 if name == "embed.weight" else len(self.streams) - 1

    def answer(self, names, source=None, config=None):
        """Logits with these weights, and the config if one is given, of the source (the original)."""
        reference = copy.copy(self.copy)
        reference.checkpoint = Mixture(self.copy.checkpoint, source or self.original.checkpoint, names)
        first = min(map(self.layer_of, names), default=-1)
        if config:
            reference.config, reference.eps, first = config, config["rms_norm_eps"], -1
        return self.run(reference, first, self.streams[max(first, 0)])[0]

    def against_truth(self, logits) -> tuple[float, int]:
        """Relative error of the logits, and at how many positions the likeliest token is another."""
        error = relative_error(logits, self.truth) if np.isfinite(logits).all() else math.inf
        return error, int((logits.argmax(axis=1) != self.truth.argmax(axis=1)).sum())


def swap_prompt(config: dict, count: int) -> np.ndarray:
    """Random token ids, the same at each run: they reach more rows and experts than a text."""
    return np.random.default_rng(0).integers(0, config["vocab_size"], count)


def swap_units(swap: Swap, names: str) -> dict[str, list[str]]:
    """The weights that match, an expert's together: {expert or weight: weights}. Both folders have them."""
    try:
        pattern = re.compile(names)
    except re.error as error:
        raise ValueError(f"--names {names}: no regular expression ({error})") from None
    weights = [name for name, *_ in convert.parameters(swap.copy.config)
               if all(name in side.checkpoint.entries for side in (swap.copy, swap.original))]
    units: dict[str, list[str]] = {}
    for name in filter(pattern.search, weights):
        expert = EXPERT_UNIT.fullmatch(name)
        units.setdefault(expert[1] if expert else name, []).append(name)
    if not units:
        raise ValueError(f"--names {names} matches no weight; there are {weights[0]}, {weights[1]}, ...")
    return units


class Swapped(typing.NamedTuple):
    """What putting one unit of the original in did."""
    unit: str
    weights: list[str]      # those that differ
    stored: list[str]       # the stored tensors that make the difference: a weight, its scale, or both
    deviation: Deviation    # of the worst of them
    error: float            # of the logits after the swap, against the original's
    moved: int              # positions where the likeliest token is not the original's


def swap_each(swap: Swap, units: dict[str, list[str]]) -> list[Swapped]:
    """Swaps every unit that differs from the original, alone."""
    rows, progress = [], convert.Progress("swap")
    for i, (unit, names) in enumerate(units.items()):
        found = {name: deviation(swap.original.checkpoint, swap.copy.checkpoint, name) for name in names}
        found = {name: far for name, far in found.items() if far.error}
        if found:
            worst = max(found.values(), key=lambda far: (far.beyond > 0, far.error))
            stored = [part for name in found for part in stored_difference(swap, name)]
            after = swap.against_truth(swap.answer(list(found)))
            rows.append(Swapped(unit, list(found), stored, worst, *after))
        progress(i + 1, len(units))
    if swap.config_keys:
        error = swap.against_truth(swap.answer([], config=swap.original.config))
        keys = len(swap.config_keys)
        differ = Deviation(math.inf, math.inf, keys, keys)
        rows.append(Swapped("config.json", swap.config_keys, swap.config_keys, differ, *error))
    return rows


def stored_difference(swap: Swap, name: str) -> list[str]:
    """Of a weight and its scale, those whose bits differ; the weight, where the formats differ too."""
    a, b = swap.original.checkpoint, swap.copy.checkpoint
    both = [part for part in (name, convert.scale_of(name)) if part in a.entries and part in b.entries]
    quantised = a.quantised(name), b.quantised(name)
    if len({*quantised}) > 1 or any(a.entries[part][0] != b.entries[part][0] for part in both):
        return [name]
    return [part for part in both if not np.array_equal(a.raw(part), b.raw(part))]


def swap_verdict(rows: list[Swapped], before: float, rest: float,
                 all_named: bool) -> tuple[str, typing.Optional[bool]]:
    """The sentence, and whether the conversion is healthy (None: the cause is not among the names)."""
    guilty = [row for row in rows if row.deviation.beyond]
    if guilty:
        told = []
        for row in guilty[:10]:
            effect = (f"its swap alone leaves the error at {figure(before)}"
                      if figure(row.error) == figure(before) else "its swap restores the answer, exactly"
                      if row.error == 0 else
                      f"its swap brings the error from {figure(before)} to {figure(row.error)}")
            told.append(f"{swap_label(row)}: {effect}")
        more = f"; and {len(guilty) - 10} more" if len(guilty) > 10 else ""
        return f"CONVICTED: {'; '.join(told)}{more}.", False
    if rest and rest >= before / 2:
        return (f"These tensors are cleared, but with all of them swapped {figure(rest)} of the error "
                f"{figure(before)} remains: the cause has another name."), False if all_named else None
    if rows:
        return (f"CLEARED: {len(rows)} differ by no more than one rounding to their format, which together "
                f"moves the logits by {figure(before)}."), True
    return "CLEARED: every tensor asked for has exactly the original's values.", True


def swap_label(row: Swapped) -> str:
    """The stored tensor at fault, or the expert with its parts in brackets."""
    if len(row.stored) == 1 and row.unit != "config.json":
        return row.stored[0]
    return f"{row.unit} ({', '.join(part.removeprefix(row.unit + '.') for part in row.stored)})"


@lab("swap", "a converted checkpoint with tensors of the original put in: is the conversion at fault?",
     original={"metavar": "DIR", "required": True, "help": "the published checkpoint it was converted from"},
     names={"metavar": "REGEX", "default": ".",
            "help": "only tensors whose name matches (default: all; each that differs costs a run)"},
     tokens={"type": int, "default": 160, "help": "length of the random prompt (default: 160)"})
def swap_tensors(args: argparse.Namespace) -> Report:
    """The reference on --ckpt-path, then once more for each tensor that differs from --original's."""
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: it must be 1 or more")
    if os.path.realpath(args.ckpt_path) == os.path.realpath(args.original):
        raise ValueError(f"--original {args.original} is the folder that is examined: compared with itself "
                         "it proves nothing; give --ckpt-path another")
    swap = Swap(args.ckpt_path, args.original, args.tokens)
    units = swap_units(swap, args.names)
    before, moved = swap.against_truth(swap.before)
    control = next(iter(units))
    same = np.array_equal(swap.answer(units[control], swap.copy.checkpoint), swap.before, equal_nan=True)
    if not same:
        raise ValueError(f"the control failed: swapping {control} for itself changed the answer, so nothing "
                         "else would mean anything; the files may be changing while they are read")
    rows = sorted(swap_each(swap, units), key=lambda row: (not row.deviation.beyond, row.error))
    names = [weight for row in rows if row.unit != "config.json" for weight in row.weights]
    rest = swap.against_truth(swap.answer(names, config=swap.original.config if swap.config_keys else None))
    verdict, healthy = swap_verdict(rows, before, rest[0], args.names == ".")
    columns = ["taken from the original", "it differed by", "in steps", "beyond rounding",
               "logits now off by", "argmax differs"]
    of = f" of {args.tokens}"
    table = [["nothing: converted against original", "", "", "", figure(before), f"{moved}{of}"],
             [f"control: {control} from the converted", "0", "0", "", "as above, bit for bit", ""]]
    table += [[swap_label(row), *row.deviation.cells(), figure(row.error), f"{row.moved}{of}"]
              for row in rows[:SWAP_ROWS]]
    if len(rows) > 1:
        table.append([f"all {len(rows)} that differ, at once", "", "", "", figure(rest[0]), f"{rest[1]}{of}"])
    equal = len(units) - len(rows) + bool(swap.config_keys)
    table.append([f"{equal} others: exactly equal", "0", "0", "", "", ""])
    return Report(
        f"Is the conversion at fault? The reference on {args.ckpt_path}, tensors of {args.original} put in.",
        columns, table, verdict, swap_blind(swap, args.tokens), healthy,
        {"before": before, "all": rest[0], "equal": equal,
         "rows": [{"unit": row.unit, "differ": row.stored, "error": row.deviation.error,
                   "steps": row.deviation.steps, "beyond": row.deviation.beyond,
                   "size": row.deviation.size, "logits": row.error, "argmax": row.moved}
                  for row in rows]})


SWAP_ROWS = 20      # rows printed; --json has all
SHARED_READER = "a mistake in reading names and headers, which is convert.py's for both folders"


def swap_blind(swap: Swap, count: int) -> str:
    """What this prompt and this arithmetic leave out."""
    config, missed = swap.copy.config, []
    if 4 in config["compress_ratios"] and (count + 1) // 4 <= config["index_topk"]:
        missed.append(f"the indexer's choice (a prompt of {count} has no more rows than index_topk)")
    if any(map(is_mtp, swap.copy.checkpoint.entries)):
        missed.append("an MTP block's effect (its tensors are compared, the answer does not use them)")
    return "; ".join([*missed, "the effect of experts and rows that this prompt does not use (their values "
                      "are compared)", SHARED_READER, "rounding of activations",
                      "the engine's own loading and arithmetic"])


# ---- audit

class Check(typing.NamedTuple):
    """One question of the audit: what was looked at, and each fault, naming its tensor."""
    what: str
    count: int
    faults: list[str]
    note: str = "fine"

    def row(self) -> list[str]:
        more = f"; and {len(self.faults) - 5} more" if len(self.faults) > 5 else ""
        return [self.what, str(self.count), "; ".join(self.faults[:5]) + more or self.note]


def audit_inventory(folder: Folder) -> list[Check]:
    """Names, shapes and dtypes against the config. Which linears are quantised is for the files to say."""
    entries, mtp = folder.entries, any(map(is_mtp, folder.entries))
    kinds = {name: kind for name, kind, _ in convert.parameters(folder.config, mtp)}
    linears = {name for name, kind in kinds.items() if kind in ("linear", "expert")}
    scales = {convert.scale_of(name) for name in linears & entries.keys() if folder.quantised(name)}
    both = sorted((kinds.keys() | scales) & entries.keys())
    shapes = [f"{name} is {list(entries[name][1])}, not {list(folder.wanted[name])}" for name in both
              if entries[name][1] != folder.wanted[name]]
    may_be = {**dict.fromkeys(scales, ("F8_E8M0", "F32")),
              **{name: ("BF16", *convert.QUANTISED) if name in linears else (kind,)
                 for name, kind in kinds.items()}}
    dtypes = [f"{name} is {entries[name][0]}, not {' or '.join(may_be[name])}" for name in both
              if entries[name][0] not in may_be[name]]
    table = {} if folder.converted else convert.inventory(folder.config, mtp)
    unlike = [name for name in linears & table.keys() & entries.keys()
              if entries[name][0] != table[name]["dtype"]]
    no_mtp = folder.config["num_nextn_predict_layers"] and not mtp and not convert.has_dspark(folder.config)
    missing = sorted((kinds.keys() | scales) - entries.keys())
    return [
        Check("present, of those that the config asks for", len(kinds) + len(scales), missing,
              "fine, without the MTP block" if no_mtp else "fine"),
        Check("known to the config", len(entries), sorted(entries.keys() - kinds.keys() - scales)),
        Check("shape as the config says", len(both), shapes),
        Check("dtype as the config says", len(both), dtypes, f"fine; {len(unlike)} linears in another format "
              f"than the config's, as {min(unlike)}" if unlike else "fine")]


def not_finite(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Where the stored bits are NaN or infinite: e4m3 has two such codes, e8m0 one, FP4 and integers none."""
    return {"BF16": lambda: raw & 0x7F80 == 0x7F80, "F32": lambda: ~np.isfinite(raw),
            "F8_E4M3": lambda: raw & 0x7F == 0x7F, "F8_E8M0": lambda: raw == 0xFF}.get(
                dtype, lambda: np.zeros(raw.shape, bool))()


def scale_faults(folder: Folder, name: str, raw: np.ndarray) -> str:
    """What is wrong with a scale, or nothing. Routed experts with F32 scales have any, even beside ue8m0."""
    bad = not_finite(raw, folder.entries[name][0])
    if bad.any():
        return f"{bad.sum()} of {raw.size} are NaN or infinite"
    if folder.entries[name][0] != "F32":
        return ""       # e8m0: positive, and a power of two, whatever the bits
    if (raw <= 0).any():
        return f"{(raw <= 0).sum()} of {raw.size} are not positive"
    powers = (folder.config.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"
    odd = int((np.frexp(raw)[0] != 0.5).sum()) if powers and not convert.EXPERT.search(name) else 0
    return f"{odd} of {raw.size} are no powers of two, as ue8m0 has them" if odd else ""


SIGN_FREE = {"BF16": 0x7FFF, "F8_E4M3": 0x7F, "I8": 0x77}      # the bits of a value other than its sign


def audit_values(folder: Folder) -> list[Check]:
    """Every tensor's bits, once through: codes that are no numbers, tensors of zeros, the same one twice."""
    scales, weights, dead, twins, copies, ids = [], [], [], [], [], []
    seen, counts, progress = {}, collections.Counter(), convert.Progress("audit")
    for i, (name, (dtype, shape, _)) in enumerate(sorted(folder.entries.items())):
        raw = folder.raw(name)
        if convert.weight_of(name) != name:
            counts["scale"] += 1
            fault = scale_faults(folder, name, raw)
            scales += [f"{name}: {fault}"] if fault else []
        elif dtype == "I64":
            counts["id"] += 1
            fault = id_faults(raw, folder.config["n_routed_experts"])
            ids += [f"{name}: {fault}"] if fault else []
        else:
            counts["weight"] += 1
            bad = int(not_finite(raw, dtype).sum())
            weights += [f"{name}: {bad} of {raw.size} are NaN or infinite"] if bad else []
            if name.endswith(".weight"):        # biases, sinks and the like may well be 0
                counts["matrix"] += 1
                digest = hashlib.blake2b(np.ascontiguousarray(raw)).digest()
                if not (raw & SIGN_FREE[dtype] if dtype in SIGN_FREE else raw).any():
                    dead.append(name)
                elif len(shape) == 2 and (first := seen.setdefault(digest, name)) != name:
                    twins.append(f"{name} has the bits of {first}")
        if len(folder.pieces[name]) > 1 and folder.axes[name] is None:
            counts["copied"] += 1
            copies += [name] if any(not np.array_equal(part, raw) for part in folder.parts(name)) else []
        progress(i + 1, len(folder.entries))
    checks = [Check("scales finite, positive, and powers of two if ue8m0", counts["scale"], scales),
              Check("weights free of NaN and infinity", counts["weight"], weights),
              Check("weights with a value other than 0", counts["matrix"], dead),
              Check("matrices that are no other's double", counts["matrix"], twins),
              Check("hash rows name experts that exist", counts["id"], ids)]
    return checks + ([Check("the same on each rank that has it whole", counts["copied"], copies)]
                     if counts["copied"] else [])


def id_faults(raw: np.ndarray, experts: int) -> str:
    """What is wrong with a table of expert ids [vocab,k], or nothing."""
    outside = ((raw < 0) | (raw >= experts)).any(axis=1)
    return (f"row {outside.argmax()} names an expert that there is not, 0 to {experts - 1} "
            f"({outside.sum()} such rows)" if outside.any() else "")


def differing_rows(original: Folder, folder: Folder, name: str) -> np.ndarray:
    """The rows that are not the original's, bit for bit after decoding."""
    def bits(rows):
        return rows.view(np.uint32) if rows.dtype == np.float32 else rows
    strips = zip(original.strips(name), folder.strips(name))
    return np.flatnonzero(np.concatenate([(bits(a) != bits(b)).any(axis=1) for a, b in strips]))


def audit_tokenizer(folder: Folder, original: Folder) -> list[Check]:
    """tokenizer.json byte for byte, where both have one."""
    paths = [Path(side.folder, "tokenizer.json") for side in (folder, original)]
    if not all(path.exists() for path in paths):
        return []
    ours, theirs = (path.read_bytes() for path in paths)
    return [Check("tokenizer.json as in the original", 1, [] if ours == theirs else [
        f"tokenizer.json: {len(ours)} bytes, {len(theirs)} in the original, and not the same ones"])]


def audit_original(folder: Folder, original: Folder, count: int) -> list[Check]:
    """Tables bit for bit, and sampled experts bit for bit, or to one rounding where they are re-quantised."""
    def comparable(name):
        return all(name in f.entries and f.entries[name][1] == f.wanted[name] for f in (folder, original))
    tables = [name for name, kind, _ in convert.parameters(folder.config)
              if name in ("embed.weight", "head.weight") or kind == "I64"]
    keys, faults = config_differences(folder, original), []
    idle = sorted(key for key in folder.config.keys() | original.config.keys()
                  if folder.config.get(key) != original.config.get(key) and key not in keys)
    tables = [name for name in tables if comparable(name)]
    for name in tables:
        rows = differing_rows(original, folder, name)
        if len(rows):
            faults.append(f"{name}: row {rows[0]}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else ""))
    checks = [Check("config.json as in the original, but for the format", 1, keys,
                    f"fine; format or idle keys that differ: {', '.join(idle)}" if idle else "fine"),
              *audit_tokenizer(folder, original),
              Check("embedding, head and hash rows as in the original", len(tables), faults)]
    experts = sorted({unit[1] for name in folder.entries if (unit := EXPERT_UNIT.fullmatch(name))
                      if convert.EXPERT.search(name)})
    faults, rounded, compared = [], 0, 0
    sample = sorted(random.Random(0).sample(experts, min(count, len(experts))))
    for name in (f"{expert}.{part}.weight" for expert in sample for part in ("w1", "w2", "w3")):
        if comparable(name):
            compared += 1
            far = deviation(original, folder, name)
            rounded += bool(far.error and not far.beyond)
            if far.beyond:
                faults.append(f"{name}: {far.beyond} of {far.size} values, up to {far.steps:.3g} steps off")
    note = f"{rounded} re-quantised, none off by more than one rounding" if rounded else "fine"
    return checks + [Check(f"sampled experts as in the original ({len(sample)} of {len(experts)})",
                           compared, faults, note)]


@lab("audit", "a checkpoint against its config and, if given, against the original",
     original={"metavar": "DIR", "help": "the published checkpoint that this one was made from"},
     experts={"metavar": "N", "type": int, "default": 8,
              "help": "experts to compare with the original's (default: 8, the same at each run)"})
def audit(args: argparse.Namespace) -> Report:
    """Everything that can be said of a checkpoint without running it."""
    if args.experts < 1:
        raise ValueError(f"--experts {args.experts}: it must be 1 or more")
    folder = Folder(args.ckpt_path)
    checks = audit_inventory(folder) + audit_values(folder)
    if args.original:
        checks += audit_original(folder, Folder(args.original), args.experts)
    faults = sum(len(check.faults) for check in checks)
    failed = [check.what for check in checks if check.faults]
    blind = ("tensors other than the tables and the sampled experts (swap compares all); tokenizer.json, "
             "where either has none" if args.original
             else "a tensor of plausible values that is not the right one, as two exchanged ones are")
    return Report(
        f"Does {args.ckpt_path} hold what its config says" + (
            f", and what {args.original} holds?" if args.original else "?"),
        ["check", "tensors", "result"], [check.row() for check in checks],
        f"{faults} {'faults' if faults > 1 else 'fault'}: {'; '.join(failed)}." if faults else
        "Nothing wrong was found.",
        f"{blind}; {SHARED_READER}; whether the engine reads it rightly" + (
            "" if args.original else "; whether the config is the right one"), not faults,
        {"checks": [check._asdict() for check in checks]})


# ---- diff

# The vendor's files, and those of ours that mirror them.
MIRRORS = {"model.py": "model.py", "kernel.py": "kernel.py", "generate.py": "generate.py",
           "encoding_dsv4.py": "generate.py", "convert.py": "convert.py"}
OWN_BODY = "bodies are our own"


class Symbol(typing.NamedTuple):
    """A function, class or value: what its caller sees, and what it does, as normalised source."""
    kind: str
    parameters: dict[str, str]      # {name: default, or ""}, in order; a class's bases
    body: str                       # without docstring and annotations


class Plain(ast.NodeTransformer):
    """Removes what the interpreter does not need: docstrings and annotations."""

    def visit(self, node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign) and node.value:
            node = ast.copy_location(ast.Assign([node.target], node.value), node)
        return super().generic_visit(node)


def parse_file(path: Path) -> ast.Module:
    """Its syntax tree; nothing is imported or run."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no Python file ({error}): take it from the vendor's release") from None


def symbols_of(tree: ast.Module) -> dict[str, Symbol]:
    """{name, or Class.name: Symbol} of a file. A jit-compiled kernel is not comparable with another one's."""
    found: dict[str, Symbol] = {}
    for node in Plain().visit(copy.deepcopy(tree)).body:
        for name, symbol in symbols_in(node):
            found[name] = symbol
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            found |= {f"{node.name}.{name}": symbol for name, symbol in symbols_in(inner)}
    return found


def symbols_in(node: ast.stmt) -> typing.Iterator[tuple[str, Symbol]]:
    """What one statement of a file or class defines."""
    if isinstance(node, ast.FunctionDef):
        jit = any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)
        body = "\n".join(map(ast.unparse, node.body))
        yield node.name, Symbol("kernel" if jit else "function", parameters_of(node.args), body)
    elif isinstance(node, ast.ClassDef):
        yield node.name, Symbol("class", {ast.unparse(base).split(".")[-1]: "" for base in node.bases}, "")
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        text = ast.unparse(node.value) if node.value else ""
        for target in (target for target in targets if isinstance(target, ast.Name)):
            yield target.id, Symbol("value", {}, text)


def parameters_of(args: ast.arguments) -> dict[str, str]:
    """{name: default, or ""}, in order; with * and ** where the definition has them."""
    plain = [arg.arg for arg in args.posonlyargs + args.args]
    defaults = [""] * (len(plain) - len(args.defaults)) + list(map(ast.unparse, args.defaults))
    found = dict(zip(plain, defaults))
    if args.vararg or args.kwonlyargs:
        found["*" + (args.vararg.arg if args.vararg else "")] = ""
    found |= {arg.arg: ast.unparse(default) if default else ""
              for arg, default in zip(args.kwonlyargs, args.kw_defaults)}
    return found | ({"**" + args.kwarg.arg: ""} if args.kwarg else {})


def signature_change(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """How our parameters (or bases) differ from the vendor's, its defaults in brackets; or nothing."""
    lacks = [name for name in theirs if name not in ours]
    more = [name for name in ours if name not in theirs]
    told = [f"without {', '.join(lacks)}"] if lacks else []
    told += [f"also {', '.join(more)}"] if more else []
    told += [f"{name}={ours[name]} ({theirs[name]})" if ours[name] and theirs[name] else
             f"{name} has {'a' if ours[name] else 'no'} default" for name in theirs
             if name in ours and theirs[name] != ours[name]]
    if not told and list(theirs) != list(ours):
        told = ["in another order"]
    return "; ".join(told)


def numbers_in(body: str) -> set[str]:
    """The numbers that a body is written with; 0, 1 and 2 say nothing."""
    nodes = (node.value for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Constant))
    return {repr(value) for value in nodes if type(value) in (int, float) and value not in (0, 1, 2)}


def is_literal(value: Symbol) -> bool:
    """Whether it is written out, so that another text is another value."""
    try:
        ast.literal_eval(value.body)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def difference_of(theirs: Symbol, ours: Symbol) -> tuple[str, str]:
    """("", "") for the same; else what differs ("signature", "value", "body") and how."""
    if "kernel" in (theirs.kind, ours.kind):
        return "", ""
    if theirs.kind != ours.kind:
        return "signature", f"a {ours.kind} (a {theirs.kind})"
    if change := signature_change(theirs.parameters, ours.parameters):
        return "signature", change
    if theirs.body == ours.body:
        return "", ""
    if theirs.kind == "value":
        if not (ours.body and theirs.body):
            return "value", "has a default" if ours.body else "no default"
        known = is_literal(theirs) and is_literal(ours)
        return ("value", "another value") if known else ("body", "written anew")
    there, here = numbers_in(theirs.body), numbers_in(ours.body)
    only = [f"{', '.join(sorted(numbers))} only {side}" for numbers, side in
            ((there - here, "there"), (here - there, "here")) if numbers]
    return "body", "; ".join(["written anew", *only])


def reasons_in(tree: ast.Module) -> list[str]:
    """The deliberate differences that a file's header lists: its bullets, each on one line."""
    bullets = re.findall(r"^- (.*(?:\n  .*)*)", ast.get_docstring(tree) or "", re.M)
    return [re.sub(r"\s+", " ", bullet) for bullet in bullets]


def reason_for(name: str, names: typing.Iterable[str], reasons: list[str]) -> str:
    """The first bullet that names the symbol or its class; for a method that many classes have, the class."""
    owner, _, last = name.rpartition(".")
    shared = owner and sum(other.rpartition(".")[2] == last for other in names) > 1
    for part, flags in ((last, 0), (owner, re.IGNORECASE)):     # prose says "the indexer" for Indexer
        for reason in reasons if part and not (shared and part == last) else ():
            if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", reason, flags):
                return reason
    return ""


def imported_names(tree: ast.Module, module: str) -> set[str]:
    """What a file takes from a module by `from module import ...`."""
    return {alias.name for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == module for alias in node.names}


class Difference(typing.NamedTuple):
    """A symbol of the vendor's that is another one in our file, or not there."""
    file: str
    symbol: str
    kind: str       # signature, value, missing: what a caller sees; body
    how: str
    reason: str     # from our file's header, or ""


def file_differences(file: str, theirs: dict[str, Symbol], tree: ast.Module,
                     ours: dict[str, Symbol]) -> list[Difference]:
    """The vendor's symbols beside ours. Its private ones may be missing."""
    found, reasons = [], reasons_in(tree)
    for name, symbol in theirs.items():
        kind, how = difference_of(symbol, ours[name]) if name in ours else ("missing", "only the vendor's")
        if kind and not (kind == "missing" and (symbol.kind == "kernel" or is_private(name))):
            found.append(Difference(file, name, kind, how, reason_for(name, theirs, reasons)))
    return found


def vendor_files(folder: str) -> dict[str, Path]:
    """Those of the vendor's files that are there; the encoding lies beside the inference folder."""
    places = {name: [Path(folder, name), Path(folder, "..", "encoding", name)] for name in MIRRORS}
    found = {name: next(filter(Path.is_file, paths), None) for name, paths in places.items()}
    found = {name: path for name, path in found.items() if path}
    if not found:
        raise ValueError(f"{folder} has none of {', '.join(MIRRORS)}: --vendor-dir names a copy of the "
                         "vendor's inference folder")
    return found


def diff_report(vendor_dir: str, our_dir: str) -> Report:
    """Reads both sides' files and compares them; neither is run."""
    files = vendor_files(vendor_dir)
    trees = {name: parse_file(path) for name, path in files.items()}
    vendor = {name: symbols_of(tree) for name, tree in trees.items()}
    if "kernel.py" in vendor and "model.py" in vendor:      # the rest of it is TileLang's inside
        public = imported_names(trees["model.py"], "kernel")
        vendor["kernel.py"] = {name: s for name, s in vendor["kernel.py"].items() if name in public}
    our_trees = {name: parse_file(Path(our_dir, name)) for name in sorted({MIRRORS[name] for name in files})}
    ours = {name: symbols_of(tree) for name, tree in our_trees.items()}
    found = [difference for name, symbols in vendor.items() for difference in
             file_differences(name, symbols, our_trees[MIRRORS[name]], ours[MIRRORS[name]])]
    found.sort(key=lambda one: (one.reason != "", list(MIRRORS).index(one.file), one.kind == "body"))
    known = {MIRRORS[name]: set() for name in files}
    for name, symbols in vendor.items():
        known[MIRRORS[name]] |= symbols.keys()
    added = {name: [symbol for symbol in symbols if symbol not in known[name] and not is_private(symbol)]
             for name, symbols in ours.items()}
    bare, total = [one for one in found if not one.reason], sum(map(len, vendor.values()))
    seen = sum(one.kind != "body" for one in bare)
    absent = [name for name in MIRRORS if name not in files]
    verdict = (f"{total} symbols of the vendor's: {total - len(found)} the same, {len(found) - len(bare)} "
               f"differ for a stated reason, {len(bare) - seen} in their body alone (all bodies are our own) "
               f"and {seen} in what a caller sees without a reason.")
    return Report(
        f"Where do our files differ from the vendor's in {vendor_dir}, and does a header say why?",
        ["file", "symbol", "difference (the vendor's in brackets)", "reason"], diff_rows(found, added),
        verdict + (f" Not there to compare: {', '.join(absent)}." if absent else ""),
        "whether a body written anew computes the same (the proofs are for that), decorators, the insides of "
        "GPU kernels, and whether a reason is a good one", not seen,
        {"same": total - len(found), "differences": [one._asdict() for one in found], "only_ours": added})


def diff_rows(found: list[Difference], added: dict[str, list[str]]) -> list[list[str]]:
    """A row for each file, difference and reason; without a reason every symbol is named."""
    groups: dict[tuple, list[str]] = {}
    for one in found:
        reason = one.reason or (OWN_BODY if one.kind == "body" else "NONE GIVEN")
        groups.setdefault((one.file, one.how, reason), []).append(one.symbol)
    rows = [[file, some_of(names, len(names) if reason == "NONE GIVEN" else 4), how,
             textwrap.shorten(reason, 80, placeholder=" ...")]
            for (file, how, reason), names in groups.items()]
    return rows + [[file, some_of(names, 4), "only ours", ""] for file, names in added.items() if names]


def is_private(symbol: str) -> bool:
    return symbol.split(".")[-1].startswith("_")


def some_of(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@lab("diff", "the vendor's files beside ours, symbol by symbol, with the reason for each difference",
     vendor_dir={"required": True, "metavar": "DIR", "help": "a copy of the vendor's inference folder"},
     ckpt_path=None)
def diff(args: argparse.Namespace) -> Report:
    """Symbols by name: signatures, values, bodies; and our headers' bullets beside what differs."""
    return diff_report(args.vendor_dir, os.path.dirname(os.path.abspath(model.__file__)))


# ---- swap, audit, diff: proofs

# Layers 0, 4, 128 and an MTP block, of little else: swap runs the reference many times.
LAB_SMALL = SMALL | {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0],
                     "n_routed_experts": 4}


@functools.lru_cache
def lab_fixture(kind: str) -> str:
    """As fixture, of LAB_SMALL: "bf16" or "fp8" (with fp4 experts)."""
    config = LAB_SMALL | (QUANTISED if kind == "fp8" else {})
    return write_checkpoint(os.path.join(work_folder(), "lab-" + kind), config)


def changed_copy(kind: str, folder: Path, change) -> Path:
    """A fixture's copy after change(tensors)."""
    tensors = load_file(os.path.join(lab_fixture(kind), "model.safetensors"))
    change(tensors)
    return Path(write_folder(folder, json.loads(Path(lab_fixture(kind), "config.json").read_text()), tensors))


def exchange(tensors, a, b):
    for end in ("weight", "scale"):
        tensors[f"{a}.{end}"], tensors[f"{b}.{end}"] = tensors[f"{b}.{end}"], tensors[f"{a}.{end}"]


def double_scale(tensors, name):
    tensors[name] = (tensors[name].view(torch.uint8) + 1).view(torch.float8_e8m0fnu)


def set_code(tensors, name, code):
    tensors[name].view(torch.uint8)[0, 0] = code


def move_row(tensors, name, row):
    tensors[name][row] = tensors[name][row - 1]


def prompt_of(count: int) -> list[int]:
    return swap_prompt(LAB_SMALL, count).tolist()


def both(*weights):
    return [f"{weight}.{end}" for weight in weights for end in ("weight", "scale")]


# A copy's fault: the fixture, the change, and {the unit that swap must name: the stored tensors that differ}.
EXPERT_1_2 = "layers.1.ffn.experts.2"
PLANTED = {
    "w1 and w3 exchanged": ("fp8", lambda t: exchange(t, EXPERT_1_2 + ".w1", EXPERT_1_2 + ".w3"),
                            {EXPERT_1_2: both(EXPERT_1_2 + ".w1", EXPERT_1_2 + ".w3")}),
    "scale doubled": ("fp8", lambda t: double_scale(t, EXPERT_1_2 + ".w2.scale"),
                      {EXPERT_1_2: [EXPERT_1_2 + ".w2.scale"]}),
    "another layer's": ("fp8", lambda t: exchange(t, "layers.1.attn.wq_b", "layers.2.attn.wq_b"),
                        {f"layers.{i}.attn.wq_b.weight": both(f"layers.{i}.attn.wq_b") for i in (1, 2)}),
    "transposed": ("bf16", lambda t: t.update({"layers.2.attn.wo_b.weight":
                                               t["layers.2.attn.wo_b.weight"].T.contiguous()}),
                   {"layers.2.attn.wo_b.weight": ["layers.2.attn.wo_b.weight"]}),
    "embedding row moved": ("fp8", lambda t: move_row(t, "embed.weight", prompt_of(24)[0]),
                            {"embed.weight": ["embed.weight"]}),
    "one code, by one": ("fp8", lambda t: set_code(t, "layers.1.attn.wkv.weight",
                                                   1 ^ t["layers.1.attn.wkv.weight"].view(torch.uint8)[0, 0]),
                         {"layers.1.attn.wkv.weight": ["layers.1.attn.wkv.weight"]}),
    "scale is NaN": ("fp8", lambda t: set_code(t, "layers.2.attn.wkv.scale", 255),
                     {"layers.2.attn.wkv.weight": ["layers.2.attn.wkv.scale"]}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_swap_convicts_the_very_tensor(tmp_path, fault):
    """Planted: one fault each. It alone is named; with the original's values the answer is back."""
    kind, change, units = PLANTED[fault]
    where = "--ckpt-path", changed_copy(kind, tmp_path / "copy", change), "--original", lab_fixture(kind)
    code, out, _ = lab_output("swap", *where, "--tokens", 24, "--json")
    found = json.loads(out)
    assert code == 1 and found["healthy"] is False and "CONVICTED" in found["verdict"]
    assert {row["unit"]: row["differ"] for row in found["rows"]} == units
    assert found["before"] != 0 and found["all"] == 0
    if len(units) == 1:
        assert found["rows"][0]["logits"] == 0 and "restores the answer, exactly" in found["verdict"]
    assert all(row["beyond"] > 0 for row in found["rows"])


def test_swap_compares_what_the_prompt_does_not_use(tmp_path):
    """An embedding row that no token of the prompt asks for changes no answer, and is still convicted."""
    row = next(i for i in range(512) if i not in prompt_of(24))
    copied = changed_copy("fp8", tmp_path / "copy", lambda tensors: move_row(tensors, "embed.weight", row))
    flags = "swap", "--ckpt-path", copied, "--original", lab_fixture("fp8"), "--tokens", 24
    code, out, _ = lab_output(*flags)
    assert code == 1 and "embed.weight: its swap alone leaves the error at 0" in out
    code, out, _ = lab_output(*flags, "--names", "attn")
    assert code == 0 and "CLEARED" in out


@pytest.mark.parametrize("mp, expert_dtype", [(1, None), (2, None), (2, "fp8")])
def test_swap_and_audit_clear_conversions(tmp_path, mp, expert_dtype):
    """Healthy: what convert.py makes, in the vendor's layout, joined and decoded by NumPy."""
    convert.main(lab_fixture("fp8"), str(tmp_path / "out"), LAB_SMALL["n_routed_experts"], mp, expert_dtype)
    where = "--ckpt-path", tmp_path / "out", "--original", lab_fixture("fp8")
    code, out, _ = lab_output("swap", *where, "--tokens", 24, "--json")
    assert code == 0 and json.loads(out)["before"] == 0 and json.loads(out)["rows"] == []
    code, out, _ = lab_output("audit", *where, "--experts", 1000, "--json")
    found = json.loads(out)
    assert code == 0 and not any(check["faults"] for check in found["checks"])
    assert all(check["count"] for check in found["checks"]) and len(found["checks"]) == 12 + (mp > 1)


def quantised(weight: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """To the nearest FP8 ("F8_E4M3") or FP4 ("I8") value on scales that are powers of two."""
    height, width, largest, nearest = (1, FP4_BLOCK, E2M1_MAX, round_e2m1) if dtype == "I8" else (
        WEIGHT_BLOCK, WEIGHT_BLOCK, E4M3_MAX, round_e4m3)
    x = weight.double().numpy()
    blocks = x.reshape(len(x) // height, height, -1, width)                 # [out/h,h,in/w,w]
    scale = _power_of_two_scale(np.abs(blocks).max(axis=(1, 3)), largest)   # [out/h,in/w]
    values = nearest(blocks / scale[:, None, :, None]).reshape(x.shape)     # [out,in]
    bits = torch.from_numpy((np.log2(scale) + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    if dtype != "I8":
        return torch.from_numpy(values).to(torch.float8_e4m3fn), bits
    codes = np.abs(values[..., None] - E2M1_TABLE).argmin(axis=-1).astype(np.uint8)     # [out,in]
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), bits


def requantised_copy(folder: Path, change=lambda tensors: None) -> Path:
    """The bf16 fixture as an FP8 checkpoint with FP4 experts, after change(tensors)."""
    config, tensors = LAB_SMALL | QUANTISED, load_file(os.path.join(lab_fixture("bf16"), "model.safetensors"))
    for name, entry in convert.inventory(config).items():
        if entry["dtype"] in convert.QUANTISED:
            tensors[name], tensors[convert.scale_of(name)] = quantised(tensors[name], entry["dtype"])
    change(tensors)
    return Path(write_folder(folder, config, tensors))


def test_swap_tells_a_fault_from_rounding(tmp_path):
    """BF16 to FP8 and FP4 moves every linear: cleared. One doubled scale among them: that expert alone."""
    flags = "--original", lab_fixture("bf16"), "--tokens", 6, "--json"
    code, out, _ = lab_output("swap", "--ckpt-path", requantised_copy(tmp_path / "healthy"), *flags)
    found = json.loads(out)
    assert code == 0 and "no more than one rounding" in found["verdict"]
    assert found["before"] > 0.01 and found["all"] == 0     # the format has its price, and it is all of it
    assert len(found["rows"]) > 40 and max(row["steps"] for row in found["rows"]) <= 0.5
    code, out, _ = lab_output("swap", "--ckpt-path", tmp_path / "healthy", *flags, "--names", "layers.0.attn")
    assert code == 0 and json.loads(out)["healthy"] is None and "another name" in json.loads(out)["verdict"]
    planted = requantised_copy(tmp_path / "planted", lambda t: double_scale(t, EXPERT_1_2 + ".w3.scale"))
    code, out, _ = lab_output("swap", "--ckpt-path", planted, *flags)
    guilty = [row["unit"] for row in json.loads(out)["rows"] if row["beyond"]]
    assert code == 1 and guilty == [EXPERT_1_2]
    code, out, _ = lab_output("audit", "--ckpt-path", planted, *flags[:2], "--experts", 1000)
    assert code == 1 and "1 fault:" in out and EXPERT_1_2 + ".w3.weight: " in out


def test_swap_and_audit_convict_the_config(tmp_path):
    """Planted: the right tensors beside a config that lost compress_rope_theta."""
    copied = changed_copy("fp8", tmp_path / "copy", lambda tensors: None)
    (copied / "config.json").write_text(json.dumps(LAB_SMALL | QUANTISED | {"compress_rope_theta": 40000}))
    code, out, _ = lab_output("swap", "--ckpt-path", copied, "--original", lab_fixture("fp8"), "--tokens", 24)
    assert code == 1 and "config.json (compress_rope_theta): its swap restores the answer, exactly" in out
    code, out, _ = lab_output("audit", "--ckpt-path", copied, "--original", lab_fixture("fp8"))
    assert code == 1 and "but for the format | 1 | compress_rope_theta |" in out


def test_swap_needs_its_control(tmp_path, monkeypatch):
    """A reference that is not the same twice proves nothing: the control stops it."""
    tensor, noise = Mixture.tensor, itertools.count(1)
    monkeypatch.setattr(Mixture, "tensor", lambda self, *args: tensor(self, *args) * (1 + 1e-9 * next(noise)))
    code, _, err = lab_output("swap", "--original", copied_box(tmp_path / "box"), "--tokens", 8)
    assert code == 2 and "control failed" in err


def test_audit_compares_config_and_tokenizer(tmp_path):
    """A config's keys that compute nothing may differ, and are named; a tokenizer's byte may not."""
    copied = copied_box(tmp_path / "box")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"bos_token_id": 7, "eos_token_id": 8}))
    flags = "audit", "--ckpt-path", copied, "--original", BOX
    code, out, _ = lab_output(*flags)
    assert code == 0 and "fine; format or idle keys that differ: bos_token_id, eos_token_id |" in out
    assert "tokenizer.json as in the original | 1 | fine |" in out
    with open(copied / "tokenizer.json", "a") as file:
        file.write("\n")
    code, out, _ = lab_output(*flags)
    assert code == 1 and "1 fault: tokenizer.json as in the original" in out


def test_swap_of_other_compress_ratios(tmp_path):
    """Those of layers are another model's, which is refused; an MTP block's, which is left out, is not."""
    with_mtp = LAB_SMALL | {"num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 128, 0]}
    without = LAB_SMALL | {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128]}
    other = LAB_SMALL | {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 128]}
    original = write_checkpoint(str(tmp_path / "original"), with_mtp)
    tensors = load_file(os.path.join(original, "model.safetensors"))
    tensors = {name: tensor for name, tensor in tensors.items() if not is_mtp(name)}
    copied = write_folder(tmp_path / "copy", without, tensors)
    code, out, err = lab_output("swap", "--ckpt-path", copied, "--original", original, "--tokens", 8)
    assert code == 0 and "exactly the original's values" in out, out + err
    less = {name: t for name, t in tensors.items() if not re.match(r"layers\.1\.attn\.(comp|index)", name)}
    copied = write_folder(tmp_path / "other", other, less)
    code, out, err = lab_output("swap", "--ckpt-path", copied, "--original", original, "--tokens", 8)
    assert code == 2 and "not the same model (compress_ratios differ)" in err and err.count("\n") == 1


def copied_box(folder: Path) -> Path:
    return Path(shutil.copytree(BOX, folder, ignore=shutil.ignore_patterns("__pycache__")))


def test_swap_and_audit_on_the_box(tmp_path):
    code, out, _ = lab_output("swap", "--original", copied_box(tmp_path / "box"), "--tokens", 40)
    assert code == 0 and "CLEARED" in out and "bit for bit" in out
    code, out, _ = lab_output("audit", "--original", BOX)
    assert code == 0 and "Nothing wrong was found" in out


def drop(name):
    return lambda tensors: tensors.pop(name)


def twin(tensors):
    tensors["layers.2.ffn.experts.1.w2.weight"] = tensors["layers.1.ffn.experts.0.w2.weight"].clone()


@pytest.mark.parametrize("change, words", [
    (lambda t: set_code(t, "layers.2.attn.wkv.scale", 255), "layers.2.attn.wkv.scale: 1 of 2 are NaN"),
    (lambda t: set_code(t, "layers.1.attn.wkv.weight", 255), "layers.1.attn.wkv.weight: 1 of 32768 are NaN"),
    (lambda t: t["norm.weight"].fill_(torch.inf), "norm.weight: 256 of 256 are NaN or infinite"),
    (lambda t: t["layers.2.ffn.gate.weight"].zero_(), "other than 0 | 119 | layers.2.ffn.gate.weight |"),
    (twin, "layers.2.ffn.experts.1.w2.weight has the bits of layers.1.ffn.experts.0.w2.weight"),
    (lambda t: t["layers.0.ffn.gate.tid2eid"][5].fill_(4), "layers.0.ffn.gate.tid2eid: row 5 names an"),
    (drop("layers.2.attn.compressor.ape"), "asks for | {all} | layers.2.attn.compressor.ape |"),
    (drop("layers.2.ffn.experts.3.w1.scale"), "asks for | {all} | layers.2.ffn.experts.3.w1.scale |"),
    (replaced("layers.1.attn.extra", torch.ones(2)), "the config | {more} | layers.1.attn.extra |"),
    (replaced("layers.2.attn.attn_sink", torch.ones(4)), "layers.2.attn.attn_sink is [4], not [8]"),
    (replaced("head.weight", torch.randn(512, 256)), "head.weight is F32, not BF16"),
    (replaced("layers.1.attn.wkv.scale", torch.tensor([[.5, -1.]])), "wkv.scale: 1 of 2 are not positive"),
    (replaced("layers.1.attn.wkv.scale", torch.tensor([[.5, 3.]])), "wkv.scale: 1 of 2 are no powers of two"),
])
def test_audit_names_the_tensor(tmp_path, change, words):
    """Planted: one fault each, found without the original."""
    code, out, err = lab_output("audit", "--ckpt-path", changed_copy("fp8", tmp_path / "copy", change))
    total = len(convert.inventory(LAB_SMALL | QUANTISED))
    assert code == 1 and words.format(all=total, more=total + 1) in out and "1 fault:" in out, out + err


@pytest.mark.parametrize("change, words", [
    (lambda t: move_row(t, "embed.weight", 7), "embed.weight: row 7 |"),
    (lambda t: t["head.weight"][3:6].neg_(), "head.weight: row 3 and 2 more |"),
    (lambda t: t["layers.0.ffn.gate.tid2eid"][9].copy_(t["layers.0.ffn.gate.tid2eid"][9].flip(0)),
     "layers.0.ffn.gate.tid2eid: row 9 |"),
    (lambda t: double_scale(t, EXPERT_1_2 + ".w2.scale"), EXPERT_1_2 + ".w2.weight: "),
    (lambda t: exchange(t, EXPERT_1_2 + ".w1", EXPERT_1_2 + ".w3"), EXPERT_1_2 + ".w1.weight: "),
])
def test_audit_compares_with_the_original(tmp_path, change, words):
    """Planted: values that are plausible, and not the original's."""
    flags = "audit", "--ckpt-path", changed_copy("fp8", tmp_path / "copy", change)
    code, out, _ = lab_output(*flags, "--original", lab_fixture("fp8"), "--experts", 1000)
    assert code == 1 and words in out
    assert lab_output(*flags)[0] == 0       # blind to it, as it says


def test_audit_of_ranks(tmp_path):
    """Planted: one rank's copy of a tensor that all have whole, and the wrong half of one that they share."""
    convert.main(lab_fixture("fp8"), str(tmp_path), LAB_SMALL["n_routed_experts"], 2, None)
    path = tmp_path / "model1-mp2.safetensors"
    tensors = load_file(path)
    tensors["layers.1.attn_norm.weight"][0] += 1
    tensors["embed.weight"] = tensors["embed.weight"].flip(0).contiguous()
    save_file(tensors, path)
    code, out, _ = lab_output("audit", "--ckpt-path", tmp_path, "--original", lab_fixture("fp8"))
    assert code == 1 and "| layers.1.attn_norm.weight |" in out
    assert "embed.weight: row 256 and 255 more |" in out


@pytest.mark.parametrize("config", [FILES, BASE, PLAIN, FILES | {
    "num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128]}], ids=["fp4", "base", "bf16", "no mtp"])
def test_audit_clears_every_published_form(tmp_path, config):
    folder = write_folder(tmp_path / "p", config, random_tensors(config), shards=3)
    code, out, err = lab_output("audit", "--ckpt-path", folder, "--original", folder)
    assert code == 0, out + err


def test_swap_and_audit_read_the_other_names(tmp_path):
    """Healthy: a copy in the name space of q_a_proj and the like, without its MTP block."""
    tensors = load_file(os.path.join(lab_fixture("fp8"), "model.safetensors"))
    renamed = {in_other_name_space(name): tensor for name, tensor in tensors.items() if not is_mtp(name)}
    copied = write_folder(tmp_path / "copy", LAB_SMALL | QUANTISED, renamed, shards=2)
    flags = "--ckpt-path", copied, "--original", lab_fixture("fp8")
    code, out, err = lab_output("swap", *flags, "--tokens", 8)
    assert code == 0 and "exactly the original's values" in out, out + err
    code, out, err = lab_output("audit", *flags)
    assert code == 0 and "fine, without the MTP block" in out, out + err


@pytest.mark.parametrize("argv, words", [
    (("swap", "--original", "{box}", "--names", "("), "no regular expression"),
    (("swap", "--original", "{box}", "--names", "nowhere"), "nowhere matches no weight; there are embed"),
    (("swap", "--original", "{box}", "--tokens", "0"), "--tokens 0: it must be 1 or more"),
    (("swap", "--original", "{empty}"), "has no config.json"),
    (("swap", "--original", "{other}"), "are not the same model"),
    (("swap", "--ckpt-path", "{box}", "--original", "{box}/"), "compared with itself it proves nothing"),
    (("audit", "--original", "{other}"), "are not the same model"),
    (("swap", "--original", "{box}", "--ckpt-path", "{both}"), "holds more than one checkpoint"),
    (("swap", "--original", "{box}", "--ckpt-path", "{cut}"), "is cut or damaged"),
    (("audit", "--svg", "x.svg"), "no heat map"),
    (("audit", "--ckpt-path", "{empty}"), "has no config.json"),
    (("audit", "--experts", "0"), "--experts 0: it must be 1 or more"),
    (("diff", "--vendor-dir", "{empty}"), "has none of model.py"),
    (("diff", "--vendor-dir", "{broken}"), "model.py is no Python file"),
])
def test_swap_audit_and_diff_refuse(tmp_path, argv, words):
    """Bad input: one sentence, exit code 2."""
    folders = {name: tmp_path / name for name in ("empty", "both", "cut", "broken", "box")}
    for path in folders.values():
        path.mkdir()
    (folders["broken"] / "model.py").write_text("def (:")
    for name in ("both", "cut", "box"):
        shutil.copy(os.path.join(BOX, "config.json"), folders[name])
        shutil.copy(os.path.join(BOX, "model.safetensors"), folders[name])
    (folders["both"] / "model0-mp1.safetensors").write_bytes(b"")
    os.truncate(folders["cut"] / "model.safetensors", 100_000)
    code, out, err = lab_output(*(arg.format(other=lab_fixture("bf16"), **folders) for arg in argv))
    assert code == 2 and words in err.splitlines()[-1] and not out


VENDOR_SAMPLE = {
    "model.py": """
        from kernel import act_quant
        limit = 448
        class ModelArgs:
            dim: int = 4096
        class Gate(Module):
            def __init__(self, args: ModelArgs):
                self.args = args
            def forward(self, x, input_ids=None):
                '''Scores.'''
                return x.softmax(dim=-1)
        class Norm(torch.nn.Module):
            def forward(self, x):
                return x * rsqrt(x.square().mean() + 1e-6)
        def linear(x, weight, bias=None):
            return x @ weight
        def hc_post(x, residual):
            return x + residual
        """,
    "kernel.py": """
        FP8 = "float8_e4m3"
        @tilelang.jit(pass_configs=configs)
        def act_quant_kernel(N, block_size=128):
            return N
        def act_quant(x, block_size=128):
            return act_quant_kernel(x.size(-1), block_size)(x)
        """,
    "encoding_dsv4.py": """
        eos_token: str = "<end>"
        def render(messages):
            return "".join(messages) + eos_token
        """}
OUR_SAMPLE = {
    "model.py": '''
        """Ours.

        Deliberate differences from the vendor:
        - ModelArgs has no defaults; linear
          takes scale.
        - forward, which both classes have, names neither of them.
        - The gate works in fp32.
        """
        limit = 448
        class ModelArgs:
            dim: int
        class Gate(nn.Module):
            def __init__(self, args):
                """Annotations and docstrings are no difference."""
                self.args = args
            def forward(self, x, input_ids=None):
                return x.float().softmax(dim=-1)
        class Norm(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * rsqrt(x.square().mean() + 1e-6)
        def linear(x, weight, scale=None):
            return x @ weight
        def hc_post(x, residual):
            return x + residual
        def added():
            pass
        ''',
    "kernel.py": """
        @triton.jit
        def act_quant_kernel(x_ptr, N):
            pass
        def act_quant(x, block_size=128):
            return act_quant_kernel(x.size(-1), block_size)(x)
        """,
    "generate.py": """
        eos_token = "<end>"
        def render(messages):
            return "".join(messages) + eos_token
        """}


def sample_folders(folder: Path, edit: dict) -> tuple[str, str]:
    """The samples as a vendor's folder (encoding beside inference) and as ours, with `edit` made in ours."""
    for side, files in (("inference", VENDOR_SAMPLE), ("ours", OUR_SAMPLE)):
        for name, text in files.items():
            path = folder / ("encoding" if name.startswith("encoding") else side) / name
            path.parent.mkdir(exist_ok=True)
            before, after = edit.get(name, ("", "")) if side == "ours" else ("", "")
            assert before in text
            path.write_text(textwrap.dedent(text.replace(before, after) if before else text).strip())
    return str(folder / "inference"), str(folder / "ours")


def test_diff_clears_what_has_a_reason(tmp_path):
    """Healthy: four differences, each named by a bullet; kernels and annotations are no differences."""
    report = diff_report(*sample_folders(tmp_path, {}))
    reasons = {one["symbol"]: one["reason"] for one in report.data["differences"]}
    assert reasons == {"ModelArgs.dim": "ModelArgs has no defaults; linear takes scale.",
                       "linear": "ModelArgs has no defaults; linear takes scale.",
                       "Gate.forward": "The gate works in fp32."}
    assert report.healthy and report.data["only_ours"] == {
        "model.py": ["added"], "kernel.py": ["act_quant_kernel"], "generate.py": []}
    assert "generate.py, convert.py" in report.verdict.split("Not there")[1]


@pytest.mark.parametrize("file, before, after, symbol, kind, how", [
    ("model.py", "limit = 448", "limit = 240", "limit", "value", "another value"),
    ("model.py", "limit = 448", "", "limit", "missing", "only the vendor's"),
    ("model.py", "return x + residual", "return residual - x", "hc_post", "body", "written anew"),
    ("model.py", "+ 1e-6", "+ 1e-5", "Norm.forward", "body",
     "written anew; 1e-06 only there; 1e-05 only here"),
    ("model.py", "hc_post(x, residual)", "hc_post(residual, x)", "hc_post", "signature", "in another order"),
    ("model.py", "Norm(nn.Module)", "Norm(Layer)", "Norm", "signature", "without Module; also Layer"),
    ("kernel.py", "act_quant(x, block_size=128)", "act_quant(x, block_size=64)", "act_quant", "signature",
     "block_size=64 (128)"),
    ("generate.py", "def render(messages)", "def render(messages, *, tools=())", "render", "signature",
     "also *, tools"),
    ("generate.py", 'eos_token = "<end>"', 'eos_token = "<eos>"', "eos_token", "value", "another value"),
])
def test_diff_finds_what_has_no_reason(tmp_path, file, before, after, symbol, kind, how):
    """Planted: one more difference, which no bullet names. A body alone is shown, and is no fault."""
    report = diff_report(*sample_folders(tmp_path, {file: (before, after)}))
    bare = [one for one in report.data["differences"] if not one["reason"]]
    assert [(one["symbol"], one["kind"], one["how"]) for one in bare] == [(symbol, kind, how)]
    assert report.healthy is (kind == "body")
    assert any(("bodies are our own" if kind == "body" else "NONE GIVEN") in row and symbol in row
               for row in report.rows)


def test_diff_reads_no_checkpoint(tmp_path):
    """Our own files beside themselves are the same; --ckpt-path is not offered."""
    code, out, _ = lab_output("diff", "--vendor-dir", os.path.dirname(model.__file__), "--json")
    assert code == 0 and json.loads(out)["differences"] == [] and json.loads(out)["same"] > 300
    with pytest.raises(SystemExit):
        lab_output("diff", "--vendor-dir", tmp_path, "--ckpt-path", BOX)


# ---- arms

class Question(typing.NamedTuple):
    """A prompt for a lab command; `code` is what a model that remembers will say, None if nobody knows."""
    tokenizer: typing.Any
    ids: list[int]
    code: typing.Optional[str]


PROMPT_HELP = "what the user says (default: a code is told, filler, the code is asked for)"


def question_of(args: argparse.Namespace) -> Question:
    """--prompt in the chat format; without it a code, told so far back that windows, top-k and ratio-128 rows
    all matter, and asked for."""
    config = model.ModelArgs.from_config(generate.config_of(args.ckpt_path, None))
    tokenizer = tokenizer_of(args.ckpt_path)
    text = args.prompt
    if text == "":
        raise ValueError("--prompt is empty: say something, or leave it out for the default")
    if text is None:
        far = max(10 * config.window_size, 5 * 4 * config.index_topk)
        asked = planted(tokenizer, 0, far, random.Random(0))
        return Question(tokenizer, asked.prompt, asked.secret)
    prompt = encode_messages([{"role": "user", "content": text}], "chat")
    return Question(tokenizer, encode_prompt(tokenizer, prompt), None)


class Arm(typing.NamedTuple):
    """One thing to switch. idle(engine, tokens): why the switch has nothing to act on there, or ""."""
    name: str
    switch: typing.Callable     # (engine, monkeypatch) switches it until the patch is undone
    idle: typing.Callable


def without(trip: str):
    """Switches one round trip off."""
    def switch(engine, patch):
        rest = tuple(name for name in engine.mode.round_trips if name != trip)
        patch.setattr(engine, "mode", engine.mode._replace(round_trips=rest))
    return switch


def index_keys(rounded: typing.Callable):
    """Another rounding of the indexer's keys, after the Hadamard rotation; its queries stay in FP4."""
    def switch(engine, patch):
        round_queries = model.round_index
        patch.setattr(model, "round_index", lambda x: (
            round_queries(x) if x.ndim == 4 else rounded(model.rotate_activation(x))))
    return switch


def fp8_key(x: torch.Tensor) -> torch.Tensor:
    return model.act_quant(x, min(x.size(-1), 128), model.mode.scale_fmt, model.mode.scale_dtype, True)


def topk_change(change: typing.Callable):
    def switch(engine, patch):
        for attn in attentions(engine, 4):
            patch.setattr(attn.indexer, "index_topk", change(attn.indexer.index_topk))
    return switch


def rows_off(*ratios: int):
    """No query sees a compressed row of these ratios."""
    def switch(engine, patch):
        visible = model.visible_rows
        patch.setattr(model, "visible_rows",
                      lambda ratio, *rest: visible(ratio, *rest) * (ratio not in ratios))
    return switch


def rope_change(compresses: bool, change: typing.Callable):
    """Another constant in the rotary tables of the layers that compress, or of those that do not."""
    def switch(engine, patch):
        for attn in attentions(engine):
            if bool(attn.compress_ratio) == compresses:
                table = functools.partial(attn.precompute_freqs_cis, **change(engine.args))
                patch.setattr(attn, "precompute_freqs_cis", table)
    return switch


def never_idle(engine, tokens: int) -> str:
    return ""


def no_kernels(engine, tokens: int) -> str:
    runs = engine.embed.weight.device.type == kernel.TRITON_DEVICE
    return "" if runs else "not here: the fallbacks are all that runs on this machine"


def no_rows(*ratios: int):
    def idle(engine, tokens):
        if any(attentions(engine, ratio) and tokens >= ratio for ratio in ratios):
            return ""
        return f"no row of ratio {' or '.join(map(str, ratios))} is complete after {tokens} tokens"
    return idle


def no_more_rows(engine, tokens: int) -> str:
    rows, topk = tokens // 4, engine.args.index_topk
    more = attentions(engine, 4) and rows > topk
    return "" if more else f"all of at most {rows} rows are chosen already, index_topk is {topk}"


def no_quantised_weight(engine, tokens: int) -> str:
    scales = [module.scale for module in engine.modules() if isinstance(module, model.Linear)]
    return "" if any(scale is not None for scale in scales) else "no weight is quantised"


def same_theta(engine, tokens: int) -> str:
    differs = engine.args.compress_rope_theta != engine.args.rope_theta
    return no_rows(4, 128)(engine, tokens) if differs else "the two are equal"


def no_window_layer(engine, tokens: int) -> str:
    return "" if attentions(engine, 0) else "every layer compresses"


def no_yarn(engine, tokens: int) -> str:
    if not any(attn.compress_ratio for attn in attentions(engine)):
        return "only layers that compress have YaRN, and none does"
    return "" if engine.args.original_seq_len and engine.args.rope_factor != 1 else "the config has no YaRN"


CONTROL = "nothing switched"
NO_COMPRESSED = "compressed rows off"
ARMS = [
    Arm(CONTROL, lambda engine, patch: None, lambda engine, tokens: "the control"),
    Arm("fallbacks in place of Triton kernels", lambda engine, patch: patch.setattr(
        kernel, "TRITON_DEVICE", None), no_kernels),
    Arm("FP8 of KV off", without("kv"), never_idle),
    Arm("index keys FP8, queries FP4", index_keys(fp8_key), no_rows(4)),
    Arm("index keys BF16, queries FP4", index_keys(lambda x: x), no_rows(4)),
    Arm("index keys and queries BF16", without("index"), no_rows(4)),
    Arm("Hadamard off, FP4 on", without("hadamard"), no_rows(4)),
    Arm("activation quantisation off", without("act"), no_quantised_weight),
    Arm("index_topk x2", topk_change(lambda topk: 2 * topk), no_more_rows),
    Arm("index_topk: all rows", topk_change(lambda topk: 1 << 30), no_more_rows),
    Arm(NO_COMPRESSED, rows_off(4, 128), no_rows(4, 128)),
    Arm("ratio-4 rows off", rows_off(4), no_rows(4)),
    Arm("ratio-128 rows off", rows_off(128), no_rows(128)),
    Arm("compress_rope_theta = rope_theta", rope_change(True, lambda args: {"base": args.rope_theta}),
        same_theta),
    Arm("rope_theta x4", rope_change(False, lambda args: {"base": 4 * args.rope_theta}), no_window_layer),
    Arm("YaRN off", rope_change(True, lambda args: {"original_seq_len": 0}), no_yarn),
]
CHANGES, LOGITS_ONLY, NO_CHANGE = "changes the answer", "changes logits only", "no change"
IDLE, UNREACHED = "nothing to switch", "DID NOT REACH THE ENGINE"


class Pass(typing.NamedTuple):
    """What an engine computed for a prompt and an answer that was fed to it."""
    logits: torch.Tensor            # [n,vocab] at the prompt's end and at the answer's tokens but the last
    caches: list[torch.Tensor]
    launches: int                   # of Triton kernels


def run_answer(engine, prompt: list[int], answer: list[int]) -> Pass:
    """Teacher-forced: the answer is fed whatever the engine would say, so that positions stay comparable."""
    tokens, launched = torch.tensor([prompt + answer]), kernel.launches.total()
    logits = [engine(tokens[:, :len(prompt)])]
    logits += [engine(tokens[:, p:p + 1], p) for p in range(len(prompt), tokens.size(1) - 1)]
    caches = [attn.kv_cache for attn in attentions(engine)]
    caches += [attn.indexer.kv_cache for attn in attentions(engine, 4)]
    return Pass(torch.cat(logits).cpu(), caches, kernel.launches.total() - launched)


def nothing_changed(a: Pass, b: Pass) -> bool:
    """Not one bit, and not which kernels ran: those may give the fallbacks' very bits."""
    same = torch.equal(a.logits, b.logits) and all(map(torch.equal, a.caches, b.caches))
    return same and a.launches == b.launches


def fill_caches(engine, value: float = 0):
    """Allocated anew, and `value` where nothing is written: with 0 they can be compared whole."""
    engine.reset_caches(engine.embed.weight.device)
    for attn in attentions(engine):
        for cache in [attn.kv_cache] + ([attn.indexer.kv_cache] if attn.compress_ratio == 4 else []):
            cache.fill_(value)


@contextlib.contextmanager
def switched(arm: Arm, engine):
    """The engine with one thing switched, its caches empty."""
    with pytest.MonkeyPatch.context() as patch:
        model.get_compress_topk_idxs.cache_clear()      # it would answer with what was visible before
        arm.switch(engine, patch)
        fill_caches(engine)     # also decides which path the experts take
        yield
    model.get_compress_topk_idxs.cache_clear()


def run_arm(arm: Arm, engine, question: Question, answer: list[int], baseline: Pass) -> dict:
    """One arm beside the baseline: its effect, the first token that changes, and errors of the logits."""
    tokens = len(question.ids) + len(answer) - 1
    idle = arm.idle(engine, tokens)
    if idle and arm.name != CONTROL:
        return {"arm": arm.name, "effect": IDLE, "why": idle}
    with switched(arm, engine):
        found = run_answer(engine, question.ids, answer)
    errors = [relative_error(a, b) for a, b in zip(found.logits, baseline.logits)]
    choices = found.logits.argmax(dim=-1).tolist()
    first = next((i for i, token in enumerate(answer) if choices[i] != token), None)
    effect = CHANGES if first is not None else LOGITS_ONLY if any(errors) else NO_CHANGE
    if arm.name != CONTROL and nothing_changed(found, baseline):
        effect = UNREACHED
    text = None if first is None else [TokenText(question.tokenizer).push(token)
                                       for token in (answer[first], choices[first])]
    return {"arm": arm.name, "effect": effect, "first_change": first, "tokens": text,
            "error_first": errors[0], "error_median": statistics.median(errors)}


def greedy_answer(engine, question: Question, n: int) -> list[int]:
    """Up to n tokens; one that ends the answer is the last."""
    eos = question.tokenizer.token_to_id(generate.eos_token)
    answer = generate.generate(engine, [question.ids], n, eos, temperature=0)[0]
    return answer[:n]       # generate appends eos also where the limit cut the answer


def judge_arms(found: list[dict], question: Question, text: str) -> tuple[typing.Optional[bool], str]:
    """The arms by their effect, and what that says of the engine and of the prompt."""
    lines = [f"The answer is {text!r}."]
    for effect in (CHANGES, LOGITS_ONLY, NO_CHANGE, IDLE):
        names = [row["arm"] for row in found if row["effect"] == effect and row["arm"] != CONTROL]
        if names:
            lines.append(f"{effect}: {', '.join(names)}.")
    effects = {row["arm"]: row["effect"] for row in found}
    unreached = [name for name, effect in effects.items() if effect == UNREACHED]
    if effects[CONTROL] != NO_CHANGE:
        return False, f"{lines[0]}\nFAULT: with nothing switched the logits differ, so no row here counts."
    if unreached:
        lines.append(f"FAULT: not a bit of logits or caches changes with {', '.join(unreached)}: "
                     "the engine does not read what was switched.")
        return False, "\n".join(lines)
    if question.code is not None and question.code not in text:
        lines.append(f"FAULT: it was told {question.code!r} and does not recall it, with nothing switched.")
        return False, "\n".join(lines)
    if effects[NO_COMPRESSED] != CHANGES:
        lines.append(f"With {NO_COMPRESSED} the answer stays: this prompt does not test far recall at all.")
        return None, "\n".join(lines)
    lines.append(f"With {NO_COMPRESSED} the answer changes: this prompt does test far recall.")
    return True, "\n".join(lines)


def compare_arms(load_engine: typing.Callable, question: Question, n: int) -> Report:
    """Every arm on an engine of its own, freshly loaded."""
    engine = load_engine()
    answer = greedy_answer(engine, question, n)
    fill_caches(engine)
    baseline = run_answer(engine, question.ids, answer)
    found, rows = [], []
    for arm in ARMS:
        result = run_arm(arm, load_engine(), question, answer, baseline)
        found.append(result)
        if result["effect"] == IDLE:
            rows.append([arm.name, "", "", "", f"{IDLE}: {result['why']}"])
            continue
        change = "" if result["tokens"] is None else "{}: {!r} -> {!r}".format(
            result["first_change"], *result["tokens"])
        rows.append([arm.name, change, f"{result['error_first']:.1e}", f"{result['error_median']:.1e}",
                     result["effect"]])
    text = question.tokenizer.decode(answer)
    healthy, verdict = judge_arms(found, question, text)
    return Report(
        question=f"{len(question.ids)} tokens of prompt, {len(answer)} of answer: what does each part of the "
                 "model do to it?",
        columns=["switched", "first token that changes", "logit error, first", "median", "effect"],
        rows=rows, verdict=verdict, healthy=healthy,
        blind="whether the baseline is right: each arm is compared with the same engine, and one prompt is "
              "one prompt",
        data={"prompt_tokens": len(question.ids), "answer": answer, "text": text, "code": question.code,
              "arms": found})


@lab("arms", "the same prompt with one thing switched at a time: what changes the answer?",
     prompt={"metavar": "TEXT", "help": PROMPT_HELP},
     tokens={"type": int, "default": 16, "metavar": "N", "help": "tokens of the answer (default 16)"})
def arms(args: argparse.Namespace) -> Report:
    if args.tokens < 1:
        raise ValueError(f"--tokens is {args.tokens}: an answer has 1 token or more")
    question = question_of(args)
    room = len(question.ids) + args.tokens
    return compare_arms(lambda: generate.load_model(args.ckpt_path, max_seq_len=room, max_batch_size=1)[0],
                        question, args.tokens)


def few_arms(monkeypatch, *names: str):
    few = [arm for arm in ARMS if arm.name in (CONTROL, NO_COMPRESSED, *names)]
    monkeypatch.setattr(sys.modules[__name__], "ARMS", few)


def test_arms_on_the_box():
    """Healthy: nothing switched is bit-identical, every switch arrives, and the far rows carry the answer."""
    code, out, _ = lab_output("arms", "--json")
    report = json.loads(out)
    found = {row["arm"]: row for row in report["arms"]}
    assert code == 0 and report["healthy"] and report["code"] in report["text"], report["verdict"]
    assert found[CONTROL]["error_median"] == 0 and found[CONTROL]["effect"] == NO_CHANGE
    assert found[NO_COMPRESSED]["effect"] == CHANGES and found[NO_COMPRESSED]["first_change"] is not None
    assert list(found) == [arm.name for arm in ARMS]
    for arm, row in found.items():
        assert row["effect"] in (CHANGES, LOGITS_ONLY, NO_CHANGE) or row["effect"] == IDLE and row["why"], arm
    assert found["FP8 of KV off"]["error_first"] > 0


def test_arms_notice_a_switch_that_is_not_read(monkeypatch):
    """Planted: an engine that rounds KV whatever its mode says; and a switch that does nothing."""
    few_arms(monkeypatch, "FP8 of KV off", "YaRN off")
    monkeypatch.setattr(model, "round_kv", lambda kv: model.act_quant(
        kv, 64, model.mode.scale_fmt, model.mode.scale_dtype, True))
    code, out, _ = lab_output("arms", "--tokens", 2)
    assert code == 1 and "changes with FP8 of KV off: the engine does not read" in out
    assert out.count(UNREACHED) == 1
    monkeypatch.setattr(sys.modules[__name__], "ARMS", [
        arm._replace(switch=ARMS[0].switch) if arm.name == "YaRN off" else arm for arm in ARMS])
    code, out, _ = lab_output("arms", "--tokens", 2)
    assert code == 1 and "changes with FP8 of KV off, YaRN off: the engine" in out


def test_arms_notice_a_model_that_does_not_recall(monkeypatch):
    """Planted: an indexer that chooses the rows of the lowest scores."""
    few_arms(monkeypatch)
    score = model.index_score
    monkeypatch.setattr(model, "index_score", lambda q, k, weights, visible: score(q, k, -weights, visible))
    code, out, _ = lab_output("arms")
    assert code == 1 and "does not recall it, with nothing switched" in out


def test_arms_say_when_a_prompt_tests_no_far_recall(monkeypatch):
    few_arms(monkeypatch)
    question = Question(generate.load_tokenizer(BOX), [0, 5, 7], None)      # no row of 4 tokens is complete
    report = compare_arms(lambda: generate.load_model(BOX, max_seq_len=8)[0], question, 1)
    assert report.healthy is None and "does not test far recall at all" in report.verdict


def test_arms_clear_a_model_that_compresses_nothing(monkeypatch, tmp_path):
    few_arms(monkeypatch, "YaRN off")
    folder = write_checkpoint(tmp_path, LAB_SMALL | {"compress_ratios": [0, 0, 0, 0]})
    question = Question(generate.load_tokenizer(BOX), [0, 5, 7], None)
    report = compare_arms(lambda: load(folder, round_trips=model.ROUND_TRIPS), question, 1)
    assert report.healthy is None and "FAULT" not in report.verdict
    assert {row["arm"]: row["effect"] for row in report.data["arms"]}["YaRN off"] == IDLE


@pytest.mark.parametrize("argv, said", [
    (["--tokens", "0"], "--tokens is 0"), (["--prompt", ""], "--prompt is empty"),
    (["--ckpt-path", "FOLDER"], "no tokenizer.json"), (["--svg", "OUT"], "no heat map")])
def test_arms_bad_input(monkeypatch, tmp_path, argv, said):
    few_arms(monkeypatch)
    places = {"FOLDER": fixture("bf16"), "OUT": str(tmp_path / "out.svg")}
    code, _, error = lab_output("arms", *(places.get(word, word) for word in argv))
    assert code == 2 and said in error and len(error.splitlines()) == 1


# ---- trace

# What a trace holds, in the order of computing: s tokens, d dims, hc streams, h heads, r compressed rows; of
# one sequence, without a batch dimension. Tensors of layer i are named layers.i.NAME, each in the dtype in
# which the engine computes it. Any part of them will do, from one pass or token by token.
TRACE = {
    "tokens": "[s] int64: the input ids; two traces of different tokens are not compared",
    "in": "[s,hc,d] residual streams before the layer",
    "attn.x": "[s,d] the attention's input, after hc_pre and attn_norm",
    "attn.q": "[s,h,head_dim] queries after the per-head norm and rope",
    "attn.kv": "[s,head_dim] window rows after kv_norm, rope and the FP8 round trip",
    "attn.index_q": "[s,index heads,index_head_dim] index queries after rope, Hadamard, FP4 round trip",
    "attn.index_keys": "[r,index_head_dim] index keys, likewise",
    "attn.index_scores": "[s,r] index scores, -inf where a row is not visible; left out of long traces",
    "attn.topk": "[s,k] int: compressed rows that are attended, by number from 0, in any order, -1: none",
    "attn.compressed": "[r,head_dim] compressed rows after norm, rope and the FP8 round trip",
    "attn.o": "[s,h,head_dim] attention's output per head, after the inverse rope, before wo_a",
    "attn.out": "[s,d] after wo_b",
    "attn.h": "[s,hc,d] residual streams between attention and FFN",
    "ffn.x": "[s,d] the FFN's input, after hc_pre and ffn_norm",
    "ffn.gate_scores": "[s,experts] scores with the bias, which choose; not in hash layers",
    "ffn.gate_indices": "[s,k] int: chosen experts, ascending",
    "ffn.gate_weights": "[s,k] their weights in that order, times route_scale",
    "ffn.out": "[s,d] routed experts and the shared one",
    "out": "[s,hc,d] residual streams after the layer",
    "logits": "[vocab] of the last token",
}
TRACE_SETS = {"attn.topk": "attn.index_scores", "ffn.gate_indices": "ffn.gate_scores"}   # chosen by which
TRACE_SCORES = 1 << 22      # index scores of a layer that are kept
# Tolerances of |a - b| / |b|, over a tensor. fp32 in another order of summation: as the box needs against the
# reference. bf16 with round trips: some roundings of a layer fall to the neighbour (1e-2 in chunks of 7), and
# in later layers that grows, and moves choices, to 5e-2 and more (LOGITS).
TRACE_EXACT, TRACE_LAYER_0 = 5 * EXACT, 2 ** -5


class Trace:
    """Records what each layer of an engine computes while one sequence runs, whole or in chunks."""

    def __init__(self, engine, patch):
        self.engine, self.parts, self.hooks = engine, collections.defaultdict(list), []
        for i, layer in enumerate(engine.layers):
            self.hook(layer.register_forward_pre_hook, self.enter, i)
            self.hook(layer.register_forward_hook, self.leave, "out")
            self.hook(layer.attn.register_forward_hook, self.attention)
            self.hook(layer.ffn.gate.register_forward_hook, self.gate)
            self.hook(layer.ffn.register_forward_pre_hook, self.enter_ffn)
            self.hook(layer.ffn.register_forward_hook, self.leave, "ffn.out")
        self.hc_post, self.index_score = model.Block.hc_post, model.index_score
        self.sparse_attn = model.sparse_attn
        patch.setattr(model.Block, "hc_post", lambda block, *args: self.on_hc_post(block, *args))
        patch.setattr(model, "index_score", self.on_index_score)
        patch.setattr(model, "sparse_attn", self.on_sparse_attn)

    def hook(self, register, method, *args):
        self.hooks.append(register(functools.partial(method, *args)))

    def keep(self, name: str, value: torch.Tensor):
        self.parts[f"layers.{self.layer}.{name}"].append(value.cpu().clone())

    def enter(self, i, layer, args):
        self.layer = i
        self.keep("in", args[0][0])

    def leave(self, name, module, args, output):
        self.keep(name, output[0])

    def on_hc_post(self, block, *args):
        self.streams = self.hc_post(block, *args)
        return self.streams

    def on_index_score(self, q, k, weights, visible):
        scores = self.index_score(q, k, weights, visible)
        self.keep("attn.index_q", q[0])
        self.keep("attn.index_scores", scores[0])
        return scores

    def on_sparse_attn(self, q, kv, sink, idxs, scale):
        # Attention rotates o back in place: when its forward ends, this same tensor holds attn.o
        self.attended = q, idxs, self.sparse_attn(q, kv, sink, idxs, scale)
        return self.attended[-1]

    def attention(self, attn, args, output):
        x, start_pos = args
        q, idxs, o = (value[0] for value in self.attended)
        rows = torch.arange(start_pos, start_pos + x.size(1), device=x.device) % attn.ring_size
        self.keep("attn.x", x[0])
        self.keep("attn.q", q)
        self.keep("attn.kv", attn.kv_cache[0, rows])
        if attn.compress_ratio:
            self.keep("attn.topk", (idxs - attn.ring_size).clamp(min=-1).sort(dim=-1, descending=True)[0])
        self.keep("attn.o", o.view_as(q))
        self.keep("attn.out", output[0])

    def enter_ffn(self, ffn, args):
        self.keep("attn.h", self.streams[0])
        self.keep("ffn.x", args[0][0])

    def gate(self, gate, args, output):
        weights, indices = output
        indices, order = indices.sort(dim=-1)
        if gate.bias is not None:
            scores = model.SCORE_FUNCS[gate.score_func](args[0].float() @ gate.weight.float().T)
            self.keep("ffn.gate_scores", scores + gate.bias)
        self.keep("ffn.gate_indices", indices)
        self.keep("ffn.gate_weights", weights.gather(1, order))

    def tensors(self, tokens: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """All that was kept, passes joined, under the names of TRACE."""
        found = {"tokens": tokens[0].clone(), "logits": logits[0].cpu().clone()}
        for name, parts in self.parts.items():
            if name.endswith(("attn.topk", "attn.index_scores")):       # later passes see more rows
                fill = -1 if name.endswith("topk") else -torch.inf
                wide = max(part.size(-1) for part in parts)
                parts = [torch.nn.functional.pad(part, (0, wide - part.size(-1)), value=fill)
                         for part in parts]
            found[name] = torch.cat(parts)
            if name.endswith("attn.topk"):
                wide = int((found[name] >= 0).sum(dim=-1).max())
                found[name] = found[name][:, :wide].contiguous()
        for i, attn in enumerate(attentions(self.engine)):
            if attn.compress_ratio:
                rows = tokens.size(1) // attn.compress_ratio
                found[f"layers.{i}.attn.compressed"] = attn.compressor.kv_cache[0, :rows].cpu().clone()
            if attn.compress_ratio and attn.indexer is not None:
                found[f"layers.{i}.attn.index_keys"] = attn.indexer.kv_cache[0, :rows].cpu().clone()
                if found[f"layers.{i}.attn.index_scores"].numel() > TRACE_SCORES:
                    del found[f"layers.{i}.attn.index_scores"]
        return found


def trace_of(engine, tokens: torch.Tensor, chunk: typing.Optional[int] = None) -> dict[str, torch.Tensor]:
    """The trace of tokens [1,s], in passes of `chunk` tokens or in one."""
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(engine, patch)
        for start in range(0, tokens.size(1), chunk or tokens.size(1)):
            logits = engine(tokens[:, start:start + (chunk or tokens.size(1))], start)
    for hook in trace.hooks:
        hook.remove()
    return trace.tensors(tokens, logits)


def trace_place(name: str) -> typing.Optional[tuple[int, int]]:
    """Where a tensor comes in the order of computing, as (layer, place); None: not a name of a trace."""
    order = list(TRACE)
    parts = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if parts is None:
        return {"tokens": (-1, 0), "logits": (1 << 30, 0)}.get(name)
    known = parts[2] in TRACE and parts[2] not in ("tokens", "logits")
    return (int(parts[1]), order.index(parts[2])) if known else None


class Compared(typing.NamedTuple):
    """One tensor of two traces. `row`: the first token (or compressed row) that is beyond the tolerance."""
    name: str
    largest: float          # max |a - b|; for sets: how many rows choose otherwise
    relative: float         # |a - b| / |b|, Euclidean over the tensor; for sets: the share of those rows
    tolerance: float
    row: typing.Optional[int]
    result: str


SAME, AGREES, DIFFERS = "same bits", "agrees", "DIFFERS"
TIES, BEHIND = "near ties only", "behind near ties"
NO_SCORES = "cannot be judged: scores were left out"
NO_TOKEN = "not compared: no token chose the same experts"


def compare_values(name: str, a: torch.Tensor, b: torch.Tensor, tolerance: float, clean: int) -> Compared:
    """Rows from `clean` on are behind near ties, where only LOGITS can be asked for."""
    if a.is_floating_point() != b.is_floating_point() or a.shape != b.shape:
        return Compared(name, math.nan, math.nan, tolerance, None,
                        f"{DIFFERS}: {str(a.dtype)[6:]} {list(a.shape)}, {str(b.dtype)[6:]} {list(b.shape)}")
    if torch.equal(a, b):
        return Compared(name, 0.0, 0.0, tolerance, None, SAME)
    rows = len(a) if a.ndim > 1 else 1
    a, b = a.double().reshape(rows, -1), b.double().reshape(rows, -1)
    nan = a.isnan() | b.isnan()
    if nan.any():       # equal to nothing, not even to the same NaN in the other
        return Compared(name, math.nan, math.nan, tolerance, int(nan.any(dim=1).int().argmax()),
                        f"{DIFFERS}: NaN, {int(a.isnan().sum())} in the first and {int(b.isnan().sum())} in "
                        f"the second of {a.numel()} values")
    apart = torch.where(a == b, 0.0, (a - b).abs())         # -inf, of rows not visible, equals -inf
    b = b.masked_fill(~b.isfinite(), 0)
    relative = float(apart.norm() / b.norm())
    if relative <= tolerance:
        return Compared(name, float(apart.max()), relative, tolerance, None, AGREES)
    beyond = ~(apart.norm(dim=1) <= tolerance * b.norm() / rows ** 0.5)
    row = int(beyond.int().argmax())
    excused = relative <= LOGITS and apart[:clean].norm() <= tolerance * b[:clean].norm()
    return Compared(name, float(apart.max()), relative, tolerance, row, BEHIND if excused else DIFFERS)


def as_mask(chosen: torch.Tensor, wide: int) -> torch.Tensor:
    """Lists of numbers [s,k], -1: none -> which are in [s,wide]."""
    mask = torch.zeros(len(chosen), wide + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(chosen < 0, wide, chosen).long(), True)[:, :wide]


def compare_sets(name: str, a: torch.Tensor, b: torch.Tensor, scores: typing.Optional[torch.Tensor],
                 tolerance: float, clean: int) -> Compared:
    """Chosen numbers as sets, exactly. Near ties: as many are chosen, and by b's scores [s,n] those that one
    side chose alone lie within two tolerances of each other, relative to their token's largest score. Without
    scores nobody can tell these from a wrong choice."""
    if a.is_floating_point() or b.is_floating_point() or a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        return compare_values(name, a, b, 0.0, 0)
    wide = 1 + max([int(x.max()) for x in (a, b) if x.numel()] + [0])
    a, b = as_mask(a, wide), as_mask(b, wide)
    rows = (a != b).any(dim=1)
    if not rows.any():
        return Compared(name, 0.0, 0.0, 0.0, None, SAME)
    as_many = torch.equal(a.sum(dim=1), b.sum(dim=1))
    result = NO_SCORES if scores is None and as_many else DIFFERS
    if scores is not None and len(scores) == len(a) and scores.size(1) >= wide:
        scores, swapped = scores[:, :wide].double(), a != b
        spread = (scores.masked_fill(~swapped, -torch.inf).amax(dim=1)
                  - scores.masked_fill(~swapped, torch.inf).amin(dim=1))[rows]
        slack = torch.full((len(a),), 2 * tolerance)
        slack[clean:] = 2 * max(LOGITS, tolerance)
        largest = scores.masked_fill(~scores.isfinite(), 0).abs().amax(dim=1)
        if as_many and (spread <= (slack * largest)[rows]).all():
            result = TIES
    first = int(rows.int().argmax())
    return Compared(name, float(rows.sum()), float(rows.double().mean()), 0.0, first, result)


def trace_tolerance(exact: bool, layer: int) -> float:
    return TRACE_EXACT if exact else TRACE_LAYER_0 if layer == 0 else LOGITS


def load_trace(path: str) -> dict[str, torch.Tensor]:
    if not os.path.exists(path):
        raise ValueError(f"{path} is not there: `trace {path}` writes a trace of this engine to it")
    try:
        tensors = load_file(path)
    except Exception as error:      # the library's own class is a plain Exception
        raise ValueError(f"{path} is no safetensors file ({error}): write it again") from None
    if "tokens" not in tensors:
        raise ValueError(f"{path} has no tensor `tokens`, so what was computed is unknown: add the input ids")
    tensors = {name: as_float_or_int(f"{path}: {name}", tensor) for name, tensor in tensors.items()}
    tokens = tensors["tokens"]
    if tokens.ndim != 1 or not len(tokens) or tokens.is_floating_point():
        raise ValueError(f"{path}: tokens is {str(tokens.dtype)[6:]} {list(tokens.shape)}: it must be a list "
                         "[s] of one integer or more, the input ids")
    return tensors


def as_float_or_int(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Dtypes that can be compared: integers in int64, FP8 in bfloat16, which holds its values."""
    if tensor.is_floating_point():
        return tensor.bfloat16() if tensor.element_size() == 1 else tensor
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{what} is {str(tensor.dtype)[6:]}: store floats, and choices as integers")
    return tensor.long()


MOST_EXPERTS = 1 << 16


def compare_choices(name: str, kind: str, a: dict, b: dict, tolerance: float, clean: int) -> Compared:
    """compare_sets of what two traces have under a name, and DIFFERS for numbers that are none of a row."""
    most = len(a["tokens"]) if kind == "attn.topk" else MOST_EXPERTS
    for which, chosen in ("first", a[name]), ("second", b[name]):
        if chosen.numel() and chosen.max() >= most:
            return Compared(name, math.nan, math.nan, 0.0, None,
                            f"{DIFFERS}: {int(chosen.max())} in the {which}, numbers from 0 are below {most}")
    place = name.removesuffix(kind) + TRACE_SETS[kind]
    scores = b.get(place)
    if scores is None and kind != "attn.topk" and place not in a:       # a hash layer: a table, no near ties
        scores = torch.empty(0)
    return compare_sets(name, a[name], b[name], scores, tolerance, clean)


def by_expert(indices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts [s,k] and their weights, experts ascending."""
    order = indices.argsort(dim=1, stable=True)
    return indices.gather(1, order), weights.gather(1, order)


def compare_weights(name: str, a: dict, b: dict, tolerance: float, clean: int) -> Compared:
    """gate_weights of the tokens that have the same experts, in whatever order each side lists them."""
    indices = name.replace("gate_weights", "gate_indices")
    shapes = {side[key].shape if key in side else None for side in (a, b) for key in (name, indices)}
    if len(shapes) > 1 or len(a[name].shape) != 2:
        return compare_values(name, a[name], b[name], tolerance, clean)
    (experts, ours), (other_experts, theirs) = (by_expert(side[indices], side[name]) for side in (a, b))
    alike = (experts == other_experts).all(dim=1, keepdim=True)
    if not alike.any():
        return Compared(name, math.nan, math.nan, tolerance, None, NO_TOKEN)
    # weights of other experts say nothing; the other side's in their place keep the rows' numbers
    return compare_values(name, torch.where(alike, ours, theirs), theirs, tolerance, clean)


def compare_in_order(a: dict, b: dict, shared: list[str]) -> list[Compared]:
    # from the first tensor in half precision on, on either side, all that follows is computed from such
    half = min((trace_place(name) for side in (a, b) for name, tensor in side.items() if trace_place(name)
                and tensor.dtype in (torch.bfloat16, torch.float16)), default=(1 << 31, 0))
    tokens = len(a["tokens"])
    found, clean = [], tokens       # tokens before the first near tie
    for name in shared:
        kind, place = re.sub(r"layers\.\d+\.", "", name), trace_place(name)
        tolerance = trace_tolerance(place < half, place[0])
        if kind in TRACE_SETS:
            found.append(compare_choices(name, kind, a, b, tolerance, clean))
            clean = min(clean, found[-1].row) if found[-1].result in (TIES, NO_SCORES) else clean
        elif kind == "ffn.gate_weights":
            found.append(compare_weights(name, a, b, tolerance, clean))
        else:
            rows = len(a[name]) if a[name].ndim > 1 else 1
            found.append(compare_values(name, a[name], b[name], tolerance, clean * rows // tokens))
    return found


def compare_traces(a: dict, b: dict, names: typing.Sequence[str]) -> Report:
    """Two traces side by side, in the order of computing."""
    if a["tokens"].tolist() != b["tokens"].tolist():
        raise ValueError(f"{names[0]} and {names[1]} hold different tokens: feed both engines the same")
    shared = sorted((name for name in a if name in b and trace_place(name) and name != "tokens"),
                    key=trace_place)
    if not shared:
        raise ValueError(f"{names[0]} and {names[1]} share no tensor of a trace but `tokens`; the names are "
                         f"layers.0.attn.q and so on: {', '.join(TRACE)}")
    found = compare_in_order(a, b, shared)
    healthy, verdict = judge_traces(found)
    for side, other, path in ((a, b, names[0]), (b, a, names[1])):
        missing = [name for name in side if name not in other and trace_place(name)]
        foreign = [name for name in side if not trace_place(name)]
        verdict += f"\nOnly in {path}: {shortened(missing)}." if missing else ""
        verdict += f"\nNot names of a trace, in {path}: {shortened(foreign)}." if foreign else ""
    return Report(
        question=f"{names[0]} beside {names[1]}, {len(a['tokens'])} tokens: which tensor differs first?",
        columns=["tensor", "max error", "relative", "tolerance", "from row", "result"],
        rows=[[c.name, f"{c.largest:.1e}", f"{c.relative:.1e}", f"{c.tolerance:.1e}",
               "" if c.row is None else str(c.row), c.result] for c in found],
        verdict=verdict, healthy=healthy,
        blind=("which rows the indexer chooses where its scores were left out, "
               if any(c.result == NO_SCORES for c in found) else "")
              + "a mistake that both engines share, whatever no tensor was stored for, errors below the "
              "tolerances, which in bf16 are wide, and decoding and chunk state unless one was written in "
              "chunks (--chunk)",
        data={"tensors": [c._asdict() for c in found]})


def shortened(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def judge_traces(found: list[Compared]) -> tuple[typing.Optional[bool], str]:
    """The first tensor that differs; what near ties explain is told, and excused."""
    first = next((i for i, c in enumerate(found) if c.result.startswith(DIFFERS)), len(found))
    left = [c for c in found[:first] if c.result in (NO_SCORES, NO_TOKEN)]
    which = f"{first - len(left)} tensors" + (" that can be judged" if left else "")
    verdict = f"All {which} agree."
    if first < len(found):
        name, row = found[first].name, found[first].row
        where = "" if row is None else f", from row {row} on"
        reason = found[first].result.removeprefix(DIFFERS)
        verdict = (f"First difference: {name}{where}{reason}; it is "
                   f"{TRACE[re.sub(r'layers.[0-9]+.', '', name)]}.\n"
                   f"Before it {which} agree.")
    ties = [c for c in found[:first] if c.result == TIES]
    behind = [c for c in found[:first] if c.result == BEHIND]
    for result in (NO_SCORES, NO_TOKEN):
        names = [c.name for c in left if c.result == result]
        verdict += f"\nIn {shortened(names)}: {result}." if names else ""
    if ties:
        row = min(c.row for c in ties)
        names = shortened([c.name for c in ties])
        verdict += f"\nOther choices at near ties, as rounding makes them, in {names}, from token {row} on."
    if behind:
        worst = max(c.relative for c in behind)
        row = min(c.row for c in found[:first] if c.result in (TIES, NO_SCORES))
        verdict += (f" {len(behind)} tensors differ behind other choices, by up to {worst:.0e}: a fault of "
                    f"that size which shows only from token {row} on would hide there.")
    return False if first < len(found) else None if left else True, verdict


def write_tensors(tensors: dict[str, torch.Tensor], path):
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except Exception as error:      # the library's own class is a plain Exception
        raise ValueError(f"{path} cannot be written ({str(error).splitlines()[0]}): make room, or choose "
                         "another place") from None


def write_trace(args: argparse.Namespace, path: str) -> Report:
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.exists(path):
        raise ValueError(f"{path} is there already: remove it, or choose another name")
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is no folder: make it, or choose another name for the trace")
    if args.chunk is not None and args.chunk < 1:
        raise ValueError(f"--chunk is {args.chunk}: a pass takes 1 token or more")
    question = question_of(args)
    mode = {"dtype": torch.float32, "round_trips": ()} if args.exact else {}
    engine, _ = generate.load_model(args.ckpt_path, max_seq_len=len(question.ids), max_batch_size=1, **mode)
    tensors = trace_of(engine, torch.tensor([question.ids]), args.chunk)
    write_tensors(tensors, path)
    rows = []
    for kind, meaning in TRACE.items():
        layers = [name for name in tensors if re.sub(r"layers\.\d+\.", "", name) == kind]
        if layers:
            tensor, numbers = tensors[layers[0]], [name.split(".")[1] for name in layers if "." in name]
            rows.append([f"layers.*.{kind}" if numbers else kind, " ".join(numbers), str(tensor.dtype)[6:],
                         meaning.replace("|", "/")])
    return Report(
        question=f"What does each layer compute of {len(question.ids)} tokens? "
                 f"{'fp32, round trips off' if args.exact else 'As the model runs: bf16, round trips on'}.",
        columns=["tensor", "layers", "dtype", "what it is"], rows=rows, healthy=None,
        verdict=f"{len(tensors)} tensors are in {path}. Feed another engine its `tokens`, write what that "
                f"computes under the same names, then: trace {path} OTHER",
        blind="whether any of it is right: it is one engine's word"
              + ("" if args.chunk else "; decoding and chunk state: all was one pass (--chunk 1 decodes)"),
        data={"file": path, "tensors": {name: list(t.shape) for name, t in tensors.items()}})


@lab("trace", "every layer's intermediates to a file; two such files side by side: what differs first?",
     FILES={"nargs": "+", "metavar": "FILE", "help": "one: it is written, and the names in it are printed; "
            "two, of any engines: they are compared"},
     prompt={"metavar": "TEXT", "help": PROMPT_HELP},
     exact={"action": "store_true", "help": "write fp32 without round trips, to compare structure closely; "
            "without it as the model runs, where rounding hides errors of some percent"},
     chunk={"type": int, "metavar": "N", "help": "write what passes of N tokens compute, 1: decoding; beside "
            "a trace of one pass it shows faults of the state in between (default: one pass)"})
def trace(args: argparse.Namespace) -> Report:
    if len(args.FILES) == 1:
        return write_trace(args, args.FILES[0])
    if len(args.FILES) > 2:
        raise ValueError(f"{len(args.FILES)} files: one is written, two are compared")
    if args.prompt is not None or args.exact or args.chunk is not None:
        raise ValueError("two files are compared as they are: leave --prompt, --exact and --chunk out")
    return compare_traces(*map(load_trace, args.FILES), args.FILES)


@functools.lru_cache
def box_question() -> torch.Tensor:
    """The default prompt for the checkpoint in the box, [1,s]."""
    return torch.tensor([question_of(argparse.Namespace(ckpt_path=BOX, prompt=None)).ids])


def exact_box(patch=None, trap: str = "") -> model.Transformer:
    """The checkpoint in the box in fp32 without round trips, with a trap built in or not."""
    engine, _ = generate.load_model(BOX, max_seq_len=box_question().size(1), max_batch_size=1,
                                    dtype=torch.float32, round_trips=())
    if trap:
        for parameter in engine.parameters():       # private copies: files are mapped read-only
            parameter.data = parameter.data.clone()
        with torch.inference_mode():
            TRAPS[trap](engine, patch)
    return engine


@functools.lru_cache
def box_trace() -> dict[str, torch.Tensor]:
    return trace_of(exact_box(), box_question())


def test_trace_twice_is_the_same(tmp_path):
    """Healthy: what was written twice agrees in every bit, and is under the documented names."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (a, b):
        code, out, _ = lab_output("trace", path)
        assert code == 0 and str(path) in out
    code, out, _ = lab_output("trace", a, b, "--json")
    results = {row["name"]: row["result"] for row in json.loads(out)["tensors"]}
    assert code == 0 and set(results.values()) == {SAME}
    found, config = load_file(a), generate.config_of(BOX, None)
    assert {re.sub(r"layers\.\d+\.", "", name) for name in found} == set(TRACE)
    assert found["layers.0.attn.q"].shape == (
        len(found["tokens"]), config["num_attention_heads"], config["head_dim"])
    assert torch.equal(found["layers.0.out"], found["layers.1.in"])
    assert found["logits"].shape == (config["vocab_size"],)


@pytest.mark.parametrize("mode", [{"dtype": torch.float32, "round_trips": ()}, {}])
def test_trace_in_chunks(mode):
    """Healthy: whole and in chunks, exact and as the model runs; roundings and near ties are no fault."""
    engine, _ = generate.load_model(BOX, max_seq_len=box_question().size(1), max_batch_size=1, **mode)
    whole, chunks = (trace_of(engine, box_question(), chunk) for chunk in (None, 50))
    report = compare_traces(chunks, whole, ("chunks", "whole"))
    assert report.healthy, report.verdict
    assert {row["name"] for row in report.data["tensors"]} == set(whole) - {"tokens"}


def reference_trace(tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """What another engine would write: the NumPy reference's own intermediates."""
    reference, found = Reference(BOX), {"tokens": torch.from_numpy(tokens)}
    h = reference.embed(tokens)
    for i in range(reference.config["num_hidden_layers"]):
        found[f"layers.{i}.in"] = h
        h, named = reference.block(i, h, tokens)
        found |= {f"layers.{i}.{name}": value for name, value in named.items() if name in TRACE}
        found[f"layers.{i}.out"] = h
        if "attn.topk" in named:
            chosen = named["attn.topk"]
            found[f"layers.{i}.attn.topk"] = np.where(chosen, np.arange(chosen.shape[1]), -1)
    found["logits"] = reference.head(h)[-1]
    return {name: value if name == "tokens" else torch.from_numpy(np.ascontiguousarray(
        value if value.dtype.kind in "iu" else value.astype(np.float32))) for name, value in found.items()}


def test_trace_of_another_engine():
    """Healthy: the NumPy reference's trace beside the engine's, over all that both name."""
    report = compare_traces(box_trace(), reference_trace(box_question()[0].numpy()), ("engine", "reference"))
    assert report.healthy, report.verdict
    assert len(report.rows) >= 12 * generate.config_of(BOX, None)["num_hidden_layers"]


@pytest.mark.parametrize("trap, ratios, kind, chunk", [
    ("output not rotated back", (0, 4, 128), "attn.o", None),
    # which of the three: see test_trace_of_a_transposed_comb
    ("hyper-connection comb transposed", (0, 4, 128), "attn.h|ffn.x|out", None),
    ("wo_a groups in another order", (0, 4, 128), "attn.out", None),
    ("route_scale 1", (0, 4, 128), "ffn.gate_weights", None),
    ("w1 and w3 swapped", (0, 4, 128), "ffn.out", None),
    ("no YaRN", (4, 128), "attn.q", None),
    ("ape left out", (4,), "attn.index_keys", None),
    ("indexer without ReLU", (4,), "attn.index_scores", None),
    ("every row attended (no top-k)", (4,), "attn.topk", None),
    ("decode's window offset one off", (0, 4, 128), "attn.o", 50),
    ("overlap state not shifted after a compression", (4,), "attn.index_keys", 50)])
def test_trace_finds_the_first_tensor(monkeypatch, trap, ratios, kind, chunk):
    """Planted: a trap in one of two engines. The first tensor that differs is the one that it spoils, in the
    first layer that has it."""
    healthy = box_trace()       # before the trap: some patch the module
    engine = exact_box(monkeypatch, trap)
    report = compare_traces(trace_of(engine, box_question(), chunk), healthy, ("broken", "healthy"))
    layer = next(i for i, ratio in enumerate(engine.args.compress_ratios) if ratio in ratios)
    first = next(row for row in report.data["tensors"] if row["result"].startswith(DIFFERS))
    assert first["name"] in [f"layers.{layer}.{name}" for name in kind.split("|")]
    assert report.healthy is False and f"First difference: {first['name']}" in report.verdict
    assert chunk is None or first["row"] >= chunk // 4


def test_trace_of_a_transposed_comb(monkeypatch):
    """Planted. Alike streams, as at the first layer's attention, hide it but for its sums' distance from 1;
    where they differ, so from that layer's end on, it is no matter of rounding."""
    healthy = box_trace()       # before the trap, which patches the module
    engine = exact_box(monkeypatch, "hyper-connection comb transposed")
    report = compare_traces(trace_of(engine, box_question()), healthy, ("broken", "healthy"))
    rows = {row["name"]: row for row in report.data["tensors"]}
    assert not rows["layers.0.attn.out"]["result"].startswith(DIFFERS)
    for i in range(generate.config_of(BOX, None)["num_hidden_layers"]):
        row = rows[f"layers.{i}.out"]
        assert row["result"].startswith(DIFFERS) and row["relative"] > 100 * row["tolerance"], row


def test_trace_sets_and_near_ties():
    """By hand: another order is no difference, a near tie is told apart from a wrong choice."""
    scores = torch.tensor([[3.0, 2.0, 2.0 + 1e-6, 1.0], [3.0, 2.0, 1.5, -torch.inf]])

    def result(a, b, **change):
        arguments = {"scores": scores, "tolerance": 1e-5, "clean": 2} | change
        return compare_sets("layers.0.attn.topk", torch.tensor(a), torch.tensor(b), **arguments)
    assert result([[0, 1], [1, 0]], [[1, 0], [0, 1]]).result == SAME
    assert result([[0, 1, -1], [0, 1, -1]], [[0, 1], [1, 0]]).result == SAME
    tie = result([[0, 1], [0, 1]], [[0, 2], [0, 1]])
    assert tie.result == TIES and tie.row == 0 and tie.largest == 1
    wrong = result([[0, 1], [0, 1]], [[0, 1], [0, 2]])
    assert wrong.result == DIFFERS and wrong.row == 1
    assert result([[0, 1], [0, 1]], [[0, 1], [0, 2]], clean=1).result == TIES       # behind a tie in token 0
    assert result([[0, 1], [0, 1]], [[0, 2], [0, 1]], scores=None).result == NO_SCORES
    assert result([[0, 1], [0, 1]], [[0, 1], [0, -1]], scores=None).result == DIFFERS
    assert result([[0, 1], [0, 1]], [[0, 1], [0, -1]]).result == DIFFERS            # fewer are chosen


def test_trace_that_does_not_fit():
    """Names on one side only are told; shapes, dtypes and NaN are differences; other tokens are refused."""
    ours = dict(box_trace())
    theirs = dict(ours) | {"model.layers.0.foo": torch.zeros(2)}
    del theirs["layers.0.attn.q"]
    report = compare_traces(ours, theirs, ("a", "b"))
    assert report.healthy and "Only in a: layers.0.attn.q." in report.verdict
    assert "Not names of a trace, in b: model.layers.0.foo." in report.verdict
    q = ours["layers.0.attn.q"]
    for wrong in (q[:, :1], q.int(), torch.where(q == q.max(), torch.nan, q)):
        report = compare_traces(ours, ours | {"layers.0.attn.q": wrong}, ("a", "b"))
        assert report.healthy is False and "First difference: layers.0.attn.q" in report.verdict
    with pytest.raises(ValueError, match="hold different tokens"):
        compare_traces(ours, ours | {"tokens": ours["tokens"].flip(0)}, ("a", "b"))
    with pytest.raises(ValueError, match="share no tensor of a trace"):
        compare_traces(ours, {"tokens": ours["tokens"], "q": q}, ("a", "b"))


def test_trace_of_experts_in_another_order():
    """Healthy: each token's experts in another order. Planted: in that order, route_scale left out."""
    healthy = box_trace()
    flipped = healthy | {name: tensor.flip(1) for name, tensor in healthy.items() if "ffn.gate_" in name
                         and "scores" not in name}
    report = compare_traces(flipped, healthy, ("a", "b"))
    assert report.healthy and {row["result"] for row in report.data["tensors"]} == {SAME}
    scaled = {name: tensor / 1.5 if "gate_weights" in name else tensor for name, tensor in flipped.items()}
    report = compare_traces(scaled, healthy, ("a", "b"))
    assert report.healthy is False and "First difference: layers.0.ffn.gate_weights" in report.verdict
    other = healthy["layers.0.ffn.gate_indices"] + 1
    a, b = ({"tokens": healthy["tokens"], "layers.0.ffn.gate_indices": indices,
             "layers.0.ffn.gate_weights": healthy["layers.0.ffn.gate_weights"]}
            for indices in (other, other + 1000))
    assert compare_in_order(a, b, ["layers.0.ffn.gate_weights"])[0].result == NO_TOKEN


def test_trace_without_index_scores(monkeypatch):
    """Healthy: another choice in traces so long that scores are left out is no fault, and no clearance.
    Planted: one that moves what follows, or chooses fewer rows, is found all the same."""
    monkeypatch.setattr(sys.modules[__name__], "TRACE_SCORES", 0)
    whole = trace_of(exact_box(), box_question())
    name = next(name for name in whole if name.endswith("attn.topk"))
    assert not any("index_scores" in name for name in whole)
    chosen = whole[name].clone()
    last = set(range(box_question().size(1) // 4)) - set(chosen[-1].tolist())
    chosen[-1, 0] = min(last)
    report = compare_traces(whole | {name: chosen}, whole, ("a", "b"))
    assert report.healthy is None and f"In {name}: {NO_SCORES}" in report.verdict
    assert "which rows the indexer chooses" in report.blind
    after = name.replace("topk", "o")
    report = compare_traces(whole | {name: chosen, after: 2 * whole[after]}, whole, ("a", "b"))
    assert report.healthy is False and f"First difference: {after}" in report.verdict
    chosen[-1, 0] = -1
    report = compare_traces(whole | {name: chosen}, whole, ("a", "b"))
    assert report.healthy is False and f"First difference: {name}" in report.verdict


def test_trace_tolerance_is_each_tensors_own():
    """Planted: an error of 1e-3 in fp32; a bf16 tensor that is not compared, or a later one, hides none."""
    q = "layers.0.attn.q"
    healthy = {name: box_trace()[name] for name in ("tokens", q, "logits")}
    wrong = healthy | {q: healthy[q] * 1.001}
    for more in ({"note": torch.zeros(1, dtype=torch.bfloat16)}, {"logits": healthy["logits"].bfloat16()}):
        assert compare_traces(healthy | more, healthy, ("a", "b")).healthy
        assert compare_traces(wrong | more, healthy, ("a", "b")).healthy is False
    rounded = {name: tensor.bfloat16() if name == q else tensor for name, tensor in wrong.items()}
    rounded["logits"] = 1.001 * healthy["logits"]       # computed from a tensor in bf16
    assert compare_traces(rounded, healthy, ("a", "b")).healthy


def test_trace_says_nan():
    q = "layers.0.attn.q"
    nan = {name: box_trace()[name] for name in ("tokens", q)}
    nan[q] = nan[q].clone()
    nan[q][5, 0, :2] = math.nan
    report = compare_traces(nan, nan, ("a", "b"))
    assert report.healthy is False and f"{q}, from row 5 on: NaN, 2 in the first and 2" in report.verdict


def test_trace_reads_foreign_files(tmp_path):
    """Healthy: any width of integers, FP8. Planted: rows numbered from the window's end; huge numbers."""
    topk = next(name for name in box_trace() if name.endswith("attn.topk"))
    kv = "layers.0.attn.kv"
    coarse = box_trace()[kv].to(torch.float8_e4m3fn)
    a = {"tokens": box_trace()["tokens"].int(), topk: box_trace()[topk].short(), kv: coarse}
    b = {"tokens": box_trace()["tokens"], topk: box_trace()[topk].long(), kv: coarse.bfloat16()}
    a["layers.0.ffn.gate_indices"] = box_trace()["layers.0.ffn.gate_indices"].to(torch.uint16)
    b["layers.0.ffn.gate_indices"] = box_trace()["layers.0.ffn.gate_indices"]
    save_file(a, tmp_path / "a")
    save_file(b, tmp_path / "b")
    code, out, _ = lab_output("trace", tmp_path / "a", tmp_path / "b")
    assert code == 0, out
    for added in (len(a["tokens"]), 1 << 40):
        save_file(b | {topk: torch.where(b[topk] < 0, -1, b[topk] + added)}, tmp_path / "c")
        code, out, _ = lab_output("trace", tmp_path / "a", tmp_path / "c")
        assert code == 1 and "in the second, numbers from 0 are below" in out


def test_trace_in_chunks_shows_faults_of_the_state(monkeypatch, tmp_path):
    """Planted: a fault that one pass cannot have. Healthy: chunks beside one pass."""
    whole, chunks, broken = (tmp_path / name for name in ("whole", "chunks", "broken"))
    code, out, _ = lab_output("trace", whole, "--exact")
    assert code == 0 and "decoding and chunk state" in out
    code, out, _ = lab_output("trace", chunks, "--exact", "--chunk", "50")
    assert code == 0 and "decoding and chunk state" not in out
    assert lab_output("trace", chunks, whole)[0] == 0
    TRAPS["decode's window offset one off"](exact_box(), monkeypatch)
    lab_output("trace", broken, "--exact", "--chunk", "50")
    code, out, _ = lab_output("trace", broken, whole)
    assert code == 1 and "First difference: layers.0.attn.o" in out


@contextlib.contextmanager
def full_disk():
    """No file of this process may grow beyond 10,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("argv", [["trace", "out", "--prompt", "hi"], ["sharpen", "--tokens", "8"]])
def test_trace_and_sharpen_on_a_full_disk(monkeypatch, tmp_path, argv):
    monkeypatch.chdir(tmp_path)
    with full_disk():
        code, _, error = lab_output(*argv)
    assert code == 2 and "cannot be written" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("argv, said", [
    (["a", "b", "a"], "3 files"), (["a", "a", "--exact"], "leave --prompt, --exact"),
    (["a", "a", "--chunk", "1"], "and --chunk out"), (["b", "--chunk", "0"], "--chunk is 0"),
    (["a", "absent"], "is not there"), (["a", "text"], "is no safetensors file"),
    (["a", "bare"], "has no tensor `tokens`"), (["a", "mask"], "is bool: store floats"),
    *((["a", name], "must be a list [s]") for name in ("scalar", "empty", "real")),
    (["a"], "is there already"), (["no/where"], "is no folder")])
def test_trace_bad_input(monkeypatch, tmp_path, argv, said):
    save_file({"tokens": torch.zeros(3, dtype=torch.int64)}, tmp_path / "a")
    save_file({"x": torch.zeros(3)}, tmp_path / "bare")
    for name, tokens in (("scalar", torch.tensor(5)), ("empty", torch.zeros(0).long()),
                         ("real", torch.ones(3)), ("mask", torch.ones(3).bool())):
        save_file({"tokens": tokens}, tmp_path / name)
    (tmp_path / "text").write_text("no tensors")
    monkeypatch.chdir(tmp_path)
    code, _, error = lab_output("trace", *argv)
    assert code == 2 and said in error and len(error.splitlines()) == 1


# ---- sharpen

SHARPER = 8     # a power of two: every stored number and every FP8 scale keeps its mantissa


def sharpen_checkpoint(folder: str, out: str, sharper: int = SHARPER) -> str:
    """A copy under plain names whose attended rows are `sharper` times as long, and with them attention's
    logits. wo_a takes it out of the values again. The indexer's keys stay: their length moves no choice."""
    files = convert.published_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no published *.safetensors, and a converted checkpoint cannot be "
                         "sharpened: give the folder that it was converted from")
    os.makedirs(out, exist_ok=True)
    shutil.copy(os.path.join(folder, "config.json"), out)
    for i, file in enumerate(files, 1):
        tensors = {name: stored.tensor() for name, stored in convert.read_files([file]).items()}
        for name, tensor in tensors.items():
            if name.endswith((".attn.kv_norm.weight", ".attn.compressor.norm.weight")):
                tensors[name] = tensor * sharper
            elif name.endswith(".attn.wo_a.scale") and tensor.dtype == torch.float8_e8m0fnu:
                exponents = tensor.view(torch.uint8) - (sharper.bit_length() - 1)
                tensors[name] = exponents.view(tensor.dtype)
            elif name.endswith(".attn.wo_a.scale") or name.endswith(".attn.wo_a.weight") and tensor.dtype in (
                    torch.bfloat16, torch.float32):
                tensors[name] = tensor / sharper
        write_tensors(tensors, os.path.join(out, f"model-{i:05}-of-{len(files):05}.safetensors"))
    return out


class Exposed(Settle):
    """Settles one layer, and notes where the engine's rounded values and choices are not the reference's own:
    at a token itself, or in a row that other tokens attend. Only those are replaced, so that for all other
    tokens the settled layer is the unsettled one bit for bit."""

    def __init__(self, values: dict, tokens: int, window: int, ratio: int):
        super().__init__(values)
        self.window, self.ratio = window, ratio
        self.own = np.zeros(tokens, bool)
        self.kv = np.zeros(tokens, bool)
        self.rows = np.zeros(tokens // ratio if ratio else 0, bool)     # compressed rows or their index keys
        self.moved = self.other_experts = 0
        self.flood = ""         # of what more was rounded otherwise than noise explains

    def __call__(self, name: str, own: np.ndarray) -> np.ndarray:
        engine = super().__call__(name, own)
        size = np.abs(own.astype(float)).reshape(len(own), -1).max(axis=1, keepdims=True, initial=0)
        apart = np.abs(engine.astype(float) - own.astype(float)).reshape(len(own), -1)
        moved = apart > EXACT * size        # what is less apart makes no difference beyond the tolerance
        token = moved.any(axis=1)
        self.note(name, token)
        if name.endswith((".topk", ".gate")):
            self.moved += int(token.sum())
            return engine
        self.moved += int(moved.sum())
        if moved.sum() > max(3, 1e-2 * own.size):       # in a healthy engine 1e-4
            self.flood = self.flood or f"{name}: {moved.sum()} of {own.size} values are rounded otherwise"
        return np.where(moved.reshape(own.shape), engine, own)

    def note(self, name: str, differs: np.ndarray):
        """differs [n]: which tokens, compressed rows or tokens of an expert."""
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if name.endswith(".compressor.kv"):
            self.rows |= differs
        elif expert:
            gate = self.values[name[:expert.start()] + ".gate"].numpy()
            self.own[(gate == int(expert[1])).any(axis=1)] |= differs
        else:
            self.own |= differs
            if name.endswith((".attn.wkv", ".attn.kv")):
                self.kv |= differs
            if name.endswith(".gate"):
                self.other_experts = int(differs.sum())

    def exposed(self) -> np.ndarray:
        """Tokens [s] whose output may differ by representation alone."""
        tokens = len(self.own)
        exposed = self.own.copy()
        for p in np.flatnonzero(self.kv):
            exposed[p:p + self.window] = True
        if self.rows.any():     # a row is visible from its group's last token on
            exposed[(int(self.rows.argmax()) + 1) * self.ratio - 1:tokens] = True
        return exposed


class LayerStudy(typing.NamedTuple):
    """One layer of the engine beside the reference. Errors are relative to the largest output."""
    round_trips: bool
    layer: int
    ratio: int
    shared: float           # both are given the engine's input, the reference also its roundings and choices
    own: float              # both are given the engine's input
    end_to_end: float       # each goes on with its own streams
    flips: int              # roundings and choices that fell otherwise over the same input
    exposed: int            # tokens that such a one may move: their own, or in a row that they attend
    apart: int              # tokens that differ beyond the tolerance over the same input
    unexplained: int        # of them those that are not exposed
    fault: str              # what convicts the layer, or ""


def wrong_choices(scores: np.ndarray, chosen: np.ndarray, k: int, tolerance: float) -> int:
    """Tokens whose chosen rows are not the k highest visible scores [s,r], near ties left open."""
    visible = np.isfinite(scores)
    if not scores.size:
        return 0
    lowest = np.where(chosen, scores, np.inf).min(axis=1)
    highest = np.where(visible & ~chosen, scores, -np.inf).max(axis=1)
    slack = tolerance * np.abs(np.where(visible, scores, 0)).max(axis=1)
    wrong = (chosen & ~visible).any(axis=1) | (chosen.sum(axis=1) != np.minimum(visible.sum(axis=1), k))
    return int((wrong | (highest > lowest + slack)).sum())


def conviction(watch: Exposed, named: dict, shared: float, topk: int, tolerance: float) -> str:
    """What of a settled layer no rounding explains, or ""."""
    if watch.flood:
        return watch.flood
    if "attn.topk" in named:
        wrong = wrong_choices(named["attn.index_scores"], named["attn.topk"], topk, tolerance)
        if wrong:
            return f"{wrong} tokens attend other rows than those of the highest index scores"
    if watch.other_experts > max(1, 1e-3 * len(watch.own)):     # near ties are as rare
        return f"{watch.other_experts} tokens choose other experts over the same input"
    if not shared <= tolerance:
        return f"{shared:.0e} off over the same input, roundings and choices"
    return ""


def study_layer(i: int, folder: str, recorder: Recorder, engine, h, theirs_h, ids, tolerance: float):
    """Layer i over the engine's streams h [1,s,hc,d] -> its LayerStudy, the streams after it, and those of a
    reference that goes on by itself from theirs_h [s,hc,d]."""
    tokens, trips = ids[0].numpy(), engine.mode.round_trips
    ratio = engine.args.compress_ratios[i]
    out = recorder.run(engine, i, h, ids)
    watch = Exposed(recorder.values, len(tokens), engine.args.window_size, ratio)
    shared = math.nan
    try:
        settled, named = Reference(folder, trips, watch).block(i, h[0].numpy(), tokens)
    except AssertionError as error:     # of Settle
        fault = f"what it rounds is no neighbour of the right value: {str(error).splitlines()[0]}"
    else:
        shared = relative_error(out[0], settled)
        fault = conviction(watch, named, shared, engine.args.index_topk, tolerance)
    own, _ = Reference(folder, trips).block(i, h[0].numpy(), tokens)
    apart = np.abs(out[0].double().numpy() - own).reshape(len(tokens), -1).max(axis=1)
    apart = ~(apart <= tolerance * np.abs(own).max())
    exposed = watch.exposed()
    unexplained = int((apart & ~exposed).sum())
    if unexplained and not fault:
        fault = f"{unexplained} tokens differ though nothing that they round, choose or attend does"
    theirs_h, _ = Reference(folder, trips).block(i, theirs_h, tokens)
    study = LayerStudy(bool(trips), i, ratio, shared, relative_error(out[0], own),
                       relative_error(out[0], theirs_h), watch.moved,
                       int(exposed.sum()), int(apart.sum()), unexplained, fault)
    return study, out, theirs_h


def study_model(folder: str, trips, ids: torch.Tensor, tolerance: float, breaks=None) -> list[LayerStudy]:
    """Every layer of the engine (that `breaks`, a trap, has spoiled) beside the reference, in fp32."""
    n = ids.size(1)
    # max_chunk: the ring has room for a window that is one too long
    engine = load(folder, round_trips=trips, n_mtp_layers=0, max_seq_len=n, max_chunk=n + 1)
    studies = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        model.get_compress_topk_idxs.cache_clear()      # it may know what a trap made visible
        if breaks:
            for parameter in engine.parameters():       # private copies: files are mapped read-only
                parameter.data = parameter.data.clone()
            breaks(engine, patch)
        recorder = Recorder(engine, patch)
        with model.run_mode(engine.mode):
            h = engine.embed(ids).unsqueeze(2).repeat(1, 1, engine.args.hc_mult, 1)     # [1,s,hc,d]
        theirs_h = Reference(folder).embed(ids[0].numpy())
        same = np.array_equal(h[0].numpy(), theirs_h)
        for i in range(len(engine.layers)):
            study, h, theirs_h = study_layer(i, folder, recorder, engine, h, theirs_h, ids, tolerance)
            if i == 0 and not same:
                study = study._replace(fault="its input, the embedding, is not bit for bit the reference's")
            studies.append(study)
    model.get_compress_topk_idxs.cache_clear()
    return studies


def judge_layers(found: dict[str, list[LayerStudy]]) -> tuple[bool, str]:
    """A bug, or conditioning: the first layer that the same input convicts, else how far roundings grow."""
    for name, studies in found.items():
        for study in studies:
            if study.fault:
                control = "the one" if study.layer == 0 else "clear, so the comparison itself holds"
                trips = "on" if study.round_trips else "off"
                where = f"layer {study.layer} (ratio {study.ratio}), {name} weights, round trips {trips}"
                return False, (f"BUG in {where}: {study.fault}.\n"
                               f"Layer 0, whose input is the same bits, is {control}.")
    everything = [study for studies in found.values() for study in studies]
    shared = max(study.shared for study in everything)
    flips, apart = sum(study.flips for study in everything), sum(study.apart for study in everything)
    plain, sharp = (studies[-1].end_to_end for studies in found.values())
    return True, ("No bug. Layer 0, whose input is the same bits, agrees, and so does every layer over the "
                  f"same input, roundings and choices, to {shared:.0e}.\n"
                  f"What grows to {plain:.0e} (plain) and {sharp:.0e} (x{SHARPER}) end to end is "
                  f"conditioning: over the same input {flips} roundings and choices fall to a neighbour, and "
                  f"all {apart} tokens that differ lie behind one.\n"
                  "An end-to-end tolerance that clears this engine would clear a bug of that size, too.")


def study_row(name: str, study: LayerStudy) -> list[str]:
    apart = f"{study.apart} ({study.unexplained} not exposed)" if study.unexplained else str(study.apart)
    return [name, "on" if study.round_trips else "off", f"{study.layer} ({study.ratio})",
            f"{study.shared:.1e}", f"{study.own:.1e}", str(study.flips), str(study.exposed), apart,
            f"{study.end_to_end:.1e}", "BUG" if study.fault else ""]


def unreached_parts(args: model.ModelArgs, tokens: int) -> str:
    """What of the model so few tokens leave unused, for Report.blind."""
    ratios = sorted(set(args.compress_ratios[:args.n_layers]) - {0})
    parts = [f"rows of ratio {ratio} ({tokens} tokens complete none)" for ratio in ratios if tokens < ratio]
    if 4 in ratios and tokens // 4 <= args.index_topk:
        parts.append(f"the indexer's choice (all of {tokens // 4} rows are chosen, index_topk is "
                     f"{args.index_topk})")
    return "".join(part + ", " for part in parts)


def compare_sharpened(folder: str, tokens: int, breaks=None) -> Report:
    """The engine on a checkpoint and on its sharpened copy, round trips off and on."""
    args = model.ModelArgs.from_config(generate.config_of(folder, None))
    ids = random_tokens(tokens, args.vocab_size)
    with tempfile.TemporaryDirectory(prefix="parity-") as out:
        folders = {name: sharpen_checkpoint(folder, os.path.join(out, name), sharper)
                   for name, sharper in (("plain", 1), ("x8", SHARPER))}
        # trained attention is sharper than random; an error of a logit x8 is 8 times the error
        limits = {"plain": 5 * EXACT, "x8": 5 * SHARPER * EXACT}
        found = {name: [study for trips in ((), model.ROUND_TRIPS)
                        for study in study_model(path, trips, ids, limits[name], breaks)]
                 for name, path in folders.items()}
    healthy, verdict = judge_layers(found)
    rows = [study_row(name, study) for name, studies in found.items() for study in studies]
    return Report(
        question=f"{tokens} random tokens in fp32, attention's logits plain and x{SHARPER}: is a difference "
                 "from the NumPy reference a bug, or conditioning?",
        columns=["weights", "round trips", "layer (ratio)", "same input and roundings", "same input",
                 "roundings apart", "tokens exposed", "tokens apart", "end to end", ""],
        rows=rows, verdict=verdict, healthy=healthy,
        blind=f"{unreached_parts(args, tokens)}decoding and chunks (one pass), bf16, the Triton kernels, and "
              f"{SHARED_BLIND}",
        data={"tokens": tokens, "layers": [{"weights": name} | study._asdict()
                                           for name, studies in found.items() for study in studies]})


@lab("sharpen", "keys x8: is a difference from the reference a bug, or conditioning?",
     tokens={"type": int, "default": 200, "metavar": "N", "help": "random tokens to compare (default 200)"})
def sharpen(args: argparse.Namespace) -> Report:
    if args.tokens < 1:
        raise ValueError(f"--tokens is {args.tokens}: compare 1 token or more; 200 use every kind of row")
    return compare_sharpened(args.ckpt_path, args.tokens)


def test_sharpen_multiplies_the_logits(tmp_path):
    """Layer 0's rows are 8 times as long bit for bit, round trips and all; its values come out as before."""
    plain, sharp = (trace_of(load(folder, round_trips=("kv",), n_mtp_layers=0), random_tokens(40, 1000))
                    for folder in (BOX, sharpen_checkpoint(BOX, tmp_path)))
    assert torch.equal(sharp["layers.0.attn.kv"], SHARPER * plain["layers.0.attn.kv"])
    assert torch.equal(sharp["layers.0.attn.q"], plain["layers.0.attn.q"])
    # the first token attends itself and the sink alone
    size = plain["layers.0.attn.out"][0].norm() / sharp["layers.0.attn.out"][0].norm()
    assert 1 / SHARPER < size < SHARPER


def test_sharpen_clears_the_box():
    """Healthy, although end to end it is further off than the tolerance that convicts a layer."""
    code, out, _ = lab_output("sharpen", "--json")
    report = json.loads(out)
    assert code == 0 and report["healthy"] and report["verdict"].startswith("No bug."), report["verdict"]
    assert not any(row["unexplained"] for row in report["layers"])
    sharp = [row for row in report["layers"] if row["weights"] == "x8" and row["round_trips"]]
    limit = 5 * SHARPER * EXACT
    assert max(row["end_to_end"] for row in sharp) > limit > max(row["shared"] for row in sharp)
    assert any(row["exposed"] < report["tokens"] for row in sharp)      # else nothing could be unexplained


def small_sink(engine, patch):
    """A mistake that is smaller than what conditioning does end to end."""
    for attn in attentions(engine):
        attn.attn_sink += 0.01


@pytest.mark.parametrize("breaks, ratios", [
    (TRAPS["attention sink ignored"], (0, 4, 128)), (TRAPS["window one short"], (0, 4, 128)),
    (TRAPS["window one long"], (0, 4, 128)), (TRAPS["compressed rows visible one early"], (4, 128)),
    (TRAPS["every row attended (no top-k)"], (4,)), (small_sink, (0, 4, 128))])
def test_sharpen_convicts(breaks, ratios):
    """Planted: told from conditioning, in the first layer that has it."""
    report = compare_sharpened(BOX, 135, breaks)
    args = model.ModelArgs.from_config(generate.config_of(BOX, None))
    layer = next(i for i, ratio in enumerate(args.compress_ratios) if ratio in ratios)
    assert report.healthy is False and report.verdict.startswith(f"BUG in layer {layer} "), report.verdict


def test_sharpen_convicts_where_only_roundings_tell():
    """Planted: KV rounded through bf16, as in the vendor's first release. Without round trips nobody can see
    it, and each value is within one quantum of the right one."""
    def breaks(engine, patch):
        patch.setattr(model, "round_kv", lambda kv: kv.copy_(kv.bfloat16() if model.mode.round_trips else kv))
    report = compare_sharpened(BOX, 60, breaks)
    assert report.healthy is False and report.verdict.startswith("BUG in layer 0 "), report.verdict
    assert "round trips on" in report.verdict and "layers.0.attn.kv" in report.verdict


def test_sharpen_by_hand():
    """Who is exposed to a row that differs, and which choice is wrong."""
    watch = Exposed({}, 12, 3, 4)
    watch.own[0] = watch.kv[2] = True
    assert np.flatnonzero(watch.exposed()).tolist() == [0, 2, 3, 4]
    watch.rows[1] = True        # tokens 4 to 7: seen from token 7 on
    assert np.flatnonzero(watch.exposed()).tolist() == [0, 2, 3, 4, 7, 8, 9, 10, 11]
    scores = np.array([[3.0, 2.0, 2.0, 1.0], [3.0, 2.0, 1.0, -np.inf]])

    def wrong(*chosen):
        return wrong_choices(scores, np.array(chosen, bool), 2, 1e-5)
    assert wrong([1, 1, 0, 0], [1, 1, 0, 0]) == wrong([1, 0, 1, 0], [1, 1, 0, 0]) == 0
    assert wrong([1, 0, 0, 1], [1, 0, 1, 0]) == 2       # not the highest
    assert wrong([1, 1, 1, 0], [1, 0, 0, 1]) == 2       # too many; one that is not visible


def test_sharpen_names_what_its_prompt_does_not_reach():
    args = model.ModelArgs.from_config(generate.config_of(BOX, None))
    assert unreached_parts(args, 4 * (args.index_topk + 1) + 128) == ""
    assert "the indexer's choice" in unreached_parts(args, 4 * args.index_topk + 3)
    few = compare_sharpened(BOX, 3).blind
    assert "rows of ratio 4 (3" in few and "rows of ratio 128 (3" in few and "the indexer's choice" in few


def test_sharpen_reads_the_other_names(tmp_path):
    shutil.copy(os.path.join(BOX, "config.json"), tmp_path)
    tensors = load_file(os.path.join(BOX, "model.safetensors"))
    save_file({in_other_name_space(name): tensor for name, tensor in tensors.items() if not is_mtp(name)},
              tmp_path / "weights.safetensors")
    report = compare_sharpened(str(tmp_path), 8)
    assert report.healthy, report.verdict


@pytest.mark.parametrize("argv, said", [
    (["--tokens", "0"], "--tokens is 0"), (["--ckpt-path", "/no/where"], "/no/where"),
    (["--ckpt-path", "cut"], "is cut or damaged"), (["--ckpt-path", "ranks"], "give the folder that it was")])
def test_sharpen_bad_input(monkeypatch, tmp_path, argv, said):
    monkeypatch.chdir(tmp_path)
    for name, file in (("cut", "model.safetensors"), ("ranks", "model0-mp1.safetensors")):
        os.mkdir(name)
        shutil.copy(os.path.join(BOX, "config.json"), name)
        shutil.copy(os.path.join(BOX, "model.safetensors"), os.path.join(name, file))
    os.truncate("cut/model.safetensors", 100_000)
    code, _, error = lab_output("sharpen", *argv)
    assert code == 2 and said in error and len(error.splitlines()) == 1


# ---- golden logits: what no task shows

GOLDEN = os.path.join(BOX, "golden.npz")
GOLDEN_TOKENS, GOLDEN_STEP = 700, 37    # a conversation's length; every 37th position is kept


def write_golden():
    """Logits of the NumPy reference for one conversation, with every rounding that the model runs with."""
    tokens = lesson(GOLDEN_TOKENS, 2)
    logits = Reference(BOX, REFERENCE_ROUND_TRIPS).forward(tokens[0].numpy())[::GOLDEN_STEP]
    np.savez(GOLDEN, tokens=tokens.numpy(), logits=logits.astype(np.float32))
    print(f"{GOLDEN}: {len(logits)} positions of {tokens.size(1)} tokens")


def golden_error(engine: model.Transformer) -> float:
    """Median over the positions; a rounding that falls to its neighbour spoils some of them, not most."""
    golden = np.load(GOLDEN)
    tokens, errors, start = torch.from_numpy(golden["tokens"]), [], 0
    for row, expected in enumerate(golden["logits"]):
        end = row * GOLDEN_STEP + 1
        errors.append(relative_error(engine(tokens[:, start:end], start)[0], expected))
        start = end
    return statistics.median(errors)


# Where some roundings fall to the neighbour 1.6e-3 was seen, elsewhere 9e-7 to 5e-5; the least arm: 1.1e-2.
GOLDEN_FINE = 0.003


def test_golden_logits_guard_what_no_task_shows():
    """The engine in fp32, all round trips on. Each part that is switched off must show, also where no task of
    the box does: FP4 index keys, FP8 of KV, the ratio-128 layer."""
    def fresh():
        return load(BOX, round_trips=model.ROUND_TRIPS, max_seq_len=GOLDEN_TOKENS, max_chunk=GOLDEN_TOKENS)
    proof("golden logits of the box, all round trips", "NumPy reference, stored", "fp32, median",
          golden_error(fresh()), GOLDEN_FINE, SHARED_BLIND)
    for arm in ARMS:
        engine = fresh()
        if arm.idle(engine, GOLDEN_TOKENS):
            continue
        with switched(arm, engine):
            error = golden_error(engine)
        assert error > 2 * GOLDEN_FINE, f"{arm.name}: {error:.1e}"


# ---- box

BOX_BROKEN_TASKS = {
    "fact from 24 tokens back": "fact from 24", "fact from 256 tokens back": "fact from 256",
    "fact from 700 tokens back": "fact from 700", "fact among 8": "among 8", "tools: 1 of 4": "tools"}


def layer_rows_off(layer: int):
    """No query sees a compressed row of this layer."""
    def switch(engine, patch):
        indexer = engine.layers[layer].attn.indexer
        choose = indexer.forward
        patch.setattr(indexer, "forward", lambda *args: torch.full_like(choose(*args), -1))
    return switch


def random_rows(engine, patch):
    """The indexer's scores are noise; which rows a query may see stays."""
    score, noise = model.index_score, generator(0)

    def random_score(*args):
        right = score(*args)
        return torch.rand(right.shape, generator=noise).masked_fill(right.isinf(), -torch.inf)
    patch.setattr(model, "index_score", random_score)


def box_breaks(config: dict) -> dict[str, typing.Callable]:
    """name -> a switch as in ARMS; the first leaves the engine as it is."""
    ratios = config["compress_ratios"][:config["num_hidden_layers"]]
    return {
        "nothing": lambda engine, patch: None,
        "compressed rows off": rows_off(4, 128),
        "random rows": random_rows,
        **{f"rows of layer {i} (ratio 4) off": layer_rows_off(i) for i, ratio in enumerate(ratios)
           if ratio == 4},
        "index_topk 1": topk_change(lambda topk: 1),
        "compress_rope_theta / 4": rope_change(True, lambda args: {"base": args.compress_rope_theta / 4}),
        "compress_rope_theta = rope_theta": rope_change(True, lambda args: {"base": args.rope_theta}),
        "YaRN off": rope_change(True, lambda args: {"original_seq_len": 0}),
        "rows of ratio 128 off": rows_off(128),
        "index keys and queries not in FP4": without("index"),
        "KV not in FP8": without("kv"),
    }


def box_broken(ckpt_path: str, config: dict, switch: typing.Callable, tasks, samples: int) -> list[float]:
    """The share of each task that is correct with a breakage built into an engine of its own."""
    engine, tokenizer = box_engine(ckpt_path)
    with switched(Arm("broken", switch, never_idle), engine):
        return [box_score(engine, tokenizer, config, task, samples).correct for task in tasks]


def box_row(task: str, score: BoxScore) -> list[str]:
    goals = BOX_WELL_FORMED.get(task.split()[0].strip(":")), BOX_GOALS[task][0]
    goals = (goals[0], BOX_RIGHT_TOOL, goals[1]) if score.right_tool is not None else goals
    tool = "" if score.right_tool is None else f"{score.right_tool:.2f} (chance {score.chance:.2f})"
    return [task, str(score.n), f"{score.well_formed:.2f}", tool, f"{score.correct:.2f}",
            " / ".join(f"{goal:.2f}" for goal in goals if goal)]


@lab("box", "what the checkpoint in the box can do, and what breaking it leaves", draws=True,
     samples={"type": int, "default": 12, "metavar": "N",
              "help": "trials a cell (default: %(default)s); half as many with each breakage"},
     tasks={"default": "", "metavar": "REGEX",
            "help": "only rows whose name matches; breakages begin with 'broken: '"})
def lab_box(args: argparse.Namespace) -> Report:
    """Each cell greedy, in bf16 with the round trips, through generate.py's encoding and parser."""
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: give 1 or more trials a cell")
    config = generate.config_of(args.ckpt_path, None)
    engine, tokenizer = box_engine(args.ckpt_path)
    breaks = {f"broken: {name}": change for name, change in box_breaks(config).items()}
    try:
        chosen = [name for name in [*BOX_GOALS, *breaks] if re.search(args.tasks, name)]
    except re.error as error:
        raise ValueError(f"--tasks {args.tasks} is no regular expression: {error}") from None
    if not chosen:
        raise ValueError(f"--tasks {args.tasks} matches none of: {', '.join([*BOX_GOALS, *breaks])}")
    scores = {task: box_score(engine, tokenizer, config, task, args.samples)
              for task in chosen if task in BOX_GOALS}
    broken = {name: box_broken(args.ckpt_path, config, breaks[name], BOX_BROKEN_TASKS, -(-args.samples // 2))
              for name in chosen if name in breaks}
    rows = [box_row(task, score) for task, score in scores.items()]
    if broken:
        rows.append(["broken, correct of", *BOX_BROKEN_TASKS.values()])
        rows += [[name, *(f"{share:.2f}" for share in shares)] for name, shares in broken.items()]
    short = [task for task, score in scores.items() if score.correct < BOX_GOALS[task][0]]
    verdict = f"{len(scores) - len(short)} of {len(scores)} cells reach their goal" + (
        "; short of it: " + ", ".join(short) if short else "") + "."
    whole = broken.get("broken: nothing")
    unseen = [name for name, shares in broken.items() if whole and shares is not whole
              and all(share > 0.8 * right for share, right in zip(shares, whole))]
    verdict += f" No task shows: {', '.join(unseen)}." if unseen else ""
    data = {"cells": {task: score._asdict() for task, score in scores.items()},
            "broken": {name: dict(zip(BOX_BROKEN_TASKS, shares)) for name, shares in broken.items()}}
    heat = Heat("correct, with it broken", list(broken), [*BOX_BROKEN_TASKS.values()], [*broken.values()])
    return Report("What can this checkpoint do, and what does breaking it leave of that?",
                  ["task", "n", "well-formed", "right tool", "correct", "goal"], rows, verdict,
                  f"words and phrasings other than its own; a share of {args.samples} trials is good to "
                  f"{1 / math.sqrt(args.samples):.2f}; small talk is judged by single words",
                  None, data, (heat,) if broken else ())


def test_lab_box():
    """Rows of both tables; facts are found whole and lost broken."""
    code, found = lab_result("box", "--samples", "4", "--tasks", "from 128|broken: .*rows off")
    broken = found["broken"]["broken: compressed rows off"]
    assert code == 0 and found["cells"]["fact from 128 tokens back"]["correct"] >= 0.5
    assert broken["fact from 256 tokens back"] == broken["fact from 700 tokens back"] == 0


@pytest.mark.parametrize("flags, says", [
    (["--samples", "0"], "give 1 or more"), (["--tasks", "swimming"], "matches none of: fact from 24"),
    (["--tasks", "("], "is no regular expression"), (["--ckpt-path", "nowhere"], "nowhere")])
def test_lab_box_wrong_usage(flags, says):
    code, _, error = lab_output("box", *flags)
    assert code == 2 and says in error


# ==========================================================================================================
# Commands
# ==========================================================================================================

class PrintProofs:
    """A pytest plugin that ends a run with the parity table."""
    def pytest_terminal_summary(self, terminalreporter):
        import test_parity      # pytest's copy of this file, in which the tests ran
        test_parity.print_proofs()


def main() -> int:
    parser = argparse.ArgumentParser(description="Proofs and measurements; without a command: all proofs.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("bench", help="speed here: an expert's products, and models beside transformers")
    commands.add_parser("traps", help="which check catches which mistake")
    commands.add_parser("sm120", help="compile every Triton kernel for sm_120, without a GPU")
    commands.add_parser("kernels", help="on a GPU: check every Triton kernel and time it at Flash's shapes")
    commands.add_parser("golden", help="tiny/golden.npz anew, from the NumPy reference")
    commands.add_parser("interpret", help="the interpreter's checks as JSON; for test_kernels_interpreted")
    add_measuring_parsers(commands)
    vendor = commands.add_parser("vendor", help="our model.py against the vendor's, over our kernel.py")
    vendor.add_argument("--vendor-dir", required=True, help="a copy of the vendor's inference folder")
    for name, command in LAB.items():
        add_lab_parser(commands, name, command)
    args, rest = parser.parse_known_args()
    if args.command is None:
        return pytest.main([__file__, "-q", *rest], plugins=[PrintProofs()])
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.command in LAB:
        return run_lab(args)
    if args.command in MEASURING:
        return run_measuring(args)
    if args.command == "vendor":
        return compare_with_vendor(args.vendor_dir)
    return {"bench": bench, "traps": print_traps, "sm120": sm120, "kernels": kernels,
            "golden": write_golden,
            "interpret": lambda: print(json.dumps(run_checks("cpu")))}[args.command]() or 0


if __name__ == "__main__":
    sys.exit(main())
