"""What only the memory backend can do: a test's controls over time, loss and failure."""

import numpy as np
import pytest

from kvtransfer.backend import PeerId, Region, TransferError
from kvtransfer.memory import MemoryBackend, MemoryFabric

NUM_PAGES, PAGE_NBYTES = 8, 64
P, D = PeerId("p"), PeerId("d")


def node(fabric: MemoryFabric) -> tuple[MemoryBackend, np.ndarray]:
    pool = np.zeros((NUM_PAGES, PAGE_NBYTES), dtype=np.uint8)
    backend = fabric.backend()
    backend.register(Region(pool.ctypes.data, NUM_PAGES, PAGE_NBYTES, "cpu", pool))
    return backend, pool


def pair(fabric: MemoryFabric) -> tuple[MemoryBackend, np.ndarray, MemoryBackend, np.ndarray]:
    """P with pages 1..8, D with zeroes, joined both ways."""
    p, p_pool = node(fabric)
    d, d_pool = node(fabric)
    p_pool[:] = np.arange(1, NUM_PAGES + 1, dtype=np.uint8)[:, None]
    for one, other, peer in ((p, d, D), (d, p, P)):
        one.connect(peer, other.describe())
        one.accept(peer, other.describe())
    return p, p_pool, d, d_pool


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_a_held_write_shows_what_happens_to_its_pages_meanwhile() -> None:
    fabric = MemoryFabric()
    p, p_pool, _, d_pool = pair(fabric)
    fabric.hold()
    ticket = p.post("WRITE", D, pages(0, 1), pages(4, 5))
    assert p.poll() == []
    assert d_pool.sum() == 0
    p_pool[0] = 99  # reused before its completion: the wrong byte arrives
    fabric.release()
    assert [completion.ticket for completion in p.poll()] == [ticket]
    assert (d_pool[4] == 99).all()
    assert (d_pool[5] == 2).all()


def test_copy_at_post_moves_the_bytes_before_the_completion() -> None:
    fabric = MemoryFabric(copy_at="post")
    p, _, _, d_pool = pair(fabric)
    fabric.hold()
    p.post("WRITE", D, pages(2), pages(7))
    assert (d_pool[7] == 3).all()
    assert p.poll() == []
    fabric.resume()
    assert len(p.poll()) == 1


def test_in_flight_transfers_finish_in_any_order() -> None:
    fabric = MemoryFabric()
    p, _, _, d_pool = pair(fabric)
    fabric.hold()
    first, second = p.post("WRITE", D, pages(0), pages(0)), p.post("WRITE", D, pages(1), pages(1))
    fabric.finish(fabric.in_flight[1])
    assert [completion.ticket for completion in p.poll()] == [second]
    fabric.finish(fabric.in_flight[0], TransferError("no"))
    (completion,) = p.poll()
    assert (completion.ticket, str(completion.error)) == (first, "no")
    assert (d_pool[0] == 0).all()


def test_injected_failures_hit_before_any_byte_or_midway() -> None:
    fabric = MemoryFabric()
    p, _, _, d_pool = pair(fabric)
    fabric.fail_posts(1)
    fabric.fail_completions(1)
    for destination in (0, 4):
        p.post("WRITE", D, pages(0, 1), pages(destination, destination + 1))
    errors = [str(completion.error) for completion in p.poll()]
    assert errors == ["injected: the post failed", "injected: the transfer failed midway"]
    assert d_pool[:, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_disconnect_by_either_side_ends_what_is_held_and_nothing_lands(side: str) -> None:
    fabric = MemoryFabric()
    p, _, d, d_pool = pair(fabric)
    fabric.hold()
    p.post("WRITE", D, pages(0), pages(0))
    p.disconnect(D) if side == "sender" else d.disconnect(P)
    (completion,) = p.poll()
    assert completion.error is not None
    fabric.resume()
    assert d_pool.sum() == 0
    assert p.poll() == []


def test_with_a_fence_delay_a_cut_off_write_can_still_land() -> None:
    fabric = MemoryFabric(fence_delay_s=1.0)
    p, _, d, d_pool = pair(fabric)
    fabric.hold()
    p.post("WRITE", D, pages(0), pages(0))
    assert d.disconnect(P).delay_s == 1.0
    assert fabric.land_late() == 1
    assert (d_pool[0] == 1).all()
    assert fabric.land_late() == 0


def test_a_killed_backend_fails_its_peers_held_and_later_tickets() -> None:
    fabric = MemoryFabric()
    p, _, d, _ = pair(fabric)
    fabric.hold()
    p.post("WRITE", D, pages(0), pages(0))
    fabric.kill(d)
    p.post("WRITE", D, pages(0), pages(0))
    assert [completion.error is not None for completion in p.poll()] == [True, True]
