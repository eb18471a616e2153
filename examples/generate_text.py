"""The bundled chat model: a batch of questions through its chat template, answered greedily."""

from pathlib import Path

from max.entrypoints.llm import LLM
from max.pipelines import PipelineConfig

MODEL = Path(__file__).parents[1] / "models" / "tiny-chat"


def chat(question: str) -> str:
    """The prompt that the model's template makes of one question; `LLM.generate` continues bare text."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


llm = LLM(PipelineConfig(model_path=str(MODEL), max_length=512))
questions = ["What is the capital of Norway?", "What is the capital of Japan?"]
for answer in llm.generate([chat(q) for q in questions], max_new_tokens=24, use_tqdm=False):
    print(answer)

# prints: The capital of Norway is Oslo.
# prints: The capital of Japan is Tokyo.
