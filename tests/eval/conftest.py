"""A tokenizer, models and data of the tests' own: tiny, random, and the same every time."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from headmax import HeadGateConfig, HeadmaxConfig, HeadmaxForCausalLM


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


MODELS: dict[str, dict[str, Any]] = {
    "gla": {"mixer": "gla", "conv_size": 4},
    "retnet": {"mixer": "retnet"},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "attention": {"mixer": "attention"},
    "hybrid": {"mixer": ["gla", "attention"]},
}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator((sentence(random.Random(n), 30) for n in range(300)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def make_model(name: str, vocab_size: int = 400) -> HeadmaxForCausalLM:
    torch.manual_seed(0)
    gate = None if name == "attention" else HeadGateConfig(init_std=1.0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": vocab_size, "initializer_range": 0.3}
    return HeadmaxForCausalLM(HeadmaxConfig(**sizes, head_gate=gate, **MODELS[name])).eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model("gla").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "group"]


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, words))).capitalize() + "."


def rows(task: str, number: int) -> Iterator[dict[str, Any]]:
    """Like those of the task's file."""
    rng = random.Random(task)
    for n in range(number):
        choices = [sentence(rng, 8) for _ in range(rng.choice([3, 4, 4, 5]) if task.startswith("arc") else 4)]
        if task == "lambada_openai":
            yield {"text": f"{sentence(rng, 30)} {sentence(rng, 9)[:-1]}"}
        elif task == "piqa":
            yield {"goal": sentence(rng, 9), "sol1": sentence(rng, 12), "sol2": sentence(rng, 12), "label": rng.randrange(2)}
        elif task == "hellaswag":
            yield {"query": f"Doing: {sentence(rng, 20)} the {rng.choice(WORDS)}", "choices": choices, "gold": rng.randrange(4)}
        elif task == "winogrande":
            options = dict(zip(("option1", "option2"), rng.sample(WORDS, 2), strict=True))
            yield {"sentence": f"{sentence(rng, 9)[:-1]} so _ {sentence(rng, 6)}", **options, "answer": rng.choice("12")}
        elif task.startswith("arc"):
            yield {"id": str(n), "question": sentence(rng, 20), "choices": choices, "gold": rng.randrange(len(choices))}
        elif task == "squad_subset":
            context = sentence(random.Random(n // 4), 90)
            yield {"context": context, "question": sentence(rng, 9), "answers": [rng.choice(context.split()), "no answer"]}
        else:  # swde and fda, in the format of `based`
            text = sentence(random.Random(n // 4), 200)
            yield {"text": f"{text} {rng.choice(WORDS)}: ", "value": rng.choice(text.split()), "key": "k", "doc_id": n}


FILES = {
    "lambada_openai": "lambada_openai.test.jsonl",
    "piqa": "piqa.valid.jsonl",
    "hellaswag": "hellaswag.val.jsonl",
    "winogrande": "winogrande_xl.dev.jsonl",
    "arc_easy": "arc_easy.test.jsonl",
    "arc_challenge": "arc_challenge.test.jsonl",
    "squad_subset": "squad_subset.jsonl",
    "swde": "swde.jsonl",
    "fda": "fda.jsonl",
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task, name in FILES.items():
        number = {"lambada_openai": 200, "piqa": 100, "winogrande": 100}.get(task, 55)  # 200 requests of each
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows(task, number)))
    rng = random.Random("wikitext")
    pages = [f" = Title {n} = \n \n = = Part = = \n " + " \n ".join(sentence(rng, 40) for _ in range(n + 1)) + " \n \n" for n in range(8)]
    (folder / "wikitext2_raw.test.txt").write_text(" \n" + "".join(pages))
    (folder / "prose.txt").write_text("\n<|doc|>\n".join(sentence(rng, 25) for _ in range(3000)))
    return folder
