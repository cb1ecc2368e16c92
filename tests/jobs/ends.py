"""A worker that joins the job, or not, and ends in the way that its argument names. Run by tests; loads no torch."""

from __future__ import annotations

import sys

from psgc.config import Config
from psgc.errors import JobFailed


def main(how: str) -> None:
    config = Config.from_env()
    odd = config.local_rank == 1
    if how == "import" and odd:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    if how == "absent" and odd:
        return
    from psgc.worker.cluster import ClusterSession

    try:
        session = ClusterSession.open(config)
        if how == "exit" and odd:
            session.close()
            sys.exit(3)
        if how == "leave" and odd:
            session.close()
            return
        session.barrier()
    except JobFailed as error:
        sys.exit(0 if error.told else "the launcher was not told")
    session.close()


if __name__ == "__main__":
    main(sys.argv[1])
