"""Fields by the names of other servers: each is obeyed or an error, on every API; a header is for hints only."""

from __future__ import annotations

import json
from typing import Any

import pytest

from max.serve.anthropic.schemas import MessagesBody
from max.serve.errors import ApiError
from max.serve.ollama.schemas import ChatBody, OllamaOptions
from max.serve.openai.chat import ChatCompletionRequest
from max.serve.openai.fields import StrictBody
from max.serve.openai.peer_fields import refuse
from max.serve.openai.responses.body import ResponsesBody

ASK = [{"role": "user", "content": "What is the capital of Norway?"}]
PROMPT = ASK[0]["content"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 12, "temperature": 0},
    "/v1/completions": {"prompt": "The capital of Norway is", "max_tokens": 12, "temperature": 0},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": {"messages": ASK, "max_tokens": 12, "temperature": 0},
    "/api/chat": {"messages": ASK, "stream": False, "options": {"temperature": 0}},
    "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"temperature": 0}},
}
CHAT, COMPLETIONS, RESPONSES, CLAUDE, OLLAMA, GENERATE = BODIES


def ask(http, path: str, more: dict[str, Any]):
    return http.post(path, json={"model": "tiny", **BODIES[path], **more})


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((path, {"use_beam_search": True}) for path in BODIES),
        *((path, {"typical_p": 0.5}) for path in BODIES),
        *((path, {"bad_words": ["Oslo"]}) for path in BODIES),
        (CHAT, {"echo": True}),
        (CHAT, {"allowed_token_ids": [5]}),
        (CHAT, {"documents": [{"text": "a"}]}),
        (CHAT, {"skip_special_tokens": False}),
        (CHAT, {"add_special_tokens": True}),
        (CHAT, {"chat_template": "{{ 1 }}"}),
        (CHAT, {"separate_reasoning": False}),
        (CHAT, {"max_new_tokens": 3}),
        (CHAT, {"structured_outputs": {"structural_tag": "x"}}),
        (CHAT, {"regex": "a", "guided_regex": "b"}),
        (COMPLETIONS, {"add_special_tokens": False}),
        (COMPLETIONS, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (COMPLETIONS, {"top_logprobs": 2}),
        (RESPONSES, {"stop": ["a"]}),
        (RESPONSES, {"n": 2}),
        (RESPONSES, {"include": ["everything"]}),
        (CLAUDE, {"mcp_servers": [{"url": "http://127.0.0.1"}]}),
        (CLAUDE, {"seed": 1}),
        (CLAUDE, {"tool_choice": {"type": "any"}}),
        (CLAUDE, {"thinking": {"type": "somewhat"}}),
        (OLLAMA, {"options": {"mirostat": 2}}),
        (OLLAMA, {"think": True}),
        (OLLAMA, {"temperature": 0.5}),
        (GENERATE, {"think": "low"}),
        (GENERATE, {"template": "{{ .Prompt }}"}),
    ],
)
def test_what_changes_an_answer_is_an_error(http, path: str, more: dict[str, Any]) -> None:
    answer = ask(http, path, more)
    assert answer.status_code == 400, answer.text
    name = "mirostat" if "options" in more else list(more)[-1]
    assert name in answer.text or "thinking" in answer.text
    assert "warning" not in answer.headers


