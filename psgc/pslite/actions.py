"""The actions that the state machines of a ps-lite job return for the van: connections to make, and messages to send."""

from __future__ import annotations

from dataclasses import dataclass

from psgc.pslite.meta import Meta, Node


@dataclass(frozen=True, slots=True)
class Connect:
    """Make a connection to a node, in place of an earlier one to the same id."""

    node: Node


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message without data frames to the node with this id."""

    receiver: int
    meta: Meta


Action = Connect | Send
