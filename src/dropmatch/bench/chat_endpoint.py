"""Questions to a chat model behind an OpenAI-compatible endpoint, several at a time. Knows nothing of judging.

The `openai` client does the talking and the retries: connection errors, timeouts, 408, 409, 429 and 5xx, with growing
waits or the wait that the server asks for.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dropmatch.errors import ConfigError, EndpointError

Messages = Sequence[Mapping[str, str]]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """Where to ask, and how patiently.

    url: up to and without /chat/completions; key_variable: environment variable that holds the API key, if one is
    needed; seconds: most time of one try; retries: further tries of a question; concurrency: questions in flight;
    max_tokens: of one reply. Temperature is 0.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    seconds: float = 120.0
    retries: int = 5
    concurrency: int = 8
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("The endpoint must be an http or https address, such as http://localhost:8000/v1.")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                "The endpoint's address may hold no password and no query, since results files name it. Put the API "
                f"key into the environment variable {self.key_variable}."
            )
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix(_PATH))
        if not self.model:
            raise ConfigError("The endpoint's model is empty. Name one.")
        if not _NAME.fullmatch(self.key_variable):  # not repeated here, since it may be the key itself
            raise ConfigError("The name of the API key's environment variable may hold letters, digits and _ only.")
        for name, low in (("retries", 0), ("concurrency", 1), ("max_tokens", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not allowed. Give at least {low}.")
        if not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds!r} is not allowed. Give a number above 0.")


def ask_all(
    endpoint: ChatEndpoint, questions: Mapping[str, Messages], on_reply: Callable[[str, str], None]
) -> dict[str, str]:
    """Ask all questions. on_reply(key, text) is called as each reply comes, in this thread.

    Returns what went wrong by key, for questions without a reply after all tries. An interrupt drops the questions in
    flight. Raises EndpointError where going on makes no sense: the key is refused, the model does not exist, or the
    endpoint is unwell and nothing has been answered yet.
    """
    if not questions:
        return {}
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError("The openai client is not installed. Run: pip install 'dropmatch[judge]'.") from error
    return asyncio.run(_ask_all(endpoint, questions, on_reply))


async def _ask_all(
    endpoint: ChatEndpoint, questions: Mapping[str, Messages], on_reply: Callable[[str, str], None]
) -> dict[str, str]:
    from openai import AsyncOpenAI

    # a local server wants no key, but the client wants one
    key = os.environ.get(endpoint.key_variable) or "none"
    failures: dict[str, str] = {}
    num_replies = num_unwell = 0
    waiting = iter(questions.items())

    async def work(client: Any, waiting: Iterator[tuple[str, Messages]]) -> None:
        nonlocal num_replies, num_unwell
        for name, messages in waiting:
            try:
                reply = await _ask(client, endpoint, messages)
            except _NoReply as error:
                failures[name] = _without(key, str(error))
                num_unwell += error.is_unwell
                if num_replies == 0 and num_unwell >= max(3, endpoint.concurrency):
                    raise EndpointError(
                        f"{endpoint.url} answered none of the first {num_unwell} questions, so the rest were not "
                        f"asked. The last: {failures[name]} Check the address, and that the server runs."
                    ) from None
                continue
            except _Refused as error:
                raise EndpointError(_without(key, str(error))) from None
            num_replies += 1
            on_reply(name, reply)

    async with AsyncOpenAI(
        base_url=endpoint.url, api_key=key, timeout=endpoint.seconds, max_retries=endpoint.retries
    ) as client:
        workers = [asyncio.create_task(work(client, waiting)) for _ in range(endpoint.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return failures


class _NoReply(Exception):  # noqa: N818  # both are turned into our own errors here
    """This question has no reply. is_unwell: the endpoint's fault, not the question's."""

    def __init__(self, message: str, *, is_unwell: bool) -> None:
        super().__init__(message)
        self.is_unwell = is_unwell


class _Refused(Exception):  # noqa: N818
    """No question will get one."""


async def _ask(client: Any, endpoint: ChatEndpoint, messages: Messages) -> str:
    import openai

    try:
        answer: Any = await client.chat.completions.create(
            model=endpoint.model,
            messages=list(messages),
            temperature=0.0,
            max_tokens=endpoint.max_tokens,
        )
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        has_key = bool(os.environ.get(endpoint.key_variable))
        advice = "Is it the right key?" if has_key else "Put the API key there."
        raise _Refused(
            f"{endpoint.url} refused with status {error.status_code}: {error.message} The environment variable "
            f"{endpoint.key_variable} is {'set' if has_key else 'not set'}. {advice}"
        ) from error
    except openai.NotFoundError as error:
        raise _Refused(f"{endpoint.url} knows no model {endpoint.model!r}, or no {_PATH}: {error.message}") from error
    except openai.APIStatusError as error:
        is_unwell = error.status_code == 429 or error.status_code >= 500
        raise _NoReply(f"status {error.status_code}: {error.message}", is_unwell=is_unwell) from error
    except openai.APIError as error:  # no connection, a timeout, or an answer that is none
        raise _NoReply(f"{type(error).__name__}: {error.message}", is_unwell=True) from error
    except ValueError as error:  # a body that is not JSON
        raise _NoReply(f"the reply is not JSON ({error})", is_unwell=True) from error
    choices = getattr(answer, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    content = getattr(getattr(first, "message", None), "content", None)
    if not isinstance(content, str):
        raise _NoReply("the reply holds no text under choices[0].message.content", is_unwell=False)
    return content


def _without(secret: str, text: str) -> str:
    return text if secret == "none" else text.replace(secret, "***")
