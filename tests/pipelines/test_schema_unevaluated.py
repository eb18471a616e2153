"""What members of a schema evaluate of objects and lists: the written schema fits the same values."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import loose_schema, of_json_schema, of_loose_schema
from max.pipelines.structured.schemas import objects
from max.pipelines.structured.schemas.arrays import with_items_of
from max.pipelines.structured.schemas.merging import well_formed
from max.pipelines.structured.schemas.references import References

NAMES, TEXT = "abcd", {"type": "string"}
OBJECTS = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in itertools.product((None, 1, "x"), repeat=len(NAMES))
]
ITEMS: list[Any] = [True, TEXT, {"const": 1}, {"enum": [1, "x"]}, False]
LISTS = [[*each] for count in range(4) for each in itertools.product((1, 2, "x"), repeat=count)]


def fits(schema: Any, values: list[Any]) -> list[bool]:
    validator = jsonschema_rs.validator_for(schema)
    return [validator.is_valid(value) for value in values]


def object_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of objects with members."""
    made: dict[str, Any] = {}
    if depth < 2 and draw.random() < 0.5:
        keyword = draw.choice(["anyOf", "oneOf", "allOf"])
        made[keyword] = [object_of(draw, depth + 1) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:
            return made
    values = [True, TEXT, {"const": 1}, {"enum": [1, "x"]}, {"type": "integer"}]
    made["properties"] = {name: draw.choice(values) for name in draw.sample(NAMES, draw.randint(0, 2))}  # fmt: skip
    if draw.random() < 0.5:
        made["required"] = draw.sample(NAMES, draw.randint(1, 2))
    if draw.random() < 0.08:
        made["additionalProperties"] = draw.choice([True, False, TEXT])
    if draw.random() < 0.08:
        made["patternProperties"] = {"^d": TEXT}
    return made


def test_random_objects() -> None:
    equal = narrow = relaxed = 0
    for seed in range(500):
        draw = random.Random(seed)
        schema = {"type": "object", **object_of(draw)}
        schema["unevaluatedProperties"] = draw.choice([False, False, TEXT])
        if draw.random() < 0.5:
            schema |= {"$ref": "#/$defs/r", "$defs": {"r": object_of(draw)}}
        given, form = fits(schema, OBJECTS), loose_schema(schema)
        if not any(given):
            continue
        if form.relaxed_keywords:
            # but for keywords that are named, the rest holds
            relaxed += 1
            assert "all but the type" not in str(form.relaxed_keywords), schema
            continue
        written = fits(form.schema, OBJECTS)
        assert not any(new and not old for old, new in zip(given, written, strict=True)), schema
        equal, narrow = equal + (given == written), narrow + (given != written)
    assert equal > 180 and narrow < 4 and relaxed < 230, (equal, narrow, relaxed)


def list_of(draw: random.Random) -> dict[str, Any]:
    """A schema of lists."""
    made: dict[str, Any] = {"type": "array"} if draw.random() < 0.7 else {}
    if draw.random() < 0.6:
        made["prefixItems"] = draw.choices(ITEMS[:4], k=draw.randint(1, 2))
    if draw.random() < 0.2:
        made["items"] = draw.choice(ITEMS)
    for keyword in ("minItems", "maxItems"):
        if draw.random() < 0.3:
            made[keyword] = draw.randint(0, 3)
    return made


def test_random_lists() -> None:
    held = 0
    for seed in range(300):
        draw = random.Random(seed)
        schema = {**list_of(draw), "unevaluatedItems": draw.choice(ITEMS)}
        target = draw.choice([list_of(draw), list_of(draw), list_of(draw), True])
        given = fits({"$defs": {"r": target}, "$ref": "#/$defs/r", **schema}, LISTS)
        made = with_items_of(schema, target)
        if made is not None:
            held += 1
            assert fits(made, LISTS) == given, (schema, target)
        form = loose_schema({"$defs": {"r": target}, "$ref": "#/$defs/r", **schema})
        if any(given) and not form.relaxed_keywords:
            assert fits(form.schema, LISTS) == given
    assert held > 200
    assert with_items_of({"unevaluatedItems": False}, False) is None
    for other in (
        {"type": "object"}, {"items": [TEXT]}, {"contains": TEXT}, {"unevaluatedItems": TEXT}, {"minItems": "a"},
    ):  # fmt: skip
        assert with_items_of({"type": "array", "unevaluatedItems": False}, other) is None


BASE = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#/$defs/r", "properties": {"b": TEXT}}, {"a": '"x"'}),
        ({"$ref": "#/$defs/r", "anyOf": [{"properties": {"b": TEXT}}, {"properties": {"c": TEXT}}]}, {"a": '"x"'}),
        ({"allOf": [{"$ref": "#/$defs/r"}, {"properties": {"b": TEXT}}]}, {"a": '"x"'}),
    ],
)  # fmt: skip
def test_references_and_alternatives_are_held(schema: dict[str, Any], expected: Any) -> None:
    schema = {"type": "object", "$defs": {"r": BASE}, **schema, "unevaluatedProperties": False}
    assert loose_schema(schema).relaxed_keywords == ()
    assert of_json_schema(schema)
    written = loose_schema(schema).schema
    assert fits(schema, OBJECTS) == fits(written, OBJECTS) and any(fits(schema, OBJECTS))


