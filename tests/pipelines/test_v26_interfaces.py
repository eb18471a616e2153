"""The interfaces of 26.x for architectures, without a model: declarations, configurations, caches, batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max import tree
from max._compat.pipelines.signatures import named_arguments
from max._compat.pipelines.v26_adapter import V26Entry, adapted_model, is_of_26
from max._compat.pipelines.v26_architecture import V26Architecture
from max._compat.pipelines.v26_config import WITHOUT_EFFECT, PipelineArgs, own_options
from max._compat.pipelines.v26_contexts import ContextView, replica_views, view_of
from max.driver import CPU, Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph.weights import WeightsFormat
from max.interfaces import PipelineTask
from max.nn.kv_cache import (
    CacheGroup,
    KVCacheInputs,
    KVCacheParams,
    MHAKVCacheParams,
    RaggedKVCacheInputs,
    RecurrentState,
)
from max.nn.kv_cache.cache_params import KVCacheStrategy
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines import forms
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.context import TextContext, TokenBuffer
from max.pipelines.core import ConfigError, InputError
from max.pipelines.encoders.context import EncoderTokenizer, TextEmbeddingContext
from max.pipelines.kv_cache import MemoryPlanner
from max.pipelines.lib import (
    KVCacheConfig,
    MAXModelConfig,
    ModelInputs,
    PipelineConfig,
    PipelineModel,
    PipelineModelWithKVCache,
    PipelineRuntimeConfig,
    SupportedArchitecture,
    TextTokenizer,
    WeightPathParser,
    process_ragged_kv_outputs,
    supported_encoding_dtype,
)
from max.pipelines.lib.interfaces import (
    ArchConfigWithAttentionKVCache,
    BatchProcessorRuntime,
    SingleReplicaRaggedBatchProcessor,
)
from max.pipelines.lib.interfaces.batch_processor import PaddedEncoderBatchProcessor
from max.pipelines.modeling.types import InputModality
from max.pipelines.models.kv_cache import KVCacheMixin
from max.pipelines.registry.registry import PipelineRegistry


class Model(PipelineModel[TextContext]):
    def execute(self, model_inputs: Any) -> Any:
        raise AssertionError


def declared(**changed: Any) -> SupportedArchitecture:
    return SupportedArchitecture(
        **{
            "name": "OwnForCausalLM",
            "task": PipelineTask.TEXT_GENERATION,
            "example_repo_ids": [],
            "default_encoding": "float32",
            "supported_encodings": {"float32"},
            "pipeline_model": Model,
            "tokenizer": TextTokenizer,
            "context_type": TextContext,
            "default_weights_format": WeightsFormat.safetensors,
            **changed,
        }
    )


def test_declarations_of_26() -> None:
    class Own(Model):
        pass

    class Config:
        pass

    architecture = declared(
        pipeline_model=Own,
        config=Config,
        input_modalities={InputModality.TEXT},
        supports_overlap_scheduler=False,
        tool_parser="llama3_json",
    )
    assert vars(Own)["model_config_cls"] is Config and not hasattr(Model, "model_config_cls")
    assert architecture.tool_parser == "llama3_json"
    assert (
        type(architecture) is V26Architecture
        and type(declared(context_type=None)) is V26Architecture
    )
    assert declared().supported_encodings == {SupportedEncoding.float32: [KVCacheStrategy.PAGED]}
    defaults: dict[str, Any] = {
        "supports_overlap_scheduler": True, "supports_device_graph_capture": True, "supports_nvfp4_kv_cache": False,
        "supports_spec_decode_mixed_batches": False, "checkpoints_recurrent_state": False,
    }  # fmt: skip
    assert {name: getattr(declared(), name) for name in defaults} == defaults

    # neither a class of this package nor one that names its own config is given one
    class Given(Own):
        model_config_cls = int

    declared(pipeline_model=Given, config=Config)
    declared(pipeline_model=Base, config=Config)
    assert vars(Given)["model_config_cls"] is int and not hasattr(Base, "model_config_cls")
    with pytest.raises(NotImplementedError, match="OwnForCausalLM: input_modalities has image"):
        declared(input_modalities={InputModality.TEXT, InputModality.IMAGE})
    with pytest.raises(NotImplementedError, match="cascade_pipeline_factory is for diffusion"):
        declared(cascade_pipeline_factory=print)


def test_configurations_by_the_names_of_26() -> None:
    config = PipelineConfig(
        models={"main": MAXModelConfig(served_model_name="own", quantization_encoding="float32")},
        runtime=PipelineRuntimeConfig(max_batch_input_tokens=64, enable_overlap_scheduler=True),
        kv_cache=KVCacheConfig(kv_cache_page_size=32),
        max_length=77,
    )
    assert config.model.model_name == "own" and config.models["main"] is config.model
    assert config.model.max_length == 77 and config.model.kv_cache.kv_cache_page_size == 32
    assert config.runtime.max_batch_input_tokens == config.prefill_chunk_size == 64
    config.max_length = 5
    assert config.model.max_length == 5
    assert supported_encoding_dtype("bfloat16") is DType.bfloat16
    with pytest.raises(ConfigError, match="no field 'max_batch_siz'.*max_batch_size"):
        PipelineRuntimeConfig(max_batch_siz=1)
    with pytest.raises(ConfigError, match="device_graph_capture is True, which is not in this"):
        PipelineConfig(device_graph_capture=True)
    with pytest.raises(ConfigError, match="models has main, other"):
        PipelineConfig(models={"main": MAXModelConfig(), "other": MAXModelConfig()})


def test_draft_models_of_configurations() -> None:
    main, draft = (MAXModelConfig(model_path=path) for path in ("a", "b"))
    for values in (
        dict(models={"main": main, "draft": draft}),
        dict(model=main, draft_model=draft),
        dict(model_path="a", draft_model="b", max_batch_input_tokens=64),
    ):
        config = PipelineConfig(**values, defer_resolve=True)
        assert config.model_config.model_path == "a"
        assert config.draft_model.model_path == "b" and config.models["draft"] is config.draft_model
        assert config.models["main"] is config.model_config
    assert [*PipelineConfig(models={"main": main}, defer_resolve=True).models] == ["main"]


def test_token_buffers() -> None:
    context = TextContext(max_length=50, tokens=np.arange(3, 13))
    context.set_token_indices(active_idx=4)
    view: Any = view_of(context)
    assert view_of(view) is view and type(view) is not TextContext and len(view.next_tokens) == 4
    assert isinstance(view, TextContext) and view.request_id == context.request_id
    assert view.tokens.active.tolist() == [3, 4, 5, 6] and view.tokens.actively_chunked
    context.update(99)  # the token after a chunk is dropped
    context.update(20)
    tokens = view.tokens
    assert tokens.all.tolist() == [*range(3, 13), 20] and len(tokens) == 11
    assert (tokens.processed_length, tokens.active_length, tokens.generated_length) == (10, 1, 1)
    assert tokens.generated.tolist() == [20] and tokens.prompt.tolist() == [*range(3, 13)]
    assert (
        not tokens.actively_chunked and tokens.current_position == 11 and tokens.array is tokens.all
    )
    for wrong in (np.array([], np.int64), np.ones((2, 2), np.int64), np.ones(2, np.float32)):
        with pytest.raises(InputError, match=r"expected integers of one"):
            TokenBuffer(wrong)
    for lengths in ((3,), (-1,), (0, 4), (0, 2, 0), (0, 2, 4), (2, 2)):
        with pytest.raises(ValueError, match="processed < active"):
            TokenBuffer(np.arange(3), *lengths)
    given = np.arange(3)
    assert TokenBuffer(given).all is given and TokenBuffer(given).processed_length == 0
    assert TokenBuffer(given.astype(np.int32)).all.dtype == np.int64


def test_views_are_of_the_request() -> None:
    context = TextContext(max_length=50, tokens=np.arange(3, 13))
    view = view_of(context)
    view.cache_salt = "own"
    assert context.cache_salt == "own" and type(view).__mro__[1:3] == (ContextView, TextContext)
    assert view_of(TextEmbeddingContext(np.arange(6))).tokens.all.tolist() == [*range(6)]

    class Short:
        tokens, active_length = np.arange(6), 4

    assert view_of(Short()).tokens.all.tolist() == [0, 1, 2, 3]
    assert [type(c) for c in replica_views([context, [view]])[0]] == [type(view)] * 2


def test_options_of_batches() -> None:
    runtime = PipelineRuntimeConfig(max_batch_input_tokens=64, enable_overlap_scheduler=True)
    assert runtime.max_num_input_tokens == runtime.max_batch_input_tokens == 64
    # options without effect have their neutral value, the first of several
    assert runtime.enable_overlap_scheduler is None and runtime.kvcache_ce_watermark == 0.95
    with pytest.raises(AttributeError, match="max_batch_size was not given; a PipelineConfig has"):
        _ = runtime.max_batch_size
    with pytest.raises(AttributeError, match="PipelineRuntimeConfig has no 'moon'"):
        _ = runtime.moon
    assert not hasattr(runtime, "_moon")
    args = PipelineArgs.from_flat_kwargs(max_length=9, runtime=runtime, models=None)
    assert PipelineConfig.from_args(args).prefill_chunk_size == 64


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_without_effect(name: str) -> None:
    neutral: Any = WITHOUT_EFFECT[name]
    for value in neutral if isinstance(neutral, tuple) else (neutral, None):
        assert own_options({name: value, "ep_size": 1}) == {"ep_size": 1}
    assert own_options({name: SimpleNamespace(value="undefined")}) == {}
    with pytest.raises(ConfigError, match=f"{name} is 'other', which is not in this release"):
        own_options({name: "other"})


def test_values_without_effect() -> None:
    """The defaults of 26.7."""
    assert {name: value for name, value in WITHOUT_EFFECT.items() if value is not None} == {
        "debug_verify_replay": False, "device_graph_capture": (None, False), "disable_overlap": False,
        "disable_vendor_blas_fallback": False, "enable_overlap_scheduler": (None, False, True),
        "ep_use_allreduce": False, "header_only_weights": False, "kvcache_ce_watermark": 0.95,
        "max_vision_cache_entries": 256, "model_override": [], "prefer_module_v3": False, "use_vendor_ccl": "false",
        "vision_cache_utilization": 0.05, "vision_config_overrides": {}, "emit_reasoning_content": False,
        "allow_unsupported_logprobs": False,
    }  # fmt: skip


def test_parts_as_objects() -> None:
    model = MAXModelConfig(served_model_name="own")
    model.kv_cache_config = KVCacheConfig(kv_cache_page_size=32)
    assert own_options({"models": {"main": model}, "force": True}) == {
        "served_model_name": "own",
        "kv_cache_page_size": 32,
        "force": True,
    }
    assert own_options({"models": None, "quantize": None}) == {"quantize": None}


def test_attributes_of_26() -> None:
    config: Any = PipelineConfig(enable_echo=True, max_length=3)
    model = config.model
    assert model is config.model_config and model.enable_echo is True and model.pool_embeddings
    assert config.sampling is config.sampling_config and config.profiling is config.profiling_config
    assert config.draft_model is config.lora is config.speculative is None
    alone: Any = MAXModelConfig()
    assert alone.max_length is None and alone.enable_echo is False
    with pytest.raises(AttributeError, match="PipelineConfig has no attribute 'moon'") as error:
        _ = config.moon
    assert error.value.name == "moon" and error.value.obj is config
    with pytest.raises(AttributeError, match="KVCacheConfig has no attribute 'max_length'"):
        _ = KVCacheConfig().max_length  # type: ignore[attr-defined]
    assert copy.deepcopy(config).model.max_length == 3


class Recorded:
    """Forms that record what they are asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def subclasses(self, cls: type[Any]) -> list[type[Any]]:
        self.asked.append(cls)
        return [V26Architecture]

    def own_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append({**options})
        return {}

    def attribute(self, config: Any, name: str) -> Any:
        self.asked.append(name)
        return 5

    def adapt_architecture(self, architecture: Any) -> None:
        self.asked.append(architecture)


