"""The wire protocol psgc/1 as pure code: no sockets, no clock. The format is in PROTOCOL.md beside this file."""
