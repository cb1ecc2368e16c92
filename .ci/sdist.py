"""Packs an sdist again, so that the same sources give the same bytes: python .ci/sdist.py FILE.tar.gz. SOURCE_DATE_EPOCH is the time of all files.

setuptools keeps the files' own times, owners and modes, which differ from one checkout to the next.
"""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def packed(data: bytes, when: int) -> bytes:
    """The same members, sorted by name, with one time, no owner, and modes 644 and 755."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as old, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = when, 0, 0, "", "", {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(out.getvalue(), mtime=when)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".tar.gz"):
        sys.exit("sdist: expected one FILE.tar.gz")
    path = Path(sys.argv[1])
    path.write_bytes(packed(path.read_bytes(), int(os.environ.get("SOURCE_DATE_EPOCH", "0"))))
