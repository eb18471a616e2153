"""Install the peers that we are measured against, each into an environment of its own under `benchmarks/.peers`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.runner import ROOT

FOLDER = ROOT / "benchmarks" / ".peers"

# llama.cpp for this machine's vectors, but not for AMX, whose path crashes in some releases
_AVX2 = "AVX AVX2 FMA F16C"
_AVX512 = f"{_AVX2} AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16"


def _llama(features: str) -> tuple[list[str], dict[str, str]]:
    """llama.cpp, built for some features of the processor."""
    flags = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in features.split())]
    env = {"CMAKE_ARGS": " ".join(flags), "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    return ["llama-cpp-python"], env


PEERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "llama": _llama(_AVX512),
    "llama-avx2": _llama(_AVX2),
    # its own bounds on opentelemetry need help to be found
    "max": (
        [
            "max[serve]==26.7.0",
            "torch==2.13.0",
            "opentelemetry-sdk<1.36",
            "opentelemetry-api<1.36",
            "opentelemetry-exporter-otlp-proto-grpc<1.36",
            "opentelemetry-exporter-otlp-proto-http<1.36",
            "opentelemetry-exporter-prometheus>=0.50b0,<0.57b0",
        ],
        {},
    ),
    # onnx and onnxscript are what torch exports with
    "onnx": (["onnxruntime", "onnx", "onnxscript"], {}),
    "openvino": (["openvino"], {}),
}
"""For each peer the packages, and the environment of the installation. torch and transformers come with the tests."""


def python(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None where it is not installed."""
    path = FOLDER / peer / "bin" / "python"
    return path if path.exists() else None


def install(peer: str) -> None:
    """Make a peer's environment; one that has these packages is kept."""
    packages, env = PEERS[peer]
    done = FOLDER / peer / ".installed"
    if done.exists() and done.read_text() == " ".join(packages):
        return
    FOLDER.mkdir(exist_ok=True)
    if python(peer) is None:
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / peer)], check=True)
    pip = [str(FOLDER / peer / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *packages], check=True, env={**os.environ, **env})
    done.write_text(" ".join(packages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", choices=[[], *PEERS], default=[])
    for peer in parser.parse_args().peers or PEERS:
        try:
            install(peer)
            print(f"{peer}: installed")
        except subprocess.CalledProcessError as error:
            print(f"{peer}: not installed: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