OWN: dict[str, Any] = dict(
    name="A", example_repo_ids=[], default_encoding="float32", supported_encodings={"float32": ["paged"]},
    pipeline_model=Model, task=PipelineTask.TEXT_GENERATION, tokenizer=TextTokenizer,
    default_weights_format=WeightsFormat.gguf,
)  # fmt: skip


def test_forms_are_asked_for_what_is_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_forms", [])
    recorded = Recorded()
    forms.set_forms(recorded)
    own = SupportedArchitecture(**OWN)
    config: Any = PipelineConfig(max_length=3, model="")
    with pytest.raises(AttributeError, match="PipelineConfig has no attribute '_moon'"):
        _ = config._moon
    assert recorded.asked == [] and type(own) is SupportedArchitecture
    assert type(SupportedArchitecture(**OWN, context_type=None)) is V26Architecture  # type: ignore[call-arg]
    assert recorded.asked == [SupportedArchitecture]
    with pytest.raises(TypeError, match=r"SupportedArchitecture.__init__\(\) got .* 'moon'"):
        SupportedArchitecture(**OWN, moon=1)  # type: ignore[call-arg]
    recorded.asked.clear()
    assert PipelineConfig(moon=1).max_length is None and config.moon == 5
    assert PipelineConfig(kv_cache_page_size=KVCacheConfig()).max_length is None
    assert [type(asked) for asked in recorded.asked] == [dict, str, dict]
    recorded.asked.clear()
    PipelineRegistry([own])
    assert recorded.asked == [own]