CHANGING: dict[str, tuple[type[StrictBody], dict[str, Any]]] = {
    "vLLM's": (
        ChatCompletionRequest,
        {
            "guided_whitespace_pattern": "\n", "logprob_token_ids": [5], "prompt_embeds": "x",
            "repetition_detection": {"max_pattern_size": 3}, "return_routed_experts": True,
            "tokenization_kwargs": {"a": 1}, "truncation_side": "right", "input": "x", "prompt": "x",
        },
    ),
    "SGLang's": (
        ChatCompletionRequest,
        {
            "audio_data": ["x"], "custom_params": {"a": 1}, "extra_key": "x", "image_data": ["x"],
            "input_embeds": [[0.5]], "input_ids": [1], "return_logprob": True, "return_prompt_token_ids": True,
            "sampling_params": {"n": 2}, "session_params": {"id": "x"}, "task": "x", "video_data": ["x"],
        },
    ),
    "llama.cpp's": (
        ChatCompletionRequest,
        {
            "adaptive_target": 0.5, "generation_prompt": "x", "grammar_lazy": True, "min_keep": 3,
            "multimodal_data": ["x"], "n_cmpl": 2, "n_indent": 4, "post_sampling_probs": True,
            "preserved_tokens": ["x"], "reasoning_budget_message": "x", "reasoning_budget_tokens": 3,
            "response_fields": ["x"], "system_prompt": "x", "t_max_predict_ms": 5, "thinking_budget_tokens": 3,
            "thinking_forced_open": True, "num_predict": 2,
        },
    ),
    "others'": (
        ChatCompletionRequest,
        {
            "context_length_exceeded_behavior": "truncate", "enable_search": True, "eos_token_id": 5,
            "images": ["x"], "max_length": 5, "max_time": 1.5, "min_new_tokens": 5, "moderation": {"model": "x"},
            "plugins": [{"id": "web"}], "prompt_truncate_len": 5, "random_seed": 5, "safe_prompt": True,
        },
    ),
    "of Responses": (
        ResponsesBody,
        {
            "chat_template_kwargs": {"a": 1}, "continue_final_message": True, "messages": ASK,
            "previous_input_messages": ASK, "enable_response_messages": True, "add_generation_prompt": False,
        },
    ),
    "of Anthropic's": (MessagesBody, {"chat_template_kwargs": {"a": 1}, "max_tokens_to_sample": 5}),
    "of Ollama's": (ChatBody, {"_debug_render_only": True, "images": ["x"], "tool_choice": "required"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING)
def test_fields_that_change_an_answer_are_refused(kind: str) -> None:
    form, fields = CHANGING[kind]
    paths = {ChatCompletionRequest: CHAT, ResponsesBody: RESPONSES, MessagesBody: CLAUDE}
    body = {"model": "tiny", **BODIES[paths.get(form, OLLAMA)]}
    for name, value in fields.items():
        with pytest.raises(ApiError) as caught:
            refuse(form.model_validate({**body, name: value}), {})
        assert caught.value.param == name and caught.value.status == 400
        # an empty value is none
        refuse(form.model_validate({**body, name: None}), {})


def test_values_of_other_servers_that_are_their_defaults() -> None:
    neutral = {
        "truncation_side": "left", "return_logprob": False, "adaptive_target": -1, "grammar_lazy": False,
        "min_keep": 0, "n_cmpl": 1, "n_indent": 0, "num_predict": -1, "t_max_predict_ms": 0,
        "thinking_budget_tokens": -1, "thinking_forced_open": False, "min_new_tokens": 0, "enable_search": False,
        "context_length_exceeded_behavior": "error", "safe_prompt": False,
    }  # fmt: skip
    refuse(chat(**neutral), {})


NEUTRAL = {
    "use_beam_search": False, "length_penalty": 1.0, "allowed_token_ids": [], "skip_special_tokens": True,
    "return_token_ids": False, "typical_p": 1, "mirostat": 0, "tfs_z": 1.0, "dry_multiplier": 0.0,
    "xtc_probability": 0, "no_repeat_ngram_size": 0, "vllm_xargs": {}, "logits_processors": None,
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_taken(http, path: str) -> None:
    answer = ask(http, path, NEUTRAL)
    assert answer.status_code == 200 and "Oslo" in answer.text, answer.text
    assert "typical_p" in answer.headers["warning"] or "and " in answer.headers["warning"]


def test_unknown_options_of_ollama_are_named(http) -> None:
    options = {"temperature": 0, "low_vram": True, "typical_p": 1}
    answer = ask(http, OLLAMA, {"options": options})
    assert answer.status_code == 200
    assert (
        answer.headers["warning"]
        == '299 - "unknown fields are ignored: options.low_vram, options.typical_p"'
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_constraints_by_other_names(http, path: str) -> None:
    def text(**more: Any) -> str:
        (choice,) = ask(http, path, more).json()["choices"]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    assert text(regex="[xy]{3}").strip("xy") == ""
    assert text(ebnf='root ::= "yes" | "no"') in ("yes", "no")
    assert text(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert json.loads(text(json_schema={"enum": [1, 2]})) in (1, 2)
    assert json.loads(text(json_schema='{"enum": [1, 2]}')) in (1, 2)
    assert "Oslo" in text(regex="", ebnf="", grammar="", json_schema="")


def test_responses_have_the_samplers_of_chat(http) -> None:
    def text(**more: Any) -> str:
        body = {"temperature": 2.0, **more}
        return ask(http, RESPONSES, body).json()["output"][0]["content"][0]["text"]

    assert {text(seed=seed, top_k=1) for seed in range(3)} == {text(seed=9, top_k=1)}
    assert len({text(seed=seed) for seed in range(6)}) > 1
    assert text(seed=5) == text(seed=5)
    assert ask(http, RESPONSES, {"min_p": 2}).status_code == 400


def chat(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(**{"messages": ASK, **more})


@pytest.mark.parametrize(
    ("more", "thinks", "effort"),
    [
        ({}, None, None),
        ({"enable_thinking": False}, False, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"effort": "low"}}, None, "low"),
        ({"reasoning_effort": "none"}, False, "none"),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, None, "high"),
    ],
)
def test_reasoning_is_turned_on_and_off(
    more: dict[str, Any], thinks: bool | None, effort: str | None
) -> None:
    options = chat(**more).reasoning_options
    # templates of DeepSeek and Granite read `thinking`
    assert options.get("enable_thinking") is thinks and options.get("thinking") is thinks
    assert options.get("reasoning_effort") == effort


def test_limits_of_reasoning() -> None:
    assert chat().reasoning_limit is None and chat().shows_reasoning
    assert chat(thinking_token_budget=-1).reasoning_limit is None
    assert chat(thinking_token_budget=7).reasoning_limit == 7
    assert chat(thinking_budget=6).reasoning_limit == 6
    assert chat(thinking_budget=6, thinking_token_budget=7).reasoning_limit == 7
    assert chat(thinking={"type": "enabled", "budget_tokens": 8}).reasoning_limit == 8
    assert chat(thinking={"type": "disabled", "budget_tokens": 8}).reasoning_limit is None
    assert chat(reasoning={"max_tokens": 9}).reasoning_limit == 9
    assert not chat(reasoning={"exclude": True}).shows_reasoning
    assert not chat(include_reasoning=False).shows_reasoning


def test_a_part_is_named_with_its_place() -> None:
    class Part(StrictBody):
        known: str | None = None

    refuse(Part(known="x", length_penalty=1), {})
    with pytest.raises(ApiError) as caught:
        refuse(Part(known="x"), {"known": "it is not"}, "part.")
    assert caught.value.param == "part.known"
    with pytest.raises(ApiError) as caught:
        refuse(Part(length_penalty=1.5), {}, "part.")
    assert caught.value.param == "part.length_penalty"


TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
EDITS = [{"type": "compact_20260112"}]


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        (CHAT, {"reasoning_effort": "bogus"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        (CLAUDE, {"output_config": {"effort": "bogus"}}, "output_config.effort"),
        (CLAUDE, {"context_management": {"edits": EDITS}}, "context_management.edits.0"),
        (CLAUDE, {"thinking": {"type": "adaptive", "display": "bogus"}}, "thinking.display"),
        (CLAUDE, {"tools": [{**TOOL, "allowed_callers": ["code_execution"]}]}, "allowed_callers"),
        (CLAUDE, {"guided_regex": "a"}, "guided_regex"),
        (CLAUDE, {"stop": ["a"]}, "stop"),
        (CHAT, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (CHAT, {"previous_response_id": "resp-1"}, "previous_response_id"),
        *((path, {"format": "json"}, "format") for path in (CHAT, COMPLETIONS, RESPONSES, CLAUDE)),
        *((path, {"system": "Be brief."}, "system") for path in (CHAT, RESPONSES, OLLAMA)),
        *((path, {"response_format": {"type": "json_object"}}, "response_format") for path in (RESPONSES, CLAUDE)),
        (RESPONSES, {"guided_json": {"type": "object"}}, "guided_json"),
        (RESPONSES, {"reasoning_effort": "low"}, "reasoning_effort"),
        (COMPLETIONS, {"instructions": "Be brief."}, "instructions"),
        (GENERATE, {"raw": True, "system": "Be brief."}, "system"),
        (GENERATE, {"think": "bogus"}, "think"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_followed(http, path: str, more: dict[str, Any], named: str) -> None:
    answer = ask(http, path, more)
    assert answer.status_code == 400 and named in answer.text, answer.text


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"enable_thinking": True}, "thinking"),
        (CHAT, {"stream_options": {"shape": 1}, "stream": True}, "stream_options.shape"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (CLAUDE, {"output_config": {"task_budget": {"type": "tokens"}}}, "output_config.task_budget"),
        (CLAUDE, {"tools": [TOOL, {**TOOL, "name": "a", "defer_loading": True}]}, "tools.1.defer_loading"),
        (OLLAMA, {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
        (GENERATE, {"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ],
)  # fmt: skip
def test_hints_that_have_no_effect_are_named(
    http, path: str, more: dict[str, Any], named: str
) -> None:
    answer = ask(http, path, more)
    assert answer.status_code == 200, answer.text
    assert named in answer.headers["warning"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"enable_thinking": False}),
        (CLAUDE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (CLAUDE, {"tools": [{**TOOL, "allowed_callers": ["direct"]}]}),
        (CLAUDE, {"thinking": {"type": "disabled", "display": "omitted"}}),
        (OLLAMA, {"options": {"repeat_last_n": 0}}),
    ],
)  # fmt: skip
def test_what_is_followed_needs_no_warning(http, path: str, more: dict[str, Any]) -> None:
    answer = ask(http, path, more)
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers


def test_penalties_of_no_last_tokens_are_none() -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    for last, wanted in ((0, (1.0, 0.0, 0.0)), (-1, (1.5, 1.0, 0.5)), (64, (1.5, 1.0, 0.5))):
        made = OllamaOptions.model_validate({**penalties, "repeat_last_n": last}).sampling_input()
        found = (made.repetition_penalty, made.presence_penalty, made.frequency_penalty)
        assert found == wanted


@pytest.mark.parametrize("limit", [2**31, 2**63, 2**64, 10**30])
def test_limits_beyond_the_context_are_those_of_the_context(http, limit: int) -> None:
    names = {path: "max_tokens" for path in (CHAT, COMPLETIONS, CLAUDE)}
    names[RESPONSES] = "max_output_tokens"
    for path, name in names.items():
        answer = ask(http, path, {name: limit} | ({"stop": ["."]} if path == COMPLETIONS else {}))
        assert answer.status_code == 200 and "Oslo" in answer.text, answer.text
    for path in (OLLAMA, GENERATE):
        answer = ask(http, path, {"options": {"temperature": 0, "num_predict": limit}})
        assert answer.status_code == 200 and "Oslo" in answer.text, answer.text
    # without an end the context ends the answer
    length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"max_tokens": limit, "ignore_eos": True, "prompt": [5] * (length - 20)}
    usage = ask(http, COMPLETIONS, body).json()["usage"]
    assert usage["completion_tokens"] == 20


def test_unknown_fields_are_named_with_their_places() -> None:
    asked: dict[str, Any] = {"messages": ASK, "stream": True}
    assert ChatCompletionRequest.model_validate(asked).unknown_fields == ""
    asked |= {"zz": 1, "stream_options": {"include_usage": True, "q": 1}}
    assert ChatCompletionRequest.model_validate(asked).unknown_fields == "stream_options.q, zz"
