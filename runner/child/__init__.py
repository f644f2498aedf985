"""One engine process: spawned, listened to, ended."""
