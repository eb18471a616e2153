"""The intended differences of graphs, control flow, indexing, and ops on images."""

from __future__ import annotations

from tests.differential.rule import Difference

_API = ("graph_api",)
_IMAGES = ("graph_spatial",)
_INDEX = ("graph_indexing",)
_ERROR = "^!"

GRAPHS: tuple[Difference, ...] = (
    Difference(
        "wrong arguments are a ValueError and a TypeError",
        "in MAX some end in an AttributeError, IndexError, AssertionError, RuntimeError or ZeroDivisionError inside of "
        "the op",
        ("graph_api", "graph_spatial", "graph_indexing"),
        there="^!(AttributeError|IndexError|AssertionError|RuntimeError|ZeroDivisionError)",
        here="^!(FileNotFoundError |IndexError )?(TypeError|ValueError)",
    ),
    Difference(
        "types, conditions and values of loops may be numbers, the device of a weight may be left out",
        "an extension",
        _API,
        program=r"while_loop|ops\.cond\(True|Weight\('w', f32, \[2\], None\)",
        there="!(AttributeError|TypeError)",
        here="^[^!]",
    ),
    Difference(
        "a graph needs no name, and what becomes a tensor is an output",
        "an extension: TypeErrors",
        _API,
        program=r": (Graph\(|g\.output\()",
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "names of graphs and weights are texts of one letter or more",
        "a guard: in MAX they may be empty",
        _API,
        program=r"Graph\(None\)|Graph\(''\)|Weight\(''|constant_external\(''",
        here="ValueError",
    ),
    Difference(
        "`Graph(path=…)` alone loads a graph",
        "an extension: a name is needed",
        _API,
        program=r"Graph\(path=",
        here="!FileNotFoundError",
    ),
    Difference(
        "calls bind the symbols of a subgraph's inputs",
        "an extension: types must be equal",
        _API,
        program=r"ops\.call\(.*'k'",
        there="!ValueError",
        here="^[^!]",
    ),
    Difference(
        "`dequantize` takes Q5_K, and Q8_0 is an encoding",
        "an extension",
        _API,
        program=r"Q5_K|e\.name for e",
    ),
    Difference(
        "subgraphs of a graph have names of their own",
        "a guard: calls name their subgraph",
        _API,
        program=r"g\.add_subgraph\(.*g\.add_subgraph\(",
        there="^\\(",
        here="!ValueError",
    ),
    Difference(
        "a graph that is entered by hand is left in order",
        "a guard: in MAX the graphs' stack is not checked",
        _API,
        program=r"__enter__",
        here="!RuntimeError",
    ),
    Difference(
        "arguments of `Graph` without `forward` are errors, but for `output_types`",
        "a guard: in MAX a misspelt argument does nothing",
        _API,
        program=r"is_subgraph=|unknown=",
        here="!TypeError",
    ),
    Difference(
        "outputs are tensors, and end the graph",
        "a guard: in MAX a buffer is staged as output, and ops behind the outputs",
        _API,
        program=r"g\.output\((z\); 1|x\); x)",
        here=_ERROR,
    ),
    Difference(
        "collectives take a tensor or more, products fit their weights, shards their strategy's devices",
        "a guard: in MAX they are staged",
        _API,
        program=r"ops\.allgather\(\[\]|ops\.qmatmul|w\.shard\(\[CPU\]\)",
        there="^[^!]",
        here=_ERROR,
    ),
)

IMAGES: tuple[Difference, ...] = (
    Difference(
        "`resize` takes the names of modes, and keeps the batch and the channels",
        "25.7 knows BICUBIC only; 26.7 stages other batches and channels, and bicubic of integers",
        _IMAGES,
        program=r"ops\.resize\(",
    ),
    Difference(
        "layouts may be given by their names",
        "an extension: an AttributeError",
        _IMAGES,
        program=r"filter_layout='|input_layout='",
        there="!AttributeError",
        here="^[^!]",
    ),
    Difference(
        "pools take one number for the window, `conv2d_transpose` a bias in its own layout, `conv2d` two dtypes",
        "an extension",
        _IMAGES,
        program=r"avg_pool2d\(x, 2,|conv2d_transpose\(.*bias=z|^si32.*bf16.*conv2d",
        there="!(TypeError|ValueError)",
        here="^[^!]",
    ),
    Difference(
        "`irfft` runs on the CPU",
        "an extension: GPUs only",
        _IMAGES,
        program=r"ops\.irfft\(",
        there="!ValueError",
        here="^[^!]",
    ),
    Difference(
        "windows, strides, dilations and paddings are of counts and signs that make sense",
        "a guard: in MAX they are staged, and divide by 0 or read outside",
        _IMAGES,
        program=r"ops\.(avg_pool2d|max_pool2d|conv2d|conv2d_transpose|conv3d|fold)\(",
        there="^[^!]",
        here=_ERROR,
    ),
)

INDEX: tuple[Difference, ...] = (
    Difference(
        "numbers and arrays are stored, scattered and gathered; NumPy integers, dims and their names are indices",
        "an extension: a TypeError",
        _INDEX,
        there="!TypeError",
        here="^[^!]",
    ),
    Difference(
        "what is stored in part of a buffer broadcasts",
        "an extension: shapes must be equal",
        _INDEX,
        program=r"^buffer.*(\] = |buffer_store_slice)",
        there="!(ValueError|IndexError)",
        here="^[^!]",
    ),
    Difference(
        "slices go backwards, may be empty, and have tensors of any integer type as bounds and indices",
        "an extension: errors when they are staged; the reference reverses a tensor by a slice",
        _INDEX,
        program=r"x\[",
        there="!(ValueError|AssertionError)",
        here="^[^!]",
    ),
    Difference(
        "`nonzero` of rank 0, `print` of a buffer",
        "an extension",
        _INDEX,
        program=r"ops\.(nonzero|print)\(",
        there="!ValueError",
        here="^[^!]",
    ),
    Difference(
        "a list is no index, an index tensor is a scalar",
        "a guard: in NumPy a list picks several; in MAX it is a tuple of indices",
        _INDEX,
        program=r"x\[",
        there="^[^!]",
        here=_ERROR,
    ),
    Difference(
        "indices are integers, and updates have the shape that the indices say",
        "a guard: in MAX bools and other shapes are staged, and the kernel would read outside",
        _INDEX,
        program=r"ops\.(gather|scatter|scatter_nd|masked_scatter|buffer_store|buffer_create)\(",
        there="^[^!]",
        here=_ERROR,
    ),
)
