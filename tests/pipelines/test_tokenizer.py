"""The tokenizer against that of transformers."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import RequestID, SamplingParams, TextGenerationRequest
from max.pipelines.core import InputError
from max.pipelines.lib.hf_utils import HuggingFaceRepo
from max.pipelines.lib.tokenizer import TextTokenizer, max_tokens_to_generate
from max.pipelines.tokenization.hf_tokenizer import HFTokenizer, load_tokenizer
from max.pipelines.tokenization.text_stream import StopStrings, TextStream

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Wétter <b>&</b> "wind"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHATS = [
    [{"role": "user", "content": "What is the capital of Norway?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi\n\nthere  "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
        {"role": "tool", "content": '{"t": 3}'},
        {"role": "user", "content": "日本語 🙂"},
    ],
]


@pytest.fixture(scope="module")
def ours() -> HFTokenizer:
    return load_tokenizer(HuggingFaceRepo(str(TINY)))


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), special=st.booleans())
def test_encode_and_decode_as_transformers(ours, theirs, text, special):
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_template_as_transformers(ours, theirs, chat, tools, prompt):
    expected = theirs.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert ours.apply_chat_template(chat, tools=tools, add_generation_prompt=prompt) == expected


TEMPLATES = {
    "loop": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m['content'] | trim }}"
    "{% if loop.last %}{% break %}{% endif %}|{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ unknown }}|",
    "options": "{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "dict": "{{ dict(a=1) }}{{ 'x' ~ 3 }}{{ messages[-1]['content'][:2] }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_may_use_is_as_in_transformers(ours, theirs, name):
    for chat in CHATS:
        assert ours.apply_chat_template(
            chat, chat_template=TEMPLATES[name], enable_thinking=False
        ) == theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], tokenize=False, enable_thinking=False
        )


def test_template_errors_say_what_is_wrong(ours):
    with pytest.raises(InputError, match="refuses the conversation: roles must alternate"):
        ours.apply_chat_template(
            CHATS[0], chat_template="{{ raise_exception('roles must alternate') }}"
        )
    with pytest.raises(InputError, match=r"mistake \(line 2\)"):
        ours.apply_chat_template(CHATS[0], chat_template="\n{% if %}")
    with pytest.raises(InputError, match="refuses"):  # the sandbox
        ours.apply_chat_template(CHATS[0], chat_template="{{ ''.__class__.__mro__ }}")


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
def test_begin_end_and_added_tokens_as_transformers(tmp_path, bos, eos):
    transformers = pytest.importorskip("transformers")
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<|im_start|>", "__type": "AddedToken"}
    config["sep_token"] = "<new sep>"  # only the config has it
    if bos is not None:
        config["add_bos_token"] = bos
    if eos is not None:
        config["add_eos_token"] = eos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    ours = load_tokenizer(HuggingFaceRepo(str(tmp_path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in ("", "a b", "x<new sep>y<|im_end|>"):
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected
    assert ours.bos_token_id == theirs.bos_token_id
    assert len(ours) == len(theirs)


def _spread(tokens: list[int], seed: int):
    rng, rest = random.Random(seed), tokens
    while rest:
        n = rng.choice([1, 1, 1, 2, 5])
        yield rest[:n]
        rest = rest[n:]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80), seed=st.integers(0, 999))
def test_streamed_text_is_the_text_and_never_broken(ours, text, seed):
    tokens = ours.encode(text)
    stream = TextStream(ours.decode)
    pieces = [stream.push(part) for part in _spread(tokens, seed)]
    assert "".join(pieces) + stream.finish() == ours.decode(tokens)
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(3, 4095), max_size=60), seed=st.integers(0, 999))
def test_streamed_text_of_any_tokens_is_what_decoding_gives(ours, tokens, seed):
    stream = TextStream(ours.decode)
    text = "".join(stream.push(part) for part in _spread(tokens, seed)) + stream.finish()
    assert text == ours.decode(tokens)


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer like Llama 2's: spaces are part of words, unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", *[f"<0x{i:02X}>" for i in range(256)], "▁", "a", "▁a", "b", "▁b"]
    model = models.BPE(
        {w: i for i, w in enumerate(words)},
        [("▁", "a"), ("▁", "b")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return HFTokenizer(tokenizer, {}, {})


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="ab 🙂é日\n", max_size=40), seed=st.integers(0, 999))
def test_streamed_text_with_byte_tokens(byte_fallback, text, seed):
    tokens = byte_fallback.encode(text)
    stream = TextStream(byte_fallback.decode)
    pieces = [stream.push(part) for part in _spread(tokens, seed)]
    assert "".join(pieces) + stream.finish() == byte_fallback.decode(tokens)
    assert not any("\ufffd" in p for p in pieces)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_texts_end_the_text_wherever_it_is_cut(text, stops, cuts):
    # the stop text that is complete first; of several the longest
    places = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(places)[1]] if places else text
    watch, out, last = StopStrings(stops), "", 0
    for cut in [*sorted(c for c in cuts if c <= len(text)), len(text)]:
        out += watch.push(text[last:cut])
        assert not any(s in out for s in stops)
        last = cut
        if watch.found:
            break
    assert watch.found == bool(places)
    assert out + watch.finish() == expected


def _context(tokenizer: TextTokenizer, **request):
    made = TextGenerationRequest(RequestID(), "m", **request)
    return asyncio.run(tokenizer.new_context(made))


def test_contexts_of_requests():
    tokenizer = TextTokenizer(str(TINY), max_length=64)
    context = _context(tokenizer, prompt="abc", sampling_params=SamplingParams(max_new_tokens=5))
    assert context.max_length == len(context.tokens[: context.end_idx]) + 5
    assert context.all_tokens.tolist() == tokenizer.delegate.encode("abc")
    assert context.eos_token_ids == {2}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    context = _context(
        tokenizer,
        messages=messages,
        stop="END",
        sampling_params=SamplingParams(stop=["X"], stop_token_ids=[9]),
    )
    text = tokenizer.delegate.decode(context.all_tokens.tolist())
    assert text == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert context.max_length == 64
    assert [9] in context.eos_sequences and len(context.eos_sequences) == 3
    context = _context(tokenizer, prompt=[5, 6, 7])
    assert context.all_tokens.tolist() == [5, 6, 7]


def test_requests_that_do_not_fit():
    tokenizer = TextTokenizer(str(TINY), max_length=16)
    with pytest.raises(InputError, match="the prompt has 20 tokens, and the context holds 16"):
        _context(tokenizer, prompt=list(range(3, 23)))
    with pytest.raises(InputError, match="16 tokens, and the context holds 16, at least one"):
        _context(tokenizer, prompt=list(range(3, 19)))
    with pytest.raises(InputError, match="no tokens"):
        _context(tokenizer, prompt="")
    with pytest.raises(InputError, match="neither a prompt nor messages"):
        _context(tokenizer)
    with pytest.raises(InputError, match="image_url"):
        _context(tokenizer, messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_whitespace_fix_keeps_the_space_of_a_single_token(byte_fallback, monkeypatch):
    monkeypatch.setattr(
        "max.pipelines.tokenization.tokenizer.active_tokenizer", lambda repo: byte_fallback
    )
    (token,) = [i for i in byte_fallback.encode("a") if i > 256]
    assert TextTokenizer(str(TINY)).decode_now([token]) == "a"
    assert TextTokenizer(str(TINY), enable_llama_whitespace_fix=True).decode_now([token]) == " a"


def test_a_decoder_gives_what_decode_now_gives(byte_fallback, monkeypatch):
    monkeypatch.setattr(
        "max.pipelines.tokenization.tokenizer.active_tokenizer", lambda repo: byte_fallback
    )
    for fix in (False, True):
        tokenizer = TextTokenizer(str(TINY), enable_llama_whitespace_fix=fix)
        for tokens in ([0, *byte_fallback.encode("a b")], byte_fallback.encode("a")):
            for skip in (False, True):
                decode = tokenizer.decoder(skip_special_tokens=skip)
                assert decode(tokens) == tokenizer.decode_now(tokens, skip_special_tokens=skip)


def test_a_piece_of_a_stream_passes_one_file(ours):
    """`docs/pipelines.md` counts the files that a chunk passes."""
    stream, files = TextStream(TextTokenizer(str(TINY)).decoder(skip_special_tokens=True)), set()

    def record(frame, event, argument):
        if event == "call" and "max" in Path(frame.f_code.co_filename).parts:
            files.add(Path(frame.f_code.co_filename).name)

    tokens = ours.encode("one two three")
    sys.setprofile(record)
    try:
        for token in tokens:
            stream.push([token])
    finally:
        sys.setprofile(None)
    assert files == {"text_stream.py"}


def test_max_tokens_to_generate():
    assert max_tokens_to_generate(10, None) is None
    assert max_tokens_to_generate(10, None, 5) == 5
    assert max_tokens_to_generate(10, 12, 5) == 2
    assert max_tokens_to_generate(10, 12) == 2
    assert max_tokens_to_generate(14, 12) == 0
