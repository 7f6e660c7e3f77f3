"""The cache of compiled kernels: one folder for each key, renamed into place as a whole, checked at every read.

<root>/kernels/<key>/   kernel.cubin manifest.json source.py ptx ttgir SHA256SUMS
<root>/builds/          what each package holds: index.py
<root>/receipts/        what proves that a build has nothing to do: receipt.py
<root>/refusals/        plans whose machine code was refused: refusals.py
<root>/locks/, tmp/     empty while nobody builds
<root>/CACHEDIR.TAG     the mark without which nothing is written or removed: mark.py
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from attngen.cache_root import default_root, store_error
from attngen.compile.artifact import Artifact
from attngen.errors import StoreError
from attngen.store.entry import DamagedEntryError, files_of, read_checksums, read_entry, read_file, verify_entry
from attngen.store.files import sync_folder, write_folder, write_synced
from attngen.store.lock import Lock
from attngen.store.mark import FOLDER_MODE, FOLDERS, KEY, LOCK, PROBE, TEMPORARY, claim, sweep_marks
from attngen.store.trust import distrust

#: Seconds to wait for another process to build a kernel; a compile takes seconds.
LOCK_SECONDS = 600.0


class StoreWarning(UserWarning):
    """A cache entry was damaged, or could not be kept."""


@dataclass(frozen=True, slots=True)
class Damage:
    """An entry that differs from what was written, and the reason."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """An artifact and where it came from: ``cached``, ``built`` or, where it could not be kept, ``uncached``.

    ``problem`` says why it could not be kept.
    """

    artifact: Artifact
    origin: str
    problem: StoreError | None = None


class Store:
    """The compiled kernels below one folder, which need not exist. Any number of processes may share it."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()
        self._claimed = False

    def path(self, key: str) -> Path:
        """Return the folder of a key, whether it exists or not."""
        return self.root / "kernels" / key

    def read(self, key: str) -> tuple[Artifact | None, str | None]:
        """Return the kernel of a key without its texts, or None; and what is wrong with the entry, if it is damaged.

        Needs no lock and no writable folder.
        """
        folder = self.path(key)
        if not folder.is_dir():
            return None, None
        try:
            return read_entry(folder), None
        except (DamagedEntryError, ValueError) as damage:  # ValueError: a manifest that is no JSON
            return None, f"cache entry {folder} is damaged ({damage}); it is built again"

    def get(self, key: str) -> Artifact | None:
        """Return the kernel of a key without its texts, or None; a damaged entry counts as none, with a warning."""
        artifact, damage = self.read(key)
        if damage:
            warnings.warn(damage, StoreWarning, stacklevel=2)
        return artifact

    def text(self, key: str, name: str) -> str | None:
        """Return a text of an entry (``source.py``, ``ptx``, ``ttgir``), or None. StoreError if it is damaged."""
        folder = self.path(key)
        try:
            checksums = read_checksums(folder)
            return read_file(folder, name, checksums).decode() if name in checksums else None
        except DamagedEntryError as damage:
            raise StoreError(f"{folder}: {damage}; 'attngen build' makes it again") from None

    def all_keys(self) -> list[str]:
        """Return the keys of all entries, sorted, damaged ones included."""
        return [name for name in _names(self.root / "kernels") if KEY.fullmatch(name)]

    def verify(self) -> list[Damage]:
        """Check every file of every entry against its checksum and return what is damaged."""
        damages = []
        for key in self.all_keys():
            try:
                verify_entry(self.path(key))
            except (DamagedEntryError, ValueError) as damage:
                damages.append(Damage(key, str(damage)))
        return damages

    def put(self, key: str, artifact: Artifact) -> None:
        """Keep a kernel under its key, replacing any other entry there. The caller holds ``locked(key)``.

        It is written under another name, checked, and renamed as a whole: a reader sees all of it or none. Raises
        StoreError, and leaves nothing behind, where the folder is full or cannot be written.
        """
        temporary = self._temporary(key)
        try:
            self._make_folder("tmp")
            write_folder(temporary, files_of(artifact))
            verify_entry(temporary)
            final = self.path(key)
            self._make_folder("kernels")
            if final.exists():
                os.rename(final, self._temporary(key))  # whoever is reading it keeps its open files
            os.rename(temporary, final)
            sync_folder(final.parent)
        except OSError as error:
            raise store_error("write to the cache", self.root, error) from error
        except DamagedEntryError as damage:
            raise StoreError(
                f"{temporary} does not hold what was written to it: {damage}; is the disk sound?"
            ) from None
        finally:
            self._remove_temporaries(key)

    def fetch(self, key: str, build: Callable[[], Artifact], *, wait: bool = True) -> Fetched | None:
        """Return the kernel of a key; where there is none, or a damaged one, ``build`` it and keep it.

        Of many processes that ask for one key at once, one builds and the others wait for it and read; with
        ``wait=False`` None is returned instead, so that the caller can do other work first. A kernel that cannot
        be kept is returned all the same, with a warning. Raises StoreError where a process holds the key for
        longer than a compile can take or where others may write to the cache, and whatever ``build`` raises.
        """
        self.require_trusted()
        artifact, _ = self.read(key)
        if artifact is not None:
            return Fetched(artifact, "cached")
        with ExitStack() as stack:
            try:
                held = stack.enter_context(self.locked(key, wait=wait))
            except OSError as error:
                problem = store_error("lock the cache", self.root, error)
                warnings.warn(str(problem), StoreWarning, stacklevel=2)
                return Fetched(build(), "uncached", problem)
            if not held:
                return None
            # Another process may have built it since we looked; and now nobody is replacing it.
            artifact = self.get(key)
            return Fetched(artifact, "cached") if artifact is not None else self._build(key, build)

    def _build(self, key: str, build: Callable[[], Artifact]) -> Fetched:
        artifact = build()
        try:
            self.put(key, artifact)
        except StoreError as error:
            warnings.warn(str(error), StoreWarning, stacklevel=3)
            return Fetched(artifact, "uncached", error)
        return Fetched(artifact, "built")

    @contextmanager
    def locked(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of a key. Yields False, and holds nothing, without ``wait`` where another has it.

        Raises StoreError after a wait that no compile explains, and OSError where the folder cannot hold locks.
        """
        lock = Lock(self.root / "locks" / key)
        self._make_folder("locks")
        held = lock.acquire(LOCK_SECONDS if wait else 0.0)
        if not held and wait:
            raise _hung(lock.path)
        try:
            yield held
        finally:
            lock.release()

    def require_writable(self) -> None:
        """Raise StoreError if nothing can be written, before work is spent on what could not be kept."""
        try:
            self._make_folder("tmp")
            with self.locked(PROBE):
                self._temporary(PROBE).mkdir()
                self._remove_temporaries(PROBE)
        except OSError as error:
            raise store_error("write to the cache", self.root, error) from error

    def write(self, folder: str, name: str, data: bytes) -> None:
        """Replace a small file as a whole. Raises StoreError if it cannot be written."""
        key = f"{folder}.{name}"
        temporary = self._temporary(key)
        try:
            with self.locked(key):
                self._make_folder("tmp")
                self._make_folder(folder)
                try:
                    write_synced(temporary, data)
                    os.replace(temporary, self.root / folder / name)
                finally:
                    self._remove_temporaries(key)
        except OSError as error:
            raise store_error("write to the cache", self.root, error) from error

    def remove(self, key: str) -> None:
        """Remove an entry; nothing happens if there is none. Raises StoreError if it cannot be removed."""
        try:
            self._make_folder("tmp")
            with self.locked(key):
                if self.path(key).exists():
                    # Renamed first, so that nobody ever reads half an entry.
                    os.rename(self.path(key), self._temporary(key))
                self._remove_temporaries(key)
        except OSError as error:
            raise store_error("remove an entry of", self.root, error) from error

    def forget(self) -> None:
        """Remove what builds remember besides the kernels: indexes, receipts and refusals, damaged ones too.

        Raises StoreError, and removes nothing, where the folder is not a cache of attngen.
        """
        if not self.root.is_dir():
            return
        try:
            self._claim()
            for folder in ("builds", "receipts", "refusals"):
                for name in _names(self.root / folder):
                    path = self.root / folder / name
                    if FOLDERS[folder].fullmatch(name) and (path.is_symlink() or not path.is_dir()):
                        path.unlink(missing_ok=True)
        except OSError as error:
            raise store_error("empty the cache", self.root, error) from error

    def sweep(self) -> None:
        """Remove what killed processes left behind: temporary files and locks that nobody holds.

        Raises StoreError, and touches nothing, where the folder is not a cache of attngen.
        """
        if not self.root.is_dir():
            return
        try:
            self._claim()
            left = {key for name in _names(self.root / "tmp") if (key := _key_of_temporary(name))}
            left |= {name for name in _names(self.root / "locks") if LOCK.fullmatch(name)}
            for key in sorted(left):
                with self.locked(key, wait=False) as held:
                    if held:
                        self._remove_temporaries(key)
            sweep_marks(self.root)
        except OSError:
            pass  # a folder that cannot be written gathers nothing either

    def require_trusted(self) -> None:
        """Raise StoreError where anyone but this user and root could have written what would be run."""
        if reason := distrust(self.root):
            raise StoreError(reason)

    def _claim(self) -> None:
        if not self._claimed:
            self.require_trusted()
            claim(self.root)
            self._claimed = True

    def _make_folder(self, name: str) -> None:
        self._claim()
        (self.root / name).mkdir(FOLDER_MODE, exist_ok=True)

    def _temporary(self, key: str) -> Path:
        return self.root / "tmp" / f"{key}-{secrets.token_hex(6)}"

    def _remove_temporaries(self, key: str) -> None:
        """Remove the temporary files of a key whose lock we hold: nobody else writes any."""
        for name in _names(self.root / "tmp"):
            path = self.root / "tmp" / name
            if _key_of_temporary(name) != key:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _hung(path: Path) -> StoreError:
    return StoreError(f"{path} has been held for {LOCK_SECONDS:.0f} s; the process that holds it seems to hang")


def _key_of_temporary(name: str) -> str | None:
    """Return the key in the name of a temporary file of attngen, or None for any other name."""
    match = TEMPORARY.fullmatch(name)
    return match["key"] if match else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return []
