"""A tcp node in a process of its own, for tests that kill or stop one: `transfer_child.py NUM_PAGES PAGE_NBYTES PORT`.

Prints its description, then answers one command a line: ["meet", peer, description], ["digest", pages]. Its pool starts as zeroes.
"""

import base64
import hashlib
import json
import sys

import numpy as np

from kvtransfer.backend import PeerId, Region
from kvtransfer.tcp import TcpBackend


def main(num_pages: int, page_nbytes: int, port: int) -> None:
    pool = np.zeros((num_pages, page_nbytes), dtype=np.uint8)
    backend = TcpBackend(port=port)
    backend.register(Region(pool.ctypes.data, num_pages, page_nbytes, "cpu", pool))
    answer(base64.b64encode(backend.describe()).decode())
    for line in sys.stdin:
        match json.loads(line):
            case ["meet", peer, description]:
                backend.accept(PeerId(peer), base64.b64decode(description))
                backend.connect(PeerId(peer), base64.b64decode(description))
                answer("met")
            case ["digest", pages]:
                answer(hashlib.sha256(pool[pages].tobytes()).hexdigest())
    backend.close()


def answer(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
