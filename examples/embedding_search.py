"""Search by meaning of words: vectors of texts from an encoder, and the texts that are nearest to a query.

Without an argument it runs an untrained BERT, whose vectors tell texts apart by their words; give it the folder of an
embedding model such as all-MiniLM-L6-v2 instead.
"""

import sys
import tempfile
from pathlib import Path

from _untrained import write_encoder

from max.pipelines import PipelineConfig
from max.pipelines.encoders.text_encoder import TextEncoder

TEXTS = [
    "The cat sleeps on the warm roof.",
    "A train to the north leaves at noon.",
    "Bread is baked from flour, water and salt.",
    "The north wind is cold.",
]


def search(folder: str) -> None:
    """Prints the vectors' shape, and the nearest text of each query."""
    encoder = TextEncoder(PipelineConfig(model_path=folder))
    vectors = encoder.encode(TEXTS)
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
    for query in ("a cold wind", "flour and water", "the train"):
        scores = encoder.rank(query, TEXTS)
        print(f"{query}: {TEXTS[int(scores.argmax())]}")


if len(sys.argv) > 1:
    search(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as made:
        write_encoder(Path(made), TEXTS)
        search(made)

# prints: 4 vectors of 64 numbers
# prints: a cold wind: The north wind is cold.
# prints: flour and water: Bread is baked from flour, water and salt.
# prints: the train: A train to the north leaves at noon.
