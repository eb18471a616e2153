"""Resolves the references within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_MOST_STEPS = 16


class References:
    """The schemas to which references of a schema point.

    Args:
        root: The schema.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.joins: dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        """Schemas, by their identity, and the same with their members of ``allOf`` as one object."""
        self._named: dict[str, Any] = {}
        self._resource: dict[int, Any] = {}  # the schema with an identifier around a node
        self._index()

    def _index(self) -> None:
        left: list[tuple[Any, Any]] = [(self._root, self._root)]
        while left:
            value, resource = left.pop()
            if isinstance(value, Mapping):
                identifier = value.get("$id", value.get("id"))
                if isinstance(identifier, str) and not identifier.startswith("#"):
                    resource = value
                    # by the whole identifier, and by its last part, as relative references name it
                    self._named.setdefault(identifier.rstrip("#"), value)
                    self._named.setdefault(identifier.rstrip("#").rpartition("/")[2], value)
                elif isinstance(identifier, str):
                    self._named.setdefault(identifier, value)
                for keyword in ("$anchor", "$dynamicAnchor"):
                    anchor = value.get(keyword)
                    if isinstance(anchor, str):
                        self._named.setdefault(f"#{anchor}", value)
                self._resource[id(value)] = resource
                left.extend((each, resource) for each in value.values())
            elif isinstance(value, list):
                left.extend((each, resource) for each in value)

    def target(self, reference: str, place: Mapping[str, Any]) -> Any:
        """The schema to which a reference points; None if it is elsewhere.

        Args:
            reference: The reference.
            place: The schema that has it.
        """
        document, _, fragment = reference.partition("#")
        if document:
            start = self._named.get(document)
            starts = [] if start is None else [start]
        else:
            # of the schema with an identifier around the place, else of the whole
            starts = [self._resource.get(id(place), self._root), self._root]
        if not fragment:
            return starts[0] if starts else None
        if not fragment.startswith("/"):
            return self._named.get(f"#{fragment}")
        for start in starts:
            found = value_at(start, fragment)
            if isinstance(found, (Mapping, bool)):
                return found
        return None

    def resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema, or the one to which it is only a reference."""
        for _ in range(_MOST_STEPS):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or set(schema) - {"$ref", "description", "title"}:
                return schema
            target = self.target(reference, schema)
            if not isinstance(target, Mapping):
                return schema
            schema = target
        return schema


def value_at(value: Any, pointer: str) -> Any:
    """The value at a JSON pointer (RFC 6901), as a fragment of an address; None where there is none.

    Args:
        value: The value that has it.
        pointer: The pointer, from its first slash on.
    """
    for step in pointer[1:].split("/"):
        # RFC 6901: ~1 first, as ~01 stands for ~1
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
