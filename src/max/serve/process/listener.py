"""The socket that a server listens on."""

from __future__ import annotations

import socket
import sys

from max.serve.process.settings import ServerSettings


def open_socket(settings: ServerSettings) -> socket.socket:
    """Opens the server's socket; called before the model is loaded, so that a taken port is an early error.

    Args:
        settings: The settings.

    Raises:
        OSError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            # a server that has just ended leaves its port in a waiting state
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError:
        listener.close()
        raise
    return listener
