"""What is kept: files first, then the tracking store."""
