"""A TCP proxy that makes a connection slow or breaks it: latency and loss, where the kernel cannot give them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Weather:
    """What the proxy does to each direction of each connection; may be changed at any time.

    Attributes:
        delay_s: every byte comes so much later.
        stall_s, stall_chance: a piece waits so much longer, as one that was lost and sent again.
        cut_after: a connection is reset after so many bytes of one direction; 0: never.
    """

    delay_s: float = 0.0
    stall_s: float = 0.0
    stall_chance: float = 0.0
    cut_after: int = 0


class Proxy:
    """Listens on (host, port) and passes on to the same port of `target`. Runs in a thread; a context manager."""

    def __init__(self, host: str, target: str, ports: list[int], weather: Weather, seed: int = 1) -> None:
        self._host, self._target, self._ports = host, target, ports
        self.weather = weather
        self.cuts = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        while passing := asyncio.all_tasks(self._loop):
            for task in passing:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*passing, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as servers:
            for port in self._ports:
                await servers.enter_async_context(
                    await asyncio.start_server(lambda r, w, port=port: self._pass(r, w, port), self._host, port)  # type: ignore[misc]
                )
            self._ready.set()
            await self._stop.wait()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self._target, port)
            both = (writer, far_writer)
            await asyncio.gather(self._one_way(reader, far_writer, both), self._one_way(far_reader, writer, both))

    async def _one_way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, both: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        """Pieces in order, each of them late; reading goes on meanwhile, so that only latency grows."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        sending = asyncio.ensure_future(self._send(pieces, writer, both))
        try:
            while data := await reader.read(1 << 16):
                await pieces.put((self._loop.time() + self.weather.delay_s, data))
            await pieces.put((0.0, b""))
            await sending
        except OSError:
            _abort(both)
        finally:
            sending.cancel()

    async def _send(
        self,
        pieces: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        sent = 0
        try:
            while True:
                due, data = await pieces.get()
                if not data:
                    writer.write_eof()
                    return
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                weather = self.weather
                if self._random.random() < weather.stall_chance:
                    await asyncio.sleep(weather.stall_s)
                writer.write(data)
                await writer.drain()
                sent += len(data)
                if weather.cut_after and sent >= weather.cut_after:
                    self.cuts += 1
                    _abort(both)
                    return
        except OSError:
            _abort(both)


def _abort(both: tuple[asyncio.StreamWriter, ...]) -> None:
    for writer in both:
        writer.transport.abort()


@contextlib.contextmanager
def proxied(host: str, target: str, ports: list[int], weather: Weather) -> Iterator[Proxy]:
    with Proxy(host, target, ports, weather) as made:
        yield made
