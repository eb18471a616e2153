"""Bodies that do not fit their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max.serve.errors import ApiError, shown


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Status 400 for a body that does not fit its schema; it names the parameter.

    Args:
        errors: The errors of pydantic.
    """
    first = _nearest(errors)
    location = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        # other routes give the reason with its position
        at = first["loc"][-1] if first["loc"] else None
        where = f" at character {at}" if isinstance(at, int) else ""
        return ApiError(f"the body is no JSON: {reason}{where}", code="invalid_json")
    # the location has the types of unions too
    location = [part for part in location if "[" not in part and part not in _UNION_MEMBERS]
    param = ".".join(location) or None
    if first["type"] == "missing":
        if param is None:
            return ApiError("the body is missing; give a JSON object", code="missing_body")
        return ApiError(f"{param} is missing", param=param, code="missing_required_parameter")
    # a body of another type is not parsed
    if param is None and isinstance(first.get("input"), bytes):
        return ApiError(
            "the body is not marked as JSON; send the header Content-Type: application/json",
            code="invalid_content_type",
        )
    text = str(first["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    value = shown(first.get("input"))
    return ApiError(f"{param or 'the body'} is {value}: {text[:1].lower()}{text[1:]}", param=param)


def unreadable_body(cause: BaseException | None) -> ApiError:
    """Status 400 for a body that cannot be read at all.

    Args:
        cause: The exception of the JSON reader.
    """
    match cause:
        case RecursionError():
            reason = "its arrays and objects are nested too deeply"
        case UnicodeDecodeError():
            reason = f"it is not UTF-8: byte {cause.object[cause.start]:#x} at byte {cause.start}"
        case ValueError():  # raised for numbers of thousands of digits
            reason = "it has a number with too many digits"
        case _:
            reason = "it cannot be read"
    return ApiError(f"the body is no JSON: {reason}", code="invalid_json")


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
