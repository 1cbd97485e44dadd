"""Mamba-2 is what transformers' Mamba2 computes."""

import pytest
import torch
from transformers import DynamicCache

from headmax import HeadGateConfig
from headmax.layers import Mamba2, Mamba2Config

WIDTH, HEADS, DIM, STATE = 32, 8, 8, 16


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Mamba2]:
    """Transformers' layer in plain PyTorch with random weights, and ours with the same."""
    theirs_in = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    groups = request.param
    torch.manual_seed(0)
    config = theirs_in.Mamba2Config(
        hidden_size=WIDTH, num_hidden_layers=1, num_heads=HEADS, head_dim=DIM, state_size=STATE, n_groups=groups, expand=2, chunk_size=16
    )
    theirs = theirs_in.Mamba2Mixer(config, layer_idx=0)
    theirs.config = config
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        theirs.norm.weight.add_(1.0)
    ours = Mamba2(WIDTH, HEADS, Mamba2Config(num_groups=groups, head_k_dim=STATE), norm_eps=config.layer_norm_epsilon)
    sizes = [HEADS * DIM, HEADS * DIM, groups * STATE, groups * STATE, HEADS]
    parts = zip(("g_proj", "v_proj", "k_proj", "q_proj", "dt_proj"), theirs.in_proj.weight.split(sizes), strict=True)
    state = {f"{name}.weight": weight for name, weight in parts} | {"o_proj.weight": theirs.out_proj.weight}
    for name in ("weight", "bias"):
        convs = zip((2, 1, 0), getattr(theirs.conv1d, name).split(sizes[1:4]), strict=True)  # x, B, C there; C, B, x here
        state |= {f"convs.{n}.{name}": x.squeeze(1) if name == "weight" else x for n, x in convs}
    state |= {"output_norm.norm.weight": theirs.norm.weight, "A_log": theirs.A_log, "dt_bias": theirs.dt_bias, "D": theirs.D}
    ours.load_state_dict(state)
    return theirs.eval(), ours.eval()


@torch.no_grad()
def test_it_computes_what_transformers_does(pair: tuple[torch.nn.Module, Mamba2]) -> None:
    """A prompt at once, and single tokens after the states of one, theirs and ours."""
    theirs, ours = pair
    x, cache = torch.randn(2, 90, WIDTH), DynamicCache(config=theirs.config)
    expected, steps = theirs(x), [theirs(x[:, :80], cache_params=cache)]
    assert (ours(x).hidden - expected).abs().max() <= 1e-5 * expected.abs().max()
    state = ours(x[:, :80], return_state=True).state
    for t in range(80, 90):
        token = x[:, t : t + 1]
        step, output = theirs(token, cache_params=cache), ours(token, state=state, return_state=True)
        assert (output.hidden - step).abs().max() <= 1e-5 * step.abs().max()
        steps.append(step)
        state = output.state
    assert (torch.cat(steps, 1) - expected).abs().max() <= 1e-5 * expected.abs().max(), "their steps"


@torch.no_grad()
def test_gates_that_are_one_change_nothing_and_others_do(pair: tuple[torch.nn.Module, Mamba2]) -> None:
    _, ours = pair
    x = torch.randn(1, 20, WIDTH)
    plain = ours(x).hidden
    ours.add_head_gate(HeadGateConfig(scale="heads", init_std=0.0))
    assert (ours(x).hidden - plain).abs().max() <= 1e-6 * plain.abs().max()
    ours.head_gate.write_weight.normal_()
    assert (ours(x).hidden - plain).abs().max() > 1e-3 * plain.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("gate", ["read", "write"])
def test_what_has_no_gate_still_passes_through_d(pair: tuple[torch.nn.Module, Mamba2], gate: str) -> None:
    """With a gate near zero a layer computes what it does without a state: D x, gated and normalised."""
    _, ours = pair
    x = torch.randn(1, 20, WIDTH)
    ours.add_head_gate(HeadGateConfig(scale=1e-9, read=gate == "read", write=gate == "write"))
    ungated = ours(x).hidden
    ours.k_proj.weight.zero_()
    ours.convs[1].bias.zero_()
    assert ungated.abs().max() > 0.1
    assert (ours(x).hidden - ungated).abs().max() <= 1e-6 * ungated.abs().max()


def test_errors_name_the_setting() -> None:
    with pytest.raises(ValueError, match="num_groups must divide the 8 heads, got 3"):
        Mamba2(WIDTH, HEADS, Mamba2Config(num_groups=3))
