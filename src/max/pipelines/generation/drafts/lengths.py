"""The lengths of drafts, chosen from measured step times and from how many drafted tokens were right."""

from __future__ import annotations

from max._dataclass import dataclass
from max.interfaces import RequestID

__all__ = ["DraftLengths", "StepSeconds"]

FIRST_SHARE = 0.7
"""The assumed probability of a drafted token to be right before the first draft."""
PRIOR_TOKENS = 2.0
"""The weight of the share of all requests in that of one request, and of the first one in it, in drafted tokens."""
FADING = 0.9
"""The weight of what earlier drafts of a request have shown, after each draft."""
FADING_WITHOUT = 0.98
"""The same after each step without a draft, so that a request is tried again."""
ALLOWANCE = 0.02
"""The share of the time of plain steps that drafts may lose."""
MOST_CREDIT = 8
"""The time that drafts may lose at once, in plain steps."""
ROW_SHARE = 0.05
"""The assumed cost of a drafted token in its step, as a share of a plain step, until one is measured."""
LONGEST_RUN = 64
"""The number of steps with drafts after which a plain one is measured again."""
FIRST_TIMES = 3
"""The number of first times of a step whose least one counts, as graphs may be compiled in them."""


@dataclass
class _Seconds:
    """A running mean of durations.

    Args:
        mean: The mean.
        count: The number of durations.
    """

    mean: float
    count: int = 1

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= FIRST_TIMES:
            self.mean = min(self.mean, seconds)
        else:
            # one slow step says little: the machine may have been busy
            self.mean += (min(seconds, 2 * self.mean) - self.mean) / 4


class StepSeconds:
    """The durations of decoding steps by the number of their requests and of drafted tokens."""

    def __init__(self) -> None:
        self._plain: dict[int, _Seconds] = {}
        self._drafted: dict[int, dict[int, _Seconds]] = {}

    def record(self, requests: int, drafted: int, seconds: float) -> None:
        """Adds a step.

        Args:
            requests: The number of its requests.
            drafted: The number of drafted tokens that it verified.
            seconds: Its duration.
        """
        table = self._drafted.setdefault(requests, {}) if drafted else self._plain
        key = drafted or requests
        if key in table:
            table[key].add(seconds)
        else:
            table[key] = _Seconds(seconds)

    def plain(self, requests: int) -> float | None:
        """The duration of a step without drafts; None before two of as many requests were measured.

        Args:
            requests: The number of its requests.
        """
        known = self._plain.get(requests)
        return None if known is None or known.count < 2 else known.mean

    def of(self, requests: int, drafted: int) -> float | None:
        """The estimated duration of a step that verifies drafted tokens; None before a plain one was measured.

        Args:
            requests: The number of its requests.
            drafted: The number of drafted tokens.
        """
        plain = self.plain(requests)
        if plain is None or not drafted:
            return plain
        known = self._drafted.get(requests, {})
        below = max((count for count in known if count <= drafted), default=0)
        above = min((count for count in known if count >= drafted), default=0)
        if not below and not above:
            return plain * (1 + ROW_SHARE * drafted)
        first = known[below].mean if below else plain
        if below == drafted:
            return first
        if above:
            slope = (known[above].mean - first) / (above - below)
        else:
            slope = max((first - plain) / below, ROW_SHARE * plain / 4)
        return first + slope * (drafted - below)


@dataclass
class _Share:
    """How many drafted tokens were right.

    Args:
        right: The number of right ones.
        tried: The number of tokens up to the first wrong one of each draft.
    """

    right: float = 0.0
    tried: float = 0.0

    def mean(self, otherwise: float) -> float:
        """The share of right tokens, nearer to another one the fewer were tried."""
        return (self.right + PRIOR_TOKENS * otherwise) / (self.tried + PRIOR_TOKENS)

    def fade(self, factor: float) -> None:
        """Lowers the weight of what was seen so far."""
        self.right *= factor
        self.tried *= factor


