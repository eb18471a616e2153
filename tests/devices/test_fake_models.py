"""A whole model, from its checkpoint to the tokens, on a device other than the CPU: equal to the CPU alone."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from max.driver import DeviceSpec
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationRequest
from max.nn.transformer.transformer import last_rows
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from tests.devices.fake import FakeDevice
from tests.devices.mixed import watched_devices
from tests.serve.conftest import RunningServer

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
PROMPTS = [[5, 6, 7, 8, 9], [11], [30, 31, 32]]
__all__ = ["watched_devices"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of two layers."""
    return write_llama(tmp_path_factory.mktemp("llama"), 2)


def write_llama(found: Path, layers: int) -> Path:
    """Writes a random Llama with grouped heads and the bundled model's tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=119,
        bos_token_id=1,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found / name).write_bytes((TINY / name).read_bytes())
    return found


def generate(folder: Path, spec: DeviceSpec) -> list[list[int]]:
    config = PipelineConfig(
        model_path=folder, device_specs=[spec], max_length=64, max_batch_size=2, max_num_steps=1
    )
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    params = SamplingParams(max_new_tokens=4, temperature=0)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=prompt, sampling_params=params)
        for prompt in PROMPTS
    ]
    return [list(output.tokens) for output in pipeline.generate(requests)]


def test_rows_of_several_logits_are_on_the_device() -> None:
    """The number of logits is in the host's memory, the offsets of rows are not."""
    device = DeviceRef.GPU()
    types = [TensorType(DType.uint32, ["n"], device), TensorType(DType.int64, [1], DeviceRef.CPU())]
    with Graph("rows", input_types=types) as graph:
        found = last_rows(*(value.tensor for value in graph.inputs))
        graph.output(*found)
    assert [each.device for each in found] == [device, device]


@pytest.mark.long
def test_a_server(folder: Path) -> None:
    """The server's worker runs a model on a grid device: its answers are those of the CPU."""
    on_cpu = generate(folder, DeviceSpec.cpu())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    server = RunningServer(
        "--model", str(folder), "--served-model-name", "tiny", "--devices", "gpu", "--max-length", "64",
        "--max-batch-size", "2", module="tests.devices.grid_server",
    )  # fmt: skip
    try:
        with httpx.Client(base_url=server.wait_ready().url, timeout=240) as client:
            for prompt, tokens in zip(PROMPTS, on_cpu, strict=True):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                (choice,) = answer.json()["choices"]
                assert choice["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    finally:
        assert server.stop() == 0


def test_a_llama(folder: Path, watched_devices: list[FakeDevice]) -> None:
    """Prefill and decode in batches over the device's paged cache; weights are copied to the device once."""
    on_cpu = generate(folder, DeviceSpec.cpu())
    ran = watched_devices[1].queue.launches
    assert not ran
    there = generate(folder, DeviceSpec.accelerator(1))
    assert there == on_cpu and len(np.unique(on_cpu)) > 3
    assert any("attention.ragged.paged" in name for name in ran)
    assert any("kv_store.ragged.paged" in name for name in ran)
