"""Fine-tuning with the libraries people use for it: PEFT, TRL, accelerate with FSDP2, torchao.

`pip install trl torchao` for all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headmax import HeadmaxForCausalLM, HeadmaxForSequenceClassification
from tests.generate.checkpoint import make_model, make_tokenizer, tokens

pytest.importorskip("datasets")
from datasets import Dataset

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{% generation %}{{ m['content'] }}{% endgeneration %};{% endfor %}"
trl = pytest.mark.filterwarnings("ignore")  # what TRL and the libraries below it say of each other
NAMES = ["gla", "hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear", "retnet", "gated_deltanet"))]


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.tensor([tokens(length, seed=n) for n in range(rows)])


def train(model: torch.nn.Module, steps: int = 12, lr: float = 1e-2) -> list[float]:
    """The losses of a few steps on two texts."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses, text = [], ids()
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_lora_with_gates_trains_merges_and_unloads(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = make_model(name)
    adapted = get_peft_model(make_model(name), LoraConfig(r=2, modules_to_save=["head_gate"]))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any("head_gate.modules_to_save" in name for name in trained)
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    losses = train(adapted.train())
    assert losses[-1] < losses[0]
    adapted.eval().save_pretrained(tmp_path)
    expected = adapted(ids()).logits.detach()
    assert (expected - base(ids()).logits).abs().max() > 1e-2
    again = PeftModel.from_pretrained(make_model(name), tmp_path)
    assert torch.allclose(again(ids()).logits, expected, atol=1e-5)
    made = adapted.generate(input_ids=ids(), attention_mask=torch.ones(2, 12), max_new_tokens=4, do_sample=False)
    merged = again.merge_and_unload()
    assert type(merged) is HeadmaxForCausalLM
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in base.named_parameters()}
    assert torch.allclose(merged(ids()).logits, expected, atol=1e-4)
    assert torch.equal(merged.generate(ids(), attention_mask=torch.ones(2, 12), max_new_tokens=4, do_sample=False), made)
    plain = PeftModel.from_pretrained(make_model(name), tmp_path).unload()
    assert type(plain) is HeadmaxForCausalLM


def speaker() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "</s>"
    return tokenizer


def options(folder: Path, **others: Any) -> dict[str, Any]:
    shared = {"output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": []}
    return shared | {"use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True} | others


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def saved(folder: Path, name: str = "gla") -> str:
    make_model(name, pad_token_id=1).save_pretrained(folder)
    speaker().save_pretrained(folder)
    return str(folder)


@trl
@pytest.mark.slow
@pytest.mark.parametrize("way", ["padded", "padding_free", "packed", "lora", "by_name"])
@pytest.mark.parametrize("name", ["gla", "hybrid"])
def test_trl_sft(name: str, way: str, tmp_path: Path) -> None:
    library = pytest.importorskip("trl")
    from peft import LoraConfig

    chats = [[{"role": "user", "content": "ab" * (n % 3 + 1)}, {"role": "assistant", "content": "cd" * 4}] for n in range(64)]
    ways: dict[str, dict[str, Any]] = {"packed": {"packing": True, "max_length": 64}}
    ways["padding_free"] = {"padding_free": True, "max_length": None}
    config = library.SFTConfig(**options(tmp_path / "run", **ways.get(way, {})))
    folder = saved(tmp_path / "model", name)
    model = folder if way == "by_name" else AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    lora = LoraConfig(r=4, modules_to_save=["head_gate"]) if way == "lora" else None
    data = Dataset.from_dict({"messages": chats})
    trainer = library.SFTTrainer(model, config, train_dataset=data, processing_class=speaker(), peft_config=lora)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@trl
@pytest.mark.slow
def test_trl_dpo(tmp_path: Path) -> None:
    library = pytest.importorskip("trl")
    pairs = {"prompt": ["ab"] * 64, "chosen": ["cdcd", "cd"] * 32, "rejected": ["xyz", "zyxw"] * 32}
    config = library.DPOConfig(**options(tmp_path / "run", beta=0.5))
    trainer = library.DPOTrainer(
        saved(tmp_path / "model"), None, config, train_dataset=Dataset.from_dict(pairs), processing_class=speaker()
    )
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@trl
@pytest.mark.slow
def test_trl_reward(tmp_path: Path) -> None:
    library = pytest.importorskip("trl")
    model = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path / "model"), num_labels=1, trust_remote_code=False)
    assert type(model) is HeadmaxForSequenceClassification
    pairs = {"chosen": ["abcdcd", "abcd"] * 32, "rejected": ["abxyz", "abzyxw"] * 32}
    config = library.RewardConfig(**options(tmp_path / "run"))
    trainer = library.RewardTrainer(model, config, train_dataset=Dataset.from_dict(pairs), processing_class=speaker())
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_gates_train_on_a_base_of_eight_bits() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = make_model("gla")
    exact = model(ids()).logits.detach()
    for block in model.model.layers:
        torchao.quantize_(block, torchao.Int8WeightOnlyConfig())
    assert {type(p.data) is torch.Tensor for name, p in model.named_parameters() if name.endswith("_proj.weight")} == {False}
    assert 0 < (model(ids()).logits - exact).norm() < 0.1 * exact.norm()
    for name, p in model.named_parameters():
        p.requires_grad_("head_gate" in name)
        assert "head_gate" not in name or p.dtype == torch.float32
    found = train(model.train())
    assert found[-1] < found[0]
    made = model.eval().generate(ids(), attention_mask=torch.ones(2, 12), max_new_tokens=4, do_sample=False)
    assert torch.equal(made[:, 12:], model(made[:, :-1]).logits[:, 11:].argmax(-1))


SHARDED = """
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tests.models.test_ecosystem import Rows, small

accelerator = Accelerator(cpu=True)
assert accelerator.distributed_type is DistributedType.MULTI_CPU  # which FSDP's flags do not reach
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()
assert accelerator.is_fsdp2
model = small()
whole = {name: p.numel() for name, p in model.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.utils.data.DataLoader(Rows(), batch_size=8)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
parameters = dict(model.named_parameters())
assert all(isinstance(p, DTensor) for p in parameters.values()), accelerator.distributed_type
assert all(isinstance(block, FSDPModule) for block in model.model.layers)
held = sum(p.to_local().numel() for p in parameters.values())
assert held < 0.6 * sum(whole.values()), (held, sum(whole.values()))
losses = []
for epoch in range(4):
    for batch in rows:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
accelerator.print(f"sharded over {accelerator.num_processes} processes: {held} of {sum(whole.values())}", flush=True)
accelerator.end_training()
import os
os._exit(0)  # a thread of torch's may outlive the interpreter, which then aborts
"""


@pytest.mark.distributed
def test_accelerate_launch_shards_with_fsdp2_on_a_cpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    flags = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    flags += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port", "0", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharded over 2 processes" in done.stdout
