"""ps-lite's ZeroMQ van in Python, with BytePS's keys, commands and payloads: the wire of byteps 0.2.5.post15 (docs/pslite.md).

It has no authentication. Only PSGC_WIRE=pslite starts it, on sockets of its own.
"""

from psgc.pslite.kv import KVServer, KVWorker
from psgc.pslite.nodes import ALL, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP
from psgc.pslite.pairs import KVMeta, KVPairs
from psgc.pslite.postoffice import Postoffice
from psgc.pslite.settings import Settings

__all__ = ["ALL", "KVMeta", "KVPairs", "KVServer", "KVWorker", "Postoffice", "SCHEDULER_GROUP", "SERVER_GROUP", "Settings", "WORKER_GROUP"]
