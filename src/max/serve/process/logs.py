"""Where a server's log goes: the console, a file, as lines of text or of JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

from max.serve.process.settings import LogSettings


class LineFormatter(logging.Formatter):
    """Formats a record as a line: prefix, time, level, logger, message.

    Args:
        prefix: Begins each line.
    """

    def __init__(self, prefix: str = "") -> None:
        # the format of logging has fields after %
        begin = prefix.replace("%", "%%")
        super().__init__(f"{begin}%(asctime)s %(levelname)s %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    """Formats a record as a line with a JSON object, its traceback included.

    Args:
        prefix: The value of ``prefix``; left out if it is empty.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """The object of a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
            "prefix": self._prefix or None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def set_up_logs(level: str, settings: LogSettings) -> None:
    """Sets the handlers of the loggers of ``max`` by the settings.

    Args:
        level: The lowest level that is written.
        settings: Where, and how.

    Raises:
        OSError: The file cannot be opened.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if settings.file is not None:
        handlers.append(logging.FileHandler(settings.file, encoding="utf-8"))
    formatter = (JsonFormatter if settings.structured else LineFormatter)(settings.prefix)
    logger = logging.getLogger("max")
    # a process that was set up before, as in tests, would write each line twice
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def share_handlers() -> int:
    """Gives uvicorn's loggers the handlers of the loggers of ``max``.

    Returns:
        The lowest level of its logger: clients that send no HTTP are named only where level info is.
    """
    ours, theirs = logging.getLogger("max"), logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = list(ours.handlers), False
    # uvicorn's lines of connections say nothing that the server's own do not
    return logging.WARNING if ours.isEnabledFor(logging.INFO) else logging.ERROR
