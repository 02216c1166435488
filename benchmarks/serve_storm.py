"""A server of a small package in a storm: it answers what is right, refuses what is wrong, loses nothing, and drains.

    python3 -m benchmarks.serve_storm [--results FILE] [--requests 1000] [--streams 256] [--seed 0]

`mgraph serve` runs in a process of its own. It gets, in an order drawn from the seed and many at a time: completions
and chats that are right, whole and streamed; clients that leave before the answer, in it, or within their own body;
bodies that are no JSON; absurd parameters; prompts that are too long. Then so many streams at once, and at last SIGTERM
while streams are read. Anything that must not be is an error with exit status 1: an answer of 5xx before the signal, a
right request without its answer, a sequence that goes on after its client has left, a block that is not given back (by
/metrics), a stream that is cut by the drain, an exit code other than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe

RESULTS = Path(__file__).parent / "results" / "serve_storm.json"
MODEL, LONGEST, AT_ONCE = "dense-tiny", 256, 64
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BROKEN = (
    b"{",
    b"",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": ',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "\\ud800"}',
)
ABSURD: tuple[dict[str, Any], ...] = (
    {"max_tokens": 10**9},
    {"max_tokens": -1},
    {"temperature": 1e300},
    {"temperature": "hot"},
    {"n": 10**6},
    {"top_p": 0},
    {"logprobs": 10**6},
    {"stop": ""},
    {"stop": ["x"] * 1000},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"x": None}},
    {"prompt": [10**12]},
    {"prompt": []},
    {"allowed_token_ids": []},
    {"unknown": 1},
    {"model": "other"},
)
KINDS = ("whole", "stream", "chat", "broken", "absurd", "long", "leaves", "leaves reading", "leaves writing")


class Wrong(Exception):
    """Something that must not be."""


@dataclass(frozen=True)
class Server:
    """A process that serves, and where."""

    process: subprocess.Popen[str]
    host: str
    port: int

    async def send(self, method: str, path: str, raw: bytes, part: float = 1.0) -> tuple[Any, Any]:
        """The two ends of a connection on which (a part of) a request was sent."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw[: int(len(raw) * part)])
        await writer.drain()
        return reader, writer

    async def answer(self, method: str, path: str, raw: bytes = b"") -> tuple[int, bytes]:
        """The code and body of an answer."""
        reader, writer = await self.send(method, path, raw)
        found = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        return int(found[9:12] or b"0"), found.partition(b"\r\n\r\n")[2]

    async def number(self, name: str, label: str = "") -> float:
        """The sum of a metric, over what has a label."""
        _, text = await self.answer("GET", "/metrics")
        line = rf"^{re.escape(name)}(?:{{.*{re.escape(label)}.*}}){'' if label else '?'} (\S+)$"
        return sum(float(value) for value in re.findall(line, text.decode(), re.M))


def body(source: random.Random, tokens: int, **more: Any) -> bytes:
    """A completion that is asked for, of a prompt that may begin like others."""
    prompt = "a beginning that many share, " * source.randrange(3) + str(source.randrange(50))
    asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": source.randrange(9)}
    return json.dumps({**asked, **more}).encode()


async def one(server: Server, kind: str, source: random.Random) -> None:
    """A request of a kind; raises Wrong."""
    path = "/v1/completions"
    if kind.startswith("leaves"):
        part = 0.5 if kind == "leaves writing" else 1.0
        reader, writer = await server.send("POST", path, body(source, 150, stream=source.random() < 0.5), part)
        if kind == "leaves reading":
            await asyncio.wait({asyncio.ensure_future(reader.read(source.randrange(1, 2000)))}, timeout=0.2)
        writer.close()
        return
    raw, code = body(source, source.randint(1, 24)), 200
    if kind == "stream":
        raw = body(source, source.randint(1, 24), stream=True)
    elif kind == "chat":
        path = "/v1/chat/completions"
        raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": True}).encode()
    elif kind == "broken":
        raw, code = source.choice(BROKEN), 400
    elif kind == "absurd":
        raw, code = json.dumps({"prompt": "x", **source.choice(ABSURD)}).encode(), 400
    elif kind == "long":
        raw, code = json.dumps({"prompt": "x" * source.randint(LONGEST, 20 * LONGEST)}).encode(), 400
    found, text = await server.answer("POST", path, raw)
    if found != code and not (found == 404 and b'"other"' in raw):
        raise Wrong(f"{kind}: {found} in place of {code} for {raw[:200]!r}: {text[:200]!r}")
    if kind == "stream":
        finished(text)


def finished(text: bytes) -> None:
    """Raise Wrong for a stream that was cut off."""
    if b"data: [DONE]" not in text or b'"error"' in text:
        raise Wrong(f"a stream that ends with {text[-200:]!r}")


