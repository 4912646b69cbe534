"""Small transformer and modern convolutional blocks in torch, in the spellings that published models use, for tests of recognition."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, TOKENS, BATCH = 64, 4, 24, 2


class Projections(nn.Module):
    """Separate q, k and v, a core of attention, and the output projection."""

    def __init__(self, core: Callable[..., Tensor], *, kv_heads: int = HEADS, rope: bool = False) -> None:
        super().__init__()
        self.core, self.kv_heads, self.rope = core, kv_heads, rope
        size = WIDTH // HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * size), nn.Linear(WIDTH, kv_heads * size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, -1).transpose(1, 2)
        k, v = (p(memory).view(b, memory.shape[1], self.kv_heads, -1).transpose(1, 2) for p in (self.k, self.v))
        if self.rope:
            q, k = rotate(q), rotate(k)
        if self.kv_heads != HEADS:
            k, v = (repeat_heads(t, HEADS // self.kv_heads) for t in (k, v))
        return self.out(self.core(q, k, v, mask).transpose(1, 2).reshape(b, n, WIDTH))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding as Llama writes it."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    angle = torch.cat([angle, angle], -1)[None, None]
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angle.cos() + turned * angle.sin()


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Heads of k and v repeated as transformers' repeat_kv does."""
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_expanded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """With a mask that has a row for each query, as transformers makes of a padding mask."""
    assert mask is not None
    return sdpa(q, k, v, mask.expand(-1, -1, q.shape[2], -1))


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def scaled_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


def where_lowest(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    assert mask is not None
    return torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), -1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), v)


def soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / 30.0) * 30.0
    return torch.softmax(scores, -1) @ v


def late_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As XLNet: the scale is after a bias, the mask is subtracted."""
    assert mask is not None
    bias = k[..., 0].unsqueeze(-2)
    scores = (q @ k.transpose(-1, -2) + bias) * q.shape[-1] ** -0.5
    return torch.softmax(scores - 1e4 * (1.0 - mask.to(q.dtype)), -1) @ v


def gated_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """No network's attention: a function of the scores that no kernel has."""
    return torch.softmax(torch.sigmoid(q @ k.transpose(-1, -2)), -1) @ v


class RmsNorm(nn.Module):
    """RMSNorm in one of three spellings."""

    def __init__(self, spelling: str = "rsqrt") -> None:
        super().__init__()
        self.weight, self.spelling = nn.Parameter(torch.rand(WIDTH) + 0.5), spelling

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "rsqrt":
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        if self.spelling == "sqrt":
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x / (x.norm(2, dim=-1, keepdim=True) * WIDTH**-0.5 + 1e-6) * self.weight


class VarianceNorm(nn.Module):
    """LayerNorm through `x.var()`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Bert(nn.Module):
    """A post-norm layer with a padding mask of integers."""

    def __init__(self, core: Callable[..., Tensor] = sdpa) -> None:
        super().__init__()
        self.core = core
        self.attention, self.norm1, self.norm2 = Projections(core), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = keep[:, None, None, :].bool()
        if self.core is eager:
            mask = (1.0 - mask.to(x.dtype)) * torch.finfo(x.dtype).min
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Gpt2(nn.Module):
    """A pre-norm layer with packed q, k and v, causal, gelu_new."""

    def __init__(self, core: Callable[..., Tensor] = sdpa_causal) -> None:
        super().__init__()
        self.core = core
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(WIDTH, dim=2))
        x = x + self.out(self.core(q, k, v, None).transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.down(gelu_new(self.up(self.norm2(x))))


class Llama(nn.Module):
    """Grouped-query attention with rotary positions, RMSNorm and a gated SiLU."""

    def __init__(self, spelling: str = "rsqrt", kv_heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(spelling), RmsNorm(spelling)
        self.attention = Projections(sdpa, kv_heads=kv_heads, rope=True)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False), nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        x = x + self.attention(self.norm1(x), keep[:, None, None, :].bool() & causal)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Vit(nn.Module):
    """timm's block: q, k and v stacked by one projection."""

    def __init__(self, core: Callable[..., Tensor] = sdpa) -> None:
        super().__init__()
        self.core = core
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.scale * self.out(self.core(q, k, v, None).transpose(1, 2).reshape(b, n, WIDTH))
        return x + self.scale * self.down(functional.gelu(self.up(self.norm2(x))))


