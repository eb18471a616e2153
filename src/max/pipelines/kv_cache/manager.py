"""The tensors of the paged KV cache: its blocks, and the page tables that the graph of a model takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max._host.machine import byte_size
from max._lazy import lazy_module
from max.driver import CPU, Device, Tensor
from max.engine import InferenceSession
from max.interfaces import RequestID, TextGenerationContext
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.core.draft_tree import ancestor_bits, tree_parents
from max.pipelines.kv_cache.memory import (
    group_shapes,
    page_bytes,
    page_size_of,
    pages_for_memory,
    spare_slots,
    state_bytes,
    swap_slots,
)
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.token_moves import copy_page, move_tokens

if TYPE_CHECKING:
    from max.pipelines.kv_cache import prefix_file, state_slots, swap_area
else:
    prefix_file = lazy_module("max.pipelines.kv_cache.prefix_file")
    state_slots = lazy_module("max.pipelines.kv_cache.state_slots")
    swap_area = lazy_module("max.pipelines.kv_cache.swap_area")

logger = logging.getLogger("max.pipelines")


@dataclass
class _HostTables:
    """The latest inputs, and the arrays that share their memory, which the next step updates in place.

    Args:
        inputs: The inputs.
        tables: The page tables of each request, one per group of layers.
        cache_lengths: As in :meth:`PagedKVCacheManager.get_runtime_inputs`; likewise the next two.
        lookup_tables: The pages, one array per group of layers.
        max_lengths: One row.
        slots: The slot of each request; None if the model has no recurrent states.
    """

    inputs: RaggedKVCacheInputs
    tables: list[list[list[int]]]
    cache_lengths: npt.NDArray[np.uint32]
    lookup_tables: list[npt.NDArray[np.uint32]]
    max_lengths: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32] | None


class _HostPages:
    """The slots of a swap area in host memory, each allocated on first use.

    Args:
        blocks: The pages of a group of layers on each device.
    """

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks, self._slots = blocks, dict[int, list[Tensor]]()

    def save(self, page: int, slot: int) -> None:
        contents = [blocks[page, :, :, :, :, :] for blocks in self._blocks]
        if slot not in self._slots:
            self._slots[slot] = [Tensor.zeros(tuple(c.shape), c.dtype, CPU()) for c in contents]
        for saved, content in zip(self._slots[slot], contents, strict=True):
            saved.inplace_copy_from(content)

    def restore(self, slot: int, page: int) -> None:
        for blocks, saved in zip(self._blocks, self._slots[slot], strict=True):
            blocks[page, :, :, :, :, :].inplace_copy_from(saved)


class _PageContents:
    """The contents of cached pages, read while other threads may overwrite the pages.

    Args:
        pool: The pages of a group of layers.
        blocks: Their memory on each device.
        pages: The cached pages.
    """

    def __init__(self, pool: PagePool, blocks: Sequence[Tensor], pages: Sequence[int]) -> None:
        self._pool, self._blocks = pool, blocks
        self._pages = [(page, pool.takes(page)) for page in pages]
        self._hosts: list[Tensor] = []

    def __call__(self, place: int) -> bytes | None:
        self._hosts = self._hosts or _host_copies(self._blocks)
        page, takes = self._pages[place]
        for host, block in zip(self._hosts, self._blocks, strict=True):
            host.inplace_copy_from(block[page, :, :, :, :, :])
        content = b"".join(host.to_numpy().tobytes() for host in self._hosts)
        # `takes` changes before a page is overwritten, so an unchanged count proves that the copy is valid
        return content if self._pool.takes(page) == takes else None


class PagedKVCacheManager(RequestPages):
    """The paged KV cache of a model.

    ``blocks`` has shape ``[pages, 2, layers, page_size, kv_heads, stored_head_dim]``: keys at index 0 of the second
    axis, values at index 1; for latents that axis has one element. The operating system zeroes its memory on first use,
    so unused pages take no memory. If layers differ in shape or window, ``group_blocks`` has the pages of further
    groups (`KVCacheParams.groups`). ``states`` has a tensor ``[slots, layers, …]`` for each of ``params.states``, with
    a slot per request. If no layer has keys, a page table is one page of unlimited length without memory: requests own
    only slots.

    On several devices each device has pages for its own heads, ``blocks`` and ``other_blocks``. Page tables and
    slots are the same for all devices; states are on the first.

    Args:
        params: The cache's shape.
        num_layers: The number of layers with keys and values in the first group.
        num_pages: The number of pages of the first group, or of each group if there are several.
        max_batch_size: The maximum number of concurrent requests, which is the number of slots.
        max_seq_len: The longest sequence, in tokens.
        devices: The model's devices.
        session: The model's session.
        swap_slots: The number of pages of each group that the swap area in host memory holds; 0: there is none.
        spare_slots: The number of requests whose recurrent states can be saved at once, for steps with drafts.

    Raises:
        ValueError: The shape is for another number of devices, or has no page size.
    """

    def __init__(
        self,
        params: KVCacheParams,
        *,
        num_layers: int,
        num_pages: int | Sequence[int],
        max_batch_size: int,
        max_seq_len: int,
        devices: Sequence[Device],
        session: InferenceSession | None = None,
        swap_slots: int = 0,
        spare_slots: int = 0,
    ) -> None:
        if len(devices) != params.n_devices:
            raise ValueError(
                f"PagedKVCacheManager: {len(devices)} devices; the cache's shape is for {params.n_devices}"
            )
        self.params, self.num_layers = params, num_layers
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self.device = devices[0]
        self.session = session
        # without attention a page stands for a whole sequence, and the tensor of pages is empty
        page_size = page_size_of(params) if num_layers else max_seq_len
        counts = [num_pages] if isinstance(num_pages, int) else list(num_pages)
        windows = [group.window for group in params.groups]
        super().__init__(
            PageManager(
                counts[0],
                page_size,
                params.enable_prefix_caching,
                params.window,
                more=[PagePool(*group) for group in zip(counts[1:], windows, strict=True)],
            ),
            state_slots.StateSlots(max_batch_size, spare_slots) if params.states else None,
        )
        groups = group_shapes(params, num_layers)
        # for each group its pages on each device
        all_blocks = [
            [self._blocks(*group, count, device) for device in devices]
            for group, count in zip(groups, counts, strict=True)
        ]
        self._all_blocks = all_blocks
        self.blocks, *self.group_blocks = (blocks[0] for blocks in all_blocks)
        self.other_blocks = [blocks[1:] for blocks in all_blocks]
        # [slots, layers, *shape]: a sequence has one slot
        self.states = tuple(
            Tensor.zeros(
                (max_batch_size + spare_slots, state.layers, *state.shape), state.dtype, self.device
            )
            for state in params.states
        )
        self._host_tables: _HostTables | None = None
        for pool, blocks in zip(self.pages.pools, all_blocks, strict=True):
            pool.copy = partial(copy_page, blocks)
        if swap_slots:
            for pool, blocks in zip(self.pages.pools, all_blocks, strict=True):
                pool.swap = swap_area.SwapArea(swap_slots, _HostPages(blocks))
            logger.info("KV cache: up to %d pages are swapped to the host", swap_slots)
        for group, count in zip(groups, counts, strict=True):
            logger.info(
                "KV cache: %d pages of %d tokens, %s",
                count,
                self.page_size,
                byte_size(count * page_bytes(*group)),
            )
        if params.states:
            slots = max_batch_size + spare_slots
            size = byte_size(slots * state_bytes(params))
            logger.info("recurrent states: %d slots, %s", slots, size)

    @staticmethod
    def _blocks(shape: KVCacheParams, layers: int, count: int, device: Device) -> Tensor:
        """Allocates the pages of a group on a device."""
        kinds = 1 if shape.is_mla else 2
        heads, row = shape.n_kv_heads_per_device, shape.stored_head_dim
        # [pages, keys and values or latents, layers, tokens, heads, row]
        sizes = (count, kinds, layers, page_size_of(shape), heads, row)
        return Tensor.zeros(sizes, shape.dtype, device)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers."""
        return len(self._all_blocks)

    def cached_prefixes(
        self, most_bytes: int, stored_hashes: Sequence[Collection[bytes]] | None = None
    ) -> list[prefix_file.PageGroup]:
        """The pages whose contents may serve a request; if they do not all fit, the most recently used ones.

        Another thread may read their contents while batches run; if a page is overwritten meanwhile, its contents are
        lost.

        Args:
            most_bytes: The maximum size of all pages, in bytes.
            stored_hashes: For each group the hashes to leave out; None: no hash.
        """
        sizes = self.page_sizes()
        max_pages = most_bytes // sum(sizes)
        groups: list[prefix_file.PageGroup] = []
        for number, (pool, blocks, size) in enumerate(
            zip(self.pages.pools, self._all_blocks, sizes, strict=True)
        ):
            left_out = stored_hashes[number] if stored_hashes else ()
            cached = [entry for entry in pool.with_content() if entry[0] not in left_out]
            cached = cached[-max_pages:] if max_pages else []
            contents = _PageContents(pool, blocks, [page for _, page in cached])
            groups.append(
                prefix_file.PageGroup(size, [page_hash for page_hash, _ in cached], contents)
            )
        return groups

    def fill_page(self, group: int, page_hash: bytes, content: bytes) -> bool:
        """Fills an empty page of a group of layers.

        Args:
            group: The group.
            page_hash: The hash of the content.
            content: The content, of all devices.

        Returns:
            Whether a page was filled; not if the content is cached already, or no page is empty.
        """
        page, begin = self.pages.pools[group].fill(page_hash), 0
        if page is None:
            return False
        blocks = self._all_blocks[group]
        for host, block in zip(_host_copies(blocks), blocks, strict=True):
            array = host.to_numpy()
            part = content[begin : begin + array.nbytes]
            array.view(np.uint8).reshape(-1)[:] = np.frombuffer(part, np.uint8)
            block[page, :, :, :, :, :].inplace_copy_from(host)
            begin += array.nbytes
        return True

    def page_sizes(self) -> list[int]:
        """The bytes of one page of each group, over all devices."""
        return [
            sum(math.prod(block.shape[1:]) * block.dtype.size_in_bytes for block in blocks)
            for blocks in self._all_blocks
        ]

    def get_runtime_inputs(
        self, batch: Sequence[TextGenerationContext], num_steps: int = 1
    ) -> RaggedKVCacheInputs:
        """The inputs of the first step of a batch.

        Args:
            batch: The requests in batch order; their pages are reserved (see :meth:`alloc`).
            num_steps: The number of steps that run without new inputs.

        Returns:
            ``cache_lengths`` u32 ``[batch]``: the number of cached tokens. ``lookup_table`` u32 ``[batch, max_pages]``:
            the pages, padded with 0; entries for pages that the window has passed hold the number of pages.
            ``max_lengths`` u32 ``[num_steps, 2]``: for each step the maximum number of new tokens of a request, and the
            maximum number of tokens cached before the step. Pages and table of each further group of layers. With
            recurrent states, their tensors and ``slots`` u32 ``[batch]``. With trees of drafted tokens, ``ancestors``.

        Raises:
            ValueError: A request has a tree, and the model verifies none.
        """
        groups = range(len(self.pages.pools))
        # copies, as `advance` compares them with the tables, which grow in place
        tables = [
            [list(table) for table in self.pages.tables(context.request_id)] for context in batch
        ]
        width = max((len(group[0]) for group in tables), default=1)
        # [batch, pages] for each group
        lookup_tables = [np.zeros((len(batch), width), np.uint32) for _ in groups]
        for row, request_tables in enumerate(tables):
            for lookup_table, table in zip(lookup_tables, request_tables, strict=True):
                lookup_table[row, : len(table)] = table
        cache_lengths = np.array([context.start_idx for context in batch], np.uint32)
        new_lengths = np.array([context.active_length for context in batch], np.uint32)
        # [steps, 2]: the most new tokens of a request, and the most cached ones
        max_lengths = np.zeros((num_steps, 2), np.uint32)
        max_lengths[0] = new_lengths.max(initial=0), cache_lengths.max(initial=0)
        longest = (cache_lengths + new_lengths).max(initial=0)
        for step in range(1, num_steps):
            max_lengths[step] = 1, longest + step - 1
        slots = None
        if self.slots is not None:
            owned = [self.slots.slot(context.request_id) for context in batch]
            slots = np.array(owned, np.uint32)
        inputs = RaggedKVCacheInputs(
            blocks=self.blocks,
            cache_lengths=self._place(cache_lengths),
            lookup_table=self._place(lookup_tables[0]),
            max_lengths=self._place(max_lengths),
            slots=None if slots is None else self._place(slots),
            states=self.states,
            group_blocks=self.group_blocks,
            group_tables=[self._place(table) for table in lookup_tables[1:]],
            other_blocks=self.other_blocks,
            ancestors=self._ancestors(batch),
        )
        # on the host the inputs are the arrays themselves, which `advance` overwrites
        if self.device == CPU() and num_steps == 1:
            self._host_tables = _HostTables(
                inputs, tables, cache_lengths, lookup_tables, max_lengths, slots
            )
        return inputs

    def advance(
        self, inputs: RaggedKVCacheInputs, batch: Sequence[TextGenerationContext]
    ) -> RaggedKVCacheInputs:
        """The inputs of a later step of the same batch, with any numbers of new tokens.

        On a host device, the inputs of the previous step are overwritten.

        Args:
            inputs: The inputs of an earlier step.
            batch: The requests in the same order, with updated contexts and reserved pages.
        """
        last = self._host_tables
        if last is None or last.inputs is not inputs or len(last.tables) != len(batch):
            return self.get_runtime_inputs(batch)
        for row, context in enumerate(batch):
            tables = self.pages.tables(context.request_id)
            if tables != last.tables[row]:
                # more pages than the array has columns
                if len(tables[0]) > last.lookup_tables[0].shape[1]:
                    return self.get_runtime_inputs(batch)
                for lookup_table, table in zip(last.lookup_tables, tables, strict=True):
                    lookup_table[row, : len(table)] = table
                last.tables[row] = [list(table) for table in tables]
            last.cache_lengths[row] = context.start_idx
            if last.slots is not None and self.slots is not None:
                last.slots[row] = self.slots.slot(context.request_id)
        last.max_lengths[0] = max(c.active_length for c in batch), last.cache_lengths.max()
        trees = any(map(tree_parents, batch))
        if trees or (inputs.ancestors is not None and inputs.ancestors.num_elements):
            inputs = last.inputs = replace(inputs, ancestors=self._ancestors(batch))
        return inputs

    def next_step(
        self, inputs: RaggedKVCacheInputs, batch: Sequence[TextGenerationContext], step: int
    ) -> RaggedKVCacheInputs:
        """The inputs of a further step within an execution of several steps.

        Args:
            inputs: The inputs of the previous step.
            batch: The requests, as they were before the first step.
            step: The index of the step, from 1.
        """
        # tokens that were sampled on the way are not in the contexts yet
        lengths = np.array([context.active_idx + step - 1 for context in batch], np.uint32)
        return replace(
            inputs,
            cache_lengths=self._place(lengths),
            max_lengths=inputs.max_lengths[1:, :].contiguous(),  # [steps - 1, 2]
        )

    def _ancestors(self, batch: Sequence[TextGenerationContext]) -> Tensor | None:
        """The rows of its sequence that each row of a batch sees; see `RaggedKVCacheInputs.ancestors`."""
        rows: list[int] = []
        if any(map(tree_parents, batch)):
            for context in batch:
                parents = tree_parents(context)
                certain = context.active_length - len(parents)
                # 0: a row sees all before it
                rows += ancestor_bits(certain, parents) if parents else [0] * certain
        if not self.params.verifies_trees:
            if rows:
                raise ValueError("the model verifies no trees of drafted tokens")
            return None
        return self._place(np.array(rows, np.uint64))

    def keep_branch(self, request_id: RequestID, begin: int, tokens: Sequence[int]) -> None:
        """Moves the keys and values of the right tokens of a tree behind each other, in all layers.

        Args:
            request_id: The request.
            begin: The position of the first drafted token.
            tokens: The indices of the right ones among the drafted tokens, each above the one before it.
        """
        moves = [(begin + index, begin + to) for to, index in enumerate(tokens) if index != to]
        if not moves:
            return
        tables = self.pages.tables(request_id)
        for blocks, table in zip(self._all_blocks, tables, strict=True):
            for block in blocks:
                move_tokens(block, table, moves)

    def _place(self, array: Any) -> Tensor:
        tensor = Tensor.from_numpy(array)
        return tensor if self.device == CPU() else tensor.to(self.device)


