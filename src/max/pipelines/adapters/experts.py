"""Changes of experts: modules of single experts, and parameters that hold the weights of all experts of a layer.

PEFT stores the change of such a parameter as two matrices (``target_parameters``), and their experts are::

    A  [experts * rank, inputs]    rows of an expert follow each other
    B  [outputs, rank * experts]   columns of a rank follow each other

Parameters of a layer wrap each other: the first one has the names ``….base_layer.lora_A``, the last one ``….lora_A``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max.pipelines.adapters.adapter import Adapter, AdapterError, Array, LowRank
from max.pipelines.adapters.terms import AdapterBase, Floats
from max.pipelines.models.blocks.experts import Experts

__all__ = [
    "expert_of",
    "experts_matrices",
    "experts_name",
    "matrices_of",
    "parameter_of",
    "turned_experts",
]

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""The parameters of experts, in the order in which they wrap each other."""
_EXPERT = re.compile(r".*\.experts\.(\d{1,6})\..*")


def expert_of(module: str, position: int) -> int:
    """The expert of a module, or of a part of a parameter that has all of them.

    Args:
        module: The name of the module or parameter.
        position: The index among the experts that the parameter has.
    """
    found = _EXPERT.fullmatch(module)
    return position if found is None else int(found[1])


def experts_name(parameter: str, products: Iterable[str]) -> str:
    """The decoder's name of a parameter that has all experts of a block; as it is if the block has none.

    Args:
        parameter: Its name, with the block as the decoder has it.
        products: The decoder's names of products of experts, such as ``layers.3.mlp.experts.up_proj.0``.
    """
    block = ".".join(parameter.split(".")[:2])
    own = parameter.removesuffix(".weight").rpartition(".")[2]
    for name in products:
        if name.startswith(f"{block}."):
            return f"{name.rpartition('.experts.')[0]}.experts.{own}.weight"
    return parameter


def parameter_of(module: str, depth: int, levels: int, targets: Sequence[str]) -> str:
    """The name of the parameter of experts that tensors belong to.

    Args:
        module: The name of the experts' module.
        depth: The number of wrappers around the one that has the tensors.
        levels: The number of wrappers in all.
        targets: The names or ends of names that ``target_parameters`` has.

    Raises:
        AdapterError: The tensors are not those of `targets`.
    """
    names = [f"{module}.{own}" for own in PARAMETERS]
    own = [n for n in names if any(n == t or n.endswith(f".{t}") for t in targets)]
    if not module.endswith("experts") or len(own) != levels:
        raise AdapterError(
            f"the tensors of {module!r} are not those of target_parameters; weights of experts are "
            f"{', '.join(PARAMETERS)}"
        )
    # the first one is the innermost
    return own[levels - 1 - depth]


def experts_matrices(a: Array, b: Array, rank: int, names: tuple[str, str]) -> tuple[Array, Array]:
    """A ``[experts, rank, inputs]`` and B ``[experts, outputs, rank]`` of a parameter.

    Args:
        a: A as PEFT stores it.
        b: B as PEFT stores it.
        rank: The rank of an expert.
        names: The names of both tensors, for messages.

    Raises:
        AdapterError: They do not fit the rank or each other.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % rank or 0 in a.shape:
        raise AdapterError(
            f"the tensors {names[0]!r} and {names[1]!r} are {list(a.shape)} and {list(b.shape)}; expected [experts * "
            f"{rank}, inputs] and [outputs, {rank} * experts]"
        )
    count = a.shape[0] // rank
    of_experts = b.reshape(b.shape[0], rank, count).transpose(2, 0, 1)  # [experts, outputs, rank]
    return a.reshape(count, rank, a.shape[1]), of_experts


def turned_experts(adapter: Adapter, base: AdapterBase) -> Adapter:
    """The adapter with the changes of all experts as ``[outputs, inputs]``.

    Versions of PEFT take the first dimension of a parameter's matrices as inputs, and others as outputs; the base's
    sizes tell which. GGUF files have one order.

    Args:
        adapter: The adapter.
        base: Its base model.

    Raises:
        AdapterError: A change has other sizes than the base, or another number of experts.
    """
    modules: dict[str, LowRank] = {}
    form = base.config.first_form(Experts)
    for module, low_rank in adapter.modules.items():
        modules[module] = low_rank
        if low_rank.a.ndim != 3:
            continue
        if form is None:
            raise AdapterError(
                f"the tensor {low_rank.tensor!r} is for experts, and the base has none"
            )
        if not adapter.is_gguf:
            modules[module] = _turned_change(module, low_rank, form, base)
        elif len(low_rank.a) != form.count:
            raise AdapterError(
                f"the tensor {low_rank.tensor!r} is for {len(low_rank.a)} experts; the base has {form.count}"
            )
    return replace(adapter, modules=modules)


def _turned_change(module: str, low_rank: LowRank, form: Experts, base: AdapterBase) -> LowRank:
    width = base.config.hidden_size if form.latent_size is None else form.latent_size
    # inputs and outputs as the model computes
    sizes = {
        "gate_up_proj": (width, 2 * form.size), "up_proj": (width, form.size), "down_proj": (form.size, width),
    }  # fmt: skip
    expected = sizes[module.rpartition(".")[2]]
    found = low_rank.a.shape[2], low_rank.b.shape[1]
    if len(low_rank.a) != form.count or expected not in (found, found[::-1]):
        raise AdapterError(
            f"the tensor {low_rank.tensor!r} is for {len(low_rank.a)} experts of {found[0]} inputs and {found[1]} "
            f"outputs; the base has {form.count} of {expected[0]} and {expected[1]}"
        )
    # versions of PEFT differ in which dimension has the inputs
    if found == expected:
        return low_rank
    # (B A)ᵀ = Aᵀ Bᵀ: both are transposed and change places
    a, b = (np.swapaxes(part, 1, 2) for part in (low_rank.b, low_rank.a))
    return replace(low_rank, a=a, b=b)


def matrices_of(
    low_rank: LowRank, expert: int | None, rows: npt.NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """A, and the rows of B of a site.

    Args:
        low_rank: The change.
        expert: The expert of the site; None: it is no expert's.
        rows: The rows of B.
    """
    a, b = low_rank.a, low_rank.b
    if a.ndim == 3:
        a, b = a[expert], b[expert]
    return a.astype(np.float32), b.astype(np.float32)[rows]
