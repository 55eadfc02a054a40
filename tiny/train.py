"""Makes the checkpoint in this folder again, from nothing: `python tiny/train.py --work DIR`.

Two processes of one thread each train it and average their gradients; a run that was stopped goes on where it
last kept its state, and comes to the same weights as one that was not. DIR gets state.pt, train.log,
tokenizer.json and at the end the checkpoint. The data are lessons.py's.

The forward pass here is for training: all positions at once, no caches, gradients, products in bf16 on fp32
weights. A test shows that it equals model.py's in fp32. Names of tensors are the published ones throughout.
Differences from model.py, all of them choices of how, not what:
- all experts run on all tokens, and the gate's weights are 0 for those not chosen: with four that is faster;
- attention is dense over the compressed rows, with a mask; in the last stages it keeps the indexer's top-k;
- roundings pass gradients straight through; a clamp of SwiGLU passes them, too.
"""

import argparse
import functools
import json
import os
import random
import re
import shutil
import sys
import time

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(FOLDER))
# glibc gives every large tensor back to the system and gets it anew: products become several times slower
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000",
               "OMP_NUM_THREADS": "1"}

import torch                        # noqa: E402
import torch.distributed as dist    # noqa: E402
import torch.nn.functional as F     # noqa: E402

import convert                      # noqa: E402
import generate                     # noqa: E402
import kernel                       # noqa: E402
import lessons                      # noqa: E402
from model import precompute_freqs_cis      # noqa: E402

STORED = ("kv", "index", "act", "weights")
STAGES = [  # name, steps, lengths in tokens, share of plain toolboxes, roundings, the indexer's real top-k
    ("short", 750, (320,), 0, (), False),
    ("long", 750, (512,), 0, (), False),
    ("rows", 450, (512, 896), 0, ("kv",), True),
    ("far", 350, (640, 1664), .75, ("kv", "index"), True),
    ("stored", 950, (512, 896, 1664), .75, STORED, True),
    ("mtp", 100, (512,), .75, STORED, True),    # the MTP block alone, on the model as it is then
]
TOKENS = 4096               # a step and process
KEEP = 50                   # steps between two states on disk
LOG = 25                    # steps between two lines of the log
MUON_LR, ADAM_LR = 0.02, 3e-3


# ---- the tokenizer

SPECIAL = [generate.bos_token, generate.eos_token, "<｜▁pad▁｜>", generate.USER_SP_TOKEN,
           generate.ASSISTANT_SP_TOKEN, generate.thinking_start_token, generate.thinking_end_token,
           generate.dsml_token, generate.LATEST_REMINDER_SP_TOKEN, "<tool_result>", "</tool_result>",
           *generate.DS_TASK_SP_TOKENS.values()]
MARKUP = ["tool_calls>", 'invoke name="', "invoke>", 'parameter name="', '" string="true">',
          '" string="false">', "parameter>"]
MARKS = 110                 # merges of punctuation


def fixed_texts():
    """Tokens of their own: DSML's tags, and the sentences of the vendor's prompts, which never change."""
    prompts = generate.TOOLS_TEMPLATE, generate.REASONING_EFFORT_MAX, generate.REASONING_EFFORT_BEYOND
    return MARKUP + [part for prompt in prompts for part in re.split(r"\n|\{\w+\}", prompt)
                     if len(part.split()) >= 3]