class Swin(nn.Module):
    """Shifted windows of 4 x 4 in an image of 8 x 8, with relative position bias and the shift mask."""

    def __init__(self, shift: int = 2) -> None:
        super().__init__()
        self.shift, self.norm = shift, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 16, 16))
        region = torch.zeros(8, 8)
        for i, a in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            for j, b in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
                region[a, b] = 3 * i + j
        region = region.view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16)
        self.register_buffer("mask", torch.where(region[:, None] != region[:, :, None], -100.0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(b, 2, 4, 2, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1) + self.bias[None]
        if self.shift:
            scores = (scores.view(b, 4, HEADS, 16, 16) + self.mask[:, None][None]).view(-1, HEADS, 16, 16)
        y = self.out((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(b, 2, 2, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + y


class T5(nn.Module):
    """Attention without a scale, a relative position bias, and T5's norm."""

    def __init__(self, core: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.bias = RmsNorm("rsqrt"), nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        self.attention = Projections(core or t5_sdpa)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = (1.0 - keep[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        return x + self.attention(self.norm(x), self.bias + mask)


def t5_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def t5_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.softmax(q @ k.transpose(3, 2) + mask, -1) @ v


class ConvNext(nn.Module):
    """A depthwise convolution, LayerNorm with channels last, two products, a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.down(functional.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + y * self.gamma.reshape(1, -1, 1, 1)


class CrossAttention(nn.Module):
    """Whisper's decoder: attention of tokens to 40 frames of audio."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Projections(sdpa)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), None, memory)


class Core(nn.Module):
    """Projections with one spelling of attention's core."""

    def __init__(self, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = Projections(core)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.attention(x, None if keep is None else keep[:, None, None, :].bool())


def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def keep() -> Tensor:
    """Padding: the last 5 tokens of the second sample."""
    kept = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    kept[1, -5:] = 0
    return kept


BLOCKS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "bert": lambda: (Bert(), (tokens(), keep())),
    "bert_eager": lambda: (Bert(eager), (tokens(), keep())),
    "gpt2": lambda: (Gpt2(), (tokens(),)),
    "gpt2_masked_fill": lambda: (Gpt2(masked_fill), (tokens(),)),
    "llama": lambda: (Llama(), (tokens(), keep())),
    "llama_sqrt": lambda: (Llama("sqrt", 1), (tokens(), keep())),
    "vit": lambda: (Vit(), (tokens(),)),
    "vit_scaled_query": lambda: (Vit(scaled_query), (tokens(),)),
    "swin": lambda: (Swin(), (torch.randn(1, 8, 8, WIDTH),)),
    "swin_batch": lambda: (Swin(), (torch.randn(3, 8, 8, WIDTH),)),
    "swin_unshifted": lambda: (Swin(0), (torch.randn(2, 8, 8, WIDTH),)),
    "t5": lambda: (T5(), (tokens(), keep())),
    "t5_eager": lambda: (T5(t5_eager), (tokens(), keep())),
    "convnext": lambda: (ConvNext(), (torch.randn(2, WIDTH, 9, 9),)),
    "cross": lambda: (CrossAttention(), (tokens(), torch.randn(BATCH, 40, WIDTH))),
    "where_lowest": lambda: (Core(where_lowest), (tokens(), keep())),
    "einsum": lambda: (Core(einsum), (tokens(),)),
    "expanded_mask": lambda: (Core(sdpa_expanded), (tokens(), keep())),
    "gated_scores": lambda: (Core(gated_scores), (tokens(),)),
    "late_scale": lambda: (Core(late_scale), (tokens(), keep())),
    "soft_capped": lambda: (Core(soft_capped), (tokens(),)),
    "variance_norm": lambda: (VarianceNorm(), (tokens(),)),
    "rms_norm_division": lambda: (RmsNorm("sqrt"), (tokens(),)),
    "rms_norm_norm": lambda: (RmsNorm("norm"), (tokens(),)),
}
