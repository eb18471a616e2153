"""The lengths of drafts, chosen from measured step times and from how many drafted tokens were right."""

from __future__ import annotations

from collections.abc import Sequence

from max._dataclass import dataclass
from max.interfaces import RequestID
from max.pipelines.core.draft_tree import LAST_TOKEN, path_outcomes, sibling_ranks
from max.pipelines.generation.drafts.drafter import KINDS
from max.pipelines.generation.drafts.durations import DraftingSeconds, Seconds, StepSeconds

__all__ = ["DraftLengths"]

LENGTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
"""The lengths of drafts, besides the longest that has room: few ones, so that the time of each is measured often."""
FIRST_SHARE = 0.7
"""The assumed probability of a drafted token to be right before the first draft."""
FIRST_OTHER_SHARE = 0.1
"""The assumed probability of a token of another branch to be right, if the token beside it is wrong."""
PRIOR_TOKENS = 2.0
"""The weight of the share of all requests in that of one request, and of the first one in it, in drafted tokens."""
FADING = 0.95
"""The weight of what earlier drafts of a request have shown, after each draft."""
FADING_WITHOUT = 0.98
"""The same after each step without a draft, so that a request is tried again."""
ALLOWANCE = 0.02
"""The share of the time of plain steps that drafts may lose."""
LEAST_GAIN = 0.03
"""The least share by which a draft must be expected to raise the tokens in a time."""
MOST_CREDIT = 8
"""The time that drafts may lose at once, in plain steps."""
LONGEST_RUN = 64
"""The number of steps with drafts after which a plain one is measured again."""
LONGEST_REST = 256
"""The number of steps without drafts after which steps with drafts are measured again."""
REST_STEPS = 8
"""The number of steps without drafts after which calls have a step more: so a call delays what it finds by little."""
WATCHED_REST = 2
"""The same after which calls that are watched have all steps: those go on for a step after a draft was found."""


@dataclass
class _Share:
    """How many drafted tokens were right.

    Args:
        right: The number of right ones.
        trials: The number of tokens up to the first wrong one of each draft.
    """

    right: float = 0.0
    trials: float = 0.0

    def mean(self, otherwise: float) -> float:
        """The share of right tokens, nearer to another one the fewer were tried."""
        # the mean of a beta distribution whose prior has PRIOR_TOKENS trials
        return (self.right + PRIOR_TOKENS * otherwise) / (self.trials + PRIOR_TOKENS)

    def fade(self, factor: float) -> None:
        """Lowers the weight of what was seen so far."""
        self.right *= factor
        self.trials *= factor


