"""The child process that runs one arm or one reference: ``python -m engine.worker``."""
