"""The intended differences outside of graphs: tensors, dtypes, sessions, layers, configurations."""

from __future__ import annotations

from tests.differential.rule import Difference

_TENSOR = ("driver_tensor",)
_ERROR = "^!"

DRIVER: tuple[Difference, ...] = (
    Difference(
        "tensors take NumPy's basic indexing: fewer indices than axes, `...`, `None`, NumPy integers, in `[]` and in "
        "assignments",
        "the reference says numpy-style slicing; there each axis needs an index, `...` and `None` select element 0, "
        "and only single elements are assigned",
        _TENSOR,
        program=r"T\([\d, ]*\)\[|; t\[(0|:|\.\.\.|0:1)\]=|u=t\[|t\[0\]\.to|for x in T",
    ),
    Difference(
        "a number that a tensor's type does not hold is a ValueError, OverflowError or TypeError; floats that are "
        "integers are written to integer types, any number to bool",
        "in MAX the binding's `std::bad_cast`, a RuntimeError",
        (*_TENSOR, "engine"),
        there="!RuntimeError|!OverflowError",
        program=r"\.scalar\(|\] ?= ?|MSC\.",
    ),
    Difference(
        "a NumPy float is not cut when it is written to an integer tensor, and a fraction is true in a bool tensor",
        "a guard: as for Python's floats; in MAX it is cut, and 26.7 writes 0",
        _TENSOR,
        program=r"np\.float32\(|0\.5",
        there="^tensor",
    ),
    Difference(
        "an argument of a wrong type is a TypeError or ValueError",
        "in MAX an AttributeError from inside",
        (*_TENSOR, "engine", "nn_modules"),
        there="!AttributeError",
        here="^!(TypeError|ValueError|TypeError ValueError)$",
    ),
    Difference(
        "`Tensor(array)` needs no device; `Tensor.zeros` takes `stream` and `pinned`",
        "an extension: a TypeError in MAX",
        _TENSOR,
        program=r"^Tensor\(A\(2,3\)\)|^Tensor\.zeros\(.*(stream|pinned)=",
        there="!TypeError",
    ),
    Difference(
        "bfloat16 and 8-bit floats convert to NumPy, as ml_dtypes' types",
        "an extension: an error in MAX, or raw bytes as uint8",
        (*_TENSOR, "dtypes"),
        program=r"bfloat16|float8|m\.to_numpy|each\(.*to_numpy",
    ),
    Difference(
        "`from_dlpack(copy=False)` takes a read-only array",
        "an extension: it is shared until its tensor is written, and copied then; a BufferError in MAX",
        _TENSOR,
        program="writeable=False.*copy=False",
        there="!BufferError",
    ),
    Difference(
        "`from_dlpack` takes arrays with strides",
        "an extension: a ValueError in MAX",
        _TENSOR,
        program=r"from_dlpack\(A.*(\.T|\[::)",
        there="!ValueError",
    ),
    Difference(
        "tensors are arrays for NumPy's functions; they can be copied and pickled",
        "an extension: arrays of one object, or a TypeError in MAX",
        _TENSOR,
        program=r"^np\.(asarray|array|sum)\(|copy\.|pickle\.",
    ),
    Difference(
        "`view` of a tensor of rank 0 works, or is a ValueError",
        "the reference names the ValueError; in MAX an IndexError",
        _TENSOR,
        program=r"T\(\)\.view",
        there="!IndexError",
    ),
    Difference(
        "tensors move to lists of streams, and streams wait for each other",
        "the reference has both; `Unimplemented` on the CPU in MAX",
        _TENSOR,
        program=r"\.to\(\[|wait_for",
        there="!RuntimeError",
    ),
    Difference(
        "`CPU(n)` is a virtual device of its own, and each reads the other's memory",
        "graphs are placed on several devices without an accelerator; in MAX it is device 0, which does not access "
        "itself",
        _TENSOR,
        program=r"load_devices|can_access",
    ),
    Difference(
        "`DeviceSpec` checks its id and type",
        "a guard: in MAX any value is kept, and fails when the device is opened",
        _TENSOR,
        program="^DeviceSpec",
        there="object DeviceSpec",
    ),
)

DTYPE: tuple[Difference, ...] = (
    Difference(
        '`DType("float32")` and `DType.from_numpy` take names and Python types',
        "an extension: a KeyError or ValueError in MAX",
        ("dtypes",),
        program=r"D\(\"float32\"\)|from_numpy\(('float32'|float|int|bool)\)",
        there=_ERROR,
    ),
    Difference(
        "arrays in another byte order have no dtype",
        "a guard: in MAX the bytes are read as if they were in this machine's order",
        ("dtypes",),
        program=">f4",
        here="!ValueError",
    ),
)