def test_without_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_forms", [])
    with pytest.raises(TypeError, match=r"SupportedArchitecture.__init__\(\) got .*'context_type'"):
        declared()
    with pytest.raises(ConfigError, match="PipelineConfig has no field 'runtime'"):
        PipelineConfig(runtime=None)
    with pytest.raises(AttributeError, match="PipelineConfig has no attribute 'runtime'"):
        _ = PipelineConfig().runtime  # type: ignore[attr-defined]
    PipelineRegistry([SupportedArchitecture(**OWN)])


def test_contexts_of_token_buffers() -> None:
    context = TextContext(max_length=50, tokens=TokenBuffer(np.arange(5)))
    assert context.all_tokens.tolist() == [0, 1, 2, 3, 4]


def params(**changed: Any) -> KVCacheParams:
    config = KVCacheConfig(kv_cache_page_size=32, enable_prefix_caching=False)
    made = config.to_params(
        dtype=DType.float32, n_kv_heads=2, head_dim=8, num_layers=3, devices=[DeviceRef.CPU()]
    )
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_caches_in_graphs() -> None:
    cache = params()
    assert MHAKVCacheParams is KVCacheParams and cache.page_size == 32 and cache.n_devices == 1
    assert cache.bytes_per_block == 2 * 3 * 32 * 2 * 8 * 4
    types = cache.flattened_kv_inputs()
    assert [type(t) for t in types] == [BufferType, TensorType, TensorType, TensorType]
    with Graph("g", input_types=[TensorType(DType.int64, ["n"], DeviceRef.CPU()), *types]) as graph:
        first, *rest = graph.inputs
        (kv,) = cache.unflatten_kv_inputs(iter(rest))
        assert kv.flatten() == rest
        assert [int(d) for d in kv.max_prompt_length.shape] == [1]
        graph.output(first.tensor)
    with pytest.raises(ValueError, match="a paged cache has 4 values, got 2"):
        cache.unflatten_kv_inputs(iter(rest[:2]))
    grouped = params(
        groups=(CacheGroup(1, 2, 16), CacheGroup(2, 1, 8)), states=(RecurrentState("s", 1, (4,)),)
    )
    assert len(grouped.flattened_kv_inputs()) == 4 + 2 * 2 + 2
    with pytest.raises(ValueError, match="need num_layers and devices"):
        KVCacheParams(DType.float32, 2, 8, page_size=16).get_symbolic_inputs()
    with pytest.raises(ValueError, match="speculative_method is 'eagle'"):
        KVCacheConfig().to_params(
            DType.float32, 1, 8, 1, [DeviceRef.CPU()], speculative_method="eagle"
        )  # type: ignore[arg-type]


