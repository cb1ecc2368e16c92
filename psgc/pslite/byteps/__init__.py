"""BytePS's layer over ps-lite: keys, commands, registrations, compressed payloads, and the server."""
