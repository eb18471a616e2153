"""The intended differences of types, and of ops that compute or move elements."""

from __future__ import annotations

from tests.differential.rule import Difference

_TYPES = ("graph_types",)
_ERROR = "^!"

GRAPH: tuple[Difference, ...] = (
    Difference(
        "`Dim(True)` is a TypeError",
        "a truth value is no size; 26.7 makes sizes such as 31657 of it",
        _TYPES,
        program=r"\bTrue\b",
        here="^!TypeError",
    ),
    Difference(
        "`3 // Dim(…)` works",
        "endless recursion in MAX",
        _TYPES,
        program="//",
        there="!RecursionError",
    ),
    Difference(
        "`Dim(3) < text` is an error of the name",
        "a guard: a text that is no name of a dimension is refused wherever it stands",
        _TYPES,
        program=r"Dim\(.*\) < '",
        there="!TypeError",
        here="!ValueError",
    ),
    Difference(
        "a static `Dim` is an index and a `range` bound",
        "an extension: an error in MAX",
        _TYPES,
        program=r"range\(Dim|50\]\[Dim",
        there=_ERROR,
    ),
    Difference(
        "a `Shape` plus any iterable is a `Shape`, and a `Shape` equals a tuple of its dims",
        "an extension: a list of mixed elements, an error or False in MAX",
        _TYPES,
        program=r"^[^:]*: Shape\(.*\) (\+|==) ",
    ),
    Difference(
        "types take a `DType` and a device only",
        "a guard: the fault shows where it stands; in MAX the type is made, and fails when it is used",
        _TYPES,
        program=r"Type\((dtype=)?('float32'|None|np\.float32|3),|Type\(\[2\], 'float32'",
        here="^!TypeError",
    ),
    Difference(
        "the device of a type may be left out: the CPU",
        "an extension: the reference's examples leave it out",
        _TYPES,
        program=r"TensorType\(\w+, [^)]*(\)|, None\)|\]\)\]?, None\)|'a'\]\), None\))",
        there=_ERROR,
    ),
    Difference(
        "each argument of a type is checked, in the order of the signature",
        "the device is looked at first in MAX: an AttributeError",
        _TYPES,
        program=r"TensorType\(.*, 'cpu'\)$",
        there="!AttributeError",
        here="^!TypeError",
    ),
    Difference(
        "the dims of inputs are names and sizes; an expression of a name that no input has is an error",
        "a guard: nothing gives the name a value",
        _TYPES,
        program=r"Graph\('h', input_types=.*Dim\('a'\) \* 2|TensorValue\(Dim\('a'\)\)",
        here="^!",
    ),
    Difference(
        "a `TensorValue` has a hash and iterates over its first axis",
        "an extension: a TypeError in MAX",
        _TYPES,
        program=r"iter\(x\)|hash\(x\)",
        there="!TypeError",
    ),
    Difference(
        "`TensorValue(…)` takes numbers and arrays",
        "an extension: a TypeError in MAX",
        _TYPES,
        program=r"TensorValue\((3|2\.5|np\.ones.*|\[1, 2\])\)",
        there="!TypeError",
    ),
)

_VALUES = ("graph_elementwise", "graph_reduction")
_MOVES = ("graph_shape",)
_OPS = ("graph_elementwise", "graph_reduction", "graph_shape")
_FLOAT_ONLY = (
    r"ops\.(acos|atanh|cos|erf|exp|floor|gelu|is_inf|is_nan|log|log1p|round|rsqrt|sigmoid|silu|sin|sqrt|tanh|trunc)\("
    r"|round\(x\)|ops\.(softmax|logsoftmax|rms_norm|layer_norm)\(|x\.(stdev|var)\("
)
_NOT_LOADED = "in MAX the graph is staged, and cannot be loaded"
_SIZES_OF_INPUTS = "a guard: in MAX the graph is staged, and nothing gives the name a value"

