"""From a node's settings and its pool to a transfer backend and what the endpoint needs to know."""

import logging
from typing import Protocol

from common.cluster_key import ClusterKey, cluster_key, is_loopback
from common.config import NodeConfig
from kvtransfer.backend import Region, TransferBackend
from kvtransfer.factory import check_backend, make_backend
from kvtransfer.protocol import Compat
from kvtransfer.settings import TransferOptions, TransferSettings

logger = logging.getLogger(__name__)


class PageLayout(Protocol):
    """The shape of a page, as common/kvcache/layout.py states it."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def start_transfer(
    config: NodeConfig, region: Region, layout: PageLayout, *, fingerprint: str, dtype: str, kv_cache_dtype: str, context_length: int, vocab_size: int
) -> tuple[TransferSettings, TransferBackend]:
    """The configured backend with the pool registered. Raises StartupError."""
    compat = Compat(
        model=fingerprint,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        page_size=layout.page_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_nbytes=region.page_nbytes,
        context_length=context_length,
        vocab_size=vocab_size,
    )
    backend = make_backend(config.transfer_backend, region, options_of(config))
    settings = TransferSettings(
        compat=compat,
        region=region,
        digest=config.kv_transfer_digest,
        peer_timeout_s=config.peer_timeout_s,
        offer_timeout_s=config.offer_timeout_s,
    )
    return settings, backend


def options_of(config: NodeConfig) -> TransferOptions:
    return TransferOptions(
        host=config.host,
        port=config.transfer_port,
        advertise_host=config.advertise_host,
        lanes=config.transfer_lanes,
        ib_device=config.transfer_ib_device,
        protocol=config.mooncake_protocol,
    )


def check_transfer(config: NodeConfig) -> None:
    """Raises StartupError for what start_transfer() would only find after the model is loaded: a library that is not here."""
    check_backend(config.transfer_backend, options_of(config))


def control_key(config: NodeConfig) -> ClusterKey | None:
    """What the endpoint authenticates its peers by. Raises StartupError, as cluster_key(); warns of a node that is open to everybody."""
    key = cluster_key(config)
    if key is None and not is_loopback(config.host):
        logger.warning("this node is open to everybody who reaches %s: no --cluster-key-file, and --allow-unauthenticated", config.host)
    return key
