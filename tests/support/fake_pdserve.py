"""Stands in for `pdserve prefill | decode | router` under a supervisor: takes the flags, binds the ports, reports, serves /ready.

Environment: FAKE_FAIL names roles that refuse to start; FAKE_DEAF names roles that ignore SIGTERM; FAKE_LOG is a file that
gets one line "role pid port" for each start.
"""

import http.server
import os
import signal
import socket
import ssl
import sys
import threading

from common.errors import StartupError
from common.launch import Reporter, run_child
from pdserve import build_parser


def bound(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


def main(payload: bytes, reporter: Reporter) -> None:
    parser, _ = build_parser()
    arguments = parser.parse_args(sys.argv[1:])
    role = arguments.command
    if role in os.environ.get("FAKE_FAIL", "").split():
        raise StartupError(f"{role} cannot start")
    if role in os.environ.get("FAKE_DEAF", "").split():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    facts = {}
    if role == "router":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), Ready)
        if arguments.ssl_certfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(arguments.ssl_certfile, arguments.ssl_keyfile)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        facts["port"] = server.server_address[1]
    else:
        listeners = [bound(arguments.port)]
        facts["port"] = listeners[0].getsockname()[1]
        if role == "prefill":
            listeners.append(bound(arguments.bootstrap_port))
            facts["bootstrap_port"] = listeners[1].getsockname()[1]
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{role} {os.getpid()} {facts['port']} {facts.get('bootstrap_port', 0)} {' '.join(sys.argv[2:])}\n")
    reporter.progress("fake")
    reporter.ready(**facts)
    while True:
        signal.pause()


run_child(main)