class DraftLengths:
    """Chooses how many tokens of each request are drafted, so that steps give the most tokens in a time.

    A draft is as long as pays by the expected number of right tokens and the times of steps and of drafting. Without
    credit nothing is drafted: a small share of the time of plain steps, which gains and losses of drafts change.

    Args:
        most: The maximum number of drafted tokens of a request.
        reads_again: Whether a request reads the right tokens of a draft again if another one was wrong.
    """

    def __init__(self, most: int, reads_again: bool = False) -> None:
        self.most, self._reads_again = most, reads_again
        self.seconds = StepSeconds()
        self._shares, self._all = dict[RequestID, dict[int, _Share]](), dict[int, _Share]()
        self._credit: float | None = None
        self._drafting: dict[int, DraftingSeconds] = {}  # by drafter
        self._spent = 0.0  # for drafting since the last step
        self._run = 0  # steps with drafts since the last plain one
        self._rest = 0  # plain steps since the last one with drafts
        self._after: Seconds | None = (
            None  # what the first plain execution after drafts takes more than others
        )

    def share(self, request_id: RequestID, kind: int = 0) -> float:
        """The expected probability of a drafted token of a request to be right, if those before it are.

        Args:
            request_id: The request.
            kind: The kind of the draft.
        """
        return self._mean(request_id, kind, FIRST_SHARE)

    def _mean(self, request_id: RequestID, key: int, first: float) -> float:
        """The share of right tokens of a request: of a kind of drafts, or of other branches of it (`~kind`)."""
        own = self._shares.get(request_id, {}).get(key) or _Share()
        return own.mean((self._all.get(key) or _Share()).mean(first))

    def may_draft(self, requests: int) -> bool:
        """Whether drafts may be tried: their times can be compared with those of plain steps, and there is credit.

        Args:
            requests: The number of requests of the next step.
        """
        plain = self.seconds.plain(requests)
        if plain is None:
            return False  # first it is measured what a draft could save
        if self._credit is None:
            self._credit = plain * MOST_CREDIT / 2
        return self._credit > 0 and self._run < LONGEST_RUN

    def _seconds_of(self, requests: int, num_drafted: int) -> float:
        """The estimated duration of a step, after plain ones of as many requests were measured."""
        seconds = self.seconds.of(requests, num_drafted)
        assert seconds is not None
        return seconds

    def plain_steps(self, requests: int, is_watched: bool = False) -> int | None:
        """The number of plain steps after which drafts are tried again; None: the call may have any number.

        Args:
            requests: The number of requests of the next step.
            is_watched: Whether the call ends early if drafts would pay.
        """
        has_credit = self._credit is None or self._credit > 0
        if not has_credit or (is_watched and self._rest >= WATCHED_REST):
            return None
        # a run of drafts ends with one plain step
        return 1 + (self._rest // REST_STEPS if self.may_draft(requests) else 0)

    def length(
        self, request_id: RequestID, requests: int, num_drafted: int, room: int, kind: int = 0
    ) -> int:
        """The number of tokens to draft for a request.

        Args:
            request_id: The request.
            requests: The number of requests of the next step.
            num_drafted: The number of tokens that are drafted for others of them.
            room: The maximum number of tokens.
            kind: The kind of the draft.
        """
        chances = self._chances(request_id, room, kind)
        return self._best(requests, num_drafted, chances, kind)[1]

    def _chances(self, request_id: RequestID, room: int, kind: int) -> list[float]:
        """The probability of each token of a chain to be right: one counts only if all before it are right."""
        share = self.share(request_id, kind)
        return [share**count for count in range(1, min(self.most, room) + 1)]

    def prefers(
        self, request_id: RequestID, requests: int, room: int, kind: int, other: int
    ) -> bool:
        """Whether drafts of a kind are expected to give no fewer tokens in a time than those of another one, or are new
        to a request.

        Args:
            request_id: The request.
            requests: The number of requests of the next step.
            room: The maximum number of tokens.
            kind: The kind of the draft.
            other: That of the draft which is made otherwise.
        """
        if self.seconds.plain(requests) is None or kind not in self._shares.get(request_id, {}):
            return True
        rate, rate_of_other = (
            self._best(requests, 0, self._chances(request_id, room, each), each)[0]
            for each in (kind, other)
        )
        return rate >= rate_of_other

    def kept_of_tree(
        self,
        request_id: RequestID,
        requests: int,
        num_drafted: int,
        room: int,
        parents: Sequence[int],
        kind: int = 0,
    ) -> list[int]:
        """The tokens of a tree to draft for a request: the likeliest ones, as many as give the most tokens in a time.

        The first child of a token is right as often as tokens of a chain are; if it is not, another one as often as
        other ones were.

        Args:
            request_id: The request.
            requests: The number of requests of the next step.
            num_drafted: The number of tokens that are drafted for others of them.
            room: The maximum number of tokens.
            parents: The parents of the tokens.
            kind: The kind of the draft.

        Returns:
            The indices of the tokens, in order, each with its parent.
        """
        share = self.share(request_id, kind)
        other = self._mean(request_id, ~kind, FIRST_OTHER_SHARE)
        chances: list[float] = []
        for parent, rank in zip(parents, sibling_ranks(parents), strict=True):
            # a sibling is right if those before it are wrong and it is the right one of the others
            own = share if not rank else (1 - share) * (1 - other) ** (rank - 1) * other
            chances.append(own if parent == LAST_TOKEN else own * chances[parent])
        # no token is likelier than its parent, which comes first among equal ones
        order = sorted(range(len(parents)), key=lambda index: -chances[index])
        order = order[: min(self.most, room)]
        _, count = self._best(requests, num_drafted, [chances[index] for index in order], kind)
        return sorted(order[:count])

    def _best(
        self, requests: int, num_drafted: int, chances: Sequence[float], kind: int
    ) -> tuple[float, int]:
        """The number of tokens to draft for a request, after the tokens a second that are expected of the step; those
        that a draft must give, if there is none.

        Args:
            requests: The number of requests of the next step.
            num_drafted: The number of tokens that are drafted for others of them.
            chances: The probability of each token to be right, with those before it.
            kind: The kind of the draft.
        """
        if not self.may_draft(requests):
            return 0.0, 0
        plain, before = self._seconds_of(requests, 0), self._seconds_of(requests, num_drafted)
        drafting = self._drafting.get(kind // KINDS) or DraftingSeconds()
        # what each draft takes is spent already if another request has one
        spent = drafting.expected(num_drafted) if num_drafted else 0.0
        # a run of drafts makes the execution after it slower, which has to prepare all its inputs
        after = 0.0 if self._run or self._after is None else self._after.mean
        # tokens a second, which a draft must raise
        best, length = (1 + LEAST_GAIN) * requests / plain, 0
        expected = 0.0
        for count, right in enumerate(chances, 1):
            expected += right
            if count not in LENGTHS and count < len(chances):
                continue
            more = self._seconds_of(requests, num_drafted + count) - before
            # if a token is wrong, the state goes back, and the next step reads the right ones again
            if self._reads_again:
                rows = 1 + round(expected)
                more += (1 - right) * (self._seconds_of(requests, rows) - plain)
            rate = (requests + expected) / (
                plain + more + drafting.expected(num_drafted + count) - spent + after
            )
            if rate > best:
                best, length = rate, count
        return best, length

    def rounds(self, requests: int, num_drafted: int, most: int, kind: int = 0) -> int:
        """The number of steps with drafts that one call may run, if each verifies as many tokens: what they lose if
        none is right stays within the credit.

        Args:
            requests: The number of requests.
            num_drafted: The number of drafted tokens of a step.
            most: The maximum number of steps.
            kind: The kind of the drafts.
        """
        plain = self.seconds.plain(requests)
        if plain is None or self._credit is None:
            return most
        drafting = self._drafting_seconds(num_drafted, kind)
        loss = self._seconds_of(requests, num_drafted) + drafting - plain
        affordable = most if loss <= 0 else 1 + int(max(self._credit, 0.0) / loss)
        return max(1, min(most, self.steps_with_drafts, affordable))

    @property
    def steps_with_drafts(self) -> int:
        """The number of steps with drafts before a plain one is measured again."""
        return LONGEST_RUN - self._run

    def _drafting_seconds(self, num_drafted: int, kind: int) -> float:
        """The estimated duration of drafting by the drafter of a kind; 0 before it was measured."""
        known = self._drafting.get(kind // KINDS)
        return known.of(num_drafted) if known else 0.0

    def record_verification(
        self, request_id: RequestID, num_drafted: int, num_accepted: int, kind: int = 0
    ) -> None:
        """Records how many tokens of a draft were right.

        Args:
            request_id: The request.
            num_drafted: The number of drafted tokens.
            num_accepted: The number of right ones.
            kind: The kind of the draft.
        """
        # tokens after the first wrong one were not tried
        self._record(request_id, kind, min(num_accepted + 1, num_drafted), num_accepted)

    def record_tree(
        self, request_id: RequestID, parents: Sequence[int], path: Sequence[int], kind: int = 0
    ) -> None:
        """Records which tokens of a tree were right.

        Args:
            request_id: The request.
            parents: The parents of the tokens.
            path: The indices of the right ones.
            kind: The kind of the draft.
        """
        first, others = path_outcomes(parents, path)
        self._record(request_id, kind, *first)
        if others[0]:
            self._record(request_id, ~kind, *others)

    def _record(self, request_id: RequestID, key: int, trials: int, right: int) -> None:
        """Adds verified tokens to a share of a request, and to that of all."""
        for shares in (self._shares.setdefault(request_id, {}), self._all):
            share = shares.setdefault(key, _Share())
            share.fade(FADING)
            share.right += right
            share.trials += trials

    def step(
        self,
        request_ids: list[RequestID],
        num_drafted: int,
        num_accepted: int,
        seconds: float,
        steps: int = 1,
        inside_kind: int | None = 0,
    ) -> None:
        """Records an execution.

        Args:
            request_ids: Its requests.
            num_drafted: The number of drafted tokens that each of its steps verified.
            num_accepted: The number of right ones of all its steps.
            seconds: The duration of each of its steps.
            steps: The number of its steps.
            inside_kind: The kind of the drafts that a model has made of all steps but the first one in this time; None:
                they were made before.
        """
        requests, run = len(request_ids), self._run
        plain = self.seconds.plain(requests)
        self._run = run + steps if num_drafted else 0
        inside = 0.0
        if num_drafted and steps > 1 and inside_kind is not None:
            # what is left of the time is that of steps alone; both together are what was measured
            inside = self._drafting_seconds(num_drafted, inside_kind) * (steps - 1)
            inside = min(inside, seconds * steps / 2)
            seconds -= inside / steps
        self._rest = 0 if num_drafted else self._rest + steps
        if not num_drafted and self._rest // LONGEST_REST > (self._rest - steps) // LONGEST_REST:
            self.seconds.doubt(requests)
            for drafting in self._drafting.values():
                drafting.doubt()
        # not the first plain one after drafts, which prepares all its inputs anew
        if num_drafted or not run or plain is None:
            self.seconds.record(requests, num_drafted, seconds)
        if not num_drafted:
            for shares in (self._all, *map(self._shares.get, request_ids)):
                for share in () if shares is None else shares.values():
                    share.fade(FADING_WITHOUT**steps)
        spent, self._spent = self._spent, 0.0
        if plain is None or self._credit is None:
            return
        if num_drafted:
            # as it is estimated from several steps: a slow one may be slow for another reason
            spent += steps * (self._seconds_of(requests, num_drafted) - plain) + inside
            # what right tokens would have taken without drafts, less what drafts took
            self._credit += num_accepted * plain / requests - spent
        elif run:
            more = max(seconds - plain, 0.0) * steps
            if self._after is None:
                self._after = Seconds(more)
            else:
                self._after.add(more)
            self._credit -= self._after.mean
        else:
            self._credit += ALLOWANCE * plain * steps
        self._credit = min(self._credit, MOST_CREDIT * plain)

    def record_drafting(self, num_drafted: int, seconds: float, kind: int = 0) -> None:
        """Records how long a drafter took.

        Args:
            num_drafted: The number of drafted tokens.
            seconds: The duration.
            kind: A kind of its drafts.
        """
        if not num_drafted:
            if self._credit is not None:
                self._credit -= seconds  # nothing was found
            return
        known = self._drafting.setdefault(kind // KINDS, DraftingSeconds())
        known.add(num_drafted, seconds)
        self._spent += known.of(num_drafted)

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended."""
        self._shares.pop(request_id, None)
