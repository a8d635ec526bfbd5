"""What a user starts: `python -m jobs.NAME`."""
