"""Starts a training run, or a server: what takes long and waits for nothing begins in threads.

Before torch is imported, the driver makes the context of this process's GPU, which torch then finds. When the package
is loaded, libraries bring up what they need at their first product and attention, while the state is drawn.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

INTERRUPTED = 130
"""The exit code of what is no server and was ended by Ctrl-C."""
IMPORTS = "<frozen importlib._bootstrap>"
"""The file of Python's own functions that import."""
SMALL = 128
"""Rows, keys and width of an attention that all libraries take."""


def main(package_dir: Path | str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Train the package with the options of the command line, then exit the process: `train.main`."""
    ahead(sys.argv[1:] if arguments is None else arguments)
    with ended_by_signals():
        from mgraph.runtime import train
    train.main(package_dir, arguments)


def serve(package_dir: Path | str) -> NoReturn:
    """Serve the package with the options of the command line, then exit the process: `serving.program.main`."""
    stop_at_signals()
    from mgraph.runtime.serving import program

    program.main(package_dir)


def stop_at_signals() -> None:
    """SIGTERM and Ctrl-C end what is to be a server with 0, at once: libraries that are half imported drop exceptions.

    It is so until the server handles signals itself. A follower that others end before it follows does not hide it.
    """

    def end(*_: object) -> NoReturn:
        if leads:
            print("interrupted" if asked else "stopped before it served anything", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED if asked else 0)

    asked = any(argument.partition("=")[0] == "--prompt" for argument in sys.argv)  # no server, whose end is none
    leads = os.environ.get("RANK", "0") == "0"
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM) if leads else (signal.SIGINT,):
            signal.signal(number, end)


def signals_as_ever() -> None:
    """Undo `stop_at_signals`: what runs is no server."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def importing(frame: FrameType | None) -> bool:
    """Whether something is being imported where a signal came: libraries that are half there drop the exception, or
    raise others."""
    while frame is not None and frame.f_code.co_filename != IMPORTS:
        frame = frame.f_back
    return frame is not None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C ends the process at once meanwhile: libraries that are half there drop the exception, or raise others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: end_at_once())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_at_once() -> NoReturn:
    """End the process after Ctrl-C, whatever its threads are at: a save under way has some that Python cannot end."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("interrupted; what was not saved before is lost", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def ahead(arguments: Sequence[str]) -> None:
    """Begin to make the context of a GPU, unless the command line says that there is no need for one."""
    if not {"-h", "--help", "cpu", "--device=cpu"} & set(arguments):
        threading.Thread(target=make_context, name="context", daemon=True).start()


def make_context() -> None:
    """The driver's own (primary) context of this process's GPU. Where there is none, choosing a device says so."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), local_rank) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def bring_up(device: torch.device, *, attention: bool) -> threading.Thread:
    """Begin to bring up the libraries of a GPU's products and, if asked, of its attention. To be joined before the
    first step, which takes over what the thread holds of them."""
    thread = threading.Thread(target=use_libraries, args=(device, attention), name="libraries", daemon=True)
    thread.start()
    return thread


def use_libraries(device: torch.device, with_attention: bool) -> None:
    """A small product, and a small attention with its gradient."""
    import torch

    from mgraph.runtime.attention import attention, attention_grad

    try:
        with torch.no_grad():
            x = torch.zeros(1, 1, SMALL, SMALL, dtype=torch.bfloat16, device=device)
            torch.matmul(x, x)
            if with_attention:
                out, lse = attention(x, x, x, scale=1.0, causal=True)
                attention_grad(x, x, x, x, out, lse, scale=1.0, causal=True)
    except RuntimeError:
        return  # The step meets it again, and says where.
