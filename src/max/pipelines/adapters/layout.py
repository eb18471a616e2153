"""The places of the products of a decoder in the memory of an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.dtype import DType
from max.nn.attention.multi_latent_attention import LatentAttentionWithRope
from max.nn.layer import Module
from max.nn.layers.embedding import Embedding
from max.nn.layers.gptq_linear import GPTQLinear
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm, RMSNorm
from max.pipelines.models.blocks.experts import DecoderExperts
from max.pipelines.models.blocks.norms import PlainLayerNorm

# loaded when a decoder with adapters is staged
if TYPE_CHECKING:
    from max.mlir.ops.models import adapters as adapter_ops
else:
    adapter_ops = lazy_module("max.mlir.ops.models.adapters")

__all__ = ["EXPERTS", "HEADS", "AdapterLayout", "AdapterShape", "ExpertPlaces", "Site"]

TABLES = ("embed_tokens",)
"""The tables that adapters may change."""
WHOLE = (*TABLES, "lm_head")
"""The layers whose whole weights adapters may replace, beside norms."""
NORMS = (RMSNorm, LayerNorm, PlainLayerNorm)
EXPERTS, HEADS = "experts", "heads"
"""The kinds of parts of a layer that have products of their own."""
_GAINS = ("queries",)
"""Those of parts whose terms are a gain, without matrices."""


@dataclass(frozen=True)
class AdapterShape:
    """The memory for adapters.

    Args:
        slots: The number of adapters that steps can use at once.
        max_rank: The bound of their rank.
        dtype: The dtype of their matrices.
        whole: Whether they may replace the whole weights of embedding, output layer and norms.
    """

    slots: int
    max_rank: int
    dtype: DType
    whole: bool = False


@dataclass(frozen=True)
class Site:
    """A product that adapters may change.

    Args:
        name: The name of its layer, such as ``layers.3.mlp.up_proj``.
        inputs: The number of inputs; of a table of rows, the number of rows.
        columns: The number of outputs.
        is_table: Whether it looks up rows of a table.
        index: Its index among all sites.
        offset: The first element of its place in the memory of an adapter.
        max_rank: The bound of the rank; 0: there are gain and shift only.
        norm_offset: Of a norm what it adds to its weight; None: it is none.
        takes_whole: Whether a change of full rank fits.
        expert: The index of the expert, or of the head of latent attention, that has the product; None: all tokens take
            it.
    """

    name: str
    inputs: int
    columns: int
    is_table: bool
    index: int
    offset: int
    max_rank: int
    norm_offset: float | None = None
    takes_whole: bool = False
    expert: int | None = None

    @property
    def form(self) -> str:
        """The name without the index of its block and of its expert: sites of one form are staged alike."""
        parts = self.name.split(".")
        if self.expert is not None:
            parts = parts[:-1]
        return ".".join([*parts[:1], *parts[2:]]) if parts[0] == "layers" else ".".join(parts)


@dataclass(frozen=True)
class ExpertPlaces:
    """Where an adapter's memory has the sites of experts and heads: in equal shares, one for each number of all blocks.

    The memory is `shares` shares long, so that a share of a slot is a slot of a memory with more, shorter slots. The
    sites that all tokens take fill the first ones.

    Args:
        first: The share of expert 0 and of head 0.
        shares: The number of shares.
        elements: The elements of a share.
        sites: The sites of a share.
        places: The first element and the first site in a share, by the kind of the parts and the block.
        heads: The number of heads of latent attention; 0: there are none.
    """

    first: int
    shares: int
    elements: int
    sites: int
    places: dict[tuple[str, int], tuple[int, int]]
    heads: int = 0

    def has(self, kind: str) -> bool:
        """Whether a block has sites of a kind."""
        return any(own == kind for own, _ in self.places)


class AdapterLayout:
    """All sites of a decoder.

    Args:
        sites: The sites, by index.
        places: The first element and the first site of each block; the last place is that of the sites outside.
        elements: The number of elements of an adapter's memory.
        experts: The places of the sites of experts; None: there are none.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        places: Sequence[tuple[int, int]],
        elements: int,
        experts: ExpertPlaces | None = None,
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.places, self.elements, self.experts = tuple(places), elements, experts
        # some numbers between those of common sites and of experts are of no site
        self.count = len(self.sites) if experts is None else experts.shares * experts.sites
        """The number of indices of sites."""

    @classmethod
    def of(cls, model: Module, shape: AdapterShape) -> AdapterLayout:
        """The sites of a decoder: the linear layers of its blocks and those outside of them, and the embedding.

        Args:
            model: The decoder.
            shape: The memory for adapters.
        """
        found: dict[str, list[tuple[str, Module]]] = {}
        tables = {
            name: sizes_of(module)[1]
            for name, module in ((p.removesuffix("."), m) for p, m in model.named_modules())
            if name in TABLES and isinstance(module, Embedding)
        }
        hidden = next(iter(tables.values()), 0)
        for prefix, module in model.named_modules():
            name = prefix.removesuffix(".")
            # norms of hidden states only, not those of heads
            if shape.whole and isinstance(module, NORMS) and _norm_size(module) == hidden:
                parts = name.split(".")
                found.setdefault(parts[1] if parts[0] == "layers" else "", []).append(
                    (name, module)
                )
                continue
            if not isinstance(module, Linear | Embedding):
                continue
            parts = name.split(".")
            if parts[0] == "layers" and isinstance(module, Linear):
                found.setdefault(parts[1], []).append((name, module))
            elif parts[0] != "layers" and (isinstance(module, Linear) or name in TABLES):
                found.setdefault("", []).append((name, module))
        sites: list[Site] = []
        places: list[tuple[int, int]] = []
        offset = 0
        blocks = sorted((key for key in found if key), key=int)
        # blocks without a site have a place too
        count = 1 + max(map(int, blocks), default=-1)
        for key in [*map(str, range(count)), ""]:
            places.append((offset, len(sites)))
            for name, module in found.get(key, []):
                site = _site(name, module, len(sites), offset, shape)
                sites.append(site)
                offset += adapter_ops.lora_place_size(site.max_rank, site.inputs, site.columns)
        experts, of_experts = _expert_sites(model, shape, offset, len(sites))
        if experts is not None:
            offset = experts.shares * experts.elements
        return cls([*sites, *of_experts], places, offset, experts)


