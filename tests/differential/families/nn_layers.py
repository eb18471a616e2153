"""`max.nn`: constructors, weights and results of layers; parameters of KV caches."""

from __future__ import annotations

from typing import Any

from max import nn
from max.dtype import DType
from max.graph import DeviceRef, Graph, ShardingStrategy, TensorType, Weight
from max.graph.quantization import QuantizationEncoding
from max.nn import float8_config, kv_cache, linear, rotary_embedding
from max.nn.kv_cache import KVCacheParams, KVCacheStrategy
from tests.differential.families._plain import plain_family

D, f32, cpu = DType, DType.float32, DeviceRef.CPU()
gpu = [DeviceRef.GPU(0), DeviceRef.GPU(1)]


def brief(value: Any) -> Any:
    """A type or weight by its class, dtype and dims."""
    if not hasattr(value, "shape"):
        return value
    return type(value).__name__, value.dtype.name, [str(d) for d in value.shape]


def run(layer: Any, *types: TensorType) -> Any:
    with Graph("g", input_types=list(types)) as graph:
        result = layer(*[v.tensor for v in graph.inputs])
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return [brief(v) for v in graph.output_types]


def weights(layer: Any) -> Any:
    return {
        n: (w.dtype.name, [str(d) for d in w.shape], str(w.device))
        for n, w in layer.raw_state_dict().items()
    }


def cache(**more: Any) -> KVCacheParams:
    given = {
        "dtype": f32,
        "n_kv_heads": 2,
        "head_dim": 8,
        "page_size": 128,
        "cache_strategy": KVCacheStrategy.PAGED,
    }
    return KVCacheParams(**{**given, **more})


