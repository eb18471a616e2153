"""Routes of MAX, OpenAI, vLLM, llama.cpp and Ollama that this server lacks: each says what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.serve.errors import ApiError

router = APIRouter(include_in_schema=False)

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_ADAPTERS = (
    "/v1/models lists the adapters (LoRA); requests name one by `model`, or by `lora` with a scale"
)
_AUDIO = "models here read and write text; audio comes later"
_IMAGES = "models here write text; images come later"
_BATCHES = "files and answers are not stored; `max run-batch` answers a file of requests"
_STATELESS = "nothing is stored between requests; give the whole conversation to /v1/responses"
_CHOICE = "`response_format` of type `choice` in /v1/chat/completions picks a label"
_VECTORS = "/v1/embeddings gives vectors"
_COMPLETIONS = "/v1/completions completes a text, whole or streamed"
_RENDER = "/apply-template gives the text of a conversation, /tokenize its tokens"
_SLEEP = "/models/unload and /models/load of a server without --model free and load a model, --idle-timeout by itself"
_WEIGHTS = "weights are read when a model is loaded; /models/unload and /models/load read them anew"
_PAUSE = "an engine is not paused; SIGTERM ends a server after its open requests"
_OLLAMA = (
    "models are folders of safetensors or GGUF files; `max pull` and /api/pull get them, "
    "`max quantize` makes others"
)
_REASONS = {
    "/lora-adapters": _ADAPTERS,
    "/v1/audio": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images": _IMAGES,
    "/v1/videos": _IMAGES,
    "/v1/batches": _BATCHES,
    "/v1/files": _BATCHES,
    "/v1/uploads": _BATCHES,
    "/v1/chat/completions/batch": "requests that come side by side run as one batch; `max run-batch` "
    "answers a file of them",
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/conversations": _STATELESS,
    "/v1/vector_stores": f"nothing is stored between requests; {_VECTORS}, /v1/rerank orders texts",
    "/v1/fine_tuning": "models are not trained here; serve the trained model's folder",
    "/v1/moderations": _CHOICE,
    "/classify": _CHOICE,
    "/v1/systemone": "/v1/decisions takes the same questions in OpenAI's form",
    "/pooling": _VECTORS,
    "/v2/embed": _VECTORS,
    "/embedding": _VECTORS,
    "/embeddings": _VECTORS,
    "/generative_scoring": "`logprobs` of /v1/completions are the tokens' probabilities",
    "/completion": _COMPLETIONS,
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/v1/completions/render": _RENDER,
    "/v1/chat/completions/render": _RENDER,
    "/v1/chat/completions/input_tokens": "/tokenize counts the tokens of `messages`",
    "/v1/chat/completions/control": "close the connection to end an answer",
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/server_info": "/version and /v1/models describe the server, `--pretty-print-config` its settings",
    "/collective_rpc": "the worker takes no calls; /models/load and /models/unload are there",
    "/update_weights": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/props": "/v1/models has the context's length (`max_model_len`) and the status of each model",
    "/slots": "/metrics has the load; POST /slots/{id}?action=save keeps the cached prefixes in a file",
    "/models/sse": "/v1/models has the status of each model",
    "/tools": "requests bring their own `tools`",
    "/api/push": _OLLAMA,
}
"""A path, which includes the paths below it, and what to use instead."""


def _refusal(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        path = request.url.path[:200]
        raise ApiError(f"{path} is not supported: {reason}", status=501, code="not_supported")

    return refuse


for _path, _reason in _REASONS.items():
    for _form in (_path, f"{_path}/{{rest:path}}"):
        router.add_route(_form, _refusal(_reason), methods=_METHODS)
