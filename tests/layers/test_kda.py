"""Kimi delta attention is what transformers' Kimi-Linear computes."""

import inspect

import pytest
import torch

from headmax import HeadGateConfig
from headmax.layers import KDAConfig, KimiDeltaAttention

WIDTH, HEADS, DIM = 32, 2, 16


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, KimiDeltaAttention]:
    """Transformers' layer in plain PyTorch with random weights, and ours with the same."""
    theirs_in = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        monkeypatch.setattr(theirs_in, name, inspect.unwrap(getattr(theirs_in, name)))
    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=WIDTH, num_hidden_layers=2, linear_num_heads=HEADS, linear_head_dim=DIM, rms_norm_eps=1e-6, vocab_size=64
    )
    theirs = theirs_in.KimiLinearDeltaAttention(config, layer_idx=config.layer_types.index("linear_attention"))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        theirs.o_norm.weight.add_(1.0)
    ours = KimiDeltaAttention(WIDTH, HEADS, KDAConfig(head_k_dim=DIM, head_v_dim=DIM))
    weights = {name: getattr(theirs, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj", "b_proj")}
    weights |= {"decay_down_proj": theirs.forget_gate.f_a_proj.weight, "decay_up_proj": theirs.forget_gate.f_b_proj.weight}
    weights |= {"gate_down_proj": theirs.g_a_proj.weight, "gate_up_proj": theirs.g_b_proj.weight, "output_norm.norm": theirs.o_norm.weight}
    weights |= {f"convs.{n}": x.squeeze(1) for n, x in enumerate(theirs.conv1d.weight.split(HEADS * DIM))}
    state = {f"{name}.weight": weight for name, weight in weights.items()}
    ours.load_state_dict(state | {"A_log": theirs.forget_gate.A_log.flatten(), "dt_bias": theirs.forget_gate.dt_bias})
    return theirs.eval(), ours.eval()


@torch.no_grad()
def test_it_computes_what_transformers_does(pair: tuple[torch.nn.Module, KimiDeltaAttention]) -> None:
    theirs, ours = pair
    x = torch.randn(2, 90, WIDTH)
    expected = theirs(x)
    assert (ours(x).hidden - expected).abs().max() <= 1e-5 * expected.abs().max()
    first = ours(x[:, :80], return_state=True)
    outputs, state = [], first.state
    for t in range(80, 90):
        output = ours(x[:, t : t + 1], state=state, return_state=True)
        outputs.append(output.hidden)
        state = output.state
    assert (torch.cat(outputs, 1) - expected[:, 80:]).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_gates_that_are_one_change_nothing_and_others_do(pair: tuple[torch.nn.Module, KimiDeltaAttention]) -> None:
    _, ours = pair
    x = torch.randn(1, 20, WIDTH)
    plain = ours(x).hidden
    ours.add_head_gate(HeadGateConfig(scale="heads", init_std=0.0))
    assert (ours(x).hidden - plain).abs().max() <= 1e-6 * plain.abs().max()
    ours.head_gate.write_weight.normal_()
    assert (ours(x).hidden - plain).abs().max() > 1e-3 * plain.abs().max()
