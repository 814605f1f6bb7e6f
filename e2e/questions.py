"""Requests to lab engines, the one right answer to each, and what became of it through an OpenAI client."""

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
import openai
from openai import AsyncOpenAI

from epp.lab import tokens
from epp.payload.records import Api

MODEL = "lab/llama-8b"
WORDS = ("warm", "route", "naïve", "cache", '"quoted"', "tab\t", "back\\slash", "日本語", "prefill", "🙂")


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Every lab engine gives the same answer to it."""

    id: str
    prompt: str
    output_tokens: int = 16
    stream: bool = False
    system: str = ""
    api: Api = Api.CHAT

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    @property
    def body(self) -> dict[str, object]:
        """As a client encodes it."""
        asked = {"messages": self.messages} if self.api is Api.CHAT else {"prompt": self.prompt}
        options = {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return {"model": MODEL, **asked, "max_tokens": self.output_tokens, **options}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api is Api.CHAT else "/v1/completions"

    @property
    def identity(self) -> bytes:
        if self.api is Api.COMPLETIONS:
            return tokens.from_text(self.prompt)
        return tokens.from_chat([(each["role"], each["content"]) for each in self.messages])

    def right(self) -> "Answer":
        """The answer of any engine."""
        words = tokens.answer_words(self.identity, self.output_tokens)
        prompt_tokens = tokens.token_count(self.identity)
        prefix = "chatcmpl" if self.api is Api.CHAT else "cmpl"
        return Answer(
            id=f"{prefix}-{self.id}",
            model=MODEL,
            text=b"".join(words).decode(),
            finish_reason="length",
            usage=(prompt_tokens, self.output_tokens, prompt_tokens + self.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said; `usage`: tokens of prompt, of output, and of both."""

    id: str
    model: str
    text: str
    finish_reason: str | None
    usage: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a question, by the event loop's clock. Either `answer` or `error` is set."""

    question: Question
    started_s: float
    ended_s: float
    answer: Answer | None = None
    error: Exception | None = None

    @property
    def right(self) -> bool:
        return self.answer == self.question.right()

    @property
    def status(self) -> int | None:
        """HTTP status of an answer that was an error; None where there was none or it broke off."""
        return self.error.status_code if isinstance(self.error, openai.APIStatusError) else None


def text_of(size: int, draw: random.Random) -> str:
    """Words of about `size` bytes of UTF-8, with what JSON escapes and what takes several bytes."""
    words = []
    while size > 0:
        word = f"{draw.choice(WORDS)}{draw.randrange(1000)}"
        words.append(word)
        size -= len(word.encode()) + 1
    return " ".join(words)


@asynccontextmanager
async def openai_client(url: str, **options: object) -> AsyncIterator[AsyncOpenAI]:
    """A client as users have it, except that it tries once."""
    async with AsyncOpenAI(
        api_key="none",
        base_url=f"{url}/v1",
        max_retries=0,
        timeout=100.0,
        **options,  # type: ignore[arg-type]
    ) as client:
        yield client


async def ask(client: AsyncOpenAI, question: Question, **headers: str) -> Outcome:
    """Ask once. What the client raises becomes the outcome's `error`."""
    sent = {"x-request-id": question.id, **{key.replace("_", "-"): value for key, value in headers.items()}}
    started_s = time.monotonic()
    answer = error = None
    try:
        answer = await (_streamed if question.stream else _whole)(client, question, sent)
    except (openai.APIError, httpx2.HTTPError, json.JSONDecodeError) as broken:
        error = broken
    return Outcome(question, started_s, time.monotonic(), answer, error)


async def _whole(client: AsyncOpenAI, question: Question, headers: dict[str, str]) -> Answer:
    create = client.chat.completions.create if question.api is Api.CHAT else client.completions.create
    whole = await create(extra_headers=headers, **question.body)  # type: ignore[call-overload]
    choice = whole.choices[0]
    text = choice.message.content if question.api is Api.CHAT else choice.text
    return Answer(whole.id, whole.model, text, choice.finish_reason, _usage(whole))


async def _streamed(client: AsyncOpenAI, question: Question, headers: dict[str, str]) -> Answer:
    create = client.chat.completions.create if question.api is Api.CHAT else client.completions.create
    ids, models, texts, finish, usage = set(), set(), [], None, None
    async with await create(extra_headers=headers, **question.body) as events:  # type: ignore[call-overload]
        async for event in events:
            ids.add(event.id)
            models.add(event.model)
            usage = _usage(event) or usage
            for choice in event.choices:
                texts.append((choice.delta.content if question.api is Api.CHAT else choice.text) or "")
                finish = choice.finish_reason or finish
    return Answer(" ".join(sorted(ids)), " ".join(sorted(models)), "".join(texts), finish, usage)


def _usage(part: object) -> tuple[int, int, int] | None:
    usage = getattr(part, "usage", None)
    return usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
