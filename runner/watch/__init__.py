"""What is seen from outside while a child runs: the lock, contention, samples."""
