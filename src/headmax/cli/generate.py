"""`headmax generate`."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from headmax.cli.options import Checkpoint, Device, File, Number, OptionalCheckpoint, Text, find_device, metavar


def generate(
    checkpoint: Checkpoint,
    /,
    prompt: Text = None,
    file: File = None,
    max_new_tokens: int = 256,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: Number = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, metavar("TEXT")] = (),
    prefix: File = None,
    save_prefix: File = None,
    tokenizer: OptionalCheckpoint = None,
    device: Device = "auto",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, metavar("{float32,bfloat16,float16}")] = None,
    state_dtype: Literal["float32", "bfloat16"] = "float32",
    max_length: Number = None,
    compile: bool = False,
) -> None:
    """Continue a text and stream the result; without a prompt, read lines from standard input.

    Args:
        checkpoint: a model folder, a run of `headmax train`, or a model on the Hugging Face hub.
        prompt: text to continue.
        file: file with the text to continue.
        max_new_tokens: maximum number of tokens to generate; the end-of-text token stops earlier.
        greedy: always choose the most likely token.
        temperature: divide the logits by this; below 1 sharpens the distribution.
        top_k: keep only this many of the most likely tokens.
        top_p: keep the smallest set of most likely tokens with at least this total probability.
        min_p: keep only tokens with at least this fraction of the highest probability.
        repetition_penalty: values above 1 make tokens that have occurred less likely.
        seed: random seed; the same seed gives the same text.
        stop: stop at this string; repeat the option for several.
        prefix: file from --save-prefix; the prompt continues the text it holds.
        save_prefix: read the prompt, save the model's state to this file and generate nothing.
        tokenizer: checkpoint or folder with the tokenizer, if the model has none.
        device: where to run; auto takes a GPU if there is one.
        dtype: precision of the weights; bfloat16 on a GPU and float32 on a CPU unless given.
        state_dtype: precision of the recurrent states.
        max_length: longest text in tokens; only models with attention layers need it.
        compile: compile the model first; slower to start, faster per token on a CPU.
    """
    import torch

    from headmax import durable
    from headmax.generate import GREEDY, Engine, Sampling, terminal
    from headmax.generate.prefix import check_place
    from headmax.train.loading import load_model, load_tokenizer

    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --file, not both")
    text = durable.read_text(file, pipe=True) if file is not None else prompt
    if save_prefix is not None and text is None:
        raise ValueError("--save-prefix needs --prompt or --file")
    if save_prefix is not None:
        durable.refuse_inputs(save_prefix, file, prefix)
        check_place(save_prefix)
    sampling = GREEDY if greedy else Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    settings = terminal.Settings(max_new_tokens, sampling, stop)
    model = load_model(checkpoint, find_device(device), dtype and getattr(torch, dtype))
    words = load_tokenizer(tokenizer or checkpoint)
    if compile:
        model.model.compile_blocks()
    engine = Engine(model, max_batch=1, state_dtype=getattr(torch, state_dtype), max_length=max_length, tokenizer=words)
    before = None if prefix is None else engine.load_prefix(prefix)
    if text is None:
        terminal.interact(engine, before, settings)
    elif save_prefix is not None:
        terminal.keep(engine, text, before, save_prefix)
    else:
        terminal.continue_text(engine, text, before, settings)
