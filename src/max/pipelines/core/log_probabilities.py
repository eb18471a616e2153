"""The log-probabilities of a request's tokens, from the step that computes them until they are returned."""

from __future__ import annotations

from dataclasses import dataclass, field

from max.interfaces import LogProbabilities


@dataclass
class KeptLogProbabilities:
    """Log-probabilities of tokens that were not returned yet.

    Args:
        by_token: Those of generated tokens, by their index in the sequence; changed in place.
    """

    by_token: dict[int, LogProbabilities]
    _chunks: list[LogProbabilities] = field(default_factory=list[LogProbabilities])
    """With echo, those of the chunks of the prompt that were read: they are returned with the first token."""

    def add_chunk(self, entry: LogProbabilities) -> None:
        """Keeps those of a chunk of the prompt, which has no token of its own.

        Args:
            entry: The log-probabilities.
        """
        self._chunks.append(entry)

    def add(self, index: int, entry: LogProbabilities) -> None:
        """Keeps those of a token, after those of the chunks before it.

        Args:
            index: The index of the token.
            entry: The log-probabilities.
        """
        if self._chunks:
            parts, self._chunks = [*self._chunks, entry], []
            entry = LogProbabilities(
                [number for part in parts for number in part.token_log_probabilities],
                [top for part in parts for top in part.top_log_probabilities],
            )
        self.by_token[index] = entry

    def take(self, begin: int, end: int) -> list[LogProbabilities]:
        """Removes those of tokens, and returns them.

        Args:
            begin: The index of the first token.
            end: One past the last one.
        """
        entries = [self.by_token.pop(index, None) for index in range(begin, end)]
        return [entry for entry in entries if entry is not None]

    def forget_chunks(self) -> None:
        """Drops those of chunks that are read again."""
        self._chunks = []
