"""The door of an engine: where further server processes connect to it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from max.serve.remote.connections import Acceptor, listen
from max.serve.routers.address import OWNER_PURPOSES, PURPOSES, SIGN, DoorAddress
from max.serve.routers.shared_channel import SharedChannel
from max.serve.worker.life_signs import LifeSigns


class Door:
    """Lets server processes in that know the key.

    Args:
        acceptor: Takes their connections.
        close: Called at the end: stops listening.
        outlives_owner: Whether the engine waits for the next owner where it has no pipe to the server's first process.
    """

    def __init__(
        self, acceptor: Acceptor, close: Callable[[], None], outlives_owner: bool = False
    ) -> None:
        self._acceptor, self._close = acceptor, close
        self._outlives_owner = outlives_owner
        self._channel: SharedChannel | None = None

    @classmethod
    def at(cls, address: DoorAddress) -> Door:
        """A door that is a socket file.

        Args:
            address: The address.

        Raises:
            OSError: The file cannot be made.
        """
        listener = listen(address.host)

        def close() -> None:
            with contextlib.suppress(OSError):
                # wakes the thread that waits in `accept`, which `close` does not
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(address.host)

        return cls(Acceptor(listener, address.key), close)

    def open(
        self, owner: Connection, signs: LifeSigns, lifeline: Connection | None = None
    ) -> SharedChannel:
        """Begins to let them in.

        Args:
            owner: The engine's end of the connection to its owner.
            signs: The engine's signs of life, which each gets.
            lifeline: The pipe that ends with the first process of the server; None: there is none to this machine.

        Returns:
            The channel of the engine to all of them.
        """
        self._channel = channel = SharedChannel(owner, lifeline, self._outlives_owner)
        # else the engine ends with its owner, so that there is no next one
        takes_owners = lifeline is not None or self._outlives_owner

        def take() -> None:
            commands, beats = PURPOSES
            owns, _ = OWNER_PURPOSES
            while True:
                try:
                    purpose, connection = self._acceptor.next()
                except OSError:
                    return
                if purpose == commands:
                    channel.add(connection)
                elif purpose == owns and takes_owners:
                    channel.add_owner(connection)
                elif purpose == beats:
                    send_signs(connection, signs)
                else:
                    connection.close()

        threading.Thread(target=take, name="door", daemon=True).start()
        return channel

    def close(self) -> None:
        """Lets nobody in any more, after what was sent to the owner has arrived."""
        self._close()
        if self._channel is not None:
            self._channel.flush()


def send_signs(connection: Connection, signs: LifeSigns) -> None:
    """Starts a thread that sends the signs of an engine at their intervals; that they arrive is the beat.

    Args:
        connection: The connection; it is closed when the other side is gone.
        signs: The signs.
    """

    def send() -> None:
        with connection:
            while True:
                begin = signs.step_begin
                taken = -1.0 if begin is None else max(time.monotonic() - begin, 0.0)
                loading = signs.loading.encode("utf-8", "replace")
                try:
                    connection.send_bytes(SIGN.pack(taken, loading))
                except OSError:
                    return  # the engine's own connection tells it too
                time.sleep(signs.interval_s)

    threading.Thread(target=send, name="engine heartbeat", daemon=True).start()
