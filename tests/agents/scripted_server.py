"""A server of ours whose model answers by a script: `python -m tests.agents.scripted_server SCRIPT.json LOG_FOLDER`.

Everything but the engine is real: routes, templates, parsers of calls. The script is a list of answers; the number of
tool results in a prompt chooses one of them. A prompt without tools gets a plain text, as agents ask for titles.
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest, Shutdown
from max.pipelines.generation.process.events import EngineReady, TokensGenerated
from max.serve.process.listener import open_socket
from max.serve.process.logs import set_up_logs
from max.serve.process.server import FirstModel, run_server
from max.serve.process.settings import LogSettings, ServerSettings, WorkerSettings
from tests.serve.tool_templates import TEMPLATES

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
CONTEXT = 200_000
RESULT, TOOLS = "<|tool|>", "<s>tools: "
PLAIN = "A small edit of a file"


def answer_text(answer: dict[str, Any] | str) -> str:
    """The text of an answer of a script, as the template writes it."""
    if isinstance(answer, str):
        return answer
    return f"<tool_call>\n{json.dumps(answer)}\n</tool_call>"


class ScriptedWorker:
    """Answers requests of the engine's protocol; a thread of this process."""

    exit_reason, pid, signs, is_full = "it was stopped", 1, None, False

    def __init__(self, script: list[Any], log: Path, tokenizer: Any) -> None:
        self.channel = self
        self._script, self._log, self._tokenizer = script, log, tokenizer
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events.put(EngineReady(8, 128, 10_000))
        self._lock, self._prompts = threading.Lock(), 0

    def send(self, message: Any) -> None:
        if isinstance(message, Shutdown):
            self._events.put(None)
        if isinstance(message, GenerationRequest):
            self._answer(message)

    def send_soon(self, message: Any, loop: Any) -> None:
        self.send(message)

    def _answer(self, request: GenerationRequest) -> None:
        prompt = self._tokenizer.decode(list(request.tokens), skip_special_tokens=False)
        with self._lock:
            self._prompts += 1
            (self._log / f"prompt-{self._prompts:02}.txt").write_text(prompt, encoding="utf-8")
        step = min(prompt.count(RESULT), len(self._script) - 1)
        # an agent that calls no tools gets the one answer
        plain = TOOLS not in prompt and len(self._script) > 1
        text = PLAIN if plain else answer_text(self._script[step])
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        for token in tokens:
            event = TokensGenerated(request.request_id, (token,), GenerationStatus.ACTIVE)
            self._events.put(event)
        end = (request.eos_token_ids or (0,))[0]
        self._events.put(
            TokensGenerated(request.request_id, (end,), GenerationStatus.END_OF_SEQUENCE)
        )

    def receive(self) -> Any:
        event = self._events.get()
        if event is None:
            raise EOFError
        return event

    def receive_all(self) -> list[Any]:
        return [self.receive()]

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None:
        self._events.put(None)

    def close(self) -> None: ...


def model_folder(folder: Path) -> Path:
    """The bundled model with a long context and a template that takes tools."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    return folder


def main(script: Path, log: Path) -> None:
    """Serves until a signal comes."""
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder) / "scripted")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        settings = ServerSettings(
            port=0, metrics_port=None, log_requests=True, served_model_name="scripted"
        )
        worker_settings = WorkerSettings(
            {
                "model_path": str(model),
                "max_length": CONTEXT,
                "max_batch_size": 1,
                "served_model_name": "scripted",
            }
        )
        set_up_logs("info", LogSettings())
        worker = ScriptedWorker(json.loads(script.read_text()), log, tokenizer)
        run_server(settings, FirstModel(worker_settings, worker), open_socket(settings))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
