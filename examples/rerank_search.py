"""Search through the server: vectors choose the candidates, `/v1/rerank` puts them in order.

Without an argument it serves an untrained encoder, whose vectors tell texts apart by their words; give it the folder of
an embedding model or a ranker instead. Needs `pip install -e ".[serve]" httpx`.
"""

import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
from _server import serve
from _untrained import write_encoder

TEXTS = [
    "The cat sleeps on the warm roof.",
    "A train to the north leaves at noon.",
    "Bread is baked from flour, water and salt.",
    "The north wind is cold.",
]


def search(url: str, query: str) -> str:
    """The text that fits a query best."""
    with httpx.Client(base_url=url, timeout=120) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post(
            "/v1/embeddings", json={"model": model, "input": [query, *TEXTS]}
        ).json()
        vectors = np.array([entry["embedding"] for entry in answer["data"]])
        # 1: the two texts whose vectors are nearest
        nearest = np.argsort(vectors[1:] @ vectors[0])[::-1][:2]
        candidates = [TEXTS[int(i)] for i in nearest]
        # 2: their order by the ranker
        body = {"model": model, "query": query, "documents": candidates, "top_n": 1}
        ranked = client.post("/v1/rerank", json=body).raise_for_status().json()
    return candidates[ranked["results"][0]["index"]]


def main(folder: str) -> None:
    """Three queries."""
    with serve(folder) as url:
        for query in ("a cold wind", "flour and water", "the train"):
            print(f"{query}: {search(url, query)}")


if len(sys.argv) > 1:
    main(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder), TEXTS)
        main(folder)

# prints: a cold wind: The north wind is cold.
# prints: flour and water: Bread is baked from flour, water and salt.
# prints: the train: A train to the north leaves at noon.
