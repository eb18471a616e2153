"""Ollama's ``/api/create``, a model of another one with its own adapter, template or parameters, and ``/api/copy``."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.pipelines.core.exceptions import ModelFilesError, UserError
from max.pipelines.store.created import (
    Recipe,
    checked_messages,
    checked_parameters,
    checked_template,
)
from max.pipelines.store.creation import (
    copy_model,
    create,
    link_files,
    weights_of,
    work_folder,
)
from max.pipelines.store.local import ModelStore
from max.pipelines.store.modelfile import Modelfile, modelfile_text, parameters_text
from max.serve.errors import ApiError, of_user_error, short_text
from max.serve.http.bodies.body import read_body
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.models.model import ServedModel
from max.serve.ollama.blobs import blob_path
from max.serve.ollama.library import name_of, read_order
from max.serve.ollama.routes import details, json_line, time_text
from max.serve.ollama.schemas import CopyBody, CreateBody, ShowBody

if TYPE_CHECKING:
    from max.serve.ollama import quantizing
else:
    # loaded when a model is quantized
    quantizing = lazy_module("max.serve.ollama.quantizing")

T = TypeVar("T")
router = APIRouter(prefix="/api", tags=["Ollama"])


@dataclass(frozen=True)
class _Order:
    """What a request wants to have created."""

    name: str
    source: str
    files: dict[str, Path]
    adapters: dict[str, Path]
    recipe: Recipe
    template: str | None
    quantize: str


@router.post("/create")
async def create_model(request: Request) -> Response:
    """Creates a model; one that was created before is replaced.

    Args:
        request: The connection.
    """
    body, state, store = await read_order(request, CreateBody)
    order = _order(body, store)
    # takes minutes, so its errors come as lines
    if order.quantize:
        folder = await _in_thread(lambda: _source_folder(order, store))
        lines = _quantized_lines(order, state, store, folder)
    else:
        # all that may be wrong is found before the first line
        lines = _lines(order, state, await _in_thread(lambda: _prepare(order, store)))
    if body.stream is not False:
        return await event_stream(request, lines, _error_line, "application/x-ndjson")
    await unless_disconnected(request, _drain(lines))
    return json_response({"status": "success"})


async def _drain(lines: AsyncGenerator[bytes]) -> None:
    async with contextlib.aclosing(lines):
        async for _ in lines:
            pass


@router.post("/copy")
async def copy(request: Request) -> Response:
    """Copies a model; its files take their place once, and the copy stays when the model is deleted.

    Args:
        request: The connection.
    """
    body, state, store = await read_order(request, CopyBody)
    source, name = name_of(body.source), name_of(body.destination)
    place = await _in_thread(lambda: copy_model(store, name, store.find(source)))
    # as in `_lines`: the name is free when `place` runs
    await state.pool.delete(name, place)
    return Response(status_code=200)


async def _in_thread(make: Callable[[], T]) -> T:
    """What a function of another thread returns.

    Raises:
        ApiError: 404 if there is no such source, else 400: it does not fit.
    """
    try:
        return await asyncio.to_thread(make)
    except ModelFilesError as error:
        raise ApiError(f"{error.problem}. {error.remedy}".strip(), status=404) from error
    except UserError as error:
        raise of_user_error(error, "model") from error


def _error_line(error: ApiError) -> bytes:
    return json_line({"error": error.message})


def _order(body: CreateBody, store: ModelStore) -> _Order:
    """The model of a request, checked as far as the request alone says.

    Raises:
        ApiError: A field does not fit.
    """
    name = name_of(body.model or body.name)
    if body.quantize:
        # raises before anything is written
        quantizing.type_of(body.quantize)
    if (body.from_ is None) == (not body.files):
        raise ApiError(
            "give one of from, the name of a model, and files, its uploaded files", param="from"
        )
    try:
        recipe = Recipe(
            system=body.system or "",
            parameters=checked_parameters(body.parameters or {}),
            messages=checked_messages(body.messages),
            license=[body.license] if isinstance(body.license, str) else body.license or [],
        )
        template = None if not body.template else checked_template(body.template)
    except UserError as error:
        raise of_user_error(error, "parameters") from error
    return _Order(
        name,
        "" if body.from_ is None else name_of(body.from_),
        _blobs(store, body.files, "files"),
        _blobs(store, body.adapters, "adapters"),
        recipe,
        template,
        body.quantize or "",
    )


def _blobs(store: ModelStore, digests: dict[str, str] | None, field: str) -> dict[str, Path]:
    """The uploaded files of a field, by their names without folders.

    Raises:
        ApiError: One was not uploaded.
    """
    files: dict[str, Path] = {}
    for name, digest in (digests or {}).items():
        path = blob_path(store, digest)
        if not path.is_file():
            raise ApiError(
                f"{field}: the blob {short_text(digest)} was not uploaded; POST it to /api/blobs/{short_text(digest)}",
                param=field,
            )
        # clients on Windows have other separators
        files[re.split(r"[/\\]", name)[-1]] = path
    return files


def _source_folder(order: _Order, store: ModelStore) -> Path | None:
    """The folder of the model that is quantized; None: the request has its files."""
    if not order.source:
        return None
    folder = weights_of(store, store.find(order.source))
    quantizing.check_source(folder, order.source)
    return folder


async def _quantized_lines(
    order: _Order, state: ServerState, store: ModelStore, source: Path | None
) -> AsyncGenerator[bytes]:
    """The lines of a creation with quantized weights."""
    with work_folder(store) as folder:
        if source is None:
            # the file states the name of its folder
            source = folder / re.sub(r"[/:]", "-", order.name)
            source.mkdir()
            link_files(order.files, source)
            quantizing.check_source(source, order.name)
        path = folder / "model.gguf"
        async for line in quantizing.quantized_file(source, path, order.quantize):
            yield line
        place = await _in_thread(lambda: _prepare(order, store, {path.name: path}))
    async for line in _lines(order, state, place):
        yield line


def _prepare(
    order: _Order, store: ModelStore, quantized: Mapping[str, Path] | None = None
) -> Callable[[], None]:
    source = store.find(order.source) if order.source else None
    adapters = order.adapters
    if len(adapters) > 1 and all(name.endswith(".gguf") for name in adapters):
        raise UserError(f"there are {len(adapters)} adapters; a model has one at most")
    if len(adapters) == 1 and next(iter(adapters)) != "adapter.gguf":
        # names of single files say nothing
        adapters = {"adapter.gguf": next(iter(adapters.values()))}
    return create(
        store,
        order.name,
        order.recipe,
        source=source,
        weights=quantized or order.files,
        adapter=adapters,
        template=order.template,
    )


async def _lines(
    order: _Order, state: ServerState, place: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """The lines of a creation, as Ollama has them."""
    yield json_line({"status": "reading model metadata"})
    for path in (*order.files.values(), *order.adapters.values()):
        yield json_line({"status": f"using existing layer {path.name.replace('-', ':', 1)}"})
    yield json_line({"status": "writing manifest"})
    # `delete` runs `place` when no request uses the model of this name
    await state.pool.delete(order.name, place)
    # its files are links to them; another model would upload them again
    for path in (*order.files.values(), *order.adapters.values()):
        await asyncio.to_thread(path.unlink, missing_ok=True)
    yield json_line({"status": "success"})


@router.post("/show")
async def show(request: Request) -> Response:
    """Shows a model.

    Args:
        request: The connection.
    """
    body = await read_body(request, ShowBody)
    model = await state_of(request, body).model(body.model or body.name)
    return json_response(_model_details(model))


def _model_details(model: ServedModel) -> dict[str, Any]:
    recipe = model.recipe
    modelfile = Modelfile(
        recipe.parent or model.name,
        "adapter" if recipe.has_adapter else "",
        model.template if recipe.has_template else None,
        recipe.system,
        recipe.parameters,
        recipe.messages,
        recipe.license,
    )
    capabilities = ["completion", "tools"]
    if model.reasons:
        capabilities.append("thinking")
    if model.infill is not None:
        capabilities.append("insert")
    shown = {
        "modelfile": modelfile_text(modelfile),
        "parameters": parameters_text(recipe.parameters),
        "template": model.template,
        "details": details(model),
        "model_info": {"general.context_length": model.max_length},
        "capabilities": capabilities,
        "modified_at": time_text(model.created),
    }
    own = {"system": recipe.system, "messages": recipe.messages}
    own["license"] = "\n".join(recipe.license)
    return {**shown, **{name: value for name, value in own.items() if value}}
