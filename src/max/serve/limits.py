"""The limits on bodies of requests, besides ``--max-request-bytes``.

They are checked before values are made of a body's text. Within them, a body takes at most 10 times its size in memory,
and 32 MiB.
"""

from __future__ import annotations

LARGE_BODY = 64 << 10
"""Bodies of more bytes are read and prepared in a thread, so that other requests go on meanwhile."""
LONG_LOGS = 1024
"""Log-probabilities of more tokens of a prompt are prepared in a thread."""
MAX_DEPTH = 128
"""Arrays and objects within each other."""
MAX_FIELDS = 4096
"""Fields of the object that the body is."""
MAX_UNKNOWN_BYTES = 1 << 20
"""Bytes of all fields that the route does not know, which are ignored."""
MAX_OBJECTS = 1 << 16
"""Objects in a body; 512 tools have 128 each."""
MAX_ARRAYS = 1 << 16
"""Arrays in a body."""
MAX_TEXTS = 1 << 17
"""Texts in a body, with the names of fields."""
MAX_VALUES = 1 << 20
"""Values of all kinds in a body, most of them tokens."""
MAX_NAME = 1024
"""Characters of a model's name, and of other names."""
MAX_MESSAGES = 1 << 14
"""Messages of a conversation, and items of an input."""
MAX_TOOLS = 512
"""Tools of a request."""
MAX_PROMPTS = 128
"""Prompts of a request of completions."""
MAX_INPUTS = 2048
"""Texts of a request of vectors or ranks, as OpenAI has it."""
MAX_PREDICTED_PARTS = 2048
"""Texts that a prediction is made of."""
MAX_BIASES = 1 << 18
"""Tokens with a bias; a model's vocabulary is a lower limit."""
MAX_STOPS = 64
"""Stop texts of a request."""
MAX_STOP = 4096
"""Characters of a stop text."""
MAX_WIDE_TEXT = 16 << 20
"""Bytes of a text beyond ASCII: in memory, each character may take 4."""
MAX_TEXT = 2 << 20
"""Bytes of the texts of a request that are formatted and encoded; more where the context has over 2**18 tokens.

The library of tokenizers takes about 500 bytes a token while it encodes a text.
"""
MAX_LISTED = 1 << 20
"""Tokens that ``/tokenize`` lists."""
MAX_DETOKENIZED = 1 << 18
"""Tokens of a request of ``/detokenize``, which are decoded with the GIL."""
MAX_SEQUENCE_TOKENS = 1 << 22
"""Tokens of the prompts of all sequences of a request: the worker is sent each sequence with its prompt."""
MAX_SEQUENCE_BIASES = 1 << 20
"""Biases of all sequences of a request, each of which has its own."""
