"""Attention layers as hybrids have them: grouped keys, windows, norms, partial rotary positions, gates, packed sequences."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from headmax import Packing
from headmax.layers import Attention, AttentionConfig
from headmax.layers.packed_attention import packed_attention
from headmax.ops.spec import distance

CONFIGS = {
    "plain": AttentionConfig(),
    "grouped": AttentionConfig(num_kv_heads=2, head_k_dim=6),
    "window": AttentionConfig(window=3, num_kv_heads=1),
    "all": AttentionConfig(num_heads=6, num_kv_heads=3, head_k_dim=8, window=260, qk_norm=True, output_gate=True, rotary_dim=4),
}
everywhere = pytest.mark.parametrize("name", CONFIGS)


def make(name: str) -> Attention:
    torch.manual_seed(0)
    return CONFIGS[name].build(32, 4).double()


def hidden(batch: int, time: int) -> torch.Tensor:
    return torch.randn(batch, time, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def oracle(mixer: Attention, x: torch.Tensor) -> torch.Tensor:
    """Every pair of tokens, head by head."""
    config, time = mixer.config, x.shape[1]
    q, k, v = (p(x).unflatten(-1, (-1, mixer.head_dim)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if mixer.q_norm is not None and mixer.k_norm is not None:
        q = F.rms_norm(q, q.shape[-1:], mixer.q_norm.weight, mixer.q_norm.eps)
        k = F.rms_norm(k, k.shape[-1:], mixer.k_norm.weight, mixer.k_norm.eps)
    half = (config.rotary_dim or mixer.head_dim) // 2
    angles = torch.arange(time).double()[:, None] * config.rotary_base ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(y[..., :half].contiguous(), y[..., half : 2 * half].contiguous()) * turn
        return torch.cat([z.real, z.imag, y[..., 2 * half :]], dim=-1)

    q, k = turned(q), turned(k)
    age = torch.arange(time)[:, None] - torch.arange(time)
    seen = (age >= 0) & (age < (config.window or time))
    heads = []
    for h in range(q.shape[2]):
        group = h * k.shape[2] // q.shape[2]
        scores = q[:, :, h] @ k[:, :, group].mT * mixer.head_dim**-0.5
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, group])
    o = torch.cat(heads, dim=-1)
    return mixer.o_proj(o if mixer.g_proj is None else o * mixer.g_proj(x).sigmoid())


def gradients(y: torch.Tensor, mixer: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y.sin().sum(), [x, *mixer.parameters()]))


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-10 * float(b.detach().abs().max()))


@everywhere
def test_attention_equals_the_oracle(name: str) -> None:
    mixer, x = make(name), hidden(2, 300).requires_grad_()
    y, expected = mixer(x).hidden, oracle(mixer, x)
    assert agree(y, expected)
    assert all(map(agree, gradients(y, mixer, x), gradients(expected, mixer, x)))


@everywhere
def test_packed_sequences_equal_each_alone(name: str) -> None:
    mixer, x, bounds = make(name), hidden(1, 300).requires_grad_(), [0, 5, 5, 6, 300]
    y = mixer(x, packing=Packing(bounds)).hidden
    expected = torch.cat([oracle(mixer, x[:, a:b]) for a, b in pairwise(bounds) if a < b], dim=1)
    assert agree(y, expected)
    assert all(map(agree, gradients(y, mixer, x), gradients(expected, mixer, x)))


@everywhere
def test_tokens_one_by_one_and_in_pieces(name: str) -> None:
    mixer, x = make(name), hidden(2, 280)
    expected, outputs, state = oracle(mixer, x), [], None
    for a, b in pairwise([0, 2, 3, 9, 270, *range(271, 281)]):
        y, state, _ = mixer(x[:, a:b], state=state, return_state=True)
        outputs.append(y)
    assert agree(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("name", ["grouped", "all"])
def test_compiled_packed_attention_is_one_graph_with_the_same_gradients(name: str) -> None:
    mixer, x, packing = make(name), hidden(1, 40).requires_grad_(), Packing([0, 7, 40])
    y = mixer(x, packing=packing).hidden
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")(x, packing=packing).hidden
    assert agree(compiled, y)
    assert all(map(agree, gradients(compiled, mixer, x), gradients(y, mixer, x)))


def test_packed_sequences_take_no_memory_for_pairs_of_tokens() -> None:
    mixer, time = Attention(32, 4), 8192
    x = torch.randn(1, time, 32, requires_grad=True)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:  # without, PyTorch 2.11 warns
        mixer(x, packing=Packing(list(range(0, time + 1, 512)))).hidden.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 4 * 32 * time <= largest < 4 * time * time / 16  # bytes of a projection; a sixteenth of a mask's


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("earlier", [0, 40])
@pytest.mark.parametrize(("heads", "groups", "width", "window"), [(4, 4, 64, None), (6, 2, 24, 90), (4, 1, 128, 5), (4, 2, 20, 7)])
def test_flash_attention_on_a_gpu(heads: int, groups: int, width: int, window: int | None, earlier: int, dtype: torch.dtype) -> None:
    """Beside blocks in float64 on the CPU: packed rows and plain ones, keys of earlier tokens, and a width that has no kernel."""
    for bounds in (None, Packing([0, 70, 71, 71, 300])):
        rows = 2 if bounds is None else 1
        shapes = (300, heads), (300 + earlier, groups), (300 + earlier, groups)
        given = [torch.randn(rows, *shape, width).to(dtype) for shape in shapes]
        direction, found = torch.randn(rows, 300, heads, width).to(dtype), []
        for device, wide in (("cpu", torch.float64), ("cuda", dtype)):
            q, k, v = (x.to(device, wide).requires_grad_() for x in given)
            o = packed_attention(q, k, v, None if bounds is None else bounds.to(device), window)
            found.append([o, *torch.autograd.grad(o, (q, k, v), direction.to(o))])
        for expected, ours in zip(*found, strict=True):
            assert ours.dtype == dtype
            assert distance(ours, expected) <= 1e-2


def test_weights_of_qwen3_next_give_its_output() -> None:
    config = Qwen3NextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.25, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    theirs = Qwen3NextAttention(config, 0).double().eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        torch.nn.init.normal_(norm.weight, std=0.3)
    base = config.rope_parameters["rope_theta"]
    settings = AttentionConfig(num_kv_heads=2, head_k_dim=16, qk_norm=True, output_gate=True, rotary_dim=4, rotary_base=base)
    ours = settings.build(32, 4, norm_eps=config.rms_norm_eps).double()
    q, gate = theirs.q_proj.weight.view(4, 2, 16, 32).unbind(1)
    weights = {"q_proj.weight": q.flatten(0, 1), "g_proj.weight": gate.flatten(0, 1)}
    weights |= {f"{name}_proj.weight": getattr(theirs, f"{name}_proj").weight for name in "kvo"}
    weights |= {f"{name}_norm.weight": 1 + getattr(theirs, f"{name}_norm").weight for name in "qk"}
    ours.load_state_dict(weights)
    x = hidden(2, 20)
    angles = Qwen3NextRotaryEmbedding(config)(x, torch.arange(20)[None])
    expected, _ = theirs(x, position_embeddings=angles, attention_mask=None)
    assert torch.allclose(ours(x).hidden, expected, rtol=0, atol=1e-6)  # their norms compute in float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide the 4 heads, got 3"),
        ({"rotary_dim": 10}, "rotary_dim must be even for rotary positions, and rotary_dim at most head_k_dim 8; got 10"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"head_k_dim": 5}, "head_k_dim must be even"),
        ({"window": 0}, "window must be a positive integer"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings).build(32, 4)
