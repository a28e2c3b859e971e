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
        return answers.list_models_response([self._model()])

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        if not request.name:
            raise InvalidRequest("name", "name is empty")
        model = self._model()
        check_model(request.name, self._dispatcher.limits(), field="name")
        return answers.get_model_response(model)

    def _model(self) -> model_pb2.Model:
        limits = self._dispatcher.limits()
        ready = self._dispatcher.engine_side.served()
        return answers.model(ready, has_chat_template=limits.has_chat_template)