OPS: tuple[Difference, ...] = (
    Difference(
        "ops of floats refuse integers and bools when they are staged",
        _NOT_LOADED,
        _VALUES,
        program=_FLOAT_ONLY,
        there=r"^(si|ui|bool|\()",
        here=_ERROR,
    ),
    Difference(
        "arithmetic, ordering and sums of bools are errors when they are staged",
        _NOT_LOADED,
        _VALUES,
        program=r"^bool.*(ops\.(abs|add|sub|mul|div|floor_div|mod|pow|max|min|negate|relu|greater|greater_equal|sum"
        r"|mean"
        r"|cumsum|matmul|outer|rms_norm|layer_norm)\(|x\.(max|min|mean|stdev|var)\("
        r"|divmod| @ | [-+*/%<>]|\*\*|^[^:]*: -x)",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "operands of two dtypes are promoted",
        "an extension: mixed integers and floats, bfloat16 and float16, signed and unsigned are errors in MAX",
        _OPS,
        there="!ValueError",
        program=r"^\w+\[.*(x, y|x @ y|x [^ ]+ y|rhs=y|y=y)",
        here="^[^!]",
    ),
    Difference(
        "numbers and arrays meet tensors whose dtype holds them but for rounding",
        "an extension: integers beyond a float's exact range, integers that meet floats, and NumPy's bools are errors "
        "in MAX",
        ("graph_elementwise",),
        program=r"\d|np\.|Dim|shape|Shape|True|False",
        there="!(ValueError|TypeError)",
        here="^[^!]",
    ),
    Difference(
        "numbers, lists and arrays are operands of every op",
        "an extension: some ops take tensors only",
        ("graph_elementwise", "graph_reduction"),
        program=r"(2\.5|\[1, 2\]|\[1\.0, 2\.0\]|np\.ones\(\(?\d(, 3\))?, np\.float32\))\)$",
        there="!(TypeError|AttributeError)",
        here="^[^!]",
    ),
    Difference(
        "`abs(tensor)` works, and a tensor compares with anything",
        "an extension: a TypeError",
        ("graph_elementwise",),
        program=r": (abs\(x\)|.*[=!]= |.*== )",
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "the dtype and the device of `constant` may be left out, and arrays are converted",
        "an extension: needed in MAX, and an array's dtype must be the given one",
        ("graph_elementwise",),
        program=r"ops\.constant\(",
        there="!(TypeError|ValueError|RuntimeError)",
        here="^[^!]",
    ),
    Difference(
        "constants of what is no number are a TypeError and a ValueError",
        "the conversion's own error in MAX: RuntimeError, OverflowError, RecursionError",
        ("graph_elementwise",),
        program=r"ops\.constant\(",
        there="!(RuntimeError|OverflowError|RecursionError)",
        here="!TypeError ValueError",
    ),
    Difference(
        "constants that do not fit their dtype are errors",
        "the reference says so; in MAX 1e300 becomes infinity, 0.5 an integer",
        ("graph_elementwise",),
        program=r"1e300|ops\.constant\(|np\.ones\(\(\), np\.float32\)|np\.ones\(4, np\.float32\)",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "a constant of rank 0 stays of rank 0",
        "the reference says so; in MAX an array of rank 0 becomes one of rank 1",
        ("graph_elementwise",),
        program=r"np\.ones\(\(\), np\.float32\)",
        there=r"\[1\]",
        here=r"\[\]",
    ),
    Difference(
        "an array on the left of an operator meets the tensor as a whole",
        "in MAX NumPy makes an array of tensors, or of truth values",
        ("graph_elementwise",),
        program=r": np\.ones",
        there=r"^array",
    ),
    Difference(
        "dims are names of inputs, or of sizes that ops of the graph give",
        _SIZES_OF_INPUTS,
        ("graph_elementwise", "graph_shape"),
        program=r"Dim\('a'\)|'[abnrqs]'|x\.shape|'ab'",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "an axis is an int, in range",
        "a guard: in MAX `True` is 1, and `softmax` takes any axis",
        ("graph_reduction", "graph_shape"),
        program=r"True|softmax|split",
        there="^[^!]",
        here=r"^!IndexError TypeError ValueError",
    ),
    Difference(
        "bools divided by a dim are floats",
        "as integers are; in MAX the quotient is int64",
        ("graph_elementwise",),
        program=r"^bool.*div\(x, Dim",
        there="^si64",
        here="^f64",
    ),
    Difference(
        "flags are true or false things, arrays are operands of `matmul` and `max`",
        "an extension: a TypeError",
        ("graph_reduction",),
        program=r"None\)$|np\.ones|ops\.max\(x, \(0, 1\)\)",
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "a `Dim` is an axis, a list of one int too",
        "an extension",
        ("graph_reduction",),
        program=r"Dim\(1\)|\[0\]|Dim\(2\)|np\.int32",
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "the greatest and the least of no elements are errors",
        "a guard: in MAX the graph is staged",
        ("graph_reduction",),
        program=r"^\w+\[(0|0, 3|3, 0)\]: ops\.(max|min|argmax|argmin)",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "`top_k` takes at least one element",
        "a guard: results without elements in MAX",
        ("graph_reduction",),
        program=r"ops\.top_k\(.*(0|False)",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "`argsort` sorts tensors of any rank, `outer` flattens, `max` takes an axis behind two operands",
        "an extension; the reference says that `outer` flattens",
        ("graph_reduction",),
        program=r"ops\.(argsort|outer|max|min)\(",
        there="!ValueError",
        here="^[^!]",
    ),
    Difference(
        "the epsilon of a norm is a number, and the norms' operands are floats of rank 1 or more",
        "a guard: in MAX None is staged; a rank of 0 is an IndexError in MAX",
        ("graph_reduction",),
        program=r"ops\.(rms|layer)_norm",
        here=_ERROR,
    ),
)

