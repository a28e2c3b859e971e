"""TokenizerService on the public port: clients need one address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from frontend.convert import calls
from frontend.interceptors import current_call, send
from frontend.validate import check_model
from pagewire.v1 import tokenizer_pb2_grpc

if TYPE_CHECKING:
    from frontend.dispatcher import Dispatcher
    from frontend.interceptors import Context
    from pagewire.v1 import tokenizer_pb2


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        return await self._proxy("Tokenize", request, context)  # type: ignore[no-any-return]

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        return await self._proxy("Detokenize", request, context)  # type: ignore[no-any-return]

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        return await self._proxy("ApplyChatTemplate", request, context)  # type: ignore[no-any-return]

    async def _proxy(self, method: str, request: object, context: Context) -> Any:
        check_model(calls.model_of(request), self._dispatcher.limits())
        response = await self._dispatcher.tokenizer.proxy(method, request)
        await send(context.send_initial_metadata(current_call().metadata))
        return response
