"""What is counted, and that peers cannot make the count grow without bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.figures import MAX_CAUSES, RATE_WINDOW_S, RoomFigures, WriteFigures, num_descriptors, peer_stats
from kvtransfer.pages import merged_runs


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_descriptors_are_runs_that_lie_side_by_side_on_both_nodes() -> None:
    figures = WriteFigures()
    figures.posted(ids(1, 2, 3, 9), ids(4, 5, 7, 8), 0.0)
    stats = figures.stats()
    assert (stats["transfer_posts_total"], stats["transfer_pages_total"], stats["transfer_descriptors_total"]) == (1, 4, 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_descriptors_are_counted_as_they_are_merged(pairs: list[tuple[int, int]]) -> None:
    local, remote = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    assert num_descriptors(local, remote) == len(merged_runs(local, remote)[0])


def test_overlapping_writes_are_busy_once_and_pauses_do_not_count() -> None:
    figures = WriteFigures()
    figures.posted(ids(1), ids(1), 10.0)
    figures.posted(ids(2), ids(2), 11.0)
    figures.completed(5_000_000_000, 12.0)
    figures.completed(3_000_000_000, 14.0)
    figures.posted(ids(3), ids(3), 100.0)
    figures.completed(0, 104.0)
    stats = figures.stats()
    assert stats["transfer_seconds_total"] == 8.0
    assert stats["transfer_bytes_written_total"] == 8_000_000_000
    assert stats["transfer_gigabytes_per_second"] == pytest.approx(1.0)


def test_the_rate_is_that_of_the_last_seconds_of_writing() -> None:
    figures = WriteFigures()
    for second in range(100):
        figures.posted(ids(1), ids(1), second)
        figures.completed(1_000_000_000 if second < 80 else 2_000_000_000, second + 1.0)
    assert figures.stats()["transfer_gigabytes_per_second"] == pytest.approx(2.0)
    assert len(figures._window) <= RATE_WINDOW_S * 2 + 2


def test_a_node_that_never_wrote_has_no_rate() -> None:
    assert WriteFigures().stats()["transfer_gigabytes_per_second"] == 0.0


def test_waits_are_seconds_and_times() -> None:
    figures = RoomFigures("wait")
    figures.waited("wait", 1.5)
    figures.waited("wait", -0.1)
    assert (figures.stats()["transfer_wait_seconds_total"], figures.stats()["transfer_waits_total"]) == (1.5, 2)


def test_causes_are_labels_and_bounded_whatever_peers_send() -> None:
    figures = RoomFigures()
    figures.failed("peer_lost")
    for bad in (None, "", 'a"b', "x" * 41, "with space"):
        figures.failed(bad)
    for number in range(2 * MAX_CAUSES):
        figures.failed(f"cause_{number}")
    stats = figures.stats()
    causes = {key for key in stats if key.startswith("transfer_failures_total{")}
    assert stats['transfer_failures_total{cause="peer_lost"}'] == 1
    assert len(causes) <= MAX_CAUSES + 1
    assert sum(stats[key] for key in causes) == 1 + 5 + 2 * MAX_CAUSES


def test_peers_by_state_and_the_oldest_heartbeat() -> None:
    assert peer_stats(["up", "down", "up"], [7.0, 9.5], 10.0) == {
        'transfer_peers{state="up"}': 2, 'transfer_peers{state="down"}': 1, "transfer_heartbeat_age_seconds": 3.0
    }  # fmt: skip
    assert peer_stats([], [], 10.0) == {"transfer_heartbeat_age_seconds": 0.0}
