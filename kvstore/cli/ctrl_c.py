"""Ctrl-C as one line and exit code 130, at every moment of a program.

Apart from other signals because it is the first thing that a program imports, and so imports little itself.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # what signal wraps, without enumerations: those take most of the time up to here

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
AGAIN_S = 0.05


class _EndsAtOnce:
    """A handler that ends this program with one line."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, number: int, frame: FrameType | None) -> None:
        os.write(2, f"{self._program}: interrupted\n".encode())
        os._exit(INTERRUPTED)


def ends_at_once(program: str) -> None:
    """From now on Ctrl-C ends this program with one line and exit code 130, except within ``Raises``.

    For the time before a command begins and after it has ended: an exception in the middle of an import, or while the
    interpreter ends, is a traceback, or lost.  The last thing of all is that Ctrl-C does nothing any more: the command
    is done then, and has its own exit code.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a program that is to ignore it
        signal.signal(signal.SIGINT, _EndsAtOnce(program))
        # Python takes handlers down before modules: Ctrl-C after that would kill a program that has done its work.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


class Raises:
    """A context within which Ctrl-C raises KeyboardInterrupt, in a program that called ``ends_at_once``."""

    def __enter__(self) -> None:
        self._before, self._hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
        if isinstance(self._before, _EndsAtOnce):
            sys.unraisablehook = self._again
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if isinstance(self._before, _EndsAtOnce):
            signal.signal(signal.SIGINT, self._before)
            sys.unraisablehook = self._hook

    def _again(self, lost: sys.UnraisableHookArgs) -> None:
        """Hears of a KeyboardInterrupt where Python cannot raise it, such as in a finalizer: it comes again soon.

        As a signal to the main thread: it ends a call that waits there, which ``interrupt_main`` would not.
        """
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        import threading

        main = threading.main_thread().ident
        threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()
