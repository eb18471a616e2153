"""What a request runs, independent of its API."""
