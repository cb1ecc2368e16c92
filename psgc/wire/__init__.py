"""The wire protocol psgc/2 as pure code: no sockets, no clock. The format is in PROTOCOL.md beside this file."""
