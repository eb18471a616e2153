"""Log-probabilities of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LogProbabilities:
    """Log-probabilities of one output position (or, with echo, of several).

    Args:
        token_log_probabilities: The log-probability of each token of the output.
        top_log_probabilities: For each position the log-probabilities of the most likely tokens, by token id. The
            output token is always included.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]

    def __post_init__(self) -> None:
        if len(self.token_log_probabilities) != len(self.top_log_probabilities):
            raise ValueError(
                f"LogProbabilities: {len(self.token_log_probabilities)} token log-probabilities, "
                f"{len(self.top_log_probabilities)} top ones; expected one of each a position"
            )
