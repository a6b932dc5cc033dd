"""The command line: complete help, one sentence for every wrong call, nothing heavy loaded, flags and configurations agree."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli import Parser, add_flags, argv_of, config_from, flag_name
from common.cluster import UpConfig
from common.config import PAGE_SIZES, HttpConfig, NodeConfig, RouterConfig
from common.errors import StartupError
from common.http_server import bind
from pdserve import build_parser

COMMANDS = ("up", "router", "prefill", "decode")
CONFIGS = {"up": (UpConfig, NodeConfig, RouterConfig), "router": (RouterConfig,), "prefill": (NodeConfig,), "decode": (NodeConfig,)}


def pdserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False)


def refusal(*arguments: str, **environment: str) -> str:
    """The sentence of a call that must be refused: exit code 2, one line on standard error, nothing else."""
    done = pdserve(*arguments, **environment)
    assert done.returncode == 2, done
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line.removeprefix("pdserve: error: ")


def parse_error(*arguments: str) -> str:
    """The sentence, found without a process."""
    parser, commands = build_parser()
    with pytest.raises(StartupError) as raised:
        commands[arguments[0]].refuse_unknown(parser.parse_known_args(arguments)[1])
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- help -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag_with_reason_default_and_unit(command: str) -> None:
    _, commands = build_parser()
    text = " ".join(commands[command].format_help().split())
    for action in commands[command]._actions:
        assert action.help, action
        assert action.option_strings[-1] in text
        if action.default not in (None, False, (), "==SUPPRESS=="):
            assert f"default {action.default}" in text, action
    shown = set(re.findall(r"--[a-z][a-z-]+", text))
    for config in CONFIGS[command]:
        for field in dataclasses.fields(config):
            if "help" in field.metadata and flag_name(field) in shown and field.metadata["unit"]:
                assert field.metadata["unit"] in text


def test_every_number_has_bounds_and_a_flag_is_named_once() -> None:
    for config in (HttpConfig, NodeConfig, RouterConfig, UpConfig):
        fields = [field for field in dataclasses.fields(config) if "help" in field.metadata]
        assert len({flag_name(field) for field in fields}) == len(fields)
        for field in fields:
            if {int, float} & {field.type, *get_args(field.type)}:
                assert field.metadata["least"] is not None or field.metadata["choices"], f"{config.__name__}.{field.name} has no bounds"


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_exits_0_on_standard_output(command: tuple[str, ...]) -> None:
    done = pdserve(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(("usage: pdserve", *command)))


def test_version() -> None:
    done = pdserve("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "pdserve")


def test_no_command_shows_help_and_exits_2() -> None:
    done = pdserve()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: pdserve")


# ---- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("up", "--num-prefil", "2"), "pdserve up has no flag --num-prefil (did you mean --num-prefill?); see `pdserve up --help`"),
        (("decode", "--frobnicate"), "pdserve decode has no flag --frobnicate; see `pdserve decode --help`"),
        (("decode", "--bootstrap-port", "8998"), "pdserve decode has no flag --bootstrap-port; see `pdserve decode --help`"),
        (("decode", "extra"), "pdserve decode has no argument extra; see `pdserve decode --help`"),
        (("prefill", "--port", "abc"), "--port: 'abc' is not a whole number from 0 to 65535; see `pdserve prefill --help`"),
        (("prefill", "--port", "65536"), "--port: 65536 is not a whole number from 0 to 65535; see `pdserve prefill --help`"),
        (("prefill", "--port=-1"), "--port: -1 is not a whole number from 0 to 65535; see `pdserve prefill --help`"),
        (("prefill", "--port"), "--port: expected one argument; see `pdserve prefill --help`"),
        (("decode", "--page-size", "24"), "--page-size: '24' is not one of 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024; see `pdserve decode --help`"),
        (("decode", "--mem-fraction-static", "nan"), "--mem-fraction-static: nan is not a number from 0.01 to 0.99; see `pdserve decode --help`"),
        (("decode", "--mem-fraction-static", "1"), "--mem-fraction-static: 1 is not a number from 0.01 to 0.99; see `pdserve decode --help`"),
        (("decode", "--request-timeout", "inf"), "--request-timeout: inf is not a number of at least 0.1; see `pdserve decode --help`"),
        (("decode", "--dtype", "int8"), "--dtype: 'int8' is not one of auto, float32, bfloat16; see `pdserve decode --help`"),
        (("decode", "--model", ""), "--model: is empty; see `pdserve decode --help`"),
        (("router", "--prefill", "10.0.0.1:80"), "--prefill: '10.0.0.1:80' is no node address; write http://HOST:PORT; see `pdserve router --help`"),
        (("router", "--decode", "http://a:0"), "--decode: 'http://a:0' is no node address; write http://HOST:PORT; see `pdserve router --help`"),
        (("router", "--prefill", "http://a:1,x"), "--prefill: bootstrap port 'x' of http://a:1 is no port; see `pdserve router --help`"),
        (("router", "--prefill", "http://a:1,"), "--prefill: bootstrap port '' of http://a:1 is no port; see `pdserve router --help`"),
        *(
            (("router", "--decode", url), f"--decode: {url!r} is no node address; write http://HOST:PORT; see `pdserve router --help`")
            for url in ("http://me:secret@a:1", "http://a:1/b c", "http://a:1/\r\nx: y", "http://a:1/?b#c", "http://a..b:1", f"http://{64 * 'a'}:1")
        ),
    ],
)
def test_wrong_argument_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert parse_error(*arguments) == sentence


def test_refusal_is_one_line_and_exit_code_2() -> None:
    assert refusal("up", "--bogus") == "pdserve up has no flag --bogus; see `pdserve up --help`"
    assert re.fullmatch(r"COMMAND: invalid choice: 'serve' \(choose from .*up.*router.*prefill.*decode.*\); see `pdserve --help`", refusal("serve"))
    assert refusal("router").startswith("the router needs nodes: give --prefill URL and --decode URL")
    assert refusal("router", "--port", "0", "--decode", "http://h:1").startswith("the router needs prefill nodes too: give --prefill URL")
    never = refusal("router", "--port", "0", "--prefill", "http://h:1", "--disaggregation", "never")
    assert never.startswith("the router needs decode nodes too: give --decode URL")
    assert refusal("router", "--prefill", "http://h:1", "--decode", "http://h:2", "--host", "a..b").startswith("cannot serve HTTP on a..b:8000: ")
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        admin = refusal("router", "--prefill", "http://h:1", "--decode", "http://h:2", "--port", "0", "--admin-port", port)
    assert admin.endswith("in use; choose another with --admin-host and --admin-port")


@pytest.mark.parametrize("command", ["up", "prefill", "decode"])
def test_port_in_use_is_found_before_the_model_is_looked_for(command: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = refusal(command, "--port", str(port), "--model", str(tmp_path / "none"))
        assert sentence == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --host and --port"


def test_files_of_the_router_are_read_before_the_model_is_looked_for() -> None:
    keys = refusal("up", "--port", "0", "--model", "/nowhere", "--api-key-file", "/nonexistent")
    assert keys.startswith("--api-key-file /nonexistent cannot be read")
    assert refusal("up", "--port", "0", "--model", "/nowhere", "--ssl-keyfile", "/nonexistent").endswith("needs --ssl-certfile too")


def test_unreadable_and_unsupported_models_are_one_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refusal("decode", "--port", "0", "--model", str(missing)) == (
        f"model {missing} does not exist; give a directory of safetensors, a .gguf file, a hub id like org/name, or demo"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "GPT2LMHeadModel" in refusal("decode", "--port", "0", "--model", str(tmp_path))
    assert "GPT2LMHeadModel" in refusal("up", "--port", "0", "--model", str(tmp_path))


def test_signal_before_serving_exits_0_without_a_traceback(tmp_path: Path) -> None:
    """While another process makes the cache entry that this one waits for."""
    import fcntl

    from common.models.acquire import CONVERSION, DEMO_ENTRY

    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / f".{DEMO_ENTRY}-v{CONVERSION}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-P", "-m", "pdserve", "up", "--port", "0"]
        environment = {**os.environ, "PDSERVE_CACHE": str(tmp_path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            assert "another process is making" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


# ---- what a command loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import pdserve; pdserve.build_parser()",
        "import router.main",
        "import common.server.node, common.models.acquire, common.models.config",
        "import common.server.detokenizer",
        "import common.cluster",
    ],
)
def test_text_processes_and_router_load_no_torch(statement: str) -> None:
    heavy = "torch", "transformers", "numba", "safetensors", "huggingface_hub"
    code = f"import sys; {statement}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# ---- flags and configurations agree --------------------------------------------------------------------------------------------


def parsed(config_type: type[object], argv: list[str]) -> object:
    parser = Parser(prog="pdserve")
    add_flags(parser, config_type)
    return config_from(config_type, parser.parse_args(argv))


def test_no_flag_gives_the_defaults() -> None:
    assert parsed(NodeConfig, []) == NodeConfig()
    assert parsed(RouterConfig, []) == RouterConfig()
    parser, _ = build_parser()
    assert config_from(NodeConfig, parser.parse_args(["decode"])) == NodeConfig(port=8200)
    assert config_from(NodeConfig, parser.parse_args(["prefill"])) == NodeConfig(port=8100)
    assert config_from(RouterConfig, parser.parse_args(["router"])) == RouterConfig(port=8000)


@given(
    port=st.integers(0, 65535),
    page_size=st.sampled_from(PAGE_SIZES),
    context_length=st.none() | st.integers(2, 10**9),
    mem_fraction_static=st.floats(0.01, 0.99),
    served_model_name=st.none() | st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1).filter(str.strip),
    disable_radix_cache=st.booleans(),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
)
def test_a_childs_arguments_make_an_equal_node_config(**fields: object) -> None:
    config = NodeConfig(**fields)  # type: ignore[arg-type]
    assert parsed(NodeConfig, argv_of(config)) == config


@given(ports=st.lists(st.tuples(st.integers(1, 65535), st.none() | st.integers(1, 65535)), max_size=4), max_retries=st.integers(0, 16))
def test_a_childs_arguments_make_an_equal_router_config(ports: list[tuple[int, int | None]], max_retries: int) -> None:
    prefill = tuple(f"http://127.0.0.1:{port}" + (f",{bootstrap}" if bootstrap else "") for port, bootstrap in ports)
    config = RouterConfig(prefill=prefill, decode=("http://h:1", "http://[::1]:2"), max_retries=max_retries)
    assert parsed(RouterConfig, argv_of(config)) == config


@pytest.mark.parametrize(
    "argv",
    [
        ["--prefill", "http://a:1,8998", "--prefill", "http://b:2"],
        ["--prefill", "http://a:1", "8998", "--prefill", "http://b:2"],
        ["--prefill", "http://a:1", "8998", "http://b:2"],
        ["--prefill=http://a:1,8998", "--prefill=http://b:2"],
    ],
)
def test_prefill_nodes_in_each_form(argv: list[str]) -> None:
    config = parsed(RouterConfig, argv)
    assert isinstance(config, RouterConfig)
    assert config.prefill == ("http://a:1,8998", "http://b:2")