def _host_copies(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Host copies, with room for one page of a group on each device."""
    return [Tensor.zeros(tuple(block.shape)[1:], block.dtype, CPU()) for block in blocks]


def load_kv_manager(
    params: KVCacheParams,
    max_batch_size: int | None,
    max_seq_len: int,
    num_layers: int,
    devices: Sequence[Device],
    session: InferenceSession,
    available_cache_memory: int | None = None,
    page_size: int | None = None,
    step_tokens: int | None = None,
    host_memory: int | None = None,
    drafts: bool = False,
) -> PagedKVCacheManager:
    """Creates a manager with the pages that a full batch needs, or that fit into memory.

    Args:
        params: The cache's shape.
        max_batch_size: The maximum number of concurrent requests; None: 1.
        max_seq_len: The longest sequence, in tokens.
        num_layers: The number of layers of the first group.
        devices: The model's devices.
        session: The model's session.
        available_cache_memory: Bytes for the cache; None: no limit.
        page_size: Tokens per page; None: that of `params`.
        step_tokens: The maximum number of new tokens of a sequence per step; None: all its tokens.
        host_memory: The bytes of host memory for the cache and its swap area; None: no limit.
        drafts: Whether steps verify drafted tokens.

    Raises:
        ValueError: `page_size` is not that of `params`, or one sequence of full length does not fit.
    """
    if page_size not in (None, params.page_size):
        raise ValueError(
            f"load_kv_manager: page_size is {page_size}, and the cache's shape has {params.page_size}"
        )
    batch = max_batch_size or 1
    spares = spare_slots(params, batch, available_cache_memory) if drafts else 0
    if available_cache_memory is not None:
        available_cache_memory -= spares * state_bytes(params)
    num_pages = pages_for_memory(
        params,
        num_layers,
        max_batch_size=batch,
        max_seq_len=max_seq_len,
        available_bytes=available_cache_memory,
        step_tokens=step_tokens,
    )
    slots = swap_slots(params, num_layers, num_pages, host_memory)
    if params.enable_kvcache_swapping_to_host and not slots:
        logger.warning(
            "no memory is left for pages that are swapped to the host; give a smaller --device-memory-utilization"
        )
    return PagedKVCacheManager(
        params,
        num_layers=num_layers,
        num_pages=num_pages,
        max_batch_size=batch,
        max_seq_len=max_seq_len,
        devices=devices,
        session=session,
        swap_slots=slots,
        spare_slots=spares,
    )
