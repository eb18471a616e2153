"""The base classes of models of 26.x, without a model: arguments, configs, batch processors, graphs."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max._compat.pipelines import v26_models
from max._compat.pipelines.v26_models import (
    CompilationTimer,
    GraphPipelineModel,
    GraphPipelineModelWithKVCache,
    PipelineModelWithKVCache,
    V26Model,
    parse_state_dict_from_weights,
)
from max.driver import CPU, Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType
from max.nn.kv_cache import KVCacheParams
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.kv_cache import MemoryPlanner
from max.pipelines.lib import KVCacheConfig, ModelInputs, ModelOutputs, PipelineConfig
from max.pipelines.lib.interfaces import (
    ArchConfig,
    ArchConfigWithAttentionKVCache,
    ArchConfigWithBoundedMaxSeqLen,
    ArchConfigWithKVCache,
    ArchConfigWithPermissiveMaxSeqLen,
    ArchConfigWithStoredKVParams,
)
from max.pipelines.lib.interfaces.batch_processor import (
    BatchProcessor,
    BatchProcessorRuntime,
    PaddedEncoderBatchProcessor,
    SingleReplicaEmbeddingBatchProcessor,
    SingleReplicaRaggedBatchProcessor,
)

FILE = SimpleNamespace(pad_token_id=3)


class Own(V26Model[Any]):
    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: Any, huggingface_config: Any) -> int:
        return 64

    def execute(self, model_inputs: Any) -> Any:
        raise AssertionError


def config(**changed: Any) -> Any:
    made: Any = PipelineConfig(**changed)
    made._model_config = SimpleNamespace(
        huggingface_config=FILE, quantization_encoding=SimpleNamespace(cache_dtype=DType.float32)
    )
    return made


def model(cls: type[Any] = Own, **changed: Any) -> Any:
    return cls(
        pipeline_config=config(**changed), session="session", devices=[CPU()], kv_cache_config=KVCacheConfig(),
        weights={}, return_logits=ReturnLogits.LAST_TOKEN,
    )  # fmt: skip


def test_the_time_of_stages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.0, 17.0, 20.0, 21.5, 30.0])
    monkeypatch.setattr(v26_models, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with caplog.at_level(logging.INFO, "max.pipelines"):
        with CompilationTimer("own") as timer:
            timer.mark_build_complete()
        with CompilationTimer("short"):
            pass
        with pytest.raises(ZeroDivisionError), CompilationTimer("broken"):
            _ = 1 // 0
    assert caplog.messages == [
        "own: staged in 2.0 s",
        "own: compiled in 5.0 s",
        "short: compiled in 1.5 s",
    ]


def test_weights_by_the_names_of_a_model() -> None:
    weights: Any = {"a": SimpleNamespace(data=lambda: 7)}
    assert parse_state_dict_from_weights(config(), weights) == {"a": 7}
    given: list[Any] = []

    def adapter(state_dict: Any, huggingface_config: Any, pipeline_config: Any) -> Any:
        given.append(huggingface_config)
        return {"renamed": state_dict["a"]}

    options: Any = config()
    assert parse_state_dict_from_weights(options, weights, adapter) == {"renamed": weights["a"]}
    parse_state_dict_from_weights(options, weights, adapter, FILE2)
    assert given == [FILE, FILE2]


FILE2: Any = SimpleNamespace()


def test_arguments_in_either_order() -> None:
    cache = KVCacheConfig()
    options = config()
    rest = (cache, {"w": 1}, "adapter", ReturnLogits.ALL)
    for made in (
        Own(options, "session", [CPU()], *rest),  # type: ignore[arg-type]
        Own(options, "session", (CPU(),), *rest),  # type: ignore[arg-type]
        Own(
            options,
            "session",
            [CPU()],
            kv_cache_config=cache,
            weights={},
            adapter="adapter",
            return_logits=ReturnLogits.ALL,
        ),  # type: ignore[arg-type]  # fmt: skip
        Own(options, "session", FILE, "float32", [CPU()], *rest),  # type: ignore[arg-type]
        Own(
            options,
            "session",
            [CPU()],
            cache,
            {"w": 1},
            adapter="adapter",
            return_logits=ReturnLogits.ALL,
        ),  # type: ignore[arg-type]  # fmt: skip
    ):
        assert made.huggingface_config is FILE and made.kv_cache_config is cache
        assert made.devices[0] == CPU() and made.adapter == "adapter"
        assert made.return_logits is ReturnLogits.ALL and made.max_seq_len == 64
    plain = model()
    assert plain.adapter is None and plain.max_batch_size == 1 and plain.memory_plan is None
    with pytest.raises(TypeError, match="missing"):
        Own(options, "session")  # type: ignore[arg-type]


def test_a_config_and_a_batch_processor_are_made_once() -> None:
    class Config:
        @classmethod
        def initialize(cls, pipeline_config: Any, max_seq_len: int) -> Any:
            return SimpleNamespace(length=max_seq_len)

    class Processor:
        def __init__(self, config: Any, runtime: BatchProcessorRuntime) -> None:
            self.config, self.runtime = config, runtime

    class Configured(Own):
        model_config_cls = Config
        batch_processor_cls = Processor

    made = model(Configured, max_batch_size=5, prefill_chunk_size=33)
    assert made.arch_config is made.arch_config and made.arch_config.length == 64
    processor = made.batch_processor
    assert made.batch_processor is processor and processor.config is made.arch_config
    runtime = processor.runtime
    assert (runtime.max_batch_size, runtime.max_batch_input_tokens) == (5, 33)
    assert (runtime.pad_token_id, runtime.max_seq_len) == (3, 64)
    assert runtime.return_hidden_states is ReturnHiddenStates.NONE

    class Bare(Own):
        batch_processor_cls = Processor

    made = model(Bare)
    made.max_batch_size, made.huggingface_config = 9, SimpleNamespace()
    assert made.batch_processor.config is None
    assert made.batch_processor.runtime.max_batch_size == 9
    assert made.batch_processor.runtime.pad_token_id == 0
    assert model().batch_processor is None
    with pytest.raises(TypeError, match="Own does not define arch_config, and has no model_config"):
        _ = model().arch_config
    with pytest.raises(NotImplementedError, match="Own defines neither prepare_initial_token_inp"):
        model().prepare_initial_token_inputs([])


class Inputs(ModelInputs):
    def __init__(self, *buffers: Any, **named: Any) -> None:
        self.given, self.named = buffers, named

    @property
    def buffers(self) -> tuple[Any, ...]:
        return self.given


def test_inputs_of_a_batch_processor() -> None:
    class Processor(SingleReplicaRaggedBatchProcessor[Any, Inputs]):
        def _make_inputs(self, **named: Any) -> Inputs:
            return Inputs(**named)

    class Ragged(Own):
        batch_processor_cls = Processor

    context: Any = SimpleContext()
    made = model(Ragged).prepare_initial_token_inputs([context])
    assert made.named["tokens"].to_numpy().tolist() == [0, 1, 2]
    assert made.named["return_n_logits"].to_numpy().tolist() == [1]
    assert model(Ragged).prepare_initial_token_inputs([context], None, 4).named[
        "return_n_logits"
    ].to_numpy().tolist() == [4]


class SimpleContext:
    tokens, active_length = np.arange(5), 3


PARAMS = KVCacheParams(
    DType.float32, 2, 4, page_size=16, num_layers=3, devices=[DeviceRef.CPU()]
)  # fmt: skip


class Cached(PipelineModelWithKVCache[Any]):
    calculate_max_seq_len = Own.calculate_max_seq_len
    execute = Own.execute

    @classmethod
    def get_kv_params(  # type: ignore[override]
        cls, huggingface_config, pipeline_config, devices, kv_cache_config, cache_dtype
    ):
        assert cache_dtype is DType.float32 and devices == [DeviceRef.CPU()]
        return PARAMS


def test_the_cache_of_a_model() -> None:
    assert model(Cached).kv_params is PARAMS
    with pytest.raises(TypeError, match="Cached.get_kv_params gives no num_layers"):
        Cached.get_num_layers(FILE)  # type: ignore[arg-type]


def test_a_graph_is_loaded_once() -> None:
    steps: list[Any] = []

    class Session:
        def load(self, graph: Any, weights_registry: Any) -> Any:
            steps.append((graph, weights_registry))
            return SimpleNamespace(execute=lambda *buffers: [sum(buffers)])

    class Template(GraphPipelineModel[Any]):
        calculate_max_seq_len = Own.calculate_max_seq_len
        model_config_cls: Any = None

        def _build_graph_for_compile(self, session, state_dict, model_config):
            steps.append((state_dict, model_config))
            return "graph", {"w": 1}

        def _wire_batch_processor(self, model, model_config):
            steps.append("wired")

    made = model(Template)
    made.session, made.weights = Session(), {"w": SimpleNamespace(data=lambda: 8)}
    assert made.model is made.model
    assert steps == [({"w": 8}, None), ("graph", {"w": 1}), "wired"]
    with pytest.raises(NotImplementedError, match="Template defines neither execute nor batch_pro"):
        made.execute(Inputs(1, 2))
    made._batch_processor = SimpleNamespace(process_outputs=lambda outputs: outputs)
    assert made.execute(Inputs(1, 2)) == [3]
    Template.model_config_cls = int
    made._arch_config = "config"
    assert made._create_model_config({}) == "config"

    class Empty(GraphPipelineModel[Any]):
        calculate_max_seq_len = Own.calculate_max_seq_len

    with pytest.raises(NotImplementedError, match="Empty does not define _build_graph_for_compile"):
        _ = model(Empty).model


def test_the_time_of_a_graph_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Template(GraphPipelineModel[Any]):
        calculate_max_seq_len = Own.calculate_max_seq_len

        def _build_graph_for_compile(self, session, state_dict, model_config):
            return "graph", {}

    made = model(Template)
    made.session = SimpleNamespace(load=lambda graph, weights_registry: graph)
    with caplog.at_level(logging.INFO, "max.pipelines"):
        assert made.model == "graph"
    assert [m.partition(" in")[0] for m in caplog.messages] == [
        "Template: staged",
        "Template: compiled",
    ]


def test_a_cache_in_a_graph() -> None:
    made: Any = object.__new__(type("Both", (GraphPipelineModelWithKVCache, Cached), {}))
    seen: list[Any] = []
    params = SimpleNamespace(unflatten_kv_inputs=lambda values: seen.extend(values) or iter([5]))
    type(made).kv_params = params
    assert made._unflatten_kv_inputs([1, 2]) == [5] and seen == [1, 2]


def runtime(**changed: Any) -> BatchProcessorRuntime:
    values: dict[str, Any] = dict(
        pipeline_config=PipelineConfig(), devices=[CPU()], return_logits=ReturnLogits.LAST_TOKEN,
        max_batch_size=4, max_seq_len=64, max_batch_input_tokens=32,
    )  # fmt: skip
    return BatchProcessorRuntime(**values | changed)


@pytest.mark.parametrize(
    "cls", [SingleReplicaRaggedBatchProcessor, SingleReplicaEmbeddingBatchProcessor]
)
def test_types_and_outputs_of_batch_processors(cls: type[Any]) -> None:
    processor = cls(None, runtime())
    types = processor.get_symbolic_inputs(kv_params=PARAMS, device_refs=[DeviceRef.CPU()])
    assert [(type(t), t.dtype) for t in types] == [
        (TensorType, DType.int64),
        (TensorType, DType.uint32),
        (TensorType, DType.int64),
    ]
    logits = Tensor.zeros((1, 2), DType.float32)
    made: ModelOutputs = processor.process_outputs([logits])
    assert made.logits is logits
    with pytest.raises(NotImplementedError, match=f"{cls.__name__} does not define _make_inputs"):
        processor.prepare_initial_token_inputs([[view()]])


def view() -> Any:
    return SimpleNamespace(tokens=SimpleNamespace(active=np.arange(3)))


def test_signals_and_embeddings() -> None:
    class Signalled(SingleReplicaRaggedBatchProcessor[Any, Any]):
        _include_signal_buffers = True

    types = Signalled(None, runtime()).get_symbolic_inputs(
        kv_params=PARAMS, device_refs=[DeviceRef.CPU()]
    )
    assert [type(t) for t in types[3:]] == [BufferType]

    class Embedded(SingleReplicaEmbeddingBatchProcessor[Any, Inputs]):
        def _make_inputs(self, **named: Any) -> Inputs:
            return Inputs(**named)

    made = Embedded(None, runtime()).prepare_initial_token_inputs([[view(), view()]])
    assert made.named["tokens"].to_numpy().tolist() == [0, 1, 2] * 2
    assert made.named["input_row_offsets"].to_numpy().tolist() == [0, 3, 6]
    outputs = Embedded(None, runtime()).process_outputs([1, 2])
    assert outputs.logits == 1


class Bounded(ArchConfigWithBoundedMaxSeqLen, ArchConfig):
    max_seq_len = 12


class Stored(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    kv_params = PARAMS


JSON: Any = SimpleNamespace(
    hidden_size=24, num_attention_heads=4, num_hidden_layers=5, max_position_embeddings=40
)


def test_lengths_of_configs() -> None:
    for length, bounded, permissive in ((None, 40, 40), (7, 7, 7)):
        options: Any = SimpleNamespace(max_length=length)
        assert Bounded.calculate_max_seq_len(JSON, options) == bounded
        cls: Any = ArchConfigWithPermissiveMaxSeqLen
        assert cls.calculate_max_seq_len(JSON, options) == permissive
    assert cls.calculate_max_seq_len(JSON, SimpleNamespace(max_length=50)) == 50
    assert Bounded().get_max_seq_len() == 12


def test_caches_of_configs() -> None:
    assert Stored().get_kv_params() is PARAMS
    arguments: Any = (SimpleNamespace(model_config=SimpleNamespace(data_parallel_degree=1)),)
    for changed, heads, size in (
        ({}, 4, 6),
        ({"num_key_value_heads": 2}, 2, 6),
        ({"head_dim": 8}, 4, 8),
    ):
        file: Any = SimpleNamespace(**vars(JSON) | changed)
        made = Stored.construct_kv_params(
            file, *arguments, [DeviceRef.CPU()], KVCacheConfig(), DType.bfloat16
        )
        assert (made.n_kv_heads, made.head_dim, made.num_layers) == (heads, size, 5)
        assert made.dtype is DType.bfloat16

    class Configured(PipelineModelWithKVCache[Any]):
        execute = Own.execute
        model_config_cls = Stored

    options = config()
    options._model_config = arguments[0].model_config
    shape, layers = Configured.cache_shape(options, JSON, [CPU()], KVCacheConfig(), DType.float32)
    assert (shape.n_kv_heads, layers) == (4, 5)


def test_what_configs_lack() -> None:
    base: Any = ArchConfig
    for call, name in (
        (lambda: base.initialize(None, max_seq_len=1), "initialize"),
        (lambda: base.calculate_max_seq_len(JSON, None), "calculate_max_seq_len"),
        (lambda: ArchConfig().get_max_seq_len(), "get_max_seq_len"),
        (lambda: ArchConfigWithKVCache().get_kv_params(), "get_kv_params"),
        *(
            (lambda name=name: getattr(Attention, name).fget(object()), name)
            for name in ("num_key_value_heads", "head_dim", "num_layers")
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"does not define {name}"):
            call()
    assert MemoryPlanner(None).estimate_activation_memory(config(), JSON) == 0


Attention = ArchConfigWithAttentionKVCache


class Ready(Attention):
    num_key_value_heads = 2  # type: ignore[assignment]
    head_dim = 8  # type: ignore[assignment]
    num_layers = 3  # type: ignore[assignment]


def test_a_config_that_is_read() -> None:
    encoding = SimpleNamespace(dtype=DType.bfloat16, cache_dtype=DType.float32)
    specs = [SimpleNamespace(device_type="cpu", id=0)]
    model_config: Any = SimpleNamespace(
        quantization_encoding=encoding, device_specs=specs, kv_cache_config=KVCacheConfig(), data_parallel_degree=1,
        huggingface_config=JSON,
    )  # fmt: skip
    whole: Any = SimpleNamespace(model_config=model_config)
    for made in (
        Ready.initialize(whole, max_seq_len=9),
        Ready.initialize(SimpleNamespace(), model_config, max_seq_len=9),  # type: ignore[arg-type]
    ):
        assert (made.dtype, made.cache_dtype) == (DType.bfloat16, DType.float32)
        assert made.max_seq_len == 9 and made.devices == [DeviceRef.CPU()]
        assert made.get_kv_params().dtype is DType.float32
    assert Ready(DType.bfloat16, 1).get_kv_params().dtype is DType.bfloat16
    model_config.quantization_encoding = None
    with pytest.raises(ValueError, match="Ready: quantization_encoding is not set"):
        Ready.initialize(whole, max_seq_len=9)


def test_a_cache_without_a_number_of_layers() -> None:
    class Counted(Cached):
        @classmethod
        def get_kv_params(cls, huggingface_config, n_devices):  # type: ignore[override]
            assert n_devices == 1
            return KVCacheParams(DType.float32, 2, 4, page_size=16)

        @classmethod
        def get_num_layers(cls, huggingface_config):
            return 6

    rest: Any = (JSON, [CPU()], KVCacheConfig(), DType.float32)
    assert Counted.cache_shape(config(), *rest)[1] == 6


def test_defaults_of_batches() -> None:
    """Every step returns the logits of one token unless it is told otherwise."""
    for cls in (
        BatchProcessor,
        SingleReplicaRaggedBatchProcessor,
        SingleReplicaEmbeddingBatchProcessor,
        PaddedEncoderBatchProcessor,
    ):
        parameters = inspect.signature(cls.prepare_initial_token_inputs).parameters
        assert parameters["return_n_logits"].default == 1
    made = runtime()
    assert made.enable_chunked_prefill and (made.data_parallel_degree, made.pad_token_id) == (1, 0)


@pytest.mark.parametrize(
    "cls",
    [
        SingleReplicaRaggedBatchProcessor,
        SingleReplicaEmbeddingBatchProcessor,
        PaddedEncoderBatchProcessor,
    ],
)
def test_batches_are_on_the_first_device(cls: type[Any]) -> None:
    class OwnProcessor(cls):
        def _make_inputs(self, **named: Any) -> Inputs:
            return Inputs(**named)

    refs = [DeviceRef.CPU(1), DeviceRef.CPU(0)]
    processor: Any = OwnProcessor(None, runtime(devices=[CPU(1), CPU(0)]))
    first, *_ = processor.get_symbolic_inputs(kv_params=PARAMS, device_refs=refs)
    assert first.device == refs[0]
    made = processor.prepare_initial_token_inputs([[view()]])
    assert next(iter(made.named.values())).device == CPU(1)


def test_padded_types() -> None:
    processor: Any = PaddedEncoderBatchProcessor
    made = processor(None, runtime())
    types = made.get_symbolic_inputs(
        kv_params=None, device_refs=[DeviceRef.CPU(), DeviceRef.CPU(1)]
    )
    assert [(t.dtype, t.rank, t.device) for t in types] == [
        (DType.int64, 2, DeviceRef.CPU()),
        (DType.float32, 2, DeviceRef.CPU()),
    ]
    with pytest.raises(NotImplementedError, match="does not define _make_inputs"):
        made.prepare_initial_token_inputs([[view()]])
