import torch

from narrowgauge.models.attention import Attention, KVCache
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.rope import rope_tables

CONFIG = GPTConfig(vocab_size=8, layers=1, width=48, heads=6, kv_heads=2, context=32, attention_bias=True)


def make_attention(config: GPTConfig) -> Attention:
    torch.manual_seed(0)
    return Attention(config, layer=0)


def by_the_formula(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """One head and one token at a time, in float64, rotating with complex numbers."""
    weight, bias = attention.qkv.weight.double(), attention.qkv.bias.double()
    batch, tokens, width = x.shape
    d, group = attention.head_width, attention.heads // attention.kv_heads
    rows = (x.double() @ weight.T + bias).view(batch, tokens, -1, d)
    angle = torch.outer(torch.arange(tokens).double(), 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d))
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(head: torch.Tensor) -> torch.Tensor:
        z = torch.complex(head[..., : d // 2], head[..., d // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    y = torch.zeros(batch, tokens, width, dtype=torch.float64)
    for h in range(attention.heads):
        q = rotated(rows[:, :, h])
        k = rotated(rows[:, :, attention.heads + h // group])
        v = rows[:, :, attention.heads + attention.kv_heads + h // group]
        for t in range(tokens):
            p = (k[:, : t + 1] @ q[:, t, :, None] / d**0.5).softmax(dim=1)
            y[:, t, h * d : (h + 1) * d] = (p * v[:, : t + 1]).sum(dim=1)
    return y @ attention.out.weight.double().T + attention.out.bias.double()


def test_attention_equals_the_formula():
    attention = make_attention(CONFIG)
    x = torch.randn(2, 7, 48)
    cos, sin = rope_tables(7, 8, 10000.0)
    expected = by_the_formula(attention, x).float()
    torch.testing.assert_close(attention(x, (cos, sin)), expected, rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_full_attention_with_repeated_heads():
    attention = make_attention(CONFIG)
    full = make_attention(CONFIG.replace(kv_heads=6))
    q, k, v = attention.qkv.weight.view(-1, 8, 48).split((6, 2, 2))
    q_bias, k_bias, v_bias = attention.qkv.bias.view(-1, 8).split((6, 2, 2))
    with torch.no_grad():
        heads = (q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0))
        full.qkv.weight.copy_(torch.cat(heads).flatten(0, 1))
        full.qkv.bias.copy_(
            torch.cat((q_bias, k_bias.repeat_interleave(3, 0), v_bias.repeat_interleave(3, 0))).flatten()
        )
        full.out.load_state_dict(attention.out.state_dict())
    x = torch.randn(3, 9, 48)
    tables = rope_tables(9, 8, 10000.0)
    torch.testing.assert_close(attention(x, tables), full(x, tables), rtol=1e-5, atol=1e-6)


def test_no_position_sees_a_later_one():
    attention = make_attention(CONFIG)
    x = torch.randn(1, 10, 48)
    tables = rope_tables(10, 8, 10000.0)
    changed = x.clone()
    changed[:, 6:] += 100
    a, b = attention(x, tables), attention(changed, tables)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=1e-5, atol=1e-6)
    assert (a[:, 6:] - b[:, 6:]).abs().min() > 0


def test_any_division_into_cached_steps_equals_one_pass():
    attention = make_attention(CONFIG)
    x = torch.randn(2, 12, 48)
    cos, sin = rope_tables(12, 8, 10000.0)
    expected = attention(x, (cos, sin))
    for steps in ([12], [5, 7], [1] * 12, [4, 1, 3, 4]):
        cache, parts = KVCache(1, 32), []
        for n in steps:
            at = slice(cache.length, cache.length + n)
            parts.append(attention(x[:, at], (cos[at], sin[at]), cache))
            cache.advance(n)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-6)
