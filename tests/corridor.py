"""Which files one streamed chat request executes, and how many lines they hold; run as a program.

A file counts when the request runs a line inside one of its functions. What a compiled step runs
was traced before: there a function counts that ran while the engine compiled. The engine runs in a
thread here, so that one coverage sees it all; ipc.py stands in for the in-process pair that it then
uses. Prints one line a file, then the sum.
"""

from __future__ import annotations

import ast
import asyncio
import json
import tempfile
import time
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
TRACED = (
    "jserve/models/model.py",
    "jserve/models/llama.py",
    "jserve/layers/",
    "jserve/runner/programs.py",
    "jserve/sampling",
    "jserve/batch.py",
    "pallas_kernels/",
    "sharding/rules.py",
)
# checks of the engine at rest, which may begin before the client has its reply, and a thread that
# looks now and then whether steps go on
ASIDE = ("integrity.py", "watchdog.py")
STAND_INS = {"jserve/engine/local.py": "jserve/engine/ipc.py"}


def main() -> None:
    watch = coverage.Coverage(
        data_file=None, source=["jserve", "pallas_kernels", "sharding"], concurrency=["thread"]
    )
    watch.start()
    watch.switch_context("start")
    from jserve.config import Config
    from jserve.engine.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        shape = json.loads((ROOT / "configs" / "smollm2-135m.json").read_text())
        path = Path(folder, "two-layers.json")
        path.write_text(json.dumps({**shape, "num_hidden_layers": 2}))
        config = Config.from_flags(
            model_path=str(path),
            load_format="dummy",
            tokenizer_path="smollm2-135m",
            max_running_requests=2,
            chunked_prefill_size=32,
            context_length=256,
            log_level="error",
            compilation_cache_dir="off",
        )
        engine = Engine.from_config(config, inline=True)
        while engine.get_server_info()["programs_pending"]:  # they compile in the background
            time.sleep(0.1)
        asyncio.run(_chat(engine, config, watch))
    watch.stop()
    lines = _lines(watch.get_data())
    for file, count in lines.items():
        print(f"{count:5d} {file}")
    print(f"{sum(lines.values()):5d} lines in {len(lines)} files")
    engine.shutdown()


async def _chat(engine: object, config: object, watch: coverage.Coverage) -> None:
    import httpx

    from jserve.server.app import create_app

    transport = httpx.ASGITransport(app=create_app(engine, config))
    body = {
        "model": "default",
        "stream": True,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "Tell me how the tide works, at some length."}],
    }
    async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
        watch.switch_context("request")
        reply = await client.post("/v1/chat/completions", json=body, timeout=300)
        watch.switch_context("after")
        assert reply.status_code == 200 and "[DONE]" in reply.text, reply.text


def _lines(data: coverage.CoverageData) -> dict[str, int]:
    lines = {}
    for name in sorted(data.measured_files()):
        file = str(Path(name).relative_to(ROOT))
        contexts = {"request"}
        if file.startswith(TRACED):
            contexts.add("start")
        ran = {n for n, where in data.contexts_by_lineno(name).items() if contexts & set(where)}
        text = Path(name).read_text()
        if ran & _bodies(text) and not file.endswith(ASIDE):
            file = STAND_INS.get(file, file)
            lines[file] = len((ROOT / file).read_text().splitlines())
    return lines


def _bodies(text: str) -> set[int]:
    """Line numbers inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, functions)]
    return {i for n in nodes for s in n.body for i in range(s.lineno, (s.end_lineno or 0) + 1)}


if __name__ == "__main__":
    main()
