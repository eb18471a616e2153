"""The durations of decoding steps and of drafting, as estimated from measurements."""

from __future__ import annotations

from max._dataclass import dataclass

__all__ = ["DraftingSeconds", "Seconds", "StepSeconds"]

ROW_SHARE = 0.05
"""The assumed cost of a drafted token in its step, as a share of a plain step, until one is measured."""
COMMON_SHARE = 0.75
"""The share of the change of a known time that is taken for one of the machine, which other steps share."""
DRAFTING_FADING = 0.97
"""The weight of what earlier drafts have shown of the time of drafting, after each draft."""
LEAST_SPREAD = 0.1
"""The variance of the lengths of drafts at which their times tell as much as the assumption that tokens take all."""
FIRST_TIMES = 3
"""The number of first times of a step whose least one counts, as graphs may be compiled in them."""


@dataclass
class Seconds:
    """A running mean of durations.

    Args:
        mean: The mean.
        count: The number of durations.
    """

    mean: float
    count: int = 1

    def add(self, seconds: float) -> None:
        """Adds a duration.

        Args:
            seconds: The duration.
        """
        self.count += 1
        if self.count <= FIRST_TIMES:
            self.mean = min(self.mean, seconds)
        else:
            # one slow step says little: the machine may have been busy
            self.mean += (min(seconds, 2 * self.mean) - self.mean) / 4


class StepSeconds:
    """The durations of decoding steps by the number of their requests and of drafted tokens."""

    def __init__(self) -> None:
        self._plain: dict[int, Seconds] = {}
        self._drafted: dict[int, dict[int, Seconds]] = {}

    def record(self, requests: int, num_drafted: int, seconds: float) -> None:
        """Adds a step.

        Args:
            requests: The number of its requests.
            num_drafted: The number of drafted tokens that it verified.
            seconds: Its duration.
        """
        table = self._drafted.setdefault(requests, {}) if num_drafted else self._plain
        key = num_drafted or requests
        known = table.get(key)
        if known is None:
            table[key] = Seconds(seconds)
            return
        before = known.mean
        known.add(seconds)
        if known.count <= FIRST_TIMES or not before > 0:
            return
        # what is compared was measured at other times: other work and the clock change all of it
        common = (known.mean / before) ** COMMON_SHARE
        plain = self._plain.get(requests)
        for other in (*self._drafted.get(requests, {}).values(), *([plain] if plain else ())):
            if other is not known:
                other.mean *= common

    def plain(self, requests: int) -> float | None:
        """The duration of a step without drafts; None before two of as many requests were measured.

        Args:
            requests: The number of its requests.
        """
        known = self._plain.get(requests)
        return None if known is None or known.count < 2 else known.mean

    def of(self, requests: int, num_drafted: int) -> float | None:
        """The estimated duration of a step that verifies drafted tokens; None before a plain one was measured.

        Args:
            requests: The number of its requests.
            num_drafted: The number of drafted tokens.
        """
        plain = self.plain(requests)
        if plain is None:
            return None
        # a time that was measured once or twice may be of a first run, and is not taken for more than the assumed one
        known = {
            count: min(
                own.mean, plain * (1 + ROW_SHARE * count) if own.count < FIRST_TIMES else own.mean
            )
            for count, own in self._drafted.get(requests, {}).items()
        }
        if num_drafted in known:
            return known[num_drafted]
        below = max((count for count in known if count < num_drafted), default=0)
        above = min((count for count in known if count > num_drafted), default=0)
        first = known[below] if below else plain
        assumed = max(first, plain * (1 + ROW_SHARE * num_drafted))
        if not above:
            return assumed
        # at most on the line between both: kernels of few rows may take as long as those of one
        line = first + (known[above] - first) * (num_drafted - below) / (above - below)
        return min(line, assumed)

    def doubt(self, requests: int) -> None:
        """Lets steps with drafts be measured again, as their times may have changed.

        Args:
            requests: The number of their requests.
        """
        for known in self._drafted.get(requests, {}).values():
            known.count = min(known.count, FIRST_TIMES - 1)


class DraftingSeconds:
    """The durations of drafting: a part for each draft, and one for each token, from a line through recent drafts."""

    def __init__(self) -> None:
        self._count = 0
        self._forget()

    def _forget(self) -> None:
        # weighted sums over drafts: of ones, of the numbers of tokens, of the durations, and of products of these
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, num_drafted: int, seconds: float) -> None:
        """Adds a draft.

        Args:
            num_drafted: The number of its tokens, at least 1.
            seconds: Its duration.
        """
        known = self.of(num_drafted)
        self._count += 1
        if 1 < self._count <= FIRST_TIMES:
            if seconds >= known:
                return  # graphs may be compiled in first drafts
            self._forget()
        elif known:
            # one slow draft says little: the machine may have been busy
            seconds = min(seconds, 2 * known)
        sums = self._weight, self._tokens, self._seconds, self._squares, self._products
        one = 1.0, num_drafted, seconds, num_drafted**2, num_drafted * seconds
        self._weight, self._tokens, self._seconds, self._squares, self._products = [
            DRAFTING_FADING * before + more for before, more in zip(sums, one, strict=True)
        ]

    def expected(self, num_drafted: int) -> float:
        """The duration of a draft for choices: 0 until first drafts, in which graphs may be compiled, are over.

        Args:
            num_drafted: The number of its tokens.
        """
        return self.of(num_drafted) if self._count >= FIRST_TIMES else 0.0

    def doubt(self) -> None:
        """Lets a draft be measured again, as its time may have changed."""
        self._count = min(self._count, FIRST_TIMES - 1)

    def of(self, num_drafted: int) -> float:
        """The estimated duration of a draft; 0 before one was measured.

        Args:
            num_drafted: The number of its tokens.
        """
        if not self._weight:
            return 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        # variance and covariance of a weighted least-squares line: seconds over tokens
        spread = self._squares / self._weight - tokens**2
        shared = self._products / self._weight - tokens * seconds
        # without drafts of several lengths, all of the time is that of tokens
        slope = (shared + LEAST_SPREAD * seconds / tokens) / (spread + LEAST_SPREAD)
        # a token takes no less than nothing, and no more than if it took all
        return seconds + min(max(slope, 0.0), seconds / tokens) * (num_drafted - tokens)
