"""Fields of other servers that change an answer and that this server lacks: they are refused, not ignored."""

from __future__ import annotations

from max.serve.errors import ApiError
from max.serve.openai.fields import SamplingFields, StrictBody
from max.serve.openai.reasoning_fields import ReasoningFields
from max.serve.openai.structure import GrammarFields

_BEAMS = "answers are sampled or greedy, without beam search"
_PROCESSORS = "requests bring no code; give logit_bias or a grammar"
_SAMPLER = "there is no such sampler; give temperature, top_k, top_p or min_p"
_ELSEWHERE = "this route has no such field"
_TOKENS = "give return_token_ids to /v1/chat/completions or /v1/completions"
_OF_COMPLETIONS = "/v1/chat/completions and /v1/completions have it"
_TEXT = "the model takes text"
_FETCHES = "this server fetches nothing"
_BUDGET = "give thinking_token_budget"
_REASONING = "reasoning has a field of its own; give include_reasoning false to leave it out"

_PEER_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    # vLLM's
    "allowed_token_ids": ((), "give logit_bias, or a grammar"),
    "bad_words": ((), "texts are not kept out of answers; give logit_bias for tokens"),
    "best_of": ((1,), "give n"),
    "chat_template": ((), "the server has one, by --chat-template"),
    "documents": ((), "this route has no documents"),
    "add_generation_prompt": ((True,), _ELSEWHERE),
    "chat_template_kwargs": ((), "/v1/chat/completions has it"),
    "continue_final_message": ((False,), _ELSEWHERE),
    "echo": ((False,), "the answer does not repeat the conversation; /v1/completions has it"),
    "enable_response_messages": ((False,), _TOKENS),
    "guided_whitespace_pattern": ((), "white space of JSON has one style"),
    "kv_transfer_params": ((), "requests do not move caches"),
    "length_penalty": ((1,), _BEAMS),
    "logits_processors": ((), _PROCESSORS),
    "logprob_token_ids": ((), "give top_logprobs"),
    "previous_input_messages": ((), "give them in input"),
    "prompt_embeds": ((), "prompts are texts or tokens"),
    "repetition_detection": ((), "give repetition_penalty, or max_tokens"),
    "return_routed_experts": ((False,), "answers are text"),
    "return_token_ids": ((False,), _OF_COMPLETIONS),
    "return_tokens_as_token_ids": ((False,), _OF_COMPLETIONS),
    "skip_special_tokens": ((True,), "special tokens are not part of a text"),
    "structural_tag": ((), "give tools, or a grammar"),
    "tokenization_kwargs": ((), "texts are encoded as the model's tokenizer does; give tokens"),
    "truncation_side": (("left",), "the last tokens are kept"),
    "use_beam_search": ((False,), _BEAMS),
    "vllm_xargs": ((), _PROCESSORS),
    # SGLang's
    "audio_data": ((), _TEXT),
    "custom_logit_processor": ((), _PROCESSORS),
    "custom_params": ((), _PROCESSORS),
    "extra_key": ((), "give cache_salt"),
    "image_data": ((), _TEXT),
    "input_embeds": ((), "prompts are texts or tokens"),
    "input_ids": ((), "/v1/completions takes tokens, as prompt"),
    "lora_path": ((), "give lora"),
    "no_stop_trim": ((False,), "give include_stop_str_in_output"),
    "return_hidden_states": ((False,), "answers are text"),
    "return_logprob": ((False,), "give logprobs"),
    "return_prompt_token_ids": ((False,), _TOKENS),
    "sampling_params": ((), "give its fields beside the others"),
    "session_params": ((), "conversations are not stored; send the earlier messages"),
    "task": ((), "the chat template has no tasks"),
    "video_data": ((), _TEXT),
    "separate_reasoning": ((True,), _REASONING),
    "stop_regex": ((), "give stop, or a grammar"),
    # llama.cpp's and Ollama's
    "_debug_render_only": ((False,), "/apply-template gives the text of a conversation"),
    "adaptive_target": ((-1,), _SAMPLER),
    "debug_render_only": ((False,), "/apply-template gives the text of a conversation"),
    "dry_multiplier": ((0,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "generation_prompt": ((), "the model's own chat template is applied"),
    "grammar_lazy": ((False,), "give tools, or a grammar of the whole answer"),
    "images": ((), _TEXT),
    "min_keep": ((0,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "multimodal_data": ((), _TEXT),
    "n_cmpl": ((1,), "give n"),
    "n_indent": ((0,), "give a grammar"),
    "num_predict": ((-1,), "give max_tokens"),
    "n_predict": ((-1,), "give max_tokens"),
    "n_probs": ((0,), "give logprobs and top_logprobs"),
    "parse_tool_calls": ((True,), "the server's --tool-parser none leaves calls in the text"),
    "post_sampling_probs": ((False,), "log-probabilities are those before sampling"),
    "preserved_tokens": ((), "special tokens are not part of a text"),
    "reasoning_budget": ((-1,), _BUDGET),
    "reasoning_budget_message": ((), "reasoning is ended by its mark"),
    "reasoning_budget_tokens": ((-1,), _BUDGET),
    "reasoning_format": (("auto", "deepseek"), _REASONING),
    "repeat_penalty": ((1,), "give repetition_penalty"),
    "response_fields": ((), "answers have all of their fields"),
    "return_tokens": ((False,), _TOKENS),
    "samplers": ((), "the order of samplers is fixed: temperature, top_k, top_p, min_p"),
    "system_prompt": ((), "give a message of the role system"),
    "t_max_predict_ms": ((0, -1), "give max_tokens"),
    "template": ((), "the model's own chat template is applied"),
    "tfs_z": ((1,), _SAMPLER),
    "thinking_budget_tokens": ((-1,), _BUDGET),
    "thinking_forced_open": ((False,), _REASONING),
    "top_a": ((0,), _SAMPLER),
    "top_n_sigma": ((-1, 0), _SAMPLER),
    "typ_p": ((1, 0), _SAMPLER),
    "typical_p": ((1, 0), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    # transformers'
    "bad_words_ids": ((), "give logit_bias"),
    "begin_suppress_tokens": ((), "give logit_bias"),
    "diversity_penalty": ((0,), _BEAMS),
    "do_sample": ((True,), "give temperature 0 for greedy answers"),
    "eos_token_id": ((), "give stop_token_ids"),
    "epsilon_cutoff": ((0,), _SAMPLER),
    "eta_cutoff": ((0,), _SAMPLER),
    "force_words_ids": ((), "give a grammar"),
    "guidance_scale": ((1,), _SAMPLER),
    "max_length": ((), "give max_tokens"),
    "max_new_tokens": ((), "give max_tokens"),
    "max_time": ((), "give max_tokens"),
    "min_new_tokens": ((0,), "give min_tokens"),
    "num_beam_groups": ((1,), _BEAMS),
    "penalty_alpha": ((0,), _SAMPLER),
    "no_repeat_ngram_size": ((0,), "give frequency_penalty or repetition_penalty"),
    "num_beams": ((1,), _BEAMS),
    "suppress_tokens": ((), "give logit_bias"),
    # of Mistral's, Fireworks', Qwen's and OpenRouter's servers
    "context_length_exceeded_behavior": (("error",), "give truncate_prompt_tokens"),
    "enable_search": ((False,), _FETCHES),
    "plugins": ((), _FETCHES),
    "prompt_mode": ((), "give reasoning_effort or enable_thinking"),
    "prompt_truncate_len": ((), "give truncate_prompt_tokens"),
    "random_seed": ((), "give seed"),
    "safe_prompt": ((False,), "give a message of the role system"),
    # of other routes
    "context_management": (
        (),
        "this server takes nothing out of a conversation; see /v1/responses/compact",
    ),
    "conversation": ((), "conversations are not stored; send the earlier messages"),
    "format": ((), "give response_format"),
    "function_call": ((), "this route has no tools"),
    "functions": ((), "this route has no tools"),
    "input": ((), "give messages, or a prompt where the route has one"),
    "instructions": ((), "give a message of the role system"),
    "logprobs": ((False, 0), _ELSEWHERE),
    "max_completion_tokens": ((), "give max_tokens"),
    "max_output_tokens": ((), "give max_tokens"),
    "max_tokens_to_sample": ((), "give max_tokens"),
    "messages": ((), "give input, or a prompt"),
    "moderation": ((), "answers are not moderated"),
    "options": ((), "give its fields beside the others"),
    "output_config": ((), _ELSEWHERE),
    "previous_response_id": ((), "/v1/responses keeps responses; send the earlier messages"),
    "prompt": ((), "give messages, or input where the route has it"),
    "raw": ((False,), _ELSEWHERE),
    "response_format": (({"type": "text"},), _ELSEWHERE),
    "stop_sequences": ((), "give stop"),
    "suffix": ((), "/v1/completions and /api/generate have it"),
    "system": ((), "give a message of the role system"),
    "text": ((), "give response_format"),
    "think": ((), "give reasoning_effort or enable_thinking"),
    "tool_choice": (("auto",), _ELSEWHERE),
    "tools": ((), "this route has no tools"),
    "top_logprobs": ((0,), _ELSEWHERE),
    # Anthropic's
    "container": ((), "this server runs no code"),
    "mcp_servers": ((), "this server calls no MCP servers; give tools, and call them"),
}
"""The fields, each with the values that change nothing, and what to do instead."""

_EMPTY = (None, "", [], {})
_HINTS = frozenset(("model", "user", "priority", "stream", "stream_options"))
_CHOICES = (
    SamplingFields.model_fields.keys()
    | GrammarFields.model_fields.keys()
    | ReasoningFields.model_fields.keys()
) - _HINTS
"""Fields that choose tokens: a route that lacks one of them does not ignore it."""


def refuse(body: StrictBody, fields: dict[str, str], where: str = "") -> None:
    """Refuses fields of features that this server lacks.

    Args:
        body: The request, or a part of it.
        fields: Fields of the body, and why they are refused.
        where: The name of the part with a point after it.

    Raises:
        ApiError: One is set, to a value that changes something.
    """
    for name, why in fields.items():
        if getattr(body, name) not in (None, []):
            raise _error(where + name, why)
    for name, value in (body.model_extra or {}).items():
        # clients send fields that they do not set
        if value in _EMPTY:
            continue
        neutral, why = _PEER_FIELDS.get(name, ((), ""))
        # `in` compares by equality, so 1 is 1.0, and False is 0
        if why and value not in neutral:
            raise _error(where + name, why)
        # a field of another route of this server
        if not why and name in _CHOICES:
            raise _error(where + name, _ELSEWHERE)


def _error(name: str, why: str) -> ApiError:
    return ApiError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
