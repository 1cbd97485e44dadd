"""The bodies of requests: which fields there are, of what type and in what range."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from headmax.generate.sampling import ALTERNATIVES, MAX_PENALTY, MAX_SUBTRACTED, MAX_TEMPERATURE
from headmax.serve.errors import ApiError

MOST_CHOICES = 128
MOST_PROMPTS = 256
MOST_STOPS, LONGEST_STOP = 16, 1000
IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
"""Fields that change nothing here."""
UNSUPPORTED: dict[str, Any] = {
    "logit_bias": {},
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "annotations": [],
    "tool_calls": [],
    "tool_call_id": None,
    "refusal": None,
    "audio": None,
    "prediction": None,
    "reasoning_effort": None,
    "web_search_options": None,
}
"""OpenAI's fields for what this server cannot do, each with the value that asks for none of it."""


def _stops(given: Any) -> Any:
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise ValueError("must be a string or a list of strings")
    if len(given) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in given):
        raise ValueError(f"must be at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return given


def _prompts(given: Any) -> Any:
    """A list of texts and lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        several = given if isinstance(given[0], str | list) else [given]
        if len(several) > MOST_PROMPTS:
            raise ValueError(f"must be at most {MOST_PROMPTS} prompts")
        if all(isinstance(one, str) or (isinstance(one, list) and all(type(token) is int for token in one)) for one in several):
            return several
    raise ValueError("must be a text, a list of token ids, or a list of either")


def _content(given: Any) -> Any:
    """Texts in parts are joined."""
    if isinstance(given, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in given):
            raise ValueError('must be text, or parts such as {"type": "text", "text": "..."}: this model reads nothing else')
        return "".join(part["text"] for part in given)
    return given


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        """Without the fields that ask for nothing; null stands for the default, as OpenAI's clients have it."""
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
        return {name: value for name, value in given.items() if name not in UNSUPPORTED or value != UNSUPPORTED[name]}


Kind = TypeVar("Kind", bound=Body)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Body):
    """How texts are continued, in both kinds of request."""

    model: str
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="Choices for each prompt.")
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE, description="0 takes the most likely token.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 and -1: no limit.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-MAX_SUBTRACTED, le=MAX_SUBTRACTED)
    frequency_penalty: float = Field(0.0, ge=-MAX_SUBTRACTED, le=MAX_SUBTRACTED)
    repetition_penalty: float = Field(1.0, ge=1 / MAX_PENALTY, le=MAX_PENALTY)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Choice i is drawn with seed + i; without one they differ each time.")
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field([], description="The text ends before the first of these.")
    stop_token_ids: list[int] = Field([], max_length=1000)
    ignore_eos: bool = Field(False, description="Go on after the model's own end of text.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="Adds `token_ids` to each choice.")
    return_gates: bool = Field(False, description="Adds `gates`, those of all tokens from the prompt's first; for one choice without stop.")


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)] = Field(description="Text, token ids, or a list of either.")
    max_tokens: int = Field(16, ge=0, le=2**31)
    logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES, description="How many of the most likely tokens to tell beside each token.")
    echo: bool = Field(False, description="The prompt comes before the text; with logprobs, it is scored too.")
    best_of: int | None = Field(None, description="Must be n, if given.")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: str | None = None


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)
    response_format: ResponseFormat | None = None


def check(kind: type[Kind], fields: Any) -> Kind:
    """The body; an ApiError names the first field that is wrong."""
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(fields).__name__}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or None
        message, code = first["msg"].removeprefix("Value error, "), None
        message = message[0].lower() + message[1:]
        if first["type"] == "extra_forbidden" and first["loc"][-1] in UNSUPPORTED:
            message, code = "not supported by this server", "unsupported_parameter"
        elif first["type"] == "extra_forbidden":
            message = "unknown field"
        raise ApiError(400, f"{where}: {message}" if where else message, param=where, code=code) from None
