"""Quantization with an importance matrix: a text shows which columns of each matrix matter, and their errors become smaller.

The program writes the bundled chat model as two GGUF files of 4 bits: `plain` treats all columns alike, `weighted` reads one
part of a text first, as ``max quantize models/tiny-chat weighted.gguf --type q4_0 --imatrix text.txt`` does. Both models
predict another part of the text; the program compares how far their predictions are from those of the float model.
"""

import tempfile
from pathlib import Path

import numpy as np

from max.engine import InferenceSession
from max.pipelines.gguf.export import export_gguf
from max.pipelines.perplexity import predictions

MODEL = Path(__file__).parents[1] / "models" / "tiny-chat"
text = (MODEL / "heldout.txt").read_text("utf-8")
calibration, measured = text[len(text) // 2 :], text[: len(text) // 2]


def predicted(model: Path) -> np.ndarray:
    """The log-probabilities of the tokens of 16 windows of the measured part."""
    return predictions(measured, window=256, most=16, model_path=str(model))


session = InferenceSession()
exact = predicted(MODEL)
distances: dict[str, float] = {}
with tempfile.TemporaryDirectory() as folder:
    for name, reads in (("plain", None), ("weighted", calibration)):
        file = Path(folder) / f"{name}.gguf"
        export_gguf(MODEL, file, "q4_0", session, reads)
        logs = predicted(file)
        distances[name] = float(np.sqrt(np.square(logs - exact).mean()))
        near = bool(np.exp(exact.mean() - logs.mean()) < 1.05)
        print(f"{name}: its perplexity is within 5% of the float model's:", near)

saved = 1 - distances["weighted"] / distances["plain"]
print(f"{saved:.1%} nearer to the float model's predictions")
print("the importance matrix brought the predictions nearer:", saved > 0)

# prints: plain: its perplexity is within 5% of the float model's: True
# prints: weighted: its perplexity is within 5% of the float model's: True
# prints: the importance matrix brought the predictions nearer: True
