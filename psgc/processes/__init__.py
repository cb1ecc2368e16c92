"""What processes and threads need: addresses, descriptors, queues between threads, waits and their reminders, checkpoints being written."""
