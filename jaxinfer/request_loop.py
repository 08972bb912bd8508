"""Who steps the engine, and who hears of what a step brought: any number of readers, on any thread."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from jaxinfer.engine import Engine
from jaxinfer.records import Record
from jaxinfer.request import Request, RequestOutput, Sequence


class RequestLoop:
    """Steps the engine while a reader waits. A step serves the requests of all readers; each hears of its own.

    `lock` is held by whoever uses the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.records: dict[Sequence, Record] = {}  # of requests that somebody reads

    def add(self, record: Record, request: Request) -> None:
        """Queues a request. Raises as `Engine.add`."""
        with self.lock:
            record.begin(self.engine.add(request))
            self.records.update((seq, record) for seq in record.sequences)

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort"; nothing happens if it has ended."""
        with self.lock:
            for seq in self.engine.abort(request_id):
                if seq in self.records:
                    self.records[seq].notify()

    async def stream(self, submit: Callable[[], list[Record]], single: bool) -> AsyncIterator[RequestOutput]:
        """Outputs as they grow, of the records that `submit` makes. Steps run in a thread.

        Raises:
          ValueError: `single`, and the one record has an error.
        """
        records: list[Record] = []
        try:
            await asyncio.to_thread(lambda: records.extend(submit()))
            if single and records[0].error is not None:
                raise ValueError(records[0].error)
            for record in records:
                if record.error is not None:
                    yield record.output()
            reader = self._attach(records)
            live = sum(not record.delivered for record in records)
            while live:
                outputs = await asyncio.to_thread(self._next_outputs, reader)
                live -= sum(output.finished for output in outputs)
                for output in outputs:
                    yield output
        finally:
            await asyncio.shield(asyncio.to_thread(self.leave, records))

    def _next_outputs(self, reader: deque[Record]) -> list[RequestOutput]:
        with self.lock:
            return [record.output() for record in self._next_changed(reader)]

    def advance(
        self, records: list[Record], on_finished: Callable[[], object] = lambda: None
    ) -> Iterator[Record]:
        """Steps until all records are finished; yields each that has changed. Aborts them if left early."""
        try:
            reader = self._attach(records)
            live = sum(not record.delivered for record in records)
            while live:
                for record in self._next_changed(reader):
                    if record.delivered:
                        live -= 1
                        on_finished()
                    yield record
        finally:
            self.leave(records)

    def _attach(self, records: list[Record]) -> deque[Record]:
        """Where records will be put when they change; those that have already are there."""
        with self.lock:
            reader = deque(record for record in records if record.changed)
            for record in records:
                record.reader = reader
                record.delivered = record.error is not None
            return reader

    def _next_changed(self, reader: deque[Record]) -> list[Record]:
        """Records that have changed since last asked; after a step, if none had. O(1) for each."""
        with self.lock:
            if not reader:
                self.step()
            changed = list(reader)
            reader.clear()
            for record in changed:
                record.changed, record.delivered = False, record.finished
            return changed

    def leave(self, records: list[Record]) -> None:
        """Nobody reads these any more: aborts what is unfinished."""
        with self.lock:
            for record in records:
                if not record.finished:
                    self.engine.abort(record.request_id)
                for seq in record.sequences:
                    self.records.pop(seq, None)

    def step(self) -> None:
        """One step of the engine, and its text into whichever records it belongs to."""
        with self.lock:
            try:
                advances = self.engine.step()
            except BaseException:  # every request has ended
                for record in self.records.values():
                    record.notify()
                raise
            for advance in advances:
                seq = advance.seq
                if seq not in self.records:
                    continue  # its reader has left
                record = self.records[seq]
                stop = record.take(seq)
                if stop is not None:
                    stop_string, num_tokens = stop
                    self.engine.finish(seq, "stop", stop_string, num_tokens)
                record.notify()
