"""The scheduler process of a decode node, started by its parent (common/server/node.py) as `python -m decode_node`."""

from common.config import decode_child_payload
from common.launch import Reporter, run_child
from common.logs import configure_logs
from common.scheduling.intake import Intake
from common.scheduling.start import start_engine
from decode_node.scheduler import DecodeScheduler
from kvtransfer.backend import Region
from kvtransfer.endpoint import DecodeEndpoint
from kvtransfer.protocol import VERSION
from kvtransfer.start import check_transfer, control_key, start_transfer


def main(payload: bytes, reporter: Reporter) -> None:
    config, addresses = decode_child_payload(payload)
    configure_logs(config.log_level, f"decode:{config.port} scheduler")
    key = control_key(config)
    check_transfer(config)
    engine = start_engine(config, addresses, reporter)
    pool = engine.runner.kv
    region = Region(pool.base_address, pool.num_pages, pool.page_nbytes, str(engine.runner.device), pool, pool.shared_fd)
    facts = {"fingerprint": engine.fingerprint, "dtype": engine.dtype, "kv_cache_dtype": engine.kv_cache_dtype}
    settings, backend = start_transfer(
        config, region, pool.layout, context_length=engine.runner.context_length, vocab_size=engine.runner.model_config.vocab_size, **facts
    )
    endpoint = DecodeEndpoint(settings, backend, key)
    try:
        intake = Intake(engine.inbox, endpoint.wake_fd)
        scheduler = DecodeScheduler(engine.work, intake, engine.outbox, endpoint, engine.limits, engine.events)
        reporter.ready(
            incarnation=endpoint.incarnation,
            max_total_tokens=engine.max_total_tokens,
            context_length=engine.runner.context_length,
            bootstrap_port=None,
            kv_events_port=engine.kv_events_port,
            protocol_version=VERSION,
            quantization=engine.quantization,
            **facts,
        )
        scheduler.run()
    finally:
        endpoint.close()


if __name__ == "__main__":
    run_child(main)
