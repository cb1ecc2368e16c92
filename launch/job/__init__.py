"""Starting a job: on this machine (run), this machine's part of one (bpslaunch), and the scheduler's and the servers' processes (role)."""
