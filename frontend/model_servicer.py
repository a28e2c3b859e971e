"""ModelService: what is served here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend.convert import answers
from frontend.validate import check_model
from pagewire.errors import InvalidRequest
from pagewire.v1 import model_pb2_grpc

if TYPE_CHECKING:
    from frontend.dispatcher import Dispatcher
    from frontend.interceptors import Context
    from pagewire.v1 import model_pb2


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        limits = self._dispatcher.limits()
        return answers.list_models_response(
            [self._model(it) for it in (limits.model, *limits.adapters)]
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        if not request.name:
            raise InvalidRequest("name", "name is empty")
        check_model(request.name, self._dispatcher.limits(), field="name")
        return answers.get_model_response(self._model(request.name))

    def _model(self, name: str) -> model_pb2.Model:
        limits = self._dispatcher.limits()
        ready = self._dispatcher.engine_side.served()
        adapter = limits.adapters.get(name)
        return answers.model(ready, adapter, has_chat_template=limits.has_chat_template)
