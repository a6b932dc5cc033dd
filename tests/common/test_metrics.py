"""The scheduler's figures as Prometheus reads them."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from common.metrics import HELP, StatusCollector, render


def rendered(stats: dict[str, float]) -> dict[str, tuple[str, dict[str, float]]]:
    """By family: its type, and each sample's value by its labels."""
    registry = CollectorRegistry()
    StatusCollector(registry, lambda: stats)
    families = text_string_to_metric_families(render(registry).decode())
    return {
        family.name: (family.type, {",".join(f"{name}={value}" for name, value in sample.labels.items()): sample.value for sample in family.samples})
        for family in families
    }


def test_a_key_is_a_gauge_or_by_its_ending_a_counter() -> None:
    assert rendered({"pages_free": 7.0, "offers_total": 3.0}) == {
        "pdserve_pages_free": ("gauge", {"": 7.0}),
        "pdserve_offers": ("counter", {"": 3.0}),
    }


def test_keys_of_one_name_are_samples_of_one_family_wherever_they_stand() -> None:
    stats = {'peers{state="up"}': 2.0, "rooms": 1.0, 'peers{state="down"}': 3.0, 'failures_total{cause="peer_lost"}': 4.0}
    assert rendered(stats) == {
        "pdserve_peers": ("gauge", {"state=up": 2.0, "state=down": 3.0}),
        "pdserve_rooms": ("gauge", {"": 1.0}),
        "pdserve_failures": ("counter", {"cause=peer_lost": 4.0}),
    }


def test_a_key_may_have_several_labels() -> None:
    assert rendered({'writes_total{peer="10.0.0.1:80/ab",way="tcp"}': 1.0}) == {
        "pdserve_writes": ("counter", {"peer=10.0.0.1:80/ab,way=tcp": 1.0})
    }


def test_a_family_says_what_it_is_about() -> None:
    registry = CollectorRegistry()
    StatusCollector(registry, lambda: {'transfer_peers{state="up"}': 2.0, "transfer_posts_total": 1.0, "other": 1.0})
    text = render(registry).decode()
    assert f"# HELP pdserve_transfer_peers {HELP['transfer_peers']}\n" in text
    assert f"# HELP pdserve_transfer_posts_total {HELP['transfer_posts_total']}\n" in text
    assert "# HELP pdserve_other Reported by the scheduler\n" in text


@pytest.mark.parametrize("key", ["", "{}", "a{}", "a{b}", 'a{b="c"', 'a{b="c"}d', 'a{b="c""}', 'a{b="\\"}'])
def test_a_key_that_is_none_is_left_out(key: str) -> None:
    assert rendered({key: 1.0, "pages": 2.0}) == {"pdserve_pages": ("gauge", {"": 2.0})}
