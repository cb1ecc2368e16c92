"""A process's keys of the control connections, by all tokens that its job has at present."""

from __future__ import annotations

import logging

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.processes.token_file import TokenFile
from psgc.transport.security.curve import ControlKeys, control_keys

logger = logging.getLogger(__name__)


class JobKeys:
    """tokens: the newest first, at least one. keys: of the tokens, in the order in which a member tries them, the oldest first: under that the scheduler
    listens. file: PSGC_TOKEN_FILE, or ""."""

    def __init__(self, job: int, tokens: tuple[str, ...], file: str = "") -> None:
        self._job, self._file = job, TokenFile(file)
        self.tokens = tokens
        self.keys = self._made()

    @classmethod
    def of(cls, config: Config) -> JobKeys | None:
        """None for a job without a token."""
        return cls(config.job, config.tokens, config.token_file) if config.tokens else None

    @property
    def token(self) -> str:
        """The oldest."""
        return self.tokens[-1]

    def read_again(self) -> bool:
        """Read the file if it is another than before. Returns whether the tokens are others. What cannot be read is reported, and changes nothing."""
        try:
            tokens = self._file.read_again()
        except ConfigError as error:
            logger.warning("%s; the tokens stay what they were", error)
            return False
        if tokens is None or tokens == self.tokens:
            return False
        logger.info("tokens read again tokens=%d", len(tokens))
        self.tokens = tokens
        self.keys = self._made()
        return True

    def _made(self) -> tuple[ControlKeys, ...]:
        found = (control_keys(self._job, token) for token in reversed(self.tokens))
        return tuple(keys for keys in found if keys is not None)


__all__ = ["JobKeys"]
