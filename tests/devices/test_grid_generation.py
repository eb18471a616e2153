"""Text generation on a device with a loop, a sampling and a memory of its own: equal to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from max.driver import CPU, DeviceSpec, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.sampling_device import sampling_device
from max.graph import Graph, TensorType
from max.interfaces import (
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.sampling.inputs import sample_tokens
from max.pipelines.structured.grammar import of_regex
from tests.devices.fake import FakeMemory
from tests.devices.grid import GridBackend, GridDevice, grid_devices
from tests.devices.mixed import ONE, compare, floats
from tests.devices.test_fake_models import PROMPTS, write_llama

DRAWS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.2, "top_k": 60, "top_p": 0.8, "min_p": 0.05, "seed": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of one layer: the device interprets its kernels, and loops and sampling are in question."""
    return write_llama(tmp_path_factory.mktemp("llama"), 1)


@pytest.fixture
def device() -> Iterator[GridDevice]:
    with grid_devices(1) as found:
        yield found[0]


def pipeline_on(folder: Path, spec: DeviceSpec) -> Any:
    config = PipelineConfig(
        model_path=folder, device_specs=[spec], max_length=64, max_batch_size=2, max_num_steps=8
    )
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def generate(pipeline: Any, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=4, **options)
    requests = [
        TextGenerationRequest(RequestID(), "m", prompt=prompt, sampling_params=params)
        for prompt in PROMPTS[:2]
    ]
    return [list(output.tokens) for output in pipeline.generate(requests)]


def backend_of(pipeline: Any) -> GridBackend:
    return cast(GridBackend, pipeline.session._backends[1])


def test_several_steps_in_a_call(folder: Path, device: GridDevice) -> None:
    """The loop of the device runs them, and its kernel samples."""
    on_cpu, there = (
        pipeline_on(folder, spec) for spec in (DeviceSpec.cpu(), DeviceSpec.accelerator(0))
    )
    assert there.repeats_steps
    for options in DRAWS.values():
        turns, ran = backend_of(there).turns, device.queue.launches
        ran.clear()
        assert generate(there, **options) == generate(on_cpu, **options)
        assert backend_of(there).turns > turns
        assert any("next_step.ragged.paged" in name for name in ran)
        assert any("sample.token" in name for name in ran)


def test_the_host_reads_and_ends_a_loop(folder: Path, device: GridDevice) -> None:
    """Tokens arrive in memory that both share; an interrupt before a run ends it after its first step."""
    pipeline = pipeline_on(folder, DeviceSpec.accelerator(0))
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    context = TextContext(max_length=60, tokens=np.array([5, 6, 7]), sampling_params=params)
    inputs = TextGenerationInputs([{context.request_id: context}], 1)
    pipeline.execute(inputs)
    delivered: list[int] = []

    def deliver(outputs: list[TextGenerationOutput]) -> None:
        for output in outputs:
            delivered.extend(output.tokens)

    reader = StepReader(deliver)
    pipeline.read_steps(reader)
    try:
        inputs.num_steps = 5
        result = pipeline.execute(inputs)
        count = len(reader.end(5).get(context.request_id, []))
    finally:
        reader.close()
        pipeline.read_steps(None)
    tokens = list(result[context.request_id].tokens)
    assert result.steps == 5 and len(tokens) == 5
    assert delivered[:count] == tokens[:count] == context.generated_tokens[1 : 1 + count].tolist()
    pipeline.interrupt()
    assert pipeline.execute(inputs).steps == 1
    assert pipeline.execute(inputs).steps == 5
    pipeline.release(context.request_id)


