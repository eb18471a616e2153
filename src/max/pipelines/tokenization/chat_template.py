"""Chat templates: jinja2 in a sandbox, with the environment that templates on the Hugging Face hub expect.

Templates are written for the transformers package: blocks are trimmed, loops have ``break`` and
``continue``, ``tojson`` keeps non-ASCII text and escapes nothing, and ``raise_exception(message)``,
``strftime_now(format)`` and ``{% generation %}`` are defined. What a rendering may take is bounded
(:mod:`max.pipelines.tokenization.templates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

from max._host.process_caches import cached_results
from max.pipelines.core.exceptions import InputError
from max.pipelines.tokenization.templates import calls
from max.pipelines.tokenization.templates.budget import Budget, TemplateLimitError
from max.pipelines.tokenization.templates.code import (
    CountingCodeGenerator,
    CountingContext,
    add_steps,
)
from max.pipelines.tokenization.templates.filters import counting_filters, counting_tests, to_json

_MOST_CHARACTERS = 128 << 10
"""The longest template, five times as long as published ones; compiling it takes about a second."""
_MOST_ERROR_CHARACTERS = 1000
_MOST_PATTERN = 256
_DICT_ATTRIBUTES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_VALUES = frozenset(
    ("depth", "first", "index", "index0", "last", "length", "revindex", "revindex0")
)


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's text; it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses the block into its body.

        Args:
            parser: The parser, at the block's name.
        """
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """``namespace(...)`` that rejects names with a leading underscore."""

    # without a named `self`, so that a template may take this name
    def __init__(*args: object, **kwargs: object) -> None:
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template's namespace takes no name such as {name!r}")


class _Dict:
    """``dict(...)`` without the other attributes of the type."""

    def __call__(self, *args: object, **kwargs: object) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As ``dict.fromkeys``.

        Args:
            args: The keys, and a value.
        """
        return dict.fromkeys(*args)


@pass_context
def _to_json(
    context: CountingContext,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return to_json(context.budget, value, ensure_ascii, indent, separators, sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    if len(pattern) > _MOST_PATTERN:
        raise TemplateLimitError(
            f"strftime_now takes up to {_MOST_PATTERN} characters, not {len(pattern)}"
        )
    return datetime.now().strftime(pattern)


@pass_context
def _lipsum(
    context: CountingContext, n: int = 5, html: bool = True, min: int = 20, max: int = 100
) -> str:
    """Jinja's function, with its words counted."""
    # before the text is made
    context.budget.step(n * max)
    context.budget.spend(16 * n * max)
    return generate_lorem_ipsum(n, html, min, max)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with each operation counted in the budget of the rendering.

    A list that a template has made may be changed by `append` and `pop`, as templates of Kimi K2 do.
    """

    code_generator_class = CountingCodeGenerator
    context_class = CountingContext
    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "/", "//"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        add_steps(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator.

        Args:
            context: The rendering.
            operator: The operator.
            left: The left operand.
            right: The right operand.
        """
        budget = context.budget
        if operator == "+":
            return calls.add(budget, left, right)
        match operator:
            case "*":
                return calls.multiply(budget, left, right)
            case "**":
                return calls.power(budget, left, right)
            case "%":
                return calls.remainder(budget, left, right)
            case _:
                return self.binop_table[operator](left, right)

    def getattr(self, obj: object, attribute: str) -> Any:
        """The attribute of a value, as the sandbox gives it.

        Args:
            obj: The value.
            attribute: The attribute, or a key.
        """
        # most values are dicts and texts, of which the sandbox checks each attribute anew
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if type(obj) is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Whether a template may read an attribute.

        Args:
            obj: The value.
            attr: The attribute.
            value: The attribute's value.
        """
        changes_list = type(obj) is list and attr in calls.LIST_CHANGES
        return changes_list or super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: object) -> Any:
        """The replacement of a method ``format`` or ``format_map`` of a text; None for other values.

        Args:
            value: An attribute of a value.
        """
        name, owner = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        if isinstance(owner, str) and name in ("format", "format_map"):
            return calls.StringFormat(owner, name == "format_map")
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method.

        Args:
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        budget: Budget = __context.budget
        # their bodies count their own steps
        if isinstance(__obj, (Macro, BlockReference, LoopContext)):
            budget.step(1 + len(args))
            return __context.call(__obj, *args, **kwargs)
        # jinja's own arguments, which only the context reads
        given = {name: kwargs[name] for name in kwargs if name not in ("_loop_vars", "_block_vars")}
        if isinstance(__obj, calls.StringFormat):
            return __obj.formatted_text(__self, budget, args, given)
        args = calls.before_call(budget, __obj, args, given)
        return budget.spend_value(super().call(__context, __obj, *args, **kwargs))


@cached_results(1)
def _environment() -> _Environment:
    """The sandboxed environment of templates, with the filters and functions of transformers."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters.update(counting_filters(environment.filters))
    environment.filters["tojson"] = _to_json
    environment.tests.update(counting_tests(environment.tests))
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=_now,
        dict=_Dict(),
        namespace=_Namespace,
        lipsum=_lipsum,
    )
    return environment