def test_leaves_of_caches() -> None:
    tensors = [Tensor.zeros((n,), DType.uint32) for n in (1, 2, 3, 4)]
    inputs = RaggedKVCacheInputs(*tensors)
    assert KVCacheInputs[Tensor, Tensor] is not None
    for nested in (inputs, (inputs,), {"main": [inputs]}):
        found = tree.leaves(nested)
        assert [id(x) for x in found] == [id(x) for x in tensors]
    assert tree.leaves(None) == [None]


class V26Model(PipelineModelWithKVCache[TextContext]):
    """Takes what 26.x gives."""

    @classmethod
    def get_kv_params(
        cls, huggingface_config, pipeline_config, devices, kv_cache_config, cache_dtype
    ):
        return kv_cache_config.to_params(cache_dtype, 2, 4, huggingface_config.layers, devices)

    def execute(self, model_inputs: Any) -> Any:
        raise AssertionError


def adapted(model: type[Any]) -> Any:
    """A model's class as pipelines have it after its architecture is registered."""
    architecture = declared(pipeline_model=model, context_type=None)
    PipelineRegistry([architecture])
    return architecture.pipeline_model


def test_shapes_of_caches_in_either_form() -> None:
    config = SimpleNamespace(layers=5)
    arguments: Any = (PipelineConfig(), config, [CPU()], KVCacheConfig(), DType.float32)
    shape, layers = adapted(V26Model).cache_shape(*arguments)
    assert layers == 5 and shape.n_devices == 1 and list(shape.devices or ()) == [DeviceRef.CPU()]

    class V25(Model, KVCacheMixin):
        @classmethod
        def get_kv_params(cls, huggingface_config, n_devices, kv_cache_config, cache_dtype):
            return KVCacheParams(cache_dtype, 2, 4, page_size=16, n_devices=n_devices)

        @classmethod
        def get_num_layers(cls, huggingface_config):
            return huggingface_config.layers + 1

    assert adapted(V25) is V25 and V25.cache_shape(*arguments)[1] == 6

    class Numbered(V25):
        @classmethod
        def get_kv_params(cls, huggingface_config, n_devices, kv_cache_config, cache_dtype):
            return params()

    assert Numbered.cache_shape(*arguments)[1] == 3

    class Other(V25):
        @classmethod
        def get_kv_params(cls, huggingface_config, devices, moon):
            raise AssertionError

    with pytest.raises(TypeError, match=r"get_kv_params needs moon; it is called with hugg"):
        adapted(Other).cache_shape(*arguments)

    class Nothing(V25):
        @classmethod
        def get_kv_params(cls, huggingface_config, n_devices, kv_cache_config, cache_dtype):
            return None

    with pytest.raises(TypeError, match="get_kv_params returned NoneType, expected KVCacheParams"):
        Nothing.cache_shape(*arguments)
    with pytest.raises(TypeError, match="Model has no KV cache"):
        Model.cache_shape(*arguments)


