"""What the names in pickles of ``torch.save`` build, and the messages for what no checkpoint has."""

from __future__ import annotations

from typing import Any

import pytest

from max.graph.weights._torch_objects import (
    NAMES,
    Name,
    PickleError,
    Storage,
    StoredTensor,
    description,
    dictionary_key,
    storage_of,
    tensor_of,
)

FLOATS = Name("torch.FloatStorage", None)
STORAGE = Storage("float32", "0", "cpu", 12, 0, 12)


@pytest.mark.parametrize("value", [None, 2.5, 7, -(2**64) + 1, True])
def test_short_values_are_shown_in_messages(value: object) -> None:
    assert str(value) in description(value)


@pytest.mark.parametrize("value", [2**64, -(2**64), [1], {"a": 1}, (1,)])
def test_long_values_are_shown_by_their_type(value: object) -> None:
    assert str(value) not in description(value)


@pytest.mark.parametrize("key", [1.5, True, None, FLOATS, 2**64 - 1, b"text", ("a", 1)])
def test_keys_become_texts(key: object) -> None:
    assert isinstance(dictionary_key(key), str)


@pytest.mark.parametrize("key", [2**64, -(2**64), ("a" * 201,), [1], (1,) * 9])
def test_keys_that_no_checkpoint_has(key: object) -> None:
    with pytest.raises(PickleError, match="key"):
        dictionary_key(key)


def test_a_storage_and_a_part_of_one() -> None:
    whole = ("storage", FLOATS, "3", "cuda:0", 12)
    assert storage_of(whole) == Storage("float32", "3", "cuda:0", 12, 0, 12)
    assert storage_of((*whole, None)) == Storage("float32", "3", "cuda:0", 12, 0, 12)
    # first element and number of elements of the part
    assert storage_of((*whole, ("4", 2, 5))) == Storage("float32", "3", "cuda:0", 5, 2, 12)
    assert storage_of(("storage", FLOATS, "3", 7, 12)).location == ""


@pytest.mark.parametrize("part", [("4", 2), ("4", 2, 5, 1), [4, 2, 5], 3])
def test_other_parts_of_a_storage(part: object) -> None:
    with pytest.raises(PickleError, match="part of a storage"):
        storage_of(("storage", FLOATS, "3", "cpu", 12, part))


def test_a_tensor_views_a_storage() -> None:
    made = tensor_of(STORAGE, 4, (2, 3), (3, 1))
    assert made == StoredTensor("float32", (2, 3), (3, 1), 4, STORAGE)
    with pytest.raises(PickleError, match="no storage"):
        tensor_of("0", 4, (2, 3), (3, 1))


def test_tensors_of_other_classes_are_not_read() -> None:
    rebuild: Any = NAMES["torch._tensor._rebuild_from_type_v2"]
    plain = Name("torch._utils._rebuild_tensor_v2", tensor_of)
    arguments = (STORAGE, 0, (2,), (1,))
    for path in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        assert rebuild(plain, Name(path, None), arguments, None).storage is STORAGE
    assert "another class" in rebuild(plain, Name("torch.Size", None), arguments, None).problem
    with pytest.raises(PickleError, match="rebuilt by"):
        rebuild(Name("torch.Size", None), Name("torch.Tensor", None), arguments, None)


def test_dictionaries_are_built_of_pairs() -> None:
    build: Any = NAMES["collections.OrderedDict"]
    assert build() == {}
    assert build([("a", 1), ["b", 2]], "more") == {"a": 1, "b": 2}
    for pairs in ([("a", 1, 2)], [3], [("a",)]):
        with pytest.raises(PickleError, match="built of"):
            build(pairs)


@pytest.mark.parametrize(
    "identity",
    [
        ("storage", "torch.FloatStorage", "3", "cpu", 12),
        ("storage", Name("torch.Size", None), "3", "cpu", 12),
        ("storage", FLOATS, 3.5, "cpu", 12),
        ("other", FLOATS, "3", "cpu", 12),
        ("storage", FLOATS, "3", "cpu"),
        "storage",
    ],
)
def test_identities_that_are_no_storage(identity: object) -> None:
    with pytest.raises(PickleError, match="no storage"):
        storage_of(identity)


def test_a_tensor_that_cannot_be_read_says_why() -> None:
    build: Any = NAMES["torch._utils._rebuild_sparse_tensor"]
    assert build(1, 2) == StoredTensor("", (), (), 0, None, problem="it is sparse")
