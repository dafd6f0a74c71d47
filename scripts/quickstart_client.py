"""Ask a served model one question twice over the OpenAI API, and say how fast it answered.

Owns the check that the answer is right and that the second one reused the first one's prompt; waits
for a server that is still starting, and starts none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import urllib.error
import urllib.request

import openai

QUESTION = "What is the capital of France?"
READY_TIMEOUT = 600.0  # seconds
COMPILE_TIMEOUT = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer; times in seconds."""

    text: str
    first_token: float
    total: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def report(self) -> str:
        gaps = max(self.completion_tokens - 1, 1)
        between = (self.total - self.first_token) / gaps
        return (
            f"  prompt {self.prompt_tokens} tokens, {self.cached_tokens} from the cache · "
            f"TTFT {self.first_token * 1e3:.0f} ms · ITL {between * 1e3:.1f} ms · "
            f"{self.completion_tokens / self.total:.1f} tokens/s"
        )


def wait_until_ready(url: str) -> None:
    """Return once /health answers 200; raise SystemExit after READY_TIMEOUT."""
    deadline = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    raise SystemExit(f"{url} was not ready within {READY_TIMEOUT:.0f} s")


def wait_until_compiled(url: str) -> None:
    """Let a first start finish compiling beside its requests, so that the times are a server's.

    Gives up after COMPILE_TIMEOUT, for the answers are the same.
    """
    deadline = time.monotonic() + COMPILE_TIMEOUT
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
            state = json.load(response)["internal_states"][0]
        pending = int(state.get("programs_pending", 0))
        if not pending:
            return
        print(f"\rcompiling for other batch sizes: {pending:3} to go", end="", file=sys.stderr)
        time.sleep(1.0)


def ask(client: openai.OpenAI, model: str, question: str) -> Answer:
    """Print the answer as it streams in."""
    start = time.perf_counter()
    first, text, usage = 0.0, "", None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = first or time.perf_counter() - start
            text += piece
            print(piece, end="", flush=True)
    print()
    assert usage is not None, "the stream ended without usage"
    details = usage.prompt_tokens_details
    return Answer(
        text=text,
        first_token=first,
        total=time.perf_counter() - start,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else None) or 0,
        completion_tokens=usage.completion_tokens,
    )


def main(url: str) -> None:
    """Ask, ask again, and fail unless the answer is right and the prompt was cached."""
    wait_until_ready(url)
    wait_until_compiled(url)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0)
    model = client.models.list().data[0].id
    answers = []
    for _ in range(2):
        print(f"\n> {QUESTION}")
        answers.append(ask(client, model, QUESTION))
        print(answers[-1].report())
    if not all("Paris" in answer.text for answer in answers):
        raise SystemExit("the answer is not Paris")
    if answers[1].cached_tokens <= 0:
        raise SystemExit("the second prompt was not served from the cache")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, e.g. http://127.0.0.1:30000")
    main(parser.parse_args().url)
