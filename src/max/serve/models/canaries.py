"""Chooses between a model and its canary, a model that gets a share of its requests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from max.serve.requests.request_context import RequestContext


@dataclass(frozen=True)
class Canary:
    """A model that gets a share of the requests of another one.

    Args:
        name: Its name.
        share: The share, from 0 to 1.
        by: Whether each request decides by its identifier, or each client by its API key and tenant.
    """

    name: str
    share: float
    by: Literal["request", "key"] = "request"

    def takes(self, model: str, request: RequestContext) -> bool:
        """Whether the canary takes a request: always the same for equal requests, whatever process decides.

        Args:
            model: The name of its model.
            request: The request.
        """
        key = request.request_id
        if self.by == "key":
            # all clients of a tenant see the same model
            key = request.tenant or request.client
        # the name: a client that one model's canary takes is not taken by every canary
        data = f"{model}\0{key}".encode("utf-8", "surrogatepass")
        # a digest, and not Python's hash, which differs in each process
        drawn = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        return drawn < self.share * 2**64