async def idle(server: Server, seconds: float = 30) -> None:
    """Wait until nothing is under way; raises Wrong where something goes on, or a block is held."""
    end = time.monotonic() + seconds
    names = ("mgraph_num_requests_running", "mgraph_num_requests_waiting", "mgraph_kv_cache_usage_perc")
    while any(left := [await server.number(name) for name in names]):
        if time.monotonic() > end:
            raise Wrong(f"{dict(zip(names, left, strict=True))} with nobody there")
        await asyncio.sleep(0.1)
    code, _ = await server.answer("GET", "/health")
    if code != 200:
        raise Wrong(f"/health is {code}")


async def leave(server: Server, source: random.Random, count: int) -> None:
    """Clients that leave long before the end end their requests; raises Wrong where these go on."""
    before = await server.number("mgraph_request_success_total", 'finished_reason="abort"')
    for stream in (True, False):
        sent = [await server.send("POST", "/v1/completions", body(source, 150, stream=stream)) for _ in range(count)]
        for reader, _ in sent if stream else ():
            await reader.read(200)
        end = time.monotonic() + 1
        while await server.number("mgraph_num_requests_running") < count and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for _, writer in sent:
            writer.close()
        await idle(server)
    after = await server.number("mgraph_request_success_total", 'finished_reason="abort"')
    if after - before < 2 * count - 2:
        raise Wrong(f"{after - before:g} of {2 * count} requests ended when their clients left")


async def storm(server: Server, requests: int, streams: int, seed: int) -> dict[str, Any]:
    """All of it; what there was of each kind, and how long it took."""
    source, started = random.Random(seed), time.monotonic()
    drawn = (source.choice(KINDS) for _ in range(requests - len(KINDS)))
    kinds, free = Counter([*KINDS, *drawn]), asyncio.Semaphore(AT_ONCE)

    async def bounded(kind: str, of: random.Random) -> None:
        async with free:
            await one(server, kind, of)

    order = list(kinds.elements())
    source.shuffle(order)
    await asyncio.gather(*(bounded(kind, random.Random(source.random())) for kind in order))
    await idle(server)
    await leave(server, source, min(12, streams))
    stormed = time.monotonic()
    await asyncio.gather(*(one(server, "stream", random.Random(at)) for at in range(streams)))
    await idle(server)
    streamed = time.monotonic()
    asked = await server.number("mgraph_e2e_request_latency_seconds_count")
    ended = await server.number("mgraph_request_success_total")
    if asked != ended:
        raise Wrong(f"{asked} sequences, {ended} ends")
    await drain(server, random.Random(seed), min(16, streams))
    return {
        "kinds": dict(kinds),
        "streams": streams,
        "seconds": {"storm": stormed - started, "streams": streamed - stormed, "drain": time.monotonic() - streamed},
        "sequences": ended,
    }


async def drain(server: Server, source: random.Random, count: int) -> None:
    """SIGTERM while streams are read: they are finished, new requests are refused, and the exit code is 0."""
    open_ones = [await server.send("POST", "/v1/completions", body(source, 150, stream=True)) for _ in range(count)]
    begun = [await reader.read(200) for reader, _ in open_ones]
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    code, _ = await server.answer("POST", "/v1/completions", body(source, 5))
    if code != 503:
        raise Wrong(f"{code} for a request that comes while the server drains")
    for first, (reader, writer) in zip(begun, open_ones, strict=True):
        finished(first + await asyncio.wait_for(reader.read(), 60))
        writer.close()
    status = await asyncio.to_thread(server.process.wait, 60)
    if status != 0:
        raise Wrong(f"exit code {status} after the drain")


def run(directory: Path, requests: int, streams: int, seed: int, blocks: int = 120) -> dict[str, Any]:
    """Compile, serve, storm. Raises Wrong."""
    recipe = Recipe(model=MODEL, purpose="serve", arch="none", output=str(directory / "package"), max_length=LONGEST)
    package = compile_package(recipe).package
    (directory / "chat.jinja").write_text(TEMPLATE, "utf-8")
    options = ["--random-init", "--port", "0", "--num-blocks", str(blocks), "--max-requests", "32"]
    more = ["--chat-template", str(directory / "chat.jinja"), "--device", "cpu", "--max-queue", "2000"]
    return against([sys.executable, str(Path(str(package)) / "serve.py"), *options, *more], requests, streams, seed)


def against(command: Sequence[str], requests: int, streams: int, seed: int) -> dict[str, Any]:
    """A storm over what a command serves, which says where. Raises Wrong."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            place = re.search(r"http://([\d.]+):(\d+)", said)
            if place is None:
                raise Wrong(f"the server did not start: {said}{process.stderr.read()}")
            # What it says later is read too: with a full pipe it would wait for ever.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return asyncio.run(storm(Server(process, place[1], int(place[2])), requests, streams, seed))
        finally:
            process.kill()


def main() -> int:
    """Run, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = run(Path(directory), options.requests, options.streams, options.seed)
        except (Wrong, OSError) as error:  # no connection, or no answer in time
            print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    row = {"date": datetime.date.today().isoformat(), "model": MODEL, "seed": options.seed, **found}
    print(json.dumps(row))
    options.results.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
