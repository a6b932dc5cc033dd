"""The OpenAPI document is true: whatever it allows, and what it forbids, is answered as it says, and never with a fault of the server."""

import asyncio
from pathlib import Path

import schemathesis
from http_edge import alone_too, edge
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from router.api_paths import PATHS

ADMIN_KEY = "admin-0123456789abcdef"
NUM_EXAMPLES = 6  # of each operation and mode
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
few = settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
               suppress_health_check=list(HealthCheck))  # fmt: skip


async def test_every_operation(tmp_path: Path) -> None:
    key = tmp_path / "admin"
    key.write_text(ADMIN_KEY)
    key.chmod(0o600)
    async with edge(admin_api_key_file=str(key), max_body_bytes=1 << 16) as made:
        for node in made.rig.decodes:
            node.behave = alone_too(node)
        asked = await asyncio.to_thread(ask_all, made.rig.url)
        assert asked == {path.decode() for path in PATHS} | {
            "/health", "/ready", "/metrics", "/server_info", "/v1/models", "/v1/models/{model}", "/workers", "/workers/drain", "/workers/undrain"
        }  # fmt: skip
        assert not made.held()
        assert made.trouble == []
        assert len(made.rig.router.nodes.all) == 2  # none of the URLs it made up was one


def ask_all(url: str) -> set[str]:
    """Returns the paths that were asked. Requests with what the document forbids are sent too."""
    asked = set()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @few
            @given(operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(base_url=url, checks=CHECKS, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=10)

            if mode is GenerationMode.POSITIVE or operation.body:  # a path without parameters can only be asked rightly
                check()
        asked.add(operation.path)
    return asked
