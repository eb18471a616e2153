"""The intended differences of new symbols, dtypes, read-only memory, modules and debugging options."""

from __future__ import annotations

from tests.differential.rule import Difference

_ERROR, _VALUE = "^!", "^[^!]"
_SYMBOLS, _MATRIX = ("forward_symbols",), ("dtype_matrix",)
_NOT_LOADED = "in MAX the graph is staged, and cannot be loaded"

FORMS: tuple[Difference, ...] = (
    Difference(
        "ops take tensors whose symbol is bound later",
        "an extension: in MAX the symbol's binder has to be staged before",
        _SYMBOLS,
        there="^!ValueError",
        here=_VALUE,
    ),
    Difference(
        "`range` has an element for each step; a slice of a part has not the size of the whole",
        "a guard: in MAX other sizes are staged",
        _SYMBOLS,
        program=r"ops\.range\(|x\[\(slice",
        there=_VALUE,
        here=_ERROR,
    ),
    Difference(
        "`argsort` sorts matrices along the first axis; scatters take every integer type as indices",
        "an extension: a ValueError in MAX",
        _MATRIX,
        program=r"argsort\(x|ops\.scatter\(",
        there="^!ValueError",
        here=_VALUE,
    ),
    Difference(
        "ops of floats refuse integers; arithmetic and ordering refuse bools",
        _NOT_LOADED,
        _MATRIX,
        program=r"softmax|floor|^bool.*(sum|mean|abs|random|-x|x [<>@])",
        there=_VALUE,
        here=_ERROR,
    ),
    Difference(
        "masks are bools, indices integers",
        "a guard: in MAX others are staged",
        _MATRIX,
        program=r"masked_scatter\(y, x|^bool.*ops\.gather",
        there=_VALUE,
        here=_ERROR,
    ),
    Difference(
        "debugging options check their values, and `pre_jit` and `uninitialized_read_check` are errors",
        "a guard: in MAX any text is kept; what cannot be obeyed is said",
        ("debug_options",),
        program=r"pre_jit=True|uninitialized_read_check=True|=\'",
        here=r"^!(NotImplementedError|TypeError ValueError)",
    ),
    Difference(
        "ops for several GPUs, helpers of MAX's own files, and compiled files of MAX are absent",
        "the messages of documented ones say what to use instead",
        ("module_names",),
        there="^(True|None)$",
        here="^!(ModuleNotFound|Import)Error",
    ),
)
