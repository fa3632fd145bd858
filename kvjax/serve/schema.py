"""What clients may send. A field that is unknown, or that would change the answer and is not
offered, is refused; one that changes nothing is taken and left alone."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_MESSAGES = 4096
MOST_PARTS = 4096
"""Of a message's content."""
MOST_STOPS = 64

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list of any length: its first wrong item is told and no other, which would take long."""


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        """Of unknown fields the first is enough to be refused for, as in `Listed`."""
        if not isinstance(value, dict):
            return value
        unknown = next((name for name in value if name not in cls.model_fields), None)
        return {n: x for n, x in value.items() if n in cls.model_fields or n == unknown}


class Compression(Body):
    """Settings of one request's cache; what is left out is the server's.

    They are those of `kvjax.CompressionConfig` that need no compilation of their own.
    """

    method: str | None = Field(None, description="One of the methods that /kvjax/status names.")
    rate: float | int | None = Field(None, description="Tokens over tokens' worth of KVs kept.")
    max_cache_tokens: int | None = Field(None, description="The size itself, instead of a rate.")
    budget_bytes: int | None = Field(None, description="The size in bytes, instead of both.")
    floor: int | None = Field(None, description="The least size that a rate leads to, in tokens.")
    protected: int | None = Field(None, description="Newest tokens that are never evicted.")
    sinks: int | None = Field(None, description="Oldest tokens that are never evicted.")
    compress_every: int | None = Field(None, description="Compress again after so many tokens.")


class Extras(Body):
    """What only this server offers."""

    detail: bool = Field(
        False, description="Say which tokens of the prompt each KV head kept, in `kvjax.detail`."
    )
    deadline: float | int | None = Field(
        None, gt=0, le=1e9, description="Seconds after which the answer ends with what it has."
    )


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class Request(Body):
    """Fields that both kinds of requests have."""

    model: str | None = Field(None, description="The served model; may be left out.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | int | None = Field(None, ge=0)
    top_p: float | int | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1 for all.")
    min_p: float | int | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, description="Any whole number; drawn where it is left out.")
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    compression: Compression | None = None
    kvjax: Extras | None = None

    # Taken, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # Known, and refused where they ask for something.
    frequency_penalty: float | int | None = None
    presence_penalty: float | int | None = None
    logit_bias: dict[str, Any] | None = None


class CompletionRequest(Request):
    """POST /v1/completions"""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn. Fields beside role and content go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: str
    content: str | Annotated[Listed[TextPart], Field(max_length=MOST_PARTS)] | None = None


class ChatRequest(Request):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: Listed[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further names for the model's chat template."
    )


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Listed[int]
