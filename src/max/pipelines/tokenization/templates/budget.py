"""The work and memory that one rendering of a template may take.

A template comes with a model's files, and its loops, repetitions and widths may ask for any amount of work. The
compiled code counts steps (about a microsecond each) in loops, macros and calls, and the bytes of each value that it
makes; operations whose result may be far greater than their operands are counted before they run. Both bounds grow with
the conversation, so that long conversations render.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MappingView
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

__all__ = ["BYTES", "MOST_INTEGER_BITS", "STEPS", "Budget", "TemplateLimitError"]

STEPS, BYTES = 500_000, 64 << 20
"""The steps of a rendering, and the bytes of all its values and output, without those for the conversation."""
_STEPS_PER_VALUE, _BYTES_PER_BYTE = 1000, 128
"""What each value and byte of the conversation adds: published templates take up to 40 and 20, but some go through all
messages for each message."""
_MANY_STEPS, _MANY_BYTES = 3_000_000, 512 << 20
_FURTHER_STEPS_PER_VALUE, _FURTHER_BYTES_PER_BYTE = 100, 16
"""What they add in long conversations, beyond many steps and bytes."""
MOST_INTEGER_BITS = 1 << 14
"""The longest integer; Python prints integers up to 4,300 digits."""
_SCAN = 1024
"""The bytes that are compared or searched in one step."""
_CONTAINERS = (list, tuple, dict, set, frozenset, range, MappingView)
_PLAIN = frozenset({int, float, bool, type(None)})


class TemplateLimitError(TemplateRuntimeError):
    """A template takes more work or memory than a rendering may."""


class Budget:
    """The steps and bytes that are left to a rendering.

    Args:
        values: The number of values in the conversation.
        size: Their bytes.
        inputs: The numbers (`id`) of the lists in it, which a template must not change.
    """

    __slots__ = ("bytes", "first_bytes", "first_steps", "inputs", "steps")

    def __init__(self, values: int, size: int, inputs: Collection[int] = ()) -> None:
        self.inputs = inputs
        self.steps = self.first_steps = min(
            STEPS + _STEPS_PER_VALUE * values, _MANY_STEPS + _FURTHER_STEPS_PER_VALUE * values
        )
        self.bytes = self.first_bytes = min(
            BYTES + _BYTES_PER_BYTE * size, _MANY_BYTES + _FURTHER_BYTES_PER_BYTE * size
        )

    def step(self, count: int = 1) -> bool:
        """Spends steps.

        Args:
            count: Their number.

        Returns:
            True, for use within a condition.

        Raises:
            TemplateLimitError: None are left.
        """
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(
                f"it takes more than {self.first_steps} steps; a template may loop, call and compare no more"
            )
        return True

    def spend(self, count: int) -> None:
        """Spends bytes.

        Args:
            count: Their number.

        Raises:
            TemplateLimitError: The budget has fewer left.
        """
        self.bytes -= count
        if self.bytes < 0:
            raise TemplateLimitError(
                f"its values and output take more than {self.first_bytes} bytes; a template may make no more"
            )

    def scan(self, size: int) -> None:
        """Spends the steps that reading a text takes.

        Args:
            size: Its length.
        """
        if size >= _SCAN:
            self.step(size // _SCAN)

    def weigh(self, value: Any, per_level: int = 0) -> int:
        """Walks through a value and all that it contains, and spends steps for that.

        A small value may contain the same list a billion times: operations on the whole of it weigh it first.

        Args:
            value: The value.
            per_level: Bytes that the operation adds for each element at each level of nesting.

        Returns:
            The bytes of its texts and elements.
        """
        kind = type(value)
        if kind is str:
            self.scan(len(value))
            return len(value)
        if kind in _PLAIN:
            return 24
        size, level, depth = 0, [value], 0
        while level:
            # a step pays for eight values
            self.step(1 + len(level) // 8)
            size += len(level) * (8 + per_level * depth)
            # raises before the walk goes on
            if size > self.bytes:
                self.spend(size)
            below: list[Any] = []
            # checked before all values of a level are collected
            room = 8 * self.steps + 8
            for each in level:
                kind = type(each)
                if kind is str:
                    size += len(each)
                elif kind in _PLAIN:
                    size += 16
                elif kind is dict:
                    below.extend(each)
                    below.extend(each.values())
                elif kind is list:
                    below.extend(each)
                elif isinstance(each, str):
                    size += len(each)
                elif isinstance(each, (bytes, range)):
                    size += 8 * len(each)
                elif _is_container(each):
                    below.extend(each)
                elif isinstance(each, Namespace):
                    below.append(object.__getattribute__(each, "_Namespace__attrs"))
                if len(below) > room:
                    self.step(len(below) // 8)
            self.scan(size)
            level, depth = below, depth + 1
        return size

    def spend_value(self, value: Any) -> Any:
        """Spends the bytes of a new value, and counts the elements of an iterator as they are read.

        Args:
            value: The value.

        Returns:
            The value, or the iterator that counts.
        """
        kind = type(value)
        if kind is str:
            # one wide character gives all characters of a text more bytes
            self.spend(len(value) if value.isascii() else value.__sizeof__())
        elif kind in _PLAIN and kind is not int:
            return value
        elif kind is list or kind is tuple or kind is dict:
            self.spend(value.__sizeof__())
        elif kind is int:
            if value.bit_length() > MOST_INTEGER_BITS:
                raise TemplateLimitError(
                    f"an integer has {value.bit_length()} bits; a template's have up to {MOST_INTEGER_BITS}"
                )
        elif isinstance(value, (str, bytes)):
            self.spend(value.__sizeof__())
        elif isinstance(value, Iterator):
            return self.counted_elements(value)
        return value

    def counted_elements(self, values: Iterable[Any]) -> Iterator[Any]:
        """Spends a step for each element.

        Args:
            values: The elements.
        """
        for value in values:
            self.step()
            yield value

    # what compiled templates call --------------------------------------------------------------

    def text(self, value: object) -> str:
        """A value as text of the output."""
        if type(value) is not str:
            if type(value) not in _PLAIN and not isinstance(value, str):
                self._text_bytes(value)
            value = str(value)
        self.spend(len(value))
        return value

    def output_text(self, convert: Callable[[Any], Any], value: object) -> Any:
        """A value as text of the output where HTML is escaped.

        Args:
            convert: ``escape`` or ``str``.
            value: The value.
        """
        self.spend(6 * self._text_bytes(value))
        return convert(value)

    def concatenate(self, join: Callable[[Any], Any], values: tuple[Any, ...]) -> Any:
        """The values of ``a ~ b``.

        Args:
            join: The function of jinja that joins them.
            values: The values.
        """
        texts = True
        size = 0
        for value in values:
            if type(value) is str:
                size += len(value)
            else:
                texts = False
        if not texts:
            size = 6 * sum(map(self._text_bytes, values))
        self.spend(size)
        return join(values)

    def _text_bytes(self, value: object) -> int:
        """The bytes that the text of a value takes at most."""
        size = self.weigh(value)
        if isinstance(value, str):
            return size
        if 4 * size > self.bytes:  # repr() may write a character as an escape sequence
            self.spend(4 * size)
        return 4 * size

    def operand(self, value: object) -> Any:
        """An operand of a comparison.

        Args:
            value: The operand.
        """
        if type(value) not in _PLAIN:
            self.weigh(value)
        return value

    def key(self, value: object) -> Any:
        """A key of a dict or list.

        Args:
            value: The key.
        """
        if type(value) is tuple:
            self.weigh(value)
        return value

    def contains(self, value: Any, container: Any) -> bool:
        """``value in container``."""
        # a dict hashes the key alone
        if type(container) is dict:
            return self.key(value) in container
        if isinstance(container, str):
            self.scan(len(container))
        elif type(value) is str or type(value) in _PLAIN:
            if _is_container(container):
                self.step(1 + len(container) // 16)
        else:
            self.weigh(value)
            self.weigh(container)
        return value in container

    def part(self, value: Any, where: slice) -> Any:
        """``value[start:stop:step]``.

        Args:
            value: The text or list.
            where: The part.
        """
        result = value[where]
        # a slice that leaves nothing out may be the value itself
        if result is not value:
            self.spend_value(result)
        return result


def _is_container(value: object) -> bool:
    """Whether a value is a container whose elements can be read any number of times."""
    return isinstance(value, _CONTAINERS)
