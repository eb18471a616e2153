"""`max.pipelines`: enums of configurations, and the nested configurations with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from max.driver import DeviceSpec
from tests.differential.families._plain import plain_family


def namespace() -> Mapping[str, Any]:
    import max.pipelines.lib as lib
    from max.nn.kv_cache import KVCacheStrategy
    from max.pipelines.lib import config

    def model(**more: Any) -> Any:
        return lib.MAXModelConfig(model_path="none", device_specs=[DeviceSpec.cpu()], **more)

    return {
        **{n: getattr(m, n) for m in (config, lib) for n in dir(m) if n[0].isupper()},
        "DeviceSpec": DeviceSpec,
        "KVCacheStrategy": KVCacheStrategy,
        "at": lambda of, *names: [getattr(of, n) for n in names],
        "mc": model,
    }


PROGRAMS = r"""
[m.name for m in SupportedEncoding]
[m.value for m in SupportedEncoding]
str(SupportedEncoding.bfloat16)
SupportedEncoding.bfloat16=="bfloat16"
SupportedEncoding("bf16")
SupportedEncoding("bfloat16")
[(m.name,m.quantization_encoding) for m in SupportedEncoding]
[(m.name,m.dtype) for m in SupportedEncoding]
[(m.name,m.cache_dtype) for m in SupportedEncoding]
[(m.name,m.supported_on(DeviceSpec.cpu())) for m in SupportedEncoding]
[(m.name,m.supported_on(DeviceSpec.accelerator())) for m in SupportedEncoding]
[(m.name,sorted(x.name for x in m.supported_devices)) for m in SupportedEncoding]
SupportedEncoding.parse_from_file_name("a-bf16.safetensors")
SupportedEncoding.parse_from_file_name("a-Q4_K_M.gguf")
SupportedEncoding.parse_from_file_name("a-q4_k.gguf")
SupportedEncoding.parse_from_file_name("a-fp8.safetensors")
SupportedEncoding.parse_from_file_name("a.gguf")
SupportedEncoding.parse_from_file_name("f32.gguf")
[m.value for m in RopeType]
str(RopeType.none)
[m.value for m in RepoType]
[m.value for m in PipelineRole]
str(PipelineRole.PrefillAndDecode)
PipelineRole.PrefillAndDecode=="prefill_and_decode"
at(KVCacheConfig(),"cache_strategy","kv_cache_page_size","enable_prefix_caching","enable_kvcache_swapping_to_host","device_memory_utilization","host_kvcache_swap_space_gb","disk_offload_dir")
KVCacheConfig(kv_cache_page_size=100)
KVCacheConfig(kv_cache_page_size=0)
KVCacheConfig(foo=1)
KVCacheConfig(device_memory_utilization=2.0).device_memory_utilization
KVCacheConfig(cache_strategy="paged").cache_strategy
x=KVCacheConfig(); x.kv_cache_page_size=3; x.kv_cache_page_size
sorted(KVCacheConfig.help())
bool(KVCacheConfig.help()["kv_cache_page_size"])
at(SamplingConfig(),"in_dtype","out_dtype","enable_structured_output","enable_variable_logits","enable_penalties","enable_min_tokens")
sorted(SamplingConfig.help())
SamplingConfig(foo=1)
at(ProfilingConfig(),"gpu_profiling")
sorted(ProfilingConfig.help())
at(MAXModelConfig(),"model_path","served_model_name","weight_path","quantization_encoding","huggingface_model_revision","huggingface_weight_revision","trust_remote_code","force_download","vision_config_overrides","rope_type","use_subgraphs","data_parallel_degree","pool_embeddings","allow_safetensors_weights_float32_to_bfloat16_cast")
at(MAXModelConfig(),"device_specs")
at(mc(),"model_name","model_path")
at(mc(served_model_name="s"),"model_name")
MAXModelConfig(foo=1)
mc(weight_path=["a.safetensors"]).weight_path
mc(weight_path=["a.foo"])
at(mc(quantization_encoding=SupportedEncoding.float32),"quantization_encoding")
PipelineConfig()
PipelineConfig(model_path="")
PipelineConfig(M)
PipelineConfig(foo=1,model_path=M)
str(KVCacheConfig().cache_strategy)
[e.value for e in PrometheusMetricsMode]
[e.value for e in PrependPromptSpeechTokens]
str(PrependPromptSpeechTokens.NEVER)
mc().kv_cache_config.kv_cache_page_size
mc().default_device_spec.device_type
bool(PipelineConfig.help()["max_length"])
bool(MAXModelConfig.help()["model_path"])
"""

FAMILY = plain_family(PROGRAMS, namespace)
