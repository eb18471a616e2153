"""Install the peers that we are measured against, each into an environment of its own under `benchmarks/.peers`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.runner import ROOT

FOLDER = ROOT / "benchmarks" / ".peers"

_AVX2 = "AVX AVX2 FMA F16C"
_FLAGS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
"""Linux' names of vector instructions, and ggml's. AMX is left out, as its path crashes in some releases."""


def _this_machine() -> str:
    """The vector instructions of this machine, by ggml's names."""
    info = Path("/proc/cpuinfo")
    line = re.search(r"^flags\s*:(.*)$", info.read_text(), re.M) if info.exists() else None
    return " ".join(_FLAGS[flag] for flag in line[1].split() if flag in _FLAGS) if line else _AVX2


def _llama(features: str) -> tuple[list[str], dict[str, str]]:
    """llama.cpp, built for some features of the processor."""
    flags = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in features.split())]
    env = {"CMAKE_ARGS": " ".join(flags), "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    return ["llama-cpp-python"], env


PEERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "llama": _llama(_this_machine()),
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
    # what writes the files of `benchmarks.imported`, and has the models of `benchmarks.compiled`
    "exporters": (
        [
            "torch==2.13.0",
            "torchvision==0.28.0",
            "timm",
            "transformers>=5.0",
            "onnx",
            "onnxscript",
            "onnxruntime",
            "onnxmltools",
            "skl2onnx",
            "lightgbm",
            "silero-vad",
        ],
        {},
    ),
    # its server
    "transformers": (["transformers[serving]>=5.0", "accelerate", "torch==2.13.0"], {}),
}
"""For each peer the packages, and the environment of the installation. torch and transformers come with the tests, transformers' server does not."""


def python(peer: str) -> Path | None:
    """The interpreter of a peer's environment; None where it is not installed."""
    path = FOLDER / peer / "bin" / "python"
    return path if path.exists() else None


def packages(peer: str) -> str:
    """The folder with the packages of a peer's environment; empty where it is not installed."""
    return next((str(path) for path in (FOLDER / peer / "lib").glob("*/site-packages")), "")


def llama_python() -> Path | None:
    """The interpreter with llama.cpp for this machine, which is that for AVX2 where the machine has no more; None: not installed."""
    only_avx2 = set(_this_machine().split()) == set(_AVX2.split())
    return python("llama") or (python("llama-avx2") if only_avx2 else None)


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


SERVER = FOLDER / "llama-server"
"""The folder of llama.cpp's sources and of the server that is built of them."""


def llama_server(avx2: bool = False) -> Path | None:
    """llama.cpp's server; None where it was not built.

    Args:
        avx2: Whether the build for AVX2 is meant.
    """
    build = "build-avx2" if avx2 else "build"
    found = sorted(SERVER.glob(f"*/vendor/llama.cpp/{build}/bin/llama-server"))
    return found[-1] if found else None


def install_llama_server(avx2: bool = False) -> None:
    """Builds llama.cpp's server of the sources in the source distribution of llama-cpp-python.

    Args:
        avx2: Whether it is built for AVX2 instead of this machine's vectors.
    """
    if llama_server(avx2) is not None:
        return
    features = _AVX2 if avx2 else _this_machine()
    build = "build-avx2" if avx2 else "build"
    SERVER.mkdir(parents=True, exist_ok=True)
    tools = SERVER / "tools"
    if not tools.exists():
        subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
        pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "cmake", "ninja"], check=True)
    download = [str(tools / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps"]
    source = ["--no-binary", ":all:", "--no-build-isolation", "-d", str(SERVER), "llama-cpp-python"]
    env = {**os.environ, "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if not list(SERVER.glob("llama_cpp_python-*.tar.gz")):
        subprocess.run(
            [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "scikit-build-core"],
            check=True,
        )
        subprocess.run([*download, *source], check=True, env=env)
    (archive,) = SERVER.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(SERVER, filter="data")
    folder = SERVER / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    flags = [f"-DGGML_{name}=ON" for name in features.split()]
    options = ["-DGGML_NATIVE=OFF", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release", "-G", "Ninja"]
    for command in (
        ["cmake", "-B", build, *options, *flags],
        ["cmake", "--build", build, "--target", "llama-server", "-j", "2"],
    ):
        subprocess.run(command, check=True, cwd=folder, env=env)


SERVERS = {
    "llama-server": install_llama_server,
    "llama-server-avx2": lambda: install_llama_server(avx2=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", choices=[[], *PEERS, *SERVERS], default=[])
    for peer in parser.parse_args().peers or PEERS:
        try:
            SERVERS.get(peer, lambda name=peer: install(name))()
            print(f"{peer}: installed")
        except subprocess.CalledProcessError as error:
            print(f"{peer}: not installed: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
