"""What is counted, and that peers cannot make the count grow without bound."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import deadline_exceeded
from kvtransfer.failures import CAUSES
from kvtransfer.figures import MAX_CAUSES, RATE_WINDOW_S, RoomFigures, WriteFigures, num_descriptors, peer_stats
from kvtransfer.link_accept import AcceptState
from kvtransfer.link_dial import DialState
from kvtransfer.pages import merged_runs

ROOT = Path(__file__).resolve().parents[2]


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_descriptors_are_runs_that_lie_side_by_side_on_both_nodes() -> None:
    figures = WriteFigures()
    figures.posted(ids(1, 2, 3, 9), ids(4, 5, 7, 8), 0.0)
    stats = figures.stats(0.0)
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
    figures.posted(ids(3), ids(3), 20.0)
    figures.completed(0, 24.0)
    stats = figures.stats(25.0)
    assert stats["transfer_seconds_total"] == 8.0
    assert stats["transfer_bytes_written_total"] == 8_000_000_000
    assert stats["transfer_gigabytes_per_second"] == pytest.approx(1.0)


def test_the_rate_is_that_of_the_last_seconds_of_writing() -> None:
    figures = WriteFigures()
    for second in range(100):
        figures.posted(ids(1), ids(1), second)
        figures.completed(1_000_000_000 if second < 80 else 2_000_000_000, second + 1.0)
    assert figures.stats(100.0)["transfer_gigabytes_per_second"] == pytest.approx(2.0)
    assert len(figures._window) <= RATE_WINDOW_S * 2 + 2


def test_a_node_that_writes_nothing_has_no_rate_and_none_of_before_the_pause() -> None:
    figures = WriteFigures()

    def rate(now_s: float) -> float:
        return figures.stats(now_s)["transfer_gigabytes_per_second"]

    figures.posted(ids(1), ids(1), 50.0)
    figures.completed(3_000_000_000, 51.0)
    assert rate(51.0 + RATE_WINDOW_S - 0.1) == pytest.approx(3.0)
    assert rate(51.0 + RATE_WINDOW_S) == 0.0
    figures.posted(ids(1), ids(1), 100.0)
    assert rate(100.0) == 0.0
    figures.completed(1_000_000_000, 101.0)
    assert rate(101.0) == pytest.approx(1.0)
    assert figures.stats(101.0)["transfer_seconds_total"] == 2.0


def test_a_write_that_does_not_end_has_no_rate() -> None:
    figures = WriteFigures()
    figures.posted(ids(1), ids(1), 50.0)
    figures.posted(ids(2), ids(2), 50.0)
    figures.completed(3_000_000_000, 51.0)
    assert figures.stats(51.0 + RATE_WINDOW_S)["transfer_gigabytes_per_second"] == 0.0
    figures.completed(3_000_000_000, 80.0)
    assert figures.stats(80.0)["transfer_gigabytes_per_second"] == pytest.approx(3 / 29)


def test_a_node_that_never_wrote_has_no_rate() -> None:
    assert WriteFigures().stats(0.0)["transfer_gigabytes_per_second"] == 0.0


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
    assert len(causes) <= MAX_CAUSES
    assert sum(stats[key] for key in causes) == 1 + 5 + 2 * MAX_CAUSES


def test_every_cause_is_there_before_it_happens() -> None:
    stats = RoomFigures().stats()
    failures = {key: number for key, number in stats.items() if "failures" in key}
    assert failures == {f'transfer_failures_total{{cause="{cause}"}}': 0 for cause in (*CAUSES, "other")}


def test_the_causes_are_the_codes_that_the_sessions_and_the_schedulers_give() -> None:
    sources = [source for folder in ("kvtransfer", "prefill_node", "decode_node", "common/scheduling") for source in (ROOT / folder).glob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source.read_text())}
    assert codes | {str(deadline_exceeded("transfer").code)} == set(CAUSES)


def test_peers_by_state_and_the_oldest_heartbeat() -> None:
    assert peer_stats(AcceptState, ["up", "down", "up"], [7.0, 9.5], 10.0) == {
        'transfer_peers{state="fenced"}': 0, 'transfer_peers{state="up"}': 2, 'transfer_peers{state="down"}': 1, "transfer_heartbeat_age_seconds": 3.0
    }  # fmt: skip
    states = [f'transfer_peers{{state="{state}"}}' for state in ("down", "connecting", "up", "alias", "refused")]
    assert peer_stats(DialState, [], [], 10.0) == {**dict.fromkeys(states, 0), "transfer_heartbeat_age_seconds": 0.0}