def test_together_alternatives_evaluate_the_properties_of_all() -> None:
    options = [{"properties": {name: {"type": "integer"}}} for name in NAMES]
    schema: dict[str, Any] = {"type": "object", "anyOf": options, "unevaluatedProperties": False}
    written = loose_schema(schema).schema
    assert fits(schema, OBJECTS) == fits(written, OBJECTS)
    # fifteen of four; of more, the fewest together
    assert len(written["anyOf"]) == 15
    schema["anyOf"] = [{"properties": {f"p{number}": TEXT}} for number in range(10)]
    assert len(loose_schema(schema).schema["anyOf"]) == 24
    one = {f"p{number}": "x" for number in range(2)}
    assert jsonschema_rs.is_valid(loose_schema(schema).schema, one)
    # alternatives that exclude each other are not together
    schema["anyOf"] = [
        {"properties": {"k": {"const": number}, f"p{number}": TEXT}, "required": ["k"]}
        for number in range(20)
    ]
    assert len(loose_schema(schema).schema["anyOf"]) == 20
    schema["anyOf"] = [{"properties": {f"p{number}": TEXT}} for number in range(25)]
    assert loose_schema(schema).relaxed_keywords == ("unevaluatedProperties",)
    with pytest.raises(InputError, match="does not hold unevaluatedProperties"):
        of_json_schema(schema)


def test_what_evaluates_all_leaves_nothing() -> None:
    open_object = {"type": "object", "properties": {"a": TEXT}}
    for more in (
        {"unevaluatedProperties": True}, {"unevaluatedProperties": {}},
        {"additionalProperties": True, "unevaluatedProperties": False},
    ):  # fmt: skip
        form = loose_schema({**open_object, **more})
        assert form.schema == {**open_object, "additionalProperties": True}
        assert form.relaxed_keywords == ()
    typed = {**open_object, "additionalProperties": {"type": "integer"}}
    assert loose_schema({**typed, "unevaluatedProperties": False}).schema == typed


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_members_that_refer_to_members_take_no_time(
    monkeypatch: pytest.MonkeyPatch, keyword: str, evaluated: bool
) -> None:
    """Each path through nine steps of twenty members would be one of 20**9."""
    steps = {f"s{n}": {keyword: [{"$ref": f"#/$defs/s{n + 1}"}] * 20} for n in range(9)}
    more = {"unevaluatedProperties": False} if evaluated else {}
    schema = {"type": "object", "$defs": {**steps, "s9": BASE}, "$ref": "#/$defs/s0", **more}
    schema |= {keyword: [{"$ref": "#/$defs/s0"}], "properties": {"b": TEXT}}
    calls: list[int] = []

    def counted(given: Any) -> Any:
        calls.append(1)
        assert len(calls) < 5000
        return well_formed(given)

    monkeypatch.setattr(objects, "well_formed", counted)
    assert of_loose_schema(schema)[0] and calls


@pytest.mark.parametrize("keyword", ["oneOf", "not"])
def test_schemas_that_require_themselves_take_no_time(
    monkeypatch: pytest.MonkeyPatch, keyword: str
) -> None:
    """Each path through twelve steps of six properties would be one of 12**12."""
    names = [f"p{number}" for number in range(6)]
    own = {"type": "object", "required": names, "properties": dict.fromkeys(names, {"$ref": "#/$defs/s"})}  # fmt: skip
    schema: dict[str, Any] = {"type": "object", "$defs": {"s": own}, "properties": {"a": TEXT}}
    schema[keyword] = {"$ref": "#/$defs/s"} if keyword == "not" else [{"$ref": "#/$defs/s"}] * 2
    calls: list[int] = []
    resolve = References.resolve

    def counted(self: References, given: Any) -> Any:
        calls.append(1)
        assert len(calls) < 300_000
        return resolve(self, given)

    monkeypatch.setattr(References, "resolve", counted)
    assert of_loose_schema(schema)[1] and calls
