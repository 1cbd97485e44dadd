"""Small models, one of them really trained on this repository's own prose, with a tokenizer beside it, as a user has it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM

ROOT = Path(__file__).parents[2]
TEXT = "\n".join((ROOT / name).read_text() for name in ("docs/derivation.md", "docs/ecosystem.md", "docs/decisions.md", "CONTRIBUTING.md"))


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def train(model: HeadmaxForCausalLM, ids: torch.Tensor, steps: int) -> float:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size a second thread only waits
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        batch = torch.stack([ids[n : n + 96] for n in torch.randint(len(ids) - 96, (8,)).tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.eval()
    return float(loss.detach())


def save(folder: Path, model: HeadmaxForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_model(**settings: object) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    arguments = {"mixer": "gla", "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4, "vocab_size": 512}
    arguments |= {"head_gate": HeadGateConfig(), "backend": "chunkwise"}
    return HeadmaxForCausalLM(HeadmaxConfig(**(arguments | settings)))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Folders of two untrained models, one of them with decided gates."""
    models = {"even": make_model(), "decided": make_model(head_gate=HeadGateConfig(init_std=2.0))}
    return {name: save(tmp_path_factory.mktemp("checkpoint") / name, model, tokenizer) for name, model in models.items()}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The folder of a model trained for a minute."""
    model = make_model()
    assert train(model, torch.tensor(tokenizer(TEXT)["input_ids"]), 150) < 3.5
    return save(tmp_path_factory.mktemp("checkpoint") / "trained", model, tokenizer)
