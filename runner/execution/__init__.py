"""The order of jobs and process runs, and what came of each."""