MOVES: tuple[Difference, ...] = (
    Difference(
        "the shape tensor of `broadcast_to` has an element for each of `out_dims`",
        "a guard: the dims would be of another rank than the result",
        _MOVES,
        program=r"broadcast_to\(x, y",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "wrong paddings are a ValueError",
        "an assertion in MAX",
        _MOVES,
        program=r"ops\.pad\(",
        there="!AssertionError",
        here="ValueError",
    ),
    Difference(
        "paddings and chunks may be dims, whole axes of unknown size may be split off",
        "an extension: a TypeError",
        _MOVES,
        program=r"ops\.(pad|chunk|split)\(",
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "`concat` and `stack` take arrays, tensors of several dtypes, and a tensor for its parts",
        "an extension",
        _MOVES,
        program=r"ops\.(concat|stack)\(",
        there="!(TypeError|ValueError)",
        here="^[^!]",
    ),
    Difference(
        "`permute`, `pad` and `tile` take tensors of rank 0 and factors of 0",
        "an extension",
        _MOVES,
        program=r"permute\(x, \[\]\)|pad\(x, \[\]|tile\(x, \[0\]\)",
        there="!ValueError",
        here="^[^!]",
    ),
    Difference(
        "`split` and `chunk` want sizes that add up, and one part or more",
        "a guard: in MAX no parts are no error, and 0 chunks a ZeroDivisionError",
        _MOVES,
        program=r"ops\.(split|chunk)\(",
        there=r"^\[\]|!ZeroDivisionError",
        here=_ERROR,
    ),
    Difference(
        "a negative bound of `band_part`, one of a fraction, a repeat or padding that fits no axis are errors when "
        "they are staged",
        "a guard: the reference says that bounds are checked; in MAX some are staged, a fraction is a RuntimeError",
        _MOVES,
        program=r"ops\.(band_part|repeat_interleave|pad)\(",
        here=_ERROR,
    ),
    Difference(
        "what can never be equal is an error when it is staged",
        "a guard: in MAX `rebind` fails when the graph runs",
        _MOVES,
        program=r"rebind\(|out_dim=9",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "`range` has an element for each step begun, and a step that is not 0",
        "as its reference says: up to stop, without it; in MAX the size is rounded down",
        _MOVES,
        program=r"ops\.range\(0, (10, 3|10, 0|Dim\('a'\), 2|1, 0\.1)",
    ),
    Difference(
        "devices and dtypes are checked as arguments",
        "an AttributeError or KeyError in MAX",
        _MOVES,
        program=r"ops\.(range|random\.\w+)\(",
        there="!(AttributeError|KeyError)",
        here="TypeError",
    ),
    Difference(
        "random numbers are no bools",
        _NOT_LOADED,
        _MOVES,
        program=r"ops\.random\.\w+\(TensorType\(bool",
        here=_ERROR,
    ),
    Difference(
        "random numbers need no seed, and a seed is any int",
        "an extension: a RuntimeError without `set_seed`; `True` is no seed here",
        _MOVES,
        program=r"^f32\[\]: ops\.random\.|set_seed\((True|2\*\*70|w|1\.5)\)",
    ),
    Difference(
        "the length of a window is an int",
        "a guard: in MAX `True` is 1 and no device an AttributeError",
        _MOVES,
        program=r"ops\.hann_window\((True|4, None)",
    ),
    Difference(
        "`as_interleaved_complex` of rank 0 is a ValueError",
        "an IndexError in MAX",
        _MOVES,
        program=r"^f32\[\]: ops\.as_interleaved",
        there="!IndexError",
    ),
)
