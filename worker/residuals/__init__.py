"""What error feedback keeps between steps, and how it is saved and taken up again."""
