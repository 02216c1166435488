"""Serving with several processes: rank 0 leads, and each other one runs the same steps on its part of the model.

Rank 0 has the engine and talks to clients. It sends the arrays of each step, as one message to each follower, and all
run it: what a step sends between ranks is in the package. Logits are gathered on every rank, and a draw is a function
of logits and seed: so every rank samples the same tokens, and has those that the host does not know yet.

Messages go through a connection of its own for each follower, not through a collective: a follower may wait for the
next one for days, and the end of a process closes its connection at once, whether a step is under way or not. Then the
rank is named, and all end with 1, since nobody could finish what others have begun. The same happens where a step fails
on any rank: the others may be inside of it.

Followers end when rank 0 does, and until then take no notice of signals: whoever drains is rank 0.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from mgraph.errors import MgraphError
from mgraph.runtime import mesh
from mgraph.runtime.handshake import MeshError
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.serving.step import Batch, Pending, Sampling, Stepper

_LENGTH = struct.Struct("!Q")  # of the message that follows; 0: there are no more
_HELLO = struct.Struct("!I16s")  # the rank that connects, and what proves that it was told where
_CONNECT = 60.0  # seconds for all to connect: they have met before
_SETTLE = 0.5  # seconds in which more ranks may fail of the same cause
_PARTING = 10.0  # seconds that followers have to end

Lost = Callable[[str], None]
"""What to do when a rank is lost; it is told what happened, and must end the process."""


def led(stepper: Stepper, where: Mesh, release: Callable[[], None]) -> Stepper:
    """On rank 0 a stepper whose steps all ranks run. On any other rank this runs them, and then ends the process.

    `release` drops the stepper's graphs: while there are any, a process group does not end.
    """

    def leave() -> None:
        release()
        mesh.stop()

    if where.is_first:
        leader = Leader(stepper, _accepted(where), end_all)

        def end() -> None:
            leader.close()
            leave()

        atexit.register(end)
        return leader
    follow(stepper, _connected(where), where.rank)
    leave()
    sys.exit(0)


def end_all(what: str) -> NoReturn:
    """Say what happened and end this process, in whatever state its other threads are; the followers then end too."""
    sys.stdout.flush()
    print(MeshError(what, hint="look at the output of that process, and start all again"), file=sys.stderr, flush=True)
    os._exit(1)


class Leader:
    """A stepper of rank 0: steps run on all ranks. `connections` are those to the followers, by rank."""

    def __init__(self, stepper: Stepper, connections: Mapping[int, socket.socket], lost: Lost) -> None:
        self.stepper = stepper
        self.block_size, self.max_length = stepper.block_size, stepper.max_length
        self.max_tokens, self.max_requests = stepper.max_tokens, stepper.max_requests
        self.vocab_size, self.num_blocks = stepper.vocab_size, stepper.num_blocks
        self.asynchronous, self.windows = stepper.asynchronous, stepper.windows
        self.last_words: Lost = lambda what: None
        """Is told why the process ends, just before it does."""
        self._connections, self._lost = dict(connections), lost
        self._words = dict.fromkeys(self._connections, b"")
        self._gone: list[int] = []
        self._closing, self._ending = False, threading.Lock()
        self._all_gone = threading.Event()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    @property
    def launches(self) -> Mapping[str, int]:
        """Of rank 0; the others do the same."""
        return self.stepper.launches

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        """Start a step on all ranks."""
        message = pickle.dumps((batch, sampling), pickle.HIGHEST_PROTOCOL)
        for connection in self._connections.values():
            self._send(connection, message)
        try:
            return self.stepper.run(batch, sampling)
        except Exception as error:
            # Mostly of a rank that has gone, which is then named in the meantime.
            time.sleep(2 * _SETTLE)
            self._end(f"a step failed on rank 0: {_text(error)}")
            raise

    def close(self) -> None:
        """Let the followers end, and wait until they have heard of it."""
        if not self._closing:
            self._closing = True
            for connection in self._connections.values():
                self._send(connection, b"")
            self._all_gone.wait(_PARTING)

    def _send(self, connection: socket.socket, message: bytes) -> None:
        try:
            connection.sendall(_LENGTH.pack(len(message)) + message)
        except OSError:
            return  # its end is noticed by the one who watches

    def _watch(self) -> None:
        """Wait for the end of followers, and for what they say before it."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            since = None
            while selector.get_map():
                left = None if since is None or self._closing else since + _SETTLE - time.monotonic()
                for key, _ in selector.select(left):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        since = since or time.monotonic()
                if since is not None and not self._closing and time.monotonic() >= since + _SETTLE:
                    break
        if not self._closing:
            self._end(self._what_happened())
        self._all_gone.set()

    def _end(self, what: str) -> None:
        if self._ending.acquire(blocking=False):  # else another thread does it already
            try:
                self.last_words(what)
            finally:
                self._lost(what)

    def _hear(self, rank: int) -> bool:
        """Take what a follower says; whether it is still there."""
        try:
            said = self._connections[rank].recv(4096)
        except OSError:
            said = b""
        self._words[rank] += said
        if not said:
            self._gone.append(rank)
        return bool(said)

    def _what_happened(self) -> str:
        silent = [rank for rank in self._gone if not self._words[rank]]
        if silent:
            return f"rank {silent[0]} has died: nothing can be served without it"
        rank = self._gone[0]
        return f"a step failed on rank {rank}: {self._words[rank].decode(errors='replace')}"


