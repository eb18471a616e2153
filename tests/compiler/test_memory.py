"""The memory plan."""

from __future__ import annotations

from max._compiler.memory import plan_memory
from max._compiler.template import Buffer, Launch


def test_values_that_the_host_reads_keep_their_memory() -> None:
    buffers = [Buffer("temp", 256) for _ in range(3)]
    launches = [
        Launch("a", (), (), (0,), False, "makes what is read"),
        Launch("b", (), (0,), (1,), False, "reads it"),
        Launch("c", (), (1,), (2,), False, "could reuse it"),
    ]
    reused = plan_memory(buffers, launches).block_of
    assert reused[2] == reused[0]
    kept = plan_memory(buffers, launches, [3], [(3, 0)]).block_of
    assert kept[2] != kept[0]
