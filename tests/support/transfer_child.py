"""A node of the transfer conformance suite in a process of its own: `transfer_child.py BACKEND NUM_PAGES PAGE_NBYTES PORT NAME`.

Prints its description, or why it cannot start, then answers one command a line; all JSON. Its pool starts as zeroes.
"""

import base64
import ctypes
import json
import signal
import sys

from transfer_harness import HARNESSES, Node

from common.errors import StartupError
from common.launch import PR_SET_PDEATHSIG
from kvtransfer.backend import PeerId
from kvtransfer.settings import TransferOptions


def main(backend: str, num_pages: int, page_nbytes: int, port: int, name: str) -> None:
    try:
        node = Node(name, HARNESSES[backend]().backend(TransferOptions(port=port)), num_pages, page_nbytes)
    except StartupError as error:
        answer({"error": str(error)})
        return
    answer({"description": base64.b64encode(node.description).decode()})
    posted = []
    for line in sys.stdin:
        match json.loads(line):
            case ["meet", peer, description]:
                node.meet_as(PeerId(peer), base64.b64decode(description))
                answer(None)
            case ["part", peer]:
                node.part(PeerId(peer))
                answer(None)
            case ["fill", seed]:
                node.fill(seed)
                answer(None)
            case ["digest", pages]:
                answer(node.digest(pages))
            case ["post", op, peer, local, remote, times]:
                posted += [node.post(op, PeerId(peer), local, remote) for _ in range(times)]
                answer(None)
            case ["wait"]:
                answer([error and str(error) for error in node.wait(*posted)])
                posted.clear()
            case ["close"]:
                node.close()
                answer(None)
            case command:
                raise ValueError(f"unknown command {command}")
    node.close()


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a frozen one never sees the end of its input
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
