"""The order of requests: by priority, then fairly between clients, then by arrival."""

from __future__ import annotations

from typing import TypeAlias

from max.interfaces import RequestID, TextGenerationContext

Rank: TypeAlias = tuple[int, float, int]
"""Priority, virtual start time, arrival number; the smallest rank comes first."""
MOST_COUNTED = 512
"""The maximum number of new tokens in the cost of a request, as few requests generate as many as their limit allows."""


class RequestOrder:
    """Ranks requests on arrival; the rank of a request never changes.

    Within a priority, clients share the engine by start-time fair queueing (Goyal et al., SIGCOMM 1996). The virtual
    start time of a request is the current virtual time, or the virtual end of its client's previous request if that is
    later; the end adds the tokens of the prompt and of the answer. A client without open requests saves up no share.
    Requests of one client, and of clients that do not queue, keep the order of their arrival.
    """

    def __init__(self) -> None:
        self._ranks: dict[RequestID, Rank] = {}
        self._clients: dict[RequestID, str] = {}
        self._open: dict[str, int] = {}
        self._ends: dict[str, float] = {}  # virtual end of each open client's last request
        self._now = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ranks

    def add(self, context: TextGenerationContext, priority: int, client: str) -> None:
        """Ranks a request.

        Args:
            context: The request.
            priority: Its priority; lower comes first.
            client: The client that sent it.
        """
        key = context.request_id
        begin = max(self._now, self._ends.get(client, 0.0))
        longest = context.max_length or context.current_length + 1
        new = min(max(longest - context.current_length, 1), MOST_COUNTED)
        self._ends[client] = begin + context.current_length + new
        self._open[client] = self._open.get(client, 0) + 1
        self._ranks[key] = (priority, begin, self._arrivals)
        self._clients[key] = client
        self._arrivals += 1

    def start(self, context: TextGenerationContext) -> None:
        """Advances the virtual time to the virtual start of a request that begins to run."""
        self._now = max(self._now, self._ranks[context.request_id][1])

    def remove(self, request_id: RequestID) -> bool:
        """Removes a request, and returns whether it had a rank."""
        if self._ranks.pop(request_id, None) is None:
            return False
        client = self._clients.pop(request_id)
        self._open[client] -= 1
        if not self._open[client]:
            # a client that returns starts at the current virtual time
            del self._open[client], self._ends[client]
        return True

    def rank(self, context: TextGenerationContext) -> Rank:
        """The rank of a request."""
        return self._ranks[context.request_id]

    def sorted_requests(
        self, contexts: dict[RequestID, TextGenerationContext]
    ) -> dict[RequestID, TextGenerationContext]:
        """The requests in the order of their ranks.

        Args:
            contexts: The requests.
        """
        return {context.request_id: context for context in sorted(contexts.values(), key=self.rank)}
