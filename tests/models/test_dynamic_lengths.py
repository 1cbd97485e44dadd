"""A model compiled whole for all lengths, as transformers does with torch_compile=True, by a compiler that keeps strides."""

import pytest
import torch

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM


@pytest.mark.parametrize("mixer", [pytest.param("gla", marks=pytest.mark.slow), "gated_deltanet"])
def test_gradients_of_any_length(mixer: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "vocab_size": 48, "intermediate_size": 32}
    plain = HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, head_gate=HeadGateConfig(), **sizes)).train()
    model = HeadmaxForCausalLM(plain.config).train()
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for time in (24, 70):
        ids = torch.randint(0, 48, (2, time))
        for each in (plain, compiled):
            each(input_ids=ids, labels=ids).loss.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)
