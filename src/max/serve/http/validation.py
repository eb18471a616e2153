"""Bodies that do not fit their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.serve.errors import ApiError


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The 400 of a body that does not fit its schema; it names the parameter.

    Args:
        errors: The errors of pydantic.
    """
    first = _nearest(errors)
    location = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError(f"the body is no JSON: {reason}", code="invalid_json")
    # types of unions stand in the location too
    location = [part for part in location if "[" not in part and part not in _UNION_MEMBERS]
    param = ".".join(location) or None
    if first["type"] == "missing":
        if param is None:
            return ApiError("the body is missing; give a JSON object", code="missing_body")
        return ApiError(f"{param} is missing", param=param, code="missing_required_parameter")
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    text = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(f"{param or 'the body'} is {shown}: {text[:1].lower()}{text[1:]}", param=param)


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict"})


def _nearest(errors: Sequence[Any]) -> Any:
    """Of the errors of a union's members the one that went deepest: that member was meant.

    Of equal ones one of a value rather than of a type.
    """
    return max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
