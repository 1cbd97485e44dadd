"""headmax as a model of lm-evaluation-harness, with the tokenisation of the harness's Hugging Face class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from headmax.data.tokenizer import encode_text
from headmax.eval.requests import Request
from headmax.eval.scores import Score
from headmax.eval.scoring import Scorer
from headmax.train.loading import load_model, load_tokenizer

Answer = Callable[[Sequence[Request]], Mapping[str, Score]]
"""Maps requests to scores, by id."""
MAX_NEW_TOKENS = 256
"""Of a task that sets no limit, as in the harness."""


class TokenLM(TemplateLM):
    """Turns the harness's texts into requests, and scores into the harness's results.

    Without `max_length` nothing is truncated: a document's perplexity is that of a single window. With it, contexts are truncated on the
    left and documents are split into windows, as the harness does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answer: Answer, max_length: int | None = None) -> None:
        super().__init__()
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {max_length}")
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.answer, self.max_length = answer, max_length

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokenizer's ids; control tokens in the text are encoded as plain characters, as in training data."""
        return encode_text(self.tokenizer, string, start=add_special_tokens is not False)["input_ids"]

    def _request(self, context: Sequence[int], targets: Sequence[int]) -> Request:
        if not targets:
            raise ValueError("the continuation adds no tokens to its context")
        kept = len(context) if self.max_length is None else self.max_length + 1 - len(targets)
        if kept < 1:
            raise ValueError(f"max_length {self.max_length} is too short for a continuation of {len(targets)} tokens")
        return Request("loglikelihood", tuple(context[-kept:]), tuple(targets), cut=max(0, len(context) - kept))

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        ours = [self._request(context, targets) for _, context, targets in requests]
        scores = self.answer(ours)
        return [(_required(scores[r.id].logprob), scores[r.id].hits == len(r.targets)) for r in ours]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        documents = []
        for instance in requests:
            tokens = self.tok_encode(instance.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length or len(tokens), context_len=1)
            documents.append([self._request(*make_disjoint_window(window)) for window in windows])
        scores = self.answer(list(chain.from_iterable(documents)))
        return [sum(_required(scores[request.id].logprob) for request in windows) for windows in documents]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        ours = []
        for instance in requests:
            text, settings = instance.args
            settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
            if settings["do_sample"]:
                raise ValueError(f"task {instance.task_name}: headmax generates greedily, but the task asks for sampling")
            context, new = self.tok_encode(text), settings["max_gen_toks"]
            kept = len(context) if self.max_length is None else self.max_length - new
            if kept < 1:
                raise ValueError(f"max_length {self.max_length} leaves no room for a context besides {new} generated tokens")
            until = tuple(stop for stop in settings["until"] if stop)
            ours.append(Request("generate", tuple(context[-kept:]), (), until, new, max(0, len(context) - kept)))
        scores = self.answer(ours)
        return [_required(scores[request.id].text) for request in ours]


def _required(value: Any) -> Any:
    assert value is not None, "the score belongs to another kind of request"
    return value


@register_model("headmax")
class HeadmaxLM(TokenLM):
    """A checkpoint folder as a model of the harness: `--model headmax --model_args pretrained=FOLDER`."""

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """
        Args:
            pretrained: a folder with config.json, safetensors files and a tokenizer.
            tokenizer: the tokenizer's folder, if it is not in `pretrained`.
            device: cpu or cuda; unless given, cuda if available. The harness passes cuda:0 where its caller names none, so that
                means the CPU on a machine without a GPU.
            dtype: of the weights; unless given, bfloat16 on a GPU and float32 on a CPU.
            max_length: most tokens the model reads at a time; no limit unless given.
            batch_tokens: most tokens in one forward pass; unless given, 65,536 on a GPU and 16,384 on a CPU.
            batch_size: ignored, as is max_batch_size, which the harness passes too: sequences are packed by tokens.
        """
        gpu = torch.cuda.is_available()
        if device is None or (device == "cuda:0" and not gpu):
            device = "cuda" if gpu else "cpu"
        model = load_model(pretrained, device, getattr(torch, dtype) if dtype else None)
        loaded = load_tokenizer(tokenizer or pretrained)
        super().__init__(loaded, Scorer(model, loaded, batch_tokens).answers, max_length)
        self._device = model.device
