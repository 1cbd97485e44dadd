"""Running other libraries' tests: what is reported, and flash-linear-attention's options on headmax's ops."""

from pathlib import Path

import pytest
import torch

from headmax.ops import gated_delta_rule, gla
from lab.ecosystem.fla_ops import adapt
from lab.ecosystem.run import run_suite, summary

REPORT = """<testsuites><testsuite>
<testcase name="a"><skipped message="HeadmaxModel does not support grouped_mm"/></testcase>
<testcase name="b"><skipped message="HeadmaxForCausalLM does not support grouped_mm"/></testcase>
<testcase name="c"/>
</testsuite></testsuites>"""


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    assert summary(file).splitlines()[2:] == ["| … does not support grouped_mm | 2 |"]
    with pytest.raises(ValueError, match="no folder tests there"):
        run_suite("fla", tmp_path)


def test_options_of_flash_linear_attention_on_our_ops() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 3, 8) for _ in range(3))
    log_decay, state = -torch.rand(2, 20, 3, 8), torch.randn(2, 3, 8, 8)
    expected, final = gla(q, k, v, log_decay, initial_state=state, return_state=True)
    o, last = adapt(gla)(q, k, v, gk=log_decay, initial_state=state.mT, output_final_state=True, state_v_first=True, chunk_size=32)
    assert torch.equal(o, expected)
    assert final is not None
    assert torch.equal(last.mT, final)
    raw, a_log, bias, beta = torch.randn(2, 20, 3), torch.rand(3), torch.rand(3), torch.randn(2, 20, 3)
    decay = -a_log.exp() * torch.nn.functional.softplus(raw + bias)
    expected, _ = gated_delta_rule(q, k, v, decay, 2 * beta.sigmoid(), normalize_qk=True)
    switches = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_qk_l2norm_in_kernel"), True)
    o, last = adapt(gated_delta_rule)(q, k, v, raw, beta, A_log=a_log, dt_bias=bias, **switches)
    assert torch.allclose(o, expected, atol=1e-5)
    assert last is None
    with pytest.raises(pytest.skip.Exception, match="normalize: a normaliser"):
        adapt(gla)(q, k, v, log_decay, normalize=True)
