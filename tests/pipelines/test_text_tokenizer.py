"""The tokenizer of a pipeline around any tokenizer: bounds, tokens that end, templates, arguments of requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.interfaces import RequestID, SamplingParams, TextGenerationRequest
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.core import InputError, TextContext
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.tokenization import tokenizer as module
from max.pipelines.tokenization.tokenizer import TextTokenizer, max_tokens_to_generate

BEGIN = 1000
"""The token before a text with special tokens."""


@dataclass
class Characters:
    """A token for each character; those of a family that drops the space before the first word."""

    eos_token_id: int | None = 7
    model_max_length: int | None = None
    chat_template: str | None = None
    decoded: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return 2000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN] * add_special_tokens + [ord(character) for character in text]

    def decode(self, ids: Any, **options: Any) -> str:
        self.decoded.append(ids)
        text = "".join(chr(i) for i in ids if i != BEGIN or not options.get("skip_special_tokens"))
        return text.removeprefix(" ")

    def apply_chat_template(self, messages: list[Any], tools: Any, **options: Any) -> str:
        self.options = {"tools": tools, **options}
        return "".join(str(message["content"]) for message in messages)


class Made:
    """A tokenizer around `Characters`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, delegate: Characters | None = None,
        config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.delegate = delegate or Characters()
        self.repos: list[tuple[Any, ...]] = []

        def tokenizer_of(repo: Any) -> Characters:
            self.repos.append(repo)
            return self.delegate

        monkeypatch.setattr(module, "HuggingFaceRepo", lambda *given: given)
        monkeypatch.setattr(module, "active_tokenizer", tokenizer_of)
        if config is not None:
            model = SimpleNamespace(
                huggingface_config=config,
                generation_keys=ConfigKeys(generation or {}, file="generation_config.json"),
            )
            options["pipeline_config"] = SimpleNamespace(model_config=model)
        self.own = TextTokenizer("models/m", **options)


def request(**given: Any) -> TextGenerationRequest:
    return TextGenerationRequest(request_id=RequestID("r"), model_name="m", **given)


def arguments(own: TextTokenizer, **given: Any) -> dict[str, Any]:
    return asyncio.run(own.new_arguments(request(**given)))


def test_the_files_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    assert made.repos == [("models/m", "main", False)] and made.own.model_path == "models/m"
    made = Made(monkeypatch, revision="v2", trust_remote_code=True)
    assert made.repos == [("models/m", "v2", True)]
    assert not made.own.expects_content_wrapping


