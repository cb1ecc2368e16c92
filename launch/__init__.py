"""What people start: the command line, the launchers, doctor and the benches. The only part that reads argv and prints."""