_ENGINE = ("engine",)
ENGINE: tuple[Difference, ...] = (
    Difference(
        "the devices of a session may be left out: the CPU; `num_threads` is 1 or more",
        "an extension and a guard: 0 is taken in MAX",
        _ENGINE,
        program=r"InferenceSession\(\)|devices=None|num_threads=(0|-1|\"a\")",
    ),
    Difference(
        "an argument of a wrong type is a TypeError, whatever takes it",
        "in MAX `InferenceSession` and `load` raise RuntimeErrors",
        _ENGINE,
        program=r"InferenceSession\(devices=|S\.load\((None|3)\)",
        there="!RuntimeError",
        here="!TypeError",
    ),
    Difference(
        "a path that is not there is a RuntimeError, the empty one too",
        "the reference says so; in MAX a ValueError",
        _ENGINE,
        program=r'load\(""\)',
        here="!RuntimeError",
    ),
    Difference(
        "weights whose shape or dtype differs from the graph's are refused",
        "a guard: in MAX the model reads beyond their memory",
        _ENGINE,
        program=r"weights_registry=.*np\.zeros",
        here="!ValueError",
    ),
    Difference(
        "arrays with strides are copied, as inputs and as weights",
        "an extension: a ValueError in MAX",
        _ENGINE,
        program=r"\.T,|\[::2[\],]",
        there="!ValueError",
    ),
    Difference(
        "a wrong number of inputs is a ValueError and a TypeError, without inputs too",
        "in MAX an IndexError for a model without inputs",
        _ENGINE,
        program=r"MN\.execute\(1\)",
    ),
    Difference(
        "levels and precisions are taken in either case, and unknown ones refused",
        "an extension and a guard",
        _ENGINE,
        program=r'"(info|accum|output)"|assert_level\(3\)|use_old_top_k_kernel\((True|3)\)',
    ),
    Difference(
        "a NumPy scalar is an input where its kind fits, as Python's numbers",
        "a guard: in MAX its fraction or imaginary part is lost",
        _ENGINE,
        program=r"MSC\.execute\(1\.5,np\.(float32|complex64)",
    ),
)

_MODULES, _LAYERS, _INTERFACES = ("nn_modules",), ("nn_layers",), ("interfaces",)

NN: tuple[Difference, ...] = (
    Difference(
        "`DeviceRef.from_device` of what is no device is a TypeError",
        "in MAX an AttributeError from inside",
        ("graph_types",),
        program="from_device",
        there="!AttributeError",
    ),
    Difference(
        "an argument that fits no layer is a TypeError or ValueError where it is given",
        "a guard: in MAX wrong dtypes, devices and sizes are found when the layer is used, or by an accident inside",
        (*_MODULES, *_LAYERS),
        here=r"^!(TypeError|ValueError|TypeError ValueError|NotImplementedError)$",
        program=r"cpu,f32\)|3\.0|4\.0|-3,4|\"float32\"|\"f32\"|\"cpu\"|RMSNorm|GroupNorm\(0|\[\]\)|activation_function"
        r"|n_devices=0|n_kv_heads=0|"
        r"page_size=0|Layer\(\)|set_shared_weight\(\"w2\",3|,3\]\)|\[3\]\)|\]\)\(3\)|list\(sd",
    ),
    Difference(
        "`KVCacheParams` has `num_layers` and `tensor_parallel_degree`",
        "an extension: names of 26.x",
        _LAYERS,
        program=r"kv\(num_layers=|tensor_parallel_degree",
    ),
    Difference(
        "layer_norm takes an input whose last dimension is known to be that of its weight",
        "a guard: in MAX a wrong size is read beyond the weight's memory",
        _LAYERS,
        program=r"LayerNorm\(4,\[cpu\],f32\),T\(\"a\",\"b\"\)",
    ),
    Difference(
        "weights of column-parallel layers stand on the first of their devices; a tied weight is its owner's",
        "in MAX they stand on the CPU, and a checkpoint has to hold the tied weight twice",
        _LAYERS,
        program="ColumnParallelLinear",
    ),
    Difference(
        "the tokens of a context may be a list",
        "an extension: an AttributeError in MAX",
        _INTERFACES,
        program=r"^TextContext\(.*tokens=\[",
        there="!AttributeError",
        here="^object",
    ),
    Difference(
        "`numpy()` gives the elements of a tensor of the driver as an array",
        "an extension: an AttributeError in MAX",
        _TENSOR,
        program=r"\.numpy\(\)$",
        there="!AttributeError",
        here="^array",
    ),
    Difference(
        "`LayerNorm` takes a device beside a list of them",
        "an extension: a TypeError in MAX",
        _LAYERS,
        program=r"LayerNorm\(.*\bcpu,f32|LayerNorm\(dims=4,devices?=cpu",
        there="!TypeError",
    ),
    Difference(
        "one symbol of a weight's shape is one size",
        "a guard: in MAX each dimension takes any size",
        _MODULES,
        program=r'\("n","n"\).*A\(4,5\)',
    ),
    Difference(
        "state dicts have a shared weight once, under its owner's name, and no attribute that was set to None",
        "the reference says so; in MAX shared weights are listed again, and old layers stay",
        _MODULES,
        program=r"set_shared_weight|m\.b\.weight=m\.a\.weight|m\.a=None",
        there=r"^\[",
    ),
    Difference(
        "`Sequential` begins with a function too",
        "an extension: a ValueError in MAX",
        _MODULES,
        program=r"Sequential\(\[ops\.relu",
    ),
)