PROGRAMS = r"""
wts(Linear(3,4,f32,cpu))
wts(Linear(in_dim=3,out_dim=4,dtype=f32,device=cpu,has_bias=True))
wts(Linear(3,4,f32,cpu,True))
wts(Linear(3,4,f32))
wts(Linear(3,4))
Linear(3,4,cpu,f32)
Linear("a",4,f32,cpu)
Linear(3.0,4,f32,cpu)
Linear(-3,4,f32,cpu)
Linear(0,4,f32,cpu)
Linear(3,4,"float32",cpu)
Linear(3,4,f32,"cpu")
Linear(3,4,f32,None)
wts(Linear(3,4,f32,cpu,name="foo"))
Linear(3,4,f32,cpu,name="foo").weight.name
Linear(3,4,f32,cpu).weight.name
wts(Linear(3,4,f32,cpu,clip_weight=2.0))
run(Linear(3,4,f32,cpu,clip_weight=2.0),T(2,3))
at(Linear(3,4,f32,cpu),"weight","bias","device","weight_scale","input_scale","float8_config","clip_weight")
wts(Linear(32,4,e4,cpu,has_bias=True))
wts(Linear(32,4,D.bfloat16,cpu,has_bias=True))
run(Linear(3,4,f32,cpu),T(2,3))
run(Linear(3,4,f32,cpu),T(3))
run(Linear(3,4,f32,cpu),T("a","b",3))
run(Linear(3,4,f32,cpu),T("a","b"))
run(Linear(3,4,f32,cpu),T(2,4))
run(Linear(3,4,f32,cpu),T())
run(Linear(3,4,f32,cpu),T(2,3,d=D.bfloat16))
run(Linear(3,4,D.bfloat16,cpu),T(2,3))
run(Linear(3,4,f32,cpu,has_bias=True),T(2,3))
run(Linear(3,4,D.int32,cpu),T(2,3,d=D.int32))
run(LinearV1(Weight("w",f32,(4,3),cpu)),T(2,3))
run(LinearV1(Weight("w",f32,(4,3),cpu),Weight("b",f32,(4,),cpu)),T(2,3))
LinearV1()
Linear(8,4,f32,gpu[0]).shard(gpu)
Linear(8,4,f32,gpu[0]).sharding_strategy
m=Linear(8,4,f32,gpu[0]); m.sharding_strategy=ShardingStrategy.rowwise(2); m.sharding_strategy.is_rowwise
wts(ColumnParallelLinear(4,8,f32,devices=gpu))
wts(ColumnParallelLinear(4,8,f32,devices=gpu,has_bias=True))
ColumnParallelLinear(4,8,f32,gpu)
ColumnParallelLinear(4,8,f32,devices=[])
ColumnParallelLinear(4,8,f32)
wts(ColumnParallelLinear(4,8,f32,devices=gpu,tied_weight=Weight("t",f32,(8,4),gpu[0])))
wts(RMSNorm(4,f32))
wts(RMSNorm(4))
wts(RMSNorm(dim=4,dtype=f32,eps=1e-5,weight_offset=1.0,multiply_before_cast=False))
at(RMSNorm(4,f32),"eps","weight_offset","multiply_before_cast","weight")
RMSNorm("a",f32)
RMSNorm(4,"f32")
RMSNorm(4.0,f32)
run(RMSNorm(4,f32),T(2,4))
run(RMSNorm(4,f32),T(2,5))
run(RMSNorm(4,f32),T("a","b"))
run(RMSNorm(4,f32),T(4))
run(RMSNorm(4,f32),T())
run(RMSNorm(4,f32),T(2,4,d=D.bfloat16))
run(RMSNorm(4,D.bfloat16),T(2,4))
run(RMSNorm(4,f32),T(2,4,d=D.int32))
run(RMSNormV1(Weight("w",f32,(4,),cpu)),T(2,4))
at(RMSNormV1(Weight("w",f32,(4,),cpu)),"eps","weight_offset","multiply_before_cast")
wts(LayerNorm(4,cpu,f32))
wts(LayerNorm(4,[cpu],f32))
wts(LayerNorm(dims=4,device=cpu,dtype=f32))
wts(LayerNorm(dims=4,devices=[cpu],dtype=f32))
wts(LayerNorm(4,[cpu],f32,1e-5,False))
wts(LayerNorm(4,[cpu],f32,use_bias=False))
LayerNorm(64,cpu,f32)
LayerNorm(64,f32,cpu)
LayerNorm(64)
LayerNorm(64,[])
LayerNorm(64,[cpu],"f32")
LayerNorm("a",[cpu],f32)
at(LayerNorm(4,[cpu],f32),"eps","weight","bias","dims")
run(LayerNorm(4,[cpu],f32),T(2,4))
run(LayerNorm(4,[cpu],f32),T(2,5))
run(LayerNorm(4,[cpu],f32,use_bias=False),T(2,4))
run(LayerNorm(4,[cpu],f32),T(2,4,d=D.bfloat16))
run(LayerNorm(4,[cpu],f32),T("a","b"))
run(LayerNormV1(Weight("w",f32,(4,),cpu)),T(2,4))
wts(ConstantLayerNorm(4,cpu,f32))
run(ConstantLayerNorm(4,cpu,f32),T(2,4))
run(ConstantLayerNorm((4,),cpu,f32),T(2,4))
run(ConstantLayerNorm(4,cpu),T(2,4))
ConstantLayerNorm(4)
wts(GroupNorm(2,4))
wts(GroupNorm(2,4,device=gpu[0]))
wts(GroupNorm(2,4,1e-5,False))
wts(GroupNorm(3,4))
wts(GroupNorm(0,4))
at(GroupNorm(2,4),"num_groups","num_channels","eps","affine")
run(GroupNorm(2,4),T(1,4,5,5))
run(GroupNorm(2,4),T(1,5,5,5))
run(GroupNorm(2,4),T(4))
run(GroupNorm(2,4,device=gpu[0]),T(1,4,5,5,v=gpu[0]))
wts(Embedding(10,4,f32,cpu))
wts(Embedding(vocab_size=10,hidden_dim=4,dtype=f32,device=cpu))
wts(Embedding(10,4,f32))
wts(Embedding(10,4,f32,cpu,name="e"))
Embedding(10,4,f32,cpu,None,"e").weight.name
Embedding(10,4,cpu,f32)
at(Embedding(10,4,f32,cpu),"weight","device")
run(Embedding(10,4,f32,cpu),T(2,3,d=D.int64))
run(Embedding(10,4,f32,cpu),T(2,3,d=D.int32))
run(Embedding(10,4,f32,cpu),T(2,3,d=D.uint32))
run(Embedding(10,4,f32,cpu),T(2,3))
run(Embedding(10,4,f32,cpu),T(d=D.int64))
run(EmbeddingV1(Weight("w",f32,(10,4),cpu),cpu),T(2,d=D.int64))
wts(MLP(f32,None,4,8,[cpu]))
wts(MLP(dtype=f32,quantization_encoding=None,hidden_dim=4,feed_forward_length=8,devices=[cpu],has_bias=True))
wts(MLP(f32,None,4,8,[]))
wts(MLP(f32,None,4,8,cpu))
wts(MLP(f32,None,4,8,[cpu],activation_function="gelu"))
MLP(f32,None,4,8,[cpu],activation_function="foo")
run(MLP(f32,None,4,8,[cpu]),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="gelu"),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="gelu_tanh"),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="relu"),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="tanh"),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="sigmoid"),T(2,4))
run(MLP(f32,None,4,8,[cpu],activation_function="quick_gelu"),T(2,4))
run(MLP(f32,None,4,8,[cpu]),T(2,5))
MLP(f32,None,4,8,[cpu],is_sharding=True).raw_state_dict().keys()
nn.clamp(3)
at(kv(),"dtype","n_kv_heads","head_dim","enable_prefix_caching","enable_kvcache_swapping_to_host","host_kvcache_swap_space_gb","cache_strategy","page_size","n_devices","n_kv_heads_per_device","data_parallel_degree","is_mla")
KVCacheParams(f32,2,8)
KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8)
KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8,page_size=128)
KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8,cache_strategy="paged")
at(KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8,cache_strategy=KVCacheStrategy.PAGED,page_size=16),"page_size","n_devices")
KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8,cache_strategy=KVCacheStrategy.PAGED)
KVCacheParams(dtype=f32,n_kv_heads=2,head_dim=8,cache_strategy=KVCacheStrategy.MODEL_DEFAULT)
kv(n_devices=2).n_kv_heads_per_device
kv(n_devices=3)
kv(n_devices=3,n_kv_heads=4)
kv(n_devices=4)
kv(n_devices=0)
kv(n_devices=2,data_parallel_degree=2).n_kv_heads_per_device
kv(n_devices=4,data_parallel_degree=2).n_kv_heads_per_device
kv(n_devices=2,data_parallel_degree=3)
kv(n_devices=1,data_parallel_degree=2)
kv(n_kv_heads=0)
kv(page_size=None)
kv(page_size=100)
kv(page_size=0)
kv(enable_prefix_caching=True).enable_prefix_caching
kv(enable_kvcache_swapping_to_host=True)
kv(enable_kvcache_swapping_to_host=True,enable_prefix_caching=True)
kv(enable_kvcache_swapping_to_host=True,enable_prefix_caching=True,host_kvcache_swap_space_gb=1)
kv(is_mla=True,n_devices=2).n_kv_heads_per_device
kv().dtype_shorthand
kv(dtype=D.bfloat16).dtype_shorthand
kv().static_cache_shape
kv().copy_as_dp_1()
at(kv(n_devices=2,data_parallel_degree=2).copy_as_dp_1(),"n_devices","data_parallel_degree")
kv()==kv()
kv().shape_per_block
kv().tensor_parallel_degree
kv(num_layers=3)
KVCacheStrategy("paged")
KVCacheStrategy.PAGED=="paged"
[m.value for m in KVCacheStrategy]
KVCacheStrategy.PAGED.uses_opaque()
KVCacheStrategy.PAGED.kernel_substring()
nn.clamp(3)
run(lambda x: nn.clamp(x, 0, 1), T(2))
run(lambda x: nn.clamp(x, 0), T(2))
run(lambda x: nn.clamp(x, max=1), T(2))
run(lambda x: nn.clamp(x), T(2))
kv(is_mla=True,n_devices=3,n_kv_heads=4).n_kv_heads_per_device
str(float8_config.Float8ScaleGranularity.BLOCK)
"""


FAMILY = plain_family(
    PROGRAMS,
    {
        **{n: getattr(m, n) for m in (rotary_embedding, linear, kv_cache, nn) for n in dir(m) if n[0].isupper()},
        "nn": nn, "float8_config": float8_config, "D": DType, "f32": f32, "cpu": cpu, "gpu": gpu, "e4": D.float8_e4m3fn,
        "Weight": Weight, "ShardingStrategy": ShardingStrategy, "QuantizationEncoding": QuantizationEncoding,
        "at": lambda layer, *names: [brief(getattr(layer, n)) for n in names],
        "run": run, "wts": weights, "kv": cache,
        "T": lambda *shape, d=f32, v=cpu: TensorType(d, shape, v),
    },
)  # fmt: skip
