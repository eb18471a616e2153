"""Keywords of the constructors of `max.nn` and of the layers of eager tensors: of both versions, and misspelt ones.

The keywords were listed with `inspect.signature`. A layer takes a keyword unless Python says that it is unexpected.
"""

from __future__ import annotations

import importlib
from random import Random
from typing import Any

from tests.differential.program import Family, evaluate

KEYWORDS = r"""
nn.Allreduce: num_accelerators
nn.AttentionWithRope: rope sharding_strategy num_attention_heads num_key_value_heads hidden_size kv_params \
    devices dtype linear_cls stacked_qkv scale has_bias float8_config clip_qkv use_qk_norm rms_norm_eps \
    quant_config mask_variant sliding_window
nn.AttentionWithRopeAndLoRA: rope num_attention_heads num_key_value_heads hidden_size kv_params devices dtype \
    linear_cls stacked_qkv scale has_bias float8_config clip_qkv
nn.ConstantLayerNorm: dims device dtype eps
nn.Conv1D: kernel_size in_channels out_channels dtype stride padding dilation num_groups device has_bias permute \
    name
nn.Conv1DV1: filter bias stride padding dilation groups
nn.Conv2d: kernel_size in_channels out_channels dtype stride padding dilation num_groups device has_bias permute \
    name
nn.Conv2dV1: filter bias stride padding dilation groups
nn.Conv3D: depth height width in_channels out_channels dtype stride padding dilation num_groups device has_bias \
    permute name
nn.Conv3DV1: filter bias stride padding dilation groups
nn.ConvTranspose1d: length in_channels out_channels dtype stride padding dilation output_padding device has_bias \
    permute name
nn.DistributedGemmConfig: enable_matmul_allreduce
nn.DistributedTransformer: dim n_heads layers norm output embedding kv_params devices rope return_logits \
    use_subgraphs subgraph_layer_groups logits_scaling
nn.DistributedTransformerBlock: attention mlp attention_norm mlp_norm devices distributed_gemm_config
nn.DynamicRotaryEmbedding: dim n_heads theta max_seq_len head_dim interleaved
nn.Embedding: vocab_size hidden_dim dtype device quantization_encoding name
nn.EmbeddingV1: weights device
nn.Float8Config: input_scale weight_scale mlp_in_float8 attn_qkv_in_float8 embedding_output_dtype bias_dtype \
    quant_method
nn.Float8InputScaleSpec: granularity origin dtype activation_scale_ub block_size
nn.Float8ScaleGranularity: value names module qualname type start boundary
nn.Float8ScaleOrigin: value names module qualname type start boundary
nn.Float8WeightScaleSpec: granularity dtype block_size
nn.FusedMLP: dtype hidden_dim feed_forward_length devices activation_function swiglu_limit is_sharding
nn.GGUFQAttentionWithRope: rope num_attention_heads num_key_value_heads hidden_size kv_params dtype \
    quantization_encoding devices linear_cls scale has_bias clip_qkv mask_variant
nn.GPTQAttentionWithRope: quantization_config rope num_attention_heads num_key_value_heads hidden_size kv_params \
    devices dtype scale linear_cls mask_variant
nn.GPTQLinear: in_dim out_dim dtype device has_bias quantization_encoding quantization_config float8_config \
    quant_config
nn.GroupNorm: num_groups num_channels eps affine device
nn.HyperConnection: hidden_size hc_mult device dtype hc_sinkhorn_iters hc_eps rms_norm_eps
nn.InputScaleSpec: granularity origin dtype activation_scale_ub block_size
nn.KVCacheMetrics: input_tokens cache_tokens device_blocks_served h2d_bytes_copied d2h_bytes_copied \
    cross_replica_blocks_copied cross_replica_bytes_copied disk_bytes_written disk_bytes_read inflight_disk_ops \
    connector_loads_refused connector_load_failures connector_offload_blocks_dropped nixl_read_blocks \
    nixl_write_blocks nixl_read_latency_total_ms nixl_read_latency_count nixl_read_latency_max_ms \
    nixl_write_latency_total_ms nixl_write_latency_count rpc_acquire_latency_total_ms rpc_acquire_latency_count \
    rpc_read_latency_total_ms rpc_read_latency_count nixl_read_bytes nixl_write_bytes dkv_connected_clients \
    dkv_total_clients dkv_reconnect_attempts dkv_peer_attaches dkv_peer_attach_failures dkv_peers_dropped \
    dkv_peer_loads dkv_peer_load_failures dkv_peer_transfer_failures dkv_peer_metadata_refreshes \
    dkv_peer_metadata_refresh_failures dkv_hints_rejected dkv_hints_rejected_by_reason dkv_rpc_calls \
    dkv_rpc_time_ms dkv_rpc_socket_wait_ms dkv_lock_waits dkv_lock_wait_ms
nn.KVCacheParams: dtype head_dim num_layers devices enable_prefix_caching enable_dp_cross_replica_prefix_copy \
    per_layer_buffers kv_hash_algo kv_hash_seed kv_connector_config page_size slots_per_page \
    data_parallel_degree kvcache_quant_config speculative_method num_draft_tokens window_size
nn.LatentAttentionWithRope: rope num_attention_heads num_key_value_heads hidden_size kv_params dtype devices \
    linear_cls o_proj_dtype o_proj_quant_config scale q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim \
    v_head_dim buffer_size graph_mode norm_dtype
nn.LayerList: layers
nn.LayerNorm: dims devices dtype eps use_bias
nn.LayerNormV1: weight bias eps
nn.Linear: in_dim out_dim dtype device has_bias quantization_encoding float8_config name clip_weight \
    quant_config is_sharding
nn.LinearLoRA: in_dim out_dim max_num_loras max_lora_rank dtype device has_bias has_lora_bias name \
    quantization_encoding float8_config
nn.LinearScalingParams: factor
nn.LinearV1: weight bias
nn.Llama3RopeScalingParams: factor low_freq_factor high_freq_factor orig_max_position
nn.Llama3RotaryEmbedding: dim n_heads theta max_seq_len head_dim interleaved scaling_params
nn.LongRoPERotaryEmbedding: dim n_heads theta max_seq_len head_dim interleaved scaling_params
nn.LongRoPEScalingParams: short_factor long_factor original_max_position max_position_embeddings
nn.MLP: dtype quantization_encoding hidden_dim feed_forward_length devices linear_cls has_bias \
    activation_function float8_config dist_gemm_config quant_config swiglu_limit is_sharding
nn.MLPV1: gate_proj down_proj up_proj
nn.MinPSampler: dtype shape temperature
nn.MissingLayer: layer_id
nn.MoE: devices hidden_dim num_experts num_experts_per_token moe_dim num_logical_experts gate_cls mlp_cls \
    shared_mlp_cls has_shared_experts shared_experts_dim ep_size dtype activation interleaved_gate_up \
    pre_expert_norm_cls ep_batch_manager quant_config shared_experts_dtype shared_experts_quant_config \
    is_sharding
nn.MoEGate: devices hidden_dim num_experts num_experts_per_token dtype is_sharding linear_cls
nn.MoEQuantized: devices hidden_dim num_experts num_experts_per_token moe_dim num_logical_experts gate_cls \
    mlp_cls shared_mlp_cls has_shared_experts shared_experts_dim ep_size dtype activation interleaved_gate_up \
    pre_expert_norm_cls ep_batch_manager quant_config shared_experts_dtype shared_experts_quant_config \
    is_sharding
nn.MultiheadAttention: num_attention_heads hidden_size devices dtype scale qkv_has_bias o_proj_has_bias \
    stacked_qkv
nn.QuantConfig: input_scale weight_scale mlp_quantized_layers attn_quantized_layers format \
    embedding_output_dtype shared_experts_weight_dtype bias_dtype can_use_fused_mlp can_use_fused_swiglu \
    scales_pre_interleaved
nn.QuantFormat: value names module qualname type start boundary
nn.RMSNorm: dim dtype eps weight_offset multiply_before_cast
nn.RMSNormV1: weight eps weight_offset multiply_before_cast
nn.RaggedAttention: mask_variant num_attention_heads num_key_value_heads hidden_size kv_params devices dtype \
    linear_cls stacked_qkv scale has_bias clip_qkv
nn.RejectionSampler: device top_k top_p temperature eps
nn.RejectionSamplerWithResiduals: device top_k temperature eps debug
nn.ReturnHiddenStates: value names module qualname type start boundary
nn.ReturnLogits: value names module qualname type start boundary
nn.RotaryEmbedding: dim n_heads theta max_seq_len head_dim interleaved
nn.ScaleGranularity: value names module qualname type start boundary
nn.ScaleOrigin: value names module qualname type start boundary
nn.Sequential: layers
nn.Signals: devices
nn.StackedLinear: in_dim out_dims names dtype device stacked has_bias linear_cls quant_config clip_weight
nn.TensorParallelAttentionWithRope: rope num_attention_heads num_key_value_heads hidden_size kv_params devices \
    dtype linear_cls stacked_qkv scale has_bias float8_config clip_qkv use_qk_norm rms_norm_eps quant_config \
    mask_variant sliding_window
nn.Transformer: dim n_heads layers norm output embedding kv_params rope return_logits embedding_multiplier \
    logits_scaling return_hidden_states target_layer_ids
nn.TransformerBlock: attention mlp attention_norm mlp_norm residual_multiplier
nn.VocabParallelEmbedding: vocab_size hidden_dim dtype devices quantization_encoding name
nn.WeightNormConvTranspose1d: length in_channels out_channels dtype stride padding dilation output_padding \
    device has_bias permute name
nn.WeightScaleSpec: granularity dtype block_size
nn.YarnRotaryEmbedding: dim n_heads theta max_seq_len head_dim interleaved scaling_params
nn.YarnScalingParams: factor beta_fast beta_slow original_max_position_embeddings truncate
v3.Conv2d: kernel_size in_channels out_channels dtype stride padding dilation num_groups device has_bias permute \
    name
v3.Embedding: vocab_size dim dims
v3.GemmaRMSNorm: dim eps
v3.GroupNorm: num_groups num_channels eps affine
v3.HyperConnection: hidden_size hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps
v3.LayerNorm: dim eps keep_dtype elementwise_affine use_bias
v3.Linear: in_dim out_dim bias quant_config
v3.LoRA: module max_num_loras max_lora_rank max_lora_seq_len
v3.RMSNorm: dim eps
v3.RotaryEmbedding: weight
v3.TransposedRotaryEmbedding: weight
"""


