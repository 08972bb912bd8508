"""Who steps the engine, and who hears of what a step brought: any number of readers, on any thread."""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from sys import is_finalizing

from jaxinfer.engine import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.programs import forks
from jaxinfer.request import Request, Sequence
from jaxinfer.text.records import Record

_loops: "weakref.WeakSet[RequestLoop]" = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a thread that had a lock is not here to release it."""
    for loop in list(_loops):
        loop.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class RequestLoop:
    """Steps the engine while a reader waits. A step serves the requests of all readers; each hears of its own.

    `lock` is held by whoever uses the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.records: dict[Sequence, Record] = {}  # of unfinished sequences that somebody reads
        self._left: deque[list[Record]] = deque()  # nobody reads these any more
        self._stepping = False
        self._closed = False
        _loops.add(self)

    def check_open(self) -> None:
        """Raises RuntimeError after `close`, and in a forked process."""
        forks.check()
        if self._closed:
            raise RuntimeError("this LLM is closed, and its device memory is freed; make a new one")

    def close(self) -> bool:
        """Ends what is unfinished with an error, and refuses what comes. False if there is nothing left to free."""
        if forks.is_forked():  # the memory is the parent's
            return False
        with self.lock:
            self._fail("the LLM was closed before this request had finished")
            was_open, self._closed = not self._closed, True
            return was_open

    def add(self, record: Record, request: Request) -> None:
        """Queues a request. Raises as `Engine.add`."""
        with self.lock:
            self.check_open()
            sequences = self.engine.add(request)
            record.begin(sequences)
            self.records.update((seq, record) for seq in sequences)

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort"; nothing happens if it has ended."""
        with self.lock:
            for seq in self.engine.abort(request_id):
                record = self.records.pop(seq, None)
                if record is not None:
                    record.take(seq)  # the text that was held back
                    record.notify()

    async def stream(self, submit: Callable[[], list[Record]], single: bool) -> AsyncIterator[RequestOutput]:
        """Outputs as they grow, of the records that `submit` makes. Steps run in a thread.

        Raises:
          ValueError: `single`, and the one record has an error.
        """
        records: list[Record] = []
        # Shielded, since a thread goes on when its task is cancelled: what it queues has to be known.
        submitted = asyncio.ensure_future(asyncio.to_thread(lambda: records.extend(submit())))

        async def leave() -> None:
            await asyncio.gather(submitted, return_exceptions=True)
            await asyncio.to_thread(self.leave, records)

        try:
            await asyncio.shield(submitted)
            if single and records[0].error is not None:
                raise ValueError(records[0].error)
            outputs = Outputs(self, records)
            while batch := await asyncio.to_thread(outputs.take):
                for output in batch:
                    yield output
        finally:
            await asyncio.shield(leave())

    def run(self, records: list[Record], on_finished: Callable[[], object]) -> None:
        """Steps until all records are finished."""
        reader = self._attach(records)
        live = sum(not record.delivered for record in records)
        while live:
            for record in self._next_changed(reader):
                if record.delivered:
                    live -= 1
                    on_finished()

    def _attach(self, records: list[Record]) -> deque[Record]:
        """Where records will be put when they change; those that have already are there."""
        with self.lock:
            reader = deque(record for record in records if record.changed)
            for record in records:
                record.reader = reader
                record.delivered = record.error is not None and not record.changed
            return reader

    def _next_outputs(self, reader: deque[Record]) -> list[RequestOutput]:
        with self.lock:
            return [record.output() for record in self._next_changed(reader)]

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

    def leave(self, records: list[Record], *, wait: bool = True) -> None:
        """Nobody reads these any more: aborts what is unfinished.

        Without `wait` (finalizers, which run on any thread and in the middle of anything) the next call or step
        does so if the engine is in use.
        """
        self._left.append(records)
        if self.lock.acquire(blocking=wait):
            try:
                if not self._stepping:
                    self._abort_left()
            finally:
                self.lock.release()

    def _abort_left(self) -> None:
        while self._left:
            for record in self._left.popleft():
                if not record.finished:
                    self.engine.abort(record.request_id)
                    record.notify()  # a reader may be waiting on another thread
                for seq in record.sequences:
                    self.records.pop(seq, None)
        if not self._closed and not forks.is_forked():
            self.engine.drain()

    def step(self) -> None:
        """One step of the engine, and its text into whichever records it belongs to.

        Whatever is raised here ends every request: the others' readers find it in the `error` of their records.
        """
        with self.lock:
            self.check_open()
            self._abort_left()
            self._stepping = True
            try:
                for advance in self.engine.step():
                    seq = advance.seq
                    if seq not in self.records:
                        continue  # its reader has left
                    record = self.records[seq]
                    stop = record.take(seq)
                    if stop is not None:
                        stop_string, num_tokens = stop
                        self.engine.finish(seq, "stop", stop_string, num_tokens)
                    if seq.finish_reason is not None:
                        del self.records[seq]
                    if seq.error is not None:
                        self._end_with_error(record, seq)
                    record.notify()
            except BaseException as error:
                self._fail(f"a step failed: {type(error).__name__}: {error}")
                raise
            finally:
                self._stepping = False

    def _end_with_error(self, record: Record, seq: Sequence) -> None:
        """One sample has failed: its request ends, with the other samples as far as they have come."""
        record.error = seq.error if len(record.sequences) == 1 else f"sample {seq.index}: {seq.error}"
        self.abort(record.request_id)

    def _fail(self, message: str) -> None:
        """Ends all that is unfinished with an error."""
        failed = dict.fromkeys(self.records.values())
        self.records.clear()
        for record in failed:
            self.engine.abort(record.request_id)
            record.error = message
            record.notify()


class Outputs(Iterator[RequestOutput]):
    """Outputs of records, each whenever it has changed. Closing or dropping it aborts what is unfinished."""

    def __init__(self, loop: RequestLoop, records: list[Record]) -> None:
        self._loop, self._records = loop, records
        self._reader = loop._attach(records)
        # Outputs not handed on yet: first those of prompts that were refused.
        self._ready = deque(record.output() for record in records if record.delivered)
        self._live = len(records) - len(self._ready)

    def take(self) -> list[RequestOutput]:
        """The next outputs, after a step if there were none; none at the end."""
        while not self._ready and self._live > 0:
            try:
                # An output is made together with the note that it was delivered: a request ends once.
                self._ready.extend(self._loop._next_outputs(self._reader))
            except BaseException:
                self.close()
                raise
            self._live -= sum(output.finished for output in self._ready)
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def __next__(self) -> RequestOutput:
        if not self._ready:
            self._ready.extend(self.take())
        if not self._ready:
            self.close()
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the iteration. Its requests that are unfinished end with finish_reason "abort"."""
        self._loop.leave(self._records)
        self._records, self._live = [], 0
        self._ready.clear()

    def __del__(self) -> None:
        if not is_finalizing():  # there is no engine left then that could abort anything
            self._loop.leave(self._records, wait=False)
