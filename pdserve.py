"""The command line: `pdserve up | router | prefill | decode`.

Each sub-command's flags are the fields of its configuration in common/config.py. Everything heavy is imported by the command
that needs it: a router never loads what a node needs, and `--help` loads nothing. A StartupError is one sentence on standard
error and exit code 2; a process that dies later exits 1; one that is told to stop exits 0.
"""

import argparse
import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from common.cli import Parser, add_flags, config_from
from common.cluster import Cluster, UpConfig, check_port_free
from common.config import NodeConfig, Role, RouterConfig
from common.errors import StartupError
from common.launch import ChildDied, reported_to_parent
from common.preflight import check_node
from common.server.run_directory import UP_PREFIX, run_directory

DEFAULT_PREFILL_PORT = 8100  # NodeConfig's default is the decode node's: both run on one machine without a flag
SCHEDULERS: dict[Role, str] = {"prefill": "prefill_node", "decode": "decode_node"}
# `up` chooses: loopback, free ports
NODE_ADDRESS_FIELDS = ("host", "port", "bootstrap_port", "transfer_port", "kv_events_port", "advertise_host", "allow_unauthenticated")

EXAMPLES = {
    "up": "example: pdserve up --model demo --num-prefill 1 --num-decode 2",
    "router": "example: pdserve router --prefill http://10.0.0.1:8100,8998 --decode http://10.0.0.2:8200 --decode http://10.0.0.3:8200",
    "prefill": "example: pdserve prefill --model Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8100 --bootstrap-port 8998 --cluster-key-file cluster.key",
    "decode": "example: pdserve decode --model Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8200 --cluster-key-file cluster.key (alone a complete server)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the command's own event loop takes both signals
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except (StartupError, ChildDied) as error:
        print(f"pdserve: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, StartupError) else 1
    except KeyboardInterrupt:
        return 0


def _run(argv: list[str]) -> int:
    parser, commands = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    arguments, unknown = parser.parse_known_args(argv)
    command: str = arguments.command
    commands[command].refuse_unknown(unknown)
    if command == "router":
        return _router(arguments)
    if command == "up":
        return _up(arguments)
    return _node("prefill" if command == "prefill" else "decode", arguments)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the parser of each sub-command."""
    parser = Parser(prog="pdserve", description="Serves large language models with prefill and decode on separate nodes.")
    parser.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {
        name: group.add_parser(name, prog=f"pdserve {name}", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXAMPLES[name])
        for name, text in {
            "up": "a whole cluster on this machine: router, prefill and decode nodes, healed when one dies",
            "router": "the OpenAI endpoint that pairs every request with a prefill and a decode node",
            "prefill": "a node that computes prompts and ships their KV pages",
            "decode": "a node that receives KV pages and generates; alone it is a complete server",
        }.items()
    }
    add_flags(commands["up"], UpConfig)
    add_flags(commands["up"], RouterConfig, skip=("prefill", "decode"), defaults={"log_level": "warning"})  # its own lines say the rest
    shared = {field.name for field in dataclasses.fields(RouterConfig)}
    add_flags(commands["up"], NodeConfig, skip=(*NODE_ADDRESS_FIELDS, *shared))
    add_flags(commands["router"], RouterConfig)
    add_flags(commands["prefill"], NodeConfig, defaults={"port": DEFAULT_PREFILL_PORT})
    add_flags(commands["decode"], NodeConfig, skip=("bootstrap_port",))
    return parser, commands


def _router(arguments: argparse.Namespace) -> int:
    config = config_from(RouterConfig, arguments)
    come_later = config.service_discovery or config.admin_port is not None or config.admin_api_key_file is not None
    if not (config.prefill or config.decode or come_later):
        raise StartupError("the router needs nodes: give --prefill URL and --decode URL (each repeatable), or use `pdserve up`; "
                           "or say where they will come from, with --service-discovery or --admin-port")
    for role, given, wanted in (("prefill", config.prefill, config.disaggregation == "require"), ("decode", config.decode, True)):
        if wanted and not (given or come_later):
            raise StartupError(f"the router needs {role} nodes too: give --{role} URL, "
                               "or say where they will come from, with --service-discovery or --admin-port")

    from router.main import run_router

    return run_router(config)


def _node(role: Role, arguments: argparse.Namespace) -> int:
    config = config_from(NodeConfig, arguments, role=role)
    with reported_to_parent():
        check_node(config)
        config = _with_model(config, partial(print, file=sys.stderr, flush=True))
    from common.server.node import run_node

    return run_node(config, SCHEDULERS[role])


def _up(arguments: argparse.Namespace) -> int:
    from router.preflight import check_router

    router = config_from(RouterConfig, arguments)
    check_port_free(router.host, router.port)
    check_router(router)
    say = partial(print, flush=True)
    node = config_from(NodeConfig, arguments, host="127.0.0.1")
    check_node(dataclasses.replace(node, port=0, bootstrap_port=0))
    node = _with_model(node, say)
    with run_directory(UP_PREFIX) as run_dir:
        return asyncio.run(Cluster(up=config_from(UpConfig, arguments), node=node, router=router, run_dir=run_dir, say=say).run())


def _with_model(config: NodeConfig, say: "partial[None]") -> NodeConfig:
    """`config` with --model resolved to a directory, and served under the name that was given."""
    from common.models.acquire import resolve_model
    from common.models.config import ModelConfig

    model_dir: Path = resolve_model(config.model, say)
    ModelConfig.from_dir(model_dir)  # an unsupported architecture is a sentence here, not in a child's traceback
    return dataclasses.replace(config, model=str(model_dir), served_model_name=config.served_model_name or config.model)


if __name__ == "__main__":
    sys.exit(main())
