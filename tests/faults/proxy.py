"""A TCP proxy that a test may slow down, stall, or have cut all its connections."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends RST
_CHUNK = 65536


class Proxy:
    """Carries bytes between whoever connects to `port` and a server on this machine.

    Attributes:
        target: port of the server; may be set later.
        delay: seconds that each piece waits, each way.
        held: pieces that a stall has held back.
        sent: bytes that have been carried to the server.
    """

    def __init__(self) -> None:
        self.target = 0
        self.delay = 0.0
        self.connections = self.held = self.sent = 0
        self._stalled_until = 0.0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, seconds: float) -> None:
        """Holds all bytes back for a while."""
        self._stalled_until = time.monotonic() + seconds

    def reset(self) -> int:
        """Cuts all connections with RST; returns how many there were."""
        pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair)
        return len(pairs)

    def close(self) -> None:
        """Stops listening and cuts all connections."""
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self.connections += 1
                pair = (near, far)
                self._pairs.add(pair)
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=self._carry, args=(source, sink, pair), daemon=True).start()

    def _carry(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        with suppress(OSError):
            while piece := source.recv(_CHUNK):
                time.sleep(self.delay)
                self.held += time.monotonic() < self._stalled_until
                while time.monotonic() < self._stalled_until:
                    time.sleep(0.05)
                sink.sendall(piece)
                self.sent += len(piece) * (source is pair[0])
        self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.discard(pair)
        for end in pair:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()
