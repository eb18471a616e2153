"""No code that comes with a checkpoint runs: not in pickles, not in configs, not in Python files beside the weights.

CVE-2025-32434 (torch: code in files read with `weights_only=True`), CVE-2026-22807 (vLLM: `auto_map` of a config ran
code without `trust_remote_code`), CVE-2025-32444 and CVE-2026-3059 (pickles on sockets of vLLM and SGLang).
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.graph.weights import WeightsFileError, load_weights
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.lib.registry import PIPELINE_REGISTRY
from tests.pipelines.broken_files import TINY

MARK = "code ran"
CALLABLES = [
    ("os", "system"),
    ("builtins", "exec"),
    ("builtins", "eval"),
    ("subprocess", "Popen"),
    ("pathlib", "Path.write_text"),
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("torch._utils", "_import_dotted_name"),
    ("importlib", "import_module"),
    ("max.driver", "Tensor"),
    ("collections", "OrderedDict.__class__"),
    ("torch.jit", "load"),
]


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def hostile_pickle(draw: random.Random, path: Path) -> bytes:
    """A pickle that would write a file if a function of it were called."""
    module, name = draw.choice(CALLABLES)
    argument = f"open({str(path)!r}, 'w').write({MARK!r})"
    protocol = draw.choice([0, 2, 4])
    match draw.randrange(4):
        case 0:
            value: Any = {"w": Call(exec, argument)}
        case 1:
            value = [Call(exec, argument), {"state_dict": Call(eval, argument)}]
        case 2:
            stream = f"c{module}\n{name}\n(S{argument!r}\ntR.".encode()
            return stream
        case _:
            stream = b"\x80\x02}X\x01\x00\x00\x00w" + f"c{module}\n{name}\n".encode()
            return (
                stream + b"X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85Rs."
            )
    return pickle.dumps(value, protocol)


def archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/code/evil.py", "raise SystemExit")
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickles_that_call_functions(suffix: str, tmp_path: Path) -> None:
    """CVE-2025-32434."""
    draw, written = random.Random(suffix), tmp_path / "written"
    for _ in range(150):
        content = hostile_pickle(draw, written)
        path = tmp_path / f"pytorch_model{suffix}"
        path.write_bytes(archive(content) if draw.random() < 0.6 else content)
        with pytest.raises((WeightsFileError, ValueError)):
            weights = load_weights([path])
            assert [weight.data() for _, weight in weights.items()], pickletools.dis(content)
        assert not written.exists()


def test_code_that_a_config_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CVE-2026-22807."""
    model, written = tmp_path / "model", tmp_path / "written"
    shutil.copytree(TINY, model)
    code = f"open({str(written)!r}, 'w').write({MARK!r})\nclass C: pass\n"
    for name in (
        "modeling_evil",
        "configuration_evil",
        "tokenization_evil",
        "__init__",
        "conftest",
        "sitecustomize",
    ):
        (model / f"{name}.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.C",
        "AutoTokenizer": ["tokenization_evil.C", None]}  # fmt: skip
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        values = json.loads((model / name).read_text())
        values |= {"auto_map": auto_map, "custom_generate": "modeling_evil", "tokenizer_class": "C"}
        (model / name).write_text(json.dumps(values))
    for options in ([], ["--trust-remote-code"]):
        PIPELINE_REGISTRY.reset()
        code = report(
            cli,
            [
                "generate",
                "--model",
                str(model),
                "--prompt",
                "hi",
                "--max-new-tokens",
                "1",
                *options,
            ],
        )
        assert code in (0, 2), capfd.readouterr().err
        assert not written.exists()
    (model / "tokenizer.json").unlink()
    (model / "vocab.txt").write_text("a\nb\n")
    PIPELINE_REGISTRY.reset()
    assert report(cli, ["generate", "--model", str(model), "--prompt", "hi"]) == 2
    assert not written.exists()


def test_messages_of_the_worker_are_no_pickles(tmp_path: Path) -> None:
    """CVE-2025-32444, CVE-2026-3059."""
    written, codec = tmp_path / "written", MessageCodec()

    class Connection:
        closed = False

        def recv_bytes(self) -> bytes:
            return frame

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        frame = pickle.dumps([Call(exec, f"open({str(written)!r}, 'w')")], protocol)
        channel = ConnectionChannel[Any, Any](Connection(), codec)  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"."):
            channel.receive()
        assert not written.exists()