@cached_results(16)
def compile_template(text: str) -> Template:
    """Compiles a template; the last ones are cached.

    Args:
        text: The template.

    Raises:
        InputError: It has a mistake; the message has the line.
    """
    remedy = "Mend it, or give another with --chat-template."
    if len(text) > _MOST_CHARACTERS:
        raise InputError(
            f"the chat template has {len(text)} characters; up to {_MOST_CHARACTERS} fit", remedy
        )
    try:
        template = _environment().from_string(text)
        # jinja copies them for each rendering; of its chain of two dicts by a loop in Python
        template.globals = dict(template.globals)
        return template
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise InputError(
            f"the chat template has a mistake{where}: {_shortened_message(error)}", remedy
        ) from error
    except (RecursionError, MemoryError) as error:
        raise InputError("the chat template is nested too deeply", remedy) from error
    except Exception as error:
        # of Python's compiler, which takes 20 loops within each other and integers of 4,300 digits, and of literals
        # that jinja computes, such as `{[]: 1}`
        raise InputError(
            f"the chat template cannot be compiled: {_shortened_message(error)}", remedy
        ) from error


def _shortened_message(error: BaseException) -> str:
    """The message of an error, which may have a text of the template of any length."""
    text = str(error)
    if len(text) <= _MOST_ERROR_CHARACTERS:
        return text
    return f"{text[:_MOST_ERROR_CHARACTERS]} …"


class _Sizes:
    """Copies a conversation to plain types, and counts its values and bytes."""

    def __init__(self) -> None:
        self.values = self.bytes = 0
        self.lists: set[int] = set()
        """The numbers of the copied lists, which the conversation keeps alive."""

    def plain(self, value: object) -> Any:
        """The value in plain types, so that a template has no methods to misuse."""
        self.values += 1
        kind = type(value)
        if kind is str:
            self.bytes += len(value)  # pyright: ignore[reportArgumentType]
            return value
        if value is None or kind is int or kind is float or kind is bool:
            return value
        if kind is dict or isinstance(value, Mapping):
            copy: dict[Any, Any] = {}
            for key, item in cast("Mapping[Any, Any]", value).items():
                # most of both are texts, for which no call is made
                if type(key) is str:
                    self.values += 1
                    self.bytes += len(key)
                else:
                    key = self.plain(key)
                if type(item) is str:
                    self.values += 1
                    self.bytes += len(item)
                    copy[key] = item
                else:
                    copy[key] = self.plain(item)
            return copy
        if isinstance(value, (list, tuple)):
            items = [self.plain(item) for item in cast("list[Any]", value)]
            self.lists.add(id(items))
            return items
        if isinstance(value, str):
            return self.plain(str(value))
        for number in (int, float):
            if isinstance(value, number):
                return number(value)
        return f"<{type(value).__name__}>"


def render_chat(
    template: str,
    messages: Sequence[object],
    *,
    tools: Sequence[object] | None = None,
    variables: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Formats a conversation with a template.

    Args:
        template: The model's template.
        messages: The conversation.
        tools: The functions that the model may call.
        variables: More variables, for example ``bos_token``.
        add_generation_prompt: Whether the text ends where the assistant's turn begins.

    Raises:
        InputError: The template has a mistake, or rejects the conversation.
    """
    compiled = compile_template(template)
    remedy = "Check the order of the roles and the messages' fields."
    sizes = _Sizes()
    try:
        values = {
            "tools": None if tools is None else sizes.plain(tools),
            "documents": None,
            **sizes.plain(dict(variables or {})),
            # after the variables, so that none of them replaces the conversation
            "messages": sizes.plain(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        context: Any = compiled.new_context(values)
        context.budget = Budget(sizes.values, sizes.bytes, sizes.lists)
        return "".join(compiled.root_render_func(context))
    except TemplateLimitError as error:
        raise InputError(
            f"the chat template takes too much: {_shortened_message(error)}",
            "Check its loops and repetitions, or give another with --chat-template.",
        ) from error
    except (RecursionError, MemoryError) as error:
        what = (
            "recurses too deeply" if isinstance(error, RecursionError) else "takes too much memory"
        )
        raise InputError(f"the chat template {what}", remedy) from error
    except Exception as error:  # filters and methods raise any class, AssertionError among them
        raise InputError(
            f"the chat template refuses the conversation: {_shortened_message(error)}", remedy
        ) from error