def follow(stepper: Stepper, connection: socket.socket, rank: int) -> None:
    """Run the steps that rank 0 sends, until it says that there are no more."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    messages: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    # A thread of its own notices that rank 0 has gone while this one is inside a step that then never ends.
    threading.Thread(target=_receive, args=(connection, messages), name="leader", daemon=True).start()
    try:
        while message := messages.get():
            stepper.run(*pickle.loads(message))
    except Exception as error:
        with suppress(OSError):
            connection.sendall(_text(error).encode())
        time.sleep(_SETTLE)  # where rank 0 has died, that is said in the meantime
        print(MeshError(f"a step failed on rank {rank}: {_text(error)}"), file=sys.stderr, flush=True)
        os._exit(1)  # the process group may be inside a collective, which would be waited for
    connection.close()


def _receive(connection: socket.socket, messages: queue.SimpleQueue[bytearray]) -> None:
    try:
        message = bytearray(1)
        while message:
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            message = _read(connection, length)
            messages.put(message)
    except OSError:
        end_all("rank 0 has died: nothing can be served without it")


def _accepted(where: Mesh) -> dict[int, socket.socket]:
    """The connections of rank 0, by rank."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    secret = secrets.token_bytes(16)
    found: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1" if one_machine else "", 0), backlog=where.world_size) as listening:
        host = "127.0.0.1" if one_machine else os.environ.get("MASTER_ADDR", "127.0.0.1")
        where.gather((host, listening.getsockname()[1], secret))
        until = time.monotonic() + _CONNECT
        while len(found) < where.world_size - 1:
            listening.settimeout(max(until - time.monotonic(), 0.001))
            try:
                connection, _ = listening.accept()
                connection.settimeout(_CONNECT)
                rank, shown = _HELLO.unpack(_read(connection, _HELLO.size))
            except OSError as error:
                absent = [rank for rank in range(1, where.world_size) if rank not in found]
                raise MeshError(f"rank {absent[0]} did not connect: {error}", hint="look at its output") from error
            if not secrets.compare_digest(shown, secret):
                connection.close()  # a stranger
                continue
            found[rank] = connection
    for connection in found.values():
        _prepare(connection)
    return found


def _connected(where: Mesh) -> socket.socket:
    """The connection of a follower."""
    host, port, secret = where.gather(("", 0, b""))[0]
    try:
        connection = socket.create_connection((host, port), _CONNECT)
        connection.sendall(_HELLO.pack(where.rank, secret))
    except OSError as error:
        raise MeshError(f"rank {where.rank} cannot connect to rank 0 at {host}: {error}") from error
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _read(connection: socket.socket, count: int) -> bytearray:
    """So many bytes. Raises OSError where the connection ends before."""
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        part = connection.recv_into(view[have:])
        if not part:
            raise ConnectionResetError("the connection was closed")
        have += part
    return data


def _text(error: Exception) -> str:
    if isinstance(error, MgraphError):
        return error.message
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
