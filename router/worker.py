"""One of several router processes on one port, as workers.py starts it: `python -m router.worker`."""

import socket
import sys

import msgspec

from common.http_server import bind
from common.launch import Reporter, run_child
from common.logs import configure_logs
from router.main import serve
from router.workers import WorkerPayload


def main(payload: bytes, reporter: Reporter) -> None:
    told = msgspec.json.decode(payload, type=WorkerPayload)
    config = told.config
    configure_logs(config.log_level, f"router:{config.port}/{told.number}")
    # it listens when it is about to serve (main.py)
    with socket.socket(fileno=told.link_fd) as link, bind(config.host, config.port, reuse_port=True, listen=False) as listener:
        status = serve(config, listener, reporter, supervised=True, link=link)
    sys.exit(status)


if __name__ == "__main__":
    run_child(main)
