"""Packages from PyPI that bring ONNX files: their own programs give the same answers with this engine as with ONNX
Runtime."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.long

ENGINE = """
import sys
import max.onnx
sys.modules["onnxruntime"] = max.onnx
"""
"""What comes before a program that is to use this engine."""

PROGRAMS = {
    # seconds of noise between silences: where it hears speech, and how likely each step is one
    "silero_vad": """
import json
import numpy as np
import torch
from silero_vad import get_speech_timestamps, load_silero_vad
rng = np.random.default_rng(0)
time = np.arange(16000 * 4) / 16000
voice = sum(np.sin(2 * np.pi * f * time) / n for n, f in enumerate((140, 280, 420, 2100), 1))
voice *= (np.sin(2 * np.pi * 3 * time) > 0) * (time > 1) * (time < 3) * 0.2
audio = torch.tensor(voice + rng.normal(0, 0.002, time.shape), dtype=torch.float32)
model = load_silero_vad(onnx=True)
spans = get_speech_timestamps(audio, model, threshold=0.3)
model.reset_states()
steps = [model(audio[i : i + 512], 16000).item() for i in range(0, 16000 * 4, 512)]
print(json.dumps([spans, [round(step, 3) for step in steps]]))
""",
    # kinds of texts and bytes
    "magika": """
import json
from magika import Magika
texts = [
    b"import os\\nprint(os.environ)\\n" * 9,
    b"<html><body><p>hello</p></body></html>" * 5,
    b'{"a": [1, 2, 3]}' * 40,
    bytes(range(256)) * 8,
    b"#include <stdio.h>\\nint main(void) { return 0; }\\n" * 6,
    b"\\x89PNG\\r\\n\\x1a\\n" + bytes(300),
]
found = [Magika().identify_bytes(text) for text in texts]
print(json.dumps([[str(f.output.label), round(f.score, 3)] for f in found]))
""",
    # lines of text in a drawn image
    "rapidocr": """
import json
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rapidocr import RapidOCR
image = Image.new("RGB", (420, 130), "white")
draw = ImageDraw.Draw(image)
font = ImageFont.load_default(28)
draw.text((20, 15), "Hello world 2026", fill="black", font=font)
draw.text((20, 70), "second line: 31415", fill="black", font=font)
result = RapidOCR()(np.asarray(image))
print(json.dumps([list(result.txts), [round(float(s), 2) for s in result.scores]]))
""",
}


def answers(program: str) -> Any:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("package", list(PROGRAMS))
def test_the_program_of_a_package(package: str) -> None:
    for name in (package, "onnxruntime", "onnx"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    assert answers(ENGINE + PROGRAMS[package]) == answers(PROGRAMS[package])
