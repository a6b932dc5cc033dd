"""A node with the shm backend that stops itself in the middle of its first copy: `shm_child.py NUM_PAGES PAGE_NBYTES`.

Prints its description, reads one line with the other node's, writes all its pages (ones) there in one post, and prints the ticket's
error or null. It stops (SIGSTOP) when half of the first piece is copied.
"""

import base64
import json
import signal
import sys
import threading

from transfer_harness import HARNESSES, Node

from kvtransfer import shm_copy
from kvtransfer.backend import PeerId


def main(num_pages: int, page_nbytes: int) -> None:
    node = Node("child", HARNESSES["shm"]().backend(), num_pages, page_nbytes)
    node.pool[:] = 1
    shm_copy._memmove = copy_and_stop_midway
    say(base64.b64encode(node.description).decode())
    node.meet_as(PeerId("test"), base64.b64decode(sys.stdin.readline()))
    (error,) = node.wait(node.post("WRITE", PeerId("test"), range(num_pages), range(num_pages)))
    say(error and str(error))
    sys.stdin.read()


copy = shm_copy._memmove


def copy_and_stop_midway(destination: int, source: int, nbytes: int) -> None:
    half = nbytes // 2
    copy(destination, source, half)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread: it does not return before
    copy(destination + half, source + half, nbytes - half)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
