"""A chat in the terminal: the conversation so far is the prompt of each answer.

Run it in a terminal to talk with the bundled model; without one it asks two questions of its own. `max chat` has more:
streaming, commands, servers.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from max.entrypoints.llm import LLM
from max.pipelines import PipelineConfig

MODEL = Path(__file__).parents[1] / "models" / "tiny-chat"


def questions() -> Iterator[str]:
    """What the user says, until the end of the input."""
    if not sys.stdin.isatty():
        yield from ("What is the capital of Norway?", "What is the capital of Japan?")
        return
    while True:
        try:
            yield input("you> ")
        except EOFError:
            return


def prompt(turns: list[tuple[str, str]]) -> str:
    """The conversation in the words of the model's chat template, up to where its answer begins."""
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    return f"{text}<|im_start|>assistant\n"


llm = LLM(PipelineConfig(model_path=str(MODEL), max_length=512))
turns: list[tuple[str, str]] = []
for question in questions():
    turns.append(("user", question))
    (answer,) = llm.generate([prompt(turns)], max_new_tokens=48, use_tqdm=False)
    turns.append(("assistant", answer))
    print("model>", answer)
    # a small model answers best without what was said before
    turns = turns[-2:] if sys.stdin.isatty() else []

# prints: model> The capital of Norway is Oslo.
# prints: model> The capital of Japan is Tokyo.
