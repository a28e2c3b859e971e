"""The OpenAI-compatible routes, and those of vLLM's that its users' tools ask for."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from starlette.routing import Route

from frontend.openai.calls import (
    chat_call,
    chat_message,
    completion_calls,
    field_namer,
    template_kwargs,
    tools,
)
from frontend.openai.chat import ChatAnswer
from frontend.openai.completions import CompletionAnswer
from frontend.openai.exchange import Endpoint
from frontend.openai.generate import generate
from frontend.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from frontend.openai.responses import Detokenized, Model, ModelList, Tokenized, Version
from frontend.openai.token_texts import TokenTexts
from frontend.request import ChatPrompt, TextPrompt
from frontend.validate import check_model
from pagewire.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from frontend.call_trace import CallTracing
    from frontend.dispatcher import Dispatcher
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from frontend.openai.exchange import Exchange
    from frontend.validate import Limits

    Handler = Callable[[Exchange], Awaitable[None]]


def openai_routes(
    dispatcher: Dispatcher,
    metrics: Metrics,
    health: HealthBoard,
    tracing: CallTracing,
    *,
    max_body_bytes: int,
) -> list[Route]:
    handlers = _Handlers(dispatcher, health)

    def route(method: str, path: str, handler: Handler) -> Route:
        endpoint = Endpoint(path, handler, metrics, tracing, max_body_bytes=max_body_bytes)
        return Route(path, endpoint, methods=[method])

    return [
        route("POST", "/v1/completions", handlers.complete),
        route("POST", "/v1/chat/completions", handlers.chat),
        route("GET", "/v1/models", handlers.list_models),
        route("GET", "/v1/models/{model:path}", handlers.get_model),
        route("POST", "/tokenize", handlers.tokenize),
        route("POST", "/detokenize", handlers.detokenize),
        route("GET", "/health", handlers.check),
        route("GET", "/ping", handlers.check),
        route("POST", "/ping", handlers.check),
        route("GET", "/version", handlers.tell_version),
    ]


class _Handlers:
    def __init__(self, dispatcher: Dispatcher, health: HealthBoard) -> None:
        self._dispatcher = dispatcher
        self._health = health
        self._texts = TokenTexts(dispatcher.tokenizer)
        self._created = int(time.time())
        self._version = version("pagewire")

    async def complete(self, exchange: Exchange) -> None:
        body = exchange.read(CompletionBody)
        exchange.name_field = field_namer(body, chat=False)
        calls = completion_calls(body)
        model = body.model or self._dispatcher.limits().model
        request_id = body.request_id or exchange.request_id
        answer = CompletionAnswer(body, model, request_id, self._texts)
        await generate(exchange, self._dispatcher, calls, answer)

    async def chat(self, exchange: Exchange) -> None:
        body = exchange.read(ChatBody)
        exchange.name_field = field_namer(body, chat=True)
        call = chat_call(body)
        model = body.model or self._dispatcher.limits().model
        last = chat_message(body.messages[-1]) if body.messages else None
        request_id = body.request_id or exchange.request_id
        answer = ChatAnswer(body, last, model, request_id, self._texts)
        await generate(exchange, self._dispatcher, [call], answer)

    async def list_models(self, exchange: Exchange) -> None:
        limits = self._dispatcher.limits()
        names = (limits.model, *limits.adapters)
        await exchange.answer(ModelList([self._model(name, limits) for name in names]))

    async def get_model(self, exchange: Exchange) -> None:
        name, limits = exchange.params["model"], self._dispatcher.limits()
        check_model(name, limits)
        await exchange.answer(self._model(name, limits))

    async def tokenize(self, exchange: Exchange) -> None:
        body = exchange.read(TokenizeBody)
        limits = self._dispatcher.limits()
        check_model(body.model, limits)
        prompt: TextPrompt | ChatPrompt
        if isinstance(body.messages, list) and body.prompt is None:
            prompt = ChatPrompt(
                messages=tuple(map(chat_message, body.messages)),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=template_kwargs(body.chat_template_kwargs),
                tools=tools(body.tools),
            )
        elif body.prompt is not None and not isinstance(body.messages, list):
            prompt = TextPrompt(body.prompt, body.add_special_tokens is not False)
        else:
            raise InvalidRequest("prompt", "set one of prompt and messages")
        ids, _ = await self._dispatcher.tokenizer.tokenize(prompt)
        await exchange.answer(Tokenized(len(ids), limits.max_model_len, ids))

    async def detokenize(self, exchange: Exchange) -> None:
        body = exchange.read(DetokenizeBody)
        check_model(body.model, self._dispatcher.limits())
        text = await self._dispatcher.tokenizer.detokenize_text(body.tokens, "tokens")
        await exchange.answer(Detokenized(text))

    async def check(self, exchange: Exchange) -> None:
        if not self._health.serving:
            self._dispatcher.limits()  # says why
            raise Unavailable("engine_dead", "the server is not serving")
        await exchange.reply(200, b"")

    async def tell_version(self, exchange: Exchange) -> None:
        await exchange.answer(Version(self._version))

    def _model(self, name: str, limits: Limits) -> Model:
        parent = limits.model if name in limits.adapters else None
        root = limits.model
        return Model(name, self._created, limits.max_model_len, root=root, parent=parent)