class DraftLengths:
    """Chooses how many tokens of each request are drafted, so that steps give the most tokens in a time.

    A draft is as long as pays by the expected number of right tokens, the times of steps and that of drafting. What
    drafts lose is bounded: they have a credit, which is a small share of the time of plain steps, and which their gains
    and losses change. Without credit nothing is drafted.

    Args:
        most: The maximum number of drafted tokens of a request.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.seconds = StepSeconds()
        self._shares: dict[RequestID, _Share] = {}
        self._all = _Share()
        self._credit: float | None = None
        self._drafting: _Seconds | None = None  # seconds for each drafted token
        self._run = 0  # steps with drafts since the last plain one

    def share(self, request_id: RequestID) -> float:
        """The expected probability of a drafted token of a request to be right, if those before it are.

        Args:
            request_id: The request.
        """
        own = self._shares.get(request_id) or _Share()
        return own.mean(self._all.mean(FIRST_SHARE))

    def length(self, request_id: RequestID, requests: int, drafted: int, room: int) -> int:
        """The number of tokens to draft for a request.

        Args:
            request_id: The request.
            requests: The number of requests of the next step.
            drafted: The number of tokens that are drafted for others of them.
            room: The maximum number of tokens.
        """
        most = min(self.most, room)
        plain = self.seconds.plain(requests)
        if plain is None:
            return 0  # first it is measured what a draft could save
        if self._credit is None:
            self._credit = plain * MOST_CREDIT / 2
        if self._credit <= 0 or self._run >= LONGEST_RUN:
            return 0
        share, before = self.share(request_id), self.seconds.of(requests, drafted) or plain
        drafting = 0.0 if self._drafting is None else self._drafting.mean
        best, length, right, expected = 0.0, 0, 1.0, 0.0
        for count in range(1, most + 1):
            right *= share
            expected += right
            seconds = self.seconds.of(requests, drafted + count) or plain
            # a token more is worth the time in which each request of a plain step gets one
            gain = expected * plain / requests - (seconds - before) - count * drafting
            if gain > best:
                best, length = gain, count
        return length

    def verified(self, request_id: RequestID, drafted: int, accepted: int) -> None:
        """Records how many tokens of a draft were right.

        Args:
            request_id: The request.
            drafted: The number of drafted tokens.
            accepted: The number of right ones.
        """
        tried = min(accepted + 1, drafted)
        for share in (self._shares.setdefault(request_id, _Share()), self._all):
            share.fade(FADING)
            share.right += accepted
            share.tried += tried

    def step(
        self, request_ids: list[RequestID], drafted: int, accepted: int, seconds: float
    ) -> None:
        """Records a decoding step.

        Args:
            request_ids: Its requests.
            drafted: The number of drafted tokens that it verified.
            accepted: The number of right ones.
            seconds: Its duration.
        """
        requests = len(request_ids)
        self._run = self._run + 1 if drafted else 0
        self.seconds.record(requests, drafted, seconds)
        plain = self.seconds.plain(requests)
        if not drafted:
            for share in (self._all, *map(self._shares.get, request_ids)):
                if share is not None:
                    share.fade(FADING_WITHOUT)
        if plain is None or self._credit is None:
            return
        if drafted:
            # as it is estimated from several steps: a slow one may be slow for another reason
            spent = (self.seconds.of(requests, drafted) or seconds) - plain
            spent += drafted * (0.0 if self._drafting is None else self._drafting.mean)
            self._credit += accepted * plain / requests - spent
        else:
            self._credit += ALLOWANCE * plain
        self._credit = min(self._credit, MOST_CREDIT * plain)

    def drafting(self, drafted: int, seconds: float) -> None:
        """Records how long drafting took.

        Args:
            drafted: The number of drafted tokens.
            seconds: The duration.
        """
        if drafted and self._drafting is None:
            self._drafting = _Seconds(seconds / drafted)
        elif self._drafting is not None and drafted:
            self._drafting.add(seconds / drafted)
        elif self._credit is not None:
            self._credit -= seconds  # nothing was found

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended."""
        self._shares.pop(request_id, None)
