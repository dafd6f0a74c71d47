"""/v1/models: the one model that is served."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jserve.server.exchange import Serving
from jserve.server.openai import check_model
from jserve.server.replies import json_response


class ModelRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        check_model(self._serving, request.path_params["model"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._serving.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "jserve",
            "root": self._serving.config.model.model_path,
            "parent": None,
            "max_model_len": context_length(self._serving),
        }


def context_length(serving: Serving) -> int:
    engine = serving.engine
    return int(engine.server_info.get("context_length", engine.model_config.max_position))
