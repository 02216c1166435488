"""The program that serves a package: `mgraph serve PKG`, or `python PKG/serve.py`.

SIGTERM or Ctrl-C: new requests are refused, those under way are finished, for at most `--drain-timeout` seconds, and
the exit code is 0. A second one ends at once, with 1. Before there can be requests the first one ends at once, with 0.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from mgraph.errors import MgraphError, OptionError
from mgraph.runtime import mesh
from mgraph.runtime.options import about, flag, read
from mgraph.runtime.serving import opening, workload
from mgraph.runtime.serving.local_ranks import end_with_rank_0, local_ranks
from mgraph.runtime.start import INTERRUPTED, importing, signals_as_ever

if TYPE_CHECKING:
    from mgraph.runtime.serving.server import Serving

KEY = "MGRAPH_API_KEY"

MOST_MIB = 2**20

EXIT_CODES = """exit codes:
  0  stopped by SIGTERM or Ctrl-C, after the requests under way, or before there were any
  1  a second signal, or requests that did not end in time: they were cut off; or a rank has died
  2  wrong input (options, package, weights, a port that is taken)
  130  Ctrl-C, with --prompt"""


LAST_WORDS = 1.0
"""Seconds in which requests that cannot end, or did not in time, are told so."""


@dataclass(frozen=True)
class ServeOptions(opening.Settings):
    """All settings of a server."""

    prompt: str | None = field(
        default=None, metadata=about("continue this text on stdout, the likeliest token each time, instead of serving")
    )
    max_new_tokens: int = field(default=100, metadata=about("tokens after --prompt", low=1))
    host: str = field(default="127.0.0.1", metadata=about("address to listen at; 0.0.0.0 is all of the machine's"))
    port: int = field(default=8000, metadata=about("port to listen at; 0 takes any that is free", low=0, high=65535))
    api_key: str | None = field(
        default=None, metadata=about(f"key that clients must send (or the variable {KEY}; default: none is asked for)")
    )
    served_model_name: str = field(default="", metadata=about("name of the model for clients (default: the package's)"))
    max_queue: int = field(
        default=1024, metadata=about("sequences under way or waiting; more are refused with 429", low=1)
    )
    max_body: float = field(default=4.0, metadata=about("MiB of a request's body at most", low=0.001, high=MOST_MIB))
    drain_timeout: float = field(
        default=60.0, metadata=about("seconds that requests under way have after SIGTERM", low=0)
    )
    record_workload: Path | None = field(
        default=None, metadata=about("write here at the end what steps there were, for mgraph compile --graph-workload")
    )

    def __post_init__(self) -> None:
        """Options that exclude each other."""
        super().__post_init__()
        if self.prompt == "":
            raise OptionError("--prompt is empty: there is nothing to continue", hint="give it some text")
        if self.api_key == "":
            raise OptionError(
                "--api-key is empty: anybody could use the server", hint="leave it out where that is meant"
            )
        if not self.key.isprintable():
            what = "--api-key" if self.api_key else f"the variable {KEY}"
            raise OptionError(f"{what} has a line break or the like, which no client can send", hint="give it one line")
        if self.prompt is not None and self.record_workload is not None:
            problem = "--record-workload records what a server does, and with --prompt there is none"
            raise OptionError(problem, hint="leave one of them out")

    @property
    def key(self) -> str:
        """The key that clients must send; empty where none is asked for."""
        return self.api_key or os.environ.get(KEY, "")

    @classmethod
    def written(cls, name: str) -> str:
        """As a flag."""
        return flag(name)

    def opening(self) -> dict[str, Any]:
        """The settings of the engine among them."""
        return {item.name: getattr(self, item.name) for item in fields(opening.Settings)}


def main(package_dir: Path | str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve a package with the options of the command line, until a signal; the exit code is as `EXIT_CODES` says."""
    try:
        code = serve(Path(package_dir), arguments, Path(sys.argv[0]).name)
    except MgraphError as error:
        if mesh.is_first_of_machine():
            print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # of --prompt: a server ends by its signals
        if mesh.is_first_of_machine():
            say("interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(code)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings of the runtime are a line on stderr, without the place in its source; all others are as ever."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category is RuntimeWarning:
            print(f"warning: {message}", file=sys.stderr, flush=True)
        else:
            as_ever(message, category, *place, **more)

    with warnings.catch_warnings():
        as_ever, warnings.showwarning = warnings.showwarning, show
        yield


@plain_warnings()
def serve(package_dir: Path, arguments: Sequence[str] | None, program: str) -> int:
    """As `main`; gives the exit code. Raises MgraphError for wrong input."""
    about_it = "Serve this package behind HTTP, as OpenAI's API does, with a page at / to try it."
    options = read(ServeOptions, arguments, program, about_it, EXIT_CODES)
    wanted, (rank, started) = opening.ranks_of(package_dir), mesh.environment()
    if started > 1 and wanted == 1:
        problem = f"{started} processes were started, and {package_dir} is for one"
        raise OptionError(problem, hint="python PKG/serve.py, or compile it with --mesh tp=N")
    if rank:
        end_with_rank_0()
        opening.open_engine(package_dir, **options.opening())  # which does not return
    if wanted == 1 or started > 1:
        return _serve(package_dir, options, started)
    given = sys.argv[1:] if arguments is None else arguments
    with local_ranks(package_dir, given, wanted):
        return _serve(package_dir, options, wanted)


def _serve(package_dir: Path, options: ServeOptions, ranks: int) -> int:
    """What the one process or rank 0 does."""
    if options.prompt is not None:
        signals_as_ever()
        print(options.prompt + continuation(package_dir, options.prompt, options))
        return 0
    end_at_signals(0, "stopped before it served anything")
    needed()
    if options.record_workload is not None:
        workload.check_target(options.record_workload)
    listening = listen(options.host, options.port)
    try:
        engine, template = opening.open_engine(package_dir, **options.opening())
        from mgraph.runtime.serving.server import Serving

        serving = Serving(
            engine,
            options.served_model_name or package_dir.resolve().name,
            template,
            options.key,
            options.max_queue,
            int(options.max_body * 2**20),
            created=int(time.time()),
        )
        if ranks > 1:
            _tell_of_the_end(serving)
            say(f"{ranks} ranks; process {os.getpid()} is rank 0, which drains them at SIGTERM")
        code = run(serving, listening, options.drain_timeout)
        if options.record_workload is not None:
            record(options.record_workload, engine.shapes)
        return code
    finally:
        listening.close()


def _tell_of_the_end(serving: Serving) -> None:
    """Where a rank is lost, requests under way are told why this process ends."""
    from mgraph.runtime.serving.ranks import Leader

    def last_words(what: str) -> None:
        serving.background.fail(what)
        time.sleep(LAST_WORDS)

    leader = serving.engine.stepper
    assert isinstance(leader, Leader), "rank 0 leads the others"
    leader.last_words = last_words


def record(path: Path, steps: workload.Workload) -> None:
    """Write what steps there were. Without any there is no file: a compiler could plan nothing for it."""
    if steps:
        workload.write(path, steps)
    else:
        say(f"--record-workload {path}: nothing is written, as there was no step")


def continuation(package_dir: Path, prompt: str, options: ServeOptions) -> str:
    """What follows a prompt. Raises RequestError where it does not fit, EngineDead where a step failed."""
    from mgraph.runtime.serving.engine import EngineDead
    from mgraph.runtime.serving.llm import LLM
    from mgraph.runtime.serving.parameters import RequestError

    model = LLM(package_dir, **options.opening())
    params = {"temperature": 0.0, "max_tokens": options.max_new_tokens}
    try:
        (output,) = model.generate(prompt, params)[0].outputs
    except RequestError as error:
        typed = {"max_tokens": "--max-new-tokens", "prompt": "--prompt"}
        raise RequestError(error.message, typed.get(error.param or "", error.param), error.hint) from error
    if output.finish_reason == "error":
        raise EngineDead(f"a step failed: {output.error}")
    return output.text


def needed() -> None:
    """Raise OptionError where the libraries of the server are not installed."""
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"the server needs the library {error.name}, which is not installed", hint="pip install 'mgraph[serve]'"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, whose connections send at once: else the second part of an answer would wait for
    the client's word of the first, some 40 ms. Raises OptionError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:  # the latter of names that no host can have
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        hint = "give another --host: an address of this machine, or 0.0.0.0 for all that it has"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            hint = "give another --port (0 takes any that is free), or another --host"
        raise OptionError(f"cannot listen at {host}, port {port}: {reason}", hint=hint) from error


def run(serving: Serving, listening: socket.socket, drain_timeout: float) -> int:
    """Serve until a signal; gives the exit code."""
    import uvicorn

    from mgraph.runtime.serving.server import create_app

    class Server(uvicorn.Server):
        """Drains at the first signal and ends at the second."""

        deadline = 0.0
        cut = told = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if serving.draining:
                self.deadline, self.told = 0.0, True  # nobody is waited for any more
            else:
                serving.stopping.set()
                self.deadline = time.monotonic() + drain_timeout
                say(f"stopping: {serving.requests} requests are finished first; a second signal ends at once")

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say(f"serving {serving.model} at {address(listening)}")  # from here on signals are the server's

        async def on_tick(self, counter: int) -> bool:
            if serving.draining and serving.requests == 0:
                return True
            if serving.draining and time.monotonic() > self.deadline:
                if not self.cut:
                    say(f"{serving.requests} requests are cut off")
                    self.cut = True
                if not self.told:
                    self.told, self.deadline = True, time.monotonic() + LAST_WORDS
                    serving.background.end_all("the server stops, and the request did not end in time")
                    return await super().on_tick(counter)
                for connection in list(self.server_state.connections):
                    connection.transport.abort()  # as if the clients had gone, which ends their requests
                return True
            return await super().on_tick(counter)

    config = uvicorn.Config(
        create_app(serving), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    server = Server(config)
    try:
        serving.background.start()
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        end_at_signals(1, "stopped at once")
        serving.background.stop()
    return int(server.cut)


def end_at_signals(code: int, why: str) -> None:
    """From here on SIGTERM and Ctrl-C end the process with this exit code, after what is open has been closed; at once
    while something is imported."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        say(why)
        if importing(frame):
            os._exit(code)
        raise SystemExit(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def address(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def say(text: str) -> None:
    """Tell the one who started it, on stderr."""
    print(text, file=sys.stderr, flush=True)