def merges_of(pieces, n):
    """The first n merges of a byte-level BPE over these pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=n + 256, initial_alphabet=alphabet,
                                                        show_progress=False))
    return [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]


def corpus():
    """Words and punctuation of 12,000 conversations, without what is a token anyway."""
    rng, words, marks = random.Random(1), [], []
    known = sorted(fixed_texts() + SPECIAL, key=len, reverse=True)
    for _ in range(12000):
        text = generate.encode_messages(*lessons.conversation(rng, rng.choice((128, 256, 384))))
        for part in known:
            text = text.replace(part, "\n")
        words += re.findall(r"[A-Za-z]+", text)
        marks += re.findall(r"[^A-Za-z0-9\s]+(?: (?=[^A-Za-z0-9\s])[^A-Za-z0-9\s]+)*|\n+", text)
    return words, marks


def make_tokenizer(size):
    """A byte-level BPE in which ' word' is cut as 'word' is, each token having a twin: what is copied out of
    a text into quotes stays the same sequence. Digits go in pairs."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    words, marks = corpus()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in "0123456789" for b in "0123456789"] + [("Ġ", letter) for letter in letters]
    of_words = merges_of(words, 900)
    merges += merges_of(marks, MARKS)
    vocab = {}
    for token in SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]:
        vocab.setdefault(token, len(vocab))
    for a, b in of_words:
        if len(set(vocab) | {a + b, "Ġ" + a + b}) + len(fixed_texts()) > size:
            break
        for pair in ((a, b), ("Ġ" + a, b)):
            merges.append(pair)
            vocab.setdefault(pair[0] + pair[1], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pieces = Regex(r"\p{N}{1,2}| ?\p{L}+|[^\p{L}\p{N}\s]+(?: (?=[^\p{L}\p{N}\s])[^\p{L}\p{N}\s]+)*|\n+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pieces, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in fixed_texts()])
    return tokenizer


# ---- rounding, with gradients that pass straight through

def through(x, rounded):
    return x + (rounded - x).detach()


def power_of_two(amax, largest):
    """The scale that brings amax to `largest` or less."""
    return torch.exp2(torch.ceil(torch.log2(amax / largest)))


def fp8(x, block):
    """FP8 with a power-of-two scale per `block` values of the last dim, as kernel.act_quant rounds."""
    blocks = x.detach().float().unflatten(-1, (-1, block))
    scale = power_of_two(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448)
    rounded = ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return through(x, rounded.to(x.dtype))


def fp4(x, block=32):
    """FP4 (e2m1) with a power-of-two scale per 32 values, as kernel.fp4_act_quant rounds in place."""
    blocks = x.detach().float().unflatten(-1, (-1, block))
    scale = power_of_two(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0 ** -126), 6)
    y = blocks / scale
    size = y.abs()
    step = torch.where(size < 2, .5, torch.where(size < 4, 1., 2.))
    rounded = ((y / step).round() * step).clamp(-6, 6) * scale
    return through(x, rounded.flatten(-2).to(x.dtype))


def weight_scale(w):
    """A power of two for each 128 x 128 block of an FP8 weight: [out/128, in/128]."""
    rows, cols = w.shape
    blocks = F.pad(w.abs(), (0, -cols % 128, 0, -rows % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return power_of_two(blocks.amax(dim=(1, 3)).clamp(min=1e-4), 448)


def fp8_codes(w):
    """-> a weight's e4m3 values, its scales, and these spread over the weight."""
    scale = weight_scale(w)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:w.size(0), :w.size(1)]
    return (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale, wide


def fp8_weight(w):
    codes, _, wide = fp8_codes(w.detach().float())
    return through(w, (codes.float() * wide).to(w.dtype))


# ---- pieces of the forward pass that would cost most if autograd took them apart

class Normalise(torch.autograd.Function):
    """Sinkhorn's steps on [hc,hc,n]: columns and rows are divided by their sums in turn, all in one node."""

    @staticmethod
    def forward(ctx, comb, iterations, eps):
        states, sums = [], []
        for i in range(2 * iterations - 1):
            total = comb.sum(i % 2, keepdim=True).add_(eps)
            comb = comb / total
            states.append(comb)
            sums.append(total)
        ctx.save_for_backward(*states, *sums)
        return comb

    @staticmethod
    def backward(ctx, grad):
        n, grad = len(ctx.saved_tensors) // 2, grad.contiguous()
        for i in reversed(range(n)):
            y, total = ctx.saved_tensors[i], ctx.saved_tensors[n + i]
            grad = (grad - (grad * y).sum(i % 2, keepdim=True)) / total
        return grad, None, None


def sinkhorn(comb, hc, iterations, eps):
    """[b,s,hc*hc] -> doubly stochastic [b,s,hc,hc]."""
    b, s, _ = comb.shape
    comb = comb.unflatten(-1, (hc, hc)).softmax(-1) + eps
    comb = comb.view(b * s, hc, hc).permute(1, 2, 0).contiguous()   # tokens last: sums run over whole vectors
    return Normalise.apply(comb, iterations, eps).permute(2, 0, 1).reshape(b, s, hc, hc)


class Rotate(torch.autograd.Function):
    """Rotary embedding of the last dims; its gradient is rotated back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x.clone(memory_format=torch.contiguous_format), cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad.clone(memory_format=torch.contiguous_format), cos, -sin), None, None


def turn(x, cos, sin):
    rd = 2 * cos.size(-1)
    even, odd = x[..., -rd::2].float(), x[..., 1 - rd::2].float()
    turned = even * cos - odd * sin, even * sin + odd * cos
    x[..., -rd::2], x[..., 1 - rd::2] = turned
    return x


def rotate(x, freqs, inverse=False):
    """x [b,s,(h,)d] by freqs [s,rope/2,2]."""
    cos, sin = freqs[..., 0], freqs[..., 1]
    if x.ndim == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return Rotate.apply(x, cos, -sin if inverse else sin)


class Swiglu(torch.autograd.Function):
    """gates * silu(min(gate, limit)) * clamp(up, -limit, limit) of [n,experts,inter]; gates [n,experts]."""

    @staticmethod
    def forward(ctx, gate, up, gates, limit):
        ctx.save_for_backward(gate, up, gates)
        ctx.limit = limit
        y = F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
        return y.mul_(gates.unsqueeze(2))

    @staticmethod
    def backward(ctx, grad):
        gate, up, gates = ctx.saved_tensors
        gate, up = gate.clamp(max=ctx.limit), up.clamp(-ctx.limit, ctx.limit)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_gates = (grad * silu).mul_(up).sum(2)
        grad = grad * gates.unsqueeze(2)
        slope = (1 - sigmoid).mul_(silu).add_(sigmoid)      # of silu
        grad_up = grad * silu
        return grad.mul_(up).mul_(slope), grad_up, grad_gates, None


# ---- masks and positions, which depend on lengths alone

@functools.cache
def visible(s, ratio):
    """[s,r]: which rows are complete for each query, its own token included."""
    return torch.arange(s // ratio) < ((torch.arange(s) + 1) // ratio).unsqueeze(1)


@functools.cache
def window_mask(s, window):
    """[s,2w], for the keys of a chunk and of the one before: 0 for a query's last `window`, else -inf."""
    q = torch.arange(s).unsqueeze(1)
    k = (q // window - 1) * window + torch.arange(2 * window)
    return torch.where((k >= 0) & (k <= q) & (k > q - window), 0.0, -torch.inf)


def overlap(x, d, empty):
    """[b,n,4,2d] -> [b,n,8,d]: the first half of the group before, the second half of the group."""
    before = F.pad(x[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=empty)
    return torch.cat([before, x[..., d:]], 2)


def index_loss(scores, mass):
    """KL from the indexer's softmax to attention's mass on compressed rows, over queries that look there."""
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp(min=1e-6)
    log_p = scores.masked_fill(scores == -torch.inf, -1e4).log_softmax(-1)
    kl = (torch.special.xlogy(target, target) - target * log_p).sum(-1)
    weight = total.squeeze(-1)
    return (kl * weight).sum() / weight.sum().clamp(min=1)


class Net:
    """Weights under their published names, and the forward pass over whole sequences."""

    def __init__(self, config, weights, dtype=torch.bfloat16, rounding=(), real_topk=False):
        self.config, self.weights, self.dtype = config, weights, dtype
        self.rounding, self.real_topk = frozenset(rounding), real_topk
        self.kinds = {name: kind for name, kind, _ in convert.parameters(config)}
        self.eps = config["rms_norm_eps"]
        self.cast = {}      # the weights as they are multiplied
        self.loads = {}     # how often each expert was chosen, by layer

    def begin(self):
        """Once a step: weights rounded to their stored formats, in the dtype of activations."""
        self.cast = {}
        for name, w in self.weights.items():
            kind = self.kinds[name]
            if "weights" in self.rounding and kind in ("linear", "expert"):
                w = fp8_weight(w) if kind == "linear" else fp4(w)
            self.cast[name] = w if kind in ("F32", "I64") or "norm" in name else w.to(self.dtype)

    def linear(self, x, name):
        if "act" in self.rounding and self.kinds[name] in ("linear", "expert"):
            x = fp8(x, 128)
        return F.linear(x, self.cast[name])

    def norm(self, x, name):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.cast[name]).to(x.dtype)

    # hyper-connections

    def mixes(self, h, fn):
        flat = h.flatten(2)
        square = (flat * flat).sum(-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(square / flat.size(-1) + self.eps)
        return F.linear(flat, self.cast[fn].to(flat.dtype)).float() * scale

    def hc_pre(self, h, prefix):
        hc, eps = self.config["hc_mult"], self.config["hc_eps"]
        mix = self.mixes(h, prefix + "_fn")
        scale, base = self.cast[prefix + "_scale"], self.cast[prefix + "_base"]
        pre = torch.sigmoid(mix[..., :hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(mix[..., hc:2 * hc] * scale[1] + base[hc:2 * hc])
        comb = mix[..., 2 * hc:] * scale[2] + base[2 * hc:]
        comb = sinkhorn(comb, hc, self.config["hc_sinkhorn_iters"], eps)
        return torch.matmul(pre.to(h.dtype).unsqueeze(2), h).squeeze(2), post, comb

    def hc_post(self, x, h, post, comb):
        weights = torch.cat([comb, post.unsqueeze(2)], dim=2).to(h.dtype)
        return torch.matmul(weights.transpose(-1, -2), torch.cat([h, x.unsqueeze(2)], dim=2))

    # attention

    def rotations(self, ratio, s):
        """cos and sin of positions 0 .. s-1: [s,rope/2,2]."""
        c, yarn = self.config, self.config["rope_scaling"]
        length, base = ((yarn["original_max_position_embeddings"], c["compress_rope_theta"]) if ratio
                        else (0, c["rope_theta"]))
        table = precompute_freqs_cis(c["qk_rope_head_dim"], 4096, length, base, yarn["factor"],
                                     yarn["beta_fast"], yarn["beta_slow"], torch.device("cpu"))
        return torch.view_as_real(table)[:s]

    def compress(self, x, prefix, ratio, freqs, index=False):
        """Compressed rows of whole groups: [b,s,dim] -> [b,r,d]."""
        b, s, _ = x.shape
        n = s // ratio
        x = x[:, :n * ratio]
        kv = F.linear(x, self.cast[prefix + "wkv.weight"]).view(b, n, ratio, -1)
        score = F.linear(x, self.cast[prefix + "wgate.weight"]).view(b, n, ratio, -1)
        score = score + self.cast[prefix + "ape"].to(x.dtype)
        if ratio == 4:
            d = kv.size(-1) // 2
            kv, score = overlap(kv, d, 0), overlap(score, d, -torch.inf)
        kv = (kv * score.float().softmax(2).to(kv.dtype)).sum(2)
        kv = rotate(self.norm(kv, prefix + "norm.weight"), freqs[:n * ratio:ratio])
        return self.round_index(kv) if index else self.round_kv(kv)

    def round_kv(self, kv):
        if "kv" not in self.rounding:
            return kv
        rd = self.config["qk_rope_head_dim"]
        return torch.cat([fp8(kv[..., :-rd], 64), kv[..., -rd:]], -1)

    def round_index(self, x):
        if "index" not in self.rounding:
            return x
        h = kernel.hadamard_matrix(x.size(-1), x.device).to(x.dtype)
        return fp4(F.linear(x, h) * x.size(-1) ** -0.5)

    def index_scores(self, x, qr, prefix, freqs):
        """The indexer's scores [b,s,r], of complete rows only (others -inf). Its inputs get no gradient."""
        c, (b, s, _) = self.config, x.shape
        x, qr, heads, d = x.detach(), qr.detach(), c["index_n_heads"], c["index_head_dim"]
        q = self.linear(qr, prefix + "wq_b.weight").view(b, s, heads, d)
        q = self.round_index(rotate(q, freqs[:s]))
        k = self.compress(x, prefix + "compressor.", 4, freqs, index=True)
        weights = F.linear(x, self.cast[prefix + "weights_proj.weight"]) * (d * heads) ** -0.5
        scores = torch.matmul(q.flatten(1, 2), k.transpose(1, 2)).view(b, s, heads, -1)
        scores = torch.einsum("bshr,bsh->bsr", scores.relu(), weights).float()
        return scores.masked_fill(~visible(s, 4), -torch.inf)

    def attention(self, x, prefix, ratio):
        """-> the output [b,s,dim]; the indexer's distance from where attention goes, or None."""
        c, (b, s, _) = self.config, x.shape
        heads, d, window = c["num_attention_heads"], c["head_dim"], c["sliding_window"]
        freqs = self.rotations(ratio, s)
        qr = self.norm(self.linear(x, prefix + "wq_a.weight"), prefix + "q_norm.weight")
        q = rotate(self.linear(qr, prefix + "wq_b.weight").view(b, s, heads, d), freqs)
        # a query's norm is divided out of its logits: they are fewer
        scale = torch.rsqrt((q * q).sum(-1, keepdim=True, dtype=torch.float32) / d + self.eps) * d ** -0.5
        kv = rotate(self.norm(self.linear(x, prefix + "wkv.weight"), prefix + "kv_norm.weight"), freqs)
        kv = self.round_kv(kv)

        # window: the queries of a chunk see their own keys and those of the chunk before
        n = -(-s // window)
        pad = n * window - s
        q_chunks = F.pad(q, (0, 0, 0, 0, 0, pad)).view(b * n, window * heads, d)
        kv_chunks = F.pad(kv, (0, 0, window, pad)).view(b, n + 1, window, d)
        kv_chunks = torch.cat([kv_chunks[:, :-1], kv_chunks[:, 1:]], 2).flatten(0, 1)   # [b*n,2w,d]
        near = torch.matmul(q_chunks, kv_chunks.transpose(1, 2)).view(b, n * window, heads, 2 * window)[:, :s]
        near = near.float() * scale + window_mask(s, window).unsqueeze(1)
        logits = [near, self.cast[prefix + "attn_sink"].view(1, 1, heads, 1).expand(b, s, heads, 1)]
        rows = scores = None
        if ratio and s >= ratio:
            rows, far, scores = self.far_logits(x, q, qr, scale, prefix, ratio, freqs)
            logits.append(far)
        p = torch.cat(logits, -1).softmax(-1)                                           # [b,s,h,2w+1+r]
        p_near = F.pad(p[..., :2 * window], (0, 0, 0, 0, 0, pad)).to(x.dtype)
        o = torch.matmul(p_near.view(b * n, window * heads, 2 * window), kv_chunks)
        o, loss = o.view(b, n * window, heads, d)[:, :s], None
        if rows is not None:
            p_far = p[..., 2 * window + 1:]
            o = o + torch.matmul(p_far.to(x.dtype).flatten(1, 2), rows).view(b, s, heads, d)
            loss = index_loss(scores, p_far.detach().sum(2)) if scores is not None else None
        o = rotate(o, freqs, inverse=True)
        wo_a = self.cast[prefix + "wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        o = torch.einsum("bsgd,grd->bsgr", o.reshape(b, s, c["o_groups"], -1), wo_a).flatten(2)
        return self.linear(o, prefix + "wo_b.weight"), loss

    def far_logits(self, x, q, qr, scale, prefix, ratio, freqs):
        """-> compressed rows [b,r,d], logits of attention to them [b,s,h,r], the indexer's scores or None."""
        b, s, heads, _ = q.shape
        rows = self.compress(x, prefix + "compressor.", ratio, freqs)
        far = torch.matmul(q.flatten(1, 2), rows.transpose(1, 2)).view(b, s, heads, -1).float() * scale
        seen, scores = visible(s, ratio).unsqueeze(1), None
        if ratio == 4:
            scores = self.index_scores(x, qr, prefix + "indexer.", freqs)
            if self.real_topk and scores.size(-1) > self.config["index_topk"]:
                chosen = scores.detach().topk(self.config["index_topk"], -1)[1]
                chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
                seen = seen & chosen.unsqueeze(2)
        return rows, far.masked_fill(~seen, -torch.inf), scores

    # experts, blocks

    def moe(self, x, ids, prefix, hashed):
        c, shape = self.config, x.shape
        x = x.flatten(0, 1)
        n, inter = c["n_routed_experts"], c["moe_intermediate_size"]
        scores = F.softplus(F.linear(x.float(), self.cast[prefix + "gate.weight"].float())).sqrt()
        if hashed:
            chosen = self.cast[prefix + "gate.tid2eid"][ids.flatten()]
        else:
            chosen = (scores.detach() + self.cast[prefix + "gate.bias"]).topk(c["num_experts_per_tok"], -1)[1]
            self.loads[prefix] = torch.bincount(chosen.flatten(), minlength=n)
        gates = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
        gates = gates / gates.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        gates = torch.cat([gates, torch.ones_like(gates[:, :1])], 1).to(x.dtype)

        names = [f"{prefix}experts.{i}." for i in range(n)] + [prefix + "shared_experts."]
        x = fp8(x, 128) if "act" in self.rounding else x
        gate, up = (F.linear(x, torch.cat([self.cast[f"{name}{part}.weight"] for name in names]))
                    .view(-1, n + 1, inter) for part in ("w1", "w3"))
        y = Swiglu.apply(gate, up, gates, c["swiglu_limit"]).flatten(1)         # [n,(experts+1)*inter]
        y = fp8(y, 128) if "act" in self.rounding else y
        return F.linear(y, torch.cat([self.cast[f"{name}w2.weight"] for name in names], dim=1)).view(shape)

    def block(self, h, ids, prefix, layer_id):
        c = self.config
        x, post, comb = self.hc_pre(h, prefix + "hc_attn")
        x, loss = self.attention(self.norm(x, prefix + "attn_norm.weight"), prefix + "attn.",
                                 c["compress_ratios"][layer_id])
        h = self.hc_post(x, h, post, comb)
        x, post, comb = self.hc_pre(h, prefix + "hc_ffn")
        x = self.moe(self.norm(x, prefix + "ffn_norm.weight"), ids, prefix + "ffn.",
                     layer_id < c["num_hash_layers"])
        return self.hc_post(x, h, post, comb), loss

    def trunk(self, ids):
        """-> the last layer's streams [b,s,hc,d], the indexers' losses."""
        h = F.embedding(ids, self.cast["embed.weight"])
        h = h.unsqueeze(2).repeat(1, 1, self.config["hc_mult"], 1)
        losses = []
        for i in range(self.config["num_hidden_layers"]):
            h, loss = self.block(h, ids, f"layers.{i}.", i)
            losses += [loss] if loss is not None else []
        return h, losses

    def head(self, h, prefix=""):
        """Streams [n,1,hc,d] of the positions that are asked for -> logits [n,vocab]."""
        mix = self.mixes(h, prefix + "hc_head_fn")
        pre = torch.sigmoid(mix * self.cast[prefix + "hc_head_scale"] + self.cast[prefix + "hc_head_base"])
        x = torch.matmul((pre + self.config["hc_eps"]).to(h.dtype).unsqueeze(2), h).squeeze(2)
        x = self.norm(x, prefix + "norm.weight")
        return F.linear(x, self.cast["head.weight"]).float().squeeze(1)

    def mtp(self, h, ids):
        """Streams at p and ids at p + 1 -> the MTP block's streams, from which p + 2 is predicted."""
        e = self.norm(F.embedding(ids, self.cast["embed.weight"]), "mtp.0.enorm.weight")
        h = self.linear(e, "mtp.0.e_proj.weight").unsqueeze(2) + self.linear(
            self.norm(h, "mtp.0.hnorm.weight"), "mtp.0.h_proj.weight")
        return self.block(h, ids, "mtp.0.", self.config["num_hidden_layers"])[0]


# ---- weights to begin with

def first_weights(config, tokenizer, seed=0):
    """Random weights in which copying is laid out, so that training refines it and needn't discover it.

    - Embedding dim 0 is the same for every token; 'word' and ' word' begin close together.
    - Layer 0: three heads look 1, 2 and 3 tokens back (by rotary phase alone), and add what stood there.
    - Ratio-4 layers: a row keeps its slots 3 to 7 apart, in 5 groups of dims; head h matches slot 3 + h with
      the current token, and passes slot 4 + h, the token that came after it, on to the head of the model.
    """
    g = torch.Generator().manual_seed(seed)
    dim, vocab = config["hidden_size"], config["vocab_size"]
    W = {}
    for name, kind, shape in convert.parameters(config):
        if kind == "I64":
            W[name] = torch.rand(shape[0], config["n_routed_experts"], generator=g).argsort(1)[:, :shape[1]]
        elif "norm" in name:
            W[name] = torch.ones(shape)
        elif len(shape) == 2 and kind != "F32":
            W[name] = torch.randn(shape, generator=g) * 0.3 * shape[1] ** -0.5
        else:
            W[name] = torch.zeros(shape)
    rotation = orthogonal(dim, g)       # from a token's embedding to its row in the head
    embed, space = torch.randn(vocab, dim, generator=g), torch.randn(dim, generator=g)
    words = tokenizer.get_vocab()
    for word, i in words.items():
        if word[0] == "Ġ" and word[1:] in words:
            embed[i] = .9 * embed[words[word[1:]]] + .44 * space
    W["head.weight"] = embed @ rotation.T * 0.25
    embed[:, 0] = 3
    W["embed.weight"] = embed
    blocks = [f"layers.{i}." for i in range(config["num_hidden_layers"])]
    blocks += [f"mtp.{i}." for i in range(config["num_nextn_predict_layers"])]
    for i, prefix in enumerate(blocks):
        plain_block(W, prefix, config, g)
        if i == 0:
            look_back(W, prefix + "attn.", config, g)
        elif config["compress_ratios"][i] == 4:
            copy_on(W, prefix + "attn.", config, rotation, g)
    for prefix in ("", *blocks[config["num_hidden_layers"]:]):
        W[prefix + "hc_head_scale"] += 1
    return {name: w.contiguous() for name, w in W.items()}


def orthogonal(n, g):
    """A rotation of all dims but 0, to which nothing is added and from which nothing is read."""
    q = torch.linalg.qr(torch.randn(n, n, generator=g))[0]
    q[0] = 0
    q[:, 0] = 0
    return q


def plain_block(W, prefix, config, g):
    """Hyper-connections near the identity, small experts, queries that see the stream as it is."""
    hc = config["hc_mult"]
    for part in ("attn", "ffn"):
        W[f"{prefix}hc_{part}_fn"] = torch.randn(W[f"{prefix}hc_{part}_fn"].shape, generator=g) * 0.01
        base = torch.randn((2 + hc) * hc, generator=g) * 0.2
        base[2 * hc:] += 4 * torch.eye(hc).flatten()
        W[f"{prefix}hc_{part}_base"] = base
        W[f"{prefix}hc_{part}_scale"] += 1
    W[prefix + "attn.attn_sink"] += 2
    for name in W:
        if name.startswith(prefix + "ffn.") and ".w2." not in name and name.endswith("weight"):
            W[name] = W[name] * 2
    W[prefix + "attn.wq_a.weight"] += torch.eye(*W[prefix + "attn.wq_a.weight"].shape)


def places_of_output(config, h):
    """Where head h's channels enter wo_a: the rows of its group, and the first of its columns."""
    per_group = config["num_attention_heads"] // config["o_groups"]
    first = h // per_group * config["o_lora_rank"]
    return slice(first, first + config["hidden_size"]), h % per_group * config["head_dim"]


def look_back(W, prefix, config, g):
    """Keys say where they are, by dim 0 and their rotary phase; the other dims hold the token itself."""
    dim, d, rd = config["hidden_size"], config["head_dim"], config["qk_rope_head_dim"]
    nope = d - rd
    share = torch.tensor([.45, .35, .2]).sqrt()         # of the three fastest frequencies
    freqs = config["rope_theta"] ** (-torch.arange(3) * 2 / rd)
    wkv, wq_b, wo_a = W[prefix + "wkv.weight"], W[prefix + "wq_b.weight"], W[prefix + "wo_a.weight"]
    wkv *= 0.1
    wkv[:dim] += torch.eye(dim)
    wkv[nope:nope + 6:2, 0] += 3.8 * share
    W[prefix + "kv_norm.weight"][nope:] = 1.6
    for h, weight in enumerate((1.0, 0.7, 0.5)):        # h + 1 tokens back
        wq_b[h * d + nope:h * d + nope + 6:2, 0] += 6 * share * torch.cos(freqs * (h + 1))
        wq_b[h * d + nope + 1:h * d + nope + 6:2, 0] -= 6 * share * torch.sin(freqs * (h + 1))
        rows, at = places_of_output(config, h)
        wo_a[rows, at:at + dim] += weight * orthogonal(dim, g)
    for at in range(0, config["o_groups"] * config["o_lora_rank"], config["o_lora_rank"]):
        W[prefix + "wo_b.weight"][:, at:at + dim] += torch.eye(dim)


def copy_on(W, prefix, config, rotation, g):
    """Induction: match one slot of a row, read the next; the indexer matches in the same way."""
    dim, d, rd, heads = (config[key] for key in ("hidden_size", "head_dim", "qk_rope_head_dim",
                                                 "num_attention_heads"))
    slots = heads + 1
    part = some_dims(dim, (d - rd) // slots, g)
    lay_out_slots(W, prefix + "compressor.", d, slots, part)
    wq_b, wo_a, size = W[prefix + "wq_b.weight"], W[prefix + "wo_a.weight"], len(part)
    wq_b *= 0.5
    for h in range(heads):
        wq_b[h * d + h * size:h * d + (h + 1) * size] += 2 * part
        rows, at = places_of_output(config, h)
        at += (h + 1) * size
        wo_a[rows, at:at + size] += rotation @ part.T * 0.6
    for at in range(0, config["o_groups"] * config["o_lora_rank"], config["o_lora_rank"]):
        W[prefix + "wo_b.weight"][:, at:at + dim] += 2 * torch.eye(dim)

    width = config["index_head_dim"]
    part = some_dims(dim, (width - rd) // slots, g)
    lay_out_slots(W, prefix + "indexer.compressor.", width, slots, part)
    for h in range(config["index_n_heads"]):
        at = h * width + h * len(part)
        W[prefix + "indexer.wq_b.weight"][at:at + len(part)] += 2 * part
    W[prefix + "indexer.weights_proj.weight"][:, 0] += 1


def some_dims(dim, size, g):
    """A projection of a token to `size` dims."""
    part = torch.linalg.qr(torch.randn(dim, size, generator=g))[0].T.contiguous() * (dim / 40) ** .5
    part[:, 0] = 0
    return part


def lay_out_slots(W, prefix, width, slots, part):
    """Group i of a row's dims holds slot 3 + i. Slots 0 to 3 are the first half of the channels, 4 to 7 the
    second; ape gives each channel to its slot."""
    ape, wkv = W[prefix + "ape"], W[prefix + "wkv.weight"]
    wkv *= 0.1
    for group in range(slots):
        dims, slot = torch.arange(group * len(part), (group + 1) * len(part)), 3 + group
        here, other = (dims, dims + width) if slot < 4 else (dims + width, dims)
        wkv[here] += part
        ape[slot % 4, here] += 5
        ape[:, other] -= 5
    W[prefix + "norm.weight"][:slots * len(part)] = 1.6


# ---- data

class Batches:
    """Conversations of like lengths, drawn on the fly."""

    def __init__(self, tokenizer, seed, plain=0):
        self.tokenizer, self.rng, self.plain, self.ready = tokenizer, random.Random(seed), plain, []
        self.assistant = tokenizer.token_to_id(generate.ASSISTANT_SP_TOKEN)
        self.eos = tokenizer.token_to_id(generate.eos_token)

    def one(self, length):
        """-> ids, and for each whether it is part of an answer."""
        messages, mode = lessons.conversation(self.rng, length, self.plain)
        ids = generate.encode_prompt(self.tokenizer, generate.encode_messages(messages, mode))[:length]
        answer, inside = [], 0
        for token in ids:
            answer.append(inside > 1)       # the cue, <think> or </think>, is part of the prompt
            inside = 0 if token == self.eos else 1 if token == self.assistant else 2 if inside else 0
        return ids, answer

    def draw(self, length):
        """Fills `ready` with lists of conversations that make up some TOKENS tokens with their padding."""
        drawn = sorted((self.one(length) for _ in range(6 * max(TOKENS // length, 1) + 24)),
                       key=lambda pair: len(pair[0]))
        while drawn:
            longest = -(-len(drawn[-1][0]) // 32) * 32
            n = max(TOKENS // longest, 1)
            self.ready.append(drawn[-n:])
            drawn = drawn[:-n]
        self.ready = self.ready[:-1] or self.ready      # the last one is a rest
        self.rng.shuffle(self.ready)

    def next(self, lengths):
        """-> ids [b,s], answer [b,s]: conversations of one of these lengths."""
        if not self.ready:
            self.draw(self.rng.choice(lengths))
        rows = self.ready.pop()
        s = -(-max(len(ids) for ids, _ in rows) // 32) * 32
        ids, answer = torch.full((len(rows), s), self.eos), torch.zeros(len(rows), s, dtype=torch.bool)
        for i, (ids_of, answer_of) in enumerate(rows):
            ids[i, :len(ids_of)] = torch.tensor(ids_of)
            answer[i, :len(answer_of)] = torch.tensor(answer_of)
        return ids, answer


# ---- training

def optimizers(config, weights):
    """Muon for the matrices between layers, AdamW for the rest; -> both, and the weights that are trained."""
    kinds = {name: kind for name, kind, _ in convert.parameters(config)}
    trained = {name: w.requires_grad_() for name, w in weights.items()
               if kinds[name] != "I64" and not name.endswith("gate.bias")}

    def for_muon(name, w):
        return w.ndim == 2 and kinds[name] != "F32" and not any(
            part in name for part in ("embed", "head.", "gate.weight", "weights_proj"))
    matrices = [w for name, w in trained.items() if for_muon(name, w)]
    others = [w for name, w in trained.items() if not for_muon(name, w)]
    return [torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)], trained


def step_loss(net, ids, answer, generator, mtp):
    """-> the loss; those of answers and indexers as numbers; which targets were predicted right.

    Answers count fully, a tenth of all other tokens a fifth. With mtp only the MTP block is trained."""
    net.begin()
    ahead = 1 + mtp
    if mtp:
        with torch.no_grad():
            h, _ = net.trunk(ids[:, :-2])
        h, index_losses = net.mtp(h, ids[:, 1:-1]), []
    else:
        h, index_losses = net.trunk(ids[:, :-1])
    target, is_answer = ids[:, ahead:], answer[:, ahead:]
    other = (torch.rand(target.shape, generator=generator) < 0.1) & ~is_answer
    at = (is_answer | other).nonzero(as_tuple=True)
    logits = net.head(h[at].unsqueeze(1), "mtp.0." if mtp else "")
    weight = torch.where(is_answer[at], 1.0, 0.2)
    loss = (F.cross_entropy(logits, target[at], reduction="none") * weight).sum() / weight.sum()
    right = torch.ones_like(target, dtype=torch.bool)
    right[at] = logits.argmax(-1) == target[at]
    return loss + 0.5 * sum(index_losses), [loss.item(), *(x.item() for x in index_losses)], right


def average(tensors):
    """Over all processes, in place."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for t, new in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(new.view_as(t))


def learning_rate(step, first, last):
    """From 0 over 50 steps (of the first stage only), then 1; over the second half down to 0.02."""
    warm = min(1, (step + 1) / 50) if first == 0 else 1
    return warm * min(1, max((last - step) / (0.5 * (last - first)), 0.02))


def update(net, opts, trained, ids, answer, generator, mtp):
    """One step of both optimizers, on averaged gradients; then the gates' bias, towards equal loads."""
    loss, losses, right = step_loss(net, ids, answer, generator, mtp)
    for w in trained.values():
        w.grad = None
    loss.backward()
    updated = [w for name, w in trained.items() if name.startswith("mtp.") == mtp]
    others = [w for name, w in trained.items() if name.startswith("mtp.") != mtp]
    for w in trained.values():
        if w.grad is None:
            w.grad = torch.zeros_like(w)
    average([w.grad for w in updated])
    torch.nn.utils.clip_grad_norm_(opts[1].param_groups[0]["params"], 1.0)
    for w in others:
        w.grad = None
    for opt in opts:
        opt.step()
    for prefix, load in net.loads.items():
        if prefix.startswith("mtp.") == mtp:
            load = load.float()
            dist.all_reduce(load)
            net.weights[prefix + "gate.bias"] += 0.002 * torch.sign(load.mean() - load)
    return losses, right


class Log:
    """A line every LOG steps: losses, and how many answers of each kind were right at every token."""

    def __init__(self, path, tokenizer):
        self.file, self.tokenizer = open(path, "a", encoding="utf-8"), tokenizer
        self.clear()

    def clear(self):
        self.counts, self.losses, self.start = {}, [], time.time()

    def add(self, ids, answer, losses, right):
        self.losses.append(losses)
        target, is_answer = ids[:, -right.size(1):], answer[:, -right.size(1):]
        for row, flags in enumerate(is_answer.tolist()):
            marks = "".join("x" if flag else "." for flag in flags)
            for span in re.finditer("x+", marks):
                at = slice(*span.span())
                kind = kind_of(self.tokenizer.decode(target[row, at].tolist(), skip_special_tokens=False))
                ok, n = self.counts.get(kind, (0, 0))
                self.counts[kind] = ok + bool(right[row, at].all()), n + 1

    def write(self, step, stage, lr):
        scores = " ".join(f"{kind} {ok / n:.2f}/{n}" for kind, (ok, n) in sorted(self.counts.items()))
        means = " ".join(f"{sum(column) / len(column):.3f}" for column in zip(*self.losses))
        print(f"step {step}, {stage}, {time.time() - self.start:.0f} s: loss and indexers' {means}, "
              f"rate {lr:.2f}, right {scores}", file=self.file, flush=True)
        self.clear()


def kind_of(text):
    text = text.split("</think>")[-1]
    starts = {"order": r"The (first|second|third|fourth) was ", "after": "Right after",
              "result": "The tool says", "fact": r"The |\w+'s ", "untold": "You did not",
              "unknown": re.escape(lessons.UNKNOWN)}
    if "DSML" in text:
        return "call"
    return next((kind for kind, start in starts.items() if re.match(start, text)), "talk")


def stage_of(step, stages):
    """The stage that this step belongs to."""
    for stage in stages:
        if step < stage[1]:
            return stage
        step -= stage[1]


def train(rank, ranks, folder, config, stages, keep, steps):
    """One process of the training, up to so many steps; rank 0 writes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    tokenizer = generate.load_tokenizer(folder)
    weights = first_weights(config, tokenizer)
    opts, trained = optimizers(config, weights)
    state, first_step = os.path.join(folder, "state.pt"), 0
    if os.path.exists(state):
        saved = torch.load(state, weights_only=True)
        first_step = saved["step"]
        for name, w in weights.items():
            w.data.copy_(saved["weights"][name])
        for opt, old in zip(opts, saved["optimizers"]):
            opt.load_state_dict(old)
    log = Log(os.path.join(folder, "train.log"), tokenizer) if rank == 0 else None
    last = sum(stage[1] for stage in stages)
    alone = last - stages[-1][1]        # where the MTP block's own training begins
    net = None
    for step in range(first_step, min(steps, last)):
        name, _, lengths, plain, rounding, real_topk = stage_of(step, stages)
        new_stage = net is None or net.stage != name
        if new_stage:
            net = Net(config, weights, rounding=rounding, real_topk=real_topk)
            net.stage = name
        if new_stage or step % keep == 0:       # a resumed run draws what an unbroken one does
            generator = torch.Generator().manual_seed(1000 * step + rank)
            batches = Batches(tokenizer, 1_000_003 * (step + 1) + rank, plain)
        lr = learning_rate(step, 0, alone) if step < alone else learning_rate(step, alone, last)
        opts[0].param_groups[0]["lr"], opts[1].param_groups[0]["lr"] = MUON_LR * lr, ADAM_LR * lr
        ids, answer = batches.next(lengths)
        losses, right = update(net, opts, trained, ids, answer, generator, step >= alone)
        if rank == 0:
            log.add(ids, answer, losses, right)
            if (step + 1) % LOG == 0:
                log.write(step + 1, name, lr)
            if (step + 1) % keep == 0 or step + 1 == min(steps, last):
                torch.save({"weights": {name: w.detach() for name, w in weights.items()}, "step": step + 1,
                            "optimizers": [opt.state_dict() for opt in opts]}, state + ".tmp")
                os.replace(state + ".tmp", state)


# ---- what is stored

def stored(config, weights):
    """Weights -> the tensors of a published checkpoint: FP8 and FP4 with power-of-two scales, BF16, F32."""
    table, tensors = convert.inventory(config), {}
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    for name, w in weights.items():
        w, dtype = w.detach(), table[name]["dtype"]
        if dtype == "F8_E4M3":
            tensors[name], scale, _ = fp8_codes(w)
            tensors[convert.scale_of(name)] = scale.to(torch.float8_e8m0fnu)
        elif dtype == "I8":
            packed, tensors[convert.scale_of(name)] = kernel.fp4_act_quant(w, 32)
            tensors[name] = packed.view(torch.int8)
        else:
            tensors[name] = w.to(dtypes[dtype])
    assert set(tensors) == set(table), set(tensors) ^ set(table)
    return {name: w.contiguous() for name, w in tensors.items()}


def run(folder, stages=STAGES, keep=KEEP, ranks=2, steps=sys.maxsize):
    """Trains in `folder`, or goes on there, up to so many steps, and writes the checkpoint as it is then."""
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    folder = os.path.abspath(folder)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(os.path.join(FOLDER, name), folder)
    config = convert.read_config(folder)
    if not os.path.exists(os.path.join(folder, "tokenizer.json")):
        make_tokenizer(config["vocab_size"]).save(os.path.join(folder, "tokenizer.json"))
    rendezvous = os.path.join(folder, "rendezvous")
    if os.path.exists(rendezvous):
        os.remove(rendezvous)
    os.environ.update(ENVIRONMENT)      # read by the processes that are started now
    torch.multiprocessing.spawn(train, (ranks, folder, config, stages, keep, steps), nprocs=ranks)
    weights = torch.load(os.path.join(folder, "state.pt"), weights_only=True)["weights"]
    save_file(stored(config, weights), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains the checkpoint in the box, from nothing.")
    parser.add_argument("--work", required=True, metavar="DIR",
                        help="folder for state, log and the checkpoint; a run that was stopped goes on there")
    parser.add_argument("--steps", type=int, default=sum(stage[1] for stage in STAGES),
                        help="stop after so many, of %(default)s")
    args = parser.parse_args()
    run(args.work, steps=args.steps)
