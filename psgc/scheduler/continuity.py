"""What a scheduler's process leaves to the next one, and what the one before has left: the journal, of this job and no other.

Without a journal (a scheduler that was started by hand, or PSGC_ON_SCHEDULER_LOSS=stop) nothing is left: its death ends the job.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence

from psgc import __version__
from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.errors import PsgcError
from psgc.scheduler.journal import Journal
from psgc.scheduler.records import Began, Complete, Record, Sealed
from psgc.scheduler.sealing import SALT_BYTES, digest, seal, unseal
from psgc.transport.security.handshake import KEY_BYTES

logger = logging.getLogger(__name__)


class Continuity:
    """Of one job. again: this process has served another one. follows: another process has begun this one, or waited for it. records: what it had written down
    of a complete job. data_key: of the job's payload connections. returns: another process may follow this one though nobody listens meanwhile.

    Raises PsgcError for a journal that cannot be read, or is another job's."""

    def __init__(self, config: Config, again: bool) -> None:
        self._config, self._tokens = config, config.tokens
        self._journal = _journal_of(config)
        self.again, self.follows = again, False
        self.records: list[Record] = []
        self.data_key = secrets.token_bytes(KEY_BYTES)
        self.returns = bool(config.journal) and self._journal is not None
        if self._journal is None:
            return
        try:
            if again:
                self._journal.forget()
            self._take_up(self._journal)
        except PsgcError:
            self._journal.close()
            raise
        if not self.records:
            self._guarded(lambda journal: journal.begin([self._began()]))

    def _take_up(self, journal: Journal) -> None:
        if not journal.records:
            return
        began, *records = journal.records
        if not isinstance(began, Began):
            raise PsgcError(f"scheduler: the journal {journal.name} does not say whose it is; remove it")
        config = self._config
        found = f"of job {began.job} with {began.nodes} nodes and {began.servers} servers, written by psgc {began.version}"
        if (began.job, began.nodes, began.servers, began.version) != (config.job, config.nodes, config.servers, __version__):
            raise PsgcError(
                f"scheduler: the journal {journal.name} is {found}; this is job {config.job} with {config.nodes} nodes and {config.servers} servers, "
                f"psgc {__version__}; remove it if that job is over, or name another file (PSGC_JOURNAL)"
            )
        seals = began.seals
        for record in records:
            if isinstance(record, Sealed):
                seals = record.seals
        token, sealed = next(
            ((token, seals[of]) for token in config.tokens or ("",) if (of := digest(config.job, token)) in seals), ("", "")
        )
        if not sealed:
            raise PsgcError(f"scheduler: the journal {journal.name} is {found}, but its PSGC_TOKEN was another; set the same, or remove it")
        self.follows, self.again = True, began.again
        if any(isinstance(record, Complete) for record in records):
            self.data_key = unseal(config.job, token, sealed)
            self.records = [record for record in records if not isinstance(record, Sealed)]

    def keep(self, records: Sequence[Record], everything: Callable[[], Iterable[Record]]) -> None:
        """Write these down. everything: what the journal comes to, these included."""
        self._guarded(lambda journal: journal.append(records))
        if self._journal is not None and self._journal.grown:
            self.grown_to(everything())

    def rekey(self, tokens: tuple[str, ...]) -> None:
        """The job accepts these tokens from now on; another process may know only one of them."""
        self._tokens = tokens
        self._guarded(lambda journal: journal.append([Sealed(self._seals())]))

    def grown_to(self, records: Iterable[Record]) -> None:
        """Write the journal anew."""
        self._guarded(lambda journal: journal.begin([self._began(), *records]))

    def end(self) -> None:
        """The job is over: no process follows this one in it."""
        self._guarded(lambda journal: journal.remove())

    def close(self) -> None:
        """This process ends. Unless the job is over, another goes on from what is written down."""
        if self._journal is not None:
            self._journal.close()

    def _began(self) -> Began:
        config = self._config
        return Began(config.job, __version__, config.nodes, config.servers, self._seals(), self.again)

    def _seals(self) -> dict[str, str]:
        job = self._config.job
        return {digest(job, token): seal(job, token, self.data_key, secrets.token_bytes(SALT_BYTES)) for token in self._tokens or ("",)}

    def _guarded(self, write: Callable[[Journal], None]) -> None:
        """A disk that is full ends no job: the journal is given up, and nobody takes up what is old, or follows this process."""
        if self._journal is None:
            return
        try:
            write(self._journal)
        except OSError as error:
            self.returns = False
            Launcher(self._config.launcher).tell("unfollowed")
            logger.warning(
                "the journal %s cannot be written (%s): if this scheduler dies from now on, the job ends", self._journal.name, error
            )
            journal, self._journal = self._journal, None
            try:
                journal.forget()
            except OSError:
                logger.warning("the journal %s cannot be emptied, either: remove it", journal.name)
            journal.close()


def _journal_of(config: Config) -> Journal | None:
    if config.on_scheduler_loss != "restart":
        return None
    if config.journal:
        return Journal.at(config.journal)
    if len(config.journal_fds) == 2:
        return Journal([os.dup(fd) for fd in config.journal_fds], "that the launcher keeps (PSGC_JOURNAL_FDS)")
    return None
