"""At home with Hugging Face: Trainer, accelerate, PEFT, export, and a folder ready for a hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM
from headmax.layers import LORA_TARGETS
from headmax.models.card import write_card

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 64}


def small(mixer: str = "gla") -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    gate = None if mixer == "attention" else HeadGateConfig()
    return HeadmaxForCausalLM(HeadmaxConfig(mixer=mixer, **SMALL, head_gate=gate))


class Rows(Dataset):
    """Each token is the one before it plus one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(24) + n) % 64
        return {"input_ids": ids, "labels": ids}


def test_trainer_trains_evaluates_and_reloads(tmp_path: Path) -> None:
    model = small()
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=30, per_device_train_batch_size=16, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2, logging_steps=10, save_strategy="no", seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=False)
    ids = Rows()[3]["input_ids"][None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_accelerate_prepares_and_steps() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(small(), torch.optim.SGD(small().parameters(), lr=0.1))
    batch = Rows()[0]
    loss = model(input_ids=batch["input_ids"][None], labels=batch["labels"][None]).loss
    accelerator.backward(loss)
    optimizer.step()
    assert loss.isfinite()


LAUNCHED = """
import os

import torch
from accelerate import Accelerator
from tests.models.test_ecosystem import Rows, small

accelerator = Accelerator(cpu=True)
model = small()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.utils.data.DataLoader(Rows(), batch_size=8)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
losses = []
for epoch in range(4):
    for batch in rows:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
total = sum(p.detach().sum() for p in model.parameters())
assert accelerator.num_processes == 2
assert accelerator.gather(total)[0] == accelerator.gather(total)[1]
assert losses[-1] < 0.8 * losses[0], losses
accelerator.print(f"trained on {accelerator.num_processes} processes", flush=True)
accelerator.end_training()
os._exit(0)  # a thread of torch's may outlive the interpreter, which then aborts: once in many runs, even after all has ended
"""


@pytest.mark.distributed
def test_accelerate_launch_trains_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port", "0", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 processes" in done.stdout


@pytest.mark.parametrize("mixer", ["linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2", "attention"])
def test_lora_on_the_documented_targets(mixer: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = small(mixer)
    ids = torch.randint(0, 64, (2, 20))
    before = model.eval()(ids).logits
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"))
    assert torch.allclose(wrapped(ids).logits, before, atol=1e-6)
    touched = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in wrapped.named_parameters() if ".lora_A" in name}
    linear = {name.rsplit(".", 1)[-1] for name, module in small(mixer).named_modules() if isinstance(module, torch.nn.Linear)}
    assert touched == linear - {"lm_head"}
    wrapped.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("mixer", ["linear", "retnet", "gla", "gated_deltanet", "kda", "mamba2"])
def test_export(mixer: str) -> None:
    model = small(mixer).eval()
    ids = torch.randint(0, 64, (2, 70))
    exported = torch.export.export(model, (ids,), kwargs={"use_cache": False})
    assert torch.allclose(exported.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits, atol=1e-5)


def test_a_folder_ready_for_a_hub(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    write_card(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    for fact in (
        "library_name: transformers",
        "mixer | gla",
        "head_gate",
        "softmax",
        "pip install .` in a checkout",
        f"{model.num_parameters():,}",
    ):
        assert fact in card
    assert AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).head_gate == HeadGateConfig()
    with pytest.raises(FileExistsError, match=r"README\.md is there already"):
        write_card(model, tmp_path)


def test_an_adapter_on_the_last_layer_is_part_of_the_loss() -> None:
    from peft import LoraConfig, get_peft_model

    model = HeadmaxForCausalLM(HeadmaxConfig(mixer="gla", **SMALL, tie_word_embeddings=False))
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)).train()
    ids = torch.randint(0, 64, (2, 20))
    output = wrapped(input_ids=ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(output.loss, expected)
    with pytest.raises(ValueError, match="skip_logits=True takes the loss from lm_head's weight"):
        wrapped(input_ids=ids, labels=ids, skip_logits=True)


def test_a_folder_loads_where_nobody_has_imported_headmax(tmp_path: Path) -> None:
    """By AutoModel, AutoConfig and pipeline with trust_remote_code, in a process of its own; and without it the question is asked."""
    from tests.generate.checkpoint import make_model, make_tokenizer

    model = make_model()
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    torch.save(model(torch.arange(9)[None]).logits, tmp_path / "logits")
    program = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline

folder, logits = sys.argv[1:]
assert "headmax" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error)
else:
    sys.exit("loaded without trust")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert (model(torch.arange(9)[None]).logits - torch.load(logits)).abs().max() < 1e-5
assert type(model).__module__ == "headmax.models.modeling"
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "headmax"
assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "HeadmaxModel"
write = pipeline("text-generation", folder, trust_remote_code=True)
assert write("a", max_new_tokens=3)[0]["generated_text"].startswith("a")
"""
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path / "logits")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
