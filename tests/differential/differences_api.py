"""The intended differences outside of graphs: tensors, dtypes, sessions, layers, configurations."""

from __future__ import annotations

from tests.differential.rule import Difference

_TENSOR = ("driver_tensor",)
_ERROR = "^!"

DRIVER: tuple[Difference, ...] = (
    Difference(
        "tensors take NumPy's basic indexing: fewer indices than axes, `...`, `None`, NumPy integers, in `[]` and in assignments",
        "the reference says numpy-style slicing; there each axis needs an index, `...` and `None` select element 0, and only "
        "single elements are assigned",
        _TENSOR,
        program=r"T\([\d, ]*\)\[|; t\[(0|:|\.\.\.|0:1)\]=|u=t\[|t\[0\]\.to|for x in T",
    ),
    Difference(
        "a number that a tensor's type does not hold is a ValueError, OverflowError or TypeError; floats that are integers are "
        "written to integer types, any number to bool",
        "there the binding's `std::bad_cast`, a RuntimeError",
        (*_TENSOR, "engine"),
        there="!RuntimeError|!OverflowError",
        program=r"\.scalar\(|\] ?= ?|MSC\.",
    ),
    Difference(
        "a NumPy float is not cut when it is written to an integer tensor, and a fraction is true in a bool tensor",
        "a guard: as for Python's floats; there it is cut, and 26.7 writes 0",
        _TENSOR,
        program=r"np\.float32\(|0\.5",
        there="^tensor",
    ),
    Difference(
        "an argument of a wrong type is a TypeError or ValueError",
        "there an AttributeError from inside",
        (*_TENSOR, "engine"),
        there="!AttributeError",
        here="^!(TypeError|ValueError|TypeError ValueError)$",
    ),
    Difference(
        "`Tensor(array)` needs no device; `Tensor.zeros` takes `stream` and `pinned`",
        "more than there: a TypeError there",
        _TENSOR,
        program=r"^Tensor\(A\(2,3\)\)|^Tensor\.zeros\(.*(stream|pinned)=",
        there="!TypeError",
    ),
    Difference(
        "bfloat16 and 8-bit floats convert to NumPy, as ml_dtypes' types",
        "more than there: an error there, or raw bytes as uint8",
        (*_TENSOR, "dtypes"),
        program=r"bfloat16|float8|m\.to_numpy|each\(.*to_numpy",
    ),
    Difference(
        "a read-only array is shared, and writing to its tensor is an error; `copy=False` takes it too",
        "weights are mapped files, which a hidden copy would read whole; there the tensor gets a copy",
        _TENSOR,
        program="writeable=False",
    ),
    Difference(
        "`from_dlpack` takes arrays with strides",
        "more than there: a ValueError there",
        _TENSOR,
        program=r"from_dlpack\(A.*(\.T|\[::)",
        there="!ValueError",
    ),
    Difference(
        "tensors are arrays for NumPy's functions; they can be copied and pickled",
        "more than there: arrays of one object, or a TypeError there",
        _TENSOR,
        program=r"^np\.(asarray|array|sum)\(|copy\.|pickle\.",
    ),
    Difference(
        "`view` of a tensor of rank 0 works, or is a ValueError",
        "the reference names the ValueError; there an IndexError",
        _TENSOR,
        program=r"T\(\)\.view",
        there="!IndexError",
    ),
    Difference(
        "tensors move to lists of streams, and streams wait for each other",
        "the reference has both; `Unimplemented` on the CPU there",
        _TENSOR,
        program=r"\.to\(\[|wait_for",
        there="!RuntimeError",
    ),
    Difference(
        "`CPU(n)` is a virtual device of its own, and each reads the other's memory",
        "graphs are placed on several devices without an accelerator; there it is device 0, which does not access itself",
        _TENSOR,
        program=r"load_devices|can_access",
    ),
    Difference(
        "`DeviceSpec` checks its id and type",
        "a guard: there any value is kept, and fails when the device is opened",
        _TENSOR,
        program="^DeviceSpec",
        there="object DeviceSpec",
    ),
    Difference(
        "a rank-0 tensor takes the index `()` only",
        "a guard: there `t[0] = 3` writes too, while `t[0]` is an error",
        _TENSOR,
        program=r"t=T\(\); t\[0\]=3",
    ),
)

DTYPE: tuple[Difference, ...] = (
    Difference(
        '`DType("float32")` and `DType.from_numpy` take names and Python types',
        "more than there: a KeyError or ValueError there",
        ("dtypes",),
        program=r"D\(\"float32\"\)|from_numpy\(('float32'|float|int|bool)\)",
        there=_ERROR,
    ),
    Difference(
        "arrays in another byte order have no dtype",
        "a guard: there the bytes are read as if they were in this machine's order",
        ("dtypes",),
        program=">f4",
        here="!ValueError",
    ),
)

_ENGINE = ("engine",)
ENGINE: tuple[Difference, ...] = (
    Difference(
        "the devices of a session may be left out: the CPU; `num_threads` is 1 or more",
        "more than there, and a guard: 0 is taken there",
        _ENGINE,
        program=r"InferenceSession\(\)|devices=None|num_threads=(0|-1|\"a\")",
    ),
    Difference(
        "an argument of a wrong type is a TypeError, whatever takes it",
        "there `InferenceSession` and `load` raise RuntimeErrors",
        _ENGINE,
        program=r"InferenceSession\(devices=|S\.load\((None|3)\)",
        there="!RuntimeError",
        here="!TypeError",
    ),
    Difference(
        "a path that is not there is a RuntimeError, the empty one too",
        "the reference says so; there a ValueError",
        _ENGINE,
        program=r'load\(""\)',
        here="!RuntimeError",
    ),
    Difference(
        "weights whose shape or dtype differs from the graph's are refused",
        "a guard: there the model reads beyond their memory",
        _ENGINE,
        program=r"weights_registry=.*np\.zeros",
        here="!ValueError",
    ),
    Difference(
        "arrays with strides are copied, as inputs and as weights",
        "more than there: a ValueError there",
        _ENGINE,
        program=r"\.T,|\[::2[\],]",
        there="!ValueError",
    ),
    Difference(
        "a wrong number of inputs is a ValueError and a TypeError, without inputs too",
        "there an IndexError for a model without inputs",
        _ENGINE,
        program=r"MN\.execute\(1\)",
    ),
    Difference(
        "a read-only array is no buffer that a model writes to",
        "a guard: there the writes are lost",
        _ENGINE,
        program=r"writeable=False; MB\.",
    ),
    Difference(
        "levels and precisions are taken in either case, and unknown ones refused",
        "more than there, and a guard",
        _ENGINE,
        program=r'"(info|accum|output)"|assert_level\(3\)|use_old_top_k_kernel\((True|3)\)',
    ),
    Difference(
        "a NumPy scalar is an input where its kind fits, as Python's numbers",
        "a guard: there its fraction or imaginary part is lost",
        _ENGINE,
        program=r"MSC\.execute\(1\.5,np\.(float32|complex64)",
    ),
)

API: tuple[Difference, ...] = (*DRIVER, *DTYPE, *ENGINE)