@pytest.mark.parametrize(
    ("own", "config", "generation", "eos", "all_eos"),
    [
        (7, None, None, 7, {7}),
        (None, None, None, -1, set()),
        (7, {"eos_token_id": 3}, {"eos_token_id": [5, 6]}, 7, {3, 5, 6, 7}),
        (None, {"text_config": {"eos_token_id": 4}}, {"eos_token_id": 2}, 2, {2, 4}),
        (0, {}, {}, 0, {0}),
    ],
)
def test_tokens_that_end_a_sequence(
    own: int | None, config: Any, generation: Any, eos: int, all_eos: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = Made(monkeypatch, Characters(own), config, generation)
    assert (made.own.eos, made.own.eos_token_ids) == (eos, all_eos)
    assert arguments(made.own, prompt="a")["eos_token_ids"] == all_eos


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (None, None),
        ({}, None),
        ({"vocab_size": 101}, 101),
        ({"vocab_size": "101"}, None),
        ({"vocab_size": True}, None),
        ({"vocab_size": 0}, None),
        ({"vocab_size": 1}, 1),
        ({"vocab_size": 101, "text_config": {"vocab_size": 102}}, 102),
        ({"vocab_size": 102, "text_config": {"vocab_size": 101}}, 102),
    ],
)
def test_tokens_that_the_model_lacks(
    config: Any, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the caller they are an error of the request, of the tokenizer one of the files."""
    own = Made(monkeypatch, config=config).own
    assert list(own.encode_now([])) == []
    last = 5000 if size is None else size - 1
    rest = "" if size is None else f" to {size - 1}"
    for tokens in ([last], [0, last, 0], [0], np.array([0, last])):
        assert list(own.encode_now(tokens)) == list(tokens)
        assert arguments(own, prompt=list(tokens))["tokens"] == list(tokens)
    bad = [[-1, 0], [0, -1]] + ([] if size is None else [[size], [0, size]])
    for tokens in bad:
        token = min(tokens) if min(tokens) < 0 else max(tokens)
        message = f"a token of the prompt is {token}; the model's tokens are 0{rest}$"
        for use in (own.encode_now, lambda prompt: arguments(own, prompt=prompt)):
            with pytest.raises(InputError) as refused:
                use(tokens)
            assert str(refused.value).splitlines()[0] == message.removesuffix("$")
    if size == 101:
        assert own.ids_now("d", special=False) == [100]
        with pytest.raises(ModelFilesError, match="tokenizer of models/m gives the token 101; the"):
            own.ids_now("e", special=False)
    if size is None:
        assert own.ids_now("e") == [BEGIN, 101]


@pytest.mark.parametrize("prompt", [[1.5], [[1, 2], [3]], [[1, 2]], ["a"], [None]])
def test_prompts_that_are_no_tokens(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected a text or a list of tokens"):
        Made(monkeypatch).own.encode_now(prompt)


def test_prompts_of_tokens_are_integers_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Made(monkeypatch).own
    for given in ([], [1, 2], np.array([1, 2], np.uint8)):
        tokens = own.encode_now(given)
        assert tokens.dtype == np.int64 and tokens.shape == (len(given),)


@pytest.mark.parametrize(("given", "own_bound"), [(4, None), (None, 4), (4, 9)])
def test_the_longest_prompt(
    given: int | None, own_bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Made(monkeypatch, Characters(model_max_length=own_bound), max_length=given).own
    assert own.max_length == 4
    assert len(own.encode_now("abc")) == len(own.encode_now("abcd", False)) == 4
    assert len(own.encode_now([1] * 4)) == 4
    for prompt in ("abcd", [1] * 5):
        with pytest.raises(InputError):
            own.encode_now(prompt)
        with pytest.raises(InputError):
            arguments(own, prompt=prompt)
    assert Made(monkeypatch).own.max_length is None


@pytest.mark.parametrize("size", [4096, 4097])
def test_long_texts_are_encoded_in_a_thread(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = Made(monkeypatch).own, list[Any]()

    async def run(function: Any, *given: Any) -> Any:
        calls.append(given)
        return function(*given)

    monkeypatch.setattr(module, "run_with_default_executor", run)
    text = "a" * size
    assert asyncio.run(own.encode_ids(text, False)) == [97] * size
    assert asyncio.run(own.encode(text)).tolist() == [BEGIN] + [97] * size
    assert calls == ([(text, False, None), (text, True)] if size > 4096 else [])
    assert len(asyncio.run(own.encode([5] * size))) == size and len(calls) == 2 * (size > 4096)


def test_a_thread_runs_a_function() -> None:
    found = asyncio.run(module.run_with_default_executor(lambda a, b: (a, b), 1, b=2))
    assert found == (1, 2)


def test_decoded_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    own, delegate = made.own, made.delegate
    plain = [97, 98]
    assert own.decode_now(plain) == "ab" and delegate.decoded[-1] is plain
    for tokens in (np.array([97, 98]), (97, 98), [np.int64(97), np.int64(98)], [np.int64(97), 98]):
        assert own.decode_now(tokens) == "ab"
        assert [type(token) for token in delegate.decoded[-1]] == [int, int]
    assert own.decode_now([]) == "" and own.decode_now(np.int64(97)) == "a"  # type: ignore[arg-type]
    assert own.decode_now([BEGIN, 97], skip_special_tokens=True) == "a"
    assert asyncio.run(own.decode(np.array([BEGIN, 97]), skip_special_tokens=True)) == "a"
    assert own.decoder(skip_special_tokens=True)([BEGIN, 97]) == "a"
    assert own.decode_now([32]) == "" and own.decode_now([32, 97]) == "a"
    fixed = Made(monkeypatch, enable_llama_whitespace_fix=True).own
    assert fixed.decode_now([32]) == " " and fixed.decode_now([32, 97]) == "a"
    assert fixed.decoder(skip_special_tokens=True)([32]) == " "
    assert fixed.decode_now([97]) == "a" and fixed.decode_now([]) == ""


@pytest.mark.parametrize(
    ("template", "tools", "chosen"),
    [
        (None, None, None),
        ("own", None, "own"),
        ("own", [{}], "own"),
        ({"default": "a", "tool_use": "b"}, None, "a"),
        ({"default": "a", "tool_use": "b"}, [{}], "b"),
    ],
)
def test_templates(
    template: Any, tools: Any, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, chat_template=template)
    assert made.own.has_chat_template is (template is not None)
    parts = [{"type": "text", "text": "x"}, {"type": "text", "content": "y"}]
    messages: list[Any] = [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]
    assert made.own.apply_chat_template(messages, tools, {"k": 1}) == "ax\ny"
    expected = {"tools": tools, "add_generation_prompt": True, "k": 1}
    assert made.delegate.options == expected | ({"chat_template": chosen} if chosen else {})
    made.own.apply_chat_template(messages, tools, {"add_generation_prompt": False})
    assert made.delegate.options["add_generation_prompt"] is False
    messages[0]["content"] = [parts[0], {"type": "image"}, {"type": "audio"}]
    with pytest.raises(InputError, match="a part of type 'image'"):
        made.own.apply_chat_template(messages, tools)
    assert Made(monkeypatch, Characters(chat_template="t")).own.has_chat_template


def test_new_contexts_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TextContext] = []
    own = Made(monkeypatch, context_validators=[seen.append], max_length=20).own
    assert own.validates_contexts and not Made(monkeypatch).own.validates_contexts
    context = asyncio.run(own.new_context(request(prompt="ab")))
    assert seen == [context] and list(context.tokens[:3]) == [BEGIN, 97, 98]
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    for prompt in ({"messages": messages}, {"prompt": [97, 98]}):
        # templates add special tokens themselves
        assert list(asyncio.run(own.new_context(request(**prompt))).tokens[:2]) == [97, 98]
        tokens = arguments(own, **prompt)["tokens"]
        assert tokens == [97, 98] and type(tokens) is list
    assert arguments(own, prompt="ab")["tokens"] == [BEGIN, 97, 98]
    with pytest.raises(InputError, match="neither a prompt nor messages"):
        asyncio.run(own.new_context(request()))


def test_arguments_of_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Made(monkeypatch, max_length=20).own
    plain = arguments(own, prompt=[1, 2])
    assert plain["max_length"] == 20 and plain["eos_sequences"] == []
    assert plain["json_schema"] is None and plain["reasoning_budget"] is None
    params = SamplingParams(
        max_new_tokens=3, stop=["yz"], stop_token_ids=[0, 1999], ignore_eos=True
    )
    told = arguments(
        own, prompt=[1, 2], stop="x", sampling_params=params, logprobs=2, echo=True, target_endpoint="e"
    )  # fmt: skip
    assert told["max_length"] == 5 and told["ignore_eos"] and not plain["ignore_eos"]
    assert told["eos_sequences"] == [[0], [1999], [120], [121, 122]]
    assert (told["log_probabilities"], told["log_probabilities_echo"]) == (2, True)
    assert (plain["log_probabilities"], plain["log_probabilities_echo"]) == (0, False)
    assert told["sampling_params"] is params and told["request_id"] == RequestID("r")
    assert (told["model_name"], told["target_endpoint"]) == ("m", "e")
    assert arguments(own, prompt=[1], stop=["x", "yz"])["eos_sequences"] == [[120], [121, 122]]
    # no room is left to the context, whose error names the bound
    assert arguments(own, prompt=[1] * 20)["max_length"] == 20
    unbounded = Made(monkeypatch).own
    bad = {"type": "json_schema", "json_schema": {"type": "no type"}}
    with pytest.raises(InputError):
        arguments(own, prompt=[1], response_format=bad)
    assert arguments(unbounded, prompt=[1, 2])["max_length"] == 2
    assert arguments(unbounded, prompt=[1, 2], sampling_params=params)["max_length"] == 5
    with pytest.raises(
        InputError, match="stop_token_ids has 2000; the model's tokens are 0 to 1999"
    ):
        arguments(own, prompt=[1], sampling_params=SamplingParams(stop_token_ids=[5, 2000]))


@pytest.mark.parametrize(
    ("response", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"type": "integer"}}, {"type": "integer"}),
        ({"type": "json_object", "json_schema": {}}, {"type": "object"}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
def test_schemas(response: Any, schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Made(monkeypatch, max_length=20).own
    found = arguments(own, prompt=[1], response_format=response)["json_schema"]
    assert found == (None if schema is None else json.dumps(schema))


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("a<think>", True),
        ("a<think>\n\n\n\n", True),
        ("a<think>\n\n\n\n\n", False),
        ("a<think>b", False),
        ("ab", False),
    ],
)
def test_reasoning_with_a_temperature(
    prompt: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Made(monkeypatch, Characters(chat_template="{% <think> %}"), max_length=99).own
    params = SamplingParams(thinking_temperature=0.5)
    budget = arguments(own, prompt=prompt, sampling_params=params)["reasoning_budget"]
    assert (budget.begin, budget.end, budget.temperature) == ("<think>", "</think>", 0.5)
    assert (budget.begun, budget.begin_length) == (begun, len("<think>"))
    assert budget.closing_tokens == tuple(map(ord, "</think>"))
    assert arguments(own, prompt=prompt)["reasoning_budget"] is None
    schema = {"type": "json_object"}
    told = arguments(own, prompt=prompt, sampling_params=params, response_format=schema)
    assert told["reasoning_budget"] is None
    for template in (None, "plain"):
        other = Made(monkeypatch, Characters(chat_template=template), max_length=99).own
        assert arguments(other, prompt=prompt, sampling_params=params)["reasoning_budget"] is None
    given = Made(monkeypatch, chat_template="<think>", max_length=99).own
    assert arguments(given, prompt=prompt, sampling_params=params)["reasoning_budget"] == budget


@pytest.mark.parametrize(
    ("given", "room"),
    [((3, None), None), ((3, None, 5), 5), ((3, 10), 7), ((3, 10, 5), 5), ((3, 10, 9), 7), ((12, 10), 0)],
)  # fmt: skip
def test_room(given: tuple[Any, ...], room: int | None) -> None:
    assert max_tokens_to_generate(*given) == room


def test_texts_that_cannot_fit_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Path(__file__).parents[2] / "models" / "tiny-chat"
    own = TextTokenizer(str(tiny), max_length=4)
    monkeypatch.setattr(own.delegate, "encode", None)
    with pytest.raises(InputError, match="at least"):
        own.ids_now("word " * 1000)


def test_tokenizers_of_transformers_render_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Characters):
        pass

    Theirs.__module__ = "transformers.any"
    made = Made(monkeypatch, Theirs())
    calls: list[Any] = []
    monkeypatch.setattr(
        module, "render_for_transformers", lambda *given: calls.append(given) or "t"
    )
    messages: list[Any] = [{"role": "user", "content": None}]
    assert made.own.apply_chat_template(messages, None) == "t"
    assert calls == [(made.delegate, messages, None, {"add_generation_prompt": True})]


def test_texts_of_messages() -> None:
    assert module.text_of_content(None) is None and module.text_of_content("a") == "a"
    with pytest.raises(InputError):
        module.text_of_content("\ud800")