def _listed() -> list[tuple[str, list[str]]]:
    joined = KEYWORDS.replace("\\\n", " ").split("\n")
    return [
        (name, words.split()) for name, _, words in (line.partition(":") for line in joined) if name
    ]


def programs(seed: int) -> list[str]:
    draw = Random(seed)
    lines: list[str] = []
    for name, keywords in _listed():
        lines += [f"takes({name!r}, {keyword!r})" for keyword in keywords]
        misspelt = draw.choice(keywords)
        lines.append(f"takes({name!r}, {misspelt + '_s'!r})")
    return lines


def takes(layer: str, keyword: str) -> bool:
    """Whether a layer takes a keyword; its value has no meaning."""
    where, _, name = layer.partition(".")
    modules = {"nn": ["max.nn"], "v3": ["max.experimental.nn", "max.nn.module_v3"]}[where]
    found = None
    for module in modules:
        try:
            found = getattr(importlib.import_module(module), name)
            break
        except ModuleNotFoundError:
            continue
    assert found is not None
    try:
        found(**{keyword: object()})
    except TypeError as error:
        return "unexpected keyword" not in str(error)
    except Exception:
        return True
    return True


def run(line: str) -> Any:
    return evaluate(line, {"takes": takes})


FAMILY = Family(programs=programs, run=run)