INTERFACES: tuple[Difference, ...] = (
    Difference(
        "sampling parameters, requests and contexts check their values",
        "a guard: in MAX values without meaning are kept",
        _INTERFACES,
        program=r"SamplingParams\((top_k|top_p|temperature|max_new_tokens|min_new_tokens|seed)=|messages="
        r"|np\.array\(\[\],|max_length=5|start_idx=-1",
        here="^!(ValueError|TypeError)$",
    ),
    Difference(
        "one stop text is a list of it",
        "an extension: MAX keeps the text where a list is documented",
        _INTERFACES,
        program=r'SamplingParams\(stop="a"\)\.stop',
    ),
    Difference(
        "`top_k` may be above 255; a seed of None is drawn",
        "an extension: a limit of its kernels in MAX",
        _INTERFACES,
        program=r"top_k=25[67]|seed=None",
    ),
    Difference(
        "a request with `top_k` or a temperature samples, even if the model's `do_sample` is false",
        "the reference: values of the user go first",
        _INTERFACES,
        program="do_sample=False",
    ),
    Difference(
        "`LoRAOperation.LIST`, and a `LoRARequest` without a name",
        "the reference has both",
        _INTERFACES,
        program="LoRAOperation",
    ),
    Difference(
        "a context's tokens are int64",
        "one dtype, whatever came; in MAX it is the caller's",
        _INTERFACES,
        program=r"np\.int32\)\)\.tokens\.dtype",
    ),
    Difference(
        "generated tokens stay generated after `reset`",
        "penalties and minimum lengths count them, so that a text is the same after preemption; in MAX they become "
        "prompt",
        _INTERFACES,
        program=r"c\.reset\(\)",
    ),
    Difference(
        "`compute_num_available_steps` is the number of tokens that can still be generated",
        "the reference says so; in MAX the active tokens are not counted",
        _INTERFACES,
        program="compute_num_available_steps",
    ),
)

_CONFIGS = ("pipeline_configs",)

PIPELINES: tuple[Difference, ...] = (
    Difference(
        "`SupportedEncoding` has float16, q5_k, q8_0 and float4 too, and bfloat16 and gptq run on the CPU",
        "an extension",
        _CONFIGS,
        program=r"for m in SupportedEncoding",
    ),
    Difference(
        "an encoding is found in a file's name however it is spelt",
        "an extension",
        _CONFIGS,
        program="parse_from_file_name",
    ),
    Difference(
        "configurations check their values, and convert texts and paths",
        "a guard: in MAX any value is kept",
        _CONFIGS,
        program=r"KVCacheConfig\((kv_cache_page_size|device_memory)|weight_path=",
    ),
    Difference(
        "`gpu_profiling` and `cache_strategy` of configurations are the texts that their enums equal",
        "reading a configuration imports no engine",
        _CONFIGS,
        program=r"gpu_profiling|str\(KVCacheConfig",
    ),
    Difference(
        "`KVCacheConfig` has `kv_cache_format` too",
        "an extension: caches of 8 bits and of a type of their own",
        _CONFIGS,
        program=r"KVCacheConfig\.help",
    ),
    Difference(
        "a configuration may be made before its model is known; the devices are found when it is resolved",
        "an extension: a ValueError in MAX",
        _CONFIGS,
        program=r"^PipelineConfig\(|device_specs",
    ),
)

API: tuple[Difference, ...] = (*DRIVER, *DTYPE, *ENGINE, *NN, *INTERFACES, *PIPELINES)
