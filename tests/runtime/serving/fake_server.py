"""A server whose engine has no model: in a thread, for tests with a client; as a program, for tests with signals.

python -m tests.runtime.serving.fake_server SECONDS_OF_A_STEP DRAIN_TIMEOUT
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.program import address, listen, run
from mgraph.runtime.serving.server import Serving, create_app
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def serving(stepper: FakeStepper | None = None, template: bool = True, **settings: Any) -> Serving:
    """On a stepper that speaks bytes."""
    stepper = stepper or FakeStepper(
        vocab_size=256, num_blocks=600, max_length=256, max_requests=32, max_tokens=256, block_size=8
    )
    chat = ChatTemplate(TEMPLATE, {}, "the test") if template else None
    return Serving(Engine(stepper, ByteTokenizer(), ends_of_text=[0]), "fake", chat, **settings)


@contextmanager
def running(served: Serving) -> Iterator[str]:
    """Its address, while it runs in a thread. Afterwards nothing may be left of any request."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(create_app(served), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    served.background.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        yield address(listening)
        idle(served)
    finally:
        server.should_exit = True
        thread.join(10)
        served.background.stop()
        listening.close()
    pool = served.engine.scheduler.pool
    assert pool.available == pool.usable and served.requests == 0 and not served.background._driver._requests


def idle(served: Serving, seconds: float = 5) -> None:
    """Wait until nothing is under way."""
    end = time.monotonic() + seconds
    while served.background.active or served.engine.unfinished:
        assert time.monotonic() < end, f"{served.background.active} sequences go on"
        time.sleep(0.005)


def main() -> None:
    """Serve until a signal."""
    stepper = FakeStepper(
        vocab_size=256, num_blocks=600, max_length=256, max_requests=32, max_tokens=256, seconds=float(sys.argv[1])
    )
    sys.exit(run(serving(stepper), listen("127.0.0.1", 0), float(sys.argv[2])))


if __name__ == "__main__":
    main()