@pytest.mark.parametrize("samples", [True, False])
def test_biases_and_penalties(
    folder: Path, device: GridDevice, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    """The device applies them, without a copy of the logits; one that cannot sample leaves all to the host."""
    monkeypatch.setattr(GridBackend, "samples", samples)
    on_cpu, there = (
        pipeline_on(folder, spec) for spec in (DeviceSpec.cpu(), DeviceSpec.accelerator(0))
    )
    assert sampling_device(there.session, device) is (device if samples else CPU())
    assert there.repeats_steps is samples
    memory, sizes = cast(FakeMemory, device.memory), list[int]()
    read = memory.read

    def recorded(ptr: int, nbytes: int) -> Any:
        sizes.append(nbytes)
        return read(ptr, nbytes)

    monkeypatch.setattr(memory, "read", recorded)
    common = {"logit_bias": {35: -100.0, 7: 6.5}, "min_new_tokens": 3, "frequency_penalty": 0.5}
    for draw in DRAWS.values():
        assert generate(there, **common, **draw) == generate(on_cpu, **common, **draw)
    # float32 logits of one request and of two
    assert any(size in (120 * 4, 120 * 8) for size in sizes) is not samples


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_of_the_device_draws_as_that_of_the_cpu(seed: int) -> None:
    """Ties, NaN and infinite logits among them."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 7)), int(rng.integers(1, 90))
    logits = floats(rng, rows, columns).round(1) * 3
    odd = rng.choice([np.nan, np.inf, -np.inf, -0.0], logits.shape)
    logits = np.where(rng.random(logits.shape) < 0.15, odd, logits).astype(np.float32)
    logits[rng.random(rows) < 0.2] = np.nan
    inputs = [
        logits,
        rng.choice([0, 0.3, 1, 2], rows).astype(np.float32),
        rng.integers(-1, columns + 3, rows),
        rng.choice([0, 0.4, 1], rows).astype(np.float32),
        rng.choice([0, 0.1], rows).astype(np.float32),
        rng.integers(0, 2**64, rows, np.uint64),
    ]
    with grid_devices(1) as found:
        compare(
            cast(Any, found), lambda at, *args: [sample_tokens(*args)], [(x, ONE) for x in inputs]
        )


def test_a_bad_temperature_raises_as_on_the_cpu(device: GridDevice) -> None:
    kinds = [DType.float32, DType.int64, DType.float32, DType.float32, DType.uint64]
    types = [
        TensorType(DType.float32, [1, 5], ONE),
        *(TensorType(kind, [1], ONE) for kind in kinds),
    ]
    with Graph("sample", input_types=types) as graph:
        graph.output(sample_tokens(*(value.tensor for value in graph.inputs)))
    model = InferenceSession(devices=[CPU(), device]).load(graph)
    values = [np.zeros((1, 5)), [-1], [0], [1], [0], [3]]
    arrays = [
        np.array(x, kind.to_numpy()) for x, kind in zip(values, [kinds[0], *kinds], strict=True)
    ]
    with pytest.raises(ValueError, match="the temperature of row 0 is -1"):
        outputs = model.execute(*[Tensor.from_numpy(x).to(device) for x in arrays])
        outputs[0].to(CPU())


def test_grammars_are_followed_on_the_device(folder: Path, device: GridDevice) -> None:
    """Masks are tables on the device, and its kernel samples under them."""
    texts: list[list[list[int]]] = []
    for spec in (DeviceSpec.cpu(), DeviceSpec.accelerator(0)):
        pipeline = pipeline_on(folder, spec)
        engine = Engine(pipeline, limits_of(pipeline))
        contexts = [
            TextContext(
                request_id=RequestID(f"{number}"), max_length=40, tokens=np.array([5, 6, 7]),
                grammar=of_regex(r"(.|\n){30}"), eos_token_ids={0},
                sampling_params=SamplingParams(**{"seed": number, **options}),
            )
            for number, options in enumerate(DRAWS.values())
        ]  # fmt: skip
        for context in contexts:
            engine.submit(context)
        device.queue.launches.clear()
        while not engine.idle:
            engine.step()
        assert all(context.failure is None for context in contexts)
        texts.append([context.generated_tokens.tolist() for context in contexts])
    assert texts[0] == texts[1] and all(len(tokens) > 1 for tokens in texts[0])
    assert any("gather_nd" in name for name in device.queue.launches)
