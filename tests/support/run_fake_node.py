"""python run_fake_node.py '{"model": DIR, "port": 0, ...}': a node with the real detokenizer and the fake scheduler, as the CLI runs one."""

import sys

import msgspec

from common.config import NodeConfig
from common.errors import StartupError
from common.server.node import run_node

if __name__ == "__main__":
    try:
        sys.exit(run_node(msgspec.json.decode(sys.argv[1], type=NodeConfig), "fake_scheduler"))
    except StartupError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