def _expert_sites(
    model: Module, shape: AdapterShape, elements: int, count: int
) -> tuple[ExpertPlaces | None, list[Site]]:
    """The sites of the experts and heads of all blocks, after `count` sites with some elements."""
    places: dict[tuple[str, int], tuple[int, int]] = {}
    own: list[tuple[str, int, int, int, int, int]] = []
    size = heads = 0
    for prefix, module in model.named_modules():
        if not prefix.startswith("layers."):
            continue
        if isinstance(module, DecoderExperts):
            kind, parts, products = EXPERTS, module.count, module.projections
        elif isinstance(module, LatentAttentionWithRope):
            kind, parts, products = HEADS, module.n_heads, module.head_products
            heads = parts
        else:
            continue
        places[kind, int(prefix.split(".")[1])] = size, len(own)
        for product, (inputs, columns) in products.items():
            rank = 0 if product in _GAINS else shape.max_rank
            own.append((f"{prefix}{kind}.{product}", parts, inputs, columns, size, rank))
            size += adapter_ops.lora_place_size(rank, inputs, columns)
    if not own:
        return None, []
    # the first share that begins after all common elements and sites
    first = max(-(-elements // size), -(-count // len(own)))
    sites = [
        Site(
            f"{name}.{part}", inputs, columns, False, (first + part) * len(own) + number,
            (first + part) * size + offset, rank, expert=part,
        )
        for number, (name, parts, inputs, columns, offset, rank) in enumerate(own)
        for part in range(parts)
    ]  # fmt: skip
    most = max(parts for _, parts, *_ in own)
    return ExpertPlaces(first, first + most, size, len(own), places, heads), sites


def _site(name: str, module: Module, index: int, offset: int, shape: AdapterShape) -> Site:
    if isinstance(module, NORMS):
        size = _norm_size(module)
        added = float(getattr(module, "weight_offset", getattr(module, "offset", 0.0)))
        # its terms are a gain and a shift, without matrices
        return Site(name, size, size, False, index, offset, 0, added)
    inputs, columns = sizes_of(module)
    is_table, rank = isinstance(module, Embedding), shape.max_rank
    whole = shape.whole and name in WHOLE
    if whole:
        # a whole weight is a change of full rank, with an identity as the other factor
        rank = max(rank, columns if is_table else inputs)
    return Site(name, inputs, columns, is_table, index, offset, rank, takes_whole=whole)


def _norm_size(module: RMSNorm | LayerNorm | PlainLayerNorm) -> int:
    """The size of a norm's rows; 0 where it has no weight."""
    return 0 if module.weight is None else int(module.weight.shape[0])


def sizes_of(module: Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer, or of rows and columns of a table."""
    if isinstance(module, GPTQLinear):
        # GPTQ packs inputs of an output into words of 32 bits
        packed = 32 // module.quantization_config.bits
        return int(module.qweight.shape[0]) * packed, int(module.qweight.shape[1])
    assert isinstance(module, Linear | Embedding)
    weight = module.weight
    rows, columns = (int(dim) for dim in weight.shape)
    encoding = weight.quantization_encoding
    if encoding is not None:
        columns = columns // encoding.block_size * encoding.elements_per_block
    return (rows, columns) if isinstance(module, Embedding) else (columns, rows)
