"""Every id of a job, in a temporary SQLite database: a small cache in memory, the rest on the disk."""

import hashlib
import sqlite3

CACHE_KIB = 1024


def temporary_database() -> sqlite3.Connection:
    """A private file that SQLite deletes when it is closed; written only once the cache is full."""
    database = sqlite3.connect("", isolation_level=None)
    for setting in (f"cache_size = -{CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
        database.execute(f"PRAGMA {setting}")
    return database


class Index:
    """Which line has which id, and where in the output its result stands."""

    def __init__(self) -> None:
        self._db = temporary_database()
        self._db.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, line INT, offset INT) WITHOUT ROWID")

    def add(self, key: str, line: int) -> int | None:
        """Takes in the id of a line; returns the line that has it already, if one has."""
        try:
            self._db.execute("INSERT INTO ids VALUES (?, ?, NULL)", (_digest(key), line))
        except sqlite3.IntegrityError:
            return self.line(key)
        return None

    def __contains__(self, key: str) -> bool:
        return self.line(key) is not None

    def claim(self, key: str, offset: int) -> bool:
        """Notes that the result of an id stands at byte `offset`. False if another offset has it."""
        self._db.execute("UPDATE ids SET offset = ? WHERE id = ? AND offset IS NULL", (offset, _digest(key)))
        return self.offset(key) == offset

    def line(self, key: str) -> int | None:
        """Which line has an id, None if none has."""
        row = self._db.execute("SELECT line FROM ids WHERE id = ?", (_digest(key),)).fetchone()
        return None if row is None else row[0]

    def offset(self, key: str) -> int | None:
        """Where the result of an id stands in the output, None while there is none."""
        row = self._db.execute("SELECT offset FROM ids WHERE id = ?", (_digest(key),)).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        self._db.close()


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
