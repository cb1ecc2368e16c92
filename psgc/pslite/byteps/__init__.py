"""What BytePS puts into ps-lite's messages: keys, commands, registrations, compressed payloads, and its server's part."""
