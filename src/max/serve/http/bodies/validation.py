"""Bodies that do not fit their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max.serve.errors import ApiError, short_text


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Status 400 for a body that does not fit its schema; it names the parameter.

    Args:
        errors: The errors of pydantic.
    """
    first = _nearest(errors)
    location = [str(part) for part in first["loc"] if part != "body"]
    # the location has the types of unions too
    location = [part for part in location if "[" not in part and part not in _UNION_MEMBERS]
    param = ".".join(location) or None
    if first["type"] == "missing":
        if param is None:
            return ApiError("the body is missing; give a JSON object", code="missing_body")
        return ApiError(f"{param} is missing", param=param, code="missing_required_parameter")
    text = str(first["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    value = short_text(first.get("input"))
    return ApiError(f"{param or 'the body'} is {value}: {text[:1].lower()}{text[1:]}", param=param)


_UNION_MEMBERS = frozenset({"str", "constrained-str", "int", "float", "bool", "list", "dict"})


def _nearest(errors: Sequence[Mapping[str, Any]]) -> Any:
    """Of the errors of a union's members the one with the deepest location: that member was probably meant.

    Of equal depths an error of a value before one of a type. A list that is too long comes first: the elements of its
    other types are errors too.
    """

    def nearness(error: Mapping[str, Any]) -> tuple[bool, int, bool]:
        kind = error["type"]
        return kind == "too_long", len(error["loc"]), not kind.endswith("_type")

    return max(errors, key=nearness)