def test_shape_and_size_of_a_cache_by_the_config() -> None:
    class Config:
        @classmethod
        def calculate_max_seq_len(cls, huggingface_config):
            return huggingface_config.positions

        @classmethod
        def initialize(cls, pipeline_config, max_seq_len):
            made = KVCacheParams(DType.float32, 2, 4, page_size=16, num_layers=max_seq_len // 16)
            return SimpleNamespace(get_kv_params=lambda: made)

    class Model(PipelineModelWithKVCache[TextContext]):
        model_config_cls = Config

        def execute(self, model_inputs: Any) -> Any:
            raise AssertionError

    config: Any = SimpleNamespace(positions=48)
    rest: Any = ([CPU()], config, KVCacheConfig(), DType.float32)
    options = PipelineConfig(max_batch_size=3)
    assert adapted(Model).cache_shape(options, config, *rest[:1], *rest[2:])[1] == 3
    page = 2 * 3 * 16 * 2 * 4 * 4  # keys and values, layers, tokens, heads, elements, bytes
    assert Model.estimate_kv_cache_size(options, page - 1, *rest) == page - 1
    size = Model.estimate_kv_cache_size(options, 1 << 40, *rest)
    # each of three sequences has three pages; a step may write one page more
    assert size % page == 0 and 9 <= size // page <= 12


def test_arguments_by_name() -> None:
    def own(a: int, b: int = 0, **rest: Any) -> None: ...

    assert named_arguments(own, {"a": 1, "c": 3}) == {"a": 1}
    with pytest.raises(TypeError, match="own needs a"):
        named_arguments(own, {"b": 1})


@dataclass
class Inputs(ModelInputs):
    tokens: Any
    offsets: Any = None


def runtime(**changed: Any) -> BatchProcessorRuntime:
    values: dict[str, Any] = dict(
        pipeline_config=PipelineConfig(), devices=[CPU()], return_logits=ReturnLogits.LAST_TOKEN,
        max_batch_size=4, max_seq_len=64, max_batch_input_tokens=32, pad_token_id=9,
    )  # fmt: skip
    return BatchProcessorRuntime(**values | changed)


def contexts() -> list[TextContext]:
    made = [TextContext(max_length=64, tokens=np.arange(1, n + 1)) for n in (3, 1, 5)]
    made[2].update(7)
    return made


def test_batches_of_batch_processors() -> None:
    class Ragged(SingleReplicaRaggedBatchProcessor[Any, Inputs]):
        def _make_inputs(
            self, *, tokens, input_row_offsets, return_n_logits, kv_cache_inputs, signal_buffers
        ):
            assert signal_buffers == []
            return Inputs(tokens, input_row_offsets, kv_cache_inputs=kv_cache_inputs)

    class Padded(PaddedEncoderBatchProcessor[Any, Inputs]):
        def _make_inputs(self, *, next_tokens_batch, attention_mask):
            return Inputs(next_tokens_batch, attention_mask)

    batch = contexts()
    ragged = Ragged(None, runtime()).prepare_initial_token_inputs(replica_views(batch))
    assert ragged.tokens.to_numpy().tolist() == [1, 2, 3, 1, 7]
    assert ragged.offsets.to_numpy().tolist() == [0, 3, 4, 5]
    padded = Padded(None, runtime()).prepare_initial_token_inputs(replica_views(batch[:2]))
    assert padded.tokens.to_numpy().tolist() == [[1, 2, 3], [1, 9, 9]]
    assert padded.offsets.to_numpy().tolist() == [[1, 1, 1], [1, 0, 0]]
    with pytest.raises(ValueError, match="Ragged: 2 replicas"):
        Ragged(None, runtime()).prepare_initial_token_inputs([[], []])
    with pytest.raises(NotImplementedError, match="Inputs does not define buffers"):
        _ = padded.buffers


def test_inputs_in_either_form() -> None:
    class V25(Model):
        def __init__(self) -> None: ...

        def prepare_initial_token_inputs(
            self, context_batch, kv_cache_inputs=None, return_n_logits=1
        ):
            return Inputs([c.tokens[0] for c in context_batch], kv_cache_inputs=kv_cache_inputs)

    class V26(V25):
        def prepare_initial_token_inputs(  # type: ignore[override]
            self, replica_batches, kv_cache_inputs=None, return_n_logits=1
        ):
            return Inputs([c.tokens.active_length for c in replica_batches[0]])

    batch, cache = contexts(), RaggedKVCacheInputs(*[Tensor.zeros((1,), DType.uint32)] * 4)
    assert is_of_26(V25)  # its constructor has no arguments
    with_defaults: Any = object.__new__(adapted_model(V26))
    assert with_defaults.prepare_initial_token_inputs(batch).kv_cache_inputs is None
    assert object.__new__(adapted_model(V25)).prepare_initial_token_inputs(batch, cache).tokens == [
        1,
        1,
        1,
    ]  # type: ignore[attr-defined]
    later: Any = object.__new__(adapted_model(V26))
    for made in (
        later.prepare_initial_token_inputs(batch, cache),
        later.prepare_initial_token_inputs(
            replica_batches=replica_views(batch), kv_cache_inputs=cache
        ),
    ):
        assert made.tokens == [3, 1, 1] and made.kv_cache_inputs is cache


def test_outputs_of_ragged_batches() -> None:
    last, every, offsets = (Tensor.zeros((n, 2), DType.float32) for n in (2, 5, 3))
    for logits in ReturnLogits:
        tensors = [last] if logits is ReturnLogits.LAST_TOKEN else [last, every, offsets]
        made = process_ragged_kv_outputs(tensors, return_logits=logits)
        assert made.next_token_logits is last and made.logits is tensors[len(tensors) // 2]
        with pytest.raises(ValueError, match="2 tensors with"):
            process_ragged_kv_outputs([last, every], return_logits=logits)
    with pytest.raises(ValueError, match="hidden states"):
        process_ragged_kv_outputs(
            [last],
            return_logits=ReturnLogits.LAST_TOKEN,
            return_hidden_states=ReturnHiddenStates.LAST,
        )


def test_configs_with_a_cache() -> None:
    class Own(ArchConfigWithAttentionKVCache):
        num_key_value_heads = 2  # type: ignore[assignment]
        head_dim = 8  # type: ignore[assignment]

        @property
        def num_layers(self) -> int:
            return self.huggingface_config.layers

    class V25(Own):
        @property
        def model_max_seq_len(self) -> int:
            return self.huggingface_config.n_positions

    file: Any = SimpleNamespace(layers=3, max_position_embeddings=40, n_positions=20)
    options: Any = SimpleNamespace(max_length=None)
    assert Own.calculate_max_seq_len(file, options) == 40
    assert V25.calculate_max_seq_len(file, options) == 20
    with pytest.raises(ValueError, match="21 is over the upper bound, 20"):
        V25.calculate_max_seq_len(file, SimpleNamespace(max_length=21))  # type: ignore[arg-type]
    made = Own(DType.float32, 40, huggingface_config=file)
    assert made.get_max_seq_len() == 40 and made.get_kv_params().num_layers == 3


def test_paths_of_weights(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "w.gguf").write_bytes(b"")
    parse = WeightPathParser.parse
    assert parse("owner/model", "other/files/w.gguf") == ([Path("w.gguf")], "other/files")
    assert parse("owner/model", ["owner/model/a/w.gguf"]) == ([Path("a/w.gguf")], None)
    assert parse(str(tmp_path), ["own/w.gguf"]) == ([Path("own/w.gguf")], None)
    with pytest.raises(ValueError, match="several repositories: a/b, c/d"):
        parse("owner/model", ["a/b/w.gguf", "c/d/w.gguf"])


def test_models_that_lack_what_either_form_has() -> None:
    nothing: Any = SimpleNamespace()
    with pytest.raises(TypeError, match=r"^Model does not define calculate_max_seq_len$"):
        Model.calculate_max_seq_len(PipelineConfig(), nothing)
    with pytest.raises(TypeError, match=r"Model does not define calculate_max_seq_len.*config="):
        adapted_model(Model).calculate_max_seq_len(PipelineConfig(), nothing)


class Base(Model):
    """A model of this package, as `Llama3Model` is one."""

    __module__ = "max.pipelines.architectures.base"
    made: Any = None

    def __init__(
        self,
        pipeline_config,
        session,
        huggingface_config,
        encoding,
        devices,
        kv_cache_config,
        weights,
        adapter,
        return_logits,
    ):
        self.made = locals() | {"self": None}
        super().__init__(
            pipeline_config,
            session,
            huggingface_config,
            encoding,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
        )

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config, huggingface_config):
        return huggingface_config.positions

    def prepare_initial_token_inputs(self, context_batch, kv_cache_inputs=None, return_n_logits=1):
        return Inputs([int(c.next_tokens[-1]) for c in context_batch], return_n_logits)


ARGUMENTS: dict[str, Any] = dict(
    session="session", huggingface_config=SimpleNamespace(positions=31), encoding="float32", devices=[CPU()],
    kv_cache_config=KVCacheConfig(), weights={}, adapter=None, return_logits=ReturnLogits.ALL,
)  # fmt: skip


def options() -> Any:
    """A configuration whose model states its file and its encoding."""
    config: Any = PipelineConfig(max_batch_size=7)
    config._model_config = SimpleNamespace(
        huggingface_config=ARGUMENTS["huggingface_config"],
        quantization_encoding="float32",
        weights_size=lambda: 5,
    )
    config.available_cache_memory = lambda: 11
    return config


def test_a_model_of_26_above_one_of_this_package() -> None:
    class Own(Base):
        def __init__(
            self,
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            adapter=None,
            return_logits=ReturnLogits.ALL,
            *,
            memory_plan,
        ):  # type: ignore[no-untyped-def]
            assert memory_plan.footprint == 5 and memory_plan.available_cache_memory == 11
            super().__init__(  # type: ignore[misc]
                pipeline_config,
                session,
                devices,
                kv_cache_config,
                weights,
                adapter,
                return_logits,
                memory_plan=memory_plan,
            )

        def prepare_initial_token_inputs(self, replica_batches, kv_cache_inputs=None, return_n_logits=1):  # type: ignore[override]  # fmt: skip
            assert all(isinstance(c, TextContext) for c in replica_batches[0])
            return super().prepare_initial_token_inputs(
                replica_batches, kv_cache_inputs, return_n_logits
            )

    cls = adapted(Own)
    assert cls.__name__ == "Own" and cls.__module__ == Own.__module__ and cls.__mro__[2] is Own
    config = options()
    model = cls(pipeline_config=config, **ARGUMENTS)
    assert (
        isinstance(model, (Own, Base, V26Entry)) and model.memory_plan.planned_max_batch_size == 7
    )
    assert model.made["encoding"] == model.encoding == "float32" and model.max_seq_len == 31
    assert (
        model.made["huggingface_config"]
        is model.huggingface_config
        is ARGUMENTS["huggingface_config"]
    )
    batch = contexts()
    made = model.prepare_initial_token_inputs(batch, None, 2)
    assert made.tokens == [int(c.next_tokens[-1]) for c in batch] and made.offsets == 2
    assert model.prepare_initial_token_inputs(batch).offsets == 1
    assert adapted(cls) is cls


def test_constructors_that_pass_all_arguments_on() -> None:
    class Own(Base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert adapted(Own) is Own
    model: Any = Own(options(), *ARGUMENTS.values())
    assert model.return_logits is ReturnLogits.ALL
    template: Any = adapted_model(
        type("Template", (V26Model,), {"calculate_max_seq_len": classmethod(lambda *_: 3)})
    )
    made = template(pipeline_config=options(), **ARGUMENTS)
    assert made.max_batch_size == 7 and made.return_hidden_states is ReturnHiddenStates.NONE
    assert made.encoding == "float32" and made.max_seq_len == 3
    with pytest.raises(
        NotImplementedError, match=r"return_hidden_states is .*pipelines here take logits only"
    ):
        V26Model(options(), "session", [CPU()], KVCacheConfig(), {}, return_hidden_states=ReturnHiddenStates.LAST)  # type: ignore[arg-type]  # fmt: skip


def test_planners_of_memory() -> None:
    class Planner(MemoryPlanner):
        size: int | None = 3

        def infer_max_batch_size(self, pipeline_config, devices, weights_size):
            assert weights_size == 5 and self.config is None
            return self.size

    architecture = declared(memory_planner=Planner, pipeline_model=Base)
    PipelineRegistry([architecture])
    rest: Any = (1, SimpleNamespace(positions=1), [CPU()], KVCacheConfig(), DType.float32)
    infer = architecture.pipeline_model.infer_optimal_batch_size
    assert infer(options(), *rest) == 3
    Planner.size = None
    assert infer(options(), *rest) == Base.infer_optimal_batch_size(options(), *rest) == 32
    with pytest.raises(TypeError, match="unexpected keyword argument 'moon'"):
        declared(moon=1)


@pytest.mark.parametrize(
    ("members", "of_26"),
    [
        ({}, False),
        ({"model_config_cls": None}, True),
        ({"batch_processor_cls": None}, True),
        ({"__init__": lambda self, pipeline_config, session: None}, True),
        ({"__init__": lambda self, pipeline_config, encoding: None}, False),
        ({"__init__": lambda self, **kwargs: None}, False),
        ({"prepare_initial_token_inputs": lambda self, replica_batches: None}, True),
        ({"get_kv_params": classmethod(lambda cls, pipeline_config: None)}, True),
        ({"get_kv_params": classmethod(lambda cls, devices: None)}, True),
        ({"get_kv_params": classmethod(lambda cls, n_devices: None)}, False),
    ],
)
def test_which_models_are_of_26(members: dict[str, Any], of_26: bool) -> None:
    assert is_of_26(type("Own", (Model,), members)) is of_26


def test_plans_without_a_batch_size() -> None:
    plans: list[Any] = []
    config = options()
    config.max_batch_size = None

    class Own(V26Model):
        def __init__(self, pipeline_config, memory_plan, max_batch_size, **rest) -> None:
            plans.extend([memory_plan.planned_max_batch_size, max_batch_size])

    adapted(Own)(pipeline_config=config, **ARGUMENTS)
    assert plans == [1, 1]


def test_tokenizers_of_embedders() -> None:
    for task, expected in (
        (PipelineTask.EMBEDDINGS_GENERATION, EncoderTokenizer),
        (PipelineTask.TEXT_GENERATION, TextTokenizer),
        (PipelineTask.EMBEDDINGS_GENERATION, SimpleNamespace),
    ):
        given = TextTokenizer if expected is EncoderTokenizer else expected
        architecture = declared(task=task, tokenizer=given)
        PipelineRegistry([architecture])
        assert architecture.tokenizer is expected
